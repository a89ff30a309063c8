"""Validation: each written model against its torch component, its weights in memory a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from optimum.utils import logging
from torch import Tensor, nn

from ..checkpoint import Checkpoint, LoraAdapter, leaf_from_native
from ..components.decoder import GATE_COLUMNS
from ..components.stack import LayerStack
from ..errors import ValidationError
from .binding import bound_tensor
from .configs import Phi4MMDecoderOnnxConfig, Phi4MMOnnxConfig
from .graph import TRANSPOSED
from .package import PackagedModel


__all__ = ["validate"]

logger = logging.get_logger(f"optimum.{__name__}")  # below the logger that Optimum configures

_STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def validate(
    model: PackagedModel,
    component: nn.Module,
    config: Any,
    checkpoint: Checkpoint,
    folded: Mapping[str, LoraAdapter],
    *,
    atol: float | None = None,
    **shapes: int,
) -> dict[str, float] | None:
    """Run a written model and its torch component on the same dummy inputs.

    The component computes in float32 with the weights as they are stored; its adapters are never folded, so
    that a folded weight is compared with what it stands for.

    Args:
        model: the written model.
        component: its torch component, on the meta device.
        config: its OnnxConfig.
        checkpoint: the weights.
        folded: adapters that were folded into the written weights.
        atol: largest absolute difference accepted; None: relative to the output's largest magnitude, by float
            type.
        shapes: sizes of the dummy inputs.

    Returns:
        The largest absolute difference per output. None for bfloat16, which ONNX Runtime's CPU provider can't
        run: there every stored weight is compared with the checkpoint instead.

    Raises:
        ValidationError: names model, outputs and differences, or the stored weight that is wrong.
    """
    logger.info(f"Validating {model.path.name}...")
    if config.float_dtype == "bf16":
        _check_stored_weights(model, checkpoint, folded)
        logger.warning(
            f"{model.path.name}: stored weights equal the checkpoint's; outputs were not run, because ONNX "
            "Runtime's CPU provider has no bfloat16 kernels"
        )
        return None
    every_input = config.generate_dummy_inputs(framework="pt", **shapes)
    runs = [every_input]
    if config.defaults:  # the plain contract: one item, and none of the optional inputs
        runs.append(
            {name: _first(value) for name, value in every_input.items() if name not in config.defaults}
        )
    session = _session(model)
    differences: dict[str, float] = {}
    for inputs in runs:
        expected = _run_component(component, config, checkpoint, folded, {**config.defaults, **inputs})
        found = _run_model(session, config, inputs)
        for name, difference in _compare(model, config, expected, found, atol).items():
            differences[name] = max(difference, differences.get(name, 0.0))
    return differences


def _first(value: Any) -> Any:
    return [item[:1] for item in value] if isinstance(value, list) else value[:1]


def _run_component(
    component: nn.Module,
    config: Any,
    checkpoint: Checkpoint,
    folded: Mapping[str, LoraAdapter],
    inputs: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The torch component's outputs, float32, by name."""
    inputs = {name: _to_float32(value) for name, value in inputs.items()}
    if isinstance(config, Phi4MMDecoderOnnxConfig) and config.folded is not None:
        gates = torch.tensor([[float(name in folded) for name in GATE_COLUMNS]])
        reference = Phi4MMDecoderOnnxConfig(config._config, task=config.task, float_dtype=config.float_dtype)
        reference.adapters = config.adapters
        inputs, config = {**inputs, "adapter_gates": gates}, reference

    def weights(module: nn.Module, prefix: str, skip: str | None = None) -> dict[str, Tensor]:
        """The parameters of `module` as stored, in float32, by their name in it."""
        loaded = {}
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.device.type == "meta" and not (skip and name.startswith(f"{skip}.")):
                key = leaf_from_native(f"{prefix}.{name}")
                loaded[name] = bound_tensor(key, _STORED[config.float_dtype], checkpoint, {}).float()
        return loaded

    with config.patch_model_for_export(component), torch.inference_mode():
        stacks = {
            name: module for name, module in component.named_modules() if isinstance(module, LayerStack)
        }
        if not stacks:
            return torch.func.functional_call(component, weights(component, config.PREFIX), (), inputs)
        ((path, stack),) = stacks.items()

        def run_streamed(
            stack: LayerStack, hidden: Tensor, states: Sequence[Sequence[Tensor]], shared: Sequence[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            new_states: list[Tensor] = []
            for index, layer in enumerate(stack):
                layer_weights = weights(layer, f"{config.PREFIX}.{path}.{index}")
                arguments = (hidden, *(states[index] if states else ()), *shared)
                out = torch.func.functional_call(layer, layer_weights, arguments)
                hidden, *state = (out,) if isinstance(out, Tensor) else out
                new_states.extend(state)
            return hidden, new_states

        with stack.run_with(run_streamed):
            return torch.func.functional_call(component, weights(component, config.PREFIX, path), (), inputs)


def _to_float32(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_float32(item) for item in value]
    return value.float() if value.is_floating_point() else value


def _session(model: PackagedModel) -> onnxruntime.InferenceSession:
    """A session for the written model.

    Optimised graphs and prepacked weights are copies of the model; neither is made, so that weights stay in
    the file.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3  # it warns of every optional input
    return onnxruntime.InferenceSession(model.path, options, providers=["CPUExecutionProvider"])


def _run_model(
    session: onnxruntime.InferenceSession, config: Any, inputs: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The written model's outputs by name; a list is fed under the names that begin with its own."""
    feeds = {}
    for name, value in inputs.items():
        if isinstance(value, list):
            names = [key for key in config.inputs if key.startswith(f"{name}.")]
            feeds.update({key: item.numpy() for key, item in zip(names, value, strict=True)})
        else:
            feeds[name] = value.numpy()
    return dict(zip(config.outputs, session.run(list(config.outputs), feeds), strict=True))


def _compare(
    model: PackagedModel,
    config: Any,
    expected: Mapping[str, Tensor],
    found: Mapping[str, np.ndarray],
    atol: float | None,
) -> dict[str, float]:
    """The largest difference per output; raises when one is too large."""
    differences, failures = {}, []
    for name, reference in expected.items():
        output = torch.from_numpy(found[name]).float()
        if output.shape != reference.shape:
            failures.append(f"{name} has shape {list(output.shape)}, expected {list(reference.shape)}")
            continue
        difference = (output - reference).abs().max().item()
        relative = Phi4MMOnnxConfig.RELATIVE_TOLERANCES[config.float_dtype]
        bound = atol if atol is not None else relative * reference.abs().max().item()
        differences[name] = difference
        if difference <= bound:  # false for NaN
            logger.info(
                f"\t-[✓] {name} {list(output.shape)}: largest difference {difference:.2e} (atol: {bound:.2e})"
            )
        else:
            failures.append(f"{name}: largest difference {difference:.2e} (atol: {bound:.2e})")
    if failures:
        raise ValidationError(
            f"{model.path.name} differs from the torch model in {'; '.join(failures)}. Nothing was kept; if "
            "the difference is acceptable, export with a larger --atol"
        )
    return differences


def _check_stored_weights(
    model: PackagedModel, checkpoint: Checkpoint, folded: Mapping[str, LoraAdapter]
) -> None:
    """Compare every weight in the written files with the checkpoint's, one at a time."""
    known = set(checkpoint.names())
    for name, value in ir.load(model.path).graph.initializers.items():
        if name.removesuffix(TRANSPOSED) not in known:
            continue  # a constant of the graph
        stored = value.const_value
        expected = ir.tensor(bound_tensor(name, torch.bfloat16, checkpoint, folded))
        if stored is None or stored.tobytes() != expected.tobytes():
            raise ValidationError(f"{model.path.name}: the stored {name} is not the checkpoint's")
        if isinstance(stored, ir.ExternalTensor):
            stored.release()
