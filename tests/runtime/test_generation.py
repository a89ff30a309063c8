"""ORTModelForPhi4MM generates what transformers' model does, and each row of a batch as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    relative_difference,
    token_ids,
)
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from optimum_phi4mm import InputError, ORTModelForPhi4MM


STEPS = 64
SWITCH = 64  # original_max_position_embeddings of the default checkpoint


@dataclass
class Prompt:
    """One prompt's tokens, pictures and clips."""

    input_ids: torch.Tensor
    images: Images | None
    frames: Sequence[int]
    seed: int

    @property
    def adapter(self) -> str | None:
        return "vision" if self.images else "speech" if self.frames else None

    @property
    def clips(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Features and mask as transformers' processor gives them: no mask for a single clip."""
        if not self.frames:
            return None
        features, mask = make_clips(self.frames, seed=self.seed)
        return features, mask if len(self.frames) > 1 else None

    def inputs(self) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": self.input_ids, "attention_mask": torch.ones_like(self.input_ids)}
        if self.images is not None:
            inputs["image_pixel_values"] = self.images.pixel_values
            inputs["image_sizes"] = self.images.sizes
            inputs["image_attention_mask"] = self.images.mask
        if self.clips is not None:
            features, mask = self.clips
            inputs["audio_input_features"] = features
            inputs["audio_embed_sizes"] = torch.tensor(list(map(clip_tokens, self.frames)))
            if mask is not None:
                inputs["audio_attention_mask"] = mask
        return inputs


def make_prompt(
    grids: Sequence[tuple[int, int]] = (), frames: Sequence[int] = (), seed: int = 0, text: int = 7
) -> Prompt:
    images = make_images(grids, [(0, 9), (3, 0), (0, 0)][: len(grids)], seed=seed) if grids else None
    parts = [token_ids(text, seed)]
    for index, count in enumerate(images.tokens if images else []):
        parts += [torch.full((1, count), IMAGE_TOKEN), token_ids(3, seed + index)]
    for index, count in enumerate(frames):
        parts += [torch.full((1, clip_tokens(count)), AUDIO_TOKEN), token_ids(4, seed + 10 + index)]
    return Prompt(torch.cat(parts, 1), images, frames, seed)


def batch(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, with all their pictures and clips one after another."""
    input_ids, attention_mask, _ = left_padded([prompt.input_ids for prompt in prompts])
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    images = [prompt.images for prompt in prompts if prompt.images is not None]
    if images:
        most = max(image.pixel_values.shape[1] for image in images)

        def padded(values: torch.Tensor) -> torch.Tensor:
            missing = values.new_zeros(len(values), most - values.shape[1], *values.shape[2:])
            return torch.cat([values, missing], 1)

        inputs["image_pixel_values"] = torch.cat([padded(image.pixel_values) for image in images])
        inputs["image_sizes"] = torch.cat([image.sizes for image in images])
        inputs["image_attention_mask"] = torch.cat([padded(image.mask) for image in images])
    clips = [clip for prompt in prompts if prompt.clips for clip in prompt.clips[0]]
    frames = [count for prompt in prompts for count in prompt.frames]
    if clips:
        longest = max(frames)
        inputs["audio_input_features"] = torch.stack(
            [torch.nn.functional.pad(clip, (0, 0, 0, longest - len(clip))) for clip in clips]
        )
        inputs["audio_embed_sizes"] = torch.tensor(list(map(clip_tokens, frames)))
        inputs["audio_attention_mask"] = torch.arange(longest)[None] < torch.tensor(frames)[:, None]
    return inputs


PROMPTS: dict[str, Callable[[], Prompt]] = {
    "text": lambda: make_prompt(seed=40),
    "image": lambda: make_prompt([(1, 2)], seed=45),
    "3 images": lambda: make_prompt([(1, 1), (2, 1), (1, 2)], seed=46),
    "audio": lambda: make_prompt(frames=[333], seed=41),
    "2 audios": lambda: make_prompt(frames=[150, 401], seed=43),
    "audio past 500 tokens": lambda: make_prompt(frames=[4100], seed=40),
    "image and audio": lambda: make_prompt([(1, 1)], [150], seed=49),
    "2 images and 2 audios": lambda: make_prompt([(1, 1), (1, 2)], [90, 260], seed=52),
}


@pytest.fixture(scope="module")
def reference(reference_of) -> Reference:
    """A reference whose LongRoPE switch is far off: `generate` goes wrong across it."""
    return reference_of(original_max_position=ROOMY)


@pytest.fixture(scope="module")
def model(export_package) -> ORTModelForPhi4MM:
    return ORTModelForPhi4MM.from_pretrained(export_package(original_max_position=ROOMY).path)


@pytest.fixture(scope="module")
def near(export_package) -> ORTModelForPhi4MM:
    """A model whose LongRoPE switch is at 64 tokens."""
    return ORTModelForPhi4MM.from_pretrained(export_package().path)


def expected_tokens(reference: Reference, prompt: Prompt, **options: Any) -> list[list[int]]:
    """transformers' tokens; embeddings are given, because with beams it mixes up several pictures."""
    clips = prompt.clips and (prompt.clips[0], prompt.frames, prompt.clips[1])
    embeds = reference.embeddings(prompt.input_ids, prompt.images, clips)
    with reference.adapter(prompt.adapter):
        found = reference.model.generate(
            inputs_embeds=embeds,
            attention_mask=torch.ones_like(prompt.input_ids),
            **{"max_new_tokens": STEPS, "do_sample": False, **options},
        )
    return found.tolist()


def generated(model: ORTModelForPhi4MM, inputs: dict[str, torch.Tensor], **options: Any) -> list[list[int]]:
    found = model.generate(**inputs, **{"max_new_tokens": STEPS, "do_sample": False, **options})
    return found[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_same_greedy_tokens_as_transformers(model, reference, kind):
    prompt = PROMPTS[kind]()
    expected = expected_tokens(reference, prompt)
    assert len(set(expected[0])) >= 5, "the reference repeats itself: choose another seed"
    assert generated(model, prompt.inputs()) == expected


@pytest.mark.parametrize("kind", PROMPTS)
def test_the_same_beams_as_transformers(model, reference, kind):
    prompt = PROMPTS[kind]()
    options = {"num_beams": 3, "num_return_sequences": 3}
    assert generated(model, prompt.inputs(), **options) == expected_tokens(reference, prompt, **options)


def test_each_row_of_a_mixed_batch_is_what_it_is_alone_and_as_in_transformers(model, reference):
    prompts = [PROMPTS[kind]() for kind in ("text", "2 images and 2 audios", "audio", "image", "2 audios")]
    found = generated(model, batch(prompts))
    for prompt, tokens in zip(prompts, found, strict=True):
        assert [tokens] == expected_tokens(reference, prompt)


def test_beams_of_a_mixed_batch(model, reference):
    prompts = [PROMPTS[kind]() for kind in ("image and audio", "text", "audio")]
    found = generated(model, batch(prompts), num_beams=3)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert [tokens] == expected_tokens(reference, prompt, num_beams=3)


def test_the_native_layout_generates_the_same(export_package, near):
    other = ORTModelForPhi4MM.from_pretrained(export_package(layout="phi4_multimodal").path)
    inputs = PROMPTS["image and audio"]().inputs()
    assert generated(other, inputs) == generated(near, inputs)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"num_beams": 2, "use_cache": False}], ids=str)
