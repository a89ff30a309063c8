"""LoRA adapters: what is known of them, whether their tensors agree, and how they fold into a weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configuration import read_json
from ..errors import CheckpointError


__all__ = [
    "ADAPTERS",
    "LORA_TARGETS",
    "AdapterSettings",
    "LoraAdapter",
    "fold",
    "match_tensors",
    "settings_from_config",
    "settings_from_folder",
]

ADAPTERS = ("vision", "speech")
LORA_TARGETS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

_MAX_RANK = 1 << 20
_MAX_ALPHA = 1e30
_PAIR = re.compile(r"decoder\.layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])\.(\w+)\.weight")
# Options of PEFT's LoraConfig that change what is computed; None, false and empty are no request.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)


@dataclass(frozen=True)
class AdapterSettings:
    """What a config says of an adapter.

    Args:
        source: where it says so, for error messages, e.g. `vision-lora/adapter_config.json`.
        rank: columns of B, rows of A.
        alpha: PEFT's `lora_alpha`.
        scaling: the factor of B A: `alpha / rank`, with `use_rslora` `alpha / sqrt(rank)`.
    """

    source: str
    rank: int
    alpha: float
    scaling: float


@dataclass(frozen=True)
class LoraAdapter:
    """One adapter of the decoder.

    Args:
        name: "vision" or "speech".
        rank: columns of B, rows of A.
        alpha: PEFT's `lora_alpha`.
        scaling: the factor of B A.
        targets: the linears it extends in every layer, among LORA_TARGETS.
    """

    name: str
    rank: int
    alpha: float
    scaling: float
    targets: frozenset[str]


def settings_from_config(raw: Mapping[str, Any], adapter: str) -> AdapterSettings:
    """Read `vision_lora` or `speech_lora` of a phi4mm config.

    Raises:
        CheckpointError: the entry is missing or malformed.
    """
    source = f"config.json {adapter}_lora"
    settings = raw.get(f"{adapter}_lora")
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{source} is {settings!r}, expected an object with r and lora_alpha")
    return _settings(settings, source)


def settings_from_folder(folder: Path, adapter: str) -> AdapterSettings:
    """Read `vision-lora/adapter_config.json` or `speech-lora/adapter_config.json`, PEFT's LoraConfig.

    Args:
        folder: the checkpoint's folder.
        adapter: "vision" or "speech".

    Raises:
        CheckpointError: the file is missing or malformed, or asks for what this package doesn't compute.
    """
    source = f"{adapter}-lora/adapter_config.json"
    settings = read_json(folder / f"{adapter}-lora" / "adapter_config.json")
    for option, supported in (("peft_type", "LORA"), ("bias", "none")):
        found = settings.get(option, supported)
        if found != supported:
            raise CheckpointError(
                f"{source} has {option}={found!r}, expected {supported!r}: it can't be exported"
            )
    for option in _UNSUPPORTED:
        if settings.get(option):
            raise CheckpointError(
                f"{source} has {option}={settings[option]!r}, expected none: such an adapter can't be "
                "exported, merge it into the base weights first"
            )
    return _settings(settings, source)


def match_tensors(
    adapter: str, settings: AdapterSettings, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> LoraAdapter:
    """Check an adapter's tensors against its settings; which linears it extends follows from the tensors.

    Args:
        adapter: "vision" or "speech".
        settings: what the checkpoint's config says of it.
        shapes: shape by canonical name, of any tensors.
        num_layers: number of decoder layers.

    Raises:
        CheckpointError: there are no tensors, a pair is incomplete, a rank is another, or a name is not
            understood.
    """
    own = {name: shape for name, shape in shapes.items() if ".lora_" in name and f".{adapter}." in name}
    targets = set()
    for name in own:
        match = _PAIR.fullmatch(name)
        if match is None or match[2] not in LORA_TARGETS or int(match[1]) >= num_layers:
            raise CheckpointError(
                f"the {adapter} adapter has a tensor {name}, expected lora_A and lora_B of "
                f"{', '.join(LORA_TARGETS)} in {num_layers} layers"
            )
        targets.add(match[2])
    if not targets:
        raise CheckpointError(
            f"{settings.source} describes the {adapter} adapter, but the checkpoint has no tensor of it"
        )

    for layer in range(num_layers):
        for target in sorted(targets, key=LORA_TARGETS.index):
            for matrix, axis in (("A", 0), ("B", 1)):
                name = f"decoder.layers.{layer}.{target}.lora_{matrix}.{adapter}.weight"
                if name not in own:
                    raise CheckpointError(
                        f"the {adapter} adapter has no {name}, expected A and B of {target} in every layer"
                    )
                if len(own[name]) != 2:
                    raise CheckpointError(f"{name} has shape {list(own[name])}, expected a matrix")
                rank = own[name][axis]
                if rank != settings.rank:
                    raise CheckpointError(
                        f"{settings.source} has r={settings.rank} but {name} has rank {rank}"
                    )
    return LoraAdapter(adapter, settings.rank, settings.alpha, settings.scaling, frozenset(targets))


def fold(base: Tensor, pairs: Iterable[tuple[float, Tensor, Tensor]]) -> Tensor:
    """Fold adapters into a weight: `base + sum of scaling * B A`.

    All of it is computed in float32, also for bf16 weights: a product B A rounded to bf16's 8 bits, added to
    a much larger base, loses most of what the adapter changes. Round once, when the result is stored.

    Args:
        base: (out, in).
        pairs: for each adapter its scaling, A (rank, in) and B (out, rank).

    Returns:
        float32 (out, in), never the storage of `base`.
    """
    folded = base.to(torch.float32, copy=True)
    for scaling, a, b in pairs:
        folded.addmm_(b.to(torch.float32), a.to(torch.float32), alpha=scaling)
    return folded


def _settings(settings: Mapping[str, Any], source: str) -> AdapterSettings:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= _MAX_RANK:
        raise CheckpointError(f"{source} has r={rank!r}, expected a positive integer")
    # NaN, which JSON files of Python can hold, fails the comparison.
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha <= _MAX_ALPHA:
        raise CheckpointError(f"{source} has lora_alpha={alpha!r}, expected a number above 0")
    rank_stabilised = settings.get("use_rslora")
    if rank_stabilised not in (None, True, False):
        raise CheckpointError(f"{source} has use_rslora={rank_stabilised!r}, expected true or false")
    scaling = alpha / math.sqrt(rank) if rank_stabilised else alpha / rank
    return AdapterSettings(source, rank, float(alpha), scaling)
