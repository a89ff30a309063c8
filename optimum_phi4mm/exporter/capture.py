"""A component becomes a graph: captured on the meta device, its layer once, then the layer placed as often as it runs.

The weights take no part: initialisers come out with a type and a shape and no value, under their canonical names.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnxscript import optimizer
from torch import Tensor, nn

from ..checkpoint import leaf_from_native
from ..components.stack import LayerStack
from ..errors import ExportError


__all__ = ["TRANSPOSED", "capture", "derived_buffers"]

# Ends the name of a weight that is stored with its two axes exchanged.
TRANSPOSED = ".transposed"

_SLOT = ("optimum_phi4mm", "Layers")


class _LayerReached(Exception):
    """Carries the shapes of a layer's arguments out of a run that need not go on."""

    def __init__(self, arguments: list[Tensor]) -> None:
        self.arguments = arguments


class _Caller(nn.Module):
    """Calls a module with one collection of inputs; torch.export wants a class whose forward it can read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: dict[str, Any] | list[Tensor]) -> tuple[Tensor, ...]:
        outputs = self.module(**inputs) if isinstance(inputs, dict) else self.module(*inputs)
        return tuple(outputs.values()) if isinstance(outputs, dict) else outputs


def capture(component: nn.Module, config: Any, *, opset: int, fold_constants: bool = True, **shapes: int) -> ir.Model:
    """Capture one component.

    Args:
        component: one of the four components, on the meta device but for its derived buffers.
        config: its OnnxConfig: dummy inputs, axes, defaults, patcher.
        opset: ONNX opset version of the graph.
        fold_constants: whether onnxscript's optimiser runs over the graph.
        shapes: sizes of the dummy inputs, by Optimum's names (`batch_size`, `sequence_length`, ...).

    Returns:
        The model with the contract's inputs, outputs and axes. Weights are initialisers without a value.
    """
    dummies = _shapes_of(config.generate_dummy_inputs(framework="pt", **shapes), config.static_shapes)
    stacks = [module for module in component.modules() if isinstance(module, LayerStack)]
    with _quiet_exporters(), config.patch_model_for_export(component), _buffers_on_meta(component):
        if not stacks:
            model = _export(component, dummies, _dynamic_axes(dummies, config), opset)
            _optimise(model, fold_constants)
        else:
            (stack,) = stacks
            (path,) = (name for name, module in component.named_modules() if module is stack)
            model = _capture_with_layers(component, config, stack, path, dummies, opset, fold_constants)
    _name_inputs_and_outputs(model.graph, config)
    _store_transposed(model.graph)
    _name_initializers(model.graph, component, config)
    _finish(model)
    return model


def derived_buffers(component: nn.Module) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds and the config determines (position table, rotary frequencies), by name."""
    found = {}
    for prefix, module in component.named_modules():
        for name in module._non_persistent_buffers_set:
            found[f"{prefix}.{name}"] = module._buffers[name]
    return found


def _capture_with_layers(
    component: nn.Module,
    config: Any,
    stack: LayerStack,
    path: str,
    dummies: dict[str, Any],
    opset: int,
    fold_constants: bool,
) -> ir.Model:
    """Capture the component with one node in its layers' place, then one layer, and put the layers there."""

    def stop_at_layer(_: LayerStack, hidden: Tensor, states: Sequence, shared: Sequence) -> Any:
        raise _LayerReached([hidden, *(states[0] if states else ()), *shared])

    arguments: list[Tensor] = []
    with stack.run_with(stop_at_layer), torch.no_grad():
        try:
            component(**dummies)
        except _LayerReached as reached:
            arguments = reached.arguments

    axes: list[dict[int, Any]] = []

    def slot(_: LayerStack, hidden: Tensor, states: Sequence, shared: Sequence) -> tuple[Tensor, list[Tensor]]:
        first = [hidden, *(states[0] if states else ()), *shared]
        axes[:] = [
            {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(x.shape) if isinstance(size, torch.SymInt)}
            for x in first
        ]
        flat = [x for state in states for x in state]
        # A layer's new key and value are its old ones and as many more as there are hidden states.
        grown = [(*x.shape[:2], x.shape[2] + hidden.shape[1], x.shape[3]) for x in flat]
        outputs = torch.onnx.ops.symbolic_multi_out(
            "::".join(_SLOT),
            [hidden, *flat, *shared],
            dtypes=[x.dtype for x in (hidden, *flat)],
            shapes=[hidden.shape, *grown],
            version=1,
        )
        outputs = [x.to(hidden.device) for x in outputs]
        return outputs[0], outputs[1:]

    with stack.run_with(slot):
        model = _export(component, dummies, _dynamic_axes(dummies, config), opset)
    layer = _export(stack[0], arguments, axes, opset)
    _optimise(model, fold_constants)
    _optimise(layer, fold_constants)
    _store_transposed(layer.graph)
    _place_layers(model.graph, layer.graph, path, len(stack))
    return model


def _export(module: nn.Module, inputs: Any, axes: Any, opset: int) -> ir.Model:
    """One module to an ir.Model; every axis asked for is dynamic in it, or torch.export fails."""
    program = torch.export.export(_Caller(module), (inputs,), dynamic_shapes=(axes,), strict=False)
    onnx_program = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=opset, verbose=False)
    model = onnx_program.model
    version = model.opset_imports[""]
    if version != opset:
        raise ExportError(f"opset {opset} was asked for, but torch.onnx gives {version}: choose another --opset")
    for name, value in list(model.graph.initializers.items()):
        if name.startswith("module."):
            value.const_value = None  # a meta tensor, which the optimiser would try to fold
            value.name = name.removeprefix("module.")
    return model


