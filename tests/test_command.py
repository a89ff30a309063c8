"""The command and main_export: tasks, options, no remote code, no harm to other models, a light start."""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from transformers import BertConfig, BertForSequenceClassification


NAMES = ("vision", "speech", "embedding", "model")
TASKS = [
    task + suffix
    for task in (
        "image-text-to-text",
        "automatic-speech-recognition",
        "text-generation",
        "phi4mm-multimodal",
    )
    for suffix in ("", "-with-past")
]
SMALL = {"vocabulary": 512}

# Every option of `optimum-cli export onnx`: what it is given here and whether it is honoured or refused.
# {output} stands for the output folder.
HONOURED = {
    "--task": "text-generation",
    "--opset": "21",
    "--device": "cpu",
    "--dtype": "fp16",
    "--no-post-process": None,
    "--variant": "merged",
    "--framework": "pt",
    "--atol": "1.0",
    "--cache_dir": "{output}-cache",
    "--trust-remote-code": None,
    "--library-name": "transformers",
    "--no-constant-folding": None,
    "--batch_size": "3",
    "--sequence_length": "9",
    "--num_choices": "4",
    "--width": "64",
    "--height": "64",
    "--num_channels": "3",
    "--feature_size": "80",
    "--nb_max_frames": "1000",
    "--audio_sequence_length": "16000",
    "--point_batch_size": "3",
    "--nb_points_per_image": "2",
    "--visual_seq_length": "16",
}
REFUSED = {
    "--optimize": "O1",
    "--monolith": None,
    "--slim": None,
    "--no-dynamic-axes": None,
    "--model-kwargs": '{"output_attentions": true}',
    "--pad_token_id": "0",
    "--device": "cuda",
    "--opset": "11",
    "--variant": "best",
    "--task": "fill-mask",
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def words(options: dict[str, str | None]) -> list[str]:
    return [word for option, value in options.items() for word in (option, value) if word is not None]


@pytest.fixture
def run_command(monkeypatch, reusing_captures):
    """Runs `optimum-cli export onnx` in this process and returns what it exits with: None, or a message."""
    from optimum.commands import optimum_cli

    def run(*arguments: object) -> object:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "onnx", *map(str, arguments)])
        with reusing_captures():
            try:
                optimum_cli.main()
            except SystemExit as ended:
                return ended.code
        return None

    return run


@pytest.fixture(scope="session")
def usual(checkpoint, reusing_captures, tmp_path_factory) -> Path:
    """The default export of a small checkpoint."""
    import optimum_phi4mm

    output = tmp_path_factory.mktemp("usual") / "out"
    with reusing_captures():
        optimum_phi4mm.export(checkpoint(**SMALL), output, do_validation=False)
    return output


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
@pytest.mark.parametrize("task", ["auto", *TASKS])
def test_every_task_gives_the_same_four_models(usual, checkpoint, reusing_captures, tmp_path, task, layout):
    from optimum.exporters.onnx import main_export

    import optimum_phi4mm  # noqa: F401  makes the model known to main_export

    with reusing_captures():
        main_export(str(checkpoint(layout, **SMALL)), tmp_path / "out", task=task, do_validation=False)
    found, expected = digests(tmp_path / "out"), digests(usual)
    for name in NAMES:
        for file in (f"{name}.onnx", f"{name}.onnx_data"):
            assert found[file] == expected[file]
    if layout == "phi4mm":
        assert found == expected


