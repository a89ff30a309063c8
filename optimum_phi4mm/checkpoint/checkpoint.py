"""A checkpoint in either layout, seen through canonical tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Phi4MultimodalConfig

from ..configuration import is_phi4mm, native_config, read_config
from ..errors import CheckpointError
from .lora import ADAPTERS, LoraAdapter, match_tensors, settings_from_config, settings_from_folder
from .names import from_adapter, from_native, from_original
from .reader import StoredTensor, read_file, read_folder


__all__ = ["Checkpoint"]

_EMBEDDING = "embedding.embed_tokens.weight"
_HEAD = "decoder.lm_head.weight"
_POSITIONS = "vision_encoder.img_processor.embeddings.position_embedding.weight"
_VISION_LAYER = re.compile(r"vision_encoder\.img_processor\.encoder\.layers\.(\d{1,9})\.")
# Published with the model, or saved by older libraries, and used by nobody.
_NEVER_USED = re.compile(
    r"vision_encoder\.img_processor\.(post_layernorm|head)\..*|.*\.rotary_emb\.inv_freq", flags=re.DOTALL
)
_MAX_LISTED_PROBLEMS = 10


class Checkpoint:
    """An opened checkpoint: its config and adapters, and its tensors one at a time.

    Args:
        folder: where it lies.
        raw_config: the content of its `config.json`.
        tensors: its tensors by canonical name.
        unmapped: keys that belong to no component of the model.

    Attributes:
        folder: as given.
        layout: "phi4mm" or "phi4_multimodal".
        raw_config: as given.
        config: the native config, whatever the layout.
        adapters: the LoRA adapters by name, "vision" and "speech".
    """

    folder: Path
    layout: str
    raw_config: dict[str, Any]
    config: Phi4MultimodalConfig
    adapters: dict[str, LoraAdapter]

    def __init__(
        self,
        folder: Path,
        raw_config: dict[str, Any],
        tensors: Mapping[str, StoredTensor],
        unmapped: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.raw_config = raw_config
        self.layout = "phi4mm" if is_phi4mm(raw_config) else "phi4_multimodal"
        self._tensors = dict(tensors)
        self._unmapped = unmapped
        shapes = {name: self.shape(name) for name in self._tensors}
        self.config = native_config(raw_config, shapes)
        if self.config.tie_word_embeddings and _EMBEDDING in self._tensors:
            self._tensors[_HEAD] = self._tensors[_EMBEDDING]
        for name, stored in self._tensors.items():
            if not self._is_never_used(name):
                stored.dtype()  # a quantised weight is refused now, not in the middle of an export
        self.adapters = {}
        for adapter in ADAPTERS:
            if self.layout == "phi4mm":
                settings = settings_from_config(raw_config, adapter)
            else:
                settings = settings_from_folder(folder, adapter)
            self.adapters[adapter] = match_tensors(adapter, settings, shapes, self.config.num_hidden_layers)

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open a local checkpoint: read its config and every file's header, but no tensor.

        Args:
            folder: a checkpoint in either layout; the native one has its adapters in `vision-lora/` and
                `speech-lora/`.

        Raises:
            CheckpointError: something is missing, broken or not supported; the message names it.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is no folder, expected one with config.json and safetensors files"
            )
        raw = read_config(folder)
        tensors: dict[str, StoredTensor] = {}
        unmapped: list[str] = []

        def add(name: str | None, stored: StoredTensor) -> None:
            if name is None:
                unmapped.append(stored.key)
            elif name in tensors:
                other = tensors[name]
                raise CheckpointError(
                    f"{name} is stored twice, as {other.key} in {other.file} and as {stored.key} in "
                    f"{stored.file}, expected once"
                )
            else:
                tensors[name] = stored

        canonical = from_original if is_phi4mm(raw) else from_native
        for key, stored in read_folder(folder).items():
            add(canonical(key), stored)
        if not is_phi4mm(raw):
            for adapter in ADAPTERS:
                file = folder / f"{adapter}-lora" / "adapter_model.safetensors"
                for key, stored in read_file(file).items():
                    add(from_adapter(key, adapter), stored)
        return cls(folder, raw, tensors, tuple(unmapped))

    def names(self) -> list[str]:
        """The canonical names of all tensors, sorted; a tied head is one of them."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as `tensor` returns it."""
        shape = self._stored(name).shape
        # SigLIP's own position table is stored with a batch axis in some copies.
        return shape[1:] if name == _POSITIONS and len(shape) == 3 and shape[0] == 1 else shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored type of a tensor."""
        return self._stored(name).dtype()

    def tensor(self, name: str) -> Tensor:
        """Read one tensor from disk; it is the caller's alone, nothing is kept.

        Raises:
            CheckpointError: there is no such tensor, or its file can't be read.
        """
        return self._stored(name).read().view(self.shape(name))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare what the checkpoint holds with what a model needs.

        Args:
            expected: shape by canonical name.

        Raises:
            CheckpointError: lists missing tensors, tensors of another shape and unknown tensors. Tensors that
                every checkpoint carries and nobody uses (vision layers behind the feature layer, pooling
                head, ...) are not unknown.
        """
        problems = []
        for name, shape in sorted(expected.items()):
            if name not in self._tensors:
                problems.append(f"missing: {name} {list(shape)}")
            elif self.shape(name) != tuple(shape):
                problems.append(f"wrong shape: {name} is {list(self.shape(name))}, expected {list(shape)}")
        unknown = [name for name in self.names() if name not in expected and not self._is_never_used(name)]
        # Older libraries saved the rotary frequencies outside of the layers, too.
        unmapped = [key for key in self._unmapped if not _NEVER_USED.fullmatch(key)]
        problems += [f"unknown: {name}" for name in unknown + sorted(unmapped)]
        if not problems:
            return
        listed = problems[:_MAX_LISTED_PROBLEMS]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        raise CheckpointError(
            f"the tensors in {self.folder} are not those its config.json describes:\n  " + "\n  ".join(listed)
        )

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint in {self.folder} has no tensor {name}")
        return self._tensors[name]

    def _is_never_used(self, name: str) -> bool:
        if _NEVER_USED.fullmatch(name) or (name == _HEAD and self.config.tie_word_embeddings):
            return True
        layer = _VISION_LAYER.match(name)
        if layer is None:
            return False
        vision = self.config.vision_config
        last = vision.feature_layer
        # Hidden states are counted, and the first is the layers' input.
        return int(layer[1]) >= (last if last >= 0 else vision.num_hidden_layers + 1 + last)
