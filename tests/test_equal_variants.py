"""Every variant, type, layout and size of a package holds the checkpoint's weights and computes the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from reference import (
    clip_tokens,
    left_padded,
    load_reference,
    make_clips,
    make_images,
    positions,
    relative_difference,
    token_ids,
)
from synthetic_checkpoint import ADAPTERS, Sizes, tensors, write_checkpoint


BOUND = 1e-4
COMPONENTS = ("vision", "speech", "embedding", "model")
NUMPY_TYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TRANSPOSED = ".transposed"  # how a name says that a weight is stored transposed
DERIVED = {  # stored values that are computed from the config
    "vision_encoder.img_processor.embeddings.position_id_table",
    "decoder.rotary_emb.inv_freq",
}
PREFIXES = {
    "model.embed_tokens_extend.image_embed.": "vision_encoder.",
    "model.embed_tokens_extend.audio_embed.": "speech_encoder.",
    "model.embed_tokens.": "embedding.embed_tokens.",
    "model.layers.": "decoder.layers.",
    "model.norm.": "decoder.norm.",
    "lm_head.": "decoder.lm_head.",
}
UNUSED = (".img_processor.post_layernorm.", ".img_processor.head.")
VARIANTS = {"merged": ADAPTERS, "vision": ("vision",), "speech": ("speech",), "text": ()}  # what is folded
GATES = {"merged": [[1, 1]], "vision": [[1, 0]], "speech": [[0, 1]], "text": [[0, 0]]}
REFERENCE_ADAPTERS = {"merged": "both", "vision": "vision", "speech": "speech", "text": None}


def stored_name(name: str) -> str:
    """The name that design section 1 gives a tensor of the phi4mm layout in a graph."""
    prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return (PREFIXES[prefix] + name.removeprefix(prefix)).replace(".base_layer", "")


def checkpoint_weights(sizes: Sizes) -> dict[str, np.ndarray]:
    """Every used tensor of the fixture's checkpoint (bfloat16 values in fp32) by its name in a graph."""
    last = f".img_processor.encoder.layers.{sizes.vision_layers - 1}."
    weights = {
        stored_name(tensor.name): tensor.values(0).bfloat16().float().numpy()
        for tensor in tensors(sizes)
        if not any(part in tensor.name for part in (*UNUSED, last))
    }
    return weights | {"decoder.lm_head.weight": weights["embedding.embed_tokens.weight"]}


def folded_weights(weights: Mapping[str, np.ndarray], sizes: Sizes, variant: str) -> dict[str, np.ndarray]:
    """The weights with the variant's adapters added to what they adapt and none left beside it."""
    folded = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for adapter in VARIANTS[variant]:
        rank, alpha = sizes.adapter(adapter)
        for name in [name for name in weights if name.endswith(f".lora_A.{adapter}.weight")]:
            stem = name.removesuffix(f".lora_A.{adapter}.weight")
            a, b = (weights[f"{stem}.lora_{part}.{adapter}.weight"].astype(np.float64) for part in "AB")
            folded[f"{stem}.weight"] = folded[f"{stem}.weight"] + alpha / rank * (b @ a)
    return folded


