"""Attention with a boolean mask, given to transformers' layers through its attention interface."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


__all__ = ["masked_attention", "with_masked_attention"]

_NAME = "phi4mm_masked"

Config = TypeVar("Config", bound=PretrainedConfig)


def masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Eager attention that replaces hidden scores instead of adding to them.

    Follows `eager_attention_forward` of transformers' modeling_phi4_multimodal.py (scores and softmax in the
    same order and type), with two differences that don't change a live row's result. Hidden scores are set to
    the type's lowest number: adding it overflows to -inf in half precision, and a row that hides everything
    becomes NaN. And key-value heads are not repeated for their query heads; the query heads of one key-value
    head are its rows.

    Args:
        module: the calling layer (unused; transformers' interface passes it).
        query: (B, heads, S, D).
        key: (B, key-value heads, T, D).
        value: (B, key-value heads, T, D).
        attention_mask: bool, broadcasts to (B, heads, S, T); True is visible.
        scaling: factor of the scores.

    Returns:
        The output (B, S, heads, D), and None in place of the weights.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, (heads // kv_heads) * length, width)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * scaling
    scores = scores.view(batch, heads, length, -1)
    scores = torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    out = torch.matmul(weights.view(batch, kv_heads, (heads // kv_heads) * length, -1), value)
    return out.reshape(batch, heads, length, width).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, masked_attention)


def with_masked_attention(config: Config) -> Config:
    """A copy of `config` whose layers call `masked_attention`."""
    config = copy.deepcopy(config)
    config._attn_implementation = _NAME
    return config