@pytest.fixture(scope="session")
def two_commands(start_command, checkpoint, tmp_path_factory):
    """`optimum-cli export onnx` for both layouts at once: outputs and what was said, by layout.

    The phi4mm folder holds Python files that tell when they are imported, and --trust-remote-code is given.
    """
    place = tmp_path_factory.mktemp("commands")
    original = place / "model"
    shutil.copytree(checkpoint("phi4mm"), original)
    marker = place / "marker"
    for name in ("configuration_phi4mm", "modeling_phi4mm", "processing_phi4mm"):
        (original / f"{name}.py").write_text(TRAP.format(marker=str(marker), name=name))
    started = {
        "phi4mm": start_command("--model", original, "--trust-remote-code", place / "phi4mm"),
        "phi4_multimodal": start_command(
            "--model", checkpoint("phi4_multimodal"), "--task", TASKS[3], place / "phi4_multimodal"
        ),
    }
    ended = {}
    for layout, process in started.items():
        output, errors = process.communicate(timeout=580)
        ended[layout] = (process.returncode, output + errors, place / layout)
    return ended, original, marker


TRAP = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin
Path({marker!r}).write_text({name!r})
class Phi4MMConfig(PretrainedConfig):
    model_type = "phi4mm"
class Phi4MMForCausalLM(PreTrainedModel):
    config_class = Phi4MMConfig
class Phi4MMProcessor(ProcessorMixin):
    pass
