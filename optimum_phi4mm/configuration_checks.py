"""What a config's fields may hold: kinds of values, relations between them, and what is not supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError


__all__ = ["FIELDS", "MISSING", "Kind", "check_fields", "find", "is_int", "is_number", "refuse"]

MISSING: Any = object()

# Far above any model of this kind; a larger number is a broken file and would only be met as a lack of
# memory.
_MAX_SIZE = 1 << 24
_MAX_LAYERS = 1 << 10
_MAX_NUMBER = 1e30


@dataclass(frozen=True)
class Kind:
    """A kind of value: its description for error messages, and its test."""

    expected: str
    accepts: Callable[[Any], bool]


def is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    # A comparison, not math.isfinite, which overflows on JSON's unlimited integers; NaN fails it too.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_activation(value: Any) -> bool:
    # Loads torch, which reading a config to learn its model_type must not.
    from transformers.activations import ACT2FN

    return isinstance(value, str) and value in ACT2FN


def _is_token(value: Any) -> bool:
    return is_int(value, 0, _MAX_SIZE)


_SIZE = Kind(f"an integer from 1 to {_MAX_SIZE}", lambda value: is_int(value, 1, _MAX_SIZE))
_LAYERS = Kind(f"an integer from 1 to {_MAX_LAYERS}", lambda value: is_int(value, 1, _MAX_LAYERS))
_INTEGER = Kind("an integer", lambda value: is_int(value, -_MAX_SIZE, _MAX_SIZE))
_POSITIVE = Kind("a number above 0", lambda value: is_number(value) and value > 0)
_FRACTION = Kind("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_ACTIVATION = Kind("an activation that transformers knows", _is_activation)
_TOKEN = Kind("a token id", _is_token)
_OPTIONAL_TOKEN = Kind("a token id or null", lambda value: value is None or _is_token(value))
_TOKENS = Kind(
    "a token id, a list of them or null",
    lambda value: (
        value is None
        or _is_token(value)
        or (isinstance(value, list) and len(value) > 0 and all(_is_token(token) for token in value))
    ),
)
_WINDOW = Kind("a positive integer or null", lambda value: value is None or _SIZE.accepts(value))
# log(original) divides in LongRoPE's attention factor.
_ORIGINAL = Kind(f"an integer from 2 to {_MAX_SIZE}", lambda value: is_int(value, 2, _MAX_SIZE))

# The fields of the native config that say what is computed, by dotted path.
FIELDS: dict[str, Kind] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "resid_pdrop": _FRACTION,
    "embd_pdrop": _FRACTION,
    "attention_dropout": _FRACTION,
    "hidden_act": _ACTIVATION,
    "max_position_embeddings": _SIZE,
    "original_max_position_embeddings": _ORIGINAL,
    "initializer_range": _POSITIVE,
    "rms_norm_eps": _POSITIVE,
    "use_cache": _FLAG,
    "tie_word_embeddings": _FLAG,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _FRACTION,
    "bos_token_id": _OPTIONAL_TOKEN,
    "eos_token_id": _TOKENS,
    "pad_token_id": _OPTIONAL_TOKEN,
    "sliding_window": _WINDOW,
    "vision_config.hidden_size": _SIZE,
    "vision_config.intermediate_size": _SIZE,
    "vision_config.num_hidden_layers": _LAYERS,
    "vision_config.num_attention_heads": _SIZE,
    "vision_config.num_channels": _SIZE,
    "vision_config.image_size": _SIZE,
    "vision_config.patch_size": _SIZE,
    "vision_config.hidden_act": _ACTIVATION,
    "vision_config.layer_norm_eps": _POSITIVE,
    "vision_config.attention_dropout": _FRACTION,
    "vision_config.crop_size": _SIZE,
    "vision_config.image_token_id": _TOKEN,
    "vision_config.feature_layer": _INTEGER,
    "audio_config.hidden_size": _SIZE,
    "audio_config.intermediate_size": _SIZE,
    "audio_config.num_blocks": _LAYERS,
    "audio_config.num_attention_heads": _SIZE,
    "audio_config.activation": _ACTIVATION,
    "audio_config.left_chunk": _INTEGER,
    "audio_config.dropout_rate": _FRACTION,
    "audio_config.ext_pw_out_channel": _SIZE,
    "audio_config.depthwise_separable_out_channel": _SIZE,
    "audio_config.depthwise_multiplier": _SIZE,
    "audio_config.kernel_size": _SIZE,
    "audio_config.conv_activation": _ACTIVATION,
    "audio_config.input_size": _SIZE,
    "audio_config.conv_glu_type": _ACTIVATION,
    "audio_config.time_reduction": _SIZE,
    "audio_config.bias_max_distance": _SIZE,
    "audio_config.bias_symmetric": _FLAG,
    "audio_config.nemo_activation": _ACTIVATION,
    "audio_config.nemo_conv_channels": _SIZE,
    "audio_config.initializer_range": _POSITIVE,
    "audio_config.audio_token_id": _TOKEN,
}

# The only value, where a field is stated, of what transformers' native model is built for.
_FIXED = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "quantization_config": None}
_FIXED_NATIVE = {"audio_config.chunk_size": -1, "audio_config.downsample_rate": 1}
_FIXED_PHI4MM = {
    "embd_layer.embedding_cls": "image_audio",
    "embd_layer.audio_embd_layer.downsample_rate": 1,
    "embd_layer.audio_embd_layer.embedding_cls": "audio",
    "embd_layer.audio_embd_layer.projection_cls": "mlp",
    "embd_layer.audio_embd_layer.use_conv_downsample": False,
    "embd_layer.audio_embd_layer.use_qformer": False,
    "embd_layer.image_embd_layer.embedding_cls": "tune_image",
    "embd_layer.image_embd_layer.hd_transform_order": "sub_glb",
    "embd_layer.image_embd_layer.image_token_compression_cls": "avg_pool_2d",
    "embd_layer.image_embd_layer.projection_cls": "mlp",
    "embd_layer.image_embd_layer.use_hd_transform": True,
    "embd_layer.image_embd_layer.with_learnable_separator": True,
    "audio_processor.name": "cascades",
    "audio_processor.config.attention_group_size": 1,
    "audio_processor.config.batch_norm": False,
    "audio_processor.config.bias_in_glu": True,
    "audio_processor.config.causal": True,
    "audio_processor.config.chunk_se": 0,
    "audio_processor.config.chunk_size": -1,
    "audio_processor.config.cnn_layer_norm": True,
    "audio_processor.config.ext_pw_kernel_size": 1,
    "audio_processor.config.input_layer": "nemo_conv",
    "audio_processor.config.linear_glu_in_convm": False,
    "audio_processor.config.nemo_conv_settings.is_causal": False,
    "audio_processor.config.nemo_conv_settings.subsampling": "dw_striding",
    "audio_processor.config.relative_attention_bias_args.type": "t5",
}
# Two fields of the phi4mm layout that are one; a contradiction would go unseen: only the second is used.
_STATED_TWICE = {
    "audio_processor.config.encoder_embedding_config.input_size": "audio_processor.config.input_size",
    "embd_layer.audio_embd_layer.compression_rate": "audio_processor.config.time_reduction",
}


def find(raw: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or MISSING.

    Raises:
        CheckpointError: something on the way is no object.
    """
    value: Any = raw
    walked: list[str] = []
    for part in path.split("."):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {'.'.join(walked)} is {value!r}, expected an object")
        if part not in value:
            return MISSING
        value = value[part]
        walked.append(part)
    return value


