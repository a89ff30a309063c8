"""How the four ONNX models are run: features once per prompt, then embedding and decoder once per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from preprocess import Picture


# Factors of the vision and the speech adapter, held for the whole generation.
GATES = {
    "text": [[0.0, 0.0]],
    "picture": [[1.0, 0.0]],
    "recording": [[0.0, 1.0]],
    "both": [[1.0, 0.0]],  # a picture beside it makes speech go the vision adapter's way
}

Past = dict[str, np.ndarray]  # past_key_values.{layer}.key/.value, float32 (1, heads, length, head size)


class OnnxModel:
    """A package that `optimum-cli export onnx` wrote, variant `gated`, in float32."""

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # it warns of every input that may be left out
        self.vision, self.speech, self.embedding, self.decoder = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx", options, ["CPUExecutionProvider"])
            for name in ("vision", "speech", "embedding", "model")
        )
        hidden_size = self.embedding.get_outputs()[0].shape[2]
        self.absent = np.zeros((0, hidden_size), np.float32)

    def image_features(self, picture: Picture | None) -> np.ndarray:  # (tokens, hidden)
        if picture is None:
            return self.absent
        inputs = {
            "pixel_values": picture.pixel_values,
            "image_sizes": picture.image_sizes,
            "image_attention_mask": picture.image_attention_mask,
        }
        return self.vision.run(["image_features"], inputs)[0]

    def speech_features(self, recording: np.ndarray | None, beside_picture: bool) -> np.ndarray:
        if recording is None:
            return self.absent
        output = "speech_features_for_vision" if beside_picture else "speech_features"
        return self.speech.run([output], {"audio_features": recording})[0]

    def embed(self, input_ids: np.ndarray, image: np.ndarray, speech: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": input_ids, "image_features": image, "speech_features": speech}
        return self.embedding.run(["inputs_embeds"], inputs)[0]

    def empty_past(self) -> Past:
        """The cache before the first token."""
        return {
            value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
            for value in self.decoder.get_inputs()
            if value.name.startswith("past_key_values.")
        }

    def decode(self, embeds: np.ndarray, past: Past, case: str, keep: int = 1) -> tuple[np.ndarray, Past]:
        """Logits (1, keep, vocabulary) of the last `keep` positions, and the cache for the next call."""
        seen = past["past_key_values.0.key"].shape[2]
        length = seen + embeds.shape[1]
        inputs = {
            "inputs_embeds": embeds,
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(seen, length)[None],
            "adapter_gates": np.array(GATES[case], np.float32),
            "logits_to_keep": np.array([keep]),
            **past,
        }
        logits, *present = self.decoder.run(None, inputs)
        names = [value.name for value in self.decoder.get_outputs()[1:]]
        return logits, {
            name.replace("present.", "past_key_values."): value
            for name, value in zip(names, present, strict=True)
        }

    def generate(self, embeds: np.ndarray, case: str, count: int, stop: list[int]) -> list[int]:
        """The most likely tokens that follow a prompt."""
        past = self.empty_past()
        tokens: list[int] = []
        while len(tokens) < count:
            logits, past = self.decode(embeds, past, case)
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in stop:
                break
            embeds = self.embed(np.array([tokens[-1:]]), self.absent, self.absent)
        return tokens
