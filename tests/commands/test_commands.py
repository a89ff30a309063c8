"""`optimum-cli phi4mm generate` and `inspect` as a user runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """Runs `optimum-cli phi4mm` in this process; gives what it printed, and what it exits with."""
    import optimum.commands.optimum_cli as cli

    def run(*arguments: Any) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "phi4mm", *map(str, arguments)])
        status = ""
        try:
            cli.main()
        except SystemExit as ended:
            status = str(ended.code or "")
        return capsys.readouterr().out, status

    return run


@pytest.fixture
def media(tmp_path: Path) -> tuple[Path, Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    sound = np.random.default_rng(1).normal(0, 0.1, (22050, 2)).astype(np.float32)
    soundfile.write(tmp_path / "b.flac", sound, 44100)
    return tmp_path / "a.png", tmp_path / "b.flac"


def test_generate_streams_an_answer(command, package, media):
    picture, recording = media
    arguments = ("generate", "--model", package.path, "--max_new_tokens", 5, "--prompt", "What?")
    text, status = command(*arguments, "--image", picture, "--audio", recording)
    assert status == "" and text.strip()


def test_generate_as_json_counts_what_it_did(command, package, media):
    picture, recording = media
    arguments = ("generate", "--model", package.path, "--max_new_tokens", 5, "--json", "--prompt", "What?")
    text, status = command(*arguments, "--image", picture, picture, "--audio", recording, "--image", picture)
    found = json.loads(text)
    assert status == "" and found["new_tokens"] == 5
    frames = (round(0.5 * 16000) - 400) // 160 + 1
    assert found["audio_tokens"] == -(-frames // 8)
    assert found["image_tokens"] % 3 == 0 and found["image_tokens"] > 3 * 256
    assert found["prompt_tokens"] > found["image_tokens"] + found["audio_tokens"]
    # The streamed text is the same.
    streamed, _ = command(
        *arguments[:4], 5, "--prompt", "What?", "--image", picture, picture, picture, "--audio", recording
    )
    assert streamed.strip() == found["text"].strip()


def test_a_prompt_may_name_pictures_itself(command, package, media):
    picture, _ = media
    arguments = ("generate", "--model", package.path, "--max_new_tokens", 3, "--json", "--image", picture)
    named, _ = command(*arguments, "--prompt", "Look: <|image_1|>!")
    whole, _ = command(*arguments, "--prompt", "<|user|>Look: <|image_1|>!<|end|><|assistant|>")
    assert json.loads(named)["image_tokens"] == json.loads(whole)["image_tokens"] > 0


def test_sampling_follows_the_seed(command, package):
    arguments = ("generate", "--model", package.path, "--prompt", "a", "--json", "--max_new_tokens", 6)
    sampled = [
        command(*arguments, "--do_sample", "--temperature", 5.0, "--seed", seed)[0] for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--image", "no.png"], "no.png"),
        (["--audio", "no.flac"], "no.flac"),
        (["--max_new_tokens", "0"], "max_new_tokens"),
        (["--provider", "NoSuchProvider"], "NoSuchProvider"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_generate_ends_with_one_sentence(command, package, arguments, told):
    text, status = command("generate", "--model", package.path, "--prompt", "a", *arguments)
    assert text == "" and status.startswith("optimum-cli phi4mm generate: ") and told in status


def test_generate_from_a_folder_that_is_no_package(command, tmp_path):
    _, status = command("generate", "--model", tmp_path, "--prompt", "a")
    assert status.startswith("optimum-cli phi4mm generate: ") and str(tmp_path) in status


def test_inspect_shows_every_input_and_output(command, package):
    text, status = command("inspect", package.path)
    assert status == "" and "variant gated, fp32" in text
    for name, model in package.items():
        assert f"{name}.onnx" in text
        for value in (*model.inputs, *model.outputs):
            if not value.endswith((".key", ".value")):
                assert value in text
    assert "past_key_values.0…1.key/.value" in text and "(batch, 2, past_seq, 16)" in text


def test_inspect_as_json(command, package):
    content = json.loads(command("inspect", package.path, "--json")[0])
    assert (
        content["variant"] == "gated"
        and content["dtype"] == "fp32"
        and list(content["models"]) == list(package)
    )
    for name, model in package.items():
        found = content["models"][name]
        assert list(found["inputs"]) == list(model.inputs) and list(found["outputs"]) == list(model.outputs)
        assert found["weight_bytes"] == model.path.with_name(f"{name}.onnx_data").stat().st_size


def test_inspect_names_what_is_missing(command, tmp_path):
    assert "is no folder" in command("inspect", tmp_path / "no")[1]
    assert "vision.onnx does not exist" in command("inspect", tmp_path)[1]
    for suffix in ("", "_data"):
        (tmp_path / f"vision.onnx{suffix}").write_bytes(b"\xff\xff")
    assert "no ONNX model" in command("inspect", tmp_path)[1]
