"""What can't be exported or run is refused: a clear error, a non-zero exit, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import (
    EPFail,
    Fail,
    InvalidArgument,
    InvalidGraph,
    RuntimeException,
)
from safetensors.torch import load_file, save_file

import optimum_phi4mm
from optimum_phi4mm.errors import CheckpointError, ExportError, Phi4MMError


ORT_ERRORS = (EPFail, Fail, InvalidArgument, InvalidGraph, RuntimeException)
NORM = "model.norm.weight"
HIDDEN = 64


@pytest.fixture
def original(original_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the phi4mm checkpoint to break; its large files are links until they are replaced."""
    return _copy(original_checkpoint, tmp_path / "checkpoint")


@pytest.fixture
def native(native_checkpoint: Path, tmp_path: Path) -> Path:
    """The same in the phi4_multimodal layout."""
    return _copy(native_checkpoint, tmp_path / "checkpoint")


def _copy(source: Path, target: Path) -> Path:
    def link_large(path: str, copy: str) -> None:
        if os.path.getsize(path) > 1_000_000:
            os.symlink(path, copy)
        else:
            shutil.copy(path, copy)

    shutil.copytree(source, target, copy_function=link_large)
    return target


def _shard_of(checkpoint: Path, key: str) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / index["weight_map"][key]


def _change_tensors(checkpoint: Path, key: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the shard that holds `key` after `change`; the index follows."""
    shard = _shard_of(checkpoint, key)
    content = load_file(shard)
    change(content)
    shard.unlink()
    save_file(content, shard, metadata={"format": "pt"})
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    kept = {name: file for name, file in index["weight_map"].items() if file != shard.name}
    index["weight_map"] = kept | dict.fromkeys(content, shard.name)
    path.write_text(json.dumps(index))


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., str]:
    """Asserts that an export fails with our error and leaves nothing behind; gives the message."""

    def export(checkpoint: Path | str, error: type[Exception] = CheckpointError, **options: Any) -> str:
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        with pytest.raises(error) as caught:
            optimum_phi4mm.export(checkpoint, place / "new" / "out", **options)
        assert isinstance(caught.value, Phi4MMError)
        assert list(place.iterdir()) == []
        return str(caught.value)

    return export


@pytest.fixture
def capture_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Leaves all graphs but one component's empty: captures take seconds, what is tested comes later."""
    from optimum_phi4mm.exporter import convert

    capture = convert.capture

    def choose(prefix: str) -> None:
        def capture_one(component: Any, config: Any, **options: Any) -> Any:
            if prefix == config.PREFIX:
                return capture(component, config, **options)
            return convert.ir.Model(convert.ir.Graph([], [], nodes=[]), ir_version=10)

        monkeypatch.setattr(convert, "capture", capture_one)

    return choose


# --- not this model ----------------------------------------------------------------------------------------


def test_another_model_is_refused_by_its_model_type(refuse, original):
    _edit_json(original / "config.json", model_type="phi3")
    message = refuse(original)
    assert "phi3" in message and "phi4mm" in message and str(original) in message


def test_a_folder_without_config_is_refused(refuse, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refuse(tmp_path / "empty")


def test_a_path_that_does_not_exist_is_refused(refuse, tmp_path):
    assert str(tmp_path / "nowhere") in refuse(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe\x00"], ids=["empty", "cut", "list", "binary"]
)
def test_a_config_that_is_no_json_object_is_refused(refuse, original, content):
    (original / "config.json").write_bytes(content)
    assert "config.json" in refuse(original)


# --- shards and tensors ------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(refuse, original):
    shard = _shard_of(original, NORM)
    shard.unlink()
    assert shard.name in refuse(original)


@pytest.mark.parametrize("kept", [0, 5, 500, -1, -4096])
def test_a_truncated_shard_is_named(refuse, original, kept):
    shard = _shard_of(original, NORM)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:kept])
    assert shard.name in refuse(original)


