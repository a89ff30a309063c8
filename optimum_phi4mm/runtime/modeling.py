"""`ORTModelForPhi4MM`: an exported package as a model of Optimum that generates."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download
from onnxruntime import SessionOptions
from optimum.onnxruntime import ORTModel
from optimum.onnxruntime.utils import (
    get_provider_for_device,
    parse_device,
    prepare_providers_and_provider_options,
    validate_provider_availability,
)
from transformers import AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from ..checkpoint import HUB_OPTIONS
from ..errors import InputError, PackageError
from .generation import GATES, Phi4MMGenerationMixin
from .sessions import COMPONENTS, Sessions


__all__ = ["ORTModelForPhi4MM"]

_SMALL_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "README.md"),
    *("vision.onnx_adapter", "speech.onnx_adapter", "text.onnx_adapter"),
)
# transformers' pipelines look a model's class up by name in this table; the key is no model type of theirs.
MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES["phi4mm_onnx"] = "ORTModelForPhi4MM"


class ORTModelForPhi4MM(Phi4MMGenerationMixin, ORTModel):
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
        if self.variant not in ("gated", "merged", *GATES):
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
