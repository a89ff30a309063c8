"""The seams: what the registration replaces in Optimum, or relies on, is still what it takes it for."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import optimum.exporters.onnx.__main__ as onnx_main
import pytest
from optimum.commands.export.onnx import ONNXExportCommand
from optimum.exporters import tasks
from optimum.exporters.onnx import convert, main_export, model_configs
from optimum.exporters.tasks import TasksManager
from transformers import AutoConfig, BertConfig

import optimum_phi4mm
from optimum_phi4mm import registration
from optimum_phi4mm.components.model import Phi4MMForOnnxExport
from optimum_phi4mm.configuration import MODEL_TYPES, Phi4MMConfig
from optimum_phi4mm.errors import CheckpointError, ExportError, Phi4MMError, ValidationError
from optimum_phi4mm.exporter import convert as our_convert
from optimum_phi4mm.exporter.configs import Phi4MMOnnxConfig


TASKS = ("image-text-to-text", "automatic-speech-recognition", "text-generation", "phi4mm-multimodal")
PROJECT = Path(optimum_phi4mm.__file__).parents[1]


class Stopped(Exception):
    """Ends Optimum's flow where a test has seen enough."""


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """The config of another model."""
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def _stop(*_: Any, **__: Any) -> None:
    raise Stopped


def _loaded(code: str) -> dict[str, Any]:
    """What a fresh process prints as JSON."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


# --- installing --------------------------------------------------------------------------------------------


PROBE = """
import json, sys
main = sys.modules["optimum.exporters.onnx.__main__"]
tasks = sys.modules["optimum.exporters.tasks"]
print(json.dumps({
    "export": main.onnx_export_from_model.__code__.co_filename,
    "preprocessors": main.maybe_load_preprocessors.__code__.co_filename,
    "config": main.AutoConfig.__module__,
    "tasks": sorted(tasks.TasksManager._SUPPORTED_MODEL_TYPE.get("phi4mm", {}).get("onnx", {})),
}))
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import optimum_phi4mm; from optimum.exporters.onnx import main_export",
        "from optimum.exporters.onnx import main_export; import optimum_phi4mm",
        "import optimum.exporters.tasks; import optimum_phi4mm; import optimum.exporters.onnx",
    ],
    ids=["before", "after", "between"],
)
def test_the_seams_are_in_place_whichever_is_imported_first(imports):
    found = _loaded(f"{imports}\nimport optimum.exporters.onnx.__main__\n{PROBE}")
    assert found["export"] == found["preprocessors"] == registration.__file__
    assert found["config"] == "optimum_phi4mm.registration"
    assert found["tasks"] == sorted(task + suffix for task in TASKS for suffix in ("", "-with-past"))


def test_installing_twice_changes_nothing():
    finders = [finder for finder in sys.meta_path if isinstance(finder, registration._AfterImport)]
    before = (onnx_main.onnx_export_from_model, onnx_main.AutoConfig, TasksManager.infer_task_from_model)
    registration.install()
    assert [finder for finder in sys.meta_path if isinstance(finder, registration._AfterImport)] == finders
    after = (onnx_main.onnx_export_from_model, onnx_main.AutoConfig, TasksManager.infer_task_from_model)
    assert before == after and len(finders) == 1


def test_every_module_with_a_seam_is_imported_by_the_exporter():
    # A seam in a module that nothing imports any more would silently never be put in.
    code = "from optimum.exporters.onnx import main_export; print(json.dumps(list(sys.modules)))"
    assert set(registration._SEAMS) <= set(_loaded(f"import json, sys; {code}"))


# --- optimum.exporters.tasks -------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_task_is_supported_for_both_model_types(model_type):
    supported = TasksManager.get_supported_tasks_for_model_type(
        model_type, "onnx", library_name="transformers"
    )
    assert set(supported) == {task + suffix for task in TASKS for suffix in ("", "-with-past")}


