"""How long Phi4MMProcessor takes for a picture of 1344x896 pixels and for a minute of audio; medians.

python benchmarks/processor.py PACKAGE
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from optimum_phi4mm import Phi4MMProcessor


REPEATS = 15


def median_ms(call: Callable[[], Any]) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def main() -> None:
    processor = Phi4MMProcessor.from_pretrained(sys.argv[1])
    pixels = np.random.default_rng(0).integers(0, 256, (896, 1344, 3), dtype=np.uint8)
    picture, larger = Image.fromarray(pixels), Image.fromarray(pixels).resize((1920, 1080))
    sound = np.random.default_rng(1).normal(0, 0.1, 60 * 16000).astype(np.float32)
    print(f"picture of 1344x896   {median_ms(lambda: processor.image_processor([picture])):6.1f} ms")
    print(f"picture of 1920x1080  {median_ms(lambda: processor.image_processor([larger])):6.1f} ms")
    print(
        f"a minute at 16 kHz    {median_ms(lambda: processor('<|audio_1|>', audio=(sound, 16000))):6.1f} ms"
    )


if __name__ == "__main__":
    main()