"""


@pytest.mark.parametrize("layout", ["phi4mm", "phi4_multimodal"])
def test_the_command_in_another_process_writes_the_same_bytes(two_commands, export_package, layout):
    code, told, output = two_commands[0][layout]
    assert code == 0, told
    assert digests(output) == digests(export_package(layout=layout)["model"].path.parent)


def test_the_command_reports_the_largest_difference_of_every_output(two_commands, package):
    _, told, _ = two_commands[0]["phi4_multimodal"]
    for name in NAMES:
        for output in package[name].outputs:
            assert output in told


def test_trusted_remote_code_is_not_run_and_one_sentence_says_so(two_commands, run_python):
    ended, original, marker = two_commands
    code, told, _ = ended["phi4mm"]
    assert code == 0, told
    assert not marker.exists(), f"{marker.read_text()}.py was imported"
    assert told.count("trust-remote-code") == 1
    assert "trust-remote-code" not in ended["phi4_multimodal"][1]
    # The trap works: where remote code is run, it tells.
    load = "from transformers import AutoConfig; AutoConfig.from_pretrained({!r}, trust_remote_code=True)"
    assert run_python(load.format(str(original))).returncode == 0
    assert marker.read_text() == "configuration_phi4mm"


def test_no_option_of_the_command_is_forgotten_here():
    from optimum.commands.export.onnx import parse_args_onnx

    parser = argparse.ArgumentParser()
    parse_args_onnx(parser)
    options = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    assert options - {"--help", "--model"} == {*HONOURED, *REFUSED}


def test_every_honoured_option_in_one_command(run_command, checkpoint, tmp_path):
    output = tmp_path / "out"
    options = words(HONOURED)
    options = [word.format(output=output) if word.startswith("{output}") else word for word in options]
    assert run_command("--model", checkpoint(**SMALL), *options, output) in (None, 0)
    for name in NAMES:
        model = onnx.load(output / f"{name}.onnx")
        assert [opset.version for opset in model.opset_import if opset.domain == ""] == [21]
        onnx.checker.check_model(output / f"{name}.onnx")
        floats = {value.type.tensor_type.elem_type for value in model.graph.output}
        assert floats == {onnx.TensorProto.FLOAT16}
    assert "adapter_gates" not in [value.name for value in model.graph.input]


def test_sizes_of_the_example_inputs_do_not_change_the_models(usual, checkpoint, reusing_captures, tmp_path):
    import optimum_phi4mm

    sizes = {"batch_size": 3, "sequence_length": 9, "nb_max_frames": 1000, "width": 900}
    with reusing_captures():
        optimum_phi4mm.export(checkpoint(**SMALL), tmp_path / "out", do_validation=False, **sizes)
    assert digests(tmp_path / "out") == digests(usual)


def test_models_without_constant_folding_compute_the_same(
    usual, checkpoint, reusing_captures, reference_of, tmp_path
):
    from conftest import open_session

    import optimum_phi4mm

    with reusing_captures():
        optimum_phi4mm.export(
            checkpoint(**SMALL), tmp_path / "out", do_validation=False, do_constant_folding=False
        )
    generator = np.random.default_rng(0)
    inputs = {
        "vision": {"pixel_values": generator.standard_normal((1, 3, 448, 448), np.float32)},
        "speech": {"audio_features": generator.standard_normal((1, 77, 80), np.float32)},
    }
    for name, values in inputs.items():
        found = open_session(tmp_path / "out" / f"{name}.onnx").run(None, values)
        expected = open_session(usual / f"{name}.onnx").run(None, values)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("option", REFUSED)
def test_what_can_not_be_honoured_is_refused_with_a_sentence(run_command, checkpoint, tmp_path, option):
    message = run_command("--model", checkpoint(**SMALL), *words({option: REFUSED[option]}), tmp_path / "out")
    assert isinstance(message, str)  # printed, and exit code 1
    assert option.strip("-") in message
    assert len(message.split()) > 5
    assert list(tmp_path.iterdir()) == []


def test_a_tolerance_that_is_too_small_fails_and_leaves_nothing(run_command, checkpoint, tmp_path):
    message = run_command("--model", checkpoint(**SMALL), "--atol", "1e-12", tmp_path / "out")
    assert isinstance(message, str)
    assert "1e-12" in message
    assert list(tmp_path.iterdir()) == []


def test_a_tolerance_that_is_large_enough_passes(run_command, checkpoint, tmp_path):
    assert run_command("--model", checkpoint(**SMALL), "--atol", "0.001", tmp_path / "out") in (None, 0)
    assert (tmp_path / "out" / "model.onnx").exists()


def test_bfloat16_is_not_run_and_says_so(checkpoint, reusing_captures, tmp_path, caplog):
    import optimum_phi4mm

    with caplog.at_level(logging.INFO, logger="optimum_phi4mm"), reusing_captures():
        package = optimum_phi4mm.export(checkpoint(), tmp_path / "out", dtype="bf16")
    assert set(package) == set(NAMES)
    assert "bf16" in caplog.text or "bfloat16" in caplog.text
    assert "not run" in caplog.text


def test_every_task_has_an_onnx_config_for_both_model_types():
    from optimum.exporters.onnx.base import OnnxConfig
    from optimum.exporters.tasks import TasksManager

    import optimum_phi4mm  # noqa: F401

    for model_type in ("phi4mm", "phi4_multimodal"):
        known = TasksManager.get_supported_tasks_for_model_type(
            model_type, "onnx", library_name="transformers"
        )
        assert set(known) == set(TASKS)
        for constructor in known.values():
            assert issubclass(constructor.func, OnnxConfig)
            assert set(constructor.func.VARIANTS) == {"gated", "merged", "vision", "speech", "text"}
            assert constructor.func.DEFAULT_VARIANT == "gated"


EXPORT_BERT = """
import sys
if sys.argv[3] == "with":
    import optimum_phi4mm
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], sys.argv[2], task="text-classification", do_validation=False)
if sys.argv[3] == "without":
    assert not [name for name in sys.modules if "phi4mm" in name]
"""


def test_another_model_exports_to_the_same_bytes_with_the_plugin(run_python, start_command, tmp_path):
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    for plugin in ("without", "with"):
        ended = run_python(EXPORT_BERT, tmp_path / "bert", tmp_path / plugin, plugin)
        assert ended.returncode == 0, ended.stderr
    process = start_command(
        "--model", tmp_path / "bert", "--task", "text-classification", tmp_path / "command"
    )
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    expected = digests(tmp_path / "without")
    assert "model.onnx" in expected
    assert digests(tmp_path / "with") == expected
    assert digests(tmp_path / "command") == expected


@pytest.mark.parametrize("module", ["optimum.commands.register.register_phi4mm", "optimum_phi4mm"])
def test_what_every_start_of_the_command_imports_is_light(run_python, module):
    heavy = ("torch", "transformers", "onnx", "onnxruntime", "optimum.exporters.tasks")
    check = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    ended = run_python(check)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"
