"""Adapters: what configs say, whether tensors agree with it, and folding."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_phi4mm.checkpoint import LORA_TARGETS, fold
from optimum_phi4mm.checkpoint.lora import (
    AdapterSettings,
    match_tensors,
    settings_from_config,
    settings_from_folder,
)
from optimum_phi4mm.errors import CheckpointError


SETTINGS = AdapterSettings("speech-lora/adapter_config.json", rank=4, alpha=6.0, scaling=1.5)
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none"}


def shapes(targets: tuple[str, ...] = LORA_TARGETS, layers: int = 3) -> dict[str, tuple[int, ...]]:
    pairs = {}
    for layer in range(layers):
        for target in targets:
            pairs[f"decoder.layers.{layer}.{target}.lora_A.speech.weight"] = (4, 16)
            pairs[f"decoder.layers.{layer}.{target}.lora_B.speech.weight"] = (32, 4)
    return pairs


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "speech-lora").mkdir()
    (folder / "speech-lora" / "adapter_config.json").write_text(json.dumps(settings))


def test_targets_follow_from_the_tensors():
    targets = ("self_attn.o_proj", "mlp.down_proj")
    other = {"decoder.layers.0.mlp.gate_up_proj.lora_A.vision.weight": (8, 16)}
    adapter = match_tensors("speech", SETTINGS, shapes(targets) | other, num_layers=3)
    assert adapter.targets == frozenset(targets)
    assert (adapter.name, adapter.rank, adapter.alpha, adapter.scaling) == ("speech", 4, 6.0, 1.5)


@pytest.mark.parametrize(("matrix", "shape"), [("A", (5, 16)), ("B", (32, 5))])
def test_a_rank_other_than_the_configs_is_refused(matrix, shape):
    name = f"decoder.layers.1.mlp.gate_up_proj.lora_{matrix}.speech.weight"
    with pytest.raises(CheckpointError) as caught:
        match_tensors("speech", SETTINGS, shapes() | {name: shape}, num_layers=3)
    assert str(caught.value) == f"speech-lora/adapter_config.json has r=4 but {name} has rank 5"


@pytest.mark.parametrize("matrix", ["A", "B"])
def test_a_target_missing_in_one_layer_is_named(matrix):
    tensors = shapes()
    name = f"decoder.layers.2.self_attn.qkv_proj.lora_{matrix}.speech.weight"
    del tensors[name]
    with pytest.raises(CheckpointError, match=rf"has no {name}, expected A and B"):
        match_tensors("speech", SETTINGS, tensors, num_layers=3)


def test_the_first_missing_tensor_is_named_when_a_whole_layer_has_no_adapter():
    with pytest.raises(
        CheckpointError, match=r"decoder\.layers\.3\.self_attn\.qkv_proj\.lora_A\.speech\.weight"
    ):
        match_tensors("speech", SETTINGS, shapes(), num_layers=5)


def test_an_adapter_without_tensors_is_refused():
    with pytest.raises(
        CheckpointError, match=r"describes the speech adapter, but the checkpoint has no tensor"
    ):
        match_tensors("speech", SETTINGS, {"decoder.norm.weight": (16,)}, num_layers=3)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.router.lora_A.speech.weight",
        "decoder.layers.3.mlp.down_proj.lora_A.speech.weight",
        "decoder.layers.0.mlp.down_proj.lora_magnitude_vector.speech.weight",
        "decoder.lm_head.lora_A.speech.weight",
        "decoder.layers.0.mlp.down_proj.lora_B.speech.bias",
    ],
)
def test_an_adapters_tensor_that_is_not_understood_is_named(name):
    with pytest.raises(CheckpointError, match=rf"has a tensor {name}"):
        match_tensors("speech", SETTINGS, shapes() | {name: (4, 16)}, num_layers=3)


def test_a_lora_tensor_that_is_no_matrix_is_named():
    name = "decoder.layers.0.mlp.down_proj.lora_A.speech.weight"
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[4\], expected a matrix"):
        match_tensors("speech", SETTINGS, shapes() | {name: (4,)}, num_layers=3)


def test_scaling_is_alpha_by_rank_in_either_layout(tmp_path):
    write_settings(tmp_path, PEFT)
    assert settings_from_folder(tmp_path, "speech").scaling == 1.5
    assert (
        settings_from_config({"speech_lora": {"r": 4, "lora_alpha": 6, "dp": 0.01}}, "speech").scaling == 1.5
    )


def test_rank_stabilised_scaling_is_alpha_by_its_root(tmp_path):
    write_settings(tmp_path, {**PEFT, "r": 9, "use_rslora": True})
    assert math.isclose(settings_from_folder(tmp_path, "speech").scaling, 2.0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "all"),
        ("use_dora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("rank_pattern", {"o_proj": 8}),
        ("alpha_pattern", {"o_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [5]),
        ("target_parameters", ["weight"]),
        ("alora_invocation_tokens", [1]),
    ],
)
def test_adapters_of_another_kind_are_refused_by_option(tmp_path, option, value):
    write_settings(tmp_path, {**PEFT, option: value})
    with pytest.raises(CheckpointError) as caught:
        settings_from_folder(tmp_path, "speech")
    assert f"speech-lora/adapter_config.json has {option}={value!r}, expected" in str(caught.value)


def test_options_that_ask_for_nothing_are_accepted(tmp_path):
    nothing = {"use_dora": False, "rank_pattern": {}, "modules_to_save": None, "layer_replication": None}
    write_settings(tmp_path, {**PEFT, **nothing})
    assert settings_from_folder(tmp_path, "speech").rank == 4


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("r", 0),
        ("r", -4),
        ("r", "4"),
        ("r", 4.0),
        ("r", True),
        ("r", None),
        ("r", math.nan),
        ("lora_alpha", 0),
        ("lora_alpha", -6),
        ("lora_alpha", "6"),
        ("lora_alpha", True),
        ("lora_alpha", None),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", 10**400),
        ("use_rslora", "no"),
    ],
)
def test_malformed_settings_are_refused_in_either_layout(tmp_path, option, value):
    settings = {**PEFT, option: value}
    write_settings(tmp_path, settings)
    with pytest.raises(CheckpointError, match=rf"speech-lora/adapter_config\.json has {option}="):
        settings_from_folder(tmp_path, "speech")
    with pytest.raises(CheckpointError, match=rf"config\.json speech_lora has {option}="):
        settings_from_config({"speech_lora": settings}, "speech")


@pytest.mark.parametrize("entry", [None, "lora", 3])
def test_a_missing_entry_of_the_config_is_named(entry):
    with pytest.raises(CheckpointError, match=r"config\.json vision_lora is"):
        settings_from_config({"vision_lora": entry}, "vision")


def test_a_missing_adapter_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"speech-lora/adapter_config\.json does not exist"):
        settings_from_folder(tmp_path, "speech")


def test_folding_sums_the_adapters_in_float32():
    torch.manual_seed(0)
    base = torch.randn(6, 5).bfloat16()
    pairs = [
        (scaling, torch.randn(rank, 5).bfloat16(), torch.randn(6, rank).bfloat16())
        for scaling, rank in ((2.0, 3), (0.5, 4))
    ]
    expected = base.double() + sum(scaling * b.double() @ a.double() for scaling, a, b in pairs)
    folded = fold(base, pairs)
    assert folded.dtype == torch.float32
    torch.testing.assert_close(folded.double(), expected, rtol=1e-5, atol=1e-5)


def test_folding_keeps_changes_that_bf16_arithmetic_loses():
    base = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    pair = (1.0, torch.full((1, 1), 0.5, dtype=torch.bfloat16), torch.full((1, 1), 0.5, dtype=torch.bfloat16))
    assert fold(base, [pair]).item() == 256.25


def test_folding_leaves_the_base_alone():
    base = torch.zeros(2, 2)
    fold(base, [(1.0, torch.ones(1, 2), torch.ones(2, 1))])
    assert base.sum() == 0
    assert fold(base, []).data_ptr() != base.data_ptr()
