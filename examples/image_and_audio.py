"""A picture and a spoken question about it, as chat messages.

python examples/image_and_audio.py [PACKAGE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor


HERE = Path(__file__).parent


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "demo-output" / "package"
    processor = Phi4MMProcessor.from_pretrained(package)
    model = ORTModelForPhi4MM.from_pretrained(package)
    content = [
        {"type": "image", "image": HERE / "data" / "picture.jpg"},
        {"type": "audio", "audio": HERE / "data" / "recording.flac"},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
    print(processor.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
