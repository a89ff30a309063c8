"""Canonical tensor names: the name an initialiser gets, whatever layout its weight is stored in.

A canonical name is the phi4mm layout's leaf name under one prefix per component (`vision_encoder.`,
`speech_encoder.`, `embedding.`, `decoder.`).
"""

from __future__ import annotations

import re


__all__ = ["from_adapter", "from_native", "from_original", "leaf_from_native"]

# In this order: the first prefix that fits decides.
_COMPONENTS = (
    ("model.embed_tokens_extend.image_embed.", "vision_encoder."),
    ("model.embed_tokens_extend.audio_embed.", "speech_encoder."),
    ("model.embed_tokens.", "embedding.embed_tokens."),
    ("model.layers.", "decoder.layers."),
    ("model.norm.", "decoder.norm."),
    ("lm_head.", "decoder.lm_head."),
)
# Path segments that wrappers leave behind: PEFT's and FSDP's activation checkpointing.
_WRAPPERS = ("base_layer", "_checkpoint_wrapped_module")
_PEFT_PREFIX = "base_model.model."
_ADAPTER_LEAF = re.compile(r"(.+\.lora_[AB])(?:\.\w+)?\.weight")

_MODULES = {
    "vision_encoder.img_projection_up": "vision_encoder.img_projection.0",
    "vision_encoder.img_projection_down": "vision_encoder.img_projection.2",
    "vision_encoder.global_img_feature_extensor": "vision_encoder.glb_GN",
    "vision_encoder.sub_img_feature_extensor": "vision_encoder.sub_GN",
    "speech_encoder.up_proj_for_speech": "speech_encoder.audio_projection.speech.0",
    "speech_encoder.down_proj_for_speech": "speech_encoder.audio_projection.speech.2",
    "speech_encoder.up_proj_for_vision_speech": "speech_encoder.audio_projection.vision.0",
    "speech_encoder.down_proj_for_vision_speech": "speech_encoder.audio_projection.vision.2",
}
_SPEECH_LAYER = re.compile(
    r"(speech_encoder\.encoder\.encoders\.\d+\.)(feed_forward_(?:in|out)|self_attn)\.(\w+)(.*)"
)
_SPEECH_LEAVES = {
    "gate_up_proj": "net.0.linear",
    "down_proj": "net.2",
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_out",
}


def from_original(key: str) -> str | None:
    """The canonical name of a phi4mm checkpoint key; None where the key belongs to no component."""
    key = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    for prefix, component in _COMPONENTS:
        if key.startswith(prefix):
            return component + key[len(prefix) :]
    return None


def from_native(key: str) -> str | None:
    """The canonical name of a phi4_multimodal checkpoint key; None where the key belongs to no component."""
    name = from_original(key.removeprefix(_PEFT_PREFIX))
    return None if name is None else leaf_from_native(name)


def from_adapter(key: str, adapter: str) -> str | None:
    """The canonical name of a key of a PEFT adapter file.

    Args:
        key: e.g. `base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight`. A name that PEFT gave the
            adapter when it saved (`lora_A.default.weight`) is replaced.
        adapter: the adapter's name here, "vision" or "speech".

    Returns:
        E.g. `decoder.layers.0.self_attn.o_proj.lora_A.vision.weight`, or None where the key is no A or B
        of a component's linear.
    """
    name = from_native(key)
    match = None if name is None else _ADAPTER_LEAF.fullmatch(name)
    return None if match is None else f"{match[1]}.{adapter}.weight"


def leaf_from_native(name: str) -> str:
    """The canonical form of a name that has its component prefix, but transformers' native leaf names.

    Canonical names come back unchanged.
    """
    for native, canonical in _MODULES.items():
        if name == native or name.startswith(native + "."):
            return canonical + name[len(native) :]
    match = _SPEECH_LAYER.fullmatch(name)
    if match is None:
        return name
    layer, module, leaf, rest = match.groups()
    return f"{layer}{module}.{_SPEECH_LEAVES.get(leaf, leaf)}{rest}"
