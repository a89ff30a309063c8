"""model.onnx computes what transformers' decoder and its PEFT adapters compute, with and without a cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import onnxruntime
import pytest
import torch
from reference import (
    Decoded,
    Differences,
    Reference,
    evaluate,
    left_padded,
    positions,
    relative_difference,
    token_ids,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalRotaryEmbedding

from optimum_phi4mm.components.decoder import LongRope


BOUND = 1e-4
SWITCH = 64  # original_max_position_embeddings of the default checkpoint

# The adapters that the reference has active, by the gates that stand for them.
SETTINGS = {
    "default": (None, "both"),
    "both": ([[1, 1]], "both"),
    "vision": ([[1, 0]], "vision"),
    "speech": ([[0, 1]], "speech"),
    "none": ([[0, 0]], None),
    "fractions": ([[0.5, 1.75]], (0.5, 1.75)),
}


def decoder_inputs(
    embeds: torch.Tensor,
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Sequence[tuple[np.ndarray, np.ndarray]],
    layers: int,
    kv_heads: int,
    head_size: int,
) -> dict[str, np.ndarray]:
    """Required inputs of model.onnx; no cache is one of length 0."""
    empty = np.zeros((embeds.shape[0], kv_heads, 0, head_size), embeds.numpy().dtype)
    inputs = {
        "inputs_embeds": embeds.numpy(),
        "attention_mask": mask.numpy(),
        "position_ids": position_ids.numpy(),
    }
    for layer in range(layers):
        key, value = cache[layer] if len(cache) else (empty, empty)
        inputs[f"past_key_values.{layer}.key"] = key
        inputs[f"past_key_values.{layer}.value"] = value
    return inputs


class Decoder:
    """A session of model.onnx, called like `Reference.decode`."""

    def __init__(self, session: onnxruntime.InferenceSession, config) -> None:
        self.session = session
        heads = config.num_key_value_heads
        self.sizes = (config.num_hidden_layers, heads, config.hidden_size // config.num_attention_heads)

    def decode(
        self,
        embeds: torch.Tensor,
        mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Sequence[tuple[np.ndarray, np.ndarray]] = (),
        gates: Sequence[Sequence[float]] | None = None,
        logits_to_keep: int | None = None,
        options: onnxruntime.RunOptions | None = None,
    ) -> Decoded:
        past = cache[0][0].shape[2] if len(cache) else 0
        if mask is None:
            mask = torch.ones(embeds.shape[0], past + embeds.shape[1], dtype=torch.long)
        if position_ids is None:
            position_ids = positions(mask)[:, past:]
        inputs = decoder_inputs(embeds, mask, position_ids, cache, *self.sizes)
        if gates is not None:
            inputs["adapter_gates"] = np.asarray(gates, np.float32)
        if logits_to_keep is not None:
            inputs["logits_to_keep"] = np.asarray([logits_to_keep], np.int64)
        names = [f"present.{layer}.{part}" for layer in range(self.sizes[0]) for part in ("key", "value")]
        logits, *present = self.session.run(["logits", *names], inputs, options)
        return Decoded(logits, list(zip(present[::2], present[1::2], strict=True)))


@pytest.fixture(scope="module")
def decoders(package, session, reference: Reference) -> list[Decoder]:
    """The exported decoder, with optimisations on and off."""
    return [Decoder(session(package, "model", optimized), reference.config) for optimized in (True, False)]


@pytest.fixture(scope="module")
def compare(differences: Differences):
    """Assert that logits and cache equal the reference's wherever there is no padding."""

    def assert_equal(case: str, found: Decoded, expected: Decoded, mask: torch.Tensor | None = None) -> None:
        kept = expected.logits.shape[1]
        mask = torch.ones(expected.logits.shape[0], expected.cache[0][0].shape[2]) if mask is None else mask
        live = mask.bool()
        pairs = [(found.logits, expected.logits, live[:, live.shape[1] - kept :])]
        for ours, theirs in zip(found.cache, expected.cache, strict=True):
            pairs += [
                (np.moveaxis(a, 1, 2), b.transpose(1, 2), live) for a, b in zip(ours, theirs, strict=True)
            ]
        for ours, theirs, where in pairs:
            assert ours.shape == tuple(theirs.shape)
            assert np.isfinite(ours).all()
            difference = relative_difference(ours[where.numpy()], theirs[where])
            differences.record("decoder", case, difference, BOUND)

    return assert_equal


