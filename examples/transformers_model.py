"""The same model in transformers, as the reference: its adapters, and eager attention in every part."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from preprocess import Picture
from transformers import Phi4MultimodalForCausalLM
from transformers.utils import logging


ADAPTERS = {"text": None, "picture": "vision", "recording": "speech", "both": "vision"}


class TransformersModel:
    """A checkpoint in transformers' own layout, in float32.

    With transformers' default attention the vision tower would be causal whenever no patch is padding; see
    README.md.
    """

    def __init__(self, folder: Path, attention: str = "eager") -> None:
        logging.disable_progress_bar()
        self.model = Phi4MultimodalForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # there are two
            for name in ("vision", "speech"):
                self.model.load_adapter(str(folder / f"{name}-lora"), adapter_name=name)

    @contextmanager
    def adapter_of(self, case: str) -> Iterator[None]:
        """Use the adapter that belongs to a kind of prompt."""
        name = ADAPTERS[case]
        if name is None:
            self.model.disable_adapters()
        else:
            self.model.enable_adapters()
            self.model.set_adapter(name)
        with torch.inference_mode():
            yield

    @staticmethod
    def inputs(
        input_ids: np.ndarray, picture: Picture | None, recording: np.ndarray | None
    ) -> dict[str, Any]:
        """The arguments of `Phi4MultimodalForCausalLM`, as its processor would give them."""
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(input_ids)}
        if picture is not None:
            inputs["image_pixel_values"] = torch.from_numpy(picture.pixel_values)[None]
            inputs["image_sizes"] = torch.from_numpy(picture.image_sizes)
            inputs["image_attention_mask"] = torch.from_numpy(picture.image_attention_mask)[None].float()
        if recording is not None:
            inputs["audio_input_features"] = torch.from_numpy(recording)
            inputs["audio_embed_sizes"] = torch.tensor([-(-recording.shape[1] // 8)])
        return inputs

    def embed(self, input_ids: torch.Tensor, **inputs: Any) -> np.ndarray:
        """Embeddings of the prompt (1, length, hidden), with the features in their places."""
        text = self.model.model.embed_tokens(input_ids)
        return self.model.model.embed_tokens_extend(input_ids, text, **inputs).numpy()

    def logits(self, keep: int, **inputs: Any) -> np.ndarray:  # (1, keep, vocabulary)
        return self.model(**inputs, logits_to_keep=keep).logits.numpy()

    def generate(self, count: int, stop: list[int], **inputs: Any) -> list[int]:
        """The most likely tokens that follow a prompt."""
        mask = torch.ones_like(inputs["input_ids"])
        options = {"do_sample": False, "max_new_tokens": count, "eos_token_id": stop, "pad_token_id": stop[0]}
        tokens = self.model.generate(**inputs, attention_mask=mask, **options)
        return tokens[0, mask.shape[1] :].tolist()
