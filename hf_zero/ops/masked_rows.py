"""Sparse output: a masked language model's head runs only over the rows whose label counts (Izsak
et al. 2021, section 3; about 15% of them).

[Note: the number of rows]
The rows are written, in order, into a number of places that the host must know when it launches the
head; no row may be left out. Labels in host memory are counted on the host. Labels on a device are
counted there on a side stream before the model's body is launched, and the count is copied to
pinned memory. The head waits for that copy alone. If the host launches no faster than the device
computes, the count has arrived by then. If the host is ahead, it waits until the device has reached
this forward, and the whole body is queued behind the count: the device does not idle. So the count
is exact for every batch, whatever earlier batches were like. In a captured graph the host cannot
read the count, and the head runs over all tokens.
"""

from __future__ import annotations

import torch

from hf_zero.device import pinned, streams
from hf_zero.errors import KernelError
from hf_zero.ops.operators import GradientContext

GRANULE = 128  # the number of places is a multiple of a GEMM's tile
SLACK = 0.125  # fraction of the rows: empty places allowed before their number shrinks


def select_rows(
    hidden: torch.Tensor, labels: torch.Tensor, *, capacity: int, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the rows of ``hidden`` [tokens, width] whose label [tokens] is not ``ignore_index``,
    in order: (rows [capacity, width], their labels, lost).

    Empty places hold a copy of row 0 and the label ``ignore_index``. ``lost`` is the number of rows
    without a place, a tensor on the device. The backward gives each row of ``hidden`` the gradient
    of its place, or 0. Raises KernelError for shapes that do not fit together.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise KernelError(
            f"hidden {tuple(hidden.shape)} with labels {tuple(labels.shape)}: give "
            "[tokens, width] and [tokens]"
        )
    if labels.device != hidden.device:
        raise KernelError(
            f"labels are on {labels.device} and hidden on {hidden.device}: move them to one device"
        )
    rows, targets, _, lost = torch.ops.hf_zero.select_rows(hidden, labels, ignore_index, capacity)
    return rows, targets, lost


class RowCount:
    """The number of ``labels`` on a device that count, copied asynchronously (see the note)."""

    def __init__(self, labels: torch.Tensor, ignore_index: int = -100):
        self.tokens = labels.numel()
        stream = streams.side_stream(labels.device, streams.Use.COUNTS)
        stream.wait_stream(streams.current_stream(labels.device))
        with streams.on_stream(stream):
            self._number = pinned.empty(1, torch.int64)
            self._number.copy_((labels != ignore_index).sum().view(1), non_blocking=True)
        self._arrived = streams.record_event(stream)
        labels.record_stream(stream)

    def read(self) -> int:
        """Return the number; waits for the copy."""
        self._arrived.synchronize()
        return int(self._number)


class RowCapacity:
    """The number of places for the rows that count; one object for each head.

    Never fewer than the rows. It is a multiple of ``GRANULE``, and stays constant while no more
    than ``SLACK`` of the rows are left empty, so that batches of about equal share have tensors of
    one shape.
    """

    def __init__(self) -> None:
        self._last = 0

    def __deepcopy__(self, memo: dict[int, object]) -> RowCapacity:
        return RowCapacity()  # a copied model sees batches of its own

    def places(self, count: RowCount) -> int:
        """Return the number of places for the rows of ``count``."""
        minimum = max(count.read(), 1)  # an empty head would launch kernels without blocks
        if not minimum <= self._last <= minimum * (1 + SLACK) + GRANULE:
            self._last = -(-minimum // GRANULE) * GRANULE
        return min(count.tokens, self._last)


@torch.library.custom_op("hf_zero::select_rows", mutates_args=())
def _select(
    hidden: torch.Tensor, labels: torch.Tensor, ignore_index: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rows, labels, slot of each token or ``capacity``, lost)."""
    tokens, device = labels.numel(), labels.device
    if not tokens or not capacity:
        missing = (labels != ignore_index).sum()
        targets = labels.new_full((capacity,), ignore_index)
        return (
            hidden.new_zeros(capacity, hidden.shape[1]),
            targets,
            labels.new_full((tokens,), capacity, dtype=torch.int64),
            missing,
        )
    counts = (labels != ignore_index).cumsum(0)
    slots = torch.where((labels != ignore_index) & (counts <= capacity), counts - 1, capacity)
    # Tokens without a place are scattered to one extra slot, which is never read.
    taken = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
    taken.scatter_(0, slots, torch.arange(tokens, device=device))
    taken = taken[:capacity]
    targets = labels[taken].where(torch.arange(capacity, device=device) < counts[-1], ignore_index)
    return (hidden.index_select(0, taken), targets, slots, (counts[-1] - capacity).clamp(min=0))


@_select.register_fake
def _(
    hidden: torch.Tensor, labels: torch.Tensor, ignore_index: int, capacity: int
) -> tuple[torch.Tensor, ...]:
    return (
        hidden.new_empty(capacity, hidden.shape[1]),
        labels.new_empty(capacity),
        labels.new_empty(labels.shape, dtype=torch.int64),
        labels.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op("hf_zero::select_rows_backward", mutates_args=())
def _spread(grad: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the gradient [tokens, width] from that of the places [capacity, width]."""
    capacity = grad.shape[0]
    if not capacity:
        return grad.new_zeros(slots.numel(), grad.shape[1])
    return grad.index_select(0, slots.clamp(max=capacity - 1)).masked_fill_(
        (slots == capacity)[:, None], 0.0
    )


@_spread.register_fake
def _(grad: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(slots.numel(), grad.shape[1])


def _keep_slots(
    ctx: GradientContext, inputs: tuple[object, ...], output: tuple[torch.Tensor, ...]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])


def _hand_back(
    ctx: GradientContext, grad: torch.Tensor | None, *unused: object
) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    return torch.ops.hf_zero.select_rows_backward(grad, *ctx.saved_tensors), None, None, None


_select.register_autograd(_hand_back, setup_context=_keep_slots)