def test_a_shard_whose_header_is_no_json_is_named(refuse, original):
    shard = _shard_of(original, NORM)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:8] + b"?" * 64 + content[72:])
    assert shard.name in refuse(original)


@pytest.mark.parametrize("kept", [0, 200, -8])
def test_a_truncated_adapter_file_is_named(refuse, native, kept):
    file = native / "speech-lora" / "adapter_model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:kept])
    assert "speech-lora/adapter_model.safetensors" in refuse(native)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (NORM, "decoder.norm.weight"),
        ("model.layers.1.mlp.down_proj.base_layer.weight", "decoder.layers.1.mlp.down_proj.weight"),
        (
            "model.layers.0.self_attn.o_proj.lora_B.speech.weight",
            "decoder.layers.0.self_attn.o_proj.lora_B.speech.weight",
        ),
        ("model.embed_tokens_extend.image_embed.glb_GN", "vision_encoder.glb_GN"),
        (
            "model.embed_tokens_extend.audio_embed.audio_projection.vision.2.bias",
            "speech_encoder.audio_projection.vision.2.bias",
        ),
    ],
)
def test_a_missing_tensor_is_named(refuse, original, key, name):
    _change_tensors(original, key, lambda content: content.pop(key))
    assert name in refuse(original)


def test_a_missing_tensor_of_an_adapter_is_named(refuse, native):
    file = native / "vision-lora" / "adapter_model.safetensors"
    content = load_file(file)
    content.pop("base_model.model.model.layers.1.mlp.gate_up_proj.lora_A.weight")
    save_file(content, file)
    assert "decoder.layers.1.mlp.gate_up_proj.lora_A.vision.weight" in refuse(native)


@pytest.mark.parametrize(
    "key",
    ["model.layers.0.self_attn.qkv_proj.extra", "model.layers.7.input_layernorm.weight", "somebody.weight"],
)
def test_an_unknown_tensor_is_named(refuse, original, key):
    _change_tensors(original, NORM, lambda content: content.update({key: torch.zeros(4)}))
    message = refuse(original)
    assert key.removeprefix("model.") in message


@pytest.mark.parametrize("shape", [(63,), (64, 1), (1, 64), ()])
def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(refuse, original, shape):
    _change_tensors(original, NORM, lambda content: content.update({NORM: torch.zeros(shape)}))
    message = refuse(original)
    assert "decoder.norm.weight" in message and str(list(shape)) in message and "[64]" in message


@pytest.mark.parametrize("layer", ["head.probe", "post_layernorm.bias", "encoder.layers.2.mlp.fc1.weight"])
def test_vision_tensors_that_nothing_uses_may_be_missing(refuse, original, layer):
    # Seen by what is refused instead: the export goes on to its next fault.
    key = f"model.embed_tokens_extend.image_embed.img_processor.{layer}"
    _change_tensors(original, key, lambda content: content.pop(key))
    _change_tensors(original, NORM, lambda content: content.pop(NORM))
    message = refuse(original)
    assert "decoder.norm.weight" in message and layer not in message


def test_a_saved_tied_head_is_no_error(refuse, original):
    _change_tensors(
        original, NORM, lambda content: content.update({"lm_head.weight": torch.zeros(200064, HIDDEN)})
    )
    _change_tensors(original, NORM, lambda content: content.pop(NORM))
    message = refuse(original)
    assert "decoder.norm.weight" in message and "lm_head" not in message


# --- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["vision", "speech"])
def test_a_missing_adapter_folder_is_named(refuse, native, adapter):
    shutil.rmtree(native / f"{adapter}-lora")
    assert f"{adapter}-lora" in refuse(native)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_of_an_adapter_is_named(refuse, native, file):
    (native / "speech-lora" / file).unlink()
    assert f"speech-lora/{file}" in refuse(native)


def test_an_adapter_folder_whose_rank_contradicts_its_config_is_named_with_both_ranks(refuse, native):
    _edit_json(native / "speech-lora" / "adapter_config.json", r=7)
    message = refuse(native)
    assert "speech-lora" in message and "7" in message and "10" in message


