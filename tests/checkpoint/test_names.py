"""Both layouts' keys map to one canonical name, the initialiser's."""

from __future__ import annotations

import pytest

from optimum_phi4mm.checkpoint import from_adapter, from_native, from_original, leaf_from_native


IMAGE = "model.embed_tokens_extend.image_embed."
AUDIO = "model.embed_tokens_extend.audio_embed."
BLOCK = "encoder.encoders.11."

PAIRS = [
    (
        IMAGE + "img_processor.encoder.layers.3.self_attn.q_proj.weight",
        IMAGE + "img_processor.encoder.layers.3.self_attn.q_proj.weight",
        "vision_encoder.img_processor.encoder.layers.3.self_attn.q_proj.weight",
    ),
    (
        IMAGE + "img_projection.0.weight",
        IMAGE + "img_projection_up.weight",
        "vision_encoder.img_projection.0.weight",
    ),
    (
        IMAGE + "img_projection.2.bias",
        IMAGE + "img_projection_down.bias",
        "vision_encoder.img_projection.2.bias",
    ),
    (IMAGE + "glb_GN", IMAGE + "global_img_feature_extensor", "vision_encoder.glb_GN"),
    (IMAGE + "sub_GN", IMAGE + "sub_img_feature_extensor", "vision_encoder.sub_GN"),
    (
        AUDIO + "audio_projection.speech.0.weight",
        AUDIO + "up_proj_for_speech.weight",
        "speech_encoder.audio_projection.speech.0.weight",
    ),
    (
        AUDIO + "audio_projection.speech.2.weight",
        AUDIO + "down_proj_for_speech.weight",
        "speech_encoder.audio_projection.speech.2.weight",
    ),
    (
        AUDIO + "audio_projection.vision.0.bias",
        AUDIO + "up_proj_for_vision_speech.bias",
        "speech_encoder.audio_projection.vision.0.bias",
    ),
    (
        AUDIO + "audio_projection.vision.2.weight",
        AUDIO + "down_proj_for_vision_speech.weight",
        "speech_encoder.audio_projection.vision.2.weight",
    ),
    (
        AUDIO + BLOCK + "feed_forward_in.net.0.linear.weight",
        AUDIO + BLOCK + "feed_forward_in.gate_up_proj.weight",
        "speech_encoder." + BLOCK + "feed_forward_in.net.0.linear.weight",
    ),
    (
        AUDIO + BLOCK + "feed_forward_out.net.2.bias",
        AUDIO + BLOCK + "feed_forward_out.down_proj.bias",
        "speech_encoder." + BLOCK + "feed_forward_out.net.2.bias",
    ),
    (
        AUDIO + BLOCK + "feed_forward_out.layer_norm.weight",
        AUDIO + BLOCK + "feed_forward_out.layer_norm.weight",
        "speech_encoder." + BLOCK + "feed_forward_out.layer_norm.weight",
    ),
    *[
        (
            f"{AUDIO}{BLOCK}self_attn.{original}.weight",
            f"{AUDIO}{BLOCK}self_attn.{native}.weight",
            f"speech_encoder.{BLOCK}self_attn.{original}.weight",
        )
        for original, native in (
            ("linear_q", "q_proj"),
            ("linear_k", "k_proj"),
            ("linear_v", "v_proj"),
            ("linear_out", "o_proj"),
        )
    ],
    ("model.embed_tokens.weight", "model.embed_tokens.weight", "embedding.embed_tokens.weight"),
    (
        "model.layers.0.self_attn.o_proj.base_layer.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "decoder.layers.0.self_attn.o_proj.weight",
    ),
    ("model.norm.weight", "model.norm.weight", "decoder.norm.weight"),
    ("lm_head.weight", "lm_head.weight", "decoder.lm_head.weight"),
]


@pytest.mark.parametrize(("original", "native", "canonical"), PAIRS)
def test_the_same_tensor_has_one_name_whatever_its_layout(original, native, canonical):
    assert from_original(original) == canonical
    assert from_native(native) == canonical


@pytest.mark.parametrize("canonical", [canonical for _, _, canonical in PAIRS])
def test_canonical_names_are_left_alone(canonical):
    assert leaf_from_native(canonical) == canonical


def test_a_modules_own_native_names_become_canonical():
    assert (
        leaf_from_native("speech_encoder.encoder.encoders.0.feed_forward_in.gate_up_proj.weight")
        == "speech_encoder.encoder.encoders.0.feed_forward_in.net.0.linear.weight"
    )
    assert (
        leaf_from_native("vision_encoder.img_projection_up.weight")
        == "vision_encoder.img_projection.0.weight"
    )
    assert leaf_from_native("vision_encoder.global_img_feature_extensor") == "vision_encoder.glb_GN"


def test_the_decoders_and_the_vision_towers_projections_keep_their_names():
    for name in (
        "decoder.layers.0.mlp.gate_up_proj.weight",
        "decoder.layers.0.mlp.down_proj.weight",
        "decoder.layers.0.self_attn.o_proj.weight",
        "vision_encoder.img_processor.encoder.layers.0.self_attn.q_proj.weight",
    ):
        assert leaf_from_native(name) == name


@pytest.mark.parametrize("convert", [from_original, from_native])
def test_wrappers_are_dropped_wherever_they_stand(convert):
    assert (
        convert("model.layers.1.mlp.down_proj.base_layer.weight") == "decoder.layers.1.mlp.down_proj.weight"
    )
    assert (
        convert(AUDIO + "encoder.encoders.0._checkpoint_wrapped_module.conv.glu.b1")
        == "speech_encoder.encoder.encoders.0.conv.glu.b1"
    )


def test_an_adapter_in_the_shards_keeps_its_name():
    key = "model.layers.0.self_attn.qkv_proj.lora_A.vision.weight"
    assert from_original(key) == "decoder.layers.0.self_attn.qkv_proj.lora_A.vision.weight"


@pytest.mark.parametrize("saved_as", ["", ".default", ".vision"])
def test_an_adapter_files_key_gets_the_adapters_name(saved_as):
    key = f"base_model.model.model.layers.3.mlp.gate_up_proj.lora_B{saved_as}.weight"
    assert from_adapter(key, "speech") == "decoder.layers.3.mlp.gate_up_proj.lora_B.speech.weight"


@pytest.mark.parametrize(
    "key", ["foo.weight", "model.foo.weight", "model.embed_tokens_extend.foo", "", "lm_head"]
)
def test_keys_of_no_component_have_no_name(key):
    assert from_original(key) is None
    assert from_native(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector.weight",
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.bias",
    ],
)
def test_what_is_no_lora_matrix_of_an_adapter_has_no_name(key):
    assert from_adapter(key, "vision") is None
