"""The model as Optimum loads it: four components on the meta device, and the checkpoint they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..checkpoint import Checkpoint, leaf_from_native, resolve
from .decoder import Decoder
from .embedding import Embedding
from .speech import SpeechEncoder
from .vision import VisionEncoder


__all__ = ["Phi4MMForOnnxExport"]


class Phi4MMForOnnxExport(nn.Module):
    """Phi-4-multimodal without its weights, ready for export.

    `from_pretrained` only reads the config, so that options are checked before anything large is downloaded;
    `load` fetches the checkpoint, checks every tensor's name and shape, and builds `vision_encoder`,
    `speech_encoder`, `embedding` and `decoder` on the meta device. Weights stay on disk: `checkpoint` reads
    them one at a time.
    """

    config: PretrainedConfig
    dtype: torch.dtype
    checkpoint: Checkpoint

    def __init__(self, config: PretrainedConfig, source: str, dtype: torch.dtype, **hub_options: Any) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.dtype = dtype
        self.revision = hub_options.get("revision")
        self._hub_options = hub_options

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        torch_dtype: torch.dtype | None = None,
        subfolder: str = "",
        revision: str | None = None,
        cache_dir: str | None = None,
        token: bool | str | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ) -> Phi4MMForOnnxExport:
        """Prepare a model for export.

        Args:
            pretrained_model_name_or_path: folder or Hub id, in either layout.
            torch_dtype: float type of the export; None is float32.
            subfolder, revision, cache_dir, token, local_files_only, force_download: as in transformers.
            trust_remote_code: has no effect: no code of a checkpoint is needed, and none is run.
            attn_implementation: has no effect: the components have attention of their own, equal to "eager".

        Raises:
            CheckpointError: when there is no such model, or it is another one.
        """
        hub_options = {
            "subfolder": subfolder,
            "revision": revision,
            "cache_dir": cache_dir,
            "token": token,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        source = str(pretrained_model_name_or_path)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub_options)
        return cls(config, source, torch_dtype or torch.float32, **hub_options)

    def load(self) -> Phi4MMForOnnxExport:
        """Fetch and check the checkpoint and build the components; does nothing the second time.

        Raises:
            CheckpointError: names the file or tensor that is missing, unknown, broken or of a wrong shape.
        """
        if hasattr(self, "decoder"):
            return self
        self.checkpoint = Checkpoint.open(resolve(self.source, **self._hub_options))
        self.config = config = self.checkpoint.config
        with torch.device("meta"):
            self.vision_encoder = VisionEncoder(config)
            self.speech_encoder = SpeechEncoder(config)
            self.embedding = Embedding(config)
            self.decoder = Decoder(config)
        self.eval().requires_grad_(False)
        self.checkpoint.check(self._expected_shapes())
        for parameter in self.parameters():
            parameter.data = parameter.data.to(self.dtype)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = buffer.to(self.dtype)
        return self

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every tensor that the components and both adapters need."""
        expected = {leaf_from_native(name): tuple(value.shape) for name, value in self.state_dict().items()}
        for index, layer in enumerate(self.decoder.layers):
            for adapter in self.checkpoint.adapters.values():
                for target in adapter.targets:
                    linear = layer.get_submodule(target)
                    stem = f"decoder.layers.{index}.{target}"
                    expected[f"{stem}.lora_A.{adapter.name}.weight"] = (adapter.rank, linear.in_features)
                    expected[f"{stem}.lora_B.{adapter.name}.weight"] = (linear.out_features, adapter.rank)
        return expected

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Not a model to run: its parts are."""
        raise NotImplementedError(
            "Phi4MMForOnnxExport holds no weights and is exported component by component: run the exported "
            "package, or transformers' Phi4MultimodalForCausalLM"
        )
