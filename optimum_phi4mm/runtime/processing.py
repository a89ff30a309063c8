"""Prompts with pictures and recordings to the model's inputs: the processor."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BatchFeature, Phi4MultimodalConfig, Phi4MultimodalFeatureExtractor
from transformers.processing_utils import ProcessorMixin

from ..checkpoint import HUB_OPTIONS, download
from ..configuration import is_phi4mm, read_config, read_json
from ..errors import CheckpointError, InputError
from .image_processing import Phi4MMImageProcessor
from .media import is_samples, load_audio


__all__ = ["Phi4MMProcessor"]

_FILES = ("*.json", "*.jinja", "merges.txt")
_NOT_FILES = ("*/*", "*.index.json")
_PREPROCESSOR = "preprocessor_config.json"
_MARKER = re.compile(r"<\|(image|audio)_(\d{1,9})\|>")


class Phi4MMProcessor(ProcessorMixin):
    """Tokenizer, image processor and audio feature extractor in one, with the outputs of transformers'
    `Phi4MultimodalProcessor`; needs neither torchvision nor a repository's Python.

    Args:
        image_processor: for pictures.
        audio_processor: transformers' feature extractor, for recordings.
        tokenizer: with the attributes `image_token` and `audio_token`.
        chat_template: Jinja template; None is the tokenizer's.
    """

    image_processor: Phi4MMImageProcessor
    audio_processor: Phi4MultimodalFeatureExtractor
    tokenizer: Any
    chat_template: str | None

    attributes = ("image_processor", "audio_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    audio_processor_class = "AutoFeatureExtractor"
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self, image_processor: Any, audio_processor: Any, tokenizer: Any, chat_template: str | None = None
    ) -> None:
        super().__init__(
            image_processor,
            audio_processor,
            tokenizer,
            chat_template=chat_template or getattr(tokenizer, "chat_template", None),
        )
        self.image_token, self.audio_token = tokenizer.image_token, tokenizer.audio_token
        self.image_token_id, self.audio_token_id = tokenizer.image_token_id, tokenizer.audio_token_id

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Phi4MMProcessor:
        """Read a processor from a package or from a checkpoint in either layout.

        Args:
            pretrained_model_name_or_path: a folder or a Hub id; of a repository only the small files are
                downloaded.
            kwargs: `subfolder`, `revision`, `cache_dir`, `token`, `local_files_only` and `force_download` as
                in transformers. `trust_remote_code` has no effect: no code is needed. Others go to the
                tokenizer.

        Raises:
            CheckpointError: a file is missing or malformed, or belongs to another model.
        """
        kwargs.pop("trust_remote_code", None)
        hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        folder = download(pretrained_model_name_or_path, _FILES, _NOT_FILES, **hub_options)
        raw = read_config(folder) if (folder / "config.json").is_file() else None  # a processor saved alone
        settings = read_json(folder / _PREPROCESSOR) if (folder / _PREPROCESSOR).is_file() else {}
        for key in ("auto_map", "processor_class", "image_processor_type", "feature_extractor_type"):
            settings.pop(key, None)
        if not (folder / "tokenizer_config.json").is_file():
            raise CheckpointError(f"{folder} has no tokenizer_config.json: it holds no processor")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **kwargs)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder} has no tokenizer that can be read: {error}") from error
        if not hasattr(tokenizer, "image_token"):
            # The original layout's placeholders are in no file of it; they are the native config's defaults.
            native: dict[str, Any] = {"vision_config": {}, "audio_config": {}}
            config = Phi4MultimodalConfig.from_dict(native if raw is None or is_phi4mm(raw) else raw)
            ids = (config.vision_config.image_token_id, config.audio_config.audio_token_id)
            image_token, audio_token = tokenizer.convert_ids_to_tokens(list(ids))
            tokenizer._set_model_specific_special_tokens(
                {"image_token": image_token, "audio_token": audio_token}
            )
        try:
            image_processor = Phi4MMImageProcessor(**settings)
            audio_processor = Phi4MultimodalFeatureExtractor(**settings)
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / _PREPROCESSOR} is malformed: {error}") from error
        return cls(image_processor, audio_processor, tokenizer)

    def save_pretrained(
        self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any
    ) -> list[str]:
        """Write the native processor files, which transformers' own classes read, too.

        Args:
            save_directory: a folder; it is made if need be.
            push_to_hub: whether the folder is uploaded as well, with `repo_id` and what else
                `transformers.utils.PushToHubMixin.push_to_hub` takes.

        Returns:
            The paths of the files.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = list(self.tokenizer.save_pretrained(folder))
        content = {
            **self.audio_processor.to_dict(),
            **self.image_processor.to_dict(),
            "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
            "image_processor_type": "Phi4MultimodalImageProcessorFast",
            "processor_class": "Phi4MultimodalProcessor",
        }
        content.pop("mel_filters", None)
        for name, value in (
            (_PREPROCESSOR, content),
            ("processor_config.json", {"processor_class": "Phi4MultimodalProcessor"}),
        ):
            text = json.dumps(value, indent=2, sort_keys=True) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
            files.append(str(folder / name))
        if push_to_hub:
            repo_id = kwargs.pop("repo_id", folder.name)
            self._upload_modified_files(folder, self._create_repo(repo_id), {}, **kwargs)
        return files

    def __call__(
        self,
        text: str | Sequence[str],
        images: Any = None,
        audio: Any = None,
        *,
        sampling_rate: int | None = None,
        return_tensors: str | None = "pt",
        padding: bool | str = True,
        padding_side: str = "left",
        **kwargs: Any,
    ) -> BatchFeature:
        """Prepare one or several prompts.

        A prompt names its pictures and recordings by `<|image_1|>`, `<|audio_1|>`, ... which count from 1 in
        every prompt and may come in any order, or holds the model's own placeholder token once for each, in
        order. `images` and `audio` follow the prompts: those of the first, then those of the second.

        Args:
            text: a prompt or a list of them.
            images: a picture or a (nested) list, each in a form that `media.load_image` takes.
            audio: a recording or a (nested) list, each in a form that `media.load_audio` takes.
            sampling_rate: of arrays that come without a rate; None: the model's own.
            return_tensors: "pt" or "np".
            padding, padding_side, kwargs: as in transformers' tokenizers; `generate` wants the left side.

        Returns:
            `input_ids` and `attention_mask` int64 (prompts, longest). With pictures what
            `Phi4MMImageProcessor.preprocess` gives; with recordings `audio_input_features` float32
            (recordings, frames, mel bins), `audio_embed_sizes` int64 (recordings,) in tokens, and for several
            `audio_attention_mask` bool (recordings, frames).

        Raises:
            InputError: markers that don't fit, or a picture or recording that can't be used.
        """
        prompts = [text] if isinstance(text, str) else list(text)
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise InputError("text is no string and no list of strings")
        images, audio = _flat(images, _is_image), _flat(audio, _is_audio)
        orders = [self._media_of(prompt) for prompt in prompts]
        image_order = _arrange("image", images, [order["image"] for order in orders])
        audio_order = _arrange("audio", audio, [order["audio"] for order in orders])

        data: dict[str, Any] = {}
        sizes: dict[str, list[int]] = {"image": [], "audio": []}
        if image_order:
            pictures = self.image_processor([images[index] for index in image_order], return_tensors="pt")
            sizes["image"] = pictures.pop("num_img_tokens")
            data.update(pictures)
        if audio_order:
            data.update(self._features([audio[index] for index in audio_order], sampling_rate))
            sizes["audio"] = data["audio_embed_sizes"].tolist()
        expanded = self._expand(prompts, sizes)
        tokens = self.tokenizer(expanded, padding=padding, padding_side=padding_side, **kwargs)
        self._check_counts(tokens["input_ids"], sizes)
        if isinstance(return_tensors, str) and return_tensors == "np":
            data = {name: value.numpy() for name, value in data.items()}
        return BatchFeature({**tokens, **data}, tensor_type=return_tensors)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        tokenize: bool = False,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Turn chat messages into a prompt, or into the model's inputs.

        The model's template joins strings, so a message of parts becomes one string first: a marker for each
        picture and recording, in their order, with nothing between the parts.

        Args:
            conversation: messages with `role` and `content`, or a list of conversations. A content is a
                string or a list of parts: `{"type": "text", "text": …}`, `{"type": "image", "image": …}`,
                `{"type": "audio", "audio": …}`; `url`, `path` and `base64` are other keys of the latter two.
            chat_template: Jinja template; None is the processor's.
            tokenize: False gives the prompt (a list for several conversations), True the inputs.
            return_dict: whether True gives everything or `input_ids` alone, as in transformers.
            add_generation_prompt, continue_final_message: as in transformers.
            kwargs: options of `__call__`, where `tokenize` is True, else variables of the template.

        Raises:
            InputError: a part of another type, or without content.
        """
        several = bool(conversation) and isinstance(conversation[0], (list, tuple))
        images: list[Any] = []
        audio: list[Any] = []
        flattened = []
        for messages in conversation if several else [conversation]:
            counts = {"image": 0, "audio": 0}
            flattened.append([_flatten(message, counts, images, audio) for message in messages])
        template_options = {} if tokenize else kwargs
        prompts = self.tokenizer.apply_chat_template(
            flattened,
            chat_template=chat_template or self.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **template_options,
        )
        if not tokenize:
            return prompts if several else prompts[0]
        inputs = self(prompts, images or None, audio or None, **kwargs)
        return inputs if return_dict else inputs["input_ids"]

    @property
    def model_input_names(self) -> list[str]:
        """The inputs' names of all three parts."""
        parts = (self.tokenizer, self.image_processor, self.audio_processor)
        return list(dict.fromkeys(name for part in parts for name in part.model_input_names))

    def _media_of(self, prompt: str) -> dict[str, list[int]]:
        """For each kind, the numbers from 0 on of a prompt's pictures or recordings as they appear in it."""
        order = {}
        for kind, token in (("image", self.image_token), ("audio", self.audio_token)):
            numbers = [int(number) for found, number in _MARKER.findall(prompt) if found == kind]
            count = prompt.count(token)
            if numbers and count:
                raise InputError(
                    f"a prompt has both <|{kind}_1|> and {token}, expected one of the two styles"
                )
            if sorted(numbers) != list(range(1, len(numbers) + 1)):
                shown = ", ".join(f"<|{kind}_{number}|>" for number in numbers)
                raise InputError(f"a prompt has {shown}, expected <|{kind}_1|>, <|{kind}_2|> … once each")
            order[kind] = [number - 1 for number in numbers] or list(range(count))
        return order

    def _features(self, recordings: list[Any], sampling_rate: int | None) -> dict[str, Any]:
        extractor = self.audio_processor
        rate = extractor.sampling_rate
        frames_per_token = extractor.audio_compression_rate * extractor.audio_downsample_rate
        max_seconds = self.tokenizer.model_max_length * frames_per_token * extractor.hop_length / rate
        waves = [
            load_audio(source, rate, sampling_rate=sampling_rate, max_seconds=max_seconds)
            for source in recordings
        ]
        shortest = min(map(len, waves))
        if shortest < extractor.win_length:
            raise InputError(
                f"a recording has {shortest} samples at {rate} Hz, expected at least {extractor.win_length}: "
                "the features' first frame"
            )
        return dict(extractor(waves, sampling_rate=rate, return_tensors="pt"))

    def _expand(self, prompts: list[str], sizes: dict[str, list[int]]) -> list[str]:
        """Each marker and placeholder repeated as often as its picture or recording has tokens."""
        remaining = {kind: iter(counts) for kind, counts in sizes.items()}
        tokens = {"image": self.image_token, "audio": self.audio_token}
        kinds = {token: kind for kind, token in tokens.items()}
        places = re.compile("|".join((_MARKER.pattern, *map(re.escape, kinds))))

        def repeat(found: re.Match[str]) -> str:
            kind = found[1] or kinds[found[0]]
            return tokens[kind] * next(remaining[kind])

        return [places.sub(repeat, prompt) for prompt in prompts]

    def _check_counts(self, input_ids: list[list[int]], sizes: dict[str, list[int]]) -> None:
        """A tokenizer that cuts, or lacks the placeholders, would leave features without a place."""
        for kind, token_id in (("image", self.image_token_id), ("audio", self.audio_token_id)):
            found = sum(ids.count(token_id) for ids in input_ids)
            if found != sum(sizes[kind]):
                raise InputError(
                    f"the prompt has {found} {kind} tokens after tokenizing, expected {sum(sizes[kind])}: "
                    "don't truncate it, and use the model's own tokenizer"
                )


