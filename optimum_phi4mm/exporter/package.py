"""The package's folder: what is in it, and how it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ..components.decoder import GATE_COLUMNS
from ..errors import ExportError


__all__ = [
    "Package",
    "PackagedModel",
    "TensorInfo",
    "check_output",
    "check_space",
    "describe",
    "staged",
    "write_adapters",
]


class TensorInfo(NamedTuple):
    """An input or output: ONNX type (`FLOAT16`), shape with names of dynamic axes, if optional."""

    dtype: str
    shape: tuple[int | str, ...]
    optional: bool = False


@dataclass
class PackagedModel:
    """One ONNX model of a package.

    Attributes:
        path: the `.onnx` file; its weights lie beside it in `<name>.onnx_data`.
        inputs, outputs: by name, in the graph's order.
        differences: largest absolute difference to the torch component per output, None without validation.
    """

    path: Path
    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]
    differences: dict[str, float] | None = None


@dataclass
class Package(Mapping[str, PackagedModel]):
    """An exported model: a mapping with the keys `vision`, `speech`, `embedding` and `model`."""

    path: Path
    variant: str
    dtype: str
    models: dict[str, PackagedModel] = field(default_factory=dict)

    def __getitem__(self, key: str) -> PackagedModel:
        return self.models[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def moved_to(self, folder: Path) -> Package:
        """The same package under its final path."""
        for model in self.models.values():
            model.path = folder / model.path.name
        self.path = folder
        return self


def check_output(output: Path) -> None:
    """Refuse a target that holds something, because an export never overwrites, or that can't be made.

    Raises:
        ExportError: when `output` is a file or a folder with anything in it, or lies where nothing can be
            written.
    """
    try:
        if output.is_dir():
            found = sorted(path.name for path in output.iterdir())
            if found:
                raise ExportError(
                    f"{output} already holds {found[0]} (entries: {len(found)}): give an empty or new folder"
                )
        elif os.path.lexists(output):
            raise ExportError(f"{output} is not a folder: give an empty or new one")
        parent = _stage_parent(output.absolute())
        existing = next(path for path in (parent, *parent.parents) if os.path.lexists(path))
        if not existing.is_dir():
            raise ExportError(f"{output} can't be made: {existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ExportError(f"{output} can't be made: {existing} is not writable")
    except OSError as error:
        raise ExportError(f"{output} can't be made: {error}") from error


def check_space(folder: Path, needed: int) -> None:
    """Refuse an export that the disk can't hold, before any weight is written.

    Args:
        folder: where the package is being written.
        needed: bytes.

    Raises:
        ExportError: with the bytes needed and free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"the package needs {needed / 1e9:.2f} GB and {folder.parent} has {free / 1e9:.2f} GB free: "
            "free some space, choose another folder or a smaller --dtype"
        )


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends, and vanishes when it fails.

    Raises:
        ExportError: what the system says when something can't be written.
    """
    output = output.absolute()
    parent = _stage_parent(output)
    made = [path for path in (parent, *parent.parents) if not path.exists()]
    folder = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name[:40]}.", suffix=".partial", dir=parent))
        yield folder
        _move_into_place(folder, output)
    except BaseException as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for path in made:  # innermost first
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise ExportError(f"{output} can't be written, nothing was kept: {error}") from error
        raise


def _stage_parent(output: Path) -> Path:
    """Where a package for `output` is written: in it where it can't be exchanged, else beside it.

    It can't where a shell stands in it or where it is a volume, which is another file system besides.
    """
    fixed = output.is_dir() and (output.samefile(os.curdir) or output.is_mount())
    return output if fixed else output.parent


def _move_into_place(folder: Path, output: Path) -> None:
    """Put the finished folder at `output`, which is absent or empty."""
    if folder.parent == output:
        # The config comes last, because without it nothing takes the folder for a package.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            if os.path.lexists(output / path.name):
                raise ExportError(f"{output} holds {path.name} now: give an empty or new folder")
            path.rename(output / path.name)
        folder.rmdir()
        return
    umask = os.umask(0)
    os.umask(umask)
    mode = output.stat().st_mode & 0o7777 if output.exists() else 0o777 & ~umask
    folder.chmod(mode)  # mkdtemp made it private
    check_output(output)
    folder.replace(output)


def write_adapters(folder: Path) -> None:
    """Write `vision`, `speech` and `text.onnx_adapter`: gates per kind of prompt, for ONNX Runtime."""
    import onnxruntime

    for name in (*GATE_COLUMNS, "text"):
        gates = np.zeros((1, len(GATE_COLUMNS)), dtype=np.float32)
        if name in GATE_COLUMNS:
            gates[0, GATE_COLUMNS[name]] = 1.0
        adapter = onnxruntime.AdapterFormat()
        adapter.set_adapter_version(1)
        adapter.set_model_version(1)
        adapter.set_parameters({"adapter_gates": onnxruntime.OrtValue.ortvalue_from_numpy(gates)})
        adapter.export_adapter(str(folder / f"{name}.onnx_adapter"))


def describe(model: ir.Model, path: Path) -> PackagedModel:
    """Read a graph's inputs and outputs for the package."""

    def infos(values: Sequence[ir.Value]) -> dict[str, TensorInfo]:
        return {
            str(value.name): TensorInfo(
                dtype=ir.DataType(value.dtype or 0).name,
                shape=tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape or ()),
                optional=value.name in model.graph.initializers,
            )
            for value in values
        }

    return PackagedModel(path, infos(model.graph.inputs), infos(model.graph.outputs))
