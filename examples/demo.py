"""Runs an exported package beside transformers on a picture, a recording, both and neither, and compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx_model import OnnxModel
from preprocess import CROP, Picture, read_picture, read_recording
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers_model import TransformersModel


DATA = Path(__file__).parent / "data"
LARGEST_DIFFERENCE = 1e-4  # of the reference's largest magnitude
NUM_TOKENS = 16
COMPONENTS = ("vision", "speech", "embedding", "model")
QUESTIONS = {
    "text": "How do boats sail against the wind?",
    "picture": "Describe the picture.",
    "recording": "Write down what is said.",
    "both": "Answer the question that is asked.",
}


class Comparison(NamedTuple):
    """One line of the table."""

    component: str
    case: str
    difference: float


class Case:
    """A prompt and what it refers to."""

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        picture: Picture | None,
        recording: np.ndarray | None,
    ) -> None:
        self.name, self.picture, self.recording = name, picture, recording
        prompt = "<|user|>"
        if picture is not None:
            prompt += tokenizer.image_token * picture.num_tokens
        if recording is not None:
            prompt += tokenizer.audio_token * -(-recording.shape[1] // 8)  # one token for 8 frames
        prompt += f"{QUESTIONS[name]}<|end|><|assistant|>"
        self.input_ids: np.ndarray = tokenizer(prompt, return_tensors="np")["input_ids"].astype(np.int64)
        self.is_image = self.input_ids == tokenizer.image_token_id
        self.is_speech = self.input_ids == tokenizer.audio_token_id


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference in units of the largest number expected."""
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare(case: Case, package: OnnxModel, reference: TransformersModel) -> Iterator[Comparison]:
    """Run all four models as a caller would, and compare every result with transformers'."""
    inputs = reference.inputs(case.input_ids, case.picture, case.recording)
    with reference.adapter_of(case.name):
        expected = reference.embed(**inputs)
        expected_logits = reference.logits(keep=NUM_TOKENS, **inputs)

    image = package.image_features(case.picture)
    speech = package.speech_features(case.recording, beside_picture=case.picture is not None)
    if case.picture is not None:
        yield Comparison("vision", case.name, relative_difference(image, expected[case.is_image]))
    if case.recording is not None:
        yield Comparison("speech", case.name, relative_difference(speech, expected[case.is_speech]))
    embeds = package.embed(case.input_ids, image, speech)
    yield Comparison("embedding", case.name, relative_difference(embeds, expected))
    logits, _ = package.decode(embeds, package.empty_past(), case.name, keep=NUM_TOKENS)
    yield Comparison("model", case.name, relative_difference(logits, expected_logits))


def generate(
    case: Case, package: OnnxModel, reference: TransformersModel, stop: list[int]
) -> tuple[list[int], list[int]]:
    """The greedy tokens of the package and of transformers."""
    image = package.image_features(case.picture)
    speech = package.speech_features(case.recording, beside_picture=case.picture is not None)
    found = package.generate(package.embed(case.input_ids, image, speech), case.name, NUM_TOKENS, stop)
    with reference.adapter_of(case.name):
        inputs = reference.inputs(case.input_ids, case.picture, case.recording)
        return found, reference.generate(NUM_TOKENS, stop, **inputs)


def make_cases(folder: Path) -> list[Case]:
    """The four kinds of prompt, with the tokenizer of the package."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picture, recording = read_picture(DATA / "picture.jpg"), read_recording(DATA / "recording.flac")
    height, width = picture.image_sizes[0]
    print(
        f"picture:   {len(picture.pixel_values)} crops of {CROP}x{CROP} (the global view and a grid of "
        f"{height // CROP}x{width // CROP}), {picture.num_tokens} tokens"
    )
    frames = recording.shape[1]
    print(f"recording: {frames} frames of 10 ms, {-(-frames // 8)} tokens")
    return [
        Case("text", tokenizer, None, None),
        Case("picture", tokenizer, picture, None),
        Case("recording", tokenizer, None, recording),
        Case("both", tokenizer, picture, recording),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="folder that optimum-cli export onnx wrote, in float32")
    parser.add_argument("reference", type=Path, help="the same weights in transformers' own layout")
    arguments = parser.parse_args()

    cases = make_cases(arguments.package)
    package, reference = OnnxModel(arguments.package), TransformersModel(arguments.reference)
    comparisons = [line for case in cases for line in compare(case, package, reference)]
    print(f"\n{'model':<10} {'prompt':<10} largest difference to transformers, relative")
    for component, name, difference in sorted(comparisons, key=lambda line: COMPONENTS.index(line.component)):
        print(f"{component:<10} {name:<10} {difference:.1e}")

    end = json.loads((arguments.package / "generation_config.json").read_text())["eos_token_id"]
    stop = end if isinstance(end, list) else [end]
    print(f"\nThe {NUM_TOKENS} tokens that follow each prompt (random weights: they mean nothing)")
    all_equal = True
    for case in cases:
        found, expected = generate(case, package, reference, stop)
        all_equal &= found == expected
        print(f"{case.name:<10} ONNX Runtime {' '.join(map(str, found))}")
        print(f"{'':<10} transformers {'the same' if found == expected else ' '.join(map(str, expected))}")

    if not all_equal:
        sys.exit("The demo failed: the tokens differ.")
    if not all(line.difference <= LARGEST_DIFFERENCE for line in comparisons):  # false for NaN
        sys.exit(f"The demo failed: a difference is above {LARGEST_DIFFERENCE:g}.")
    print(f"\nAll tokens are equal, all differences at most {LARGEST_DIFFERENCE:g}.")


if __name__ == "__main__":
    main()
