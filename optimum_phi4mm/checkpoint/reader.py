"""Reading safetensors: every header up front, then one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..configuration import read_json
from ..errors import CheckpointError


__all__ = ["StoredTensor", "read_file", "read_folder"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its file's header says of it.

    Args:
        file: the safetensors file.
        key: the tensor's name in it.
        shape: the stored shape.
        stored_dtype: safetensors' name of the type, e.g. "BF16".
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    stored_dtype: str

    def dtype(self) -> torch.dtype:
        """The type as torch's.

        Raises:
            CheckpointError: the tensor is quantised or of integers.
        """
        if self.stored_dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.key} in {self.file} is stored as {self.stored_dtype}, expected {', '.join(_DTYPES)}: "
                "export the unquantised checkpoint, and quantise the exported model instead"
            )
        return _DTYPES[self.stored_dtype]

    def read(self) -> Tensor:
        """Read the tensor, in its stored shape and type.

        Raises:
            CheckpointError: the file has changed or gone since its header was read.
        """
        # Every page read through a mapping counts as this process's memory until the mapping ends. Opened for
        # one tensor only, it ends with that tensor, not with the export.
        try:
            with safe_open(self.file, framework="pt") as content:
                tensor = content.get_tensor(self.key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.key} can't be read from {self.file} any more: {error}") from error
        if tuple(tensor.shape) != self.shape or tensor.dtype is not self.dtype():
            raise CheckpointError(
                f"{self.key} in {self.file} was {self.stored_dtype} {list(self.shape)} and is now "
                f"{tensor.dtype} {list(tensor.shape)}: the file was replaced meanwhile, start again"
            )
        return tensor


def read_file(file: Path) -> dict[str, StoredTensor]:
    """Read and check the header of one safetensors file.

    Returns:
        What it holds, by its own keys.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: the checkpoint is incomplete, download it again")
    tensors = {}
    try:
        with safe_open(file, framework="pt") as content:
            for key in content.keys():  # noqa: SIM118 - the file is not iterable
                view = content.get_slice(key)
                tensors[key] = StoredTensor(file, key, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or no safetensors file ({error}): download it again"
        ) from error
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Read and check the headers of all of a checkpoint's shards.

    As in transformers' `from_pretrained`, a single `model.safetensors` goes before an index. No pickle is
    read.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names.

    Returns:
        What the checkpoint holds, by its own keys.

    Raises:
        CheckpointError: there are no safetensors, a shard is broken, or index and shards contradict each
            other.
    """
    if (folder / _SINGLE).is_file():
        return read_file(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)

    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{folder / _INDEX} has no weight_map, expected an object of file names by tensor name"
        )
    for key, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                f"{folder / _INDEX} gives {key} the file {shard!r}, expected the plain name of a "
                ".safetensors file in the same folder"
            )
    shards = {shard: read_file(folder / shard) for shard in sorted(set(weight_map.values()))}
    tensors = {}
    for key, shard in weight_map.items():
        if key not in shards[shard]:
            raise CheckpointError(f"{folder / _INDEX} says that {key} is in {shard}, which does not hold it")
        tensors[key] = shards[shard][key]
    return tensors


def _is_plain_name(name: object) -> bool:
    """Whether a name from an index can only be a file of the index's own folder, on any system."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and PureWindowsPath(name).name == name  # knows both kinds of separators, and drives
        and "\0" not in name
    )


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickles:
        return CheckpointError(
            f"{folder} holds its weights as pickle ({pickles[0]}), which is never read because it can run "
            "code: convert it to safetensors, with transformers' `save_pretrained(safe_serialization=True)` "
            "or with the Hub's safetensors/convert space"
        )
    return CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: there are no weights to export")
