"""Pictures to crops: what transformers' Phi4MultimodalImageProcessorFast computes, without torchvision."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from ..errors import InputError
from .encoder_inputs import num_image_tokens
from .media import load_image


__all__ = ["Phi4MMImageProcessor"]

# PIL's resampling filters, which the file's `resample` names, as torch's modes.
_MODES = {0: "nearest", 2: "bilinear", 3: "bicubic"}
_WHITE = 255
_MIN_SIDE = 10  # pixels after resizing: `dynamic_preprocess` refuses less


class Phi4MMImageProcessor(BaseImageProcessor):
    """Cuts each picture into crops after a global view of it; sizes and statistics are the checkpoint's.

    Follows `Phi4MultimodalImageProcessorFast` of transformers 4.57 with the same torch operators that
    torchvision calls: a bilinear resize with antialias on 8 bits, then a bicubic one without on the
    normalised picture for the global view.

    Args:
        size: height and width of a crop, pixels.
        patch_size: pixels per side of a patch.
        dynamic_hd: crops that a picture may have beside its global view.
        image_mean, image_std: per channel, of samples in [0, 1].
        rescale_factor: what 8-bit samples are multiplied with first.
        do_rescale, do_normalize: whether these two steps are done.
        resample: PIL filter of the global view: 0 nearest, 2 bilinear, 3 bicubic.
        kwargs: the fields of a preprocessor_config.json that don't concern pictures; dropped.
    """

    model_input_names = ("image_pixel_values", "image_sizes", "image_attention_mask")

    def __init__(
        self,
        size: dict[str, int] | None = None,
        patch_size: int = 14,
        dynamic_hd: int = 36,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        rescale_factor: float = 1 / 255,
        do_rescale: bool = True,
        do_normalize: bool = True,
        resample: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.size = size or {"height": 448, "width": 448}
        self.patch_size = patch_size
        self.dynamic_hd = dynamic_hd
        self.image_mean, self.image_std = list(image_mean), list(image_std)
        self.rescale_factor = rescale_factor
        self.do_rescale, self.do_normalize = do_rescale, do_normalize
        self.resample = resample
        if self.size["height"] != self.size["width"] or self.size["height"] % (2 * patch_size):
            raise InputError(f"size is {self.size}, expected a square of an even number of patches per side")
        if resample not in _MODES:
            raise InputError(f"resample is {resample}, expected one of {', '.join(map(str, _MODES))}")

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **kwargs: Any) -> BatchFeature:
        """Prepare pictures.

        Args:
            images: one picture or a list, each in a form that `media.load_image` takes.
            return_tensors: "pt" or "np".

        Returns:
            `image_pixel_values` float32 (images, most crops, 3, height, width), the global view first, zeros
            behind; `image_sizes` int64 (images, 2), height and width of the padded picture;
            `image_attention_mask` float32 (images, most crops, patches, patches), 0 where a patch is
            padding; `num_img_tokens`, a list.

        Raises:
            InputError: a picture can't be read, or is too long and thin.
        """
        if kwargs:
            raise InputError(
                f"{', '.join(kwargs)} is no option: the checkpoint's files say how pictures are cut"
            )
        sources = images if isinstance(images, (list, tuple)) else [images]
        side = self.size["height"]
        pictures = [self._fitted(load_image(source)) for source in sources]
        sizes = [(pixels.shape[1], pixels.shape[2]) for pixels, _ in pictures]
        grids = [(height // side, width // side) for height, width in sizes]
        most = 1 + max(rows * columns for rows, columns in grids)
        patches = side // self.patch_size
        pixel_values = torch.empty(len(pictures), most, 3, side, side)
        attention_mask = torch.ones(len(pictures), most, patches, patches)
        mode = _MODES[self.resample]
        align = None if mode == "nearest" else False
        for index, ((pixels, mask), (rows, columns)) in enumerate(zip(pictures, grids, strict=True)):
            count = 1 + rows * columns
            pixel_values[index, 0] = interpolate(pixels[None], (side, side), mode=mode, align_corners=align)[
                0
            ]
            for values, whole in ((pixel_values, pixels), (attention_mask, mask[None])):
                cut = whole.unflatten(2, (columns, -1)).unflatten(1, (rows, -1)).permute(1, 3, 0, 2, 4)
                values[index, 1:count].view(cut.shape).copy_(cut)
            pixel_values[index, count:] = 0
        data = {
            "image_pixel_values": pixel_values,
            "image_sizes": torch.tensor(sizes, dtype=torch.int64),
            "image_attention_mask": attention_mask,
        }
        features = BatchFeature(data, tensor_type=return_tensors)
        features["num_img_tokens"] = [num_image_tokens(mask, patches) for _, mask in pictures]
        return features

    def _fitted(self, picture: Any) -> tuple[Tensor, Tensor]:
        """A picture in a grid of crops, normalised (3, height, width), and its patches' mask."""
        side = self.size["height"]
        columns, rows = _grid(picture.width, picture.height, side, self.dynamic_hd)
        height, width = rows * side, columns * side
        scale_x, scale_y = width / picture.width, height / picture.height
        if scale_x < scale_y:
            inner_width, inner_height = width, int(picture.height * scale_x)
        else:
            inner_width, inner_height = int(picture.width * scale_y), height
        if min(inner_width, inner_height) < _MIN_SIDE:
            raise InputError(
                f"a picture of {picture.width}x{picture.height} pixels would be {inner_width}x{inner_height} "
                f"in its crops, expected at least {_MIN_SIDE} a side: it is too long and thin"
            )
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        if (inner_width, inner_height) != picture.size:
            pixels = interpolate(
                pixels[None].contiguous(), (inner_height, inner_width), mode="bilinear", antialias=True
            )[0]
        padded = torch.empty(3, height, width)
        padded[:, :inner_height, :inner_width] = pixels
        padded[:, inner_height:] = padded[:, :, inner_width:] = _WHITE

        patches = side // self.patch_size
        mask = torch.ones(rows * patches, columns * patches)
        mask[mask.shape[0] - (height - inner_height) // self.patch_size :] = 0
        mask[:, mask.shape[1] - (width - inner_width) // self.patch_size :] = 0
        return self._normalised(padded), mask

    def _normalised(self, samples: Tensor) -> Tensor:
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        if self.do_rescale and self.do_normalize:  # in one step, as the reference does
            return samples.sub_(mean / self.rescale_factor).div_(std / self.rescale_factor)
        if self.do_rescale:
            samples *= self.rescale_factor
        return samples.sub_(mean).div_(std) if self.do_normalize else samples


def _grid(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Columns and rows of crops; past `most`, those whose ratio is nearest, after `dynamic_preprocess`."""
    columns, rows = math.ceil(width / side), math.ceil(height / side)
    if columns * rows <= most:
        return columns, rows
    ratio, area = width / height, width * height
    best, best_difference = (1, 1), math.inf
    for candidate in _candidates(most):
        difference = abs(ratio - candidate[0] / candidate[1])
        larger = area > 0.5 * side * side * candidate[0] * candidate[1]
        if difference < best_difference or (difference == best_difference and larger):
            best, best_difference = candidate, difference
    return best


@functools.cache
def _candidates(most: int) -> tuple[tuple[int, int], ...]:
    """All grids of up to `most` crops, small ones first, as columns and rows.

    The reference sorts a set by area, which leaves grids of one area in any order. That can matter only to a
    picture whose ratio lies in the middle between two of them; a third grid is always nearer then.
    """
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))
