"""Shards are checked when a checkpoint is opened, tensors are read one by one, and no pickle is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from optimum_phi4mm.checkpoint.reader import read_file, read_folder
from optimum_phi4mm.errors import CheckpointError


INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with two small tensors each, and their index."""
    shards = {
        "model-1.safetensors": {
            "a": torch.arange(6.0).reshape(2, 3),
            "b": torch.ones(4, dtype=torch.float16),
        },
        "model-2.safetensors": {
            "c": torch.ones(1, dtype=torch.bfloat16),
            "d": torch.ones(2, dtype=torch.float64),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    write_index(tmp_path, {key: name for name, tensors in shards.items() for key in tensors})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_every_shards_header_is_read_and_tensors_on_demand(folder):
    tensors = read_folder(folder)
    assert {name: stored.shape for name, stored in tensors.items()} == {
        "a": (2, 3),
        "b": (4,),
        "c": (1,),
        "d": (2,),
    }
    assert tensors["a"].file == folder / "model-1.safetensors"
    assert torch.equal(tensors["a"].read(), torch.arange(6.0).reshape(2, 3))


def test_float_types_are_torch_types(folder):
    tensors = read_folder(folder)
    assert [tensors[name].dtype() for name in "abcd"] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ]
    assert [tensors[name].read().dtype for name in "abcd"] == [tensors[name].dtype() for name in "abcd"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_quantised_types_are_refused_by_name(tmp_path, dtype):
    save_file({"layer.weight": torch.zeros(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    stored = read_folder(tmp_path)["layer.weight"]
    with pytest.raises(
        CheckpointError, match=r"layer\.weight in .*model\.safetensors is stored as .*expected F64"
    ):
        stored.dtype()


def test_a_single_file_goes_before_an_index_as_in_transformers(folder):
    save_file({"only": torch.zeros(1)}, folder / "model.safetensors")
    assert list(read_folder(folder)) == ["only"]


def test_no_file_stays_open_or_mapped_once_a_tensor_is_gone(folder):
    tensors = read_folder(folder)
    tensor = tensors["a"].read()
    assert tensor.sum() == 15
    del tensor
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert not [
        descriptor for descriptor in os.listdir("/proc/self/fd") if str(folder) in _target(descriptor)
    ]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the one that listed the folder
        return ""


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_truncated_shard_is_named(folder, keep):
    shard = folder / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is truncated"):
        read_folder(folder)


def test_a_shard_of_something_else_is_named(folder):
    (folder / "model-1.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is truncated or no safetensors file"):
        read_folder(folder)


def test_a_missing_shard_is_named(folder):
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors does not exist"):
        read_folder(folder)


def test_a_shard_that_vanished_after_opening_is_named(folder):
    stored = read_folder(folder)["a"]
    stored.file.unlink()
    with pytest.raises(CheckpointError, match=r"a can't be read from .*model-1\.safetensors any more"):
        stored.read()


@pytest.mark.parametrize("replacement", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float16)])
def test_a_tensor_that_was_replaced_after_opening_is_named(folder, replacement):
    stored = read_folder(folder)["a"]
    stored.file.unlink()
    save_file({"a": replacement}, stored.file)
    with pytest.raises(CheckpointError, match=r"a in .*model-1\.safetensors was F32 \[2, 3\] and is now"):
        stored.read()


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "..",
        "",
        "/etc/passwd.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "model-1.bin",
        "model\0.safetensors",
        3,
        None,
        ["model-1.safetensors"],
    ],
)
def test_an_index_can_name_files_of_its_own_folder_only(folder, name):
    save_file({"a": torch.zeros(1)}, folder.parent / "outside.safetensors")
    write_index(folder, {"a": name})
    with pytest.raises(CheckpointError, match=r"index\.json gives a the file .*expected the plain name"):
        read_folder(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], "model-1.safetensors"])
def test_an_index_without_a_weight_map_is_refused(folder, weight_map):
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        read_folder(folder)


def test_a_tensor_that_its_shard_does_not_hold_is_named_with_the_shard(folder):
    write_index(folder, {"a": "model-1.safetensors", "d": "model-1.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"says that d is in model-1\.safetensors, which does not hold it"
    ):
        read_folder(folder)


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"never opened")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model-00001-of-00002\.bin.*convert it to safetensors"
    ):
        read_folder(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        read_folder(tmp_path)


def test_a_linked_shard_is_read_as_in_the_hubs_cache(folder, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "0a1b"
    shard = folder / "model-1.safetensors"
    shard.rename(blob)
    shard.symlink_to(blob)
    assert read_folder(folder)["a"].read().shape == (2, 3)


def test_a_single_file_can_be_read_by_itself(folder):
    assert sorted(read_file(folder / "model-1.safetensors")) == ["a", "b"]
