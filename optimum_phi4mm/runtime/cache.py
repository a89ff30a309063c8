"""What a generation keeps between its steps: keys and values, and what is needed to compute them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnxruntime import OrtValue


__all__ = ["Phi4MMCache", "PromptFeatures", "RowGroup"]


@dataclass
class PromptFeatures:
    """What the encoders made of each prompt's pictures and recordings.

    Attributes:
        image, speech: per row F (tokens, hidden).
        gates: float32 (rows, 2), the adapters that each row's content asks for.
    """

    image: list[np.ndarray]
    speech: list[np.ndarray]
    gates: np.ndarray

    def select(self, rows: Sequence[int]) -> PromptFeatures:
        """These rows' features, in this order; a row may come several times."""
        return PromptFeatures(
            [self.image[row] for row in rows], [self.speech[row] for row in rows], self.gates[list(rows)]
        )


@dataclass
class RowGroup:
    """Rows on one side of the LongRoPE switch.

    Attributes:
        rows: their numbers in the batch.
        past: per layer a key and a value, F (rows, key-value heads, length, head size), flat.
    """

    rows: list[int]
    past: list[OrtValue]

    def select(self, rows: Sequence[int]) -> list[OrtValue]:
        """Keys and values of some of the group's rows, in this order; a row may come several times."""
        if rows == self.rows:
            return self.past
        places = [self.rows.index(row) for row in rows]
        return [OrtValue.ortvalue_from_numpy(value.numpy()[places]) for value in self.past]


@dataclass
class Phi4MMCache:
    """`past_key_values` of `ORTModelForPhi4MM`: opaque to callers, with the methods that `generate` calls.

    A row that crosses the LongRoPE switch is computed again from its first token, so the tokens and features
    are kept beside the keys and values.

    Attributes:
        features: of every row's prompt.
        input_ids, attention_mask, position_ids: int64 (rows, length), of all tokens so far.
        groups: by whether the long factors apply.
    """

    features: PromptFeatures
    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    groups: dict[bool, RowGroup] = field(default_factory=dict)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens are in the cache, padding included."""
        return self.input_ids.shape[1]

    def reorder_cache(self, beam_idx: Sequence[int]) -> None:
        """Give each row the state of another, as beam search asks."""
        order = [int(row) for row in beam_idx]
        self.features = self.features.select(order)
        self.input_ids = self.input_ids[order]
        self.attention_mask = self.attention_mask[order]
        self.position_ids = self.position_ids[order]
        groups = {}
        for side, group in self.groups.items():
            rows = [new for new, old in enumerate(order) if old in group.rows]
            if rows:
                groups[side] = RowGroup(rows, group.select([order[row] for row in rows]))
        self.groups = groups
