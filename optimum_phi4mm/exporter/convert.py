"""The export: options checked, graphs captured, weights bound, the package written, validated and moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from optimum.exporters.tasks import TasksManager
from optimum.utils import logging
from torch import nn

from ..checkpoint import leaf_from_native
from ..components.model import Phi4MMForOnnxExport
from ..errors import Phi4MMError
from .binding import bind, num_bytes
from .capture import capture, derived_buffers
from .configs import FOLDED_ADAPTERS, Phi4MMOnnxConfig
from .model_card import model_card
from .native_files import native_files
from .options import check_options, float_dtype, opset_for
from .package import Package, check_output, check_space, describe, staged, write_adapters
from .validation import validate


__all__ = ["onnx_export_from_model"]

logger = logging.get_logger(f"optimum.{__name__}")  # below the logger that Optimum configures


def onnx_export_from_model(
    model: Phi4MMForOnnxExport,
    output: str | Path,
    opset: int | None = None,
    optimize: str | None = None,
    monolith: bool = False,
    no_post_process: bool = False,
    atol: float | None = None,
    do_validation: bool = True,
    model_kwargs: dict[str, Any] | None = None,
    custom_onnx_configs: Mapping[str, Any] | None = None,
    fn_get_submodels: Callable | None = None,
    _variant: str = "default",
    preprocessors: list | None = None,
    device: str = "cpu",
    no_dynamic_axes: bool = False,
    task: str | None = None,
    use_subprocess: bool = False,
    do_constant_folding: bool = True,
    slim: bool = False,
    **kwargs_shapes: int,
) -> Package:
    """Optimum's `onnx_export_from_model` for this model: the same arguments, checked first.

    Args:
        model: as `Phi4MMForOnnxExport.from_pretrained` gives it.
        output: an empty or new folder.
        opset: ONNX opset version; None is 20, or 22 for bfloat16.
        atol: largest absolute difference that validation accepts; None is relative to the reference's
            magnitude.
        do_validation: whether the written models are run and compared before they are moved to `output`.
        task: one of the tasks the model is registered for; all give the same four models.
        do_constant_folding: whether onnxscript's optimiser runs over the graphs.
        no_post_process, preprocessors, use_subprocess: without effect on this model: no post-processing is
            done, the checkpoint's own processor files are written, and validation runs in this process.
        optimize, monolith, model_kwargs, custom_onnx_configs, fn_get_submodels, device, no_dynamic_axes,
            slim: refused unless they have their default (see `options.check_options`).
        kwargs_shapes: sizes of validation's dummy inputs, by Optimum's names.

    Returns:
        The package, at `output`.

    Raises:
        ExportError: an option that can't be honoured, a target that holds something, too little space.
        CheckpointError: a checkpoint that is broken or not this model.
        ValidationError: a written model that differs from its torch component.
    """
    output = Path(output)
    dtype = float_dtype(model.dtype)
    opset = opset_for(dtype, opset)
    check_options(
        optimize=optimize,
        monolith=monolith,
        model_kwargs=model_kwargs,
        custom_onnx_configs=custom_onnx_configs,
        fn_get_submodels=fn_get_submodels,
        device=device,
        no_dynamic_axes=no_dynamic_axes,
        slim=slim,
        atol=atol,
        variant=_variant,
        shapes=kwargs_shapes,
    )
    check_output(output)

    model.load()
    constructor = TasksManager.get_exporter_config_constructor(
        "onnx", model=model, task=task or "image-text-to-text", library_name="transformers"
    )
    main_config: Phi4MMOnnxConfig = constructor(model.config, float_dtype=dtype)
    main_config.variant = _variant
    variant = main_config.variant
    logger.info(f"Using the export variant {variant}: {main_config.VARIANTS[variant]}")
    adapters = model.checkpoint.adapters
    folded = {name: adapters[name] for name in FOLDED_ADAPTERS[variant] or ()}
    components = main_config.component_configs(model, adapters)

    files = native_files(model.checkpoint, dtype)

    with staged(output) as folder:  # a target that can't be written is found out before the captures
        graphs: dict[str, ir.Model] = {}
        for key, (component, config) in components.items():
            logger.info(f"Capturing {key}.onnx (opset {opset}, {dtype})")
            graphs[key] = graph = capture(component, config, opset=opset, fold_constants=do_constant_folding)
            bind(graph, model.checkpoint, _derived(component, config.PREFIX), folded)
            graph.metadata_props.update({"phi4mm.variant": variant, "phi4mm.dtype": dtype})
        check_space(folder, sum(num_bytes(graph) for graph in graphs.values()))

        package = Package(folder, variant, dtype)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if FOLDED_ADAPTERS[variant] is None:
            write_adapters(folder)
        for key, graph in graphs.items():
            logger.info(f"Writing {key}.onnx and {key}.onnx_data ({num_bytes(graph) / 1e9:.2f} GB)")
            package.models[key] = describe(graph, folder / f"{key}.onnx")
            _save(graph, folder / f"{key}.onnx")
        if do_validation:
            for key, (component, config) in components.items():
                differences = validate(
                    package[key], component, config, model.checkpoint, folded, atol=atol, **kwargs_shapes
                )
                package[key].differences = differences
        card = model_card(package, source=model.source, revision=model.revision)
        (folder / "README.md").write_text(card, encoding="utf-8")
    logger.info(f"The ONNX export succeeded and the exported model was saved at: {output.as_posix()}")
    return package.moved_to(output)


def _save(graph: ir.Model, path: Path) -> None:
    """Write a graph and its weights; what binding or the disk raises meanwhile comes out as it was raised."""
    try:
        ir.save(graph, path, external_data=f"{path.name}_data")
    except ir.serde.SerdeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (Phi4MMError, OSError)):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def _derived(component: nn.Module, prefix: str) -> dict[str, Any]:
    return {
        leaf_from_native(f"{prefix}.{name}"): buffer for name, buffer in derived_buffers(component).items()
    }
