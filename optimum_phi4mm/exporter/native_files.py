"""The files beside the graphs, as transformers' native classes read them, whatever layout they come from."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from optimum.utils import logging
from transformers import GenerationConfig, Phi4MultimodalConfig, PreTrainedTokenizerBase

from ..checkpoint import Checkpoint
from ..configuration import read_json
from ..configuration_checks import Kind, is_int, is_number
from ..errors import CheckpointError, ExportError


__all__ = ["native_files"]

logger = logging.get_logger(f"optimum.{__name__}")  # below the logger that Optimum configures

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The first release that writes these keys (`dtype`). Naming the running one would make the files depend on
# it, and 4.57.3 to 4.57.6 make AutoTokenizer warn of a fault of Mistral's tokenizers.
_CONFIG_VERSION = "4.56.0"

_PROCESSOR_CLASS = "Phi4MultimodalProcessor"
_TOKENIZER_CLASS = "GPT2TokenizerFast"
# The placeholders of the published tokenizer, for one whose vocabulary can't be looked into.
_PLACEHOLDERS = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}

_SIZE = Kind("a positive integer", lambda value: is_int(value, 1, 1 << 24))
_NUMBER = Kind("a number", is_number)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_RESAMPLE = Kind("a PIL resampling filter, 0 to 5", lambda value: is_int(value, 0, 5))
_CHANNELS = Kind(
    "a list of numbers, one per channel",
    lambda value: isinstance(value, list) and len(value) > 0 and all(is_number(number) for number in value),
)
_TOKEN_IDS = Kind(
    "a token id or a list of them",
    lambda value: (
        isinstance(value, (int, list))
        and all(is_int(token, -1, 1 << 31) for token in (value if isinstance(value, list) else [value]))
    ),
)
_IMAGE_SIZE = Kind(
    "an object of height and width",
    lambda value: (
        isinstance(value, dict)
        and set(value) == {"height", "width"}
        and all(_SIZE.accepts(length) for length in value.values())
    ),
)

# Every field of Phi4MultimodalImageProcessorFast and Phi4MultimodalFeatureExtractor that a checkpoint may
# set, with the published value; None: the class's own default, which is not written.
_PREPROCESSOR: dict[str, tuple[Kind, Any]] = {
    "dynamic_hd": (_SIZE, 36),
    "patch_size": (_SIZE, 14),
    "size": (_IMAGE_SIZE, {"height": 448, "width": 448}),
    "image_mean": (_CHANNELS, [0.5, 0.5, 0.5]),
    "image_std": (_CHANNELS, [0.5, 0.5, 0.5]),
    "resample": (_RESAMPLE, None),
    "do_resize": (_FLAG, None),
    "do_rescale": (_FLAG, None),
    "rescale_factor": (_NUMBER, None),
    "do_normalize": (_FLAG, None),
    "do_convert_rgb": (_FLAG, None),
    "audio_compression_rate": (_SIZE, 8),
    "audio_downsample_rate": (_SIZE, 1),
    "audio_feat_stride": (_SIZE, 1),
    "feature_size": (_SIZE, 80),
    "sampling_rate": (_SIZE, 16000),
    "hop_length": (_SIZE, 160),
    "n_fft": (_SIZE, 512),
    "win_length": (_SIZE, 400),
    "preemphasis": (_NUMBER, 0.97),
    "padding_value": (_NUMBER, None),
    "mel_min_frequency": (_NUMBER, None),
    "mel_max_frequency": (_NUMBER, None),
}
_COPIED_JSON = ("special_tokens_map.json", "added_tokens.json", "vocab.json")
_COPIED_TEXT = ("merges.txt", "chat_template.jinja")
# Of a tokenizer's config: remote classes, and paths on the machine where it was saved.
_TOKENIZER_DROPPED = (
    "_name_or_path",
    "auto_map",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)


def native_files(checkpoint: Checkpoint, dtype: str) -> dict[str, bytes]:
    """The non-weight files of a package.

    Values come from the checkpoint's own files where it has them. A missing tokenizer is a warning, since the
    graphs can be used without one.

    Args:
        checkpoint: in either layout.
        dtype: float type of the export, "fp32", "fp16" or "bf16".

    Returns:
        Content by file name; the same for the same checkpoint, on any machine and in any run.

    Raises:
        CheckpointError: one of the checkpoint's files is malformed; the message names it.
        ExportError: `dtype` is none of the three.
    """
    if dtype not in _DTYPES:
        raise ExportError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
    folder, config = checkpoint.folder, checkpoint.config
    files = {
        "config.json": _json(_config(config, _DTYPES[dtype])),
        "generation_config.json": _json(_generation_config(folder, config)),
        "preprocessor_config.json": _json(_preprocessor_config(folder, config)),
        "processor_config.json": _json({"processor_class": _PROCESSOR_CLASS}),
    }
    return files | _tokenizer_files(folder, config)


def _config(config: Phi4MultimodalConfig, dtype: str) -> dict[str, Any]:
    content = copy.deepcopy(config).to_diff_dict()
    content.pop("_name_or_path", None)
    return {**content, "dtype": dtype, "transformers_version": _CONFIG_VERSION}


def _generation_config(folder: Path, config: Phi4MultimodalConfig) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {name: value for name, value in ids.items() if value is not None}
    content = read_json(file)
    content.pop("transformers_version", None)
    for field, kind in _generation_kinds().items():
        if content.get(field) is not None and not kind.accepts(content[field]):
            raise CheckpointError(f"{file}: {field} is {content[field]!r}, expected {kind.expected}")
    try:
        GenerationConfig(**content).validate()
    except Exception as error:  # what a wrong type does in there has no common class
        raise CheckpointError(f"{file} is no generation config: {error}") from error
    return content


def _generation_kinds() -> dict[str, Kind]:
    """What the fields of a generation config may hold: `validate` only warns about some wrong types."""
    kinds = {
        field: _FLAG if isinstance(default, bool) else _NUMBER
        for field, default in GenerationConfig().to_dict().items()
        if isinstance(default, (bool, int, float))
    }
    kinds.pop("early_stopping")  # a flag or "never", which validate checks
    return kinds | {f"{token}_token_id": _TOKEN_IDS for token in ("bos", "eos", "pad")}


def _preprocessor_config(folder: Path, config: Phi4MultimodalConfig) -> dict[str, Any]:
    """Image processor and audio feature extractor share one file, as transformers expects."""
    file = folder / "preprocessor_config.json"
    found = read_json(file) if file.is_file() else {}
    crop = config.vision_config.crop_size
    of_model = {
        "patch_size": config.vision_config.patch_size,
        "size": {"height": crop, "width": crop},
        "feature_size": config.audio_config.input_size,
        "audio_compression_rate": config.audio_config.time_reduction,
    }
    content: dict[str, Any] = {
        "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
        "image_processor_type": "Phi4MultimodalImageProcessorFast",
        "processor_class": _PROCESSOR_CLASS,
    }
    for field, (kind, published) in _PREPROCESSOR.items():
        value = found.get(field)
        if value is None:
            value = of_model.get(field, published)
        elif not kind.accepts(value):
            raise CheckpointError(f"{file}: {field} is {value!r}, expected {kind.expected}")
        elif field in of_model and value != of_model[field]:
            raise CheckpointError(
                f"{file}: {field} is {value!r}, expected {of_model[field]!r} as in config.json"
            )
        if value is not None:
            content[field] = value
    return content


def _tokenizer_files(folder: Path, config: Phi4MultimodalConfig) -> dict[str, bytes]:
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if missing:
        logger.warning(
            f"{folder} has no {' and no '.join(missing)}: the package will have no complete tokenizer. "
            "Put the model's own files beside its weights and export again, or copy them into the package."
        )
    files = {name: (folder / name).read_bytes() for name in _COPIED_TEXT if (folder / name).is_file()}
    for name in (*_COPIED_JSON, "tokenizer.json"):
        if (folder / name).is_file():
            files[name] = (folder / name).read_bytes()
    for name in set(files).intersection(_COPIED_JSON):
        read_json(folder / name)
    if len(missing) < 2:
        files["tokenizer_config.json"] = _json(_tokenizer_config(folder, config))
    return files


def _tokenizer_config(folder: Path, config: Phi4MultimodalConfig) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    content = read_json(file) if file.is_file() else {}
    extra = content.get("extra_special_tokens") or {}
    if not isinstance(extra, dict) or not all(isinstance(token, (str, dict)) for token in extra.values()):
        raise CheckpointError(
            f"{file}: extra_special_tokens is {extra!r}, expected an object of tokens by name"
        )
    for name in _TOKENIZER_DROPPED:
        content.pop(name, None)
    content["extra_special_tokens"] = {**extra, **_placeholders(folder, config)}
    content["processor_class"] = _PROCESSOR_CLASS
    content["tokenizer_class"] = _tokenizer_class(content.get("tokenizer_class"))
    return content


def _tokenizer_class(name: Any) -> str:
    """The name if it is a tokenizer of transformers, else the class that the model's files are for."""
    try:
        known = getattr(transformers, name, None) if isinstance(name, str) else None
    except ImportError:  # a class of transformers whose own requirements are not installed
        known = None
    is_tokenizer = isinstance(known, type) and issubclass(known, PreTrainedTokenizerBase)
    return name if is_tokenizer else _TOKENIZER_CLASS


def _placeholders(folder: Path, config: Phi4MultimodalConfig) -> dict[str, str]:
    """The tokens that stand for features in a prompt, by the ids that the embedding graph looks for."""
    ids = {
        "image_token": config.vision_config.image_token_id,
        "audio_token": config.audio_config.audio_token_id,
    }
    file = folder / "tokenizer.json"
    if not file.is_file():
        return dict(_PLACEHOLDERS)
    tokens = _tokens(file)
    for name, token_id in ids.items():
        if token_id not in tokens:
            logger.warning(
                f"{file} has no token {token_id}, the {name} of config.json: prompts can't hold it"
            )
    return {name: tokens.get(token_id, _PLACEHOLDERS[name]) for name, token_id in ids.items()}


def _tokens(file: Path) -> dict[int, str]:
    """The tokens of a `tokenizer.json` by id; added ones replace those of the vocabulary."""
    content = read_json(file)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise CheckpointError(f"{file}: added_tokens is no list of objects")
    pairs = [*vocabulary.items()] if isinstance(vocabulary, dict) else []
    pairs += [(token.get("content"), token.get("id")) for token in added]
    return {index: text for text, index in pairs if is_int(index, 0, 1 << 31) and isinstance(text, str)}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