@pytest.mark.parametrize("suffix", ["", "-with-past"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_task_finds_our_class_and_our_config(model_type, task, suffix):
    assert TasksManager.map_from_synonym(task + suffix) == task + suffix
    found = TasksManager.get_model_class_for_task(task + suffix, "pt", model_type=model_type)
    assert found is Phi4MMForOnnxExport
    constructor = TasksManager.get_exporter_config_constructor(
        "onnx", task=task + suffix, model_type=model_type, library_name="transformers"
    )
    assert constructor.func is Phi4MMOnnxConfig


def test_a_task_of_our_own_is_one_of_optimums():
    assert "phi4mm-multimodal" in TasksManager.get_all_tasks()


@pytest.mark.parametrize("layout", MODEL_TYPES)
def test_the_task_of_a_local_folder_is_inferred(checkpoint, layout):
    assert TasksManager.infer_task_from_model(str(checkpoint(layout))) in TASKS


def test_the_library_of_a_local_folder_is_inferred(original_checkpoint, native_checkpoint):
    for folder in (original_checkpoint, native_checkpoint):
        assert TasksManager.infer_library_from_model(str(folder)) == "transformers"


def test_a_task_the_hub_gives_and_the_model_has_not_becomes_the_default(original_checkpoint, monkeypatch):
    wrapped = TasksManager.infer_task_from_model.__func__.__wrapped__
    monkeypatch.setattr(wrapped.__self__, "_infer_task_from_model_name_or_path", lambda **_: "summarization")
    assert TasksManager.infer_task_from_model(str(original_checkpoint)) == registration.DEFAULT_TASK
    monkeypatch.setattr(
        wrapped.__self__, "_infer_task_from_model_name_or_path", lambda **_: "automatic-speech-recognition"
    )
    assert TasksManager.infer_task_from_model(str(original_checkpoint)) == "automatic-speech-recognition"


def test_the_task_of_another_models_folder_is_still_not_inferred(bert):
    with pytest.raises(RuntimeError, match="local directory"):
        TasksManager.infer_task_from_model(bert)


def test_main_export_asks_for_a_task_with_arguments_that_ours_takes(
    original_checkpoint, tmp_path, monkeypatch
):
    asked: list[dict[str, Any]] = []
    infer = TasksManager.infer_task_from_model

    def infer_task_from_model(*arguments: Any, **options: Any) -> str:
        asked.append(options)
        return infer(*arguments, **options)

    monkeypatch.setattr(TasksManager, "infer_task_from_model", infer_task_from_model)
    monkeypatch.setattr(TasksManager, "get_model_from_task", _stop)
    with pytest.raises(Stopped):
        main_export(str(original_checkpoint), tmp_path / "out", cache_dir=str(tmp_path))
    # Without them a model in a subfolder or of a revision would be looked for elsewhere.
    assert {"subfolder", "revision", "cache_dir", "token"} <= set(asked[0])


def test_optimum_answers_an_oserror_with_a_second_try_which_none_of_our_errors_is(
    original_checkpoint, monkeypatch
):
    tries: list[dict[str, Any]] = []

    def load(error: type[Exception]) -> None:
        def from_pretrained(*_: Any, **options: Any) -> None:
            tries.append(options)
            raise error("gone")

        monkeypatch.setattr(Phi4MMForOnnxExport, "from_pretrained", from_pretrained)
        with pytest.raises(error):
            TasksManager.get_model_from_task("text-generation", str(original_checkpoint), framework="pt")

    load(OSError)
    assert [options.get("from_tf") for options in tries] == [None, True]
    for error in (CheckpointError, ExportError, ValidationError):
        tries.clear()
        assert issubclass(error, Phi4MMError) and not issubclass(error, OSError)
        load(error)
        assert len(tries) == 1


def test_optimum_loads_our_class_with_options_that_it_takes_and_no_weights(original_checkpoint):
    parameters = inspect.signature(Phi4MMForOnnxExport.from_pretrained).parameters
    model = TasksManager.get_model_from_task(
        "text-generation",
        str(original_checkpoint),
        framework="pt",
        device="cpu",
        library_name="transformers",
        trust_remote_code=True,
        local_files_only=False,
        force_download=False,
        token=None,
    )
    assert type(model) is Phi4MMForOnnxExport
    assert list(model.parameters()) == []
    assert "torch_dtype" in parameters and "subfolder" in parameters


# --- optimum.exporters.onnx --------------------------------------------------------------------------------


def _names_in(module: ModuleType, function: str) -> set[str]:
    return set(inspect.unwrap(getattr(module, function)).__code__.co_names)


@pytest.mark.parametrize("name", ["onnx_export_from_model", "maybe_load_preprocessors", "AutoConfig"])
def test_main_export_looks_up_by_name_what_is_replaced_in_its_module(name):
    assert name in _names_in(onnx_main, "main_export")
    assert inspect.getsourcefile(vars(onnx_main)[name]) == registration.__file__ or hasattr(
        vars(onnx_main)[name], "__wrapped__"
    )


def test_get_model_from_task_looks_up_the_config_class_that_is_replaced():
    assert "AutoConfig" in TasksManager.get_model_from_task.__code__.co_names
    assert tasks.AutoConfig.__module__ == registration.__name__


def test_our_export_takes_every_argument_of_optimums():
    stock = inspect.signature(inspect.unwrap(convert.onnx_export_from_model)).parameters
    ours = inspect.signature(our_convert.onnx_export_from_model).parameters
    assert list(ours) == list(stock)
    assert [parameter.kind for parameter in ours.values()] == [parameter.kind for parameter in stock.values()]
    defaults = {name: parameter.default for name, parameter in stock.items()}
    assert {name: parameter.default for name, parameter in ours.items()} == defaults


def test_main_export_gives_our_model_and_every_option_to_our_export(
    original_checkpoint, tmp_path, monkeypatch
):
    calls: list[tuple[Any, ...]] = []

    def export_model(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))

    monkeypatch.setattr(our_convert, "onnx_export_from_model", export_model)
    main_export(
        str(original_checkpoint),
        tmp_path / "out",
        task="text-generation",
        opset=19,
        atol=0.5,
        do_validation=False,
        slim=True,
        _variant="merged",
        batch_size=3,
    )
    ((arguments, options),) = calls
    (model,) = arguments
    assert type(model) is Phi4MMForOnnxExport
    expected = {
        "task": "text-generation",
        "opset": 19,
        "atol": 0.5,
        "do_validation": False,
        "slim": True,
        "_variant": "merged",
        "batch_size": 3,
        "output": tmp_path / "out",
        "preprocessors": [],
    }
    assert expected.items() <= options.items()


def test_another_model_is_given_to_optimums_export_untouched(monkeypatch):
    replaced = convert.onnx_export_from_model
    calls: list[tuple[Any, ...]] = []
    stock = inspect.unwrap(replaced)
    cell = next(cell for cell in replaced.__closure__ if cell.cell_contents is stock)
    cell.cell_contents = lambda *arguments, **options: calls.append((arguments, options))
    try:
        replaced("a model", "out", opset=17, width=3)
    finally:
        cell.cell_contents = stock
    assert calls == [(("a model", "out"), {"opset": 17, "width": 3})]


def test_no_processor_is_loaded_for_our_model_and_every_one_for_another(
    original_checkpoint, native_checkpoint, bert, tmp_path, monkeypatch
):
    for folder in (original_checkpoint, native_checkpoint):
        onnx_main.AutoConfig.from_pretrained(str(folder))
        assert onnx_main.maybe_load_preprocessors(str(folder), subfolder="", trust_remote_code=True) == []
    stock = inspect.unwrap(onnx_main.maybe_load_preprocessors)
    cell = next(c for c in onnx_main.maybe_load_preprocessors.__closure__ if c.cell_contents is stock)
    asked: list[Any] = []
    cell.cell_contents = lambda *arguments, **options: asked.append((arguments, options)) or ["a tokenizer"]
    try:
        found = onnx_main.maybe_load_preprocessors(bert, subfolder="x", trust_remote_code=False)
    finally:
        cell.cell_contents = stock
    assert found == ["a tokenizer"] and asked == [((bert,), {"subfolder": "x", "trust_remote_code": False})]


@pytest.mark.parametrize("module", [onnx_main, tasks], ids=["main", "tasks"])
def test_remote_code_is_trusted_for_other_models_only(original_checkpoint, bert, module, monkeypatch):
    asked: dict[str, Any] = {}
    stock = AutoConfig.from_pretrained

    def from_pretrained(name: str, **options: Any) -> Any:
        asked[name] = options.get("trust_remote_code")
        return stock(name, **{**options, "trust_remote_code": False})

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    for folder in (str(original_checkpoint), bert):
        module.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert asked == {str(original_checkpoint): False, bert: True}


def test_stock_auto_config_reads_both_layouts_without_remote_code(original_checkpoint, native_checkpoint):
    config = AutoConfig.from_pretrained(original_checkpoint)
    assert type(config) is Phi4MMConfig and not hasattr(config, "auto_map")
    assert AutoConfig.from_pretrained(native_checkpoint).model_type == "phi4_multimodal"


def test_optimums_config_base_offers_variants_as_ours_uses_them(original_checkpoint):
    config = Phi4MMOnnxConfig(AutoConfig.from_pretrained(original_checkpoint), task="text-generation")
    assert config.variant == "gated"
    config.variant = "default"
    assert config.variant == "gated"
    config.variant = "merged"
    assert config.variant == "merged"
    with pytest.raises(ValueError, match="nonsense"):
        config.variant = "nonsense"


def test_model_configs_still_registers_through_the_tasks_manager():
    assert model_configs.TasksManager is TasksManager
    register = TasksManager.create_register("onnx")
    with pytest.raises(ValueError, match="nonsense"):  # an unknown task is told, not passed over
        register("phi4mm-test", "nonsense")(Phi4MMOnnxConfig)


# --- optimum.commands --------------------------------------------------------------------------------------


def test_the_command_has_the_arguments_that_the_wrapper_reads():
    parser = argparse.ArgumentParser()
    ONNXExportCommand.parse_args(parser)
    arguments = parser.parse_args(["--model", "x", "out"])
    assert (arguments.model, arguments.pad_token_id) == ("x", None)
    assert arguments.cache_dir


def test_the_wrapper_turns_our_errors_into_one_sentence_and_leaves_others(monkeypatch):
    raised: list[Exception] = []

    class Command:
        args = argparse.Namespace(pad_token_id=None, model="x", cache_dir=None)

        def run(self) -> None:
            raise raised[-1]

    monkeypatch.setattr("optimum.commands.export.onnx.ONNXExportCommand", Command)
    registration.wrap_command()
    raised.append(ExportError("no such thing"))
    with pytest.raises(SystemExit) as ended:
        Command().run()
    assert ended.value.code == "optimum-cli export onnx: no such thing"
    raised.append(KeyError("other"))
    with pytest.raises(KeyError):
        Command().run()
    run = Command.run
    registration.wrap_command()
    assert Command.run is run


def test_optimum_finds_the_register_file_in_a_namespace_folder():
    code = (
        "import json, sys\n"
        "from optimum.commands.optimum_cli import load_optimum_namespace_cli_commands as load\n"
        "load()\n"
        "from optimum.commands.export.onnx import ONNXExportCommand\n"
        "name = 'optimum.commands.register.register_phi4mm'\n"
        "print(json.dumps([name in sys.modules, hasattr(ONNXExportCommand.run, '__wrapped__')]))"
    )
    assert _loaded(code) == [True, True]
