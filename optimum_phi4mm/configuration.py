"""One description of the model, transformers' native config, read from either layout's config.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Phi4MultimodalConfig, PretrainedConfig

from .configuration_checks import FIELDS, MISSING, check_fields, find, refuse
from .errors import CheckpointError


__all__ = [
    "MODEL_TYPES",
    "Phi4MMConfig",
    "check_config",
    "is_phi4mm",
    "native_config",
    "read_config",
    "read_json",
]

MODEL_TYPES = ("phi4mm", "phi4_multimodal")

_VISION = "vision_encoder.img_processor."

# The phi4mm name of each native field that is called otherwise there ("seperable" is the published spelling).
_PHI4MM_NAMES = {
    "vision_config.crop_size": "embd_layer.image_embd_layer.crop_size",
    **{
        f"audio_config.{native}": f"audio_processor.config.{original}"
        for native, original in {
            "hidden_size": "attention_dim",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "linear_units",
            "num_blocks": "num_blocks",
            "activation": "activation",
            "left_chunk": "left_chunk",
            "dropout_rate": "dropout_rate",
            "ext_pw_out_channel": "ext_pw_out_channel",
            "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
            "depthwise_multiplier": "depthwise_multiplier",
            "kernel_size": "kernel_size",
            "conv_activation": "conv_activation",
            "input_size": "input_size",
            "conv_glu_type": "conv_glu_type",
            "time_reduction": "time_reduction",
            "bias_max_distance": "relative_attention_bias_args.t5_bias_max_distance",
            "bias_symmetric": "relative_attention_bias_args.t5_bias_symmetric",
            "nemo_conv_channels": "nemo_conv_settings.conv_channels",
        }.items()
    },
}

# Sizes that no default may stand in for.
_REQUIRED = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
}
# Where the phi4mm encoder's own default is the native one too (or the field has no effect on what is
# computed); for its other fields they differ, e.g. `activation` is "relu" there and "swish" here.
_OPTIONAL_IN_PHI4MM = {
    "audio_config.left_chunk",
    "audio_config.dropout_rate",
    "audio_config.bias_max_distance",
    "audio_config.bias_symmetric",
    "vision_config.crop_size",
}
# What the phi4mm layout states nowhere, neither in its config nor in a shape.
_PHI4MM_CONSTANTS = {
    "vision_config.num_attention_heads": 16,
    "vision_config.layer_norm_eps": 1e-6,
    "vision_config.hidden_act": "gelu_pytorch_tanh",
    "vision_config.attention_dropout": 0.0,
    "vision_config.image_token_id": 200010,
    "vision_config.feature_layer": -2,
    "audio_config.audio_token_id": 200011,
    "audio_config.nemo_activation": "relu",
    "audio_config.initializer_range": 0.02,
}
_DTYPES = (None, "float32", "float16", "bfloat16", "float64")


class Phi4MMConfig(PretrainedConfig):
    """The config of the phi4mm layout as it is written, so that `AutoConfig` reads it without remote code.

    Nothing is interpreted here, `native_config` does that. The remote classes (`auto_map`) and the attention
    kernel
    that the published file asks for are dropped: transformers would look for them.
    """

    model_type = "phi4mm"

    def __init__(self, auto_map: Any = None, _attn_implementation: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, can't be read, is no JSON or holds something else than an
            object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: the folder is no complete checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON file ({error}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a checkpoint in either layout.

    Args:
        folder: the checkpoint's folder.

    Returns:
        The file's content, uninterpreted.

    Raises:
        CheckpointError: no such file, no JSON object, or another model's.
    """
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{folder / 'config.json'} has model_type {model_type!r}, expected {' or '.join(MODEL_TYPES)}: "
            "this package exports Phi-4-multimodal only"
        )
    return raw


def is_phi4mm(raw: Mapping[str, Any]) -> bool:
    """Whether a config is of the phi4mm layout (the repository's `main`), by its `model_type`."""
    return raw.get("model_type") == "phi4mm"


