"""The LoRA linear: a frozen weight and the gated contributions of its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


__all__ = ["Gates", "LoraLinear", "LoraShape"]


@dataclass(frozen=True)
class LoraShape:
    """What a LoRA linear needs to know of an adapter: its rank and its factor (alpha / rank)."""

    rank: int
    scaling: float


class Gates:
    """The gates of the running call, set by a layer for the linears inside it.

    transformers' layers pass no extra arguments down to their linears, so the layer leaves the gates here.
    """

    value: dict[str, Tensor]

    def set(self, gates: Tensor, adapters: Mapping[str, int]) -> None:
        """Keep `gates` (rows, adapters) as one (rows, 1, 1) factor per adapter name; rows are 1 or B."""
        self.value = {name: gates[:, column, None, None] for name, column in adapters.items()}


class LoraLinear(nn.Linear):
    """`y = x W^T + sum over adapters of gate * scaling * (x A^T) B^T`.

    The sum and its order follow `peft.tuners.lora.layer.Linear.forward`; the factor is applied between A and
    B, where it touches rank numbers per token and not the output's width.

    Args:
        base: the linear to extend; its parameters are taken over.
        adapters: rank and scaling by adapter name.
        gates: where the layer leaves the gates of the running call.
    """

    def __init__(self, base: nn.Linear, adapters: Mapping[str, LoraShape], gates: Gates) -> None:
        device, dtype = base.weight.device, base.weight.dtype
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scaling = {name: adapter.scaling for name, adapter in adapters.items()}
        self.gates = gates
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        for name, adapter in adapters.items():
            self.lora_A[name] = nn.Linear(base.in_features, adapter.rank, False, device, dtype)
            self.lora_B[name] = nn.Linear(adapter.rank, base.out_features, False, device, dtype)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, in) -> (B, S, out)
        out = super().forward(x)
        for name, scaling in self.scaling.items():
            out = out + self.lora_B[name](self.lora_A[name](x) * (self.gates.value[name] * scaling))
        return out
