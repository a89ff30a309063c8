"""Pictures and recordings in whatever form a user has them, as plain arrays."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError


if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["is_samples", "load_audio", "load_image"]

_MAX_DOWNLOAD = 1 << 28  # bytes of one picture or recording behind a URL
_TIMEOUT = 30  # seconds without an answer
# More channels than any recording has; the shorter axis of an array is taken for its channels.
_MAX_CHANNELS = 32


def load_image(source: Any) -> Image:
    """A picture as Pillow's RGB image, the right way up.

    Args:
        source: a PIL image, a uint8 or uint16 array (height, width), (height, width, channels) or (channels,
            height, width), a path, an http(s) or data URL, base64, bytes or an open file. 16-bit samples are
            divided by 257; transparency is dropped as `convert("RGB")` does, like in transformers.

    Raises:
        InputError: it is none of these, can't be read, or is too large to decode.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InputError("pictures need Pillow: pip install pillow") from error

    if isinstance(source, Image.Image):
        picture = source
    elif isinstance(source, np.ndarray) or hasattr(source, "__array__"):
        picture = Image.fromarray(_pixels(np.asarray(source)))
    else:
        content, name = _open(source, "picture")
        try:
            picture = Image.open(content)
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
            raise InputError(f"{name} is no picture that Pillow reads: {error}") from error
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I"):  # 16 bits; convert("RGB") would cut them off at 255
            wide = np.asarray(picture)
            if wide.min(initial=0) < 0 or wide.max(initial=0) > 0xFFFF:
                raise InputError("a picture's samples are beyond 16 bits, expected 0 to 65535")
            picture = Image.fromarray(_eight_bits(wide))
        elif picture.mode == "F":
            raise InputError("a picture has floating-point samples, expected 8 or 16 bits per sample")
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"a picture can't be decoded: {error}") from error


def load_audio(source: Any, target_rate: int, *, sampling_rate: int | None = None, max_seconds: float) -> Any:
    """A recording as mono samples at the model's rate.

    Args:
        source: a pair of array and rate, a mapping with `array` and `sampling_rate`, an array, or a path, an
            http(s) or data URL, base64, bytes or an open file that `soundfile` reads. Arrays are (samples,),
            (samples, channels) or (channels, samples), of floats in [-1, 1] or of 16- or 32-bit integers.
        target_rate: samples per second that come out.
        sampling_rate: the rate of an array that comes without one; None: `target_rate`.
        max_seconds: a longer recording is refused before it is decoded.

    Returns:
        float32 (samples,), the channels' mean.

    Raises:
        InputError: it can't be read, is empty or too long, or has a sample that is no number.
    """
    if isinstance(source, Mapping) and "array" in source:
        source = (source["array"], source.get("sampling_rate", sampling_rate))
    if isinstance(source, (tuple, list)) and len(source) == 2 and isinstance(source[1], (int, np.integer)):
        samples, rate = np.asarray(source[0]), int(source[1])
    elif hasattr(source, "__array__") or is_samples(source):
        samples, rate = np.asarray(source), sampling_rate or target_rate
    else:
        samples, rate = _decode(source, max_seconds)
    _check_length(max(samples.shape, default=0), rate, max_seconds)
    samples = _mono(samples)
    if not np.isfinite(samples).all():
        raise InputError("a recording has samples that are no numbers (NaN or infinity)")
    if rate == target_rate:
        return samples
    try:
        import soxr
    except ImportError as error:
        raise InputError(
            f"a recording has {rate} samples per second, the model {target_rate}: to resample it, "
            "pip install soxr"
        ) from error
    return soxr.resample(samples, rate, target_rate)


def is_samples(source: Any) -> bool:
    """Whether a list is one recording's samples, not a list of recordings."""
    return isinstance(source, (list, tuple)) and len(source) > 0 and isinstance(source[0], float)


