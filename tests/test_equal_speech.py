"""speech.onnx computes what transformers' audio embedding computes, in both projections, at any length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from reference import (
    Differences,
    Reference,
    clip_tokens,
    evaluate,
    make_clips,
    relative_difference,
    typical_difference,
)


BOUND = 1e-4
OUTPUTS = {"speech_features": "speech", "speech_features_for_vision": "vision"}


@pytest.fixture(scope="module")
def speech(package, session):
    """Both outputs by name of the exported model for its inputs, with optimisations on and off."""
    sessions = [session(package, "speech", optimized) for optimized in (True, False)]

    def run(features: torch.Tensor, mask: torch.Tensor | None = None) -> list[dict[str, np.ndarray]]:
        inputs = {"audio_features": features.numpy()}
        if mask is not None:
            inputs["audio_attention_mask"] = mask.numpy()
        return [dict(zip(OUTPUTS, running.run(list(OUTPUTS), inputs), strict=True)) for running in sessions]

    return run


@pytest.fixture(scope="module")
def compare(reference: Reference, differences: Differences):
    """Assert that both outputs equal those of transformers for these clips."""

    def assert_equal(
        case: str,
        found: list[dict[str, np.ndarray]],
        features: torch.Tensor,
        frames: Sequence[int],
        mask: torch.Tensor | None = None,
    ) -> None:
        for output, projection in OUTPUTS.items():
            expected = reference.speech_features(features, frames, mask, projection)
            assert expected.shape == (sum(map(clip_tokens, frames)), reference.config.hidden_size)
            for outputs in found:
                differences.record("speech", case, relative_difference(outputs[output], expected), BOUND)

    return assert_equal


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 100, 3999, 4000, 4001, 8500])
def test_one_clip_of_any_length(speech, compare, frames):
    features, _ = make_clips([frames], seed=frames)
    compare(f"{frames} frames", speech(features), features, [frames])


@pytest.mark.parametrize("frames", [1, 9, 100, 4000, 4001, 8500])
def test_one_clip_with_a_mask_of_all_true(speech, compare, frames):
    features, mask = make_clips([frames], seed=frames + 1)
    compare(f"{frames} frames, mask of all true", speech(features, mask), features, [frames], mask)


def test_ten_minutes(speech, compare):
    features, _ = make_clips([60000], seed=5)
    found = speech(features)
    assert [outputs["speech_features"].shape[0] for outputs in found] == [7500, 7500]
    compare("60000 frames (10 minutes)", found, features, [60000])


@pytest.mark.parametrize(
    "frames",
    [(9, 1), (100, 7, 8, 64), (3999, 1), (4000, 4000, 2500), (1200, 800, 1199)],
    ids=lambda frames: "+".join(map(str, frames)),
)
def test_uneven_clips_in_one_batch(speech, compare, frames):
    features, mask = make_clips(frames, seed=sum(frames))
    compare("uneven batch up to 500 tokens", speech(features, mask), features, frames, mask)


@pytest.mark.parametrize(
    "frames",
    [(4001, 100), (4001, 4000), (8500, 3999, 1), (4008, 8000)],
    ids=lambda frames: "+".join(map(str, frames)),
)
def test_uneven_clips_of_which_one_is_past_500_tokens(speech, compare, frames):
    features, mask = make_clips(frames, seed=sum(frames))
    compare("uneven batch past 500 tokens", speech(features, mask), features, frames, mask)


@pytest.mark.parametrize("frames", [100, 4001])
def test_several_clips_of_one_length_without_a_mask(speech, compare, frames):
    features, _ = make_clips([frames] * 3, seed=frames + 2)
    compare("even batch without a mask", speech(features), features, [frames] * 3)


def test_an_empty_mask_is_the_same_as_none(speech):
    features, _ = make_clips([4001], seed=8)
    for found, expected in zip(
        speech(features, torch.zeros(0, 0, dtype=torch.bool)), speech(features), strict=True
    ):
        for output in OUTPUTS:
            np.testing.assert_array_equal(found[output], expected[output])


@pytest.mark.parametrize("frames", [(100, 260, 260), (300, 4500, 4500)], ids=["short", "past 500 tokens"])
def test_clips_without_a_mask_row_are_all_valid(speech, compare, frames):
    features, mask = make_clips(frames, seed=sum(frames))
    compare("fewer mask rows than clips", speech(features, mask[:1]), features, frames, mask)


def test_only_the_sums_of_mask_rows_matter(speech):
    features, mask = make_clips([50, 90], seed=9)
    for found, expected in zip(speech(features, mask.flip(1)), speech(features, mask), strict=True):
        for output in OUTPUTS:
            np.testing.assert_array_equal(found[output], expected[output])


def test_a_mask_may_be_narrower_than_the_features_and_wider(speech, compare):
    features, mask = make_clips([50, 60], seed=10)
    padded = torch.cat([features, torch.zeros(2, 20, 80)], 1)
    expected_mask = torch.cat([mask, torch.zeros(2, 20, dtype=torch.bool)], 1)
    compare("mask narrower than the features", speech(padded, mask), padded, [50, 60], expected_mask)
    wide = torch.cat([mask, torch.zeros(2, 44, dtype=torch.bool)], 1)
    compare("mask wider than the features", speech(features, wide), features, [50, 60], mask)


def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    export_package, session, reference_of, reference, differences
):
    running = session(export_package(dtype="fp16"), "speech")
    half = reference_of("fp16")
    for output, projection in OUTPUTS.items():
        ours, theirs = [], []
        for seed, frames in enumerate(([100, 260], [1000, 999], [4001, 1200], [64])):
            features, mask = make_clips(frames, seed=90 + seed)
            features = features.half()
            expected = reference.speech_features(features.float(), frames, mask, projection)
            theirs.append(
                relative_difference(half.speech_features(features, frames, mask, projection), expected)
            )
            inputs = {"audio_features": features.numpy(), "audio_attention_mask": mask.numpy()}
            (found,) = running.run([output], inputs)
            assert found.dtype == np.float16
            ours.append(relative_difference(found, expected))
        differences.record("speech", f"fp16 against fp32, {output}", max(ours), 1.5 * max(theirs))


def test_bfloat16_is_as_near_to_fp32_as_transformers_is(export_package, reference_of, reference, differences):
    path = export_package(dtype="bf16")["speech"].path
    half = reference_of("bf16")
    for output, projection in OUTPUTS.items():
        ours, theirs = [], []
        for seed in range(10):
            features, _ = make_clips([200], seed=95 + seed)
            features = features.bfloat16()
            expected = reference.speech_features(features.float(), [200], None, projection)
            rounded = half.speech_features(features, [200], None, projection).float()
            theirs.append(typical_difference(rounded, expected))
            ours.append(typical_difference(evaluate(path, {"audio_features": features})[output], expected))
        # The largest of so many rounding errors is chance; their mean is not.
        case = f"bf16 against fp32, {output} (mean)"
        differences.record("speech", case, np.mean(ours), 1.1 * np.mean(theirs))