def _is_image(value: Any) -> bool:
    return not isinstance(value, (list, tuple))


def _is_audio(value: Any) -> bool:
    """A recording, and no list of them: also a pair of array and rate, and a list of numbers."""
    if not isinstance(value, (list, tuple)):
        return True
    pair = len(value) == 2 and isinstance(value[1], int) and not isinstance(value[0], (str, int))
    return pair or is_samples(value)


def _flat(value: Any, is_one: Any) -> list[Any]:
    """What may be one, a list or a list of lists, as a list."""
    if value is None:
        return []
    if is_one(value):
        return [value]
    return [item for part in value for item in _flat(part, is_one)]


def _arrange(kind: str, given: list[Any], orders: list[list[int]]) -> list[int]:
    """Indices into what was given, in the order of appearance in all prompts."""
    wanted = sum(map(len, orders))
    if wanted != len(given):
        raise InputError(
            f"the text names {wanted} {kind} placeholder(s), {len(given)} were given: expected one "
            f"<|{kind}_N|> for each"
        )
    arranged: list[int] = []
    for order in orders:
        arranged.extend([len(arranged) + number for number in order])
    return arranged


def _flatten(message: Any, counts: dict[str, int], images: list[Any], audio: list[Any]) -> dict[str, Any]:
    """A message with its content as a string; its pictures and recordings are added to the lists."""
    content = message["content"]
    if isinstance(content, str):
        return message
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            text += part["text"]
            continue
        if kind not in counts:
            raise InputError(f"a message has a part of type {kind!r}, expected text, image or audio")
        source = next((part[key] for key in (kind, "url", "path", "base64") if key in part), None)
        if source is None:
            raise InputError(f"a message has a part of type {kind} without {kind}, url, path or base64")
        counts[kind] += 1
        (images if kind == "image" else audio).append(source)
        text += f"<|{kind}_{counts[kind]}|>"
    return {**message, "content": text}
