"""From files to the numbers that the graphs take. Short and plain: a picture and a recording, one of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from PIL import Image
from transformers import Phi4MultimodalFeatureExtractor


CROP = 448  # pixels per side
PATCH = 14
PATCHES = CROP // PATCH  # per side of a crop
MAX_CROPS = 36
SAMPLING_RATE = 16000


@dataclass(frozen=True)
class Picture:
    """A picture as `vision.onnx` takes it.

    Attributes:
        pixel_values: float32 (1 + crops, 3, 448, 448) in [-1, 1], the global view first.
        image_sizes: int64 (1, 2), height and width of the padded picture.
        image_attention_mask: bool (1 + crops, 32, 32), False where a patch is padding.
    """

    pixel_values: np.ndarray
    image_sizes: np.ndarray
    image_attention_mask: np.ndarray

    @property
    def num_tokens(self) -> int:
        """How many placeholders the prompt needs: crops, separators and the global view."""
        rows, columns = self.image_sizes[0] // CROP
        mask = self.image_attention_mask[1:, ::2, ::2].reshape(rows, columns, PATCHES // 2, PATCHES // 2)
        whole = mask.swapaxes(1, 2).reshape(rows * PATCHES // 2, columns * PATCHES // 2)
        return int(256 + 1 + whole.sum() + whole[:, 0].sum() + 16)


def read_picture(path: Path) -> Picture:
    """Resize a picture to a grid of crops, pad it with white, and cut it; after `dynamic_preprocess` of
    transformers' Phi4MultimodalImageProcessorFast.
    """
    picture = Image.open(path).convert("RGB")
    columns, rows = math.ceil(picture.width / CROP), math.ceil(picture.height / CROP)
    if rows * columns > MAX_CROPS:
        raise ValueError(f"{path} needs {rows}x{columns} crops, at most {MAX_CROPS} are possible: shrink it")
    width, height = columns * CROP, rows * CROP
    scale = min(width / picture.width, height / picture.height)
    inner = (int(picture.width * scale), int(picture.height * scale))
    padded = Image.new("RGB", (width, height), "white")
    padded.paste(picture.resize(inner, Image.Resampling.BILINEAR))

    mask = np.ones((rows * PATCHES, columns * PATCHES), dtype=bool)
    mask[mask.shape[0] - (height - inner[1]) // PATCH :] = False
    mask[:, mask.shape[1] - (width - inner[0]) // PATCH :] = False

    overview = padded.resize((CROP, CROP), Image.Resampling.BICUBIC)
    crops = [_normalised(overview)]
    masks = [np.ones((PATCHES, PATCHES), dtype=bool)]
    for row in range(rows):
        for column in range(columns):
            left, top = column * CROP, row * CROP
            crops.append(_normalised(padded.crop((left, top, left + CROP, top + CROP))))
            masks.append(mask[row * PATCHES : (row + 1) * PATCHES, column * PATCHES : (column + 1) * PATCHES])
    return Picture(np.stack(crops), np.array([[height, width]]), np.stack(masks))


def _normalised(crop: Image.Image) -> np.ndarray:  # (3, 448, 448) in [-1, 1]: mean and deviation are 0.5
    return np.asarray(crop, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def read_recording(path: Path) -> np.ndarray:
    """Log-mel features of a recording, float32 (1, frames, 80); any sampling rate, stereo mixed to mono."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    samples = soxr.resample(samples.mean(axis=1), rate, SAMPLING_RATE)
    features = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=SAMPLING_RATE, return_tensors="np")
    return features["audio_input_features"]
