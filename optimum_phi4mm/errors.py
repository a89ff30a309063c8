"""The errors this package raises: what was found, what was expected and what to do."""

from __future__ import annotations


__all__ = [
    "CheckpointError",
    "ExportError",
    "InputError",
    "PackageError",
    "Phi4MMError",
    "ValidationError",
]


class Phi4MMError(Exception):
    """Base of every error of this package.

    None is an OSError, not even for a missing file: Optimum's `TasksManager.get_model_from_task` answers an
    OSError from `from_pretrained` by calling it again with `from_tf=True`, and the user would read about
    TensorFlow instead.
    """


class CheckpointError(Phi4MMError, ValueError):
    """A checkpoint that is missing, broken or of a kind this package can't compute."""


class ExportError(Phi4MMError, ValueError):
    """An export that can't be done as asked."""


class PackageError(Phi4MMError, ValueError):
    """An exported package that is incomplete or was not written by this exporter."""


class InputError(Phi4MMError, ValueError):
    """A prompt, picture, recording or call that the model can't be run on."""


class ValidationError(Phi4MMError, ValueError):
    """An exported model whose outputs differ from the torch model's."""
