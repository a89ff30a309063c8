"""From a name to a folder: local paths as they are, and of the Hub's repositories only what is needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from huggingface_hub.utils import filter_repo_objects

from optimum_phi4mm.checkpoint import Checkpoint, hub, raw_config, resolve
from optimum_phi4mm.errors import CheckpointError


COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = [
    "README.md",
    "added_tokens.json",
    "config.json",
    "chat_template.jinja",
    "examples/what.json",
    "figures/plot.safetensors",
    "generation_config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "modeling_phi4mm.py",
    "preprocessor_config.json",
    "processor_config.json",
    "pytorch_model.bin",
    "speech-lora/adapter_config.json",
    "speech-lora/adapter_model.safetensors",
    "speech-lora/optimizer.bin",
    "speech-lora/tokenizer.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vision-lora/adapter_config.json",
    "vision-lora/adapter_model.safetensors",
    "vocab.json",
]
TOP_LEVEL = {
    name
    for name in REPOSITORY
    if "/" not in name and name not in ("README.md", "modeling_phi4mm.py", "pytorch_model.bin")
}
ADAPTERS = {name for name in REPOSITORY if "-lora/adapter" in name}


@pytest.fixture
def cache(tmp_path: Path, original_checkpoint: Path) -> Path:
    """A Hub cache that holds `someone/phi4mm`, and `someone/empty` without any file."""
    for repository in ("phi4mm", "empty"):
        folder = tmp_path / f"models--someone--{repository}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(COMMIT)
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        if repository == "phi4mm":
            shutil.copytree(original_checkpoint, snapshot, symlinks=True, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A Hub that has REPOSITORY, of the layout under "model_type"; notes what is fetched and how."""
    notes: dict[str, Any] = {"model_type": "phi4mm", "files": set(), "options": [], "prefix": ""}

    def fetch_file(name: str, file: str, subfolder: str | None = None, **options: Any) -> str:
        notes["options"].append({"name": name, "subfolder": subfolder, **options})
        path = tmp_path / (subfolder or "") / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"model_type": notes["model_type"]}))
        notes["files"].add(str(path.relative_to(tmp_path)))
        return str(path)

    def fetch_all(name: str, allow_patterns: Any = None, ignore_patterns: Any = None, **options: Any) -> str:
        notes["options"].append({"name": name, **options})
        files = [notes["prefix"] + file for file in REPOSITORY]
        notes["files"] |= set(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(tmp_path)

    monkeypatch.setattr(hub, "hf_hub_download", fetch_file)
    monkeypatch.setattr(hub, "snapshot_download", fetch_all)
    yield notes


def test_a_local_folder_is_returned_as_it_is(original_checkpoint, downloads):
    assert resolve(original_checkpoint) == original_checkpoint
    assert resolve(str(original_checkpoint.parent), subfolder=original_checkpoint.name) == original_checkpoint
    assert downloads["options"] == []


def test_a_cached_repository_is_found_without_a_connection(cache):
    folder = resolve("someone/phi4mm", cache_dir=cache, local_files_only=True)
    assert folder == cache / "models--someone--phi4mm" / "snapshots" / COMMIT
    assert Checkpoint.open(folder).layout == "phi4mm"


def test_a_revision_can_be_named_by_its_commit(cache):
    resolve("someone/phi4mm", revision=COMMIT, cache_dir=cache, local_files_only=True)
    with pytest.raises(CheckpointError, match="someone/phi4mm is no local folder"):
        resolve("someone/phi4mm", revision="v2", cache_dir=cache, local_files_only=True)


def test_of_the_original_layout_neither_adapters_nor_code_nor_pickles_are_fetched(downloads):
    resolve("someone/phi4mm")
    assert downloads["files"] == TOP_LEVEL


def test_of_the_native_layout_the_adapters_are_fetched_too(downloads):
    downloads["model_type"] = "phi4_multimodal"
    resolve("someone/phi4")
    assert downloads["files"] == TOP_LEVEL | ADAPTERS


@pytest.mark.parametrize("subfolder", ["inner", "inner/"])
def test_of_a_repository_with_a_subfolder_only_that_is_fetched(downloads, subfolder, tmp_path):
    downloads.update(model_type="phi4_multimodal", prefix="inner/")
    assert resolve("someone/phi4", subfolder=subfolder) == tmp_path / "inner"
    assert downloads["files"] == {f"inner/{file}" for file in TOP_LEVEL | ADAPTERS}


def test_every_option_reaches_every_download(downloads):
    options = {
        "revision": "refs/pr/70",
        "cache_dir": "somewhere",
        "token": "secret",
        "local_files_only": False,
        "force_download": True,
    }
    downloads["model_type"] = "phi4_multimodal"
    resolve("someone/phi4", **options)
    raw_config("someone/phi4", **options)
    assert len(downloads["options"]) == 4
    for used in downloads["options"]:
        assert options.items() <= used.items()


def test_another_model_is_refused_before_its_weights_are_fetched(downloads):
    downloads["model_type"] = "phi3"
    with pytest.raises(CheckpointError, match="model_type 'phi3'"):
        resolve("someone/phi3")
    assert downloads["files"] == {"config.json"}


def test_what_is_not_cached_is_an_error_with_the_hubs_own_message(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"someone/phi4mm is no local folder.*outgoing traffic has been disabled"
    ):
        resolve("someone/phi4mm", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="outgoing traffic has been disabled"):
        raw_config("someone/phi4mm", cache_dir=tmp_path, local_files_only=True)


def test_a_path_that_is_no_folder_is_named(tmp_path):
    missing = str(tmp_path / "nowhere")
    for read in (resolve, raw_config):
        with pytest.raises(CheckpointError, match=rf"{missing} is no local folder.*Repo id must"):
            read(missing)


@pytest.mark.parametrize("read", [resolve, raw_config])
@pytest.mark.parametrize("name", ["", "no such model", "nul\0character", "x" * 5000])
def test_a_name_of_neither_a_folder_nor_a_repository_is_a_checkpoint_error(read, name):
    with pytest.raises(CheckpointError, match=r"is no local folder|can't be opened as a folder"):
        read(name, local_files_only=True)


@pytest.mark.parametrize("read", [resolve, raw_config])
def test_options_that_exclude_each_other_are_a_checkpoint_error(read, tmp_path):
    with pytest.raises(CheckpointError, match=r"someone/phi4mm is no local folder.*force_download"):
        read("someone/phi4mm", cache_dir=tmp_path, local_files_only=True, force_download=True)


def hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    error = getattr(errors, kind)
    response = requests.Response()
    response.status_code = 404
    return error("404: nothing there", response=response)


@pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"])
def test_the_hubs_refusals_keep_their_message(kind, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    for read in (resolve, raw_config):
        with pytest.raises(CheckpointError, match=r"someone/phi4 is no local folder.*404: nothing there"):
            read("someone/phi4")


def test_a_lost_connection_is_a_checkpoint_error(monkeypatch):
    def lose(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, "hf_hub_download", lose)
    with pytest.raises(CheckpointError, match="no route to host"):
        resolve("someone/phi4")


def test_only_the_config_is_read_for_any_model(tmp_path, downloads):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert raw_config(tmp_path) == {"model_type": "llama"}
    assert raw_config("someone/phi4mm") == {"model_type": "phi4mm"}
    assert downloads["files"] == {"config.json"}


def test_a_model_without_config_has_none(tmp_path, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> str:
        raise hub_error("EntryNotFoundError")

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    assert raw_config(tmp_path) is None
    assert raw_config("someone/without-config") is None


def test_a_broken_local_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is no readable JSON file"):
        raw_config(tmp_path)
