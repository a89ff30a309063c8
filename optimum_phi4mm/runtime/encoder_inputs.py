"""Pictures and recordings of a batch: checked, counted, given to their rows, and shaped for the encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import InputError


__all__ = ["Pictures", "Recordings", "as_array", "assign", "num_image_tokens"]


class Pictures:
    """The batch's pictures, as `vision.onnx` takes them.

    Attributes:
        tokens: of each.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], config: Any) -> None:
        self.pixels = arrays.get("image_pixel_values")
        self.sizes = arrays.get("image_sizes")
        self.masks = arrays.get("image_attention_mask")
        self.tokens: list[int] = []
        if self.pixels is None:
            return
        vision = config.vision_config
        side, patches = vision.crop_size, vision.image_size // vision.patch_size
        shape = (vision.num_channels, side, side)
        if self.pixels.ndim != 5 or self.pixels.shape[2:] != shape:
            raise InputError(
                f"image_pixel_values has shape {list(self.pixels.shape)}, expected (images, crops, "
                f"{', '.join(map(str, shape))})"
            )
        count, most = self.pixels.shape[:2]
        if self.sizes is None or self.sizes.shape != (count, 2):
            raise InputError(f"image_sizes is missing or has another shape than {[count, 2]}")
        grids = self.sizes // side
        self.crops = 1 + grids[:, 0] * grids[:, 1]
        if (self.sizes % side).any() or (grids < 1).any() or (self.crops > most).any():
            raise InputError(
                f"image_sizes are {self.sizes.tolist()}, expected multiples of {side} with a crop in "
                "image_pixel_values for each"
            )
        if self.masks is None:
            self.masks = np.ones((count, most, patches, patches), bool)
        if self.masks.shape != (count, most, patches, patches):
            raise InputError(
                f"image_attention_mask has shape {list(self.masks.shape)}, expected "
                f"{[count, most, patches, patches]}"
            )
        for mask, crops, (rows, columns) in zip(self.masks, self.crops, grids, strict=True):
            parts = mask[1:crops].astype(bool).reshape(rows, columns, patches, patches).swapaxes(1, 2)
            self.tokens.append(num_image_tokens(parts.reshape(rows * patches, columns * patches), patches))

    def inputs(self, chosen: Sequence[int]) -> dict[str, np.ndarray]:
        """Inputs of `vision.onnx` for some of the pictures, without the crops that are padding."""
        assert self.pixels is not None and self.sizes is not None and self.masks is not None
        return {
            "pixel_values": np.concatenate([self.pixels[i, : self.crops[i]] for i in chosen]),
            "image_sizes": self.sizes[list(chosen)],
            "image_attention_mask": np.concatenate([self.masks[i, : self.crops[i]] for i in chosen]),
        }


class Recordings:
    """The batch's recordings, as `speech.onnx` takes them.

    Attributes:
        tokens: of each.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], config: Any) -> None:
        self.features = arrays.get("audio_input_features")
        self.tokens: list[int] = []
        if self.features is None:
            return
        audio = config.audio_config
        if self.features.ndim != 3 or self.features.shape[2] != audio.input_size or not self.features.size:
            raise InputError(
                f"audio_input_features has shape {list(self.features.shape)}, expected (recordings, frames, "
                f"{audio.input_size})"
            )
        count, longest = self.features.shape[:2]
        mask = arrays.get("audio_attention_mask")
        if mask is None:
            self.frames = np.full(count, longest)
        elif mask.shape == (count, longest):
            self.frames = mask.astype(bool).sum(1)
        else:
            raise InputError(
                f"audio_attention_mask has shape {list(mask.shape)}, expected {[count, longest]}"
            )
        if (self.frames < 1).any():
            raise InputError("audio_attention_mask hides a whole recording")
        self.tokens = (-(-self.frames // audio.time_reduction)).tolist()
        sizes = arrays.get("audio_embed_sizes")
        if sizes is not None and sizes.tolist() != self.tokens:
            raise InputError(
                f"audio_embed_sizes are {sizes.tolist()}, but the recordings have {self.tokens} tokens"
            )

    def inputs(self, chosen: Sequence[int]) -> dict[str, np.ndarray]:
        """Inputs of `speech.onnx` for the recordings of one prompt."""
        # A prompt's only recording comes without a mask, as transformers' processor gives it; past one block
        # of tokens that makes a difference.
        assert self.features is not None
        frames = self.frames[list(chosen)]
        inputs = {"audio_features": self.features[list(chosen), : frames.max()]}
        if len(chosen) > 1:
            inputs["audio_attention_mask"] = np.arange(frames.max())[None] < frames[:, None]
        return inputs


def num_image_tokens(mask: Any, patches: int) -> int:
    """Tokens of one picture: the global view's rows with their ends, a separator, the crops' rows.

    Args:
        mask: array or tensor (rows * patches, columns * patches), 0 where a patch of the grid is padding.
        patches: per side of a crop; they are pooled 2x2.
    """
    grid, kept = patches // 2, mask[::2, ::2]
    return grid * (grid + 1) + 1 + int(kept.sum()) + int(kept[:, 0].sum())


def assign(kind: str, places: np.ndarray, tokens: Sequence[int]) -> list[list[int]]:
    """Which pictures or recordings each row has: its placeholders take them in order."""
    remaining = list(enumerate(tokens))
    assigned = []
    for row, wanted in enumerate(places.sum(1)):
        own: list[int] = []
        while wanted > 0 and remaining and remaining[0][1] <= wanted:
            index, count = remaining.pop(0)
            own.append(index)
            wanted -= count
        if wanted:
            raise InputError(
                f"row {row} has {places[row].sum()} {kind} tokens; the {kind} inputs have {list(tokens)}, in "
                "order: they don't fit together"
            )
        assigned.append(own)
    if remaining:
        raise InputError(
            f"{len(tokens)} {kind} inputs were given, but the prompts have tokens for "
            f"{len(tokens) - len(remaining)} only"
        )
    return assigned


def as_array(value: Any) -> np.ndarray:
    """A tensor of any device, or what numpy takes, as an array."""
    return value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
