"""A stack of identical layers with one seam: what runs them can be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


__all__ = ["LayerStack", "StackRunner"]

States = Sequence[Sequence[Tensor]]
StackRunner = Callable[["LayerStack", Tensor, States, Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


class LayerStack(nn.ModuleList):
    """Layers of one architecture, run one after another.

    A layer is called as `layer(hidden, *state, *shared)` and returns the new hidden state, or a tuple of it
    and its new state. Two users exchange the loop: capture puts one node in its place, so that a layer
    captured once can be placed N times, and validation loads each layer's weights just before it runs.
    """

    _runner: StackRunner | None = None

    def forward(
        self, hidden: Tensor, states: Sequence[Sequence[Tensor]] = (), shared: Sequence[Tensor] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers.

        Args:
            hidden: hidden states, (B, S, H).
            states: per layer the tensors only that layer sees (the decoder's past key and value), or nothing.
            shared: tensors that every layer sees (mask, rotary tables, gates).

        Returns:
            The last hidden states and the layers' new states, flat: key of layer 0, value of layer 0, ...
        """
        if self._runner is not None:
            return self._runner(self, hidden, states, shared)
        new_states: list[Tensor] = []
        for index in range(len(self)):
            hidden, state = self.run_layer(index, hidden, states[index] if states else (), shared)
            new_states.extend(state)
        return hidden, new_states

    def run_layer(
        self, index: int, hidden: Tensor, state: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Run one layer; returns its hidden states and its new state."""
        out = self[index](hidden, *state, *shared)
        return (out, ()) if isinstance(out, torch.Tensor) else (out[0], out[1:])

    @contextmanager
    def run_with(self, runner: StackRunner) -> Iterator[None]:
        """Let `runner(stack, hidden, states, shared)` take the loop's place inside the context."""
        self._runner = runner
        try:
            yield
        finally:
            self._runner = None
