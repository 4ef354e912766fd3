"""Sparse output: only the rows whose label counts go through a masked language model's head (Izsak et al. 2021, section 3; about 15% of them).

How many rows count is known to the device alone, and asking it would stop the step. So rows are put, in order, into a fixed number of places,
and a count of those that found none comes back; :class:`RowCapacity` reads it when it has arrived, and raises. On a CPU there is nothing to wait
for, and the number of places is exact.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hf_zero.device import pinned, streams
from hf_zero.errors import KernelError

GRANULE = 128  # places come in multiples of a GEMM's tile
SHARE = 0.25  # of the tokens, at least: masking 15% of 512 tokens or more never reaches it
MARGIN = 1.25  # over the most that has been seen


def select_rows(
    hidden: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = -100, capacity: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of ``hidden`` [tokens, width] whose label [tokens] is not ``ignore_index``, in order: (rows [capacity, width], their labels, lost).

    Places that stay empty hold a copy of row 0 and the label ``ignore_index``. ``lost`` is the number of rows that found no place, a tensor on the
    device. Without ``capacity`` there are as many places as rows on a CPU, and everywhere else as many as tokens. The backward
    gives each row of ``hidden`` the gradient of its place, or 0. Raises KernelError for shapes that do not fit together.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise KernelError(f"hidden {tuple(hidden.shape)} with labels {tuple(labels.shape)}: give [tokens, width] and [tokens]")
    if labels.device != hidden.device:
        raise KernelError(f"labels are on {labels.device} and hidden on {hidden.device}: move them to one device")
    if capacity is None:
        capacity = int((labels != ignore_index).sum()) if hidden.device.type == "cpu" else hidden.shape[0]
    if capacity < 0:
        raise KernelError(f"capacity={capacity}: the number of rows to make room for; give 0 or more")
    rows, kept, _, lost = torch.ops.hf_zero.select_rows(hidden, labels, ignore_index, capacity)
    return rows, kept, lost


class RowCapacity:
    """How many places to make for rows that count, from what has been seen of earlier batches; one for each head.

    The first batch is waited for. From then on counts come back by themselves, and are read one or more steps later.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._pending: deque[tuple[streams.Event, torch.Tensor, int, int]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowCapacity:
        return RowCapacity()  # a copied model sees batches of its own

    def places(self, labels: torch.Tensor, ignore_index: int = -100) -> int:
        """For ``labels`` [tokens]. Raises KernelError where rows of an earlier batch found no place."""
        tokens = labels.numel()
        if labels.device.type == "cpu":
            return int((labels != ignore_index).sum())
        if not self._share:
            self._learn(int((labels != ignore_index).sum()), tokens)
        while self._pending and self._pending[0][0].query():
            _, lost, places, tokens_then = self._pending.popleft()
            self._learn(places + int(lost), tokens_then)
            if lost > 0:
                raise KernelError(
                    f"{int(lost)} labelled tokens of a batch of {tokens_then} found no room in the {places} rows of the sparse head, "
                    f"and that step was made without them: the labelled share varies by more than {MARGIN} times from batch to batch; shuffle the "
                    "data, or leave masked_rows out of `kernels`"
                )
        return min(tokens, -(-int(tokens * self._share) // GRANULE) * GRANULE)

    def note(self, lost: torch.Tensor, places: int, tokens: int) -> None:
        """``lost`` is on its way to the host."""
        if lost.device.type == "cpu" or places >= tokens:
            return
        arrived = pinned.empty(1, lost.dtype).view(lost.shape)
        arrived.copy_(lost, non_blocking=True)
        event = streams.record_event(streams.current_stream(lost.device))
        self._pending.append((event, arrived, places, tokens))

    def _learn(self, rows: int, tokens: int) -> None:
        self._share = min(1.0, max(self._share, SHARE, MARGIN * rows / max(tokens, 1)))


@torch.library.custom_op("hf_zero::select_rows", mutates_args=())
def _select(
    hidden: torch.Tensor, labels: torch.Tensor, ignore_index: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, labels, slot of each token or ``capacity``, lost)."""
    tokens, device = labels.numel(), labels.device
    if not tokens or not capacity:
        missing = (labels != ignore_index).sum()
        kept = labels.new_full((capacity,), ignore_index)
        return hidden.new_zeros(capacity, hidden.shape[1]), kept, labels.new_full((tokens,), capacity, dtype=torch.int64), missing
    counts = (labels != ignore_index).cumsum(0)
    slots = torch.where((labels != ignore_index) & (counts <= capacity), counts - 1, capacity)
    # Whatever has no place goes to one more, which nobody reads.
    taken = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
    taken.scatter_(0, slots, torch.arange(tokens, device=device))
    taken = taken[:capacity]
    kept = labels[taken].where(torch.arange(capacity, device=device) < counts[-1], ignore_index)
    return hidden.index_select(0, taken), kept, slots, (counts[-1] - capacity).clamp(min=0)


@_select.register_fake
def _(hidden: torch.Tensor, labels: torch.Tensor, ignore_index: int, capacity: int) -> tuple[torch.Tensor, ...]:
    return (
        hidden.new_empty(capacity, hidden.shape[1]),
        labels.new_empty(capacity),
        labels.new_empty(labels.shape, dtype=torch.int64),
        labels.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op("hf_zero::select_rows_backward", mutates_args=())
def _spread(grad: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[tokens, width] from [capacity, width]."""
    capacity = grad.shape[0]
    if not capacity:
        return grad.new_zeros(slots.numel(), grad.shape[1])
    return grad.index_select(0, slots.clamp(max=capacity - 1)).masked_fill_((slots == capacity)[:, None], 0.0)


@_spread.register_fake
def _(grad: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(slots.numel(), grad.shape[1])


def _keep_slots(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])


def _hand_back(ctx: Any, grad: torch.Tensor | None, *unused: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    return torch.ops.hf_zero.select_rows_backward(grad, *ctx.saved_tensors), None, None, None


_select.register_autograd(_hand_back, setup_context=_keep_slots)