def test_a_rank_in_config_json_that_contradicts_the_tensors_is_named_with_both_ranks(refuse, original):
    lora = json.loads((original / "config.json").read_text())["vision_lora"]
    _edit_json(original / "config.json", vision_lora={**lora, "r": 9})
    message = refuse(original)
    assert "vision" in message and "9" in message and "8" in message


# --- the target and the options ----------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_refused_and_left_alone(original_checkpoint, tmp_path):
    output = tmp_path / "out"
    (output / "deep").mkdir(parents=True)
    (output / "deep" / "letter.txt").write_text("dear reader")
    with pytest.raises(ExportError, match="deep"):
        optimum_phi4mm.export(original_checkpoint, output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (output / "deep" / "letter.txt").read_text() == "dear reader"
    assert len(list(output.rglob("*"))) == 2


def test_an_output_that_is_a_file_is_refused_and_left_alone(original_checkpoint, tmp_path):
    output = tmp_path / "out"
    output.write_text("dear reader")
    with pytest.raises(ExportError, match="out"):
        optimum_phi4mm.export(original_checkpoint, output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and output.read_text() == "dear reader"


@pytest.mark.parametrize("variant", ["gates", "GATED", "both"])
def test_an_unknown_variant_is_refused_with_the_known_ones(refuse, original_checkpoint, variant):
    message = refuse(original_checkpoint, ExportError, variant=variant)
    assert variant in message and "gated" in message and "merged" in message


@pytest.mark.parametrize("dtype", ["int8", "float16", "FP16"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(refuse, original_checkpoint, dtype):
    message = refuse(original_checkpoint, ExportError, dtype=dtype)
    assert dtype in message and "fp16" in message


@pytest.mark.parametrize("task", ["text-classification", "text-to-image", "nonsense", "with-past"])
def test_a_task_the_model_has_not_is_refused_with_those_it_has(refuse, original_checkpoint, task):
    message = refuse(original_checkpoint, ExportError, task=task)
    assert task in message and "image-text-to-text" in message and "automatic-speech-recognition" in message


@pytest.mark.parametrize("atol", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(refuse, original_checkpoint, atol):
    assert "atol" in refuse(original_checkpoint, ExportError, atol=atol)


# --- in the middle of an export ----------------------------------------------------------------------------


def test_too_little_space_is_told_before_anything_is_written(
    refuse, original_checkpoint, capture_only, monkeypatch
):
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    def no_file(*_: Any, **__: Any) -> None:
        raise AssertionError("a file was written")

    capture_only("embedding")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - 5 * 10**7, 5 * 10**7))
    monkeypatch.setattr(Path, "write_bytes", no_file)
    message = refuse(original_checkpoint, ExportError)
    assert "0.05 GB" in message and "free" in message  # and the vocabulary alone needs 0.0512


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    original_checkpoint, tmp_path, capture_only, monkeypatch
):
    from optimum_phi4mm.exporter import convert

    save = convert.ir.save
    written: list[str] = []

    def save_until_full(model: Any, path: Path, **options: Any) -> None:
        save(model, path, **options)
        written.append(Path(path).name)
        if written[-1] == "embedding.onnx":
            raise OSError(28, "No space left on device")

    capture_only("embedding")
    monkeypatch.setattr(convert.ir, "save", save_until_full)
    with pytest.raises((OSError, Phi4MMError), match="No space left"):
        optimum_phi4mm.export(original_checkpoint, tmp_path / "new" / "out")
    assert written == ["vision.onnx", "speech.onnx", "embedding.onnx"]
    assert list(tmp_path.iterdir()) == []


# A small weight lies in the graph's own file and a large one beside it; each is written by other code.
@pytest.mark.parametrize("key", [NORM, "model.layers.1.mlp.down_proj.base_layer.weight"])
def test_weights_beyond_float16_are_named_and_leave_nothing(refuse, original, capture_only, key):
    def overflow(content: dict[str, torch.Tensor]) -> None:
        content[key] = content[key].clone()
        content[key].view(-1)[3] = 1e5

    capture_only("decoder")
    _change_tensors(original, key, overflow)
    message = refuse(original, dtype="fp16")
    canonical = key.replace("model.", "decoder.").replace(".base_layer", "")
    assert canonical in message and "fp32" in message and "65504" in message


def test_an_interrupted_process_ends_with_an_error_and_leaves_nothing(original_checkpoint, tmp_path):
    output = tmp_path / "new" / "out"
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "onnx"]
    process = subprocess.Popen(
        [*command, "--model", str(original_checkpoint), str(output)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(optimum_phi4mm.__file__).parents[1])])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    try:
        written = output.parent
        while process.poll() is None and not list(written.glob(".*/*.onnx")):
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0]  # else it was never interrupted
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode not in (0, None), told
    assert list(tmp_path.iterdir()) == [], told


