"""Decoder: embeddings to logits, with gated LoRA adapters, LongRoPE and a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Phi4MultimodalConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalDecoderLayer,
    Phi4MultimodalRMSNorm,
)

from .attention import with_masked_attention
from .lora import Gates
from .stack import LayerStack


__all__ = ["GATE_COLUMNS", "Decoder"]

GATE_COLUMNS = {"vision": 0, "speech": 1}


@dataclass
class LayerCache:
    """One layer's past, with the method by which transformers' attention adds the present to it."""

    key: Tensor  # (B, kv heads, past, D)
    value: Tensor

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, cache_kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        self.key = torch.cat([self.key, key], dim=2)
        self.value = torch.cat([self.value, value], dim=2)
        return self.key, self.value


class DecoderLayer(Phi4MultimodalDecoderLayer):
    """transformers' decoder layer with the arguments of a `LayerStack`."""

    def __init__(self, config: Phi4MultimodalConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gates = Gates()

    def forward(
        self,
        hidden: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden: F (B, S, H).
            key, value: F (B, kv heads, past, D).
            mask: bool (B, 1, S, past + S), True is visible.
            cos, sin: F (B, S, rotary width).
            gates: F (1 or B, adapters) for the LoRA linears, where there are any.

        Returns:
            The new hidden states, key and value.
        """
        if gates is not None:
            self.gates.set(gates, GATE_COLUMNS)
        cache = LayerCache(key, value)
        hidden = super().forward(
            hidden, attention_mask=mask, past_key_values=cache, position_embeddings=(cos, sin), use_cache=True
        )
        return hidden, cache.key, cache.value


class LongRope(nn.Module):
    """Rotary tables: `Phi4MultimodalRotaryEmbedding`, the switch to long factors a selection in the graph."""

    inv_freq: Tensor

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__()
        kind = "default" if config.rope_scaling is None else config.rope_scaling["type"]
        switch = config.original_max_position_embeddings
        compute = ROPE_INIT_FUNCTIONS[kind]
        with torch.device("cpu"):  # values are needed even where the module is built on meta
            short, self.attention_scaling = compute(config, torch.device("cpu"), seq_len=switch)
            long, _ = compute(config, torch.device("cpu"), seq_len=switch + 1)
            factors = torch.stack([short, long])  # (2, rotary width / 2)
        self.switch = switch
        self.register_buffer("inv_freq", factors, persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (B, S, rotary width) each, from int64 (B, S).

        The largest position of the call decides between the short and the long factors for all rows.
        """
        inv_freq = torch.where(position_ids.max() + 1 > self.switch, self.inv_freq[1], self.inv_freq[0])
        angles = position_ids[:, :, None].float() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


class Decoder(nn.Module):
    """`model.onnx`: see docs/contract.md. Follows `Phi4MultimodalForCausalLM`."""

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__()
        config = with_masked_attention(config)
        self.config = config
        self.layers = LayerStack(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Phi4MultimodalRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LongRope(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Sequence[Tensor],
        logits_to_keep: Tensor,
        adapter_gates: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Logits and the new cache.

        Args:
            inputs_embeds: F (batch, seq_len, hidden).
            attention_mask: int64 (batch, past_seq + seq_len), 0 hides.
            position_ids: int64 (batch, seq_len).
            past_key_values: key of layer 0, value of layer 0, key of layer 1, ...; F (batch, kv heads,
                past_seq, D).
            logits_to_keep: int64 (1,): logits of the last so many positions only; 0 is all.
            adapter_gates: float32 (1 or batch, 2): factors of the vision and the speech adapter; None where
                the linears have no adapters.

        Returns:
            Logits F (batch, kept, vocab), then the present keys and values in the order of the past ones.
        """
        cos, sin = self.rotary_emb(position_ids, inputs_embeds.dtype)
        mask = self.visible(attention_mask, inputs_embeds.shape[1], past_key_values[0].shape[2])
        gates = () if adapter_gates is None else (adapter_gates.to(inputs_embeds.dtype),)
        pairs = list(zip(past_key_values[::2], past_key_values[1::2], strict=True))
        hidden, present = self.layers(inputs_embeds, pairs, (mask, cos, sin, *gates))

        length = torch.ones_like(position_ids[0]).sum()
        start = torch.where(logits_to_keep > 0, (length - logits_to_keep).clamp(min=0), 0)[0].item()
        torch._check(start >= 0)
        torch._check(start <= hidden.shape[1])
        return (self.lm_head(self.norm(hidden[:, start:])), *present)

    def visible(self, attention_mask: Tensor, length: int, past: int) -> Tensor:
        """Which keys a position sees, bool (B, 1, S, past + S): earlier, no padding, inside the window."""
        key = torch.arange(past + length, device=attention_mask.device)
        query = key[past:, None]
        seen = key <= query
        window = self.config.sliding_window
        # The published config has a window larger than the context; then there is nothing to exclude.
        if window is not None and window < self.config.max_position_embeddings:
            seen = seen & (key > query - window)
        return seen & (attention_mask[:, None, None, :] > 0)
