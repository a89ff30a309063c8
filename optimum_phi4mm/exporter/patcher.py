"""The ModelPatcher: bakes the LoRA adapters into the decoder's linears during capture and validation."""

from __future__ import annotations

from typing import Any

from optimum.exporters.onnx.model_patcher import ModelPatcher
from torch import nn

from ..components.decoder import DecoderLayer
from ..components.lora import LoraLinear, LoraShape


__all__ = ["Phi4MMModelPatcher"]


class Phi4MMModelPatcher(ModelPatcher):
    """Optimum's patcher for the four components.

    Inside the context the component's forward returns a dict by output name, and every linear of the decoder
    that has adapters is a `LoraLinear` (`config.folded is None`) or stays the plain linear whose weight the
    export folds.

    Optimum's own patches rewrite torch operators for the TorchScript exporter; the exporter used here takes
    them as they are, so none is applied.
    """

    def __init__(self, config: Any, model: nn.Module, model_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(config, model, model_kwargs=model_kwargs)
        self._patching_specs: list[Any] = []
        self._baked: list[tuple[nn.Module, str, nn.Linear]] = []

    def __enter__(self) -> Phi4MMModelPatcher:
        if getattr(self.real_config, "folded", ()) is None:
            for layer in self._model.modules():
                if isinstance(layer, DecoderLayer):
                    self.bake(layer)
        super().__enter__()
        return self

    def bake(self, layer: DecoderLayer) -> None:
        """Put a `LoraLinear` in the place of each linear of `layer` that an adapter targets."""
        adapters = self.real_config.adapters
        for target in sorted(set().union(*(adapter.targets for adapter in adapters.values()))):
            block_name, _, name = target.rpartition(".")
            block = layer.get_submodule(block_name)
            linear = getattr(block, name)
            shapes = {
                key: LoraShape(adapter.rank, adapter.scaling)
                for key, adapter in adapters.items()
                if target in adapter.targets
            }
            self._baked.append((block, name, linear))
            setattr(block, name, LoraLinear(linear, shapes, layer.gates))

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        while self._baked:
            block, name, linear = self._baked.pop()
            setattr(block, name, linear)
