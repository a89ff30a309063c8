"""A checkpoint in either layout, seen through canonical names, and checked against what a model needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Phi4MultimodalForCausalLM

from optimum_phi4mm.checkpoint import ADAPTERS, LORA_TARGETS, Checkpoint
from optimum_phi4mm.errors import CheckpointError


IMAGE = "model.embed_tokens_extend.image_embed."
EMBEDDING = "embedding.embed_tokens.weight"
HEAD = "decoder.lm_head.weight"
POSITIONS = "vision_encoder.img_processor.embeddings.position_embedding.weight"
QKV = "decoder.layers.0.self_attn.qkv_proj.weight"
LAST_VISION_LAYER = "vision_encoder.img_processor.encoder.layers.2."
UNUSED = (
    LAST_VISION_LAYER,
    "vision_encoder.img_processor.post_layernorm.",
    "vision_encoder.img_processor.head.",
)


def used(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """What a model built for the fixture checkpoint needs."""
    return {name: checkpoint.shape(name) for name in checkpoint.names() if not name.startswith(UNUSED)}


def test_both_layouts_hold_the_same_tensors_under_the_same_names(original_checkpoint, native_checkpoint):
    original, native = Checkpoint.open(original_checkpoint), Checkpoint.open(native_checkpoint)
    assert (original.layout, native.layout) == ("phi4mm", "phi4_multimodal")
    assert original.names() == native.names() == sorted(original.names())
    for name in original.names():
        tensor = original.tensor(name)
        assert tensor.shape == original.shape(name) == native.shape(name)
        assert tensor.dtype == original.dtype(name) == torch.bfloat16
        assert torch.equal(tensor, native.tensor(name)), name


def test_tensors_are_those_that_transformers_loads(native_checkpoint):
    checkpoint = Checkpoint.open(native_checkpoint)
    reference = Phi4MultimodalForCausalLM.from_pretrained(native_checkpoint, dtype=torch.bfloat16).model
    image, audio = reference.embed_tokens_extend.image_embed, reference.embed_tokens_extend.audio_embed
    for name, parameter in (
        ("vision_encoder.img_projection.2.bias", image.img_projection_down.bias),
        ("vision_encoder.sub_GN", image.sub_img_feature_extensor),
        (POSITIONS, image.img_processor.embeddings.position_embedding.weight),
        ("speech_encoder.audio_projection.vision.0.weight", audio.up_proj_for_vision_speech.weight),
        (
            "speech_encoder.encoder.encoders.1.self_attn.linear_out.weight",
            audio.encoder.encoders[1].self_attn.o_proj.weight,
        ),
        (
            "speech_encoder.encoder.encoders.0.feed_forward_in.net.2.weight",
            audio.encoder.encoders[0].feed_forward_in.down_proj.weight,
        ),
        (QKV, reference.layers[0].self_attn.qkv_proj.weight),
    ):
        assert torch.equal(checkpoint.tensor(name), parameter), name


@pytest.mark.parametrize("layout", ["original_checkpoint", "native_checkpoint"])
def test_both_adapters_are_known_with_rank_and_scaling(layout, request):
    checkpoint = Checkpoint.open(request.getfixturevalue(layout))
    assert list(checkpoint.adapters) == list(ADAPTERS) == ["vision", "speech"]
    vision, speech = checkpoint.adapters.values()
    assert (vision.name, vision.rank, vision.alpha, vision.scaling) == ("vision", 8, 12.0, 1.5)
    assert (speech.name, speech.rank, speech.alpha, speech.scaling) == ("speech", 10, 25.0, 2.5)
    assert vision.targets == speech.targets == frozenset(LORA_TARGETS)
    assert checkpoint.shape("decoder.layers.1.mlp.down_proj.lora_A.speech.weight") == (10, 112)


@pytest.mark.parametrize("layout", ["original_checkpoint", "native_checkpoint"])
def test_a_checkpoints_unused_tensors_are_no_error(layout, request):
    checkpoint = Checkpoint.open(request.getfixturevalue(layout))
    assert any(name.startswith(LAST_VISION_LAYER) for name in checkpoint.names())
    checkpoint.check(used(checkpoint))


def test_the_config_is_native_whatever_the_layout(original_checkpoint):
    checkpoint = Checkpoint.open(str(original_checkpoint))
    assert checkpoint.folder == original_checkpoint
    assert checkpoint.raw_config["model_type"] == "phi4mm"
    assert checkpoint.config.model_type == "phi4_multimodal"
    assert checkpoint.config.architectures == ["Phi4MultimodalForCausalLM"]


def test_a_tied_head_is_the_embedding(original_checkpoint):
    checkpoint = Checkpoint.open(original_checkpoint)
    assert HEAD in checkpoint.names()
    assert torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))


def test_a_tied_head_that_was_saved_all_the_same_is_ignored(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    edits.tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 3)}))
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))
    expected = used(checkpoint)
    checkpoint.check(expected)
    del expected[HEAD]
    checkpoint.check(expected)


def test_an_untied_checkpoint_needs_its_head(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    expected = used(Checkpoint.open(folder))
    config = json.loads((folder / "config.json").read_text())
    edits.replace(folder / "config.json", json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=rf"missing: {HEAD} \[200064, 64\]"):
        Checkpoint.open(folder).check(expected)


def test_a_tied_checkpoint_without_embedding_misses_both(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    expected = used(Checkpoint.open(folder))
    edits.tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=rf"missing: {HEAD}.*\n  missing: {EMBEDDING}"):
        Checkpoint.open(folder).check(expected)


def test_positions_stored_with_a_batch_axis_are_squeezed(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    key = IMAGE + "img_processor.embeddings.position_embedding.weight"
    edits.tensors(folder, lambda tensors: tensors.update({key: tensors[key][None].clone()}))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.shape(POSITIONS) == (1024, 64)
    assert torch.equal(checkpoint.tensor(POSITIONS), Checkpoint.open(original_checkpoint).tensor(POSITIONS))
    assert checkpoint.config.vision_config.image_size == 448


def test_wrapped_audio_blocks_and_rotary_frequencies_are_understood(original_checkpoint, copy_of, edits):
    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".encoders.0." in key]:
            tensors[key.replace(".encoders.0.", ".encoders.0._checkpoint_wrapped_module.")] = tensors.pop(key)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(6)

    folder = copy_of(original_checkpoint)
    edits.tensors(folder, wrap)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(used(Checkpoint.open(original_checkpoint)))


def test_what_transformers_saves_is_read(native_checkpoint, tmp_path):
    model = Phi4MultimodalForCausalLM.from_pretrained(native_checkpoint, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    for adapter in ADAPTERS:
        (tmp_path / f"{adapter}-lora").symlink_to(native_checkpoint / f"{adapter}-lora")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check(used(Checkpoint.open(native_checkpoint)))
    assert checkpoint.dtype(QKV) == torch.float16


def test_base_layers_of_an_adapted_model_are_read(native_checkpoint, copy_of, edits):
    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.base_layer.weight"] = tensors.pop(
            "model.layers.0.mlp.down_proj.weight"
        )

    folder = copy_of(native_checkpoint)
    edits.tensors(folder, wrap)
    Checkpoint.open(folder).check(used(Checkpoint.open(native_checkpoint)))


def test_one_error_lists_missing_misshapen_and_unknown_tensors(original_checkpoint, copy_of, edits):
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(65)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(64)
        tensors["model.visual.weight"] = torch.zeros(1)

    folder = copy_of(original_checkpoint)
    expected = used(Checkpoint.open(folder))
    edits.tensors(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check(expected)
    assert str(caught.value).split("\n  ")[1:] == [
        "wrong shape: decoder.layers.0.input_layernorm.weight is [65], expected [64]",
        "missing: decoder.norm.weight [64]",
        "unknown: decoder.layers.2.input_layernorm.weight",
        "unknown: model.visual.weight",
    ]


def test_a_long_list_of_problems_is_cut_with_how_many_more(original_checkpoint):
    checkpoint = Checkpoint.open(original_checkpoint)
    expected = used(checkpoint) | {f"decoder.extra.{index}": (1,) for index in range(14)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check(expected)
    lines = str(caught.value).split("\n  ")
    assert len(lines) == 1 + 10 + 1
    assert lines[-1] == "and 4 more"


def test_a_vision_layer_that_is_used_is_not_forgiven(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    expected = used(Checkpoint.open(folder))
    key = IMAGE + "img_processor.encoder.layers.1.extra.weight"
    edits.tensors(folder, lambda tensors: tensors.update({key: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"unknown: .*layers\.1\.extra\.weight"):
        Checkpoint.open(folder).check(expected)


@pytest.mark.parametrize(("feature_layer", "layers"), [(-1, 3), (-2, 2), (-3, 1), (3, 3), (2, 2), (1, 1)])
def test_vision_layers_are_used_up_to_the_feature_layer(
    native_checkpoint, copy_of, edits, feature_layer, layers
):
    folder = copy_of(native_checkpoint)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["feature_layer"] = feature_layer
    edits.replace(folder / "config.json", json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    expected = used(checkpoint)
    prefix = "vision_encoder.img_processor.encoder.layers."
    in_tower = {name: checkpoint.shape(name) for name in checkpoint.names() if name.startswith(prefix)}
    expected |= in_tower
    needed = {name for name in in_tower if int(name[len(prefix) :].split(".")[0]) < layers}
    checkpoint.check(
        {name: shape for name, shape in expected.items() if name not in in_tower or name in needed}
    )
    with pytest.raises(CheckpointError, match=rf"unknown: {prefix}{layers - 1}\."):
        last = f"{prefix}{layers - 1}."
        checkpoint.check({name: shape for name, shape in expected.items() if not name.startswith(last)})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.layers.2.mlp.down_proj.weight", "decoder.layers.2.mlp.down_proj.weight"),
        ("model.layers.0.self_attn.qkv_proj.bias", "decoder.layers.0.self_attn.qkv_proj.bias"),
        ("some.other.model.weight", "some.other.model.weight"),
        (
            "model.layers.0.mlp.down_proj.lora_A.third.weight",
            "decoder.layers.0.mlp.down_proj.lora_A.third.weight",
        ),
    ],
)
def test_an_unknown_tensor_is_named(original_checkpoint, copy_of, edits, key, name):
    folder = copy_of(original_checkpoint)
    edits.tensors(folder, lambda tensors: tensors.update({key: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=rf"unknown: {name}$"):
        Checkpoint.open(folder).check(used(Checkpoint.open(original_checkpoint)))


def test_an_untied_head_is_its_own_tensor(checkpoint):
    opened = Checkpoint.open(checkpoint("phi4mm", tied=False))
    assert not torch.equal(opened.tensor(HEAD), opened.tensor(EMBEDDING))
    opened.check(used(opened))


def test_a_broken_adapter_file_is_named(native_checkpoint, copy_of, edits):
    folder = copy_of(native_checkpoint)
    edits.replace(folder / "vision-lora" / "adapter_model.safetensors", b"")
    with pytest.raises(CheckpointError, match=r"vision-lora/adapter_model\.safetensors is truncated"):
        Checkpoint.open(folder)


def test_a_tensor_stored_twice_is_named_with_both_keys(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    key = "model.layers.0.mlp.down_proj."
    edits.tensors(
        folder, lambda tensors: tensors.update({key + "weight": tensors[key + "base_layer.weight"].clone()})
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "decoder.layers.0.mlp.down_proj.weight is stored twice" in message
    assert f"{key}base_layer.weight in " in message
    assert f"{key}weight in " in message


def test_a_quantised_weight_is_refused_when_the_checkpoint_is_opened(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    edits.tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* is stored as I8"):
        Checkpoint.open(folder)


def test_an_unused_tensor_may_be_of_any_type(original_checkpoint, copy_of, edits):
    folder = copy_of(original_checkpoint)
    key = IMAGE + "img_processor.post_layernorm.bias"
    edits.tensors(folder, lambda tensors: tensors.update({key: torch.zeros(64, dtype=torch.int8)}))
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(used(checkpoint))


def test_a_tensor_that_is_not_there_is_named(original_checkpoint):
    checkpoint = Checkpoint.open(original_checkpoint)
    for read in (checkpoint.tensor, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(CheckpointError, match=r"has no tensor decoder\.nothing"):
            read("decoder.nothing")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_adapter_file_is_named(native_checkpoint, copy_of, file):
    folder = copy_of(native_checkpoint)
    (folder / "speech-lora" / file).unlink()
    with pytest.raises(CheckpointError, match=rf"speech-lora/{file} does not exist"):
        Checkpoint.open(folder)


def test_a_missing_adapter_folder_is_named(native_checkpoint, tmp_path):
    for file in native_checkpoint.iterdir():
        if file.name != "vision-lora":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=r"vision-lora/adapter_model\.safetensors does not exist"):
        Checkpoint.open(tmp_path)


def test_an_adapter_of_another_rank_than_its_config_says_is_refused(native_checkpoint, copy_of, edits):
    folder = copy_of(native_checkpoint)
    file = folder / "speech-lora" / "adapter_config.json"
    edits.replace(file, json.dumps({**json.loads(file.read_text()), "r": 12}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value) == (
        "speech-lora/adapter_config.json has r=12 but "
        "decoder.layers.0.self_attn.qkv_proj.lora_A.speech.weight has rank 10"
    )


def test_an_adapter_may_leave_out_a_target_in_all_layers_but_not_in_one(native_checkpoint, copy_of, edits):
    def without(tensors: dict[str, torch.Tensor], part: str) -> None:
        for key in [key for key in tensors if part in key]:
            del tensors[key]

    folder = copy_of(native_checkpoint)
    edits.adapter(folder, "vision", lambda tensors: without(tensors, "o_proj"))
    adapters = Checkpoint.open(folder).adapters
    assert adapters["vision"].targets == frozenset(LORA_TARGETS) - {"self_attn.o_proj"}
    assert adapters["speech"].targets == frozenset(LORA_TARGETS)
    edits.adapter(folder, "speech", lambda tensors: without(tensors, "layers.1.mlp.down_proj"))
    with pytest.raises(
        CheckpointError, match=r"no decoder\.layers\.1\.mlp\.down_proj\.lora_A\.speech\.weight"
    ):
        Checkpoint.open(folder)


def test_what_an_adapter_file_holds_beside_lora_is_unknown(native_checkpoint, copy_of, edits):
    folder = copy_of(native_checkpoint)
    key = "base_model.model.lm_head.weight"
    edits.adapter(folder, "vision", lambda tensors: tensors.update({key: torch.zeros(1)}))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=rf"unknown: {key}"):
        checkpoint.check(used(checkpoint))


def test_an_adapter_that_is_in_the_shards_too_is_stored_twice(native_checkpoint, copy_of, edits):
    folder = copy_of(native_checkpoint)
    key = "model.layers.0.mlp.down_proj.lora_A.vision.weight"
    edits.tensors(folder, lambda tensors: tensors.update({key: torch.zeros(8, 112)}))
    with pytest.raises(CheckpointError, match=r"lora_A\.vision\.weight is stored twice"):
        Checkpoint.open(folder)


def test_the_original_layouts_own_adapter_folders_are_left_alone(original_checkpoint, copy_of):
    folder = copy_of(original_checkpoint)
    (folder / "vision-lora").mkdir()
    (folder / "vision-lora" / "adapter_model.safetensors").write_bytes(b"never opened")
    Checkpoint.open(folder)


@pytest.mark.parametrize("path", ["nowhere", "config.json"])
def test_what_is_no_folder_is_refused(original_checkpoint, path):
    with pytest.raises(CheckpointError, match=rf"{path} is no folder"):
        Checkpoint.open(Path(original_checkpoint) / path)
