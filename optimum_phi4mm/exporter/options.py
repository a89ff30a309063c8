"""The options of Optimum's command: which this model can honour, and what to do instead of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from optimum.utils import DEFAULT_DUMMY_SHAPES

from ..configuration_checks import is_int, is_number
from ..errors import ExportError
from .configs import Phi4MMOnnxConfig


__all__ = ["check_options", "float_dtype", "opset_for"]

_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# torch.onnx has no operators below 18; ONNX Runtime 1.32 knows operators up to 23 well. Conv takes bfloat16
# from 22 on.
_MIN_OPSET, _MAX_OPSET, _MIN_OPSET_BF16 = 18, 23, 22

# Sizes of validation's dummy inputs that are anyone's choice.
_FREE_SIZES = ("batch_size", "sequence_length", "nb_max_frames")
_MAX_DUMMY_SIZE = 1 << 20

_REFUSED = {
    "optimize": "--optimize is not available for this model: ONNX Runtime optimises it when it loads it "
    "(SessionOptions.graph_optimization_level)",
    "monolith": "--monolith is not possible: vision and speech run once per prompt and the decoder once per "
    "token, so the model is four files",
    "slim": "--slim is not possible: onnxslim folds the defaults of optional inputs into the graph; the "
    "graphs are already simplified by onnxscript",
    "no_dynamic_axes": "--no-dynamic-axes is not possible: one decoder serves prompts and single tokens. To "
    "fix an axis afterwards run python -m onnxruntime.tools.make_dynamic_shape_fixed --dim_param batch "
    "--dim_value 1 IN OUT",
    "model_kwargs": "--model-kwargs is not possible: the four models' inputs and outputs are fixed",
    "custom_onnx_configs": "custom_onnx_configs is not possible: the models' inputs and outputs are fixed",
    "fn_get_submodels": "fn_get_submodels is not possible: the model is always exported as its four parts",
}


def check_options(
    *, device: str, atol: float | None, variant: str, shapes: Mapping[str, int], **options: Any
) -> None:
    """Refuse what can't be honoured, before anything else happens.

    Raises:
        ExportError: says which option and what to do instead.
    """
    for name, value in options.items():
        if value:
            raise ExportError(_REFUSED[name])
    if str(device) != "cpu":
        raise ExportError(
            f"--device {device} is not possible: the export computes nothing on a device. Leave it out; the "
            "exported models run on any device of ONNX Runtime"
        )
    if atol is not None and not (is_number(atol) and atol >= 0):
        raise ExportError(f"--atol is {atol}, expected a number from 0 on")
    if variant != "default" and variant not in Phi4MMOnnxConfig.VARIANTS:
        raise ExportError(f"--variant is {variant}, expected one of {', '.join(Phi4MMOnnxConfig.VARIANTS)}")
    unknown = set(shapes) - set(DEFAULT_DUMMY_SHAPES)
    if unknown:
        raise ExportError(
            f"unknown option {', '.join(sorted(unknown))}: see optimum.exporters.onnx.main_export"
        )
    for name, size in shapes.items():
        if name not in _FREE_SIZES and size != DEFAULT_DUMMY_SHAPES[name]:
            raise ExportError(
                f"--{name} is not possible: this size is the checkpoint's own or the model has none"
            )
        if name in _FREE_SIZES and not is_int(size, 1, _MAX_DUMMY_SIZE):
            raise ExportError(f"--{name} is {size}, expected an integer from 1 to {_MAX_DUMMY_SIZE}")


def float_dtype(dtype: torch.dtype) -> str:
    """Optimum's name of a float type (fp32, fp16, bf16).

    Raises:
        ExportError: for any other type.
    """
    if dtype not in _DTYPES:
        raise ExportError(f"the model's dtype is {dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    return _DTYPES[dtype]


def opset_for(dtype: str, opset: int | None) -> int:
    """The opset to export with.

    Raises:
        ExportError: when `opset` is one that the exporter or the float type doesn't have.
    """
    lowest = _MIN_OPSET_BF16 if dtype == "bf16" else _MIN_OPSET
    if opset is None:
        return max(lowest, Phi4MMOnnxConfig.DEFAULT_ONNX_OPSET)
    if not is_int(opset, lowest, _MAX_OPSET):
        raise ExportError(f"--opset is {opset}, expected {lowest} to {_MAX_OPSET} for --dtype {dtype}")
    return opset
