"""The only file that touches Optimum's internals: tasks, classes, and the few seams its flow needs.

Importing it is cheap. `install` only arranges that each seam is put in when the module of Optimum that it
belongs to is imported, so that neither `optimum-cli`'s start nor `import optimum_phi4mm` loads torch. The
seams hold for whoever imported `main_export` before this package: they replace what its body looks up, not
the function itself. Every one passes other models on untouched.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .exporter.package import Package

__all__ = ["DEFAULT_TASK", "TASKS", "export", "install", "wrap_command"]

TASKS = ("image-text-to-text", "automatic-speech-recognition", "text-generation", "phi4mm-multimodal")
DEFAULT_TASK = "image-text-to-text"

_IGNORED_REMOTE_CODE = (
    "--trust-remote-code is ignored: Phi-4-multimodal is exported without running the repository's Python."
)

# The package that the running export made; main_export itself returns nothing.
_exported: ContextVar[list[Package] | None] = ContextVar("exported", default=None)

# Models that Optimum's flow found to be ours, by the name or path it was given.
_our_sources: set[str] = set()


def export(model: str | Path, output: str | Path, *, variant: str = "default", **options: Any) -> Package:
    """Export Phi-4-multimodal to four ONNX models: `optimum.exporters.onnx.main_export` in one call.

    Args:
        model: folder or Hub id of a checkpoint in either layout.
        output: an empty or new folder.
        variant: `gated` (default), `merged`, `vision`, `speech` or `text`.
        options: main_export's other options, e.g. `dtype="fp16"`, `opset`, `atol`, `do_validation`,
            `revision`, `cache_dir`, `token`.

    Returns:
        The package: a mapping with the keys `vision`, `speech`, `embedding` and `model`, each with its path,
        inputs, outputs and the largest differences that validation found.

    Raises:
        CheckpointError: a model that isn't Phi-4-multimodal, or a broken checkpoint.
        ExportError: an option that can't be honoured, or a target that can't be written.
        ValidationError: a written model that differs from the torch model.
    """
    from optimum.exporters.onnx import main_export

    from .checkpoint import HUB_OPTIONS, raw_config
    from .configuration import MODEL_TYPES
    from .errors import CheckpointError, ExportError

    hub_options = {name: options[name] for name in HUB_OPTIONS if name in options}
    model_type = (raw_config(str(model), **hub_options) or {}).get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{model} is not Phi-4-multimodal: its config.json has model_type {model_type!r}, expected one "
            f"of {', '.join(MODEL_TYPES)}"
        )
    task = options.get("task", "auto")
    if str(task).removesuffix("-with-past") not in (*TASKS, "auto"):
        raise ExportError(
            f"task is {task}, expected one of {', '.join(TASKS)}, each with or without -with-past"
        )
    if options.get("dtype") not in (None, "fp32", "fp16", "bf16"):
        raise ExportError(f"dtype is {options['dtype']}, expected fp32, fp16 or bf16")
    packages: list[Package] = []
    token = _exported.set(packages)
    try:
        main_export(str(model), output, _variant=variant, **options)
    finally:
        _exported.reset(token)
    return packages[0]


def install() -> None:
    """Put every seam in: now where Optimum's module is loaded already, else when it is."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(_SEAMS))
        for name, seam in _SEAMS.items():
            if name in sys.modules:
                seam(sys.modules[name])


def wrap_command() -> None:
    """Let `optimum-cli export onnx` end with one sentence where this package refuses something."""
    from optimum.commands.export.onnx import ONNXExportCommand

    run = ONNXExportCommand.run
    if hasattr(run, "__wrapped__"):
        return

    @functools.wraps(run)
    def run_with_clear_errors(self: Any) -> None:
        from .errors import Phi4MMError

        if "TRANSFORMERS_VERBOSITY" not in os.environ:  # Optimum's switch, which by default hides progress
            logging.getLogger(f"optimum.{__package__}").setLevel(logging.INFO)
        try:
            if self.args.pad_token_id is not None and _model_type(
                self.args.model, cache_dir=self.args.cache_dir
            ):
                raise Phi4MMError("--pad_token_id is not possible: the padding token is the checkpoint's own")
            run(self)
        except Phi4MMError as error:
            sys.exit(f"optimum-cli export onnx: {error}")

    ONNXExportCommand.run = run_with_clear_errors


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after the module was loaded."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self.hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.hooks[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _model_type(name: str, **hub_options: Any) -> str | None:
    """Our model_type of a folder or Hub id, else None: other models' faults are not ours to tell."""
    from .checkpoint import raw_config
    from .configuration import MODEL_TYPES
    from .errors import CheckpointError

    try:
        model_type = (raw_config(name, **hub_options) or {}).get("model_type")
    except CheckpointError:
        return None
    return model_type if model_type in MODEL_TYPES else None


