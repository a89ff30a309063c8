"""Write a tiny random Phi-4-multimodal checkpoint, in either published layout, whose every tensor matters."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers


__all__ = ["ADAPTERS", "Sizes", "native_name", "tensors", "write_checkpoint"]

ADAPTERS = ("vision", "speech")

# The special tokens of the published tokenizer at their ids.
SPECIAL_TOKENS = {
    "<|endoftext|>": 199999,
    "<|endoftext10|>": 200010,
    "<|endoftext11|>": 200011,
    "<|endofprompt|>": 200018,
    "<|assistant|>": 200019,
    "<|end|>": 200020,
    "<|user|>": 200021,
    "<|system|>": 200022,
    "<|tool|>": 200023,
    "<|/tool|>": 200024,
    "<|tool_call|>": 200025,
    "<|/tool_call|>": 200026,
    "<|tool_response|>": 200027,
    "<|tag|>": 200028,
}
CHAT_TEMPLATE = (
    "{%- for turn in messages -%}<|{{ turn.role }}|>{{ turn.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@dataclass(frozen=True)
class Sizes:
    """Every size of the checkpoint; the relations between them are the real model's."""

    vocabulary: int = 200064
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 112
    vision_rank: int = 8
    vision_alpha: int = 12  # scale 1.5
    speech_rank: int = 10
    speech_alpha: int = 25  # scale 2.5
    vision_hidden: int = 64
    vision_layers: int = 3
    vision_heads: int = 16  # the phi4mm layout can't say another number
    vision_intermediate: int = 80
    audio_width: int = 32
    audio_heads: int = 2
    audio_intermediate: int = 48
    audio_blocks: int = 2
    conv_channels: int = 16
    mel_bins: int = 80
    max_position: int = 131072
    original_max_position: int = 64

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def rotary_pairs(self) -> int:
        return int(self.head_size * 0.75) // 2

    def token(self, text: str) -> int:
        """Id of a special token: its own where the vocabulary holds it, else one at the vocabulary's end."""
        real = SPECIAL_TOKENS[text]
        return real if real < self.vocabulary else self.vocabulary - 1 - list(SPECIAL_TOKENS).index(text)

    def adapter(self, name: str) -> tuple[int, int]:
        """Rank and alpha of an adapter."""
        return getattr(self, f"{name}_rank"), getattr(self, f"{name}_alpha")


class Tensor(NamedTuple):
    """A tensor by its phi4mm name, with the distribution of its values."""

    name: str
    shape: tuple[int, ...]
    mean: float
    deviation: float

    def values(self, seed: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randn(self.shape, generator=generator) * self.deviation + self.mean


def tensors(sizes: Sizes, tied: bool = True) -> Iterator[Tensor]:
    """Every tensor of the checkpoint under its phi4mm name, LoRA included.

    Args:
        sizes: the sizes.
        tied: whether `lm_head` is the embedding; an untied one is a tensor of its own.
    """
    yield Tensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden), 0.0, 0.3)
    yield from _decoder(sizes)
    if not tied:
        yield Tensor("lm_head.weight", (sizes.vocabulary, sizes.hidden), 0.0, 0.3)
    image = "model.embed_tokens_extend.image_embed."
    yield from _vision_tower(image + "img_processor.", sizes)
    yield Tensor(image + "glb_GN", (1, 1, sizes.vision_hidden), 0.0, 1.0)
    yield Tensor(image + "sub_GN", (1, 1, 1, sizes.vision_hidden), 0.0, 1.0)
    yield from _linear(image + "img_projection.0", sizes.vision_hidden, sizes.hidden)
    yield from _linear(image + "img_projection.2", sizes.hidden, sizes.hidden)
    audio = "model.embed_tokens_extend.audio_embed."
    yield from _speech_encoder(audio + "encoder.", sizes)
    for projection in ("speech", "vision"):
        yield from _linear(f"{audio}audio_projection.{projection}.0", sizes.audio_width, sizes.hidden)
        yield from _linear(f"{audio}audio_projection.{projection}.2", sizes.hidden, sizes.hidden)


