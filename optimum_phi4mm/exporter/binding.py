"""Weights meet graphs: every initialiser without a value gets one that is read when it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from ..checkpoint import Checkpoint, LoraAdapter, fold
from ..errors import CheckpointError
from .graph import TRANSPOSED


__all__ = ["bind", "bound_tensor", "num_bytes"]

_TORCH_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


def bind(
    model: ir.Model, checkpoint: Checkpoint, derived: Mapping[str, Tensor], folded: Mapping[str, LoraAdapter]
) -> None:
    """Give every initialiser without a value one that is computed when it is asked for, and then forgotten.

    Args:
        model: a captured graph.
        checkpoint: where the weights are.
        derived: buffers that come from the config, by canonical name.
        folded: adapters that are added into the weights they target.
    """
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        if name in derived:
            value.const_value = ir.tensor(derived[name], name=name)
            continue
        dtype, shape = ir.DataType(value.dtype or 0), ir.Shape(value.shape or ())

        def read(name: str = name, dtype: ir.DataType = dtype) -> ir.TensorProtocol:
            return ir.tensor(bound_tensor(name, _TORCH_DTYPES[dtype], checkpoint, folded), name=name)

        value.const_value = ir.LazyTensor(read, dtype=dtype, shape=shape, name=name)


def bound_tensor(
    name: str, dtype: torch.dtype, checkpoint: Checkpoint, folded: Mapping[str, LoraAdapter]
) -> Tensor:
    """The stored form of one initialiser: read, folded, cast and transposed.

    Raises:
        CheckpointError: when a value is too large for `dtype`.
    """
    key = name.removesuffix(TRANSPOSED)
    weight = checkpoint.tensor(key)
    pairs = list(_lora_pairs(key, checkpoint, folded))
    if pairs:
        weight = fold(weight, pairs)
    stored = weight.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(stored).all() and torch.isfinite(weight).all():
        raise CheckpointError(
            f"{key} has values up to {weight.abs().max().item():g}, float16 ends at 65504: export with "
            "--dtype fp32"
        )
    return stored.t().contiguous() if name.endswith(TRANSPOSED) else stored


def _lora_pairs(
    key: str, checkpoint: Checkpoint, folded: Mapping[str, LoraAdapter]
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Factor, A and B of each folded adapter that targets the weight `key`."""
    stem = key.removesuffix(".weight")
    for adapter in folded.values():
        # decoder.layers.0.self_attn.qkv_proj: the target is what follows the layer's number
        if stem.startswith("decoder.layers.") and stem.split(".", 3)[3] in adapter.targets:
            lora_a = checkpoint.tensor(f"{stem}.lora_A.{adapter.name}.weight")
            lora_b = checkpoint.tensor(f"{stem}.lora_B.{adapter.name}.weight")
            yield adapter.scaling, lora_a, lora_b


def num_bytes(model: ir.Model) -> int:
    """Size of all initialisers once written."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(int(tensor.nbytes) for tensor in tensors if tensor is not None)
