"""Speech: mel frames to speech features. Conformer encoder and the two projections."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import Phi4MultimodalConfig
from transformers.models.phi4_multimodal.configuration_phi4_multimodal import Phi4MultimodalAudioConfig
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioConformerEncoderLayer,
    Phi4MultimodalAudioMeanVarianceNormLayer,
    Phi4MultimodalAudioNemoConvSubsampling,
    Phi4MultimodalAudioRelativeAttentionBias,
)

from .runtime_checks import OUT_OF_RANGE, count_rows
from .stack import LayerStack


__all__ = ["BLOCK_TOKENS", "SpeechEncoder"]

# Longer audio is cut into blocks of this many tokens that don't see each other (`max_seq_len` in
# `Phi4MultimodalAudioModel.forward`; it is written in the code there and in no config).
BLOCK_TOKENS = 500


class AudioModel(nn.Module):
    """Mean-variance norm, strided convolutions and conformer layers; follows `Phi4MultimodalAudioModel`."""

    def __init__(self, config: Phi4MultimodalAudioConfig) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = (
            "eager"  # adds the bias to the scores, which is this model's way of masking
        )
        self.time_reduction = config.time_reduction
        self.encoder_embedding = Phi4MultimodalAudioMeanVarianceNormLayer(config)
        self.embed = Phi4MultimodalAudioNemoConvSubsampling(config)
        self.relative_attention_bias_layer = Phi4MultimodalAudioRelativeAttentionBias(config)
        self.encoders = LayerStack(
            Phi4MultimodalAudioConformerEncoderLayer(config) for _ in range(config.num_blocks)
        )

    def forward(
        self, audio_features: Tensor, valid_frames: Tensor, has_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode a batch of clips.

        Args:
            audio_features: F (B, frames, mel bins).
            valid_frames: int64 (rows <= B,), the first rows' valid frames; the others are valid throughout.
            has_mask: bool scalar, whether hidden frames weigh less than visible ones at all.

        Returns:
            Hidden states (B, blocks * block length, C), and for each whether it is a token of its clip.
        """
        hidden, _ = self.embed(self.encoder_embedding(audio_features), None)
        batch, tokens, width = hidden.shape
        # Blocks as plain arithmetic on sizes: up to 500 tokens it is one block without padding.
        block = torch.sym_min(tokens, BLOCK_TOKENS)
        num_blocks = (tokens + block - 1) // block
        hidden = nn.functional.pad(hidden, (0, 0, 0, num_blocks * block - tokens))
        hidden = hidden.reshape(-1, block, width)

        position = torch.arange(num_blocks * block, device=hidden.device)
        given = (valid_frames + self.time_reduction - 1) // self.time_reduction
        full = torch.full_like(audio_features[:, 0, 0], 1, dtype=torch.int64) * tokens
        valid_tokens = torch.cat([given.clamp(max=tokens), full])[:batch]
        is_token = position[None] < valid_tokens[:, None]

        # Hidden frames are not excluded: visible ones get +1. Without a mask every frame is visible, the
        # zeros that fill the last block included (`hs_mask` of the reference is then all true).
        visible = (is_token | ~has_mask).reshape(-1, 1, 1, block)
        bias = visible + self.relative_attention_bias_layer(hidden)
        hidden, _ = self.encoders(hidden, shared=(bias,))
        return hidden.reshape(batch, -1, width), is_token


class SpeechEncoder(nn.Module):
    """`speech.onnx`: see docs/contract.md. Follows `Phi4MultimodalAudioEmbedding`."""

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__()
        width = config.audio_config.hidden_size
        self.encoder = AudioModel(config.audio_config)
        self.up_proj_for_speech = nn.Linear(width, config.hidden_size)
        self.down_proj_for_speech = nn.Linear(config.hidden_size, config.hidden_size)
        self.up_proj_for_vision_speech = nn.Linear(width, config.hidden_size)
        self.down_proj_for_vision_speech = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, audio_features: Tensor, audio_attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Speech features of all clips, one after another, without the tokens of padding.

        Args:
            audio_features: F (batch, audio_seq_len, mel bins).
            audio_attention_mask: bool (num_audios, mask_len); only row sums matter, missing rows are all
                valid.

        Returns:
            Two F (num_audio_tokens, hidden): for prompts without an image, and for prompts with one.
        """
        num_rows = count_rows(audio_attention_mask)
        # More rows than clips contradict each other; the last index then has no row to point to.
        bad = num_rows > count_rows(audio_features)
        hidden, is_token = self.encoder(audio_features, audio_attention_mask.sum(1), num_rows > 0)
        rows = (is_token | bad).flatten().nonzero().squeeze(1)
        hidden = hidden.flatten(0, 1).index_select(0, torch.where(bad, OUT_OF_RANGE, rows))

        def project(up: nn.Linear, down: nn.Linear) -> Tensor:
            return down(nn.functional.gelu(up(hidden)))

        return (
            project(self.up_proj_for_speech, self.down_proj_for_speech),
            project(self.up_proj_for_vision_speech, self.down_proj_for_vision_speech),
        )
