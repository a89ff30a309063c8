"""Phi4MMProcessor gives transformers' model inputs for what users have, and refuses what can't be used."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
import torch
from pictures import EXPECTED, SIZES, draw, places
from PIL import Image
from transformers import Phi4MultimodalFeatureExtractor

from optimum_phi4mm import InputError, Phi4MMProcessor
from optimum_phi4mm.errors import CheckpointError
from optimum_phi4mm.runtime.media import load_audio


RATE = 16000
EIGHT_BIT_STEP = 2 / 255  # of a sample, once it is normalised to [-1, 1]


@pytest.fixture(scope="module")
def processor(package) -> Phi4MMProcessor:
    return Phi4MMProcessor.from_pretrained(package.path)


def picture(width: int = 60, height: int = 40) -> Image.Image:
    return Image.fromarray(draw(width, height))


def wave(seconds: float = 0.5, rate: int = RATE, seed: int = 0) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.02, time.size)
    return (0.4 * np.sin(2 * np.pi * (200 + 900 * time) * time) + noise).astype(np.float32)


# --- pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pictures_equal_those_of_transformers(processor, differences, size):
    width, height = size
    with np.load(EXPECTED) as expected:
        kept = {key.split("/")[1]: expected[key] for key in expected if key.startswith(f"{width}x{height}/")}
    found = processor.image_processor([Image.fromarray(draw(width, height))])
    pixels, mask = found["image_pixel_values"][0].numpy(), found["image_attention_mask"][0].numpy()
    assert pixels.dtype == np.float32 and pixels.shape == tuple(kept["crops_shape"])
    assert found["num_img_tokens"] == kept["tokens"].tolist()
    np.testing.assert_array_equal(found["image_sizes"][0], kept["size"])
    np.testing.assert_array_equal(np.packbits(mask.astype(bool)), kept["mask"])
    for part, values in (("view", pixels[0]), ("crops", pixels[1:])):
        difference = np.abs(values.reshape(-1)[places(values.shape)] - kept[part]).max()
        differences.record("processor", f"pictures, {part} (of 2)", float(difference), EIGHT_BIT_STEP)


def test_several_pictures_are_padded_with_crops_of_zeros_that_no_mask_hides(processor):
    found = processor.image_processor([picture(448, 448), picture(896, 448)])
    assert found["image_pixel_values"].shape == (2, 3, 3, 448, 448)
    assert (found["image_pixel_values"][0, 2] == 0).all() and (found["image_attention_mask"] == 1).all()


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


SOURCES: dict[str, Callable[[Image.Image, Path], Any]] = {
    "uint8 array": lambda image, _: np.asarray(image),
    "channels first": lambda image, _: np.asarray(image).transpose(2, 0, 1),
    "tensor": lambda image, _: torch.from_numpy(np.array(image)),
    "16-bit array": lambda image, _: np.asarray(image).astype(np.uint16) * 257,
    "bytes": lambda image, _: encoded(image),
    "open file": lambda image, _: io.BytesIO(encoded(image)),
    "path": lambda image, folder: _written(folder / "a.png", encoded(image)),
    "name": lambda image, folder: str(_written(folder / "a.png", encoded(image))),
    "base64": lambda image, _: base64.b64encode(encoded(image)).decode(),
    "data URL": lambda image, _: "data:image/png;base64," + base64.b64encode(encoded(image)).decode(),
    "alpha": lambda image, _: image.convert("RGBA"),
    "rotated by EXIF": lambda image, _: encoded(image.transpose(Image.Transpose.ROTATE_90), exif=_rotated()),
}


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: turn by 90 degrees to the right
    return exif


@pytest.mark.parametrize("form", SOURCES)
def test_a_picture_in_any_form_is_the_same_picture(processor, tmp_path, form):
    image = picture()
    source = SOURCES[form](image, tmp_path)
    found = processor.image_processor([source])["image_pixel_values"]
    assert torch.equal(found, processor.image_processor([image])["image_pixel_values"])


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "LA", "YCbCr"])
def test_other_modes_are_what_pillow_makes_of_them(processor, mode):
    image = picture().convert(mode)
    found = processor.image_processor([image])["image_pixel_values"]
    assert torch.equal(found, processor.image_processor([image.convert("RGB")])["image_pixel_values"])


def test_16_bit_pictures_keep_their_brightness(processor):
    gray = np.asarray(picture().convert("L"))
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    assert deep.mode.startswith("I")
    found = processor.image_processor([encoded(deep)])["image_pixel_values"]
    assert torch.equal(found, processor.image_processor([gray])["image_pixel_values"])


BAD_PICTURES: dict[str, tuple[Any, str]] = {
    "long and thin": (np.zeros((4, 5000, 3), np.uint8), "too long and thin"),
    "no picture": (b"no picture", "no picture that Pillow reads"),
    "cut off": (encoded(picture(400, 400), "JPEG")[:5000], "can't be decoded"),
    "empty": (b"", "no picture"),
    "floats": (np.zeros((8, 8, 3)), "float64"),
    "two channels": (np.zeros((8, 8, 2), np.uint8), "shape"),
    "no pixels": (np.zeros((0, 8, 3), np.uint8), "shape"),
    "a word": ("no-such-file.png", "no file, no URL and no base64"),
    "a missing path": (Path("no-such-file.png"), "does not exist"),
    "a number": (5, "int"),
    "an unreachable URL": ("http://127.0.0.1:9/a.png", "can't be downloaded"),
}


@pytest.mark.parametrize("case", BAD_PICTURES)
def test_a_picture_that_cannot_be_used_is_refused_with_the_reason(processor, case):
    source, told = BAD_PICTURES[case]
    with pytest.raises(InputError, match=told):
        processor("<|image_1|>", images=source)


def test_a_picture_that_would_fill_the_memory_is_refused(processor, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match="decompression bomb"):
        processor.image_processor([encoded(picture())])


# --- recordings --------------------------------------------------------------------------------------------


def features(processor: Phi4MMProcessor, source: Any, **options: Any) -> Any:
    return processor("<|audio_1|>", audio=source, **options)


@pytest.mark.parametrize("samples", [400, 559, 560, 16000, 65537])
def test_features_equal_those_of_transformers(processor, differences, samples):
    source = wave(5)[:samples]
    found = features(processor, (source, RATE))
    expected = Phi4MultimodalFeatureExtractor()([source], sampling_rate=RATE, return_tensors="pt")
    difference = (found["audio_input_features"] - expected["audio_input_features"]).abs().max()
    differences.record("processor", "recordings (absolute)", float(difference), 1e-4)
    assert found["audio_embed_sizes"].tolist() == expected["audio_embed_sizes"].tolist()
    assert found["audio_embed_sizes"].tolist() == [-(-((samples - 400) // 160 + 1) // 8)]
    assert "audio_attention_mask" not in found


def test_several_recordings_have_a_mask_as_in_transformers(processor):
    sources = [wave(0.4), wave(0.9, seed=1)]
    found = processor("<|audio_1|><|audio_2|>", audio=[(source, RATE) for source in sources])
    expected = Phi4MultimodalFeatureExtractor()(sources, sampling_rate=RATE, return_tensors="pt")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


AUDIO_SOURCES: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "array": lambda samples, _: samples,
    "mapping": lambda samples, _: {"array": samples, "sampling_rate": RATE},
    "tensor": lambda samples, _: torch.from_numpy(samples),
    "stereo": lambda samples, _: (np.stack([samples, samples], 1), RATE),
    "list of numbers": lambda samples, _: [float(sample) for sample in samples],
    "channels first": lambda samples, _: (np.stack([samples, samples]), RATE),
    "wav": lambda samples, folder: _recorded(folder / "a.wav", samples),
    "bytes": lambda samples, folder: _recorded(folder / "a.wav", samples).read_bytes(),
    "name": lambda samples, folder: str(_recorded(folder / "a.wav", samples)),
}


def _recorded(path: Path, samples: np.ndarray, rate: int = RATE, **options: Any) -> Path:
    soundfile.write(path, samples, rate, **(options or {"subtype": "FLOAT"}))
    return path


@pytest.mark.parametrize("form", AUDIO_SOURCES)
def test_a_recording_in_any_form_is_the_same_recording(processor, tmp_path, form):
    samples = wave()
    found = features(processor, AUDIO_SOURCES[form](samples, tmp_path))["audio_input_features"]
    assert torch.equal(found, features(processor, (samples, RATE))["audio_input_features"])


def test_16_bit_samples_are_scaled(processor):
    samples = np.round(wave() * 32767).astype(np.int16)
    found = features(processor, (samples, RATE))["audio_input_features"]
    expected = features(processor, (samples / 32768, RATE))["audio_input_features"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_are_resampled(processor, rate):
    samples = wave(1, rate)
    found = features(processor, samples, sampling_rate=rate)["audio_input_features"]
    resampled = soxr.resample(samples, rate, RATE)
    assert torch.equal(found, features(processor, (resampled, RATE))["audio_input_features"])
    assert found.shape[1] == (len(resampled) - 400) // 160 + 1


@pytest.mark.parametrize("name", ["a.flac", "a.ogg", "a.mp3"])
def test_compressed_files_are_read(processor, tmp_path, name):
    path = _recorded(tmp_path / name, np.stack([wave(1, 48000)] * 2, 1), 48000, format=name[2:].upper())
    found = features(processor, path)["audio_input_features"]
    expected = features(processor, (wave(1, 48000), 48000))["audio_input_features"]
    assert abs(found.shape[1] - expected.shape[1]) <= 10  # codecs pad
    level = found[:, : expected.shape[1]].mean() - expected[:, : found.shape[1]].mean()
    assert abs(level) < 1.5  # of about 9, in log power: mp3 and ogg drop what isn't heard


def test_silence_and_ten_minutes_are_fine(processor):
    found = features(processor, (np.zeros(600 * RATE, np.float32), RATE))
    assert found["audio_embed_sizes"].tolist() == [7500]
    assert torch.isfinite(found["audio_input_features"]).all()
    assert found["input_ids"].shape == (1, 7500)


BAD_RECORDINGS: dict[str, tuple[Any, str]] = {
    "shorter than a frame": ((np.zeros(399, np.float32), RATE), "399 samples"),
    "empty": ((np.zeros(0, np.float32), RATE), "empty"),
    "NaN": ((np.full(RATE, np.nan, np.float32), RATE), "NaN"),
    "infinite": ((np.full(RATE, np.inf, np.float32), RATE), "NaN"),
    "bytes that are no recording": (b"RIFF....", "no recording that soundfile reads"),
    "a word": ("no-such-file.wav", "no file"),
    "a missing path": (Path("no-such-file.wav"), "does not exist"),
    "unsigned": ((np.zeros(RATE, np.uint8), RATE), "uint8"),
    "three axes": ((np.zeros((2, 2, RATE), np.float32), RATE), "shape"),
    "no axis of channels": ((np.zeros((1000, 1000), np.float32), RATE), "channels"),
    "no rate": ((wave(), 0), "positive rate"),
    "four hours": ((np.zeros(4 * 3600 * 100, np.float32), 100), "context"),
}


@pytest.mark.parametrize("case", BAD_RECORDINGS)
def test_a_recording_that_cannot_be_used_is_refused_with_the_reason(processor, case):
    source, told = BAD_RECORDINGS[case]
    with pytest.raises(InputError, match=told):
        features(processor, source)


def test_channels_do_not_count_as_length(processor):
    rate = 100
    three_hours = np.zeros((3 * 3600 * rate, 2), np.float32)  # of the context's 3.6
    assert len(load_audio((three_hours, rate), rate, max_seconds=3.6 * 3600)) == len(three_hours)
    with pytest.raises(InputError, match="lasts 2 s"):
        load_audio([0.0] * 200, rate, max_seconds=1)


def test_a_file_that_claims_to_be_endless_is_refused_before_it_is_decoded(processor, tmp_path):
    path = _recorded(tmp_path / "a.wav", np.zeros(RATE, np.float32), 1)  # one sample per second
    with pytest.raises(InputError, match="16000 s"):
        features(processor, path)


# --- prompts -----------------------------------------------------------------------------------------------


def test_markers_and_the_tokens_themselves_give_the_same(processor):
    image, sound = picture(), (wave(), RATE)
    found = processor("a<|image_1|>b<|audio_1|>c", image, sound)
    same = processor(f"a{processor.image_token}b{processor.audio_token}c", image, sound)
    assert sorted(found) == sorted(same)
    for name, value in found.items():
        assert torch.equal(value, same[name]), name


def test_placeholders_are_as_many_as_the_tokens_of_each(processor):
    found = processor(
        "<|audio_1|>x<|image_2|><|image_1|>", [picture(448, 448), picture(960, 686)], (wave(), RATE)
    )
    ids = found["input_ids"][0].tolist()
    assert ids.count(processor.audio_token_id) == found["audio_embed_sizes"].sum()
    first = processor("<|image_1|>", picture(960, 686))["input_ids"].shape[1]
    assert ids.count(processor.image_token_id) == first + 545
    # The second picture is named first: so it comes first.
    assert found["image_sizes"].tolist() == [[896, 1344], [448, 448]]


def test_several_prompts_are_padded_on_the_left_and_take_their_pictures_in_turn(processor):
    images = [picture(30 + index, 40) for index in range(3)]
    prompts = ["<|image_2|>and<|image_1|>", "nothing", "one <|image_1|>"]
    found = processor(prompts, images)
    nested = processor(prompts, [images[:2], [], images[2:]])
    assert torch.equal(found["image_pixel_values"], nested["image_pixel_values"])
    expected = processor.image_processor([images[1], images[0], images[2]])
    assert torch.equal(found["image_pixel_values"], expected["image_pixel_values"])
    lengths = found["attention_mask"].sum(1)
    assert lengths.argmax() == 0 and found["attention_mask"][:, -1].all()
    alone = processor("nothing")["input_ids"][0]
    assert torch.equal(found["input_ids"][1, -len(alone) :], alone)


def test_arrays_come_out_as_numpy_on_request(processor):
    found = processor("<|image_1|><|audio_1|>", picture(), (wave(), RATE), return_tensors="np")
    assert all(isinstance(value, np.ndarray) for value in found.values())


@pytest.mark.parametrize(
    ("text", "images", "told"),
    [
        ("none", 1, "names 0 image"),
        ("<|image_1|>", 0, "names 1 image"),
        ("<|image_1|>", 2, "names 1 image"),
        ("<|image_1|><|image_1|>", 2, "once each"),
        ("<|image_2|>", 1, "once each"),
        ("<|image_0|>", 1, "once each"),
        ("<|image_1|><|image_3|>", 2, "once each"),
        ("<|image_1|><|endoftext10|>", 2, "one of the two styles"),
        ([], 0, "no list of strings"),
        ([5], 0, "no list of strings"),
    ],
)
def test_markers_that_do_not_fit_are_refused_before_a_picture_is_read(
    processor, monkeypatch, text, images, told
):
    monkeypatch.setattr(processor, "image_processor", None)
    with pytest.raises(InputError, match=told):
        processor(text, images=[picture()] * images or None)


def test_a_prompt_that_is_cut_off_is_refused(processor):
    with pytest.raises(InputError, match="truncate"):
        processor("<|image_1|>", picture(), truncation=True, max_length=20)


# --- chat --------------------------------------------------------------------------------------------------


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": picture()},
            {"type": "audio", "audio": (wave(), RATE)},
            {"type": "text", "text": "What is it?"},
        ],
    },
]


def test_chat_parts_become_markers_in_their_order_with_nothing_between(processor):
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert "<|image_1|><|audio_1|>What is it?" in text
    joined = [MESSAGES[0], {"role": "user", "content": "<|image_1|><|audio_1|>What is it?"}]
    assert text == processor.tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)


def test_chat_messages_give_the_models_inputs(processor):
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    found = processor.apply_chat_template(MESSAGES, **options)
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    expected = processor(text, picture(), (wave(), RATE))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    several = processor.apply_chat_template([MESSAGES, MESSAGES[:1]], **options)
    assert several["input_ids"].shape[0] == 2 and several["image_pixel_values"].shape[0] == 1


@pytest.mark.parametrize("part", [{"type": "video", "video": "a"}, {"type": "image"}, "text"], ids=str)
def test_a_part_of_another_kind_is_refused(processor, part):
    with pytest.raises(InputError, match="part"):
        processor.apply_chat_template([{"role": "user", "content": [part]}])


# --- files -------------------------------------------------------------------------------------------------


def test_every_layout_and_the_package_give_the_same_inputs(processor, original_checkpoint, native_checkpoint):
    expected = processor("a<|image_1|>b<|audio_1|>", picture(), (wave(), RATE))
    for source in (original_checkpoint, native_checkpoint):
        found = Phi4MMProcessor.from_pretrained(source)("a<|image_1|>b<|audio_1|>", picture(), (wave(), RATE))
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_a_saved_processor_is_the_same(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    loaded = Phi4MMProcessor.from_pretrained(tmp_path)
    assert loaded.image_processor.to_dict() == processor.image_processor.to_dict()
    found, expected = (p("<|image_1|>", picture()) for p in (loaded, processor))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written["image_processor_type"] == "Phi4MultimodalImageProcessorFast"
    assert written["feature_extractor_type"] == "Phi4MultimodalFeatureExtractor"


def test_sizes_come_from_the_files(package, tmp_path):
    shutil.copytree(package.path, tmp_path / "p", ignore=shutil.ignore_patterns("*.onnx*"))
    file = tmp_path / "p" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dynamic_hd": 2, "sampling_rate": 8000}))
    processor = Phi4MMProcessor.from_pretrained(tmp_path / "p")
    assert processor.image_processor([picture(3000, 3000)])["image_pixel_values"].shape[1] == 2
    assert features(processor, (wave(1, 8000), 8000))["audio_input_features"].shape[1] == 48


@pytest.mark.parametrize(
    "change",
    [{"size": {"height": 448, "width": 224}}, {"patch_size": 15}, {"image_mean": 5}, {"resample": 9}],
)
def test_malformed_files_are_named(package, tmp_path, change):
    shutil.copytree(package.path, tmp_path / "p", ignore=shutil.ignore_patterns("*.onnx*"))
    file = tmp_path / "p" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        Phi4MMProcessor.from_pretrained(tmp_path / "p")


def test_a_folder_without_a_tokenizer_is_refused(package, tmp_path):
    shutil.copy(package.path / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="tokenizer"):
        Phi4MMProcessor.from_pretrained(tmp_path)
