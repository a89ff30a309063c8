"""Copies of the fixture checkpoints that a test may break."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint as links to its files: unlink a file before writing another in its place."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / folder.name, copy_function=os.symlink))

    return copy


def replace(file: Path, content: bytes | str) -> None:
    """Give a linked file new content."""
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Change a copied checkpoint's tensors; they become one `model.safetensors`."""
    tensors: Tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_adapter(folder: Path, adapter: str, change: Callable[[Tensors], None]) -> None:
    """Change the tensors of a copied native checkpoint's adapter."""
    file = folder / f"{adapter}-lora" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)


@pytest.fixture
def edits() -> type[Edits]:
    return Edits


class Edits:
    """The functions above, for tests: a conftest can't be imported by name beside another one."""

    replace = staticmethod(replace)
    tensors = staticmethod(edit_tensors)
    adapter = staticmethod(edit_adapter)
