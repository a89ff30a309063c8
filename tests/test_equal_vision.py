"""vision.onnx computes what transformers' image embedding computes, for every way of giving it images."""

from __future__ import annotations

import numpy as np
import pytest
from reference import (
    Differences,
    Images,
    Reference,
    evaluate,
    make_images,
    make_plain_images,
    relative_difference,
)


BOUND = 1e-4
FIVE_GRIDS = [(1, 1), (1, 2), (3, 2), (2, 1), (1, 1)]


@pytest.fixture(scope="module")
def vision(package, session):
    """Features of the exported model for its inputs by name, with optimisations on and off."""
    sessions = [session(package, "vision", optimized) for optimized in (True, False)]
    return lambda **inputs: [running.run(["image_features"], inputs)[0] for running in sessions]


@pytest.fixture(scope="module")
def compare(reference: Reference, differences: Differences):
    """Assert that features equal those of transformers for these images."""

    def assert_equal(case: str, found: list[np.ndarray], images: Images) -> None:
        expected = reference.image_features(images)
        assert expected.shape == (sum(images.tokens), reference.config.hidden_size)
        for features in found:
            differences.record("vision", case, relative_difference(features, expected), BOUND)

    return assert_equal


@pytest.mark.parametrize("count", [1, 2, 5])
def test_plain_images_without_optional_inputs_have_545_tokens_each(vision, compare, count):
    images = make_plain_images(count, seed=count)
    found = vision(pixel_values=images.pixel_values[:, 0].numpy())
    assert [features.shape[0] for features in found] == [545 * count] * 2
    compare(f"plain images, no optional input: {count}", found, images)


def test_empty_optional_inputs_are_the_same_as_none(vision):
    pixel_values = make_plain_images(2, seed=7).pixel_values[:, 0].numpy()
    found = vision(
        pixel_values=pixel_values,
        image_sizes=np.zeros((0, 2), np.int64),
        image_attention_mask=np.zeros((0, 32, 32), bool),
    )
    for features, expected in zip(found, vision(pixel_values=pixel_values), strict=True):
        np.testing.assert_array_equal(features, expected)


def test_plain_images_take_their_own_mask_row_for_both_views(vision, compare):
    images = make_plain_images(3, padding=[(0, 0), (5, 2), (30, 17)], seed=11)
    found = vision(
        pixel_values=images.pixel_values[:, 0].numpy(),
        image_attention_mask=images.mask[:, 0].numpy().astype(bool),
    )
    compare("plain images with masks", found, images)


def test_plain_images_without_a_mask_row_are_all_valid(vision, compare):
    padding = [(4, 9), (0, 0), (0, 0)]
    images = make_plain_images(3, padding, seed=12)
    found = vision(
        pixel_values=images.pixel_values[:, 0].numpy(),
        image_attention_mask=images.mask[:1, 0].numpy().astype(bool),
    )
    compare("plain images, fewer masks than images", found, images)


@pytest.mark.parametrize(
    "grids",
    [[(1, 1)], [(1, 2)], [(2, 1)], [(1, 1), (1, 2)], [(3, 2), (2, 3)]],
    ids=lambda grids: "+".join(f"{rows}x{columns}" for rows, columns in grids),
)
def test_images_of_any_grid_with_sizes_only(vision, compare, grids):
    images = make_images(grids, seed=21)
    compare(f"sizes only: {len(grids)} images", vision(**images.contract(mask=False)), images)


@pytest.mark.parametrize(
    "grids",
    [[(1, 1)], [(1, 2)], [(3, 2)], [(1, 2), (2, 1)]],
    ids=lambda grids: "+".join(f"{rows}x{columns}" for rows, columns in grids),
)
def test_a_mask_without_padding_changes_nothing(vision, compare, grids):
    images = make_images(grids, seed=22)
    compare(f"sizes and full masks: {len(grids)} images", vision(**images.contract()), images)


@pytest.mark.parametrize("first", range(0, 32, 4))
def test_any_padding_at_the_bottom_and_at_the_right(vision, compare, first):
    padding = [(amount, 31 - amount) for amount in range(first, first + 4)]
    images = make_images([(1, 1), (1, 2), (2, 1), (1, 1)], padding, seed=first)
    compare("padding of 0 to 31 patches on both sides", vision(**images.contract()), images)


@pytest.mark.parametrize("padding", [(31, 0), (0, 31), (31, 31), (1, 0), (0, 1)])
def test_padding_on_one_side_or_up_to_the_last_patch(vision, compare, padding):
    images = make_images([(2, 2)], [padding], seed=31)
    compare("padding on one side or to the last patch", vision(**images.contract()), images)


def test_five_images_of_different_grids_and_paddings_in_one_run(vision, compare):
    images = make_images(FIVE_GRIDS, [(0, 13), (6, 0), (31, 1), (2, 30), (17, 18)], seed=41)
    compare("5 images of different grids, padded", vision(**images.contract()), images)


def test_an_image_of_36_sub_crops(package, session, compare):
    images = make_images([(6, 6)], [(0, 11)], seed=51)
    found = session(package, "vision").run(None, images.contract())  # one run takes 5 GB
    compare("grid 6x6, padded", found, images)


def test_crops_without_a_mask_row_are_all_valid(vision, compare):
    images = make_images([(1, 2), (2, 1)], [(3, 8), (0, 0)], seed=61)
    inputs = images.contract()
    inputs["image_attention_mask"] = inputs["image_attention_mask"][:3]  # the first image's
    compare("fewer mask rows than crops", vision(**inputs), images)


def test_an_image_is_the_same_alone_and_among_others(vision):
    together = make_images([(1, 2), (2, 1)], [(0, 5), (9, 0)], seed=71)
    alone = Images(together.pixel_values[1:], together.sizes[1:], together.mask[1:])
    for found, expected in zip(vision(**together.contract()), vision(**alone.contract()), strict=True):
        assert relative_difference(found[together.tokens[0] :], expected) < 1e-5


def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    export_package, session, reference_of, reference, differences
):
    running = session(export_package(dtype="fp16"), "vision")
    half = reference_of("fp16")
    ours, theirs = [], []
    for seed in range(3):
        images = make_images([(1, 2), (1, 1)], [(7, 0), (0, 20)], seed=80 + seed)
        pixels = images.pixel_values.half()
        expected = reference.image_features(Images(pixels.float(), images.sizes, images.mask))
        theirs.append(
            relative_difference(half.image_features(Images(pixels, images.sizes, images.mask)), expected)
        )
        found = running.run(None, images.contract(dtype=np.float16))[0]
        assert found.dtype == np.float16
        ours.append(relative_difference(found, expected))
    differences.record("vision", "fp16 against fp32", max(ours), 1.5 * max(theirs))


def test_bfloat16_is_as_near_to_fp32_as_transformers_is(export_package, reference_of, reference, differences):
    images = make_plain_images(1, seed=91)
    pixels = images.pixel_values.bfloat16()
    expected = reference.image_features(Images(pixels.float(), images.sizes, images.mask))
    theirs = reference_of("bf16").image_features(Images(pixels, images.sizes, images.mask))
    found = evaluate(export_package(dtype="bf16")["vision"].path, {"pixel_values": pixels[:, 0]})[
        "image_features"
    ]
    bound = 1.5 * relative_difference(theirs.float(), expected)
    differences.record("vision", "bf16 against fp32", relative_difference(found, expected), bound)
