"""From a name to a local folder: of a checkpoint on the Hub, only what is needed is downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ..configuration import is_phi4mm, read_config, read_json
from ..errors import CheckpointError


__all__ = ["HUB_OPTIONS", "download", "raw_config", "resolve"]

# What says where on the Hub something lies and how it is fetched, as in `huggingface_hub`.
HUB_OPTIONS = ("subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download")

_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")
_ADAPTER_FILES = tuple(
    f"{adapter}-lora/{file}"
    for adapter in ("vision", "speech")
    for file in ("adapter_config.json", "adapter_model.safetensors")
)


def resolve(
    model_name_or_path: str | Path,
    *,
    subfolder: str = "",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """The local folder of a checkpoint, downloaded first where it is on the Hub.

    No Python and no pickle is ever downloaded. The phi4mm layout's `vision-lora/` and `speech-lora/` repeat
    what is in its shards and stay where they are; the native layout needs them.

    Args:
        model_name_or_path: a local folder or the id of a Hub repository.
        subfolder: where in it the checkpoint lies.
        revision, cache_dir, token, local_files_only, force_download: as in
            `huggingface_hub.snapshot_download`.

    Raises:
        CheckpointError: the repository, revision or `config.json` isn't there or can't be reached, or holds
            another model.
    """
    local = _local_folder(model_name_or_path)
    if local is not None:
        return local / subfolder
    options: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "token": token,
        "local_files_only": local_files_only,
        "force_download": force_download,
    }
    name = str(model_name_or_path)
    with _hub_errors(name):
        config = Path(hf_hub_download(name, "config.json", subfolder=subfolder or None, **options))
    raw = read_config(config.parent)  # another model is refused before its weights are fetched
    # A pattern's * matches slashes too, so what lies in deeper folders must be excluded by itself.
    folder = download(name, _FILES, ("*/*",), subfolder=subfolder, **options)
    if not is_phi4mm(raw):
        download(name, _ADAPTER_FILES, subfolder=subfolder, **options)
    return folder


def download(
    model_name_or_path: str | Path,
    files: Sequence[str],
    but: Sequence[str] = (),
    *,
    subfolder: str = "",
    **options: Any,
) -> Path:
    """The local folder that holds some of a model's files, downloaded first where it is on the Hub.

    Args:
        model_name_or_path: a local folder, which is given back as it is, or the id of a Hub repository.
        files: patterns of the files to download, in the subfolder.
        but: patterns of files that are not, though `files` fits them.
        subfolder: where in it the files lie.
        options: the other HUB_OPTIONS.

    Raises:
        CheckpointError: the repository or revision isn't there or can't be reached.
    """
    local = _local_folder(model_name_or_path)
    if local is not None:
        return local / subfolder
    name = str(model_name_or_path)
    prefix = f"{subfolder.strip('/')}/" if subfolder else ""
    with _hub_errors(name):
        snapshot = snapshot_download(
            name,
            allow_patterns=[prefix + file for file in files],
            ignore_patterns=[prefix + file for file in but] or None,
            **options,
        )
    return Path(snapshot) / subfolder


def raw_config(
    model_name_or_path: str | Path,
    *,
    subfolder: str = "",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> dict[str, Any] | None:
    """The content of a model's `config.json`, of whatever model; nothing else is downloaded.

    Args:
        model_name_or_path, subfolder, revision, cache_dir, token, local_files_only, force_download: as in
            `resolve`.

    Returns:
        The content, or None where the folder or repository has no such file.

    Raises:
        CheckpointError: the repository or revision isn't there or can't be reached, or the file is no JSON
            object.
    """
    local = _local_folder(model_name_or_path)
    if local is not None:
        file = local / subfolder / "config.json"
        return read_json(file) if file.is_file() else None
    name = str(model_name_or_path)
    try:
        downloaded = hf_hub_download(
            name,
            "config.json",
            subfolder=subfolder or None,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
    except (OSError, ValueError) as error:
        # Without a connection nobody knows whether the repository has the file: that is an error, not an
        # answer.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise _not_loaded(name, error) from error
    return read_json(Path(downloaded))


def _local_folder(name: str | Path) -> Path | None:
    if not str(name):  # the path of an empty name is the current folder
        return None
    try:
        return Path(name) if Path(name).is_dir() else None
    except OSError as error:
        raise CheckpointError(f"{name} can't be opened as a folder: {error}") from error


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    # huggingface_hub's own errors are OSErrors, but for names no repository can have and options that exclude
    # each other.
    try:
        yield
    except (OSError, ValueError) as error:
        raise _not_loaded(name, error) from error


def _not_loaded(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} is no local folder and can't be loaded from the Hugging Face Hub: {error}"
    )