def test_without_a_cache_the_tokens_are_the_same(model, options):
    inputs = PROMPTS["image and audio"]().inputs()
    with_cache = {**options, "use_cache": True, "max_new_tokens": 12}
    assert generated(model, inputs, **options, max_new_tokens=12) == generated(model, inputs, **with_cache)


def test_io_binding_changes_nothing(model):
    inputs = PROMPTS["image and audio"]().inputs()
    plain = generated(model, inputs)
    model.use_io_binding = True
    try:
        assert generated(model, inputs) == plain
    finally:
        model.use_io_binding = False


class Placeholders(LogitsProcessor):
    """Makes every third token of an answer the image's placeholder and the next one the audio's."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.step = getattr(self, "step", -1) + 1
        if self.step % 3 == 2:
            return scores
        forced = torch.full_like(scores, -1e9)
        forced[:, (IMAGE_TOKEN, AUDIO_TOKEN)[self.step % 3]] = 0
        return forced


@pytest.mark.parametrize("kind", ["text", "image and audio"])
def test_placeholders_in_an_answer_are_tokens_like_any_other(model, reference, kind):
    prompt = PROMPTS[kind]()

    def options() -> dict[str, Any]:
        return {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([Placeholders()])}

    expected = expected_tokens(reference, prompt, **options())
    assert IMAGE_TOKEN in expected[0] and AUDIO_TOKEN in expected[0]
    assert generated(model, prompt.inputs(), **options()) == expected


def test_placeholders_in_an_answer_outlive_the_switch(near, reference_of):
    prompt = make_prompt(text=SWITCH - 4, seed=66)
    options = {"max_new_tokens": 9, "logits_processor": LogitsProcessorList([Placeholders()])}
    tokens = generated(near, prompt.inputs(), **options)[0]
    whole = torch.cat([prompt.input_ids, torch.tensor([tokens])], 1)
    for step in (2, 5, 8):  # the free ones
        embeds = reference_of().text_embeddings(whole[:, : prompt.input_ids.shape[1] + step])
        logits = reference_of().decode(embeds, adapter=None, logits_to_keep=1).logits
        assert int(logits.argmax()) == tokens[step]


# --- the LongRoPE switch -----------------------------------------------------------------------------------


def full_prefix_tokens(reference: Reference, prompt: Prompt, steps: int) -> list[int]:
    """Greedy tokens of the reference without a cache: its own recomputation at the switch is broken."""
    embeds = reference.embeddings(prompt.input_ids)
    tokens = []
    for _ in range(steps):
        logits = reference.decode(embeds, adapter=prompt.adapter, logits_to_keep=1).logits
        tokens.append(int(logits.argmax()))
        embeds = torch.cat([embeds, reference.text_embeddings(torch.tensor([[tokens[-1]]]))], 1)
    return tokens


@pytest.mark.parametrize("length", [SWITCH - 10, SWITCH - 1, SWITCH, SWITCH + 5])
def test_a_prompt_that_crosses_the_switch_is_the_full_prefix(near, reference_of, length):
    prompt = make_prompt(text=length, seed=70 + length)
    assert generated(near, prompt.inputs(), max_new_tokens=20) == [
        full_prefix_tokens(reference_of(), prompt, 20)
    ]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_rows_that_cross_the_switch_one_after_another_are_what_they_are_alone(near, options):
    prompts = [make_prompt(text=length, seed=80 + length) for length in (62, 50, 20, 80)]
    found = generated(near, batch(prompts), max_new_tokens=24, **options)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert [tokens] == generated(near, prompt.inputs(), max_new_tokens=24, **options)


def test_a_prompt_with_audio_that_crosses_the_switch_keeps_its_features(near, reference_of, differences):
    prompt = make_prompt(frames=[300], text=20, seed=90)  # 62 tokens
    reference = reference_of()
    assert prompt.input_ids.shape[1] == 62
    tokens = generated(near, prompt.inputs(), max_new_tokens=8)[0]
    features, mask = prompt.clips
    embeds = reference.embeddings(prompt.input_ids, None, (features, prompt.frames, mask))
    for token in tokens:
        logits = reference.decode(embeds, adapter="speech", logits_to_keep=1).logits
        assert int(logits.argmax()) == token
        embeds = torch.cat([embeds, reference.text_embeddings(torch.tensor([[token]]))], 1)


# --- forward -----------------------------------------------------------------------------------------------


def test_forward_gives_the_references_logits_with_and_without_a_cache(model, reference, differences):
    prompt = PROMPTS["image and audio"]()
    clips = (prompt.clips[0], prompt.frames, prompt.clips[1])
    embeds = reference.embeddings(prompt.input_ids, prompt.images, clips)
    expected = reference.decode(embeds, adapter="vision")
    found = model(**prompt.inputs())
    differences.record("runtime", "forward", relative_difference(found.logits, expected.logits), 1e-4)

    more = token_ids(3, 1)
    after = reference.decode(reference.text_embeddings(more), cache=expected.cache, adapter="vision")
    following = model(input_ids=more, past_key_values=found.past_key_values)
    differences.record(
        "runtime", "forward with a cache", relative_difference(following.logits, after.logits), 1e-4
    )
    last = model(input_ids=more, past_key_values=found.past_key_values, logits_to_keep=1).logits
    np.testing.assert_allclose(last, following.logits[:, -1:], atol=1e-5)


def test_forward_as_a_tuple_and_without_a_cache(model):
    inputs = PROMPTS["text"]().inputs()
    logits, cache = model(**inputs, return_dict=False)
    assert torch.equal(logits, model(**inputs).logits) and cache.get_seq_length() == 7
    assert "past_key_values" not in model(**inputs, use_cache=False)


def test_half_precision_generates(export_package, model):
    half = ORTModelForPhi4MM.from_pretrained(export_package(dtype="fp16").path)
    assert half.dtype == torch.float16
    inputs = PROMPTS["image and audio"]().inputs()
    logits = half(**inputs).logits
    assert logits.dtype == torch.float16 and torch.isfinite(logits).all()
    assert len(generated(half, inputs, max_new_tokens=4)[0]) == 4


# --- what generate offers ----------------------------------------------------------------------------------


def test_sampling_follows_the_seed_and_gives_several_sequences(model):
    inputs = PROMPTS["image"]().inputs()
    options = {"do_sample": True, "temperature": 2.0, "num_return_sequences": 3, "max_new_tokens": 8}
    torch.manual_seed(0)
    found = generated(model, inputs, **options)
    torch.manual_seed(0)
    assert generated(model, inputs, **options) == found
    assert len({tuple(row) for row in found}) == 3


def test_a_streamer_gets_every_token_as_it_comes(model):
    class Tokens(BaseStreamer):
        def __init__(self) -> None:
            self.heard: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard.extend(value.flatten().tolist())

        def end(self) -> None:
            self.heard.append(-1)

    streamer, inputs = Tokens(), PROMPTS["audio"]().inputs()
    tokens = generated(model, inputs, streamer=streamer, max_new_tokens=6)[0]
    assert streamer.heard == [*inputs["input_ids"][0].tolist(), *tokens, -1]


def test_a_stopping_criterion_ends_it(model):
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 10)

    inputs = PROMPTS["text"]().inputs()  # 7 tokens
    found = generated(model, inputs, stopping_criteria=StoppingCriteriaList([AfterThree()]))
    assert len(found[0]) == 3


def test_assisted_generation_is_refused(model):
    with pytest.raises(ValueError, match="stateful"):
        generated(model, PROMPTS["text"]().inputs(), prompt_lookup_num_tokens=3)


# --- components --------------------------------------------------------------------------------------------


def test_components_are_loaded_when_first_needed_and_can_be_released(export_package):
    model = ORTModelForPhi4MM.from_pretrained(export_package(original_max_position=ROOMY).path)
    generated(model, PROMPTS["text"]().inputs(), max_new_tokens=2)
    assert sorted(model.sessions.loaded) == ["embedding", "model"]
    before = generated(model, PROMPTS["image"]().inputs(), max_new_tokens=2)
    assert sorted(model.sessions.loaded) == ["embedding", "model", "vision"]
    generated(model, PROMPTS["audio"]().inputs(), max_new_tokens=2)
    assert len(model.sessions.loaded) == 4
    model.release()
    assert sorted(model.sessions.loaded) == ["embedding", "model"]
    assert generated(model, PROMPTS["image"]().inputs(), max_new_tokens=2) == before


@pytest.mark.parametrize("kind", ["image and audio", "2 audios"])
@pytest.mark.parametrize("beams", [1, 3])
def test_encoders_run_once_per_prompt(model, monkeypatch, kind, beams):
    runs = []
    run = model.sessions.run
    monkeypatch.setattr(model.sessions, "run", lambda name, *rest: runs.append(name) or run(name, *rest))
    prompt = PROMPTS[kind]()
    generated(model, prompt.inputs(), num_beams=beams, max_new_tokens=5)
    assert runs.count("vision") == (prompt.images is not None)
    assert runs.count("speech") == 1
    assert runs.count("model") == runs.count("embedding") == 5


# --- variants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "kind"), [("vision", "image and audio"), ("speech", "2 audios"), ("text", "text")]
)
def test_a_variant_generates_what_gated_does(export_package, model, variant, kind):
    other = ORTModelForPhi4MM.from_pretrained(
        export_package(variant=variant, original_max_position=ROOMY).path
    )
    inputs = PROMPTS[kind]().inputs()
    assert generated(other, inputs) == generated(model, inputs)


@pytest.mark.parametrize(
    ("variant", "kind"), [("vision", "audio"), ("vision", "text"), ("speech", "image"), ("text", "audio")]
)
def test_a_variant_refuses_prompts_that_it_has_no_adapter_for(export_package, monkeypatch, variant, kind):
    model = ORTModelForPhi4MM.from_pretrained(
        export_package(variant=variant, original_max_position=ROOMY).path
    )
    inputs = PROMPTS[kind]().inputs()
    monkeypatch.setattr(model.sessions, "run", None)  # before any model runs
    with pytest.raises(InputError, match=f"variant is {variant}.*gated"):
        generated(model, inputs)


# --- bad input ---------------------------------------------------------------------------------------------


def changed(kind: str, **changes: Any) -> dict[str, Any]:
    inputs = PROMPTS[kind]().inputs()
    for name, change in changes.items():
        inputs[name] = change(inputs[name]) if callable(change) else change
    return inputs


BAD = {
    "a placeholder too few": ("image", {"input_ids": lambda x: x[:, 8:], "attention_mask": None}, "fit"),
    "no placeholders": ("image", {"input_ids": token_ids(9, 1), "attention_mask": None}, "tokens for 0"),
    "no picture": ("image", {"image_pixel_values": None}, "fit"),
    "no sizes": ("image", {"image_sizes": None}, "image_sizes"),
    "odd sizes": ("image", {"image_sizes": lambda x: x + 1}, "multiples"),
    "sizes beyond the crops": ("image", {"image_sizes": lambda x: x * 9}, "multiples"),
    "mask of another shape": ("image", {"image_attention_mask": lambda x: x[:, :1]}, "image_attention_mask"),
    "flat pixels": ("image", {"image_pixel_values": lambda x: x[0]}, "image_pixel_values"),
    "no clip": ("audio", {"audio_input_features": None}, "fit"),
    "other mel bins": ("audio", {"audio_input_features": lambda x: x[..., :79]}, "audio_input_features"),
    "other clip sizes": ("audio", {"audio_embed_sizes": lambda x: x + 1}, "audio_embed_sizes"),
    "a hidden clip": ("2 audios", {"audio_attention_mask": lambda x: x & False}, "hides"),
    "attention mask too short": ("text", {"attention_mask": lambda x: x[:, 1:]}, "attention_mask"),
}


@pytest.mark.parametrize("case", BAD)
def test_inputs_that_contradict_each_other_are_refused_before_any_model_runs(model, monkeypatch, case):
    kind, changes, told = BAD[case]
    inputs = {name: value for name, value in changed(kind, **changes).items() if value is not None}
    monkeypatch.setattr(model.sessions, "run", None)
    with pytest.raises(InputError, match=told):
        model(**inputs)


def test_a_prompt_past_the_context_is_refused_before_any_model_runs(model, monkeypatch):
    limit = model.config.max_position_embeddings
    monkeypatch.setattr(model.sessions, "run", None)
    for call in (model, model.generate):
        with pytest.raises(InputError, match=f"{limit + 1} tokens.*{limit}"):
            call(input_ids=torch.ones(1, limit + 1, dtype=torch.int64))


def test_an_answer_ends_where_the_context_does(model, monkeypatch, caplog):
    monkeypatch.setattr(model.config, "max_position_embeddings", 8)
    ids = token_ids(6, 0)
    found = model.generate(input_ids=ids, max_new_tokens=10, do_sample=False, eos_token_id=-1)
    assert found.shape == (1, 9)  # the last token needs no place
    expected = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    assert torch.equal(found, expected)


def test_pictures_that_come_after_the_cache_are_refused(model):
    inputs = PROMPTS["image"]().inputs()
    cache = model(**inputs).past_key_values
    ids = torch.cat([inputs["input_ids"], token_ids(2, 0)], 1)
    media = {name: value for name, value in inputs.items() if name.startswith("image_")}
    with pytest.raises(InputError, match=r"image_pixel_values.*text only"):
        model(input_ids=ids[:, -2:], past_key_values=cache, **media)
    with pytest.raises(InputError, match=r"image_pixel_values.*text only"):
        model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=2, **media)


def test_a_conversation_goes_on_from_its_cache(model):
    first = PROMPTS["image"]().inputs()
    answered = model.generate(**first, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([answered.sequences, token_ids(5, 3)], 1)
    options = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(input_ids=more, past_key_values=answered.past_key_values, **options)
    whole = {**first, "input_ids": more, "attention_mask": torch.ones_like(more)}
    assert torch.equal(found, model.generate(**whole, **options))