def _decoder(sizes: Sizes) -> Iterator[Tensor]:
    query, key_value = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    linears = {
        "self_attn.qkv_proj": (query + 2 * key_value, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, query),
        "mlp.gate_up_proj": (2 * sizes.intermediate, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.intermediate),
    }
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{prefix}{norm}.weight", (sizes.hidden,), 1.0, 0.25)
        for linear, (rows, columns) in linears.items():
            yield Tensor(
                f"{prefix}{linear}.base_layer.weight", (rows, columns), 0.0, 1.2 / math.sqrt(columns)
            )
            for adapter in ADAPTERS:
                rank, _ = sizes.adapter(adapter)
                a_shape, b_shape = (rank, columns), (rows, rank)
                yield Tensor(
                    f"{prefix}{linear}.lora_A.{adapter}.weight", a_shape, 0.0, 1 / math.sqrt(columns)
                )
                yield Tensor(f"{prefix}{linear}.lora_B.{adapter}.weight", b_shape, 0.0, 0.4 / math.sqrt(rank))
    yield Tensor("model.norm.weight", (sizes.hidden,), 1.0, 0.25)


def _vision_tower(prefix: str, sizes: Sizes) -> Iterator[Tensor]:
    """SigLIP; the last layer, the post-layernorm and the head are in the file though nothing uses them."""
    hidden, middle = sizes.vision_hidden, sizes.vision_intermediate
    patch = 3 * 14 * 14
    yield Tensor(prefix + "embeddings.patch_embedding.weight", (hidden, 3, 14, 14), 0.0, 1 / math.sqrt(patch))
    yield Tensor(prefix + "embeddings.patch_embedding.bias", (hidden,), 0.0, 0.2)
    yield Tensor(prefix + "embeddings.position_embedding.weight", (32 * 32, hidden), 0.0, 0.5)
    for layer in range(sizes.vision_layers):
        block = f"{prefix}encoder.layers.{layer}."
        yield from _norm(block + "layer_norm1", hidden)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}self_attn.{projection}", hidden, hidden, gain=1.5)
        yield from _norm(block + "layer_norm2", hidden)
        yield from _linear(block + "mlp.fc1", hidden, middle)
        yield from _linear(block + "mlp.fc2", middle, hidden)
    yield from _norm(prefix + "post_layernorm", hidden)
    head = prefix + "head."
    yield Tensor(head + "probe", (1, 1, hidden), 0.0, 1.0)
    yield Tensor(head + "attention.in_proj_weight", (3 * hidden, hidden), 0.0, 1 / math.sqrt(hidden))
    yield Tensor(head + "attention.in_proj_bias", (3 * hidden,), 0.0, 0.2)
    yield from _linear(head + "attention.out_proj", hidden, hidden)
    yield from _norm(head + "layernorm", hidden)
    yield from _linear(head + "mlp.fc1", hidden, middle)
    yield from _linear(head + "mlp.fc2", middle, hidden)


def _speech_encoder(prefix: str, sizes: Sizes) -> Iterator[Tensor]:
    """The conformer: normalisation, 8x subsampling, relative bias and the blocks."""
    width, channels, middle = sizes.audio_width, sizes.conv_channels, sizes.audio_intermediate
    yield Tensor(prefix + "encoder_embedding.global_mean", (sizes.mel_bins,), 0.0, 0.5)
    yield Tensor(prefix + "encoder_embedding.global_invstd", (sizes.mel_bins,), 1.0, 0.2)
    yield from _convolution(prefix + "embed.conv.0", (channels, 1, 3, 3))
    for depthwise, pointwise in ((2, 3), (5, 6)):
        yield from _convolution(f"{prefix}embed.conv.{depthwise}", (channels, 1, 3, 3))
        yield from _convolution(f"{prefix}embed.conv.{pointwise}", (channels, channels, 1, 1))
    yield from _linear(prefix + "embed.out", channels * math.ceil(sizes.mel_bins / 8), width)
    buckets = 2 * 500  # relative positions -500 to 499
    yield Tensor(
        prefix + "relative_attention_bias_layer.bias_values.weight", (buckets, sizes.audio_heads), 0.0, 1.5
    )
    for index in range(sizes.audio_blocks):
        block = f"{prefix}encoders.{index}."
        for feed_forward in ("feed_forward_in", "feed_forward_out"):
            yield from _norm(f"{block}{feed_forward}.layer_norm", width)
            yield from _linear(f"{block}{feed_forward}.net.0.linear", width, 2 * middle)
            yield from _linear(f"{block}{feed_forward}.net.2", middle, width)
        yield from _norm(block + "layer_norm_att", width)
        for projection in ("linear_q", "linear_k", "linear_v", "linear_out"):
            yield from _linear(f"{block}self_attn.{projection}", width, width, gain=1.5)
        conv = block + "conv."
        yield from _norm(conv + "layer_norm", width)
        yield from _convolution(conv + "glu.ext_pw_conv_1d", (2 * width, width, 1))
        yield Tensor(conv + "glu.b1", (1, width, 1), 0.0, 0.3)
        yield Tensor(conv + "glu.b2", (1, width, 1), 0.0, 0.3)
        yield from _convolution(conv + "dw_sep_conv_1d.dw_conv", (width, 1, 3))
        yield from _convolution(conv + "dw_sep_conv_1d.pw_conv", (width, width, 1))
        yield from _convolution(conv + "ext_pw_conv_1d", (width, width, 1))
        yield from _norm(block + "layer_norm", width)