def stored(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Weights of a graph under their names without the suffix, turned back where they are transposed."""
    for initializer in onnx.load(path).graph.initializer:
        if initializer.name.startswith(tuple(PREFIXES.values())) and initializer.name not in DERIVED:
            array = numpy_helper.to_array(initializer)
            transposed = initializer.name.endswith(TRANSPOSED)
            yield initializer.name.removesuffix(TRANSPOSED), array.T if transposed else array


def all_stored(package) -> dict[str, np.ndarray]:
    """Weights of the four graphs; each must be in one of them only."""
    found: dict[str, np.ndarray] = {}
    for component in COMPONENTS:
        for name, array in stored(package[component].path):
            assert name not in found, f"{name} is stored twice"
            found[name] = array
    return found


def in_shape_of(array: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """A stored array in the checkpoint's shape: only axes of 1 may come or go."""
    assert [axis for axis in array.shape if axis != 1] == [axis for axis in expected.shape if axis != 1]
    return array.reshape(expected.shape)


class Decoder:
    """A session of model.onnx and its cache."""

    def __init__(self, session, config) -> None:
        self.session = session
        self.layers = config.num_hidden_layers
        self.cache_shape = (config.num_key_value_heads, 0, config.hidden_size // config.num_attention_heads)

    def __call__(self, embeds: torch.Tensor, mask: torch.Tensor, cache=None, gates=None, keep: int = 0):
        """Logits and cache for embeddings at the end of what `mask` covers."""
        names = [f"{layer}.{part}" for layer in range(self.layers) for part in ("key", "value")]
        cache = cache or [np.zeros((embeds.shape[0], *self.cache_shape), np.float32)] * len(names)
        inputs = {f"past_key_values.{name}": part for name, part in zip(names, cache, strict=True)}
        inputs |= {
            "inputs_embeds": embeds.numpy(),
            "attention_mask": mask.numpy(),
            "position_ids": positions(mask)[:, mask.shape[1] - embeds.shape[1] :].numpy(),
            "logits_to_keep": np.array([keep]),
        }
        if gates is not None:
            inputs["adapter_gates"] = np.array(gates, np.float32)
        logits, *present = self.session.run(["logits", *(f"present.{name}" for name in names)], inputs)
        return logits, present


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "unoptimised"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_generates_with_a_cache_as_gated_and_as_transformers_do(
    export_package, package, session, reference, differences, variant, optimized
):
    folded = Decoder(session(export_package(variant=variant), "model", optimized), reference.config)
    gated = Decoder(session(package, "model", optimized), reference.config)
    rows = [reference.text_embeddings(token_ids(length, 200 + length)) for length in (23, 11)]
    embeds, mask, position_ids = left_padded(rows)
    theirs = reference.decode(embeds, mask, position_ids, adapter=REFERENCE_ADAPTERS[variant])
    found, cache = folded(embeds, mask)
    expected, gated_cache = gated(embeds, mask, gates=GATES[variant])
    for step in range(3):
        live = mask[:, mask.shape[1] - found.shape[1] :].bool()
        difference = relative_difference(found[live.numpy()], expected[live.numpy()])
        differences.record("variants", f"{variant} against gated", difference, BOUND)
        difference = relative_difference(found[live.numpy()], theirs.logits[live])
        differences.record("variants", f"{variant} against transformers", difference, BOUND)
        token = torch.cat([reference.text_embeddings(token_ids(1, 300 + 2 * step + row)) for row in range(2)])
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        found, cache = folded(token, mask, cache)
        expected, gated_cache = gated(token, mask, gated_cache, GATES[variant])
        theirs = reference.decode(
            token, mask, positions(mask)[:, -1:], theirs.cache, REFERENCE_ADAPTERS[variant]
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_gated_has_gates_and_adapter_files(export_package, package, variant):
    assert "adapter_gates" in package["model"].inputs
    other = export_package(variant=variant)
    assert set(other["model"].inputs) == set(package["model"].inputs) - {"adapter_gates"}
    adapters = {f"{name}.onnx_adapter" for name in (*ADAPTERS, "text")}
    assert {path.name for path in package["model"].path.parent.glob("*.onnx_adapter")} == adapters
    assert not list(other["model"].path.parent.glob("*.onnx_adapter"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_stores_its_adapters_folded_and_all_other_weights_as_gated_does(export_package, variant):
    expected = folded_weights(checkpoint_weights(Sizes()), Sizes(), variant)
    found = all_stored(export_package(variant=variant))
    assert set(found) == set(expected)
    for name, weight in expected.items():
        array = in_shape_of(found[name], weight)
        np.testing.assert_allclose(array, weight, rtol=0, atol=1e-6 * np.abs(weight).max(), err_msg=name)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_the_stored_weights_are_those_of_the_checkpoint_in_the_exports_type(export_package, dtype):
    expected = checkpoint_weights(Sizes())
    found = all_stored(export_package(dtype=dtype))
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert found[name].dtype == NUMPY_TYPES[dtype], name
        array = in_shape_of(found[name], weight)
        np.testing.assert_array_equal(array, weight.astype(NUMPY_TYPES[dtype]), err_msg=name)


def test_half_precision_folds_before_it_rounds(export_package):
    expected = folded_weights(checkpoint_weights(Sizes()), Sizes(), "merged")
    found = dict(stored(export_package(variant="merged", dtype="fp16")["model"].path))
    for name in [name for name in found if "_proj.weight" in name]:
        halves = expected[name].astype(np.float16)
        # fp32 instead of fp64 sums may fall on the other side of a rounding boundary, rarely
        assert np.mean(found[name] != halves) < 1e-3, name
        np.testing.assert_allclose(found[name].astype(np.float32), expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*(("gated", dtype) for dtype in NUMPY_TYPES), *((name, "fp32") for name in VARIANTS)],
)
def test_onnx_accepts_every_graph(export_package, variant, dtype):
    package = export_package(variant=variant, dtype=dtype)
    for component in COMPONENTS:
        onnx.checker.check_model(package[component].path, full_check=True)


def test_both_layouts_give_the_same_weights(export_package, package):
    expected = all_stored(package)
    found = all_stored(export_package(layout="phi4_multimodal"))
    assert set(found) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_the_native_layout_computes_what_transformers_computes(
    export_package, session, reference, differences
):
    native = export_package(layout="phi4_multimodal")

    def record(output: str, found: np.ndarray, expected: torch.Tensor) -> None:
        differences.record("native layout", output, relative_difference(found, expected), BOUND)

    images = make_images([(1, 2), (1, 1)], [(3, 8), (0, 0)], seed=210)
    (found,) = session(native, "vision").run(None, images.contract())
    record("image_features", found, reference.image_features(images))
    features, mask = make_clips([70, 200], seed=211)
    outputs = {"speech_features": "speech", "speech_features_for_vision": "vision"}
    inputs = {"audio_features": features.numpy(), "audio_attention_mask": mask.numpy()}
    for output, projection in outputs.items():
        (found,) = session(native, "speech").run([output], inputs)
        record(output, found, reference.speech_features(features, [70, 200], mask, projection))
    embeds = reference.text_embeddings(token_ids(70, 212))  # past the LongRoPE switch
    decoder = Decoder(session(native, "model"), reference.config)
    for variant, gates in GATES.items():
        found, _ = decoder(embeds, torch.ones(1, 70, dtype=torch.long), gates=gates)
        expected = reference.decode(embeds, adapter=REFERENCE_ADAPTERS[variant]).logits
        record(f"logits, gates {gates[0]}", found, expected)


WINDOW = 13
OTHER_SIZES = {
    "vocabulary": 640,
    "hidden": 96,
    "layers": 4,
    "heads": 3,
    "kv_heads": 1,
    "intermediate": 72,
    "vision_rank": 3,
    "vision_alpha": 7,
    "speech_rank": 17,
    "speech_alpha": 5,
    "vision_hidden": 48,
    "vision_layers": 4,
    "vision_heads": 4,
    "vision_intermediate": 56,
    "audio_width": 48,
    "audio_heads": 4,
    "audio_intermediate": 40,
    "audio_blocks": 3,
    "conv_channels": 8,
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A fine-tuned copy in which every size differs: reference, package, the ids of both placeholders.

    It has a small vocabulary with placeholders of its own, an untied head, one shard, vision attention of
    4 heads (only the native layout can say so) and a sliding window shorter than the prompts.
    """
    import optimum_phi4mm

    folder = write_checkpoint(
        tmp_path_factory.mktemp("other"), "phi4_multimodal", tied=False, shards=1, **OTHER_SIZES
    )
    image, audio = (Sizes(**OTHER_SIZES).token(f"<|endoftext{number}|>") for number in (10, 11))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["sliding_window"] = WINDOW
    config["vision_config"]["image_token_id"] = image
    config["audio_config"]["audio_token_id"] = audio
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    package = optimum_phi4mm.export(folder, tmp_path_factory.mktemp("other") / "package", do_validation=False)
    return SimpleNamespace(reference=load_reference(folder), package=package, image=image, audio=audio)


@pytest.fixture(scope="module")
def other_decoders(other, session) -> list[Decoder]:
    sessions = [session(other.package, "model", optimized) for optimized in (True, False)]
    return [Decoder(running, other.reference.config) for running in sessions]


def ordinary(count: int, seed: int) -> torch.Tensor:
    """Ids [1, count] below the special tokens of a small vocabulary."""
    return token_ids(count, seed) % 256


@pytest.mark.parametrize("optimized", [True, False], ids=["optimised", "unoptimised"])
def test_other_sizes_image_and_audio_features_at_placeholders_of_their_own(
    other, session, differences, optimized
):
    images = make_images([(2, 1), (1, 1)], [(4, 17), (0, 0)], seed=220)
    clip, _ = make_clips([150], seed=221)
    ids = torch.cat(
        [
            ordinary(3, 222),
            torch.full((1, sum(images.tokens)), other.image),
            ordinary(2, 223),
            torch.full((1, clip_tokens(150)), other.audio),
            ordinary(5, 224),
        ],
        1,
    )
    (image_features,) = session(other.package, "vision", optimized).run(None, images.contract())
    for beside, output in ((None, "speech_features"), (images, "speech_features_for_vision")):
        (clips,) = session(other.package, "speech", optimized).run([output], {"audio_features": clip.numpy()})
        shown = ids if beside else ids[ids != other.image][None]
        inputs = {
            "input_ids": shown.numpy(),
            "image_features": image_features if beside else image_features[:0],
            "speech_features": clips,
        }
        (found,) = session(other.package, "embedding", optimized).run(None, inputs)
        expected = other.reference.embeddings(shown, beside, (clip, [150], None))
        for part, where in (("image", shown == other.image), ("audio", shown == other.audio)):
            if where.any():
                difference = relative_difference(found[where.numpy()], expected[where])
                differences.record("other sizes", f"{part} features", difference, BOUND)
        difference = relative_difference(found, expected)
        differences.record("other sizes", "embeddings", difference, BOUND)


@pytest.mark.parametrize("variant", GATES)
def test_other_sizes_logits_inside_and_past_a_sliding_window(other, other_decoders, differences, variant):
    rows = [other.reference.text_embeddings(ordinary(length, length)) for length in (40, 9, 29)]
    embeds, mask, position_ids = left_padded(rows)
    adapter = REFERENCE_ADAPTERS[variant]
    expected = other.reference.decode(embeds, mask, position_ids, adapter=adapter).logits
    live = mask.bool()
    for decoder in other_decoders:
        found, _ = decoder(embeds, mask, gates=GATES[variant])
        difference = relative_difference(found[live.numpy()], expected[live])
        differences.record("other sizes", f"logits, window of {WINDOW}", difference, BOUND)


def test_other_sizes_decoding_past_a_sliding_window_is_the_full_prefix(other, other_decoders, differences):
    embeds = other.reference.text_embeddings(ordinary(30, 230))
    expected = other.reference.decode(embeds, adapter="vision").logits
    for decoder in other_decoders:
        logits, cache = decoder(embeds[:, :10], torch.ones(1, 10, dtype=torch.long), gates=[[1, 0]])
        for end in range(11, 31):
            step, cache = decoder(
                embeds[:, end - 1 : end], torch.ones(1, end, dtype=torch.long), cache, [[1, 0]]
            )
            logits = np.concatenate([logits, step], 1)
        difference = relative_difference(logits, expected)
        differences.record("other sizes", f"decoding past a window of {WINDOW}", difference, BOUND)


def test_a_sliding_window_matters_to_the_reference(other):
    embeds = other.reference.text_embeddings(ordinary(30, 231))
    narrow = other.reference.decode(embeds).logits
    other.reference.config.sliding_window = None
    try:
        wide = other.reference.decode(embeds).logits
    finally:
        other.reference.config.sliding_window = WINDOW
    assert relative_difference(narrow[:, :WINDOW], wide[:, :WINDOW]) < 1e-5
    assert relative_difference(narrow[:, WINDOW:], wide[:, WINDOW:]) > 0.01
