"""The model card tells what was exported, and its code runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from optimum_phi4mm.exporter.model_card import model_card
from optimum_phi4mm.exporter.package import Package, PackagedModel, TensorInfo


HUB_ID = "someone/Phi-4-multimodal-instruct"
CACHE = ("batch", 8, "past_seq", 128)


def make_package(
    folder: Path, dtype: str = "fp32", variant: str = "gated", validated: bool = True
) -> Package:
    """A package whose files hold nothing but have a size."""
    float_type = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16"}[dtype]
    features = TensorInfo(float_type, ("num_image_tokens", 3072))
    decoder_inputs = {
        "inputs_embeds": TensorInfo(float_type, ("batch", "seq_len", 3072)),
        **{
            f"past_key_values.{layer}.{part}": TensorInfo(float_type, CACHE)
            for layer in range(12)
            for part in ("key", "value")
        },
        "logits_to_keep": TensorInfo("INT64", (1,), optional=True),
    }
    if variant == "gated":
        decoder_inputs["adapter_gates"] = TensorInfo("FLOAT", ("gate_rows", 2), optional=True)
    package = Package(folder, variant, dtype)
    for key in ("vision", "speech", "embedding", "model"):
        package.models[key] = PackagedModel(
            folder / f"{key}.onnx",
            decoder_inputs if key == "model" else {"image_features": features},
            {"image_features": features, "present.0.key": features, "present.1.key": features},
        )
        package.models[key].path.write_bytes(b"0" * 1234)
        package.models[key].path.with_suffix(".onnx_data").write_bytes(b"0" * 2_500_000)
        if validated:
            package.models[key].differences = {
                "image_features": 3.25e-6,
                "present.0.key": 1e-7,
                "present.1.key": 2e-6,
            }
    return package


def test_says_what_was_exported(tmp_path):
    card = model_card(make_package(tmp_path), source=HUB_ID, revision="refs/pr/70")
    assert f"exported from {HUB_ID}, revision refs/pr/70 by" in card
    assert "- variant `gated`" in card
    assert "- float type float32" in card
    assert "| `vision.onnx` | pictures to features | 1.2 kB | 2.5 MB |" in card


def test_front_matter_names_the_base_model_of_a_hub_id_only(tmp_path):
    package = make_package(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    from_hub = model_card(package, source=HUB_ID, revision=None)
    from_folder = model_card(package, source=str(tmp_path / "checkpoint"), revision=None)
    assert from_hub.startswith("---\nlicense: mit\n")
    assert f"\nbase_model: {HUB_ID}\n" in from_hub
    assert "base_model" not in from_folder


def test_tells_only_the_last_part_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "fine-tuned").mkdir()
    package = make_package(tmp_path)
    monkeypatch.chdir(tmp_path / "fine-tuned")
    for source in (str(tmp_path / "fine-tuned"), f"{tmp_path}/fine-tuned/", "."):
        card = model_card(package, source=source, revision="main")
        assert "exported from fine-tuned by" in card
        assert str(tmp_path) not in card


def test_the_layers_cache_is_one_line_of_each_table(tmp_path):
    card = model_card(make_package(tmp_path), source=HUB_ID, revision=None)
    past = "| model | input | `past_key_values.0...11.key/.value` | FLOAT | [batch, 8, past_seq, 128] |  |"
    assert past in card
    assert card.count("past_key_values.0...11") == 1
    assert "| model | `present.*` | 1e-05 |" in card
    assert "| model | `image_features` | 1e-05 |" in card


def test_optional_inputs_come_with_their_default(tmp_path):
    card = model_card(make_package(tmp_path), source=HUB_ID, revision=None)
    assert "| model | input | `adapter_gates` | FLOAT | [gate_rows, 2] | [[1, 1]] |" in card
    assert "| model | input | `logits_to_keep` | INT64 | [1] | 0: all |" in card


@pytest.mark.parametrize("variant", ["merged", "vision", "speech", "text"])
def test_only_gated_packages_speak_of_gates(tmp_path, variant):
    assert "adapter_gates" in model_card(make_package(tmp_path), source=HUB_ID, revision=None)
    card = model_card(make_package(tmp_path, variant=variant), source=HUB_ID, revision=None)
    assert "adapter_gates" not in card
    assert "onnx_adapter" not in card


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("bf16", "has no bfloat16 kernels"), ("fp32", "was asked not to validate")],
)
def test_says_that_and_why_outputs_were_not_run(tmp_path, dtype, reason):
    card = model_card(make_package(tmp_path, dtype, validated=False), source=HUB_ID, revision=None)
    assert re.search(f"Outputs were not run: .*{reason}", card)
    assert "difference" not in card


def test_bfloat16_packages_promise_no_run_on_the_cpu(tmp_path):
    card = model_card(make_package(tmp_path, "bf16", validated=False), source=HUB_ID, revision=None)
    assert "```python" not in card


def test_is_the_same_wherever_it_is_made(tmp_path):
    cards = set()
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        cards.add(model_card(make_package(tmp_path / name), source=HUB_ID, revision=None))
    assert len(cards) == 1


@pytest.mark.parametrize("variant", ["gated", "speech", "text"])
def test_its_code_gives_an_answer_and_the_logits(export_package, tmp_path, monkeypatch, capsys, variant):
    folder = tmp_path / "package"
    shutil.copytree(export_package(variant=variant).path, folder)
    Image.new("RGB", (60, 40)).save(folder / "picture.jpg")
    soundfile.write(folder / "recording.flac", np.zeros(8000), 16000)
    card = (folder / "README.md").read_text(encoding="utf-8")
    answer, graphs = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(folder)
    exec(answer, {})
    assert capsys.readouterr().out.strip()
    names: dict = {}
    exec(graphs, names)
    assert names["logits"].shape == (1, names["ids"].size, 200064)
    assert np.isfinite(names["logits"]).all()