@pytest.mark.parametrize(
    "name", ["generation_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_broken_small_file_is_named_before_anything_is_captured(refuse, original, monkeypatch, name):
    from optimum_phi4mm.exporter import convert

    def capture(*_: Any, **__: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(convert, "capture", capture)
    (original / name).unlink()
    (original / name).write_text("{")
    assert name in refuse(original)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"opset": "20"}, "opset"),
        ({"atol": "1e-3"}, "atol"),
        ({"batch_size": "2"}, "batch_size"),
        ({"sequence_length": 1.5}, "sequence_length"),
        ({"task": None}, "task"),
    ],
    ids=lambda value: str(value),
)
def test_an_option_of_a_wrong_type_is_named(refuse, original, options, name):
    assert name in refuse(original, ExportError, **options)


# --- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--variant", "gates"], "gates"),
        (["--task", "text-classification"], "text-classification"),
        (["--dtype", "int8"], "int8"),
        (["--opset", "17"], "17"),
    ],
)
def test_the_command_ends_with_an_error_exit_that_names_the_culprit(
    original_checkpoint, tmp_path, capfd, monkeypatch, arguments, culprit
):
    status = _run_command(
        ["--model", str(original_checkpoint), *arguments, str(tmp_path / "out")], monkeypatch
    )
    assert status != 0
    assert culprit in capfd.readouterr().err + str(status)
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_a_process_of_its_own_ends_with_one_sentence(original, tmp_path):
    shard = _shard_of(original, NORM)
    shard.unlink()
    ended = subprocess.run(
        [
            *[sys.executable, "-m", "optimum.commands.optimum_cli", "export", "onnx"],
            *["--model", str(original), str(tmp_path / "out")],
        ],
        env={**os.environ, "PYTHONPATH": str(Path(optimum_phi4mm.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode not in (0, None)
    assert shard.name in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()


def _run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str:
    """Run `optimum-cli export onnx` in this process; its exit status, or the message it exits with."""
    from optimum.commands.optimum_cli import main

    monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "onnx", *arguments])
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    except Exception as error:  # an uncaught error is an error exit with a traceback
        return f"{type(error).__name__}: {error}"
    return 0


# --- ONNX Runtime refuses contradicting inputs -------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["optimised", "unoptimised"])
def run(request: pytest.FixtureRequest, package, session) -> Callable[..., list[np.ndarray]]:
    """Runs one model of the default package."""

    def run_model(name: str, **inputs: np.ndarray) -> list[np.ndarray]:
        running: onnxruntime.InferenceSession = session(package, name, optimized=request.param)
        return running.run(None, inputs)

    return run_model


def _features(rows: int) -> np.ndarray:
    return np.ones((rows, HIDDEN), np.float32)


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 30])
@pytest.mark.parametrize(("token", "name"), [(200010, "image_features"), (200011, "speech_features")])
def test_placeholders_and_feature_rows_that_differ_in_number_fail(run, token, name, rows):
    ids = np.array([[1, token, token, 2], [token, 3, 4, 5]], np.int64)
    none = {"image_features": _features(0), "speech_features": _features(0)}
    assert run("embedding", input_ids=ids, **{**none, name: _features(3)})
    with pytest.raises(ORT_ERRORS):
        run("embedding", input_ids=ids, **{**none, name: _features(rows)})