def _linear(name: str, columns: int, rows: int, gain: float = 1.0) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", (rows, columns), 0.0, gain / math.sqrt(columns))
    yield Tensor(name + ".bias", (rows,), 0.0, 0.2)


def _convolution(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", shape, 0.0, 1.3 / math.sqrt(math.prod(shape[1:])))
    yield Tensor(name + ".bias", shape[:1], 0.0, 0.2)


def _norm(name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", (width,), 1.0, 0.25)
    yield Tensor(name + ".bias", (width,), 0.0, 0.2)


_NATIVE_NAMES = (
    ("base_layer.weight", "weight"),
    ("img_projection.0.", "img_projection_up."),
    ("img_projection.2.", "img_projection_down."),
    ("glb_GN", "global_img_feature_extensor"),
    ("sub_GN", "sub_img_feature_extensor"),
    ("audio_projection.speech.0.", "up_proj_for_speech."),
    ("audio_projection.speech.2.", "down_proj_for_speech."),
    ("audio_projection.vision.0.", "up_proj_for_vision_speech."),
    ("audio_projection.vision.2.", "down_proj_for_vision_speech."),
    (".net.0.linear.", ".gate_up_proj."),
    (".net.2.", ".down_proj."),
    ("self_attn.linear_out.", "self_attn.o_proj."),
    ("self_attn.linear_q.", "self_attn.q_proj."),
    ("self_attn.linear_k.", "self_attn.k_proj."),
    ("self_attn.linear_v.", "self_attn.v_proj."),
)
_LORA = re.compile(r"\.lora_([AB])\.(\w+)\.weight$")


def native_name(name: str) -> str:
    """The phi4_multimodal name of a phi4mm tensor; a LoRA tensor's is the one in its adapter's file."""
    for published, native in _NATIVE_NAMES:
        name = name.replace(published, native)
    return re.sub(_LORA, r".lora_\1.weight", name)


def write_checkpoint(
    folder: str | Path,
    layout: str = "phi4mm",
    *,
    seed: int = 0,
    shards: int = 2,
    tied: bool = True,
    save_tied_head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    checkpoint_wrapped: bool = False,
    **sizes: int,
) -> Path:
    """Write a checkpoint; the same seed and sizes give the same weights in both layouts.

    Args:
        folder: where to write; made when missing.
        layout: `phi4mm` (LoRA inside the shards) or `phi4_multimodal` (LoRA in two folders beside them).
        seed: of the values.
        shards: number of files the weights are spread over; 1 gives `model.safetensors` and no index.
        tied: whether `lm_head` is the embedding.
        save_tied_head: write a tied `lm_head` all the same, as some training scripts do.
        dtype: of the stored tensors.
        checkpoint_wrapped: put `_checkpoint_wrapped_module` into the audio blocks' names (phi4mm only).
        sizes: fields of `Sizes`.

    Returns:
        The folder.
    """
    if layout not in ("phi4mm", "phi4_multimodal"):
        raise ValueError(f"layout is {layout!r}, expected phi4mm or phi4_multimodal")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    measures = Sizes(**sizes)
    base: dict[str, torch.Tensor] = {}
    adapters: dict[str, dict[str, torch.Tensor]] = {name: {} for name in ADAPTERS}
    for tensor in tensors(measures, tied):
        values = tensor.values(seed).to(dtype)
        lora = _LORA.search(tensor.name)
        if layout == "phi4mm":
            name = tensor.name
            if checkpoint_wrapped:
                name = re.sub(r"(\.encoders\.\d+)\.", r"\1._checkpoint_wrapped_module.", name)
            base[name] = values
        elif lora:
            adapters[lora.group(2)][f"base_model.model.{native_name(tensor.name)}"] = values
        else:
            base[native_name(tensor.name)] = values
    if tied and save_tied_head:
        base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    _write_shards(folder, base, shards)
    if layout == "phi4mm":
        config = _original_config(measures, tied, dtype)
    else:
        config = _native_config(measures, tied, dtype)
        for adapter in ADAPTERS:
            _write_adapter(folder / f"{adapter}-lora", measures.adapter(adapter), adapters[adapter])
    end, endoftext = measures.token("<|end|>"), measures.token("<|endoftext|>")
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": endoftext, "eos_token_id": [end, endoftext], "pad_token_id": endoftext},
    )
    _write_tokenizer(folder, layout, measures)
    _write_processor(folder, layout)
    return folder


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_shards(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    names = sorted(weights)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(weight.nbytes for weight in weights.values())
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_adapter(folder: Path, rank_and_alpha: tuple[int, int], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    rank, alpha = rank_and_alpha
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": r"model\.layers\.\d+\.(self_attn\.(qkv|o)|mlp\.(gate_up|down))_proj",
        "task_type": "CAUSAL_LM",
    }
    _write_json(folder / "adapter_config.json", config)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _common_config(sizes: Sizes, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What the two layouts' config.json have in common."""
    pairs = sizes.rotary_pairs
    return {
        "attention_dropout": 0.0,
        "bos_token_id": sizes.token("<|endoftext|>"),
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": sizes.max_position,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "original_max_position_embeddings": sizes.original_max_position,
        "pad_token_id": sizes.token("<|endoftext|>"),
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.07 * pair for pair in range(pairs)],
            "long_factor": [1.3 + 1.9 * pair**1.5 for pair in range(pairs)],
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": sizes.vocabulary,
    }


def _original_config(sizes: Sizes, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of microsoft/Phi-4-multimodal-instruct's main branch; no vision size is in it."""
    width = sizes.audio_width
    audio = {
        "activation": "swish",
        "activation_checkpointing": {"interval": 1, "module": "transformer", "offload": False},
        "attention_dim": width,
        "attention_heads": sizes.audio_heads,
        "batch_norm": False,
        "bias_in_glu": True,
        "causal": True,
        "chunk_size": -1,
        "cnn_layer_norm": True,
        "conv_activation": "swish",
        "conv_glu_type": "swish",
        "depthwise_multiplier": 1,
        "depthwise_seperable_out_channel": width,  # so spelled in the published file
        "dropout_rate": 0.0,
        "encoder_embedding_config": {"input_size": sizes.mel_bins},
        "ext_pw_kernel_size": 1,
        "ext_pw_out_channel": width,
        "input_layer": "nemo_conv",
        "input_size": sizes.mel_bins,
        "kernel_size": 3,
        "left_chunk": 18,
        "linear_units": sizes.audio_intermediate,
        "nemo_conv_settings": {"conv_channels": sizes.conv_channels},
        "num_blocks": sizes.audio_blocks,
        "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
        "time_reduction": 8,
    }
    image_layer = {
        "crop_size": 448,
        "embedding_cls": "tune_image",
        "enable_gradient_checkpointing": True,
        "hd_transform_order": "sub_glb",
        "image_token_compression_cls": "avg_pool_2d",
        "projection_cls": "mlp",
        "use_hd_transform": True,
        "with_learnable_separator": True,
    }
    audio_layer = {
        "compression_rate": 8,
        "downsample_rate": 1,
        "embedding_cls": "audio",
        "enable_gradient_checkpointing": True,
        "projection_cls": "mlp",
        "use_conv_downsample": False,
        "use_qformer": False,
    }
    return {
        **_common_config(sizes, tied, dtype),
        "_attn_implementation": "flash_attention_2",
        "architectures": ["Phi4MMForCausalLM"],
        "attention_bias": False,
        "audio_processor": {"config": audio, "name": "cascades"},
        "auto_map": {
            "AutoConfig": "configuration_phi4mm.Phi4MMConfig",
            "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "embd_layer": {
            "audio_embd_layer": audio_layer,
            "embedding_cls": "image_audio",
            "image_embd_layer": image_layer,
        },
        "eos_token_id": sizes.token("<|endoftext|>"),
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "model_type": "phi4mm",
        "speech_lora": {
            "dp": 0.01,
            "layer": r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.(gate_up|down)_proj))",
            "lora_alpha": sizes.speech_alpha,
            "r": sizes.speech_rank,
        },
        "transformers_version": "4.46.1",
        "vision_lora": {
            "dp": 0.0,
            "layer": r"layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))",
            "lora_alpha": sizes.vision_alpha,
            "r": sizes.vision_rank,
        },
    }


def _native_config(sizes: Sizes, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """config.json as transformers' own class reads it."""
    return {
        **_common_config(sizes, tied, dtype),
        "architectures": ["Phi4MultimodalForCausalLM"],
        "audio_config": {
            "audio_token_id": sizes.token("<|endoftext11|>"),
            "bias_max_distance": 500,
            "bias_symmetric": False,
            "chunk_size": -1,
            "depthwise_separable_out_channel": sizes.audio_width,
            "downsample_rate": 1,
            "ext_pw_out_channel": sizes.audio_width,
            "hidden_size": sizes.audio_width,
            "input_size": sizes.mel_bins,
            "intermediate_size": sizes.audio_intermediate,
            "model_type": "phi4_multimodal_audio",
            "nemo_conv_channels": sizes.conv_channels,
            "num_attention_heads": sizes.audio_heads,
            "num_blocks": sizes.audio_blocks,
        },
        "eos_token_id": [sizes.token("<|endoftext|>"), sizes.token("<|end|>")],
        "model_type": "phi4_multimodal",
        "transformers_version": "4.51.3",
        "vision_config": {
            "crop_size": 448,
            "hidden_size": sizes.vision_hidden,
            "image_size": 448,
            "image_token_id": sizes.token("<|endoftext10|>"),
            "intermediate_size": sizes.vision_intermediate,
            "model_type": "phi4_multimodal_vision",
            "num_attention_heads": sizes.vision_heads,
            "num_hidden_layers": sizes.vision_layers,
            "patch_size": 14,
        },
    }


def _write_tokenizer(folder: Path, layout: str, sizes: Sizes) -> None:
    """A byte-level tokenizer: a token per byte, the special tokens, fillers up to the vocabulary's size."""
    special = {sizes.token(text): text for text in SPECIAL_TOKENS}
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Fillers: the library complains about each id that no piece has.
    pieces += [special.get(index, f"<{index}>") for index in range(len(pieces), sizes.vocabulary)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": special[index], **flags} for index in sorted(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): {"content": special[i], **flags} for i in sorted(special)},
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": sizes.max_position,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "GPT2TokenizerFast",
        "unk_token": "<|endoftext|>",
    }
    if layout == "phi4mm":
        config["chat_template"] = CHAT_TEMPLATE
    else:
        config["extra_special_tokens"] = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}
        config["processor_class"] = "Phi4MultimodalProcessor"
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", config)


def _write_processor(folder: Path, layout: str) -> None:
    audio = {"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1}
    if layout == "phi4mm":
        remote = {
            "AutoFeatureExtractor": "processing_phi4mm.Phi4MMAudioFeatureExtractor",
            "AutoImageProcessor": "processing_phi4mm.Phi4MMImageProcessor",
            "AutoProcessor": "processing_phi4mm.Phi4MMProcessor",
        }
        preprocessor = {
            "auto_map": remote,
            **audio,
            "dynamic_hd": 36,
            "feature_extractor_type": "Phi4MMAudioFeatureExtractor",
            "image_processor_type": "Phi4MMImageProcessor",
            "processor_class": "Phi4MMProcessor",
        }
        processor = {
            "auto_map": {"AutoProcessor": remote["AutoProcessor"]},
            "processor_class": "Phi4MMProcessor",
        }
    else:
        preprocessor = {
            **audio,
            "dynamic_hd": 36,
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
            "feature_size": 80,
            "hop_length": 160,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Phi4MultimodalImageProcessorFast",
            "image_std": [0.5, 0.5, 0.5],
            "n_fft": 512,
            "patch_size": 14,
            "preemphasis": 0.97,
            "processor_class": "Phi4MultimodalProcessor",
            "sampling_rate": 16000,
            "size": {"height": 448, "width": 448},
            "win_length": 400,
        }
        processor = {"processor_class": "Phi4MultimodalProcessor"}
    _write_json(folder / "preprocessor_config.json", preprocessor)
    _write_json(folder / "processor_config.json", processor)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--layout", choices=("phi4mm", "phi4_multimodal"), default="phi4mm")
    parser.add_argument("--original-max-position", type=int, default=Sizes.original_max_position)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(
        arguments.folder,
        arguments.layout,
        seed=arguments.seed,
        original_max_position=arguments.original_max_position,
    )


if __name__ == "__main__":
    _main()
