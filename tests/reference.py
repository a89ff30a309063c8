"""What transformers computes for each component, and the same inputs as the exported graphs take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from peft.tuners.lora import LoraLayer
from transformers import DynamicCache, Phi4MultimodalForCausalLM
from transformers.models.phi4_multimodal import modeling_phi4_multimodal


__all__ = [
    "AUDIO_TOKEN",
    "IMAGE_TOKEN",
    "ROOMY",
    "Decoded",
    "Differences",
    "Images",
    "Reference",
    "clip_tokens",
    "evaluate",
    "left_padded",
    "load_reference",
    "make_clips",
    "make_images",
    "make_plain_images",
    "positions",
    "relative_difference",
    "token_ids",
    "typical_difference",
]

IMAGE_TOKEN = 200010
AUDIO_TOKEN = 200011
CROP = 448
PATCHES = 32  # per side of a crop
ROOMY = 8192  # an original_max_position_embeddings that no test's prompt reaches
_CROPS_AT_A_TIME = 4  # bounds the memory of eager attention; crops don't see each other


def relative_difference(found: np.ndarray | torch.Tensor, expected: np.ndarray | torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude expected; infinite where not both finite."""
    found, expected = (np.asarray(array, dtype=np.float64) for array in (found, expected))
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    assert expected.size, "nothing to compare"
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    return float(difference) if np.isfinite(difference) else float("inf")


def typical_difference(found: np.ndarray | torch.Tensor, expected: np.ndarray | torch.Tensor) -> float:
    """Root mean square of the differences over that of the values expected."""
    found, expected = (np.asarray(array, dtype=np.float64) for array in (found, expected))
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


class Differences:
    """The differences to the reference that the tests found, for the table at the end of the run."""

    def __init__(self) -> None:
        self.largest: dict[tuple[str, str], tuple[float, float]] = {}

    def record(self, component: str, case: str, difference: float, bound: float) -> None:
        """Keep a difference for the table and assert that it is within its bound.

        Args:
            component: `vision`, `speech`, `embedding`, `decoder` or `end to end`.
            case: what was compared.
            difference: largest relative difference, see `reference.relative_difference`.
            bound: what it may be.
        """
        self.keep(component, case, float(difference), float(bound))
        assert difference <= bound, (
            f"{component}, {case}: differs by {difference:.3g}, the bound is {bound:.3g}"
        )

    def keep(self, component: str, case: str, difference: float, bound: float) -> None:
        """Keep the larger of this difference and the known one; one that is no number is the largest."""
        known = self.largest.get((component, case), (-1.0, bound))
        if not difference <= known[0]:
            self.largest[component, case] = (difference, bound)

    def table(self) -> list[str]:
        """Rows of the table, its heading first."""
        rows = [("component", "case", "largest relative difference", "bound")]
        rows += [
            (component, case, f"{difference:.2e}", f"{bound:.2e}")
            for (component, case), (difference, bound) in sorted(self.largest.items())
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]