def prompt(reference: Reference, length: int, seed: int = 0) -> torch.Tensor:
    """Embeddings [1, length, hidden] of random tokens."""
    return reference.text_embeddings(token_ids(length, seed))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_adapter_setting(decoders, compare, reference, setting):
    gates, adapter = SETTINGS[setting]
    embeds = prompt(reference, 24, seed=1)
    expected = reference.decode(embeds, adapter=adapter)
    for decoder in decoders:
        compare(f"adapters: {setting}", decoder.decode(embeds, gates=gates), expected)


def test_each_adapter_changes_the_logits(reference):
    embeds = prompt(reference, 24, seed=1)
    logits = [
        reference.decode(embeds, adapter=adapter).logits for adapter in ("both", "vision", "speech", None)
    ]
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert relative_difference(one, other) > 0.1


def test_each_row_of_gates_holds_for_its_own_item(decoders, compare, reference):
    rows = [prompt(reference, length, seed=length) for length in (12, 20, 7, 16)]
    embeds, mask, position_ids = left_padded(rows)
    gates = [[1, 1], [1, 0], [0, 1], [0, 0]]
    adapters = ["both", "vision", "speech", None]
    for decoder in decoders:
        found = decoder.decode(embeds, mask, position_ids, gates=gates)
        for index, (row, adapter) in enumerate(zip(rows, adapters, strict=True)):
            length = row.shape[1]
            cache = [tuple(part[index : index + 1, :, -length:] for part in layer) for layer in found.cache]
            own = Decoded(found.logits[index : index + 1, -length:], cache)
            compare("adapters: one setting per item", own, reference.decode(row, adapter=adapter))


@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_padded_on_the_left(decoders, compare, reference, setting):
    gates, adapter = SETTINGS[setting]
    embeds, mask, position_ids = left_padded(
        [prompt(reference, length, seed=length) for length in (5, 30, 1, 17)]
    )
    expected = reference.decode(embeds, mask, position_ids, adapter=adapter)
    for decoder in decoders:
        compare("left padding", decoder.decode(embeds, mask, position_ids, gates=gates), expected, mask)


def test_single_tokens_after_a_prompt(decoders, compare, reference):
    embeds, mask, position_ids = left_padded([prompt(reference, length, seed=length) for length in (21, 9)])
    following = [prompt(reference, 5, seed=100), prompt(reference, 5, seed=101)]
    for decoder in decoders:
        found = decoder.decode(embeds, mask, position_ids, gates=[[1, 0], [1, 0]])
        expected = reference.decode(embeds, mask, position_ids, adapter="vision")
        for step in range(5):
            token = torch.cat([row[:, step : step + 1] for row in following])
            seen = torch.cat([mask, torch.ones(2, step + 1, dtype=torch.long)], 1)
            at = positions(seen)[:, -1:]
            found = decoder.decode(token, seen, at, found.cache, gates=[[1, 0], [1, 0]])
            expected = reference.decode(token, seen, at, expected.cache, adapter="vision")
            compare("decoding with a cache", found, expected, seen)


def test_a_prompt_in_chunks_is_the_prompt_at_once(decoders, compare, reference):
    embeds, mask, position_ids = left_padded([prompt(reference, length, seed=length) for length in (40, 33)])
    expected = reference.decode(embeds, mask, position_ids, adapter="speech")
    for decoder in decoders:
        cache: list = []
        logits = []
        for start, end in ((0, 13), (13, 14), (14, 40)):
            chunk = decoder.decode(
                embeds[:, start:end], mask[:, :end], position_ids[:, start:end], cache, gates=[[0, 1]]
            )
            cache = chunk.cache
            logits.append(chunk.logits)
        compare("chunked prefill", Decoded(np.concatenate(logits, 1), cache), expected, mask)


