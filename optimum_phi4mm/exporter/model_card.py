"""The package's README.md (model card)."""

from __future__ import annotations

from .package import Package


__all__ = ["model_card"]


def model_card(package: Package, *, source: str, revision: str | None) -> str:
    """The text of the card."""
    return f"# {package.variant} {package.dtype}\n"
