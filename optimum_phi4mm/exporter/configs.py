"""The OnnxConfigs: inputs, outputs, axes, defaults and dummy inputs of the four models (design section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from optimum.exporters.onnx.base import OnnxConfig, OnnxConfigWithPast
from optimum.utils import NormalizedTextConfig
from torch import Tensor, nn

from ..checkpoint import LoraAdapter
from ..components.speech import BLOCK_TOKENS
from .dummy_inputs import (
    DecoderInputGenerator,
    EmbeddingInputGenerator,
    SpeechInputGenerator,
    VisionInputGenerator,
)
from .patcher import Phi4MMModelPatcher


__all__ = [
    "COMPONENTS",
    "FOLDED_ADAPTERS",
    "Phi4MMDecoderOnnxConfig",
    "Phi4MMEmbeddingOnnxConfig",
    "Phi4MMOnnxConfig",
    "Phi4MMSpeechOnnxConfig",
    "Phi4MMVisionOnnxConfig",
]

Axes = dict[str, dict[int, str]]

# Variant -> adapters folded into the linears; None keeps both in the graph, behind `adapter_gates`.
FOLDED_ADAPTERS: dict[str, tuple[str, ...] | None] = {
    "gated": None,
    "merged": ("vision", "speech"),
    "vision": ("vision",),
    "speech": ("speech",),
    "text": (),
}


class _ComponentOnnxConfig(OnnxConfig):
    """One of the four models. `inputs` holds required and optional inputs; the latter have a default.

    The default torch opset is kept unless the float type needs a later one: Conv takes bfloat16 from opset 22
    on.
    """

    NORMALIZED_CONFIG_CLASS = NormalizedTextConfig
    DEFAULT_ONNX_OPSET = 20
    _MODEL_PATCHER = Phi4MMModelPatcher
    PREFIX: str  # of the component's initialisers, and its attribute in the model
    adapters: Mapping[str, LoraAdapter] = {}

    @property
    def defaults(self) -> dict[str, Tensor]:
        """Default value of each optional input; its axes that are empty or one long may have any length."""
        return {}

    @property
    def capture_shapes(self) -> dict[str, int]:
        """Sizes of the dummy inputs at capture, by Optimum's names, that must not be Optimum's defaults.

        torch.export decides by the sizes at hand what it can't leave open, so a graph is captured at its most
        general: no size is 1, and none is what makes a step empty.
        """
        return {}

    @property
    def static_shapes(self) -> dict[str, tuple[int, ...]]:
        """Sizes at capture of inputs whose dynamic axis torch.export must take for a constant."""
        return {}


class Phi4MMVisionOnnxConfig(_ComponentOnnxConfig):
    """`vision.onnx`."""

    PREFIX = "vision_encoder"
    DUMMY_INPUT_GENERATOR_CLASSES = (VisionInputGenerator,)

    @property
    def inputs(self) -> Axes:
        return {
            "pixel_values": {0: "batch"},
            "image_sizes": {0: "num_images"},
            "image_attention_mask": {0: "mask_rows"},
        }

    @property
    def defaults(self) -> dict[str, Tensor]:
        vision = self._config.vision_config
        grid = vision.image_size // vision.patch_size
        return {
            "image_sizes": torch.empty(0, 2, dtype=torch.int64),
            "image_attention_mask": torch.empty(0, grid, grid, dtype=torch.bool),
        }

    @property
    def outputs(self) -> Axes:
        return {"image_features": {0: "num_image_tokens"}}


class Phi4MMSpeechOnnxConfig(_ComponentOnnxConfig):
    """`speech.onnx`."""

    PREFIX = "speech_encoder"
    DUMMY_INPUT_GENERATOR_CLASSES = (SpeechInputGenerator,)

    @property
    def inputs(self) -> Axes:
        return {
            "audio_features": {0: "batch", 1: "audio_seq_len"},
            "audio_attention_mask": {0: "num_audios", 1: "mask_len"},
        }

    @property
    def defaults(self) -> dict[str, Tensor]:
        return {"audio_attention_mask": torch.empty(0, 0, dtype=torch.bool)}

    @property
    def capture_shapes(self) -> dict[str, int]:
        # Two blocks, the second of them padded: with one, torch.export would hold a block and the whole for
        # the same length.
        return {"nb_max_frames": self._config.audio_config.time_reduction * BLOCK_TOKENS * 3 // 2}

    @property
    def outputs(self) -> Axes:
        return {name: {0: "num_audio_tokens"} for name in ("speech_features", "speech_features_for_vision")}


class Phi4MMEmbeddingOnnxConfig(_ComponentOnnxConfig):
    """`embedding.onnx`."""

    PREFIX = "embedding"
    DUMMY_INPUT_GENERATOR_CLASSES = (EmbeddingInputGenerator,)

    @property
    def inputs(self) -> Axes:
        return {
            "input_ids": {0: "batch", 1: "seq_len"},
            "image_features": {0: "num_image_tokens"},
            "speech_features": {0: "num_audio_tokens"},
        }

    @property
    def outputs(self) -> Axes:
        return {"inputs_embeds": {0: "batch", 1: "seq_len"}}


class Phi4MMDecoderOnnxConfig(_ComponentOnnxConfig):
    """`model.onnx`; `folded` None keeps `adapters` in the graph, else it names those in the weights."""

    PREFIX = "decoder"
    DUMMY_INPUT_GENERATOR_CLASSES = (DecoderInputGenerator,)
    folded: tuple[str, ...] | None = None

    @property
    def inputs(self) -> Axes:
        inputs = {
            "inputs_embeds": {0: "batch", 1: "seq_len"},
            "attention_mask": {0: "batch", 1: "past_seq + seq"},
            "position_ids": {0: "batch", 1: "seq_len"},
            **self.cache_axes("past_key_values", "past_seq"),
            "logits_to_keep": {},
        }
        if self.folded is None:
            inputs["adapter_gates"] = {0: "gate_rows"}
        return inputs

    @property
    def defaults(self) -> dict[str, Tensor]:
        defaults = {"logits_to_keep": torch.zeros(1, dtype=torch.int64)}
        if self.folded is None:
            defaults["adapter_gates"] = torch.ones(1, 2)
        return defaults

    @property
    def static_shapes(self) -> dict[str, tuple[int, ...]]:
        # The gates broadcast over the batch with one row as with a row per item. torch.export would decide
        # between the two; with one row it writes a graph that does both.
        return {} if self.folded is not None else {"adapter_gates": (1, 2)}

    @property
    def outputs(self) -> Axes:
        return {"logits": {0: "batch", 1: "logits_seq"}, **self.cache_axes("present", "total_seq")}

    def cache_axes(self, name: str, length: str) -> Axes:
        layers = range(self._config.num_hidden_layers)
        return {f"{name}.{i}.{part}": {0: "batch", 2: length} for i in layers for part in ("key", "value")}

    def generate_dummy_inputs(self, framework: str = "pt", **kwargs: Any) -> dict[str, Any]:
        """Dummy inputs by the names of the component's forward: the cache is one flat list there."""
        generator = DecoderInputGenerator(self.task, self._normalized_config, **kwargs)
        names = [name for name in self.inputs if not name.startswith("past_key_values.")]
        names.insert(3, "past_key_values")
        return {name: generator.generate(name, framework, self.int_dtype, self.float_dtype) for name in names}


