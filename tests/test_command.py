"""`optimum-cli export onnx` and `main_export`: one command, all its options, other models untouched."""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from optimum.exporters.onnx import main_export
from transformers import BertConfig, BertModel

import optimum_phi4mm
from optimum_phi4mm.exporter import convert


PROJECT = Path(optimum_phi4mm.__file__).parents[1]
MODELS = ("vision", "speech", "embedding", "model")
GRAPH_FILES = [f"{name}.{suffix}" for name in MODELS for suffix in ("onnx", "onnx_data")]
TASKS = ("image-text-to-text", "automatic-speech-recognition", "text-generation", "phi4mm-multimodal")


def _environment(**variables: str) -> dict[str, str]:
    """The variables of a process that finds this package, installed or not, and asks no network."""
    return {**os.environ, "PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1", **variables}


def _command(*arguments: Any, **variables: str) -> subprocess.CompletedProcess:
    """Run `optimum-cli export onnx` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "onnx", *map(str, arguments)],
        env=_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def _python(code: str, *arguments: Any, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def _assert_same_models(folder: Path, package: Any) -> None:
    for file in GRAPH_FILES:
        expected = package["model"].path.with_name(file)
        assert (folder / file).read_bytes() == expected.read_bytes(), file


@pytest.fixture
def quick_capture(
    monkeypatch: pytest.MonkeyPatch, reusing_captures: Callable[[], AbstractContextManager[None]]
) -> Iterator[list[dict[str, Any]]]:
    """Takes graphs that were captured before; gives the options of every capture asked for."""
    asked: list[dict[str, Any]] = []
    with reusing_captures():
        capture = convert.capture

        def ask(component: Any, config: Any, **options: Any) -> Any:
            asked.append(options)
            return capture(component, config, **options)

        monkeypatch.setattr(convert, "capture", ask)
        yield asked
        monkeypatch.undo()


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Let caplog hear Optimum's loggers, which don't propagate."""
    loggers = [logging.getLogger(name) for name in ("optimum", "optimum_phi4mm")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, quick_capture: Any) -> Callable[..., str]:
    """Runs `optimum-cli export onnx` in this process; gives what it exits with, "" for success."""
    import optimum.commands.optimum_cli as cli

    def run(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "onnx", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as ended:
            return str(ended.code or "")
        except Exception as error:  # the interpreter would end with status 1 and a traceback
            return f"{type(error).__name__}: {error}"
        return ""

    return run


# --- the one command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
def test_the_command_exports_a_local_folder_without_a_task_to_the_same_bytes_every_time(
    checkpoint, export_package, tmp_path, layout
):
    ended = _command("--model", checkpoint(layout), tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    expected = export_package(layout=layout)["model"].path.parent
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.iterdir():  # the model card too: it was validated as well
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # Validation is on, and tells every output's largest difference.
    told = ended.stdout + ended.stderr
    for output in (
        "image_features",
        "speech_features_for_vision",
        "inputs_embeds",
        "logits",
        "present.1.value",
    ):
        assert any(output in line and "difference" in line for line in told.splitlines()), output
    assert "Traceback" not in told


@pytest.mark.parametrize("suffix", ["", "-with-past"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_gives_the_same_four_models(
    original_checkpoint, package, tmp_path, quick_capture, task, suffix
):
    main_export(str(original_checkpoint), tmp_path / "out", task=task + suffix, do_validation=False)
    _assert_same_models(tmp_path / "out", package)


def test_main_export_needs_no_task(original_checkpoint, package, tmp_path, quick_capture):
    main_export(str(original_checkpoint), tmp_path / "out", do_validation=False)
    _assert_same_models(tmp_path / "out", package)


@pytest.mark.parametrize("task", ["text-generation-with-past", "phi4mm-multimodal"])
def test_the_native_layout_takes_the_tasks_too(native_checkpoint, package, tmp_path, quick_capture, task):
    main_export(str(native_checkpoint), tmp_path / "out", task=task, do_validation=False)
    _assert_same_models(tmp_path / "out", package)


def test_the_output_may_be_an_empty_folder(original_checkpoint, package, tmp_path, quick_capture):
    optimum_phi4mm.export(original_checkpoint, tmp_path, do_validation=False)
    _assert_same_models(tmp_path, package)


# --- validation --------------------------------------------------------------------------------------------


def test_a_tolerance_that_is_too_small_is_an_error_exit_and_leaves_nothing(
    original_checkpoint, tmp_path, command
):
    told = command("--model", original_checkpoint, "--atol", "1e-12", tmp_path / "new" / "out")
    assert "atol" in told and "image_features" in told
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_graph_is_an_error_exit_and_leaves_nothing(
    original_checkpoint, tmp_path, command, monkeypatch
):
    from optimum_phi4mm.exporter import binding

    bound_tensor = binding.bound_tensor

    def one_wrong_weight(name: str, *arguments: Any) -> torch.Tensor:
        weight = bound_tensor(name, *arguments)
        return weight * 1.01 if name.startswith("decoder.layers.1.mlp.down_proj.weight") else weight

    monkeypatch.setattr(binding, "bound_tensor", one_wrong_weight)  # validation reads through its own name
    told = command("--model", original_checkpoint, tmp_path / "new" / "out")
    assert "model.onnx" in told and "logits" in told
    assert list(tmp_path.iterdir()) == []


def test_without_validation_no_model_is_run(
    original_checkpoint, package, tmp_path, quick_capture, monkeypatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("validated")

    monkeypatch.setattr(convert, "validate", refuse)
    exported = optimum_phi4mm.export(original_checkpoint, tmp_path / "out", do_validation=False)
    assert [exported[name].differences for name in MODELS] == [None] * 4
    _assert_same_models(tmp_path / "out", package)


def test_bfloat16_says_that_its_outputs_were_not_run(
    original_checkpoint, tmp_path, command, heard, monkeypatch
):
    assert command("--model", original_checkpoint, "--dtype", "bf16", tmp_path / "out") == ""
    told = [record.getMessage() for record in heard.records if "not run" in record.getMessage()]
    assert len(told) == 4 and all("stored weights" in line for line in told)


def test_a_wrong_bfloat16_weight_is_an_error_exit_that_names_it(
    original_checkpoint, tmp_path, command, monkeypatch
):
    from optimum_phi4mm.exporter import binding

    bound_tensor = binding.bound_tensor

    def one_wrong_weight(name: str, *arguments: Any) -> torch.Tensor:
        return bound_tensor(name, *arguments) * (2 if name == "decoder.norm.weight" else 1)

    monkeypatch.setattr(binding, "bound_tensor", one_wrong_weight)
    told = command("--model", original_checkpoint, "--dtype", "bf16", tmp_path / "out")
    assert "decoder.norm.weight" in told
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_one_sentence_and_leaves_nothing(original_checkpoint, tmp_path, command):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        told = command("--model", original_checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told.startswith("optimum-cli export onnx: ") and "File too large" in told
    assert "\n" not in told
    assert list(tmp_path.iterdir()) == []


# --- options -----------------------------------------------------------------------------------------------


# What becomes of each option of the command, so that a new one of Optimum's can't pass unnoticed.
TESTED_OPTIONS = {
    *("--model", "--task", "--opset", "--device", "--dtype", "--optimize", "--monolith", "--no-post-process"),
    *("--variant", "--framework", "--atol", "--cache_dir", "--trust-remote-code", "--pad_token_id"),
    *("--library-name", "--model-kwargs", "--no-dynamic-axes", "--no-constant-folding", "--slim"),
    *("--batch_size", "--sequence_length", "--num_choices", "--width", "--height", "--num_channels"),
    *("--feature_size", "--nb_max_frames", "--audio_sequence_length", "--point_batch_size"),
    *("--nb_points_per_image", "--visual_seq_length"),
}


def test_every_option_of_the_command_is_known_here():
    from optimum.commands.export.onnx import parse_args_onnx

    parser = argparse.ArgumentParser(add_help=False)
    parse_args_onnx(parser)
    found = {
        option for action in parser._actions for option in action.option_strings if option.startswith("--")
    }
    assert found == TESTED_OPTIONS


@pytest.mark.parametrize(
    ("opset", "shapes", "folded"),
    [(18, {"batch_size": 1, "sequence_length": 1, "nb_max_frames": 1}, True), (23, {}, False)],
    ids=["first opset, other sizes", "last opset, nothing folded"],
)
def test_models_of_other_opsets_sizes_and_folding_run_and_have_the_same_contract(
    original_checkpoint, package, tmp_path, command, quick_capture, opset, shapes, folded
):
    options = [part for name, size in shapes.items() for part in (f"--{name}", size)]
    options += [] if folded else ["--no-constant-folding"]
    told = command("--model", original_checkpoint, "--opset", opset, *options, tmp_path / "out")
    assert told == ""  # validation ran them
    assert quick_capture == [{"opset": opset, "fold_constants": folded}] * 4
    for name in MODELS:
        path = tmp_path / "out" / f"{name}.onnx"
        found, default = (onnx.load(p, load_external_data=False) for p in (path, package[name].path))
        assert [(entry.domain, entry.version) for entry in found.opset_import] == [("", opset)]
        assert list(found.graph.input) == list(default.graph.input)
        assert list(found.graph.output) == list(default.graph.output)
        if not folded and name != "embedding":
            assert len(found.graph.node) > len(default.graph.node)


@pytest.mark.parametrize("opset", [19, 21, 22])
def test_the_opsets_between_are_given_to_every_graph(original_checkpoint, tmp_path, monkeypatch, opset):
    capture = convert.capture
    versions = []

    def capture_embedding(component: Any, config: Any, **options: Any) -> Any:
        if config.PREFIX != "embedding":  # seconds each, and the same path
            versions.append(options["opset"])
            return convert.ir.Model(convert.ir.Graph([], [], nodes=[]), ir_version=10)
        graph = capture(component, config, **options)
        versions.append(graph.opset_imports[""])
        return graph

    class Captured(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Captured

    monkeypatch.setattr(convert, "capture", capture_embedding)
    monkeypatch.setattr(convert, "check_space", stop)
    with pytest.raises(Captured):
        optimum_phi4mm.export(original_checkpoint, tmp_path / "out", opset=opset)
    assert versions == [opset] * 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--opset", "17"], "18 to 23"),
        (["--opset", "24"], "18 to 23"),
        (["--opset", "21", "--dtype", "bf16"], "22 to 23"),
        (["--optimize", "O1"], "--optimize"),
        (["--optimize", "O2"], "--optimize"),
        (["--optimize", "O3"], "--optimize"),
        (["--optimize", "O4"], "O4"),
        (["--slim"], "--slim"),
        (["--monolith"], "--monolith"),
        (["--monolith", "--task", "text-generation-with-past"], "monolith"),
        (["--no-dynamic-axes"], "--no-dynamic-axes"),
        (["--pad_token_id", "0"], "--pad_token_id"),
        (["--model-kwargs", '{"output_attentions": true}'], "--model-kwargs"),
        (["--device", "cuda"], "cuda"),
        (["--library-name", "diffusers"], "diffusers"),
        (["--atol", "nan"], "--atol"),
        (["--batch_size", "0"], "--batch_size"),
        (["--sequence_length", "-3"], "--sequence_length"),
        (["--nb_max_frames", "0"], "--nb_max_frames"),
        (["--num_choices", "3"], "--num_choices"),
        (["--point_batch_size", "4"], "--point_batch_size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence_and_leaves_nothing(
    original_checkpoint, tmp_path, command, quick_capture, arguments, sentence
):
    told = command("--model", original_checkpoint, *arguments, tmp_path / "out")
    assert sentence in told and len(told) > len("ValueError: ") + len(sentence)
    assert "\n" not in told.strip()
    assert quick_capture == []  # refused before any work
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-post-process"],
        ["--framework", "pt"],
        ["--library-name", "transformers"],
        ["--device", "cpu"],
        ["--cache_dir", "{tmp}"],
        ["--variant", "gated"],
        ["--dtype", "fp32"],
    ],
    ids=" ".join,
)
def test_what_changes_nothing_for_this_model_gives_the_same_models(
    original_checkpoint, package, tmp_path, command, monkeypatch, arguments
):
    monkeypatch.setattr(convert, "validate", lambda *_, **__: {})
    arguments = [argument.replace("{tmp}", str(tmp_path / "cache")) for argument in arguments]
    assert command("--model", original_checkpoint, *arguments, tmp_path / "out") == ""
    _assert_same_models(tmp_path / "out", package)


# --- remote code -------------------------------------------------------------------------------------------


@pytest.fixture
def tattling(original_checkpoint: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose Python files write a marker when they are run, and the marker's path."""
    folder, marker = tmp_path / "source", tmp_path / "marker"
    folder.mkdir()
    for path in original_checkpoint.iterdir():
        (folder / path.name).symlink_to(path)
    code = f"open({str(marker)!r}, 'a').write(__name__)\n"
    for name in ("configuration_phi4mm", "modeling_phi4mm", "processing_phi4mm"):
        (folder / f"{name}.py").write_text(code)
    return folder, marker


def test_the_checkpoints_python_is_not_run_and_one_sentence_says_so(
    tattling, package, tmp_path, command, heard
):
    folder, marker = tattling
    assert command("--model", folder, "--trust-remote-code", tmp_path / "out") == ""
    assert not marker.exists()
    told = [record.getMessage() for record in heard.records if "trust-remote-code" in record.getMessage()]
    assert len(told) == 1 and "ignored" in told[0]
    assert not list((tmp_path / "out").glob("*.py"))
    _assert_same_models(tmp_path / "out", package)


def test_without_trust_the_checkpoints_python_is_not_run_either(tattling, package, tmp_path, command, heard):
    folder, marker = tattling
    assert command("--model", folder, tmp_path / "out") == ""
    assert not marker.exists()
    assert not [record for record in heard.records if "trust-remote-code" in record.getMessage()]
    _assert_same_models(tmp_path / "out", package)


def test_stock_optimum_would_run_the_checkpoints_python(tattling):
    # Else the two tests above could not fail.
    folder, marker = tattling
    code = (
        "import sys; from transformers import AutoConfig\n"
        "try: AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "except Exception: pass"
    )
    _python(code, folder, HF_HOME=str(marker.with_name("home")))
    assert marker.exists()


# --- other models, and start-up ----------------------------------------------------------------------------


# As if it were not installed: the command imports every file in its register folders, and finds an empty one.
WITHOUT_PLUGIN = """
import sys
from importlib.machinery import ModuleSpec

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "optimum.commands.register.register_phi4mm":
            return ModuleSpec(name, self)
        if name.split(".")[0] == "optimum_phi4mm":
            raise ImportError(name)

    def create_module(self, spec):
        pass

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Without())
"""
EXPORT = """
import sys
from optimum.commands.optimum_cli import main
sys.argv = ["optimum-cli", "export", "onnx", *sys.argv[1:]]
main()
print(sorted(name for name in sys.modules if name.startswith("optimum_phi4mm")))
"""


def test_another_model_exports_to_the_same_bytes_with_and_without_the_plugin(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=50, max_position_embeddings=32, **sizes)).save_pretrained(
        tmp_path / "bert"
    )
    arguments = ("--model", tmp_path / "bert", "--task", "feature-extraction")
    present = _python(EXPORT, *arguments, tmp_path / "with")
    absent = _python(WITHOUT_PLUGIN + EXPORT, *arguments, tmp_path / "without")
    assert "optimum_phi4mm.registration" in present.splitlines()[-1]
    assert absent.splitlines()[-1] == "[]"
    files = sorted(path.name for path in (tmp_path / "without").iterdir())
    assert "model.onnx" in files
    assert files == sorted(path.name for path in (tmp_path / "with").iterdir())
    for file in files:
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes(), file


@pytest.mark.parametrize("module", ["optimum_phi4mm", "optimum.commands.register.register_phi4mm"])
def test_being_registered_loads_neither_torch_nor_transformers(module):
    code = (
        "import sys, importlib; importlib.import_module(sys.argv[1]); print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(_python("import json; " + code, module)))
    assert module in loaded
    heavy = {"torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "numpy", "safetensors"}
    assert not loaded & heavy


def test_the_commands_start_loads_neither_torch_nor_transformers():
    code = (
        "import sys, json; from optimum.commands.optimum_cli import main\n"
        "sys.argv = ['optimum-cli', 'export', 'onnx', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(json.loads(_python(code).splitlines()[-1]))
    assert "optimum.commands.register.register_phi4mm" in loaded and "optimum_phi4mm" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime"}


def test_the_namespace_folders_hold_no_init_file():
    # One would hide the rest of Optimum.
    for folder in ("optimum", "optimum/commands", "optimum/commands/register"):
        assert (PROJECT / folder).is_dir() and not (PROJECT / folder / "__init__.py").exists()
