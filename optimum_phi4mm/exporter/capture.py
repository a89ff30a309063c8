"""A component becomes a graph: captured on the meta device, its layer once, then the layer placed as often as
it runs.

The weights take no part: initialisers come out with a type and a shape and no value, under their canonical
names.
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

from ..components.stack import LayerStack
from ..errors import ExportError
from .graph import (
    SLOT,
    finish,
    name_initializers,
    name_inputs_and_outputs,
    place_layers,
    store_transposed,
)


__all__ = ["capture", "derived_buffers"]


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


def capture(component: nn.Module, config: Any, *, opset: int, fold_constants: bool = True) -> ir.Model:
    """Capture one component.

    Args:
        component: one of the four components, on the meta device but for its derived buffers.
        config: its OnnxConfig: dummy inputs, axes, defaults, patcher.
        opset: ONNX opset version of the graph.
        fold_constants: whether onnxscript's optimiser runs over the graph.

    Returns:
        The model with the contract's inputs, outputs and axes. Weights are initialisers without a value.
    """
    inputs = config.generate_dummy_inputs(framework="pt", **config.capture_shapes)
    dummies = _shapes_of(inputs, config.static_shapes)
    stacks = [module for module in component.modules() if isinstance(module, LayerStack)]
    with _quiet_exporters(), config.patch_model_for_export(component), _buffers_on_meta(component):
        if not stacks:
            model = _export(component, dummies, _dynamic_axes(dummies, config), opset)
            _optimise(model, fold_constants)
        else:
            (stack,) = stacks
            (path,) = (name for name, module in component.named_modules() if module is stack)
            model = _capture_with_layers(component, config, stack, path, dummies, opset, fold_constants)
    name_inputs_and_outputs(model.graph, config)
    store_transposed(model.graph)
    name_initializers(model.graph, config.PREFIX)
    finish(model)
    return model


def derived_buffers(component: nn.Module) -> dict[str, Tensor]:
    """Buffers that the config determines and no checkpoint holds (position table, rotary), by name."""
    return {
        f"{prefix}.{name}": module.get_buffer(name)
        for prefix, module in component.named_modules()
        for name in module._non_persistent_buffers_set
    }


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

    def slot(
        _: LayerStack, hidden: Tensor, states: Sequence, shared: Sequence
    ) -> tuple[Tensor, list[Tensor]]:
        first = [hidden, *(states[0] if states else ()), *shared]
        axes[:] = [
            {
                axis: torch.export.Dim.DYNAMIC
                for axis, size in enumerate(x.shape)
                if isinstance(size, torch.SymInt)
            }
            for x in first
        ]
        flat = [x for state in states for x in state]
        # A layer's new key and value are its old ones and as many more as there are hidden states.
        grown = [(*x.shape[:2], x.shape[2] + hidden.shape[1], x.shape[3]) for x in flat]
        outputs = torch.onnx.ops.symbolic_multi_out(
            "::".join(SLOT),
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
    store_transposed(layer.graph)
    place_layers(model.graph, layer.graph, path, len(stack))
    return model


def _export(module: nn.Module, inputs: Any, axes: Any, opset: int) -> ir.Model:
    """One module to an ir.Model; every axis asked for is dynamic in it, or torch.export fails."""
    program = torch.export.export(_Caller(module), (inputs,), dynamic_shapes=(axes,), strict=False)
    onnx_program = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=opset, verbose=False)
    assert onnx_program is not None  # None is for exports to a file
    model = onnx_program.model
    version = model.opset_imports[""]
    if version != opset:
        raise ExportError(
            f"opset {opset} was asked for, but torch.onnx gives {version}: choose another --opset"
        )
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
        # Inputs of a list share the axes of its first: `past_key_values` stands for `past_key_values.0.key`
        # and on.
        found: dict[int, str] = by_name.get(name) or next(
            (value for key, value in by_name.items() if key.startswith(f"{name}.")), {}
        )
        return dict.fromkeys(found, torch.export.Dim.DYNAMIC)

    return {name: axes(name, x) for name, x in inputs.items()}


@contextlib.contextmanager
def _buffers_on_meta(component: nn.Module) -> Iterator[None]:
    """Move derived buffers to the meta device for the capture; they are bound like weights afterwards."""
    kept = []
    for module in component.modules():
        for name in module._non_persistent_buffers_set:
            kept.append((module, name, module.get_buffer(name)))
            module._buffers[name] = module.get_buffer(name).to("meta")
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
