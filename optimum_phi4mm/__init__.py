"""Phi-4-multimodal for ONNX Runtime: a plugin of Optimum's ONNX exporter. Importing it loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import registration


if TYPE_CHECKING:
    from .errors import CheckpointError, ExportError, Phi4MMError, ValidationError
    from .exporter.package import Package
    from .registration import export

_PUBLIC = {
    "CheckpointError": ".errors",
    "ExportError": ".errors",
    "Package": ".exporter.package",
    "Phi4MMError": ".errors",
    "ValidationError": ".errors",
    "export": ".registration",
}

__all__ = [
    "CheckpointError",
    "ExportError",
    "Package",
    "Phi4MMError",
    "ValidationError",
    "export",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


registration.install()
