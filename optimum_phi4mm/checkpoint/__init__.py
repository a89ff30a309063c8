"""Where weights come from: the layouts' key names, a reader that opens one tensor at a time, LoRA pairs."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .hub import HUB_OPTIONS, download, raw_config, resolve
from .lora import ADAPTERS, LORA_TARGETS, LoraAdapter, fold
from .names import from_adapter, from_native, from_original, leaf_from_native
from .reader import StoredTensor


__all__ = [
    "ADAPTERS",
    "HUB_OPTIONS",
    "LORA_TARGETS",
    "Checkpoint",
    "LoraAdapter",
    "StoredTensor",
    "download",
    "fold",
    "from_adapter",
    "from_native",
    "from_original",
    "leaf_from_native",
    "raw_config",
    "resolve",
]
