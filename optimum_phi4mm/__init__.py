"""Phi-4-multimodal for ONNX Runtime: a plugin of Optimum's ONNX exporter. Importing it loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import registration


if TYPE_CHECKING:
    from .errors import CheckpointError, ExportError, InputError, PackageError, Phi4MMError, ValidationError
    from .exporter.package import Package
    from .registration import export
    from .runtime.modeling import ORTModelForPhi4MM
    from .runtime.processing import Phi4MMProcessor

_PUBLIC = {
    "CheckpointError": ".errors",
    "ExportError": ".errors",
    "InputError": ".errors",
    "ORTModelForPhi4MM": ".runtime.modeling",
    "Package": ".exporter.package",
    "PackageError": ".errors",
    "Phi4MMError": ".errors",
    "Phi4MMProcessor": ".runtime.processing",
    "ValidationError": ".errors",
    "export": ".registration",
}

__all__ = [
    "CheckpointError",
    "ExportError",
    "InputError",
    "ORTModelForPhi4MM",
    "Package",
    "PackageError",
    "Phi4MMError",
    "Phi4MMProcessor",
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
