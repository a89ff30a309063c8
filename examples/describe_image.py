"""Ask about a picture, and read the answer as it comes.

    python examples/describe_image.py [PACKAGE [PICTURE]]

The package is what `optimum-cli export onnx` or `make demo` wrote; the latter's random weights mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import TextStreamer

from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor


HERE = Path(__file__).parent


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "demo-output" / "package"
    picture = sys.argv[2] if len(sys.argv) > 2 else HERE / "data" / "picture.jpg"
    processor = Phi4MMProcessor.from_pretrained(package)
    model = ORTModelForPhi4MM.from_pretrained(package)
    inputs = processor("<|user|><|image_1|>Describe the picture.<|end|><|assistant|>", images=picture)
    streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, max_new_tokens=32, streamer=streamer)


if __name__ == "__main__":
    main()