@contextlib.contextmanager
def _quiet_exporters() -> Iterator[None]:
    """Keep the exporters from telling that torchvision is absent and that weights have no value."""
    levels = {log: log.level for log in map(logging.getLogger, ("torch.onnx", "onnx_ir"))}
    for log in levels:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def _shapes_of(inputs: Any, static_shapes: dict[str, tuple[int, ...]]) -> Any:
    """The dummy inputs' shapes without their values."""

    def on_meta(name: str, x: Any) -> Any:
        if isinstance(x, list):
            return [on_meta(name, item) for item in x]
        return torch.empty(static_shapes.get(name, x.shape), dtype=x.dtype, device="meta")

    return {name: on_meta(name, x) for name, x in inputs.items()}


def _dynamic_axes(inputs: dict[str, Any], config: Any) -> dict[str, Any]:
    """The config's axes in torch.export's form; an input that is one long at capture has none."""
    by_name = config.inputs

    def axes(name: str, x: Any) -> Any:
        if isinstance(x, list):
            return [axes(name, item) for item in x]
        if name in config.static_shapes:
            return None
        # Inputs of a list share the axes of its first: `past_key_values` stands for `past_key_values.0.key` and on.
        found = by_name.get(name) or next((value for key, value in by_name.items() if key.startswith(f"{name}.")), {})
        return {axis: torch.export.Dim.DYNAMIC for axis in found}

    return {name: axes(name, x) for name, x in inputs.items()}


@contextlib.contextmanager
def _buffers_on_meta(component: nn.Module) -> Iterator[None]:
    """Move derived buffers to the meta device for the capture; they are bound like weights afterwards."""
    kept = []
    for module in component.modules():
        for name in module._non_persistent_buffers_set:
            kept.append((module, name, module._buffers[name]))
            module._buffers[name] = module._buffers[name].to("meta")
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def _optimise(model: ir.Model, fold_constants: bool) -> None:
    if fold_constants:
        optimizer.optimize_ir(model)
    else:
        common_passes.InlinePass()(model)
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _store_transposed(graph: ir.Graph) -> None:
    """Store a weight that is only ever used transposed in that layout: 156 Transposes cost the vision tower seconds."""
    for name, value in list(graph.initializers.items()):
        consumers = [usage.node for usage in value.uses()]
        if value.const_value is not None or not consumers:
            continue
        if not all(
            node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [1, 0] for node in consumers
        ):
            continue
        value.name = name + TRANSPOSED
        value.shape = ir.Shape(reversed(value.shape))
        for node in consumers:
            ir.convenience.replace_all_uses_with(node.outputs[0], value)
            graph.remove(node, safe=True)


def _place_layers(graph: ir.Graph, layer: ir.Graph, path: str, count: int) -> None:
    """Replace the slot by `count` copies of `layer`, each with its own weights and all with the same constants."""
    (slot,) = (node for node in graph if (node.domain, node.op_type) == _SLOT)
    num_state = len(layer.outputs) - 1
    hidden, *rest = slot.inputs
    states, shared = rest[: count * num_state], rest[count * num_state :]

    constants = {}
    for name, value in list(layer.initializers.items()):
        if value.const_value is not None:
            constant = ir.Value(name=f"{path}.{name}", shape=value.shape, type=value.type, const_value=value.const_value)
            graph.initializers[constant.name] = constant
            constants[name] = constant

    for index in range(count):
        clone = layer.clone()
        prefix = f"{path}.{index}."
        own = [hidden, *states[index * num_state : (index + 1) * num_state], *shared]
        for parameter, argument in zip(clone.inputs, own, strict=True):
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
                output.name = prefix + output.name
        graph.insert_before(slot, nodes)
        for position, value in enumerate(new_state):
            old = slot.outputs[1 + index * num_state + position]
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    ir.convenience.replace_all_uses_with(slot.outputs[0], hidden, replace_graph_outputs=True)
    graph.remove(slot, safe=True)


def _name_inputs_and_outputs(graph: ir.Graph, config: Any) -> None:
    """Give inputs and outputs the contract's names and axes, and optional inputs their default."""
    for value, (name, axes) in zip(graph.inputs, config.inputs.items(), strict=True):
        value.name = name
        value.shape = ir.Shape(axes.get(axis, size) for axis, size in enumerate(value.shape))
        if name in config.defaults:
            value.const_value = ir.tensor(config.defaults[name].numpy(), name=name)
            graph.initializers[name] = value
    for value, (name, axes) in zip(graph.outputs, config.outputs.items(), strict=True):
        value.name = name
        value.shape = ir.Shape(axes.get(axis, size) for axis, size in enumerate(value.shape))
    # What the export traced as one row of gates or one prompt length is neither: ONNX Runtime infers shapes itself,
    # and a stale one makes it plan a buffer of the wrong size.
    known = {*graph.inputs, *graph.outputs, *graph.initializers.values()}
    for node in graph.all_nodes():
        for output in node.outputs:
            if output not in known:
                output.shape = None


def _name_initializers(graph: ir.Graph, component: nn.Module, config: Any) -> None:
    """Give weights their canonical names, under the component's prefix."""
    for name, value in list(graph.initializers.items()):
        if value.const_value is None:
            stem = name.removesuffix(TRANSPOSED)
            value.name = leaf_from_native(f"{config.PREFIX}.{stem}") + name.removeprefix(stem)


def _finish(model: ir.Model) -> None:
    """Leave no trace of the capture: source lines and paths, unused nodes, names that two values share."""
    for step in (
        common_passes.RemoveUnusedNodesPass(),
        common_passes.RemoveUnusedOpsetsPass(),
        common_passes.ClearMetadataAndDocStringPass(),
        common_passes.TopologicalSortPass(),
        common_passes.NameFixPass(),
    ):
        step(model)
    model.producer_name, model.producer_version = "optimum-phi4mm", None
