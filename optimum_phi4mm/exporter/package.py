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
    """Refuse a target that holds something: an export never overwrites.

    Raises:
        ExportError: when `output` is a file or a folder with anything in it.
    """
    if output.is_dir():
        found = sorted(path.name for path in output.iterdir())
        if found:
            raise ExportError(
                f"{output} already holds {found[0]} (entries: {len(found)}): give an empty or new folder"
            )
    elif os.path.lexists(output):
        raise ExportError(f"{output} is not a folder: give an empty or new one")


def check_space(output: Path, needed: int) -> None:
    """Refuse an export that the disk can't hold, before anything is written.

    Raises:
        ExportError: with the bytes needed and free.
    """
    existing = next(path for path in (output, *output.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ExportError(
            f"the package needs {needed / 1e9:.2f} GB and {existing} has {free / 1e9:.2f} GB free: "
            "free some space, choose another folder or a smaller --dtype"
        )


@contextlib.contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends, and vanishes when it fails."""
    output = output.absolute()
    made = [path for path in output.parents if not path.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
    try:
        yield folder
        _move_into_place(folder, output)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:  # innermost first
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _move_into_place(folder: Path, output: Path) -> None:
    """Put the finished folder at `output`, which is absent or empty."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(
        output.stat().st_mode & 0o7777 if output.exists() else 0o777 & ~umask
    )  # mkdtemp made it private
    check_output(output)
    if output.exists() and (output.samefile(os.curdir) or output.is_mount()):
        # A shell stands in this folder, or it is a volume: it can't be exchanged, only filled. The config
        # comes last, because without it nothing takes the folder for a package.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            path.rename(output / path.name)
        folder.rmdir()
    else:
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
