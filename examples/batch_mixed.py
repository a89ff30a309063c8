"""Prompts of every kind in one batch: each row gets the adapter that its own content asks for.

python examples/batch_mixed.py [PACKAGE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor


HERE = Path(__file__).parent
PICTURE, RECORDING = HERE / "data" / "picture.jpg", HERE / "data" / "recording.flac"
PROMPTS = {
    "text": "<|user|>How do boats sail against the wind?<|end|><|assistant|>",
    "picture": "<|user|><|image_1|>Describe the picture.<|end|><|assistant|>",
    "recording": "<|user|><|audio_1|>Write down what is said.<|end|><|assistant|>",
    "both": "<|user|><|image_1|><|audio_1|><|end|><|assistant|>",
}


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "demo-output" / "package"
    processor = Phi4MMProcessor.from_pretrained(package)
    model = ORTModelForPhi4MM.from_pretrained(package)
    # Pictures and recordings follow the prompts: those of the second and fourth, of the third and fourth.
    inputs = processor(list(PROMPTS.values()), images=[PICTURE] * 2, audio=[RECORDING] * 2)
    tokens = model.generate(**inputs, max_new_tokens=16)[:, inputs["input_ids"].shape[1] :]
    for kind, text in zip(PROMPTS, processor.batch_decode(tokens, skip_special_tokens=True), strict=True):
        print(f"{kind}: {text}")


if __name__ == "__main__":
    main()
