"""Both layouts' config.json give one native config; what can't be computed is refused by its name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from optimum_phi4mm.configuration import (
    Phi4MMConfig,
    check_config,
    is_phi4mm,
    native_config,
    read_config,
    read_json,
)
from optimum_phi4mm.errors import CheckpointError


SIGLIP = "vision_encoder.img_processor."
AUDIO = "audio_processor.config."
IMAGE_LAYER = "embd_layer.image_embd_layer."
AUDIO_LAYER = "embd_layer.audio_embd_layer."
REMOVED = object()


@pytest.fixture
def original(original_checkpoint: Path) -> dict[str, Any]:
    return read_config(original_checkpoint)


@pytest.fixture
def native(native_checkpoint: Path) -> dict[str, Any]:
    return read_config(native_checkpoint)


@pytest.fixture
def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the fixture's vision tower that say its sizes."""
    return {
        f"{SIGLIP}embeddings.patch_embedding.weight": (64, 3, 14, 14),
        f"{SIGLIP}embeddings.position_embedding.weight": (1024, 64),
        **{f"{SIGLIP}encoder.layers.{layer}.mlp.fc1.weight": (80, 64) for layer in range(3)},
    }


def changed(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a config with one field replaced, added or removed."""
    raw = copy.deepcopy(raw)
    *sections, leaf = path.split(".")
    section = raw
    for name in sections:
        section = section.setdefault(name, {})
    if value is REMOVED:
        del section[leaf]
    else:
        section[leaf] = value
    return raw


def test_both_layouts_give_the_same_config_apart_from_what_they_state_differently(original, native, shapes):
    from_original = native_config(original, shapes).to_dict()
    from_native = native_config(native, {}).to_dict()
    assert from_original.pop("eos_token_id") == original["eos_token_id"]
    assert from_native.pop("eos_token_id") == native["eos_token_id"]
    assert from_original == from_native


def test_the_native_layout_gives_what_transformers_reads(native, native_checkpoint):
    config = native_config(native, {}).to_dict()
    reference = AutoConfig.from_pretrained(native_checkpoint).to_dict()
    for content in (config, reference):
        content.pop("_name_or_path")
        content.pop("transformers_version")
    assert config == reference


def test_siglip_sizes_follow_from_the_shapes(original):
    shapes = {
        f"{SIGLIP}embeddings.patch_embedding.weight": (48, 3, 16, 16),
        f"{SIGLIP}embeddings.position_embedding.weight": (144, 48),
        **{f"{SIGLIP}encoder.layers.{layer}.mlp.fc1.weight": (100, 48) for layer in range(11)},
    }
    vision = native_config(changed(original, IMAGE_LAYER + "crop_size", 192), shapes).vision_config
    assert (vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers) == (48, 100, 11)
    assert (vision.image_size, vision.patch_size, vision.num_channels, vision.crop_size) == (192, 16, 3, 192)
    assert (vision.num_attention_heads, vision.layer_norm_eps, vision.feature_layer) == (16, 1e-6, -2)
    assert (vision.hidden_act, vision.image_token_id) == ("gelu_pytorch_tanh", 200010)


@pytest.mark.parametrize(
    ("original_name", "native_name", "value"),
    [
        ("attention_dim", "hidden_size", 48),
        ("attention_heads", "num_attention_heads", 4),
        ("linear_units", "intermediate_size", 7),
        ("num_blocks", "num_blocks", 5),
        ("activation", "activation", "relu"),
        ("conv_activation", "conv_activation", "relu"),
        ("conv_glu_type", "conv_glu_type", "sigmoid"),
        ("depthwise_seperable_out_channel", "depthwise_separable_out_channel", 9),
        ("depthwise_multiplier", "depthwise_multiplier", 2),
        ("ext_pw_out_channel", "ext_pw_out_channel", 11),
        ("kernel_size", "kernel_size", 5),
        ("left_chunk", "left_chunk", 12),
        ("dropout_rate", "dropout_rate", 0.25),
        ("nemo_conv_settings.conv_channels", "nemo_conv_channels", 24),
        ("relative_attention_bias_args.t5_bias_max_distance", "bias_max_distance", 77),
        ("relative_attention_bias_args.t5_bias_symmetric", "bias_symmetric", True),
    ],
)
def test_every_audio_field_reaches_its_native_counterpart(
    original, shapes, original_name, native_name, value
):
    config = native_config(changed(original, AUDIO + original_name, value), shapes)
    assert getattr(config.audio_config, native_name) == value


def test_audio_sizes_that_are_stated_twice_are_read_when_they_agree(original, shapes):
    raw = changed(original, AUDIO + "input_size", 128)
    raw = changed(raw, AUDIO + "encoder_embedding_config.input_size", 128)
    raw = changed(raw, AUDIO + "time_reduction", 4)
    raw = changed(raw, AUDIO_LAYER + "compression_rate", 4)
    audio = native_config(raw, shapes).audio_config
    assert (audio.input_size, audio.time_reduction, audio.nemo_final_size) == (128, 4, 32)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_is_known_by_its_old_names(native, name):
    config = native_config(changed(native, "rope_scaling.type", name), {})
    assert config.rope_scaling == {**native["rope_scaling"], "type": "longrope"}


def test_rope_type_is_read_as_type(native):
    raw = changed(changed(native, "rope_scaling.type", REMOVED), "rope_scaling.rope_type", "longrope")
    assert native_config(raw, {}).rope_scaling["type"] == "longrope"


def test_end_tokens_stay_as_they_are(native):
    assert native_config(changed(native, "eos_token_id", [7, 5]), {}).eos_token_id == [7, 5]


def test_missing_key_value_heads_that_are_null_are_as_many_as_query_heads(native):
    assert native_config(changed(native, "num_key_value_heads", None), {}).num_key_value_heads == 4


def test_neither_attention_kernel_nor_remote_code_survives(original, native, shapes):
    for raw, tensor_shapes in ((original, shapes), (native, {})):
        raw = {**raw, "auto_map": {"AutoConfig": "evil.Config"}, "_attn_implementation": "flash_attention_2"}
        raw["attn_implementation"] = "flash_attention_2"
        text = native_config(raw, tensor_shapes).to_json_string()
        assert "auto_map" not in text
        assert "flash_attention_2" not in text


def test_the_original_config_class_drops_remote_code_and_kernel(original):
    config = Phi4MMConfig(**original)
    assert config.audio_processor == original["audio_processor"]
    assert not hasattr(config, "auto_map")
    assert config._attn_implementation is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (AUDIO + "chunk_size", 18, "-1"),
        (AUDIO + "chunk_size", [18, 36], "-1"),
        (AUDIO + "input_layer", "conv2d", "'nemo_conv'"),
        (AUDIO + "batch_norm", True, "False"),
        (AUDIO + "bias_in_glu", False, "True"),
        (AUDIO + "causal", False, "True"),
        (AUDIO + "cnn_layer_norm", False, "True"),
        (AUDIO + "ext_pw_kernel_size", 3, "1"),
        (AUDIO + "attention_group_size", 2, "1"),
        (AUDIO + "nemo_conv_settings.is_causal", True, "False"),
        (AUDIO + "nemo_conv_settings.subsampling", "striding", "'dw_striding'"),
        (AUDIO + "relative_attention_bias_args.type", "alibi", "'t5'"),
        (AUDIO + "encoder_embedding_config.input_size", 128, "80"),
        (AUDIO_LAYER + "compression_rate", 4, "8"),
        (AUDIO_LAYER + "downsample_rate", 2, "1"),
        (AUDIO_LAYER + "projection_cls", "linear", "'mlp'"),
        (AUDIO_LAYER + "use_conv_downsample", True, "False"),
        (AUDIO_LAYER + "use_qformer", True, "False"),
        (IMAGE_LAYER + "hd_transform_order", "glb_sub", "'sub_glb'"),
        (IMAGE_LAYER + "image_token_compression_cls", "none", "'avg_pool_2d'"),
        (IMAGE_LAYER + "projection_cls", "linear", "'mlp'"),
        (IMAGE_LAYER + "use_hd_transform", False, "True"),
        (IMAGE_LAYER + "with_learnable_separator", False, "True"),
        (IMAGE_LAYER + "crop_size", 336, "the vision tower's image size 448"),
        ("attention_bias", True, "False"),
        ("mlp_bias", True, "False"),
        ("lm_head_bias", True, "False"),
        ("quantization_config", {"quant_method": "fp8"}, "None"),
        ("rope_scaling.type", "linear", "'longrope'"),
        ("rope_scaling.attention_factor", 1.5, "only type, short_factor and long_factor"),
        ("head_dim", 32, "hidden_size / num_attention_heads = 16"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(original, shapes, field, value, expected):
    with pytest.raises(CheckpointError) as caught:
        native_config(changed(original, field, value), shapes)
    message = str(caught.value)
    assert f"{field} is {value!r}" in message
    assert f"expected {expected}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio_config.chunk_size", 18),
        ("audio_config.downsample_rate", 2),
        ("audio_config.time_reduction", 6),
        ("audio_config.activation", "no_such_activation"),
        ("vision_config.image_size", 14 * 31),
        ("vision_config.crop_size", 336),
        ("vision_config.feature_layer", 4),
        ("vision_config.feature_layer", -4),
        ("vision_config.hidden_size", 63),
        ("vision_config.image_token_id", 200064),
        ("vision_config.image_token_id", 200011),
        ("vision_config", "siglip"),
        ("audio_config", None),
    ],
)
def test_native_sections_are_checked_too(native, field, value):
    with pytest.raises(CheckpointError, match=field.replace(".", r"\.")):
        native_config(changed(native, field, value), {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 0),
        ("intermediate_size", True),
        ("hidden_size", 66),
        ("intermediate_size", -1),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 3),
        ("vocab_size", 1 << 40),
        ("vocab_size", None),
        ("rms_norm_eps", 0),
        ("rope_theta", 10**400),
        ("rope_theta", float("nan")),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.01),
        ("original_max_position_embeddings", 1),
        ("hidden_act", "no_such_activation"),
        ("hidden_act", ["silu"]),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "199999"),
        ("eos_token_id", []),
        ("sliding_window", -5),
        ("dtype", "int8"),
        ("dtype", ["bfloat16"]),
        ("rope_scaling", "longrope"),
        ("rope_scaling.short_factor", REMOVED),
        ("rope_scaling.short_factor", [1.0] * 5),
        ("rope_scaling.long_factor", [1.0] * 7),
        ("rope_scaling.long_factor", ["1.0"] * 6),
        ("rope_scaling.long_factor", [0.0] * 6),
        ("audio_processor", "cascades"),
        ("audio_processor.config", []),
        (AUDIO + "attention_dim", 33),
        (AUDIO + "attention_heads", "2"),
        (AUDIO + "time_reduction", 0),
        (AUDIO + "relative_attention_bias_args.t5_bias_max_distance", 0),
        (IMAGE_LAYER + "crop_size", 448.0),
    ],
)
def test_malformed_values_are_refused_by_name(original, shapes, field, value):
    raw = changed(original, field, value)
    if field == AUDIO + "time_reduction":
        raw = changed(raw, AUDIO_LAYER + "compression_rate", value)
    name = "num_attention_heads" if field == "num_key_value_heads" else field
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        native_config(raw, shapes)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "audio_processor",
        AUDIO + "activation",
        AUDIO + "conv_glu_type",
        AUDIO + "time_reduction",
        AUDIO + "nemo_conv_settings",
    ],
)
def test_a_missing_field_is_named(original, shapes, field):
    with pytest.raises(CheckpointError, match=rf"config\.json has no {field}"):
        native_config(changed(original, field, REMOVED), shapes)


def test_a_missing_tensor_that_says_a_size_is_named(original, shapes):
    del shapes[f"{SIGLIP}embeddings.patch_embedding.weight"]
    with pytest.raises(
        CheckpointError, match=r"no vision_encoder\.img_processor\.embeddings\.patch_embedding"
    ):
        native_config(original, shapes)


def test_an_odd_patch_grid_is_refused(original, shapes):
    shapes[f"{SIGLIP}embeddings.position_embedding.weight"] = (31 * 31, 64)
    with pytest.raises(CheckpointError, match=r"vision_config\.image_size is 434, expected an even number"):
        native_config(original, shapes)


@pytest.mark.parametrize("shape", [(1000, 64), (1024, 64, 1)])
def test_positions_that_are_no_square_table_are_refused(original, shapes, shape):
    shapes[f"{SIGLIP}embeddings.position_embedding.weight"] = shape
    with pytest.raises(CheckpointError, match=r"position_embedding\.weight has"):
        native_config(original, shapes)


def test_a_native_config_can_be_checked_by_itself(native):
    config = native_config(native, {})
    check_config(config)
    config.vision_config.crop_size = 336
    with pytest.raises(CheckpointError, match=r"vision_config\.crop_size is 336, expected .* 448"):
        check_config(config)


def test_layouts_are_told_apart_by_model_type(original, native):
    assert is_phi4mm(original)
    assert not is_phi4mm(native)


def test_another_models_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    with pytest.raises(CheckpointError, match="model_type 'phi3', expected phi4mm or phi4_multimodal"):
        read_config(tmp_path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe{}", b"[" * 100_000, b"[]", b"3", b"null"])
def test_what_is_no_json_object_is_refused_with_the_files_name(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json (is no readable JSON file|holds a)"):
        read_json(tmp_path / "config.json")
