"""Shared fixtures: checkpoints, the transformers reference, packages, sessions, the table of differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from reference import Differences, Reference, load_reference
from synthetic_checkpoint import write_checkpoint


# Two workers of pytest-xdist share two cores.
NUM_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(NUM_THREADS)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Package = Mapping[str, Any]


_DIFFERENCES = Differences()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the file that takes longest, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name != "test_equal_vision.py")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands what it found to the process that prints the table."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["differences"] = [
            [*case, *found] for case, found in _DIFFERENCES.largest.items()
        ]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for component, case, difference, bound in getattr(node, "workeroutput", {}).get("differences", ()):
        _DIFFERENCES.keep(component, case, float(difference), float(bound))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _DIFFERENCES.largest:
        terminalreporter.section("differences to transformers")
        for row in _DIFFERENCES.table():
            terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def differences() -> Differences:
    return _DIFFERENCES


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes checkpoints, each only once: `checkpoint(layout, **options)` as in `write_checkpoint`.

    Tests don't write into them.
    """
    folders: dict[tuple[Any, ...], Path] = {}

    def make(layout: str = "phi4mm", **options: Any) -> Path:
        key = (layout, *sorted(options.items()))
        if key not in folders:
            folders[key] = write_checkpoint(tmp_path_factory.mktemp(layout), layout, **options)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def original_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("phi4mm")


@pytest.fixture(scope="session")
def native_checkpoint(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("phi4_multimodal")


@pytest.fixture(scope="session")
def reference_of(checkpoint: Callable[..., Path]) -> Callable[..., Reference]:
    """Loads references, each only once: `reference_of(dtype, **options of write_checkpoint)`."""
    references: dict[tuple[Any, ...], Reference] = {}

    def load(dtype: str = "fp32", **options: Any) -> Reference:
        key = (dtype, *sorted(options.items()))
        if key not in references:
            references[key] = load_reference(checkpoint("phi4_multimodal", **options), _DTYPES[dtype])
        return references[key]

    return load


@pytest.fixture(scope="session")
def reference(reference_of: Callable[..., Reference]) -> Reference:
    return reference_of()


@pytest.fixture(scope="session")
def reusing_captures() -> Callable[[], AbstractContextManager[None]]:
    """Inside `with reusing_captures():` an export takes a graph that another has captured before.

    Capturing takes most of an export's time. A graph is the same where module, config, inputs, outputs and
    options are; its weights are bound afterwards, for each export. test_command.py exports without this, in
    another process, and compares every byte.
    """
    graphs: dict[tuple[str, ...], Any] = {}

    @contextmanager
    def reusing() -> Iterator[None]:
        from optimum_phi4mm.exporter import convert

        def capture_once(component: torch.nn.Module, config: Any, **options: Any) -> Any:
            sizes = config._config.to_dict()
            if config.PREFIX != "decoder":
                sizes.pop("original_max_position_embeddings")
            described = (component, sizes, config.float_dtype, config.inputs, config.outputs, options)
            gated = getattr(config, "folded", ()) is None and config.adapters
            key = tuple(map(repr, (*described, gated)))
            if key not in graphs:
                graphs[key] = capture(component, config, **options)
            return graphs[key].clone()

        with pytest.MonkeyPatch.context() as patch:
            capture = convert.capture
            patch.setattr(convert, "capture", capture_once)
            yield

    return reusing


@pytest.fixture(scope="session")
def export_package(
    checkpoint: Callable[..., Path],
    reusing_captures: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Package]:
    """Exports packages, each only once, from checkpoints that `write_checkpoint` makes with the options.

    Only the gated packages of the default checkpoint are validated, the others would tell nothing new.
    """
    packages: dict[tuple[Any, ...], Package] = {}

    def export(
        variant: str = "gated", dtype: str = "fp32", layout: str = "phi4mm", **options: Any
    ) -> Package:
        import optimum_phi4mm

        key = (variant, dtype, layout, *sorted(options.items()))
        if key not in packages:
            output = tmp_path_factory.mktemp("package") / f"{variant}-{dtype}"
            validated = variant == "gated" and not options
            source = checkpoint(layout, **options)
            with reusing_captures():
                packages[key] = optimum_phi4mm.export(
                    source, output, variant=variant, dtype=dtype, do_validation=validated
                )
        return packages[key]

    return export


@pytest.fixture(scope="session")
def package(export_package: Callable[..., Package]) -> Package:
    """The default export: gated, fp32, from the phi4mm layout."""
    return export_package()


def open_session(path: Path, optimized: bool = True) -> onnxruntime.InferenceSession:
    """A session with ONNX Runtime's optimisations on or off."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = NUM_THREADS
    options.log_severity_level = 3  # it warns about every overridable initialiser
    options.enable_cpu_mem_arena = False  # an arena keeps what 37 crops took, in every session
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="session")
def session() -> Iterator[Callable[..., onnxruntime.InferenceSession]]:
    """Opens sessions, each only once: `session(package, name, optimized=True)`."""
    sessions: dict[tuple[Path, bool], onnxruntime.InferenceSession] = {}

    def open_once(package: Package, name: str, optimized: bool = True) -> onnxruntime.InferenceSession:
        key = (Path(package[name].path), optimized)
        if key not in sessions:
            sessions[key] = open_session(*key)
        return sessions[key]

    yield open_once
    sessions.clear()