@pytest.mark.parametrize("keep", [0, 1, 3, 19, 20, 21, 1000])
def test_logits_to_keep(decoders, compare, reference, keep):
    embeds = torch.cat([prompt(reference, 20, seed=5), prompt(reference, 20, seed=6)])
    expected = reference.decode(embeds, logits_to_keep=keep)
    assert expected.logits.shape[1] == (min(keep, 20) or 20)
    for decoder in decoders:
        compare("logits_to_keep", decoder.decode(embeds, logits_to_keep=keep), expected)


def test_logits_to_keep_with_a_cache(decoders, compare, reference):
    embeds = prompt(reference, 12, seed=7)
    expected = reference.decode(embeds[:, 8:], cache=reference.decode(embeds[:, :8]).cache, logits_to_keep=2)
    for decoder in decoders:
        found = decoder.decode(embeds[:, 8:], cache=decoder.decode(embeds[:, :8]).cache, logits_to_keep=2)
        compare("logits_to_keep", found, expected)


def test_plain_rotary_tables_without_rope_scaling(reference, differences):
    config = copy.deepcopy(reference.config)
    config.rope_scaling = None
    with torch.device("meta"):  # as the export builds it
        rotary = LongRope(config)
    positions = torch.tensor([[0, 1, SWITCH, 5000]])
    theirs = Phi4MultimodalRotaryEmbedding(config)(torch.zeros(1), positions)
    for found, expected in zip(rotary(positions, torch.float32), theirs, strict=True):
        differences.record("decoder", "plain RoPE", relative_difference(found, expected), BOUND)


@pytest.mark.parametrize("length", [SWITCH - 1, SWITCH, SWITCH + 1, 2 * SWITCH])
def test_a_prompt_on_either_side_of_the_longrope_switch(decoders, compare, reference, length):
    embeds = prompt(reference, length, seed=length)
    expected = reference.decode(embeds, adapter="vision", logits_to_keep=8)
    for decoder in decoders:
        found = decoder.decode(embeds, gates=[[1, 0]], logits_to_keep=8)
        compare(f"LongRoPE: {'long' if length > SWITCH else 'short'} prompt", found, expected)


def test_decoding_past_the_longrope_switch(decoders, compare, reference):
    embeds = prompt(reference, 90, seed=8)
    full = reference.decode(embeds)
    for decoder in decoders:
        found = decoder.decode(embeds[:, :86])
        for step in range(86, 90):
            found = decoder.decode(embeds[:, step : step + 1], cache=found.cache)
        compare("LongRoPE: decoding past the switch", found, Decoded(full.logits[:, -1:], full.cache))


def test_the_largest_position_of_the_call_decides_the_longrope_switch(decoders, compare, reference):
    embeds = prompt(reference, SWITCH + 1, seed=9)
    before = reference.decode(embeds[:, :SWITCH])
    expected = reference.decode(embeds[:, SWITCH:], cache=before.cache)
    for decoder in decoders:
        found = decoder.decode(embeds[:, SWITCH:], cache=decoder.decode(embeds[:, :SWITCH]).cache)
        compare("LongRoPE: a step over the switch", found, expected)


def test_a_short_row_beside_a_long_one_takes_the_long_factors(decoders, compare, reference):
    short = prompt(reference, 10, seed=10)
    embeds, mask, position_ids = left_padded([short, prompt(reference, SWITCH + 20, seed=11)])
    expected = reference.decode(embeds, mask, position_ids)
    alone = reference.decode(short).logits
    assert relative_difference(expected.logits[:1, -10:], alone) > 0.01
    for decoder in decoders:
        compare("LongRoPE: short beside long", decoder.decode(embeds, mask, position_ids), expected, mask)


def test_positions_are_the_callers(decoders, compare, reference):
    embeds = prompt(reference, 12, seed=12)
    position_ids = torch.arange(12)[None] * 2 + 5
    expected = reference.decode(embeds, position_ids=position_ids)
    assert relative_difference(expected.logits, reference.decode(embeds).logits) > 0.01
    for decoder in decoders:
        compare("positions with gaps", decoder.decode(embeds, position_ids=position_ids), expected)


