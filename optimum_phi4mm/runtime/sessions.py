"""The four ONNX Runtime sessions of a package, each opened when it is first needed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import InferenceSession, OrtValue, SessionOptions

from ..errors import PackageError


__all__ = ["COMPONENTS", "Sessions"]

# Name of each model -> inputs by which a file of ours is known, whatever its sizes.
COMPONENTS = {
    "vision": ("pixel_values",),
    "speech": ("audio_features",),
    "embedding": ("input_ids", "image_features", "speech_features"),
    "model": ("inputs_embeds", "attention_mask", "position_ids", "past_key_values.0.key"),
}


class Sessions:
    """Sessions by the models' names; looking one up opens it.

    Args:
        locate: gives the path of a model's file, after downloading it and its weights where need be.
        providers, provider_options, session_options: as `onnxruntime.InferenceSession` takes them.
    """

    def __init__(
        self,
        locate: Callable[[str], Path],
        providers: Sequence[str],
        provider_options: Sequence[dict[str, Any]],
        session_options: SessionOptions | None = None,
    ) -> None:
        self.locate = locate
        self.providers, self.provider_options = list(providers), list(provider_options)
        if session_options is None:
            session_options = SessionOptions()
            session_options.log_severity_level = 3  # it warns of every input that may be left out
        self.session_options = session_options
        self.use_io_binding = False
        self._open: dict[str, InferenceSession] = {}
        self._types: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> InferenceSession:
        if name not in self._open:
            path = self.locate(name)
            try:
                session = InferenceSession(
                    path,
                    self.session_options,
                    providers=self.providers,
                    provider_options=self.provider_options,
                )
            except Exception as error:  # ONNX Runtime's own have no common class
                raise PackageError(f"{path} can't be loaded: {error}") from error
            required = {value.name for value in session.get_inputs()}
            missing = [value for value in COMPONENTS[name] if value not in required]
            if missing:
                raise PackageError(
                    f"{path} has no input {missing[0]}: it is not the {name} model of an exported package"
                )
            values = session.get_inputs() + session.get_overridable_initializers()
            self._types[name] = {value.name: _NUMPY_TYPES.get(value.type) for value in values}
            self._open[name] = session
        return self._open[name]

    @property
    def loaded(self) -> list[str]:
        """The names of the models that are in memory."""
        return list(self._open)

    def release(self, *names: str) -> None:
        """Free models' memory; each is loaded again when it is next needed."""
        for name in names:
            self._open.pop(name, None)
        gc.collect()

    def move(self, provider: str, options: dict[str, Any]) -> None:
        """Run on another provider from now on."""
        self.providers, self.provider_options = [provider], [options]
        for session in self._open.values():
            session.set_providers([provider], provider_options=[options])

    def run(
        self, name: str, outputs: Sequence[str], inputs: Mapping[str, np.ndarray | OrtValue]
    ) -> list[OrtValue]:
        """Run a model; what is an OrtValue goes in and comes out without a copy.

        Args:
            name: the model.
            outputs: names of the wanted ones.
            inputs: by name; arrays are cast to the model's types.
        """
        session = self[name]
        feeds = {key: _ort_value(value, self._types[name][key]) for key, value in inputs.items()}
        if not self.use_io_binding:
            return session.run_with_ort_values(list(outputs), feeds)
        binding = session.io_binding()
        for key, value in feeds.items():
            binding.bind_ortvalue_input(key, value)
        device = "cuda" if "CUDA" in session.get_providers()[0] else "cpu"
        device_id = int(session.get_provider_options()[session.get_providers()[0]].get("device_id", 0))
        for output in outputs:
            binding.bind_output(output, device, device_id)
        session.run_with_iobinding(binding)
        return binding.get_outputs()


_NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def _ort_value(value: np.ndarray | OrtValue, dtype: Any) -> OrtValue:
    if isinstance(value, onnxruntime.OrtValue):
        return value
    return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value, dtype=dtype))
