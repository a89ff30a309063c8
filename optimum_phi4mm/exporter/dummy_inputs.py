"""Dummy input generators: small inputs of every kind a component takes, for capture and for validation."""

from __future__ import annotations

from typing import Any

import torch
from optimum.utils import DEFAULT_DUMMY_SHAPES, DummyInputGenerator, NormalizedTextConfig
from torch import Tensor


__all__ = [
    "DecoderInputGenerator",
    "EmbeddingInputGenerator",
    "SpeechInputGenerator",
    "VisionInputGenerator",
]

_TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Generator(DummyInputGenerator):
    """Draws from its own random stream, so that the same call gives the same inputs."""

    def __init__(
        self, task: str, normalized_config: NormalizedTextConfig, batch_size: int, seed: int
    ) -> None:
        self.task = task
        self.config = normalized_config.config
        self.batch_size = batch_size
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, float_dtype: str) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(_TORCH_DTYPES[float_dtype])


class VisionInputGenerator(_Generator):
    """`batch_size` images, of one and two crops in turn, the last patches of each sub-crop being padding."""

    SUPPORTED_INPUT_NAMES = ("pixel_values", "image_sizes", "image_attention_mask")

    def __init__(
        self,
        task: str,
        normalized_config: NormalizedTextConfig,
        batch_size: int = DEFAULT_DUMMY_SHAPES["batch_size"],
        **kwargs: Any,
    ) -> None:
        super().__init__(task, normalized_config, batch_size, seed=1)
        self.grids = [(1, 1 + index % 2) for index in range(batch_size)]

    def generate(
        self, input_name: str, framework: str = "pt", int_dtype: str = "int64", float_dtype: str = "fp32"
    ) -> Tensor:
        vision = self.config.vision_config
        grid = vision.image_size // vision.patch_size
        if input_name == "image_sizes":
            return torch.tensor(self.grids) * vision.crop_size
        if input_name == "image_attention_mask":
            views = [torch.ones(grid, grid, dtype=torch.bool)]
            rows = []
            for index, (height, width) in enumerate(self.grids):
                sub_crop = views[0].clone()
                sub_crop[grid - index % grid :, :] = False
                rows.extend(views + [sub_crop] * (height * width))
            return torch.stack(rows)
        crops = sum(1 + height * width for height, width in self.grids)
        return self.normal(
            crops, vision.num_channels, vision.crop_size, vision.crop_size, float_dtype=float_dtype
        )


class SpeechInputGenerator(_Generator):
    """`batch_size` clips of `nb_max_frames` mel frames, each a little shorter than the one before."""

    SUPPORTED_INPUT_NAMES = ("audio_features", "audio_attention_mask")

    def __init__(
        self,
        task: str,
        normalized_config: NormalizedTextConfig,
        batch_size: int = DEFAULT_DUMMY_SHAPES["batch_size"],
        nb_max_frames: int = DEFAULT_DUMMY_SHAPES["nb_max_frames"],
        **kwargs: Any,
    ) -> None:
        super().__init__(task, normalized_config, batch_size, seed=2)
        self.nb_max_frames = nb_max_frames

    def generate(
        self, input_name: str, framework: str = "pt", int_dtype: str = "int64", float_dtype: str = "fp32"
    ) -> Tensor:
        frames = self.nb_max_frames
        if input_name == "audio_attention_mask":
            lengths = torch.tensor([max(frames - 37 * index, 1) for index in range(self.batch_size)])
            return torch.arange(frames)[None] < lengths[:, None]
        return self.normal(
            self.batch_size, frames, self.config.audio_config.input_size, float_dtype=float_dtype
        )


class EmbeddingInputGenerator(_Generator):
    """Prompts in which every fourth token is an image placeholder and every fourth an audio placeholder."""

    SUPPORTED_INPUT_NAMES = ("input_ids", "image_features", "speech_features")

    def __init__(
        self,
        task: str,
        normalized_config: NormalizedTextConfig,
        batch_size: int = DEFAULT_DUMMY_SHAPES["batch_size"],
        sequence_length: int = DEFAULT_DUMMY_SHAPES["sequence_length"],
        **kwargs: Any,
    ) -> None:
        super().__init__(task, normalized_config, batch_size, seed=3)
        self.sequence_length = sequence_length

    def generate(
        self, input_name: str, framework: str = "pt", int_dtype: str = "int64", float_dtype: str = "fp32"
    ) -> Tensor:
        if input_name == "input_ids":
            image, audio = self.config.vision_config.image_token_id, self.config.audio_config.audio_token_id
            text = min(image, audio)  # ids below are no placeholders
            shape = (self.batch_size, self.sequence_length)
            ids = torch.randint(0, text, shape, generator=self.random)
            ids[:, 0::4], ids[:, 1::4] = image, audio
            return ids
        first = 0 if input_name == "image_features" else 1
        rows = self.batch_size * len(range(first, self.sequence_length, 4))
        return self.normal(rows, self.config.hidden_size, float_dtype=float_dtype)


class DecoderInputGenerator(_Generator):
    """A batch amid a generation: a past as long as the new tokens, every row but the last left-padded."""

    SUPPORTED_INPUT_NAMES = (
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "adapter_gates",
        "logits_to_keep",
    )

    def __init__(
        self,
        task: str,
        normalized_config: NormalizedTextConfig,
        batch_size: int = DEFAULT_DUMMY_SHAPES["batch_size"],
        sequence_length: int = DEFAULT_DUMMY_SHAPES["sequence_length"],
        **kwargs: Any,
    ) -> None:
        super().__init__(task, normalized_config, batch_size, seed=4)
        self.length = sequence_length
        self.padding = torch.arange(batch_size).flip(0).clamp(max=sequence_length - 1)[:, None]  # (B, 1)

    def generate(
        self, input_name: str, framework: str = "pt", int_dtype: str = "int64", float_dtype: str = "fp32"
    ) -> Tensor | list[Tensor]:
        config, batch, length = self.config, self.batch_size, self.length
        if input_name == "inputs_embeds":
            return self.normal(batch, length, config.hidden_size, float_dtype=float_dtype)
        if input_name == "attention_mask":
            return (torch.arange(2 * length)[None] >= self.padding).to(torch.int64)
        if input_name == "position_ids":
            return torch.arange(length, 2 * length)[None] - self.padding
        if input_name == "past_key_values":
            head_dim = config.hidden_size // config.num_attention_heads
            shape = (batch, config.num_key_value_heads, length, head_dim)
            return [self.normal(*shape, float_dtype=float_dtype) for _ in range(2 * config.num_hidden_layers)]
        if input_name == "adapter_gates":
            return torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(batch, 1)[:batch]
        return torch.tensor([0])
