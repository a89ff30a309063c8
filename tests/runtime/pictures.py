"""Synthetic pictures, and what transformers' image processor makes of them.

The expected values need torchvision, which can't be imported beside the CPU build of torch that the tests
use. They are made by this file, run in an environment of its own:

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch==2.14.1 torchvision==0.29.1 transformers==4.57.6 pillow
    /tmp/reference/bin/python tests/runtime/pictures.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


EXPECTED = Path(__file__).with_name("pictures.npz")
# Width and height: one crop, several, both ratios, past 36 crops, smaller than a patch, next to a crop's.
SIZES = (
    *((448, 448), (960, 686), (1344, 896), (447, 449), (1343, 897), (100, 200), (30, 40), (1, 1), (20, 5)),
    *((2000, 300), (300, 2000), (3000, 3000), (5000, 700), (700, 9000), (2688, 2688), (2689, 2688)),
)
NUM_SAMPLES = 400


def draw(width: int, height: int) -> np.ndarray:
    """A picture with edges, slopes and noise: uint8 (height, width, 3)."""
    noise = np.random.default_rng(width * 100003 + height).integers(0, 64, (height, width, 1))
    y, x = np.mgrid[:height, :width]
    blocks = ((x // 37 + y // 23) % 2 * 96)[:, :, None]
    slope = np.stack([x * 95 // width, y * 95 // height, (x + y) * 95 // (width + height)], axis=2)
    return (noise + blocks + slope).astype(np.uint8)


def places(shape: tuple[int, ...]) -> np.ndarray:
    """Flat indices of the pixels that are kept of an array of this shape, int64 (NUM_SAMPLES,)."""
    return np.random.default_rng(len(shape)).integers(0, int(np.prod(shape)), NUM_SAMPLES)


def main() -> None:
    from PIL import Image
    from transformers.models.phi4_multimodal import Phi4MultimodalImageProcessorFast

    processor = Phi4MultimodalImageProcessorFast()
    kept = {}
    for width, height in SIZES:
        found = processor(Image.fromarray(draw(width, height)), return_tensors="pt")
        pixels = found["image_pixel_values"][0].numpy()
        name = f"{width}x{height}"
        # The global view comes first and is resized twice: it gets samples of its own.
        for part, values in (("view", pixels[0]), ("crops", pixels[1:])):
            kept[f"{name}/{part}"] = values.reshape(-1)[places(values.shape)].astype(np.float32)
        kept[f"{name}/crops_shape"] = np.array(pixels.shape)
        kept[f"{name}/size"] = found["image_sizes"][0].numpy()
        kept[f"{name}/tokens"] = np.array(found["num_img_tokens"])
        mask = found["image_attention_mask"][0].numpy().astype(bool)
        kept[f"{name}/mask"] = np.packbits(mask)
    np.savez_compressed(EXPECTED, **kept)
    print(f"{EXPECTED}: {EXPECTED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