def refuse(raw: Mapping[str, Any], *, phi4mm: bool) -> None:
    """Refuse a config that asks for what this package doesn't compute; only stated fields are checked.

    Raises:
        CheckpointError: names the field, the value found and the one supported.
    """
    for field, supported in {**_FIXED, **(_FIXED_PHI4MM if phi4mm else _FIXED_NATIVE)}.items():
        value = find(raw, field)
        if value is not MISSING and value != supported:
            raise _wrong(field, value, f"{supported!r}: nothing else is supported")
    if phi4mm:
        for field, other in _STATED_TWICE.items():
            value, same = find(raw, field), find(raw, other)
            if MISSING not in (value, same) and value != same:
                raise _wrong(field, value, f"{same!r} like {other}")
    head_dim, hidden, heads = (find(raw, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    sizes = is_int(hidden, 1, _MAX_SIZE) and is_int(heads, 1, _MAX_SIZE)
    if head_dim not in (MISSING, None) and sizes and head_dim != hidden // heads:
        raise _wrong("head_dim", head_dim, f"hidden_size / num_attention_heads = {hidden // heads}")


def check_fields(fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check the values of native fields and how they go together.

    Args:
        fields: value by native path; every path of FIELDS, and `rope_scaling`.
        names: what a native path is called in the file at hand, where that differs.

    Raises:
        CheckpointError: names the field as the file does, the value found and what was expected.
    """

    def need(condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise _wrong(names.get(field, field), fields[field], expected)

    for field, kind in FIELDS.items():
        need(kind.accepts(fields[field]), field, kind.expected)
    for section in ("", "vision_config.", "audio_config."):
        field, heads = section + "hidden_size", fields[section + "num_attention_heads"]
        need(fields[field] % heads == 0, field, f"a multiple of the {heads} heads")
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    need(heads % groups == 0, "num_attention_heads", f"a multiple of num_key_value_heads={groups}")

    field, patch = "vision_config.image_size", fields["vision_config.patch_size"]
    size = fields[field]
    need(
        size % (2 * patch) == 0, field, f"an even number of patches of {patch} per side: they are pooled 2x2"
    )
    field = "vision_config.crop_size"
    need(fields[field] == size, field, f"the vision tower's image size {size}")
    field, layers = "vision_config.feature_layer", fields["vision_config.num_hidden_layers"]
    need(
        -layers <= fields[field] <= layers and fields[field] != 0,
        field,
        f"a hidden state behind one of the {layers} layers: from -{layers} to {layers}, not 0",
    )
    reduction = fields["audio_config.time_reduction"]
    need(
        reduction >= 2 and reduction & (reduction - 1) == 0,
        "audio_config.time_reduction",
        "a power of 2, one strided convolution for each",
    )
    for field in ("vision_config.image_token_id", "audio_config.audio_token_id"):
        need(fields[field] < fields["vocab_size"], field, f"an id below vocab_size={fields['vocab_size']}")
    need(
        fields["vision_config.image_token_id"] != fields["audio_config.audio_token_id"],
        "vision_config.image_token_id",
        "another id than the audio token's",
    )
    _check_rope(fields["rope_scaling"], fields)


def _check_rope(rope: Any, fields: Mapping[str, Any]) -> None:
    """LongRoPE's three keys, with a factor for every pair of rotated dimensions; null is plain RoPE."""
    width = int(fields["hidden_size"] // fields["num_attention_heads"] * fields["partial_rotary_factor"])
    if width < 2 or width % 2:
        raise _wrong(
            "partial_rotary_factor", fields["partial_rotary_factor"], f"an even rotated width, not {width}"
        )
    if rope is None:
        return
    if not isinstance(rope, Mapping):
        raise _wrong("rope_scaling", rope, "an object or null")
    if rope.get("type") != "longrope":
        raise _wrong("rope_scaling.type", rope.get("type"), "'longrope'")
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if not isinstance(factors, list) or not all(is_number(factor) and factor > 0 for factor in factors):
            raise _wrong(f"rope_scaling.{name}", factors, "a list of numbers above 0")
        if len(factors) != width // 2:
            raise CheckpointError(
                f"config.json: rope_scaling.{name} has {len(factors)} factors, expected {width // 2}, one "
                "for every pair of rotated dimensions"
            )
    for name in sorted(rope.keys() - {"type", "short_factor", "long_factor"}):
        raise _wrong(f"rope_scaling.{name}", rope[name], "only type, short_factor and long_factor")


def _wrong(field: str, value: Any, expected: str) -> CheckpointError:
    found = repr(value)
    if len(found) > 80:
        found = found[:77] + "..."
    return CheckpointError(f"config.json: {field} is {found}, expected {expected}")
