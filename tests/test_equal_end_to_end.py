"""The four models together generate the tokens that transformers generates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from reference import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    ROOMY,
    Images,
    Reference,
    clip_tokens,
    left_padded,
    make_clips,
    make_images,
    positions,
    relative_difference,
    token_ids,
)
from test_equal_decoder import Decoder


STEPS = 32
GATES = {"vision": [1, 0], "speech": [0, 1], None: [0, 0]}


class Pipeline:
    """The four sessions of a package, run as a caller runs them."""

    def __init__(self, package, session, reference: Reference) -> None:
        self.vision, self.speech, self.embedding = (
            session(package, name) for name in ("vision", "speech", "embedding")
        )
        self.decoder = Decoder(session(package, "model"), reference.config)
        self.absent = np.zeros((0, reference.config.hidden_size), np.float32)

    def image_features(self, images: Images | None) -> np.ndarray:
        return self.absent if images is None else self.vision.run(None, images.contract())[0]

    def speech_features(self, features: torch.Tensor | None, beside_image: bool) -> np.ndarray:
        """Features of a single clip, which comes without a mask."""
        if features is None:
            return self.absent
        output = "speech_features_for_vision" if beside_image else "speech_features"
        return self.speech.run([output], {"audio_features": features.numpy()})[0]

    def embed(self, input_ids: torch.Tensor, images: np.ndarray, clips: np.ndarray) -> torch.Tensor:
        inputs = {"input_ids": input_ids.numpy(), "image_features": images, "speech_features": clips}
        return torch.from_numpy(self.embedding.run(None, inputs)[0])

    def generate(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        images: np.ndarray,
        clips: np.ndarray,
        gates: Sequence[Sequence[float]],
    ) -> list[list[int]]:
        """Greedy tokens of each row: features and prompt once, then embedding and decoder per token."""
        embeds = self.embed(input_ids, images, clips)
        cache: list = []
        tokens = []
        for _ in range(STEPS):
            at = positions(mask)[:, mask.shape[1] - embeds.shape[1] :]
            decoded = self.decoder.decode(embeds, mask, at, cache, gates, logits_to_keep=1)
            chosen = torch.from_numpy(decoded.logits[:, -1].argmax(-1))[:, None]
            tokens.append(chosen)
            embeds = self.embed(chosen, self.absent, self.absent)
            mask = torch.cat([mask, torch.ones_like(chosen)], 1)
            cache = decoded.cache
        return torch.cat(tokens, 1).tolist()


@pytest.fixture(scope="module")
def roomy_reference(reference_of) -> Reference:
    """The reference of a checkpoint whose LongRoPE switch is far off: `generate` goes wrong across it."""
    return reference_of(original_max_position=ROOMY)


@pytest.fixture(scope="module")
def pipeline(export_package, session, roomy_reference) -> Pipeline:
    return Pipeline(export_package(original_max_position=ROOMY), session, roomy_reference)


def prompt(images: Images | None, frames: int | None, seed: int) -> torch.Tensor:
    """Text with the image's and the clip's placeholders in it, INT64 [1, length]."""
    parts = [token_ids(7, seed)]
    if images is not None:
        parts += [torch.full((1, sum(images.tokens)), IMAGE_TOKEN), token_ids(3, seed + 1)]
    if frames is not None:
        parts += [torch.full((1, clip_tokens(frames)), AUDIO_TOKEN), token_ids(4, seed + 2)]
    return torch.cat(parts, 1)


def expected_tokens(
    reference: Reference, input_ids: torch.Tensor, images: Images | None, clip: torch.Tensor | None
) -> list[int]:
    """transformers' greedy tokens with the adapter that belongs to the kind of prompt."""
    inputs = {}
    if images is not None:
        inputs |= {
            "image_pixel_values": images.pixel_values,
            "image_sizes": images.sizes,
            "image_attention_mask": images.mask,
        }
    if clip is not None:
        inputs |= {
            "audio_input_features": clip,
            "audio_embed_sizes": torch.tensor([clip_tokens(clip.shape[1])]),
        }
    with reference.adapter("vision" if images else "speech" if clip is not None else None):
        output = reference.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=STEPS,
            do_sample=False,
            **inputs,
        )
    tokens = output[0, input_ids.shape[1] :].tolist()
    assert len(tokens) == STEPS, "the reference stopped early: choose another seed"
    return tokens


