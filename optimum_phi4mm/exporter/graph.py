"""Surgery on captured graphs: layers put in their place, transposed weights, the contract's names."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..checkpoint import leaf_from_native


__all__ = [
    "SLOT",
    "TRANSPOSED",
    "finish",
    "name_initializers",
    "name_inputs_and_outputs",
    "place_layers",
    "store_transposed",
]

# Ends the name of a weight that is stored with its two axes exchanged.
TRANSPOSED = ".transposed"

# Domain and operator of the node that stands for a stack of layers during capture.
SLOT = ("optimum_phi4mm", "Layers")


def store_transposed(graph: ir.Graph) -> None:
    """Store a weight that is only used transposed in that layout: a Transpose per load costs seconds."""
    for name, value in list(graph.initializers.items()):
        consumers = [usage.node for usage in value.uses()]
        if value.const_value is not None or not consumers:
            continue
        if not all(
            node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0]
            for node in consumers
        ):
            continue
        value.name = name + TRANSPOSED
        value.shape = ir.Shape(list(value.shape or ())[::-1])
        for node in consumers:
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            graph.remove(node, safe=True)


def place_layers(graph: ir.Graph, layer: ir.Graph, path: str, count: int) -> None:
    """Replace the slot by `count` copies of `layer` with weights of their own and shared constants."""
    (slot,) = (node for node in graph if (node.domain, node.op_type) == SLOT)
    num_state = len(layer.outputs) - 1
    hidden, *rest = (value for value in slot.inputs if value is not None)
    states, shared = rest[: count * num_state], rest[count * num_state :]

    constants = {}
    for name, value in list(layer.initializers.items()):
        if value.const_value is not None:
            shared_name = f"{path}.{name}"
            constant = ir.Value(
                name=shared_name, shape=value.shape, type=value.type, const_value=value.const_value
            )
            graph.initializers[shared_name] = constants[name] = constant

    for index in range(count):
        clone = layer.clone()
        prefix = f"{path}.{index}."
        own = [hidden, *states[index * num_state : (index + 1) * num_state], *shared]
        for parameter, argument in zip(list(clone.inputs), own, strict=True):
            ir.convenience.replace_all_uses_with(parameter, argument)
        for name, value in list(clone.initializers.items()):
            clone.initializers.pop(name)
            if name in constants:
                ir.convenience.replace_all_uses_with(value, constants[name])
            else:
                value.name = prefix + name
                graph.initializers[value.name] = value
        hidden, *new_state = clone.outputs
        nodes = list(clone)
        clone.outputs.clear()
        clone.remove(nodes)
        for node in nodes:
            node.name = prefix + (node.name or "node")
            for output in node.outputs:
                output.name = f"{prefix}{output.name}"
        graph.insert_before(slot, nodes)
        for position, value in enumerate(new_state):
            old = slot.outputs[1 + index * num_state + position]
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    ir.convenience.replace_all_uses_with(slot.outputs[0], hidden, replace_graph_outputs=True)
    graph.remove(slot, safe=True)


def name_inputs_and_outputs(graph: ir.Graph, config: Any) -> None:
    """Give inputs and outputs the contract's names and axes, and optional inputs their default."""
    for value, (name, axes) in zip(graph.inputs, config.inputs.items(), strict=True):
        value.name = name
        value.shape = _with_names(value.shape, axes)
        if name in config.defaults:
            value.const_value = ir.tensor(config.defaults[name].numpy(), name=name)
            graph.initializers[name] = value
    for value, (name, axes) in zip(graph.outputs, config.outputs.items(), strict=True):
        value.name = name
        value.shape = _with_names(value.shape, axes)
    # What the export traced as one row of gates or one prompt length is neither: ONNX Runtime infers shapes
    # itself, and a stale one makes it plan a buffer of the wrong size.
    known = {*graph.inputs, *graph.outputs, *graph.initializers.values()}
    for node in graph.all_nodes():
        for output in node.outputs:
            if output not in known:
                output.shape = None


def _with_names(shape: ir.Shape | None, axes: dict[int, str]) -> ir.Shape:
    return ir.Shape([axes.get(axis, size) for axis, size in enumerate(shape or ())])


def name_initializers(graph: ir.Graph, prefix: str) -> None:
    """Give weights their canonical names, under the component's prefix."""
    for name, value in list(graph.initializers.items()):
        if value.const_value is None:
            stem = name.removesuffix(TRANSPOSED)
            value.name = leaf_from_native(f"{prefix}.{stem}") + name.removeprefix(stem)


def finish(model: ir.Model) -> None:
    """Leave no trace of the capture: source lines and paths, unused nodes, names that two values share."""
    for step in (
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedOpsetsPass(),
        common_passes.ClearMetadataAndDocStringPass(),
        common_passes.NameFixPass(),
    ):
        step(model)
    model.producer_name, model.producer_version = "optimum-phi4mm", None
