"""How a graph asks questions of its inputs' sizes, and how it fails."""

from __future__ import annotations

import torch
from torch import Tensor


__all__ = ["OUT_OF_RANGE", "count_rows"]

# An index that no table has. ONNX has no assertion; a Gather of this row is refused by ONNX Runtime, which is
# how contradicting inputs fail instead of giving numbers.
OUT_OF_RANGE = 1 << 40


def count_rows(x: Tensor) -> Tensor:
    """The length of axis 0 as an int64 scalar tensor.

    torch.export takes a dynamic size to be at least 2 and answers questions of it while it traces; a tensor's
    value it does not know.
    """
    return torch.ones(x.shape[0], dtype=torch.int64, device=x.device).sum()
