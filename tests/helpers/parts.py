"""Whole tensors from the parts of ranks that ``torch.distributed.checkpoint.state_dict`` gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.checkpoint.tensor_part import TensorPart


def whole(parts: Sequence[TensorPart]) -> torch.Tensor:
    """Join ``parts``, which hold each element at least once, and the same values of it."""
    joined = torch.full(parts[0].shape, torch.nan, dtype=parts[0].dtype)
    for part in parts:
        assert part.shape == joined.shape
        for offsets, view in part.pieces:
            place = tuple(slice(at, at + size) for at, size in zip(offsets, view.shape))
            assert torch.all(joined[place].isnan() | (joined[place] == view))
            joined[place] = view
    assert not joined.isnan().any()
    return joined
