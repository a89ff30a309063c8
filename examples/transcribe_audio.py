"""Write down what is said in one or several recordings, of any length up to the model's context.

    python examples/transcribe_audio.py [PACKAGE [RECORDING ...]]

Each recording is a prompt of its own, and all are answered in one batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum_phi4mm import ORTModelForPhi4MM, Phi4MMProcessor


HERE = Path(__file__).parent
PROMPT = "<|user|><|audio_1|>Transcribe the audio clip into text.<|end|><|assistant|>"


def main() -> None:
    package = sys.argv[1] if len(sys.argv) > 1 else HERE.parent / "demo-output" / "package"
    recordings = sys.argv[2:] or [str(HERE / "data" / "recording.flac")]
    processor = Phi4MMProcessor.from_pretrained(package)
    model = ORTModelForPhi4MM.from_pretrained(package)
    inputs = processor([PROMPT] * len(recordings), audio=recordings)
    tokens = model.generate(**inputs, max_new_tokens=32)[:, inputs["input_ids"].shape[1] :]
    for recording, text in zip(
        recordings, processor.batch_decode(tokens, skip_special_tokens=True), strict=True
    ):
        print(f"{recording}: {text}")


if __name__ == "__main__":
    main()
