"""`Phi4MMGenerationMixin`: from a batch of prompts to logits, and what `generate` needs between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from onnxruntime import OrtValue
from optimum.utils import logging
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import InputError
from .cache import Phi4MMCache, PromptFeatures, RowGroup
from .encoder_inputs import Pictures, Recordings, as_array, assign


if TYPE_CHECKING:
    from .sessions import Sessions

logger = logging.get_logger(f"optimum.{__name__}")  # below the logger that Optimum configures

__all__ = ["GATES", "Phi4MMGenerationMixin"]

# Gates by what a prompt holds, after which adapter the reference activates.
GATES = {"text": (0.0, 0.0), "speech": (0.0, 1.0), "vision": (1.0, 0.0)}
_MODES = {
    "text": "text only",
    "speech": "audio and no picture",
    "vision": "a picture, with or without audio",
}
_MEDIA = (
    *("image_pixel_values", "image_sizes", "image_attention_mask"),
    *("audio_input_features", "audio_embed_sizes", "audio_attention_mask"),
)


class Phi4MMGenerationMixin(GenerationMixin):
    """Computes with the four sessions of a package; loading them is `ORTModelForPhi4MM`'s.

    Attributes:
        config, device, dtype: as `ORTModel` has them.
        sessions: the four models.
        variant: the package's, "gated", "merged", "vision", "speech" or "text".
        present_names, past_names: the decoder's cache, outputs and inputs in the same order.
    """

    config: Any
    device: torch.device
    dtype: torch.dtype
    sessions: Sessions
    variant: str
    present_names: list[str]
    past_names: list[str]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Phi4MMCache | None = None,
        image_pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        image_attention_mask: Tensor | None = None,
        audio_input_features: Tensor | None = None,
        audio_embed_sizes: Tensor | None = None,
        audio_attention_mask: Tensor | None = None,
        features: PromptFeatures | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the model on a batch of prompts, or on the tokens that follow them.

        Args:
            input_ids: int64 (batch, new tokens), padded on the left, with the placeholders that the processor
                put in.
            attention_mask: int64 (batch, all tokens), 0 where a token is padding; None: none is.
            position_ids: int64 (batch, new tokens); None: counted from the mask.
            past_key_values: of an earlier call, for the tokens before.
            image_pixel_values: F (images, crops, 3, height, width), those of the first row first.
            image_sizes: int64 (images, 2), height and width in pixels.
            image_attention_mask: (images, crops, patches, patches); None: no patch is padding.
            audio_input_features: F (recordings, frames, mel bins), those of the first row first.
            audio_embed_sizes: int64 (recordings,), tokens of each; None: of all its frames.
            audio_attention_mask: bool (recordings, frames); None: no frame is padding.
            features: what `encode` made of the pictures and recordings, in their place.
            use_cache: whether `past_key_values` comes out; None: as in the config.
            logits_to_keep: how many of the last positions get logits; 0 is all.
            return_dict: False gives a tuple, as in transformers.

        Returns:
            `logits` F (batch, positions, vocabulary) and `past_key_values`.

        Raises:
            InputError: inputs that contradict each other, that this variant has no adapter for, or that are
                longer than the model's context.
        """
        given = {name: value for name, value in kwargs.items() if value not in (None, False)}
        given.pop("cache_position", None)  # what is in the cache says as much
        if given:
            raise InputError(f"{', '.join(given)} is no input of {type(self).__name__}")
        ids = as_array(input_ids).astype(np.int64, copy=False)
        if ids.ndim != 2 or not ids.size:
            raise InputError(f"input_ids has shape {list(ids.shape)}, expected (batch, tokens)")
        before = past_key_values.get_seq_length() if past_key_values is not None else 0
        length = before + ids.shape[1]
        if length > self.config.max_position_embeddings:
            raise InputError(
                f"the prompt and its answer have {length} tokens, the model's context holds "
                f"{self.config.max_position_embeddings}"
            )
        mask = np.ones((len(ids), length), np.int64) if attention_mask is None else as_array(attention_mask)
        if mask.shape != (len(ids), length):
            raise InputError(
                f"attention_mask has shape {list(mask.shape)}, expected {[len(ids), length]}: all tokens'"
            )
        mask = mask.astype(np.int64, copy=False)
        if position_ids is None:
            positions = np.maximum(mask.cumsum(1) - 1, 0) * mask
            positions = positions[:, before:]
        else:
            positions = np.broadcast_to(as_array(position_ids), ids.shape).astype(np.int64, copy=False)

        media = {
            "image_pixel_values": image_pixel_values,
            "image_sizes": image_sizes,
            "image_attention_mask": image_attention_mask,
            "audio_input_features": audio_input_features,
            "audio_embed_sizes": audio_embed_sizes,
            "audio_attention_mask": audio_attention_mask,
        }
        if past_key_values is None:
            features = self.encode(ids, **media) if features is None else features
            cache = Phi4MMCache(features, ids, mask, positions)
        else:
            _refuse_late(media)
            old = past_key_values
            cache = Phi4MMCache(
                old.features,
                np.concatenate([old.input_ids, ids], 1),
                mask,
                np.concatenate([old.position_ids, positions], 1),
                old.groups,
            )
        logits = self._decode(cache, ids.shape[1], int(logits_to_keep))
        use_cache = self.config.use_cache if use_cache is None else use_cache
        outputs: dict[str, Any] = {"logits": torch.from_numpy(logits).to(self.device)}
        if use_cache:
            outputs["past_key_values"] = cache
        return CausalLMOutputWithPast(**outputs) if return_dict else tuple(outputs.values())

    def encode(self, input_ids: Any, **media: Any) -> PromptFeatures:
        """Run vision and speech for each prompt's pictures and recordings.

        Args:
            input_ids: int64 (batch, tokens), which say whose each picture and recording is.
            media: the six tensors of pictures and recordings, as in `forward`.

        Raises:
            InputError: there are more or fewer placeholders than the pictures and recordings have tokens, or
                this variant has no adapter for a prompt.
        """
        ids = as_array(input_ids)
        arrays = {name: as_array(media[name]) for name in _MEDIA if media.get(name) is not None}
        images = Pictures(arrays, self.config)
        clips = Recordings(arrays, self.config)
        image_rows = assign("image", ids == self.config.vision_config.image_token_id, images.tokens)
        clip_rows = assign("audio", ids == self.config.audio_config.audio_token_id, clips.tokens)
        modes = [
            "vision" if pictures else "speech" if recordings else "text"
            for pictures, recordings in zip(image_rows, clip_rows, strict=True)
        ]
        for mode in modes:
            if self.variant in GATES and mode != self.variant:
                raise InputError(
                    f"this package's variant is {self.variant}, for prompts with {_MODES[self.variant]}; one "
                    f"has {_MODES[mode]}: export it with --variant gated"
                )
        gates = np.array([GATES[mode] for mode in modes], np.float32).reshape(-1, 2)
        absent = np.zeros((0, self.config.hidden_size), self._numpy_dtype)
        image, speech = [], []
        for pictures, recordings in zip(image_rows, clip_rows, strict=True):
            if pictures:
                (features,) = self.sessions.run("vision", ["image_features"], images.inputs(pictures))
                image.append(features.numpy())
            else:
                image.append(absent)
            if recordings:
                output = "speech_features_for_vision" if pictures else "speech_features"
                (features,) = self.sessions.run("speech", [output], clips.inputs(recordings))
                speech.append(features.numpy())
            else:
                speech.append(absent)
        return PromptFeatures(image, speech, gates)

    def _decode(self, cache: Phi4MMCache, new_tokens: int, logits_to_keep: int) -> np.ndarray:
        """Logits of the newest tokens, (rows, positions, vocabulary); the cache's groups are brought up."""
        num_rows, length = cache.input_ids.shape
        switch = self.config.original_max_position_embeddings
        if self.config.rope_scaling is None:
            past_switch = np.zeros(num_rows, bool)
        else:
            past_switch = cache.position_ids[:, -new_tokens:].max(1) + 1 > switch
        keep = min(logits_to_keep, new_tokens) or new_tokens
        logits: np.ndarray | None = None
        groups: dict[bool, list[RowGroup]] = {False: [], True: []}
        for side in (False, True):
            rows = [row for row in range(num_rows) if past_switch[row] == side]
            group = cache.groups.get(side)
            known = [row for row in rows if group is not None and row in group.rows]
            # Keys of the other side were rotated by other factors: such a row starts again.
            fresh = [row for row in rows if row not in known]
            for part, count in ((known, new_tokens), (fresh, length)):
                if not part:
                    continue
                if part is known and group is not None:
                    past: Sequence[Any] = group.select(part)
                else:
                    past = [self._no_past(len(part))] * len(self.past_names)
                inputs = {
                    "inputs_embeds": self._embed(cache, part, count),
                    "attention_mask": cache.attention_mask[part],
                    "position_ids": cache.position_ids[part, -count:],
                    "logits_to_keep": np.array([keep], np.int64),
                    **dict(zip(self.past_names, past, strict=True)),
                }
                if self.variant == "gated":
                    inputs["adapter_gates"] = cache.features.gates[part]
                found, *present = self.sessions.run("model", ["logits", *self.present_names], inputs)
                if len(part) == num_rows:
                    logits = found.numpy()
                else:
                    if logits is None:
                        logits = np.empty((num_rows, *found.shape()[1:]), self._numpy_dtype)
                    logits[part] = found.numpy()
                groups[side].append(RowGroup(part, present))
        cache.groups = {side: _joined(parts) for side, parts in groups.items() if parts}
        assert logits is not None  # there is a row
        return logits

    def _embed(self, cache: Phi4MMCache, rows: list[int], count: int) -> np.ndarray:
        """Embeddings of some rows' newest tokens, (rows, count, hidden)."""
        features = cache.features.select(rows)
        ids = cache.input_ids[rows, -count:]
        whole = count == cache.input_ids.shape[1]  # the prompt's placeholders are in it, at the beginning
        inputs = {"input_ids": ids}
        for name, known, token_id in (
            ("image_features", features.image, self.config.vision_config.image_token_id),
            ("speech_features", features.speech, self.config.audio_config.audio_token_id),
        ):
            parts = [np.zeros((0, self.config.hidden_size), self._numpy_dtype)]
            for row, places in enumerate((ids == token_id).sum(1)):
                own = known[row] if whole else known[row][:0]
                parts.append(own)
                if places > len(own):  # the answer has placeholders: they stand for themselves, as any token
                    parts.append(np.repeat(self._token_embedding(token_id), places - len(own), axis=0))
            inputs[name] = np.concatenate(parts)
        return self.sessions.run("embedding", ["inputs_embeds"], inputs)[0].numpy()

    def _token_embedding(self, token_id: int) -> np.ndarray:
        """A placeholder's own row of the embedding table, (1, hidden); the graph always replaces it."""
        table = ir.load(self.sessions.locate("embedding")).graph.initializers["embedding.embed_tokens.weight"]
        assert table.const_value is not None  # mapped from the file, not read
        return np.array(table.const_value.numpy()[token_id][None])

    def _no_past(self, num_rows: int) -> np.ndarray:
        head_size = self.config.hidden_size // self.config.num_attention_heads
        return np.zeros((num_rows, self.config.num_key_value_heads, 0, head_size), self._numpy_dtype)

    @property
    def _numpy_dtype(self) -> Any:
        return np.float16 if self.dtype == torch.float16 else np.float32

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Phi4MMCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` gives to `forward` in its next step."""
        kept = ("features", "use_cache", "logits_to_keep")
        inputs = {name: kwargs[name] for name in kept if name in kwargs}
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            **inputs,
        }

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but an answer ends where the context does; its last token needs no place."""
        generation_config = super()._prepare_generated_length(*args, **kwargs)
        limit = self.config.max_position_embeddings + 1
        if generation_config.max_length > limit:
            logger.warning(
                f"The answer will end at {limit} tokens, prompt included: the context is full then."
            )
            generation_config.max_length = limit
        return generation_config

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Any = None,
        **model_kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Encode each prompt's pictures and recordings once, then repeat rows for beams and samples.

        The stock method repeats these tensors item by item, which mixes up several pictures of one prompt.
        """
        media = {name: model_kwargs.pop(name) for name in _MEDIA if name in model_kwargs}
        if model_kwargs.get("past_key_values") is not None:
            _refuse_late(media)
        elif "features" not in model_kwargs:
            limit = self.config.max_position_embeddings
            if input_ids.shape[1] > limit:
                raise InputError(
                    f"the prompt has {input_ids.shape[1]} tokens, the model's context holds {limit}"
                )
            features = self.encode(input_ids, **media)
            rows = [row for row in range(len(input_ids)) for _ in range(expand_size)]
            model_kwargs["features"] = features.select(rows)
        return super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )


def _refuse_late(media: dict[str, Any]) -> None:
    late = [name for name, value in media.items() if value is not None]
    if late:
        raise InputError(
            f"{', '.join(late)} came with past_key_values, but a cache goes on with text only: give the "
            "whole prompt without it"
        )


def _joined(parts: list[RowGroup]) -> RowGroup:
    """One group of rows that were run apart."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in part.rows]
    pasts = zip(*(part.past for part in parts), strict=True)
    return RowGroup(
        rows, [OrtValue.ortvalue_from_numpy(np.concatenate([x.numpy() for x in past])) for past in pasts]
    )