def native_config(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Phi4MultimodalConfig:
    """The native config of a checkpoint in either layout.

    The phi4mm fields are read as the model's own `modeling_phi4mm.py` and `speech_conformer_encoder.py` read
    them.

    Args:
        raw: the content of `config.json`.
        shapes: shape by canonical tensor name (see `checkpoint.names`); the phi4mm layout's SigLIP sizes
            follow from them, the native layout needs none.

    Returns:
        The config, without attention implementation, remote classes or paths.

    Raises:
        CheckpointError: a field is missing, malformed, or asks for what this package doesn't compute.
    """
    refuse(raw, phi4mm=is_phi4mm(raw))
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    required = set(_REQUIRED)
    if is_phi4mm(raw):
        fields = {**_PHI4MM_CONSTANTS, **_vision_sizes(shapes)}
        names = _PHI4MM_NAMES
        required |= set(names) - _OPTIONAL_IN_PHI4MM
    defaults = _flat(Phi4MultimodalConfig(vision_config={}, audio_config={}))
    for field in FIELDS:
        if field in fields:
            continue
        name = names.get(field, field)
        value = find(raw, name)
        if value is MISSING:
            if field in required:
                raise CheckpointError(f"config.json has no {name}, expected {FIELDS[field].expected}")
            value = defaults[field]
        fields[field] = value
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields["rope_scaling"] = _rope_scaling(raw.get("rope_scaling"))
    check_fields(fields, names)
    return _build(fields, raw)


def check_config(config: Phi4MultimodalConfig) -> None:
    """Check that a native config is one this package computes.

    Raises:
        CheckpointError: names the field, the value found and what was expected.
    """
    content = config.to_dict()
    refuse(content, phi4mm=False)
    check_fields({**_flat(config), "rope_scaling": _rope_scaling(content.get("rope_scaling"))}, {})


def _flat(config: Phi4MultimodalConfig) -> dict[str, Any]:
    """The checked fields of a native config by dotted path."""
    content = config.to_dict()
    return {field: find(content, field) for field in FIELDS}


def _rope_scaling(value: Any) -> Any:
    """`rope_scaling` with the three keys of the native class; transformers also writes `rope_type`."""
    if not isinstance(value, dict):
        return value
    value = dict(value)
    rope_type = value.pop("rope_type", None)
    value.setdefault("type", rope_type)
    if value["type"] in ("su", "yarn"):  # names of the same scaling in early Phi-3 files
        value["type"] = "longrope"
    return value


def _vision_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The SigLIP sizes as the tensors' shapes give them."""
    hidden, channels, patch, _ = _shape(shapes, _VISION + "embeddings.patch_embedding.weight", rank=4)
    positions, _ = _shape(shapes, _VISION + "embeddings.position_embedding.weight", rank=2)
    intermediate, _ = _shape(shapes, _VISION + "encoder.layers.0.mlp.fc1.weight", rank=2)
    grid = math.isqrt(positions)
    if grid * grid != positions:
        raise CheckpointError(
            f"{_VISION}embeddings.position_embedding.weight has {positions} positions, expected a square "
            "number of them"
        )
    prefix = _VISION + "encoder.layers."
    layers = {name[len(prefix) :].split(".")[0] for name in shapes if name.startswith(prefix)}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1 + max(int(layer) for layer in layers if re.fullmatch(r"\d{1,9}", layer)),
        "num_channels": channels,
        "image_size": grid * patch,
        "patch_size": patch,
    }
    return {f"vision_config.{field}": size for field, size in sizes.items()}


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(
            f"the checkpoint has no {name}, from whose shape the vision tower's sizes follow"
        )
    shape = tuple(shapes[name])
    if len(shape) != rank:
        raise CheckpointError(f"{name} has shape {list(shape)}, expected {rank} dimensions")
    return shape


def _build(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> Phi4MultimodalConfig:
    """Nest checked fields and construct the native config."""
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"config.json: dtype is {dtype!r}, expected one of {', '.join(map(str, _DTYPES))}"
        )
    nested: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
    for field, value in fields.items():
        section, _, leaf = field.rpartition(".")
        (nested[section] if section else nested)[leaf] = value
    return Phi4MultimodalConfig(**nested, architectures=["Phi4MultimodalForCausalLM"], dtype=dtype)