def evaluate(path: Path, inputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Outputs in fp32 of a bfloat16 graph, each operator computed in fp32 and its result rounded.

    ONNX Runtime's CPU provider has few bfloat16 kernels, and onnx's own evaluator sums in bfloat16.
    """
    model = onnx.load(path)
    graph = model.graph
    half, single = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    values = onnx.shape_inference.infer_shapes(model).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in (*values, *graph.input, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    widened: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []

    def cast(source: str, target: str, kind: int) -> str:
        nodes.append(onnx.helper.make_node("Cast", [source], [target], to=kind))
        return target

    def wide(name: str) -> str:
        if types.get(name) == half and name not in widened:
            widened[name] = cast(name, f"{name}/wide", single)
        return widened.get(name, name)

    for value in (value for value in graph.input if types[value.name] == half):
        value.type.tensor_type.elem_type = single
        widened[value.name] = cast(cast(value.name, f"{value.name}/half", half), f"{value.name}/wide", single)
    for node in graph.node:
        assert not [attribute for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
        node.input[:] = [wide(name) for name in node.input]
        nodes.append(node)
        made_half = node.op_type in ("Cast", "Constant", "ConstantOfShape")
        for index, name in enumerate(node.output):
            if types.get(name) == half and not made_half:
                node.output[index] = f"{name}/exact"
                cast(node.output[index], name, half)
    for value in (value for value in graph.output if types[value.name] == half):
        value.type.tensor_type.elem_type = single
        value.name = wide(value.name)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    running = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    arrays = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in inputs.items()
    }
    names = [value.name for value in graph.output]
    outputs = running.run(names, arrays)
    return {name.removesuffix("/wide"): output for name, output in zip(names, outputs, strict=True)}


def token_ids(count: int, seed: int) -> torch.Tensor:
    """Random ordinary tokens, INT64 [1, count]."""
    return torch.randint(300, 199000, (1, count), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Align rows at the right, as transformers' `generate` wants them.

    Args:
        rows: tensors of shape [1, length, ...].

    Returns:
        The padded rows, the attention mask and the position ids `generate` would compute from it.
    """
    longest = max(row.shape[1] for row in rows)
    missing = [longest - row.shape[1] for row in rows]
    padding = [row.new_zeros(1, count, *row.shape[2:]) for row, count in zip(rows, missing, strict=True)]
    padded = torch.cat([torch.cat(parts, 1) for parts in zip(padding, rows, strict=True)])
    mask = torch.stack([(torch.arange(longest) >= count).long() for count in missing])
    return padded, mask, positions(mask)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position ids of a left padded batch; padding has 1, as in `generate`."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


@dataclass(frozen=True)
class Images:
    """Images as transformers' processor gives them.

    Args:
        pixel_values: float [images, 1 + most sub-crops, 3, 448, 448]; smaller images end in crops of zeros.
        sizes: INT64 [images, 2], height and width after HD padding.
        mask: float [images, 1 + most sub-crops, 32, 32]; global view and crops of zeros are all valid.
    """

    pixel_values: torch.Tensor
    sizes: torch.Tensor
    mask: torch.Tensor

    @property
    def crops(self) -> list[int]:
        """Crops of each image, its global view included."""
        return [1 + int(height // CROP * (width // CROP)) for height, width in self.sizes]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each image, by the formula of transformers' image processor."""
        counts = []
        for (height, width), mask in zip(self.sizes, self.mask, strict=True):
            rows, columns = int(height // CROP), int(width // CROP)
            grid = mask[1 : 1 + rows * columns, ::2, ::2].reshape(rows, columns, 16, 16).transpose(1, 2)
            grid = grid.reshape(rows * 16, columns * 16)
            counts.append(int(256 + 1 + grid.sum() + grid[:, 0].sum() + 16))
        return counts

    def contract(self, mask: bool = True, dtype: type = np.float32) -> dict[str, np.ndarray]:
        """Inputs of vision.onnx: the images' crops one after another, no crops of zeros."""
        inputs = {
            "pixel_values": _flatten(self.pixel_values, self.crops).astype(dtype),
            "image_sizes": self.sizes.numpy(),
        }
        if mask:
            inputs["image_attention_mask"] = _flatten(self.mask, self.crops).astype(bool)
        return inputs

    def unmasked(self) -> Images:
        """The same images with every patch valid."""
        return replace(self, mask=torch.ones_like(self.mask))


def _flatten(values: torch.Tensor, crops: Sequence[int]) -> np.ndarray:
    return torch.cat([row[:count] for row, count in zip(values, crops, strict=True)]).numpy()


def _pixels(count: int, generator: torch.Generator) -> torch.Tensor:
    """Crops with structure from patch to patch and noise in them, in [-1, 1]."""
    coarse = torch.rand(count, 3, PATCHES, PATCHES, generator=generator) * 1.4 - 0.7
    fine = torch.rand(count, 3, CROP, CROP, generator=generator) * 0.6 - 0.3
    return coarse.repeat_interleave(14, 2).repeat_interleave(14, 3) + fine


def make_images(
    grids: Sequence[tuple[int, int]], padding: Sequence[tuple[int, int]] | None = None, seed: int = 0
) -> Images:
    """Random images.

    Args:
        grids: rows and columns of sub-crops of each image.
        padding: patches at the bottom and at the right of each image that are padding, 0 to 31; default none.
        seed: of the pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    padding = padding or [(0, 0)] * len(grids)
    most = 1 + max(rows * columns for rows, columns in grids)
    pixel_values = torch.zeros(len(grids), most, 3, CROP, CROP)
    mask = torch.ones(len(grids), most, PATCHES, PATCHES)
    for index, ((rows, columns), (bottom, right)) in enumerate(zip(grids, padding, strict=True)):
        count = rows * columns
        pixel_values[index, : 1 + count] = _pixels(1 + count, generator)
        whole = torch.ones(rows * PATCHES, columns * PATCHES)
        whole[rows * PATCHES - bottom :] = 0
        whole[:, columns * PATCHES - right :] = 0
        parts = whole.reshape(rows, PATCHES, columns, PATCHES).transpose(1, 2)
        mask[index, 1 : 1 + count] = parts.reshape(count, PATCHES, PATCHES)
    sizes = torch.tensor([(rows * CROP, columns * CROP) for rows, columns in grids])
    return Images(pixel_values, sizes, mask)


def make_plain_images(count: int, padding: Sequence[tuple[int, int]] | None = None, seed: int = 0) -> Images:
    """Images of one crop that serves as global view and as sub-crop, with one mask for both views."""
    images = make_images([(1, 1)] * count, padding, seed)
    pixel_values = images.pixel_values[:, :1].expand(-1, 2, -1, -1, -1)
    return replace(images, pixel_values=pixel_values, mask=images.mask[:, 1:].expand(-1, 2, -1, -1))


def make_clips(frames: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random log-mel features of clips of these lengths.

    Returns:
        Features float [clips, longest, 80], zeros where there is padding, and mask BOOL [clips, longest].
    """
    generator = torch.Generator().manual_seed(seed)
    longest = max(frames)
    mask = torch.arange(longest)[None] < torch.tensor(list(frames))[:, None]
    slow = torch.randn(len(frames), -(-longest // 5), 80, generator=generator).repeat_interleave(5, 1)[
        :, :longest
    ]
    fast = torch.randn(len(frames), longest, 80, generator=generator)
    return (slow + 0.5 * fast) * mask[..., None], mask


def clip_tokens(frames: int) -> int:
    return -(-frames // 8)


@dataclass(frozen=True)
class Decoded:
    """Logits [batch, kept, vocabulary] and the cache as key, value per layer."""

    logits: torch.Tensor
    cache: list[tuple[torch.Tensor, torch.Tensor]]


class Reference:
    """transformers' model with both PEFT adapters loaded and eager attention in every part."""

    def __init__(self, model: Phi4MultimodalForCausalLM) -> None:
        self.model = model
        self.config = model.config
        self._extend = model.model.embed_tokens_extend

    @contextmanager
    def adapter(self, setting: str | tuple[float, float] | None) -> Iterator[None]:
        """Choose what runs beside the base weights.

        Args:
            setting: `vision`, `speech`, `both`, None for neither, or a factor for each of the two.
        """
        if setting is None:
            self.model.disable_adapters()
            yield
            self.model.enable_adapters()
            return
        self.model.enable_adapters()
        names = ["vision", "speech"] if not isinstance(setting, str) or setting == "both" else setting
        self.model.set_adapter(names)
        if isinstance(setting, str):
            yield
            return
        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        scales = [dict(layer.scaling) for layer in layers]
        try:
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling = {
                    "vision": scale["vision"] * setting[0],
                    "speech": scale["speech"] * setting[1],
                }
            yield
        finally:
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling = scale

    @torch.inference_mode()
    def image_features(self, images: Images) -> torch.Tensor:
        """Features [sum of the images' tokens, hidden] of `Phi4MultimodalImageEmbedding.forward`."""
        embed = self._extend.image_embed
        whole = embed.get_img_features

        def in_pieces(crops: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            pieces = zip(crops.split(_CROPS_AT_A_TIME), attention_mask.split(_CROPS_AT_A_TIME), strict=True)
            return torch.cat([whole(crop, attention_mask=mask) for crop, mask in pieces])

        embed.get_img_features = in_pieces
        try:
            input_ids = torch.full((1, sum(images.tokens)), IMAGE_TOKEN)
            slots = torch.zeros(1, input_ids.shape[1], self.config.hidden_size, dtype=self.model.dtype)
            return embed(input_ids, slots, images.pixel_values, images.sizes, images.mask)[0]
        finally:
            del embed.get_img_features

    @torch.inference_mode()
    def speech_features(
        self,
        features: torch.Tensor,
        frames: Sequence[int],
        mask: torch.Tensor | None,
        projection: str = "speech",
    ) -> torch.Tensor:
        """Features [sum of the clips' tokens, hidden] of `Phi4MultimodalAudioEmbedding.forward`.

        Args:
            features: float [clips, longest, 80].
            frames: valid frames of each clip.
            mask: BOOL [clips, longest], or None as the processor gives it for a single clip.
            projection: `speech`, or `vision` as in the presence of an image.
        """
        sizes = [clip_tokens(count) for count in frames]
        input_ids = torch.full((1, sum(sizes)), AUDIO_TOKEN)
        slots = torch.zeros(1, input_ids.shape[1], self.config.hidden_size, dtype=self.model.dtype)
        with _unfolding_several_clips():
            return self._extend.audio_embed(input_ids, slots, features, sizes, mask, projection)[0]

    @torch.inference_mode()
    def text_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.model.embed_tokens(input_ids)

    @torch.inference_mode()
    def embeddings(
        self,
        input_ids: torch.Tensor,
        images: Images | None = None,
        clips: tuple[torch.Tensor, Sequence[int], torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """Merged embeddings [batch, seq_len, hidden] of `Phi4MultimodalFeatureEmbedding.forward`."""
        inputs: dict[str, object] = {}
        if images is not None:
            inputs.update(
                image_pixel_values=images.pixel_values,
                image_sizes=images.sizes,
                image_attention_mask=images.mask,
            )
        if clips is not None:
            features, frames, mask = clips
            sizes = [clip_tokens(count) for count in frames]
            inputs.update(audio_input_features=features, audio_embed_sizes=sizes, audio_attention_mask=mask)
        with _unfolding_several_clips():
            return self._extend(input_ids, self.text_embeddings(input_ids), **inputs)

    @torch.inference_mode()
    def decode(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        adapter: str | tuple[float, float] | None = "both",
        logits_to_keep: int = 0,
    ) -> Decoded:
        """Logits and cache of the decoder after one call, with or without a cache before it."""
        batch, length = inputs_embeds.shape[:2]
        past = cache[0][0].shape[2] if cache else 0
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + length, dtype=torch.long)
        if position_ids is None:
            position_ids = positions(attention_mask)[:, past:]
        state = DynamicCache(config=self.config)
        for layer, (key, value) in enumerate(cache):
            state.update(key, value, layer)
        with self.adapter(adapter):
            output = self.model(
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=state,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        layers = output.past_key_values.layers
        return Decoded(output.logits, [(layer.keys, layer.values) for layer in layers])


@contextmanager
def _unfolding_several_clips() -> Iterator[None]:
    """Let several clips past 500 tokens through: `unfold_tensor` with `reshape` where it says `view`."""

    def unfold(tensor: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        clips, length, width = tensor.shape  # a multiple of max_seq_len here
        return tensor.reshape(clips * (length // max_seq_len), max_seq_len, width)

    original = modeling_phi4_multimodal.unfold_tensor
    modeling_phi4_multimodal.unfold_tensor = unfold
    try:
        yield
    finally:
        modeling_phi4_multimodal.unfold_tensor = original


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Reference:
    """Load transformers' model and its adapters from a checkpoint in the phi4_multimodal layout.

    The subfolder's own path is given to `load_adapter`, which can't find a subfolder of a local folder.
    """
    model = Phi4MultimodalForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for adapter in ("vision", "speech"):
        model.load_adapter(str(folder / f"{adapter}-lora"), adapter_name=adapter)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # PEFT keeps adapters of half precision models in fp32
            parameter.data = parameter.data.to(dtype)
    assert {config._attn_implementation for config in _configs(model)} == {"eager"}
    return Reference(model.eval())


def _configs(model: Phi4MultimodalForCausalLM) -> list:
    return [model.config, model.config.vision_config, model.config.audio_config]
