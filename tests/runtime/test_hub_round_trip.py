"""A package goes to the Hub and back, and the command exports from it, against a server on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer

import optimum_phi4mm


PROJECT = Path(optimum_phi4mm.__file__).parents[1]
NAME = "microsoft/Phi-4-multimodal-instruct"
MODELS = ("vision", "speech", "embedding", "model")


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


@pytest.fixture
def run(server, tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs a process that takes the server for the Hub, with a cache of its own."""

    def start(*command: Any, status: int = 0) -> subprocess.CompletedProcess:
        variables = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "HF_ENDPOINT": server.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_XET": "1",
        }
        ended = subprocess.run(
            [sys.executable, *map(str, command)], env=variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended

    return start


def hold(server: HubServer, repository: str, folder: Path) -> None:
    """Let the server have a repository with a folder's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    server.repositories[repository] = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in files
    }


def test_the_command_exports_from_the_hub_by_the_models_name(
    server, run, original_checkpoint, package, tmp_path
):
    hold(server, NAME, original_checkpoint)
    marker = tmp_path / "marker"
    foreign = {
        "modeling_phi4mm.py": f"open({str(marker)!r}, 'w')",
        "pytorch_model.bin": "pickle",
        "a/b.json": "1",
    }
    server.repositories[NAME] |= {name: text.encode() for name, text in foreign.items()}
    server.cards[NAME] = {"pipeline_tag": "automatic-speech-recognition", "library_name": "transformers"}
    server.cut.add("model-00001-of-00002.safetensors")
    command = ("-m", "optimum.commands.optimum_cli", "export", "onnx", "--model", NAME, tmp_path / "out")
    ended = run(*command, status=1)
    assert NAME in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()
    ended = run(*command)
    assert "Traceback" not in ended.stderr
    for name in MODELS:
        for file in (f"{name}.onnx", f"{name}.onnx_data"):
            assert (tmp_path / "out" / file).read_bytes() == (package.path / file).read_bytes(), file
    assert NAME in (tmp_path / "out" / "README.md").read_text()
    assert not set(foreign) & set(server.downloaded) and not marker.exists()
    # The download that was cut off went on where it had ended, and nothing was sent twice.
    assert [name for name, _ in server.ranges] == ["model-00001-of-00002.safetensors"]
    assert len(server.downloaded) == len(set(server.downloaded))


ANSWER = """
import json, sys
import numpy as np
from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor
source, prompt = sys.argv[1:]
processor = Phi4MMProcessor.from_pretrained(source)
picture = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)
inputs = processor(prompt, [picture] if "image" in prompt else None)
model = ORTModelForPhi4MM.from_pretrained(source)
print(json.dumps(model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()))
"""


def test_a_package_goes_to_the_hub_and_back_with_only_the_files_that_are_needed(
    server, run, package, tmp_path
):
    told = run(PROJECT / "examples" / "upload.py", "me/phi4-onnx", package.path)
    assert f"{server.endpoint}/me/phi4-onnx" in told.stdout
    (created,) = server.created
    assert (created["organization"], created["name"], created["private"]) == ("me", "phi4-onnx", True)
    assert sorted(server.uploaded) == sorted(path.name for path in package.path.iterdir())
    for name, content in server.repositories["me/phi4-onnx"].items():
        assert content == (package.path / name).read_bytes(), name

    shutil.rmtree(tmp_path / "home")  # the example has downloaded again what it uploaded
    server.downloaded.clear()
    question = "<|user|>Hello<|end|><|assistant|>"
    server.cut.add("model.onnx_data")
    cut = run("-c", ANSWER, "me/phi4-onnx", question, status=1)
    assert "PackageError" in cut.stderr.splitlines()[-1]
    text = run("-c", ANSWER, "me/phi4-onnx", question)
    assert [name for name, _ in server.ranges] == ["model.onnx_data"]
    assert not [name for name in server.downloaded if name.startswith(("vision.onnx", "speech.onnx"))]
    assert "generation_config.json" in server.downloaded  # else it would not stop where it should
    assert len(server.downloaded) == len(set(server.downloaded))
    local = run("-c", ANSWER, package.path, question)
    assert json.loads(text.stdout) == json.loads(local.stdout)

    first = len(server.downloaded)
    picture = run("-c", ANSWER, "me/phi4-onnx", "<|image_1|>Hello")
    assert sorted(server.downloaded[first:]) == ["vision.onnx", "vision.onnx_data"]
    local = run("-c", ANSWER, package.path, "<|image_1|>Hello")
    assert json.loads(picture.stdout) == json.loads(local.stdout)
    print("uploaded:", *server.uploaded, "\ndownloaded:", *server.downloaded, "\nresumed:", *server.ranges)


SAVE = """
import sys
from optimum_phi4mm import ORTModelForPhi4MM
ORTModelForPhi4MM.from_pretrained("me/phi4-onnx").save_pretrained(sys.argv[1])
"""


def test_a_package_of_the_hub_is_saved_whole(server, run, package, tmp_path):
    hold(server, "me/phi4-onnx", package.path)
    run("-c", SAVE, tmp_path / "saved")
    expected = {path.name for path in package.path.iterdir()}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == expected
    for name in expected - {"generation_config.json"}:
        assert (tmp_path / "saved" / name).read_bytes() == (package.path / name).read_bytes(), name
