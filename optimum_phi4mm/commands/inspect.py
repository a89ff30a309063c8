"""`optimum-cli phi4mm inspect`: a package's models, inputs, outputs and sizes, read without its weights."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand

from ..errors import PackageError, Phi4MMError


__all__ = ["InspectCommand"]


class InspectCommand(BaseOptimumCLICommand):
    """Prints one table, or one JSON object."""

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("folder", metavar="DIR", help="An exported package.")
        parser.add_argument("--json", action="store_true", help="Print the same as one object.")

    def run(self) -> None:
        try:
            content = _read(Path(self.args.folder))
        except Phi4MMError as error:
            sys.exit(f"optimum-cli phi4mm inspect: {error}")
        if self.args.json:
            print(json.dumps(content))
        else:
            _print(content)


def _read(folder: Path) -> dict[str, Any]:
    """Variant, float type, and per model its sizes in bytes, inputs and outputs."""
    import onnx_ir as ir

    from ..exporter.configs import COMPONENTS
    from ..exporter.package import describe

    if not folder.is_dir():
        raise PackageError(f"{folder} is no folder, expected an exported package")
    content: dict[str, Any] = {"variant": None, "dtype": None, "models": {}}
    for name in COMPONENTS:
        path = folder / f"{name}.onnx"
        weights = path.with_name(f"{path.name}_data")
        for file in (path, weights):
            if not file.is_file():
                raise PackageError(f"{file} does not exist: the package is incomplete, export it again")
        try:
            graph = ir.load(path)
        except Exception as error:  # protobuf's own errors have no common class
            raise PackageError(f"{path} is no ONNX model: {error}") from error
        variant, dtype = (graph.metadata_props.get(f"phi4mm.{key}") for key in ("variant", "dtype"))
        if variant is None:
            raise PackageError(f"{path} was not written by this exporter")
        content["variant"], content["dtype"] = variant, dtype
        model = describe(graph, path)
        content["models"][name] = {
            "graph_bytes": path.stat().st_size,
            "weight_bytes": weights.stat().st_size,
            "opset": graph.opset_imports[""],
            "inputs": {key: value._asdict() for key, value in model.inputs.items()},
            "outputs": {key: value._asdict() for key, value in model.outputs.items()},
        }
    return content


def _print(content: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    total = sum(model["weight_bytes"] for model in content["models"].values())
    console.print(f"variant {content['variant']}, {content['dtype']}, {_size(total)} of weights")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "", "name", "type", "shape"):
        table.add_column(heading)
    for name, model in content["models"].items():
        first = f"{name}.onnx\n{_size(model['weight_bytes'])}, opset {model['opset']}"
        for kind in ("inputs", "outputs"):
            for key, info in _shown(model[kind]).items():
                note = kind.removesuffix("s") if not info["optional"] else "optional"
                shape = ", ".join(map(str, info["shape"]))
                table.add_row(first, note, key, info["dtype"], f"({shape})")
                first = ""
        table.add_section()
    console.print(table)


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """The cache's tensors of all layers as one."""
    cached = [key for key in values if key.endswith((".key", ".value"))]
    if not cached:
        return values
    layers = len(cached) // 2
    shown = {key: value for key, value in values.items() if key not in cached}
    stem = cached[0].split(".")[0]
    return {**shown, f"{stem}.0…{layers - 1}.key/.value": values[cached[0]]}


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.2f} GB"