# Images' grids and padding, frames of the clip, and a seed for which the reference doesn't repeat one token.
CASES = {
    "text": (None, None, 40),
    "image": (([(1, 2)], [(0, 9)]), None, 45),
    "two images": (([(1, 1), (2, 1)], [(3, 0), (0, 0)]), None, 46),
    "audio": (None, 333, 41),
    "audio past 500 tokens": (None, 4100, 40),
    "image and audio": (([(1, 1)], None), 150, 49),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_greedy_tokens_as_transformers(pipeline, roomy_reference, case):
    grids, frames, seed = CASES[case]
    images = make_images(*grids, seed=seed) if grids else None
    clip = make_clips([frames], seed=seed)[0] if frames else None
    input_ids = prompt(images, frames, seed)
    adapter = "vision" if images else "speech" if frames else None
    tokens = pipeline.generate(
        input_ids,
        torch.ones_like(input_ids),
        pipeline.image_features(images),
        pipeline.speech_features(clip, beside_image=images is not None),
        [GATES[adapter]],
    )
    expected = expected_tokens(roomy_reference, input_ids, images, clip)
    assert len(set(expected)) >= 5, "the reference repeats itself: choose another seed"
    assert tokens == [expected]


def test_prompts_of_every_kind_in_one_batch(pipeline, roomy_reference):
    images = make_images([(1, 1)], [(0, 25)], seed=60)
    heard, heard_beside_image = make_clips([200], seed=61)[0], make_clips([90], seed=62)[0]
    kinds = [(None, None), (images, heard_beside_image), (None, heard), (images, None)]
    rows = [
        prompt(image, None if clip is None else clip.shape[1], 63 + index)
        for index, (image, clip) in enumerate(kinds)
    ]
    adapters = [None, "vision", "speech", "vision"]
    input_ids, mask, _ = left_padded(rows)
    features = pipeline.image_features(images)
    clips = [pipeline.speech_features(heard_beside_image, True), pipeline.speech_features(heard, False)]
    tokens = pipeline.generate(
        input_ids,
        mask,
        np.concatenate([features, features]),
        np.concatenate(clips),
        [GATES[adapter] for adapter in adapters],
    )
    for row, found, (image, clip) in zip(rows, tokens, kinds, strict=True):
        assert found == expected_tokens(roomy_reference, row, image, clip)


@pytest.mark.parametrize("adapter", ["vision", "speech", None])
def test_the_same_tokens_across_the_longrope_switch(package, session, reference, differences, adapter):
    decoder = Decoder(session(package, "model"), reference.config)
    embedding = session(package, "embedding")
    absent = np.zeros((0, reference.config.hidden_size), np.float32)
    input_ids = token_ids(48, 70)  # the switch is at 64
    for _ in range(STEPS):
        expected = reference.decode(
            reference.text_embeddings(input_ids), adapter=adapter, logits_to_keep=1
        ).logits
        features = {"image_features": absent, "speech_features": absent}
        embeds = torch.from_numpy(embedding.run(None, {"input_ids": input_ids.numpy(), **features})[0])
        found = decoder.decode(embeds, gates=[GATES[adapter]], logits_to_keep=1).logits
        differences.record(
            "end to end", "across the LongRoPE switch", relative_difference(found, expected), 1e-4
        )
        assert found.argmax() == expected.argmax()
        input_ids = torch.cat([input_ids, expected.argmax(-1)], 1)