@pytest.mark.parametrize("name", ["image_features", "speech_features"])
def test_features_without_any_placeholder_fail(run, name):
    none = {"image_features": _features(0), "speech_features": _features(0)}
    with pytest.raises(ORT_ERRORS):
        run("embedding", input_ids=np.array([[1, 2]], np.int64), **{**none, name: _features(1)})


def test_features_of_the_other_kind_do_not_fill_placeholders(run):
    with pytest.raises(ORT_ERRORS):
        run(
            "embedding",
            input_ids=np.array([[200010, 200011, 200011]], np.int64),
            image_features=_features(2),
            speech_features=_features(1),
        )


@pytest.mark.parametrize("token", [-1, -200064, 200064, -9000])
def test_token_ids_outside_the_vocabulary_fail(run, token):
    with pytest.raises(ORT_ERRORS):
        run(
            "embedding",
            input_ids=np.array([[1, token]], np.int64),
            image_features=_features(0),
            speech_features=_features(0),
        )


def _pixels(crops: int) -> np.ndarray:
    return np.zeros((crops, 3, 448, 448), np.float32)


def _sizes(*sizes: tuple[int, int]) -> np.ndarray:
    return np.array(sizes, np.int64).reshape(-1, 2)


@pytest.mark.parametrize(
    ("crops", "sizes"),
    [
        (3, [(448, 448)]),  # one that no image claims
        (6, [(448, 448), (448, 896)]),
        (1, [(448, 448)]),  # too few
        (4, [(448, 448), (448, 896)]),
        (2, [(448, 896)]),
    ],
)
def test_crops_that_are_not_those_of_the_images_fail(run, crops, sizes):
    with pytest.raises(ORT_ERRORS):
        run("vision", pixel_values=_pixels(crops), image_sizes=_sizes(*sizes))


@pytest.mark.parametrize(
    "size", [(449, 448), (448, 447), (448, 672), (14, 448), (450, 450), (1, 1), (672, 672)]
)
def test_image_sizes_that_are_no_multiple_of_448_fail(run, size):
    crops = 1 + (size[0] // 448) * (size[1] // 448)
    with pytest.raises(ORT_ERRORS):
        run("vision", pixel_values=_pixels(crops), image_sizes=_sizes(size))


@pytest.mark.parametrize(
    ("crops", "sizes"),
    [
        (1, [(0, 0)]),
        (1, [(0, 448)]),
        (1, [(448, 0)]),
        (2, [(-448, -448)]),
        (3, [(448, 448), (0, 0)]),
        (2, [(448, 896), (-448, 448)]),  # together they claim as many crops as there are
        (3, [(-448, -896)]),
    ],
)
def test_image_sizes_that_are_not_positive_fail(run, crops, sizes):
    with pytest.raises(ORT_ERRORS):
        run("vision", pixel_values=_pixels(crops), image_sizes=_sizes(*sizes))


@pytest.mark.parametrize(("crops", "sizes", "rows"), [(2, [(448, 448)], 3), (1, [], 2), (2, [], 3)])
def test_more_mask_rows_than_crops_fail(run, crops, sizes, rows):
    with pytest.raises(ORT_ERRORS):
        run(
            "vision",
            pixel_values=_pixels(crops),
            image_sizes=_sizes(*sizes),
            image_attention_mask=np.ones((rows, 32, 32), bool),
        )


@pytest.mark.parametrize(("clips", "rows"), [(1, 2), (2, 3), (2, 5)])
def test_more_audio_mask_rows_than_clips_fail(run, clips, rows):
    with pytest.raises(ORT_ERRORS):
        run(
            "speech",
            audio_features=np.zeros((clips, 40, 80), np.float32),
            audio_attention_mask=np.ones((rows, 40), bool),
        )