def test_rows_of_nothing_but_padding_are_finite_and_change_no_other_row(decoders, compare, reference):
    live = prompt(reference, 14, seed=13)
    embeds = torch.cat([live, prompt(reference, 14, seed=14)])
    mask = torch.tensor([[1] * 14, [0] * 14])
    expected = reference.decode(live)
    for decoder in decoders:
        found = decoder.decode(embeds, mask, positions(mask))
        for array in (found.logits, *(part for layer in found.cache for part in layer)):
            assert np.isfinite(array).all()
        own = Decoded(found.logits[:1], [(key[:1], value[:1]) for key, value in found.cache])
        compare("beside a row of padding", own, expected)
        token = embeds[:, :1]
        mask_after = torch.cat([mask, torch.tensor([[1], [0]])], 1)
        after = decoder.decode(token, mask_after, positions(mask_after)[:, -1:], found.cache)
        assert np.isfinite(after.logits).all()


@pytest.mark.parametrize(("name", "gates"), [("vision", [[1, 0]]), ("speech", [[0, 1]]), ("text", [[0, 0]])])
def test_an_adapter_file_sets_the_gates(package, decoders, reference, name, gates):
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(package["model"].path.parent / f"{name}.onnx_adapter"))
    embeds = torch.cat([prompt(reference, 9, seed=15), prompt(reference, 9, seed=16)])
    for decoder in decoders:
        options = onnxruntime.RunOptions()
        options.add_active_adapter(adapter)
        found = decoder.decode(embeds, options=options)
        np.testing.assert_array_equal(found.logits, decoder.decode(embeds, gates=gates).logits)
        assert relative_difference(found.logits, decoder.decode(embeds).logits) > 0.1


@pytest.mark.parametrize("variant", ["gated", "merged"])
def test_half_precision_is_as_near_to_fp32_as_transformers_is(
    export_package, session, reference_of, reference, differences, variant
):
    half = reference_of("fp16")
    decoder = Decoder(session(export_package(variant=variant, dtype="fp16"), "model"), reference.config)
    settings = SETTINGS if variant == "gated" else {"both": (None, "both")}
    ours, theirs = [], []
    for seed in range(4):
        for gates, adapter in settings.values():
            embeds = prompt(reference, 30 + 20 * seed, seed=20 + seed).half()
            expected = reference.decode(embeds.float(), adapter=adapter).logits
            theirs.append(relative_difference(half.decode(embeds, adapter=adapter).logits, expected))
            found = decoder.decode(embeds, gates=gates).logits
            assert found.dtype == np.float16
            ours.append(relative_difference(found, expected))
    differences.record("decoder", f"fp16 against fp32, {variant}", max(ours), 1.5 * max(theirs))


def test_bfloat16_is_as_near_to_fp32_as_transformers_is(export_package, reference_of, reference, differences):
    options = {"vocabulary": 2048}  # onnx's evaluator is slow
    path = export_package(dtype="bf16", layout="phi4_multimodal", **options)["model"].path
    whole, half = reference_of(**options), reference_of("bf16", **options)
    layers, heads = whole.config.num_hidden_layers, whole.config.num_key_value_heads
    size = whole.config.hidden_size // whole.config.num_attention_heads
    ours, theirs = [], []
    for seed in range(3):
        for gates, adapter in SETTINGS.values():
            embeds = whole.text_embeddings(token_ids(10, 30 + seed) % 2048).bfloat16()
            expected = whole.decode(embeds.float(), adapter=adapter).logits
            theirs.append(relative_difference(half.decode(embeds, adapter=adapter).logits.float(), expected))
            inputs = {
                "inputs_embeds": embeds,
                "attention_mask": torch.ones(1, 10, dtype=torch.long),
                "position_ids": torch.arange(10)[None],
            }
            for layer in range(layers):
                for part in ("key", "value"):
                    empty = torch.zeros(1, heads, 0, size, dtype=torch.bfloat16)
                    inputs[f"past_key_values.{layer}.{part}"] = empty
            if gates is not None:
                inputs["adapter_gates"] = torch.tensor(gates, dtype=torch.float32)
            ours.append(relative_difference(evaluate(path, inputs)["logits"], expected))
    differences.record("decoder", "bf16 against fp32", max(ours), 1.5 * max(theirs))