def _register_tasks(tasks: ModuleType) -> None:
    """`optimum.exporters.tasks`: config and class to load, the task of a folder, no remote code."""
    from .configuration import MODEL_TYPES, Phi4MMConfig

    tasks.AutoConfig.register(Phi4MMConfig.model_type, Phi4MMConfig, exist_ok=True)
    manager = tasks.TasksManager
    for model_type in MODEL_TYPES:
        for task in TASKS:
            manager._CUSTOM_CLASSES[("pt", model_type, task)] = (
                "optimum_phi4mm.components.model",
                "Phi4MMForOnnxExport",
            )
    infer = manager.infer_task_from_model

    @functools.wraps(infer)
    def infer_task_from_model(
        cls: type, model: Any, subfolder: str = "", revision: str | None = None, **options: Any
    ) -> str:
        def is_ours() -> bool:
            hub_options = {name: options[name] for name in ("cache_dir", "token") if name in options}
            return isinstance(model, str) and bool(
                _model_type(model, subfolder=subfolder, revision=revision, **hub_options)
            )

        try:
            task = infer(model, subfolder=subfolder, revision=revision, **options)
        except Exception:  # of whatever kind: a folder has no task, a Hub page may have none either
            if is_ours():
                return DEFAULT_TASK
            raise
        return DEFAULT_TASK if task not in TASKS and is_ours() else task

    manager.infer_task_from_model = classmethod(infer_task_from_model)
    _guard_auto_config(tasks)


def _register_configs(model_configs: ModuleType) -> None:
    """`optimum.exporters.onnx.model_configs`: our OnnxConfig for every task, with and without past."""
    from .configuration import MODEL_TYPES
    from .exporter.configs import Phi4MMOnnxConfig

    register = model_configs.TasksManager.create_register("onnx")
    tasks = [task + suffix for task in TASKS for suffix in ("", "-with-past")]
    for model_type in MODEL_TYPES:
        register(model_type, *tasks)(Phi4MMOnnxConfig)


def _replace_export(convert: ModuleType) -> None:
    """`optimum.exporters.onnx.convert`: our model is exported by our exporter.

    Stock code would write one file: which submodels a model has is an if/elif over model types in there.
    """
    stock = convert.onnx_export_from_model

    @functools.wraps(stock)
    def onnx_export_from_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        from .components.model import Phi4MMForOnnxExport

        if not isinstance(model, Phi4MMForOnnxExport):
            return stock(model, *args, **kwargs)
        from .exporter.convert import onnx_export_from_model as export_model

        package = export_model(model, *args, **kwargs)
        packages = _exported.get()
        if packages is not None:
            packages.append(package)
        return package

    convert.onnx_export_from_model = onnx_export_from_model  # type: ignore[attr-defined]


def _guard_main_export(main: ModuleType) -> None:
    """`optimum.exporters.onnx.__main__`: no remote code, and no processor loaded that isn't used."""
    _guard_auto_config(main)
    convert = importlib.import_module("optimum.exporters.onnx.convert")
    main.onnx_export_from_model = convert.onnx_export_from_model  # type: ignore[attr-defined]
    stock = main.maybe_load_preprocessors

    @functools.wraps(stock)
    def maybe_load_preprocessors(src_name_or_path: Any, *args: Any, **kwargs: Any) -> list:
        if str(src_name_or_path) in _our_sources:
            return []
        return stock(src_name_or_path, *args, **kwargs)

    main.maybe_load_preprocessors = maybe_load_preprocessors  # type: ignore[attr-defined]


def _guard_auto_config(module: ModuleType) -> None:
    """Let `module` read our models' config with the local class even where the user trusts remote code."""
    stock = module.AutoConfig

    class AutoConfig(stock):  # type: ignore[misc, valid-type]
        @classmethod
        def from_pretrained(cls, name: Any, **kwargs: Any) -> Any:
            hub_options = {
                key: kwargs[key] for key in ("subfolder", "revision", "cache_dir", "token") if key in kwargs
            }
            if kwargs.get("trust_remote_code") and _model_type(str(name), **hub_options):
                if str(name) not in _our_sources:  # the flow reads the config twice
                    logging.getLogger(f"optimum.{__name__}").warning(_IGNORED_REMOTE_CODE)
                kwargs["trust_remote_code"] = False
            config = stock.from_pretrained(name, **kwargs)
            from .configuration import MODEL_TYPES

            if config.model_type in MODEL_TYPES:
                _our_sources.add(str(name))
            return config

    AutoConfig.__qualname__ = AutoConfig.__name__ = stock.__name__
    module.AutoConfig = AutoConfig  # type: ignore[attr-defined]


_SEAMS: dict[str, Callable[[ModuleType], None]] = {
    "optimum.exporters.tasks": _register_tasks,
    "optimum.exporters.onnx.model_configs": _register_configs,
    "optimum.exporters.onnx.convert": _replace_export,
    "optimum.exporters.onnx.__main__": _guard_main_export,
}
