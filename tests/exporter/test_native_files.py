"""The files beside the graphs: native whatever layout they come from, read by stock transformers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_checkpoint import CHAT_TEMPLATE
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
)

from optimum_phi4mm.checkpoint import Checkpoint
from optimum_phi4mm.errors import CheckpointError, ExportError
from optimum_phi4mm.exporter.native_files import native_files


LAYOUTS = ("phi4mm", "phi4_multimodal")
NOT_OF_THE_MODEL = ("config.json", "model.safetensors.index.json")


@pytest.fixture(params=LAYOUTS)
def source(request: pytest.FixtureRequest, checkpoint, tmp_path: Path) -> SimpleNamespace:
    """A checkpoint whose small files can be changed: its weights are left where they are."""
    return _editable(checkpoint(request.param), tmp_path / "source")


@pytest.fixture
def original(original_checkpoint: Path, tmp_path: Path) -> SimpleNamespace:
    return _editable(original_checkpoint, tmp_path / "source")


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let caplog hear the package's logger, whether or not someone made transformers' loggers propagate."""
    logger = logging.getLogger(native_files.__module__)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate


def _editable(folder: Path, copy: Path) -> SimpleNamespace:
    opened = Checkpoint.open(folder)
    copy.mkdir()
    for file in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        if file.name not in NOT_OF_THE_MODEL:
            shutil.copy(file, copy)
    # A small tokenizer: these tests read it often. Bytes and special tokens keep their ids.
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    kept = {*range(256), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {piece: index for piece, index in vocabulary.items() if index in kept}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return SimpleNamespace(
        folder=copy, layout=opened.layout, raw_config=opened.raw_config, config=opened.config
    )


def _edit(source: SimpleNamespace, file: str, **changes: Any) -> None:
    path = source.folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _read(source: SimpleNamespace, file: str, dtype: str = "fp32") -> dict[str, Any]:
    return json.loads(native_files(source, dtype)[file])


def _write(source: SimpleNamespace, folder: Path) -> Path:
    folder.mkdir()
    for name, content in native_files(source, "fp32").items():
        (folder / name).write_bytes(content)
    return folder


def test_a_complete_checkpoint_gives_the_files_of_a_native_one(source):
    expected = {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    if source.layout == "phi4_multimodal":  # the other one has its template in tokenizer_config.json
        expected.add("chat_template.jinja")
    assert set(native_files(source, "fp32")) == expected


def test_stock_transformers_reads_config_tokenizer_and_feature_extractor(source, tmp_path):
    folder = _write(source, tmp_path / "package")
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is Phi4MultimodalConfig
    assert (config.hidden_size, config.vision_config.hidden_size, config.audio_config.hidden_size) == (
        64,
        64,
        32,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.image_token_id, tokenizer.audio_token_id) == (200010, 200011)
    assert tokenizer.decode(tokenizer("a picture").input_ids) == "a picture"
    turns = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hello<|end|><|assistant|>"
    extractor = Phi4MultimodalFeatureExtractor.from_pretrained(folder)
    assert (extractor.feature_size, extractor.sampling_rate, extractor.hop_length) == (80, 16000, 160)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [200020, 199999]


def test_both_layouts_give_the_same_files(checkpoint):
    original, native = (native_files(Checkpoint.open(checkpoint(layout)), "fp16") for layout in LAYOUTS)
    for name in (
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
    ):
        assert original[name] == native[name]
    ours, theirs = (json.loads(files["config.json"]) for files in (original, native))
    assert ours.pop("eos_token_id") == 199999  # which each checkpoint's own file says
    assert theirs.pop("eos_token_id") == [199999, 200020]
    assert ours == theirs


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_config_names_the_float_type_of_the_export(source, dtype, name):
    assert _read(source, "config.json", dtype)["dtype"] == name


def test_an_unknown_float_type_is_refused(original):
    with pytest.raises(ExportError, match="int8"):
        native_files(original, "int8")


def test_no_file_names_a_remote_class_or_a_path(source, tmp_path):
    _edit(
        source, "tokenizer_config.json", tokenizer_file="/home/someone/tokenizer.json", auto_map={"A": "b.C"}
    )
    for name, content in native_files(source, "fp32").items():
        if name != "tokenizer.json":
            text = content.decode()
            for forbidden in (
                "auto_map",
                "_name_or_path",
                "/home/someone",
                str(source.folder),
                "Phi4MM",
                "remote",
            ):
                assert forbidden not in text, name


def test_the_content_is_the_same_every_time_and_ends_in_a_line_break(source):
    files = native_files(source, "fp32")
    assert files == native_files(source, "fp32")
    for name, content in files.items():
        if name.endswith("_config.json") or name == "config.json":
            assert content.endswith(b"}\n") and content.startswith(b'{\n  "')


def test_processor_files_name_transformers_own_classes(source):
    preprocessor = _read(source, "preprocessor_config.json")
    assert preprocessor["image_processor_type"] == "Phi4MultimodalImageProcessorFast"
    assert preprocessor["feature_extractor_type"] == "Phi4MultimodalFeatureExtractor"
    assert preprocessor["processor_class"] == "Phi4MultimodalProcessor"
    assert _read(source, "processor_config.json") == {"processor_class": "Phi4MultimodalProcessor"}
    tokenizer = _read(source, "tokenizer_config.json")
    assert (tokenizer["processor_class"], tokenizer["tokenizer_class"]) == (
        "Phi4MultimodalProcessor",
        "GPT2TokenizerFast",
    )


def test_values_of_the_checkpoints_own_processor_file_are_kept(source):
    _edit(source, "preprocessor_config.json", dynamic_hd=12, image_mean=[0.1, 0.2, 0.3], preemphasis=0.5)
    found = _read(source, "preprocessor_config.json")
    assert (found["dynamic_hd"], found["image_mean"], found["preemphasis"]) == (12, [0.1, 0.2, 0.3], 0.5)


def test_a_checkpoint_without_processor_files_gets_the_published_values(source):
    expected = _read(source, "preprocessor_config.json")
    (source.folder / "preprocessor_config.json").unlink()
    (source.folder / "processor_config.json").unlink()
    assert _read(source, "preprocessor_config.json") == expected
    assert expected["dynamic_hd"] == 36 and expected["size"] == {"height": 448, "width": 448}


def test_a_checkpoint_without_generation_config_gets_the_configs_tokens(source):
    (source.folder / "generation_config.json").unlink()
    found = _read(source, "generation_config.json")
    config = source.config
    assert found == {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    assert GenerationConfig.from_dict(found).pad_token_id == 199999


def test_the_tokenizer_is_copied_byte_for_byte(source):
    assert native_files(source, "fp32")["tokenizer.json"] == (source.folder / "tokenizer.json").read_bytes()


def test_placeholders_are_the_tokens_with_the_configs_ids(source):
    content = json.loads((source.folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["content"] = {200010: "<picture>", 200011: "<sound>"}.get(token["id"], token["content"])
    (source.folder / "tokenizer.json").write_text(json.dumps(content))
    extra = _read(source, "tokenizer_config.json")["extra_special_tokens"]
    assert extra == {"image_token": "<picture>", "audio_token": "<sound>"}


def test_placeholders_are_also_found_in_the_vocabulary(source):
    content = json.loads((source.folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    (source.folder / "tokenizer.json").write_text(json.dumps(content))
    extra = _read(source, "tokenizer_config.json")["extra_special_tokens"]
    assert extra == {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}


def test_a_tokenizer_without_the_configs_placeholder_is_a_warning_that_names_the_id(original, caplog, heard):
    content = json.loads((original.folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] != 200011]
    content["model"]["vocab"].pop("<|endoftext11|>")
    (original.folder / "tokenizer.json").write_text(json.dumps(content))
    native_files(original, "fp32")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "200011" in record.getMessage()


def test_a_tokenizer_class_of_transformers_is_kept_and_a_remote_one_is_not(original):
    _edit(original, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert _read(original, "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    for name in ("SomeonesTokenizer", "GPT2Model", None):
        _edit(original, "tokenizer_config.json", tokenizer_class=name)
        assert _read(original, "tokenizer_config.json")["tokenizer_class"] == "GPT2TokenizerFast"


def test_further_tokenizer_files_are_copied_only_where_present(original):
    further = {
        "special_tokens_map.json": b'{"eos_token": "<|end|>"}',
        "added_tokens.json": b'{"<|end|>": 200020}',
        "vocab.json": b'{"a": 0}',
        "merges.txt": b"#version: 0.2\r\n",
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
    assert not set(further) & set(native_files(original, "fp32"))
    for name, content in further.items():
        (original.folder / name).write_bytes(content)
    files = native_files(original, "fp32")
    assert {name: files[name] for name in further} == further


@pytest.mark.parametrize(
    "missing", [["tokenizer.json"], ["tokenizer_config.json"], ["tokenizer.json", "tokenizer_config.json"]]
)
def test_missing_tokenizer_files_are_a_warning_that_names_them(original, missing, caplog, heard):
    for name in missing:
        (original.folder / name).unlink()
    files = native_files(original, "fp32")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(name in record.getMessage() for name in missing)
    assert "config.json" in files and "tokenizer.json" not in set(files) & set(missing)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("preprocessor_config.json", {"dynamic_hd": "36"}),
        ("preprocessor_config.json", {"dynamic_hd": 0}),
        ("preprocessor_config.json", {"image_mean": [0.5, None]}),
        ("preprocessor_config.json", {"size": 448}),
        ("preprocessor_config.json", {"do_resize": "yes"}),
        ("preprocessor_config.json", {"sampling_rate": {"hz": 16000}}),
        ("preprocessor_config.json", {"feature_size": 128}),  # contradicts config.json
        ("generation_config.json", {"temperature": "hot"}),
        ("generation_config.json", {"max_new_tokens": [1]}),
        ("generation_config.json", {"eos_token_id": "<|end|>"}),
        ("generation_config.json", {"do_sample": "yes"}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<|endoftext10|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": 5}}),
        ("tokenizer.json", {"added_tokens": {"200010": "x"}}),
    ],
)
def test_values_of_a_wrong_type_are_an_error_that_names_the_file(original, file, changes):
    _edit(original, file, **changes)
    with pytest.raises(CheckpointError, match=file):
        native_files(original, "fp32")


@pytest.mark.parametrize(
    "file", ["preprocessor_config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize(
    "content", [b"{", b"[1, 2]", b"\xff\xfe", b"null"], ids=["cut", "list", "binary", "null"]
)
def test_a_file_that_holds_no_json_object_is_an_error_that_names_it(original, file, content):
    (original.folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        native_files(original, "fp32")


def test_a_link_out_of_the_folder_is_followed(original, tmp_path):
    expected = native_files(original, "fp32")
    for file in list(original.folder.iterdir()):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert native_files(original, "fp32") == expected
