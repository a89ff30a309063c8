"""Embedding: token ids to embeddings, with image and speech features in their placeholders' places."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Phi4MultimodalConfig


__all__ = ["Embedding"]


class Embedding(nn.Module):
    """`embedding.onnx`: see docs/contract.md. Follows `Phi4MultimodalFeatureEmbedding`, but counts."""

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__()
        self.image_token_id = config.vision_config.image_token_id
        self.audio_token_id = config.audio_config.audio_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: Tensor, image_features: Tensor, speech_features: Tensor) -> tuple[Tensor]:
        """Embed a batch of prompts.

        Args:
            input_ids: int64 (batch, seq_len), with one placeholder token per feature row.
            image_features: F (num_image_tokens, hidden); (0, hidden) where there are none.
            speech_features: F (num_audio_tokens, hidden); likewise.

        Returns:
            F (batch, seq_len, hidden).
        """
        # ONNX's Gather counts a negative id from the end; there is no token of such an id, so it must fail.
        ids = torch.where(input_ids < 0, self.embed_tokens.num_embeddings, input_ids)
        embeds = self.embed_tokens(ids).flatten(0, 1)
        # index_copy becomes ScatterND with as many updates as indices, which fails on any other number.
        # Neither index_put (a single row fills every place) nor masked_scatter (wrong numbers pass) would do.
        for token_id, features in (
            (self.image_token_id, image_features),
            (self.audio_token_id, speech_features),
        ):
            places = (input_ids == token_id).flatten().nonzero().squeeze(1)
            embeds = embeds.index_copy(0, places, features)
        return (embeds.view(*input_ids.shape, -1),)
