"""transformers' own pipeline and Optimum's conventions hold for the model."""

from __future__ import annotations

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from pictures import draw
from PIL import Image
from reference import ROOMY
from transformers import pipeline
from transformers.utils import logging as transformers_logging

from optimum_phi4mm import ORTModelForPhi4MM, PackageError, Phi4MMProcessor


@pytest.fixture(scope="module")
def folder(export_package):
    return export_package(original_max_position=ROOMY).path


@pytest.fixture(scope="module")
def model(folder) -> ORTModelForPhi4MM:
    return ORTModelForPhi4MM.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder) -> Phi4MMProcessor:
    return Phi4MMProcessor.from_pretrained(folder)


MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": Image.fromarray(draw(60, 40))},
            {"type": "text", "text": "What is it?"},
        ],
    }
]


def test_the_image_text_to_text_pipeline_answers_and_complains_of_nothing(model, processor, caplog):
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            answer = pipeline("image-text-to-text", model=model, processor=processor)
            found = answer(text=MESSAGES, max_new_tokens=5, return_full_text=False)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "not supported" in record.getMessage()]
    inputs = processor.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, add_generation_prompt=True
    )
    tokens = model.generate(**inputs, max_new_tokens=5)[0, inputs["input_ids"].shape[1] :]
    assert found[0]["generated_text"] == processor.decode(tokens, skip_special_tokens=True)


def test_a_plain_prompt_with_a_picture_goes_through_the_pipeline(model, processor):
    answer = pipeline("image-text-to-text", model=model, processor=processor)
    found = answer(
        images=Image.fromarray(draw(60, 40)),
        text="<|image_1|>What is it?",
        generate_kwargs={"max_new_tokens": 4},
    )
    assert "generated_text" in found[0]


def test_optimums_conventions(model, folder):
    assert model.can_generate() and model.main_input_name == "input_ids"
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.config.model_type == "phi4_multimodal"
    written = json.loads((folder / "generation_config.json").read_text())
    assert model.generation_config.eos_token_id == written["eos_token_id"] == [200020, 199999]
    assert model.providers == ["CPUExecutionProvider"] and model.use_io_binding is False
    assert model.to("cpu") is model and model.to(torch.float16) is model
    assert model.path.name == "model.onnx" and model.model_save_dir == folder
    with pytest.raises(TypeError):
        model.use_io_binding = "yes"
    with pytest.raises((ValueError, AssertionError)):
        model.to("cuda")


def test_a_saved_model_is_the_same(model, processor, folder, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    saved = ORTModelForPhi4MM.from_pretrained(tmp_path / "saved")
    inputs = processor(["<|image_1|>a", "b"], [draw(60, 40)])
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(saved.generate(**inputs, **options), model.generate(**inputs, **options))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {path.name for path in folder.iterdir()}
    saved.save_pretrained(tmp_path / "saved")  # into its own folder
    assert (tmp_path / "saved" / "model.onnx_data").stat().st_size


def test_export_true_exports_first(original_checkpoint, near_model, processor, reusing_captures):
    with reusing_captures():
        exported = ORTModelForPhi4MM.from_pretrained(original_checkpoint, export=True)
    inputs = processor("hello")
    assert torch.equal(exported(**inputs).logits, near_model(**inputs).logits)
    place = exported.model_save_dir
    assert (place / "config.json").is_file()
    del exported
    assert not place.exists()  # the temporary folder goes with the model


@pytest.fixture(scope="module")
def near_model(package) -> ORTModelForPhi4MM:
    return ORTModelForPhi4MM.from_pretrained(package.path)


@pytest.mark.parametrize("name", ["model.onnx_data", "embedding.onnx", "vision.onnx"])
def test_a_missing_file_is_named(folder, processor, tmp_path, name):
    shutil.copytree(folder, tmp_path / "p")
    (tmp_path / "p" / name).unlink()
    with pytest.raises(PackageError, match=name):
        model = ORTModelForPhi4MM.from_pretrained(tmp_path / "p")
        model.generate(**processor("<|image_1|>", draw(60, 40)), max_new_tokens=1)


@pytest.mark.parametrize("name", ["model.onnx", "vision.onnx"])
def test_a_foreign_file_is_named(folder, processor, tmp_path, name):
    shutil.copytree(folder, tmp_path / "p")
    for suffix in ("", "_data"):
        shutil.copy(folder / f"speech.onnx{suffix}", tmp_path / "p" / f"{name}{suffix}")
    shutil.copy(folder / "speech.onnx_data", tmp_path / "p")
    with pytest.raises(PackageError, match=name):
        model = ORTModelForPhi4MM.from_pretrained(tmp_path / "p")
        model.generate(**processor("<|image_1|>", draw(60, 40)), max_new_tokens=1)


def test_a_broken_file_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "p")
    (tmp_path / "p" / "model.onnx").write_bytes(np.arange(99, dtype=np.uint8).tobytes())
    with pytest.raises(PackageError, match=r"model\.onnx"):
        ORTModelForPhi4MM.from_pretrained(tmp_path / "p")
