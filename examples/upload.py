"""Put a package on the Hugging Face Hub, and answer from there. Log in first: hf auth login.

python examples/upload.py USER/REPOSITORY [PACKAGE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor


HERE = Path(__file__).parent


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    repo_id = sys.argv[1]
    package = sys.argv[2] if len(sys.argv) > 2 else HERE.parent / "demo-output" / "package"
    url = ORTModelForPhi4MM.from_pretrained(package).push_to_hub(repo_id, private=True)
    print(f"uploaded: {url}")

    # Only what a text prompt needs is downloaded: neither vision nor speech.
    processor = Phi4MMProcessor.from_pretrained(repo_id)
    model = ORTModelForPhi4MM.from_pretrained(repo_id)
    inputs = processor("<|user|>How do boats sail against the wind?<|end|><|assistant|>")
    tokens = model.generate(**inputs, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    print(processor.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