def _decode(source: Any, max_seconds: float) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError as error:
        raise InputError("recordings in files need soundfile: pip install soundfile") from error
    content, name = _open(source, "recording")
    try:
        with soundfile.SoundFile(content) as file:
            _check_length(file.frames, file.samplerate, max_seconds)
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
        raise InputError(f"{name} is no recording that soundfile reads: {error}") from error


def _check_length(samples: int, rate: int, max_seconds: float) -> None:
    if rate < 1:
        raise InputError(f"a recording has {rate} samples per second, expected a positive rate")
    if samples < 1:
        raise InputError("a recording is empty")
    if samples / rate > max_seconds:
        raise InputError(
            f"a recording lasts {samples / rate:.0f} s, the model's context holds {max_seconds:.0f} s: cut it"
        )


def _mono(samples: np.ndarray) -> np.ndarray:
    if samples.ndim == 2:
        if min(samples.shape) > _MAX_CHANNELS:
            raise InputError(f"a recording has shape {list(samples.shape)}, expected one axis of channels")
        samples_axis = 0 if samples.shape[0] >= samples.shape[1] else 1
    elif samples.ndim == 1:
        samples_axis = 0
    else:
        raise InputError(f"a recording has shape {list(samples.shape)}, expected (samples,) or two axes")
    if samples.dtype.kind == "i" and samples.dtype.itemsize in (2, 4):
        samples = samples / np.float32(-float(np.iinfo(samples.dtype).min))
    elif samples.dtype.kind != "f":
        raise InputError(f"a recording is of {samples.dtype}, expected floats or 16- or 32-bit integers")
    if samples.ndim == 2:
        samples = samples.mean(axis=1 - samples_axis)
    return np.ascontiguousarray(samples, dtype=np.float32)


def _pixels(array: np.ndarray) -> np.ndarray:
    """An array as uint8 (height, width) or (height, width, channels)."""
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise InputError(
            f"a picture has shape {list(array.shape)}, expected (height, width), with 3 or 4 channels or none"
        )
    if array.dtype == np.uint16:
        array = _eight_bits(array)
    if array.dtype != np.uint8:
        raise InputError(f"a picture is of {array.dtype}, expected uint8 from 0 to 255, or uint16")
    return np.ascontiguousarray(array)


def _eight_bits(samples: np.ndarray) -> np.ndarray:
    return ((samples.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 is white, like 255


def _open(source: Any, what: str) -> tuple[Any, str]:
    """A file or its content, and what to call it in an error."""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_file(source)):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"{path} does not exist")
        return str(path), str(path)
    if isinstance(source, (bytes, bytearray)):
        return io.BytesIO(source), f"a {what} of {len(source)} bytes"
    if hasattr(source, "read"):
        return source, str(getattr(source, "name", f"a {what}"))
    if not isinstance(source, str):
        raise InputError(
            f"a {what} is given as {type(source).__name__}, expected a path, URL, array, bytes or open file"
        )
    if source.startswith(("http://", "https://")):
        return io.BytesIO(_download(source)), source
    encoded = source.partition(",")[2] if source.startswith("data:") else source
    try:
        return io.BytesIO(base64.b64decode(encoded, validate=True)), f"a {what} in base64"
    except (binascii.Error, ValueError) as error:
        shown = source if len(source) <= 80 else source[:77] + "..."
        raise InputError(f"{shown} is no file, no URL and no base64") from error


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # longer than a path can be: base64
        return False


def _download(url: str) -> bytes:
    import requests

    try:
        with requests.get(url, timeout=_TIMEOUT, stream=True) as response:
            response.raise_for_status()
            content = bytearray()
            for chunk in response.iter_content(1 << 16):
                content += chunk
                if len(content) > _MAX_DOWNLOAD:
                    raise InputError(f"{url} is larger than {_MAX_DOWNLOAD >> 20} MiB")
            return bytes(content)
    except requests.RequestException as error:
        raise InputError(f"{url} can't be downloaded: {error}") from error
