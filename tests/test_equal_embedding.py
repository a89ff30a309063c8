"""embedding.onnx puts features where transformers puts them, and refuses those that don't fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from reference import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    Differences,
    Reference,
    clip_tokens,
    evaluate,
    make_clips,
    make_images,
    relative_difference,
    token_ids,
)


BOUND = 1e-4
RUN_FAILURES = (Fail, InvalidArgument, RuntimeException)


def row(*parts: int | tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Input ids [1, length]: for a number so many ordinary tokens, for (count, token) that token."""
    ids = [
        token_ids(part, seed + index) if isinstance(part, int) else torch.full((1, part[0]), part[1])
        for index, part in enumerate(parts)
    ]
    return torch.cat(ids, 1)


def image(count: int) -> tuple[int, int]:
    return count, IMAGE_TOKEN


def audio(count: int) -> tuple[int, int]:
    return count, AUDIO_TOKEN


@pytest.fixture(scope="module")
def embed(package, session, reference: Reference):
    """Merged embeddings of the exported model, with optimisations on and off; no features are [0, hidden]."""
    sessions = [session(package, "embedding", optimized) for optimized in (True, False)]
    absent = torch.zeros(0, reference.config.hidden_size)

    def run(input_ids: torch.Tensor, images: torch.Tensor = absent, clips: torch.Tensor = absent):
        inputs = {
            "input_ids": input_ids.numpy(),
            "image_features": images.numpy(),
            "speech_features": clips.numpy(),
        }
        return [running.run(["inputs_embeds"], inputs)[0] for running in sessions]

    return run


@pytest.fixture(scope="module")
def compare(differences: Differences):
    def assert_equal(case: str, found: list[np.ndarray], expected: torch.Tensor) -> None:
        for embeds in found:
            differences.record("embedding", case, relative_difference(embeds, expected), BOUND)

    return assert_equal


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 40), (3, 17)])
def test_text_only_with_absent_features(embed, compare, reference, batch, length):
    input_ids = torch.cat([token_ids(length, seed) for seed in range(batch)])
    compare("text only", embed(input_ids), reference.text_embeddings(input_ids))


def test_every_token_of_the_vocabulary_has_its_row(embed, reference):
    ids = torch.tensor([[0, 1, 255, 199998, 199999, 200009, 200012, 200018, 200020, 200063]])
    for embeds in embed(ids):
        np.testing.assert_array_equal(embeds, reference.text_embeddings(ids).numpy())


def test_one_image_in_a_prompt(embed, compare, reference):
    images = make_images([(1, 1)], seed=1)
    input_ids = row(5, image(545), 9)
    features = reference.image_features(images)
    compare("image", embed(input_ids, features), reference.embeddings(input_ids, images))


def test_several_images_in_several_rows(embed, compare, reference):
    images = make_images([(1, 1), (1, 1), (1, 1)], [(0, 0), (7, 3), (0, 0)], seed=2)
    first, second, third = images.tokens
    assert first == third
    rows = [row(3, image(first), 4, image(second)), row(5, image(third), 2 + second)]
    input_ids = torch.cat(rows)
    features = reference.image_features(images)
    compare("images in several rows", embed(input_ids, features), reference.embeddings(input_ids, images))


def test_one_clip_in_a_prompt(embed, compare, reference):
    features, _ = make_clips([101], seed=3)
    input_ids = row(2, audio(clip_tokens(101)), 11)
    speech = reference.speech_features(features, [101], None)
    expected = reference.embeddings(input_ids, clips=(features, [101], None))
    compare("audio", embed(input_ids, clips=speech), expected)


def test_uneven_clips_in_several_rows(embed, compare, reference):
    frames = [40, 9, 17]
    features, mask = make_clips(frames, seed=4)
    input_ids = torch.cat([row(2, audio(5), 3, audio(2)), row(9, audio(3))])
    speech = reference.speech_features(features, frames, mask)
    expected = reference.embeddings(input_ids, clips=(features, frames, mask))
    compare("audio in several rows", embed(input_ids, clips=speech), expected)


def test_image_and_audio_take_the_projection_for_vision(embed, compare, reference):
    images = make_images([(1, 1)], [(0, 9)], seed=5)
    features, mask = make_clips([33, 8], seed=5)
    input_ids = row(1, audio(5), 4, image(images.tokens[0]), 2, audio(1), 3)
    speech = reference.speech_features(features, [33, 8], mask, "vision")
    expected = reference.embeddings(input_ids, images, (features, [33, 8], mask))
    found = embed(input_ids, reference.image_features(images), speech)
    compare("image and audio", found, expected)


WRONG_COUNTS = {
    "image placeholders without features": (row(3, image(4)), 0, 0),
    "image features without placeholders": (row(7), 4, 0),
    "one image feature for several placeholders": (row(3, image(4)), 1, 0),
    "image features too few by one": (row(3, image(4)), 3, 0),
    "image features too many by one": (row(3, image(4)), 5, 0),
    "image features for the audio placeholders": (row(3, audio(4)), 4, 0),
    "audio placeholders without features": (row(3, audio(4)), 0, 0),
    "audio features without placeholders": (row(7), 0, 4),
    "one audio feature for several placeholders": (row(3, audio(4)), 0, 1),
    "audio features too few by one": (row(3, audio(4)), 0, 3),
    "audio features too many by one": (row(3, audio(4)), 0, 5),
    "audio features for the image placeholders": (row(3, image(4)), 0, 4),
    "right in sum, wrong for each": (row(3, image(4), audio(2)), 3, 3),
    "one feature too many for a single placeholder": (row(3, image(1)), 2, 0),
}


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "unoptimised"])
@pytest.mark.parametrize("case", WRONG_COUNTS)
def test_placeholders_and_features_that_differ_in_number_fail(package, session, reference, case, optimized):
    input_ids, images, clips = WRONG_COUNTS[case]
    hidden = reference.config.hidden_size
    inputs = {
        "input_ids": input_ids.numpy(),
        "image_features": np.ones((images, hidden), np.float32),
        "speech_features": np.ones((clips, hidden), np.float32),
    }
    with pytest.raises(RUN_FAILURES):
        session(package, "embedding", optimized).run(None, inputs)


def test_half_precision_passes_weights_and_features_on_unchanged(export_package, session, reference):
    input_ids = row(3, image(4), 2, audio(3))
    images, clips = torch.randn(4, 64).half(), torch.randn(3, 64).half()
    inputs = {
        "input_ids": input_ids.numpy(),
        "image_features": images.numpy(),
        "speech_features": clips.numpy(),
    }
    (found,) = session(export_package(dtype="fp16"), "embedding").run(None, inputs)
    expected = reference.text_embeddings(input_ids).half()
    expected[input_ids == IMAGE_TOKEN] = images
    expected[input_ids == AUDIO_TOKEN] = clips
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, expected.numpy())


def test_bfloat16_passes_weights_and_features_on_unchanged(export_package, reference):
    input_ids = row(3, image(4), 2, audio(3))
    images, clips = torch.randn(4, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    inputs = {"input_ids": input_ids, "image_features": images, "speech_features": clips}
    found = evaluate(export_package(dtype="bf16")["embedding"].path, inputs)["inputs_embeds"]
    expected = reference.text_embeddings(input_ids).clone()  # the checkpoint's own type is bfloat16
    expected[input_ids == IMAGE_TOKEN] = images.float()
    expected[input_ids == AUDIO_TOKEN] = clips.float()
    np.testing.assert_array_equal(found, expected.numpy())