# By key of a package; `<key>.onnx` is the file.
COMPONENTS: dict[str, type[_ComponentOnnxConfig]] = {
    "vision": Phi4MMVisionOnnxConfig,
    "speech": Phi4MMSpeechOnnxConfig,
    "embedding": Phi4MMEmbeddingOnnxConfig,
    "model": Phi4MMDecoderOnnxConfig,
}


class Phi4MMOnnxConfig(OnnxConfigWithPast):
    """The model's one config per task in TasksManager: has the variants and gives the four configs."""

    NORMALIZED_CONFIG_CLASS = NormalizedTextConfig
    DEFAULT_ONNX_OPSET = _ComponentOnnxConfig.DEFAULT_ONNX_OPSET
    # Largest difference in units of the reference's largest magnitude, unless --atol gives an absolute one.
    RELATIVE_TOLERANCES: ClassVar[dict[str, float]] = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
    _MODEL_PATCHER = Phi4MMModelPatcher
    DEFAULT_VARIANT = "gated"
    VARIANTS: ClassVar[dict[str, str]] = {
        "gated": "Both LoRA adapters in the graph, switched by the input adapter_gates (default).",
        "merged": "Both adapters folded into the linears: the same function as the default gates.",
        "vision": "The vision adapter folded: prompts with an image, with or without audio.",
        "speech": "The speech adapter folded: prompts with audio only.",
        "text": "No adapter: text-only prompts, as small and fast as the base model.",
    }

    def component_configs(
        self, model: nn.Module, adapters: Mapping[str, LoraAdapter]
    ) -> dict[str, tuple[nn.Module, _ComponentOnnxConfig]]:
        """The four components with their configs, as Optimum's `models_and_onnx_configs`."""
        configs = {}
        for key, config_class in COMPONENTS.items():
            config = config_class(self._config, task=self.task, float_dtype=self.float_dtype)
            if isinstance(config, Phi4MMDecoderOnnxConfig):
                config.adapters, config.folded = adapters, FOLDED_ADAPTERS[self.variant]
            configs[key] = (getattr(model, config.PREFIX), config)
        return configs

    @property
    def inputs(self) -> Axes:
        """The decoder's inputs, which are what Optimum's callers ask a generating model's config for."""
        config = Phi4MMDecoderOnnxConfig(self._config, task=self.task, float_dtype=self.float_dtype)
        config.folded = FOLDED_ADAPTERS[self.variant]
        return config.inputs

    @property
    def outputs(self) -> Axes:
        return Phi4MMDecoderOnnxConfig(self._config, task=self.task, float_dtype=self.float_dtype).outputs
