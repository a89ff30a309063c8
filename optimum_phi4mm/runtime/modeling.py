"""`ORTModelForPhi4MM`: an exported package as a model of Optimum that generates."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from huggingface_hub import HfApi, hf_hub_download
from onnxruntime import OrtValue, SessionOptions
from optimum.onnxruntime import ORTModel
from optimum.onnxruntime.utils import (
    get_provider_for_device,
    parse_device,
    prepare_providers_and_provider_options,
    validate_provider_availability,
)
from torch import Tensor
from transformers import AutoModelForImageTextToText, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ..checkpoint import HUB_OPTIONS
from ..errors import InputError, PackageError
from .cache import Phi4MMCache, PromptFeatures, RowGroup
from .encoder_inputs import Pictures, Recordings, as_array, assign
from .sessions import COMPONENTS, Sessions


__all__ = ["ORTModelForPhi4MM"]

# Gates by what a prompt holds, after which adapter the reference activates.
_GATES = {"text": (0.0, 0.0), "speech": (0.0, 1.0), "vision": (1.0, 0.0)}
_MODES = {
    "text": "text only",
    "speech": "audio and no picture",
    "vision": "a picture, with or without audio",
}
_SMALL_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "README.md"),
    *("vision.onnx_adapter", "speech.onnx_adapter", "text.onnx_adapter"),
)
_MEDIA = (
    *("image_pixel_values", "image_sizes", "image_attention_mask"),
    *("audio_input_features", "audio_embed_sizes", "audio_attention_mask"),
)

# transformers' pipelines look a model's class up by name in this table; the key is no model type of theirs.
MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["phi4mm_onnx"] = "ORTModelForPhi4MM"


class ORTModelForPhi4MM(ORTModel, GenerationMixin):
    """Phi-4-multimodal exported by this package, in the place of transformers' `Phi4MultimodalForCausalLM`.

    Its inputs are those of transformers' model, as `Phi4MMProcessor` and `Phi4MultimodalProcessor` give
    them. `vision.onnx` and `speech.onnx` are loaded when a prompt first needs them, and run once per prompt.
    Each row of a batch gets the adapter and the speech projection that its own content asks for, for the
    whole generation; rows on different sides of the LongRoPE switch are run apart.
    """

    model_type = "phi4mm_onnx"
    auto_model_class = AutoModelForImageTextToText
    main_input_name = "input_ids"
    # No cache that generate could cut back to an earlier token: assisted generation is refused.
    _is_stateful = True
    _supports_cache_class = False

    def __init__(
        self,
        *,
        config: Any,
        sessions: Sessions,
        file: Callable[[str], Path],
        use_io_binding: bool | None = None,
        generation_config: GenerationConfig | None = None,
        model_save_dir: str | Path | TemporaryDirectory | None = None,
    ) -> None:
        self.sessions = sessions
        self._file = file  # gives the path of one of the package's files, after a download where need be
        super().__init__(
            config=config,
            session=sessions["model"],
            use_io_binding=use_io_binding,
            model_save_dir=model_save_dir,
        )
        self.generation_config = generation_config or GenerationConfig.from_model_config(config)
        self.variant = self.session.get_modelmeta().custom_metadata_map.get("phi4mm.variant")
        if self.variant not in ("gated", "merged", *_GATES):
            raise PackageError(
                f"{self.path} has variant {self.variant!r}: it was not written by this exporter"
            )
        self.present_names = [name for name in self.output_names if name.startswith("present.")]
        self.past_names = [name.replace("present.", "past_key_values.") for name in self.present_names]

    @classmethod
    def _from_pretrained(
        cls,
        model_id: str | Path,
        config: Any,
        subfolder: str = "",
        revision: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        cache_dir: str | Path | None = None,
        token: bool | str | None = None,
        provider: str = "CPUExecutionProvider",
        providers: Sequence[str] | None = None,
        provider_options: Sequence[dict[str, Any]] | dict[str, Any] | None = None,
        session_options: SessionOptions | None = None,
        use_io_binding: bool | None = None,
        use_cache: bool = True,
        generation_config: GenerationConfig | None = None,
        model_save_dir: str | Path | TemporaryDirectory | None = None,
    ) -> ORTModelForPhi4MM:
        hub_options: dict[str, Any] = {
            "revision": revision,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "cache_dir": cache_dir,
            "token": token,
        }

        def file(name: str) -> Path:
            """One of the package's files, downloaded where the package is on the Hub."""
            if Path(model_id).is_dir():
                return Path(model_id) / subfolder / name
            return Path(hf_hub_download(str(model_id), name, subfolder=subfolder or None, **hub_options))

        def locate(name: str) -> Path:
            try:
                paths = [file(f"{name}.onnx"), file(f"{name}.onnx_data")]
            except (OSError, ValueError) as error:
                raise PackageError(f"{model_id} has no {name}.onnx that can be loaded: {error}") from error
            for path in paths:
                if not path.is_file():
                    raise PackageError(f"{path} does not exist: the package is incomplete, export it again")
            return paths[0]

        if generation_config is None:
            try:
                generation_config = GenerationConfig.from_pretrained(file("generation_config.json").parent)
            except OSError:  # there is none; the config's own ids do
                generation_config = GenerationConfig.from_model_config(config)
        generation_config.use_cache = use_cache
        try:
            names, options = prepare_providers_and_provider_options(
                provider=provider, providers=providers, provider_options=provider_options
            )
        except ValueError as error:  # names the available ones
            raise InputError(str(error)) from error
        sessions = Sessions(locate, names, options, session_options)
        return cls(
            config=config,
            sessions=sessions,
            file=file,
            use_io_binding=use_io_binding,
            generation_config=generation_config,
            model_save_dir=model_save_dir or locate("model").parent,
        )

    @classmethod
    def _export(
        cls,
        model_id: str | Path,
        config: Any,
        trust_remote_code: bool = False,
        variant: str = "default",
        dtype: str = "fp32",
        **kwargs: Any,
    ) -> ORTModelForPhi4MM:
        """Export into a temporary folder that lives as long as the model, and load it from there."""
        from ..registration import export

        hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        folder = TemporaryDirectory()
        export(model_id, folder.name, variant=variant, dtype=dtype, do_validation=False, **hub_options)
        config = cls.config_class.from_pretrained(folder.name)
        return cls._from_pretrained(folder.name, config, model_save_dir=folder, **kwargs)

    @property
    def use_io_binding(self) -> bool:
        """Whether ONNX Runtime writes outputs to its own device, where the next step reads them."""
        return bool(self._use_io_binding)

    @use_io_binding.setter
    def use_io_binding(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError("`use_io_binding` should be a boolean value.")
        self._use_io_binding = self.sessions.use_io_binding = value

    def initialize_ort_attributes(self, session: Any, use_io_binding: bool | None = None) -> None:
        """As in optimum; the other sessions follow the decoder's."""
        super().initialize_ort_attributes(session, use_io_binding)
        self.sessions.use_io_binding = bool(self._use_io_binding)

    def to(self, *args: Any, **kwargs: Any) -> ORTModelForPhi4MM:
        """Run on another device's provider from now on, as in optimum; a dtype changes nothing."""
        device = kwargs.get("device", next((arg for arg in args if not isinstance(arg, torch.dtype)), None))
        if device is None:
            return self
        device, options = parse_device(torch.device(device) if isinstance(device, int) else device)
        if device != self.device:
            provider = get_provider_for_device(device)
            validate_provider_availability(provider)
            self.sessions.move(provider, options)
            self._device = device
            if provider == "CUDAExecutionProvider":
                self.use_io_binding = True
        return self

    def can_generate(self) -> bool:
        """Always."""
        return True

    def release(self) -> None:
        """Free the memory of `vision.onnx` and `speech.onnx`; they are loaded again when needed."""
        self.sessions.release("vision", "speech")

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
            if self.variant in _GATES and mode != self.variant:
                raise InputError(
                    f"this package's variant is {self.variant}, for prompts with {_MODES[self.variant]}; one "
                    f"has {_MODES[mode]}: export it with --variant gated"
                )
        gates = np.array([_GATES[mode] for mode in modes], np.float32).reshape(-1, 2)
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

    def _save_config(self, save_directory: str | Path) -> None:
        """Written with the other files."""

    def _save_pretrained(self, save_directory: str | Path) -> None:
        target = Path(save_directory)
        for path in self._package_files():
            if not (target / path.name).exists() or not path.samefile(target / path.name):
                shutil.copyfile(path, target / path.name)
        self.generation_config.save_pretrained(target)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload Phi-4-multimodal for ONNX Runtime",
        create_pr: bool = False,
    ) -> str:
        """Upload the whole package in one commit, with its model card.

        Args:
            repo_id: the repository's id; it is made if it doesn't exist.
            private, token, revision, commit_message, create_pr: as in `huggingface_hub.HfApi`.

        Returns:
            The commit's URL.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        files = self._package_files()
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=files[0].parent,
            allow_patterns=[path.name for path in files],
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )
        return str(commit)

    def _package_files(self) -> list[Path]:
        """The whole package; what is still on the Hub is downloaded."""
        files = [self.sessions.locate(name) for name in COMPONENTS]
        files += [path.with_name(f"{path.name}_data") for path in files]
        for name in _SMALL_FILES:
            try:
                path = self._file(name)
            except OSError:  # this package has none
                continue
            if path.is_file():
                files.append(path)
        return files


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
