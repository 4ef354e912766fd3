"""The sum of squares of gradients, in fp64, wherever they are, and the warning of a norm that is
not finite.

[Note: read one step late]
Only the device knows whether a norm is finite, and the host does not wait for it. Rank 0 copies the
norm and its loss to host memory after the step, with an event, and reads them in a later step, once
the event is over. Only one copy is under way at a time: a host that runs far ahead of its device
may name a step after the first bad one.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence

import torch

from hf_zero.device import kinds, pinned, streams
from hf_zero.logging import logger
from hf_zero.ops import dispatch, native
from hf_zero.ops.flat_tiles import RUNS, squared_norms
from hf_zero.zero.layout.gradients import GradientBuffer

RUN = 1 << 14  # elements summed in fp32 before fp64 takes over


def squared_norm(
    gradients: Sequence[GradientBuffer],
    device: torch.device,
    kernels: str | tuple[str, ...] = "off",
) -> torch.Tensor:
    """Return the sum of squares of this rank's part of ``gradients`` (0-dim, float64); not finite
    on overflow.

    ``kernels`` is the configuration's: whether one kernel may read all gradients of a device.
    """
    gradients = [gradient for gradient in gradients if gradient.shard is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # One by one: the sum has the same bits wherever some of them are.
    sums: dict[GradientBuffer, torch.Tensor] = {}
    unknown, shards = list[GradientBuffer](), list[torch.Tensor]()
    for gradient in gradients:
        if gradient.grad_sq_norm is not None:
            sums[gradient] = gradient.grad_sq_norm
        elif gradient.shard is not None:
            unknown.append(gradient)
            shards.append(gradient.shard)
    sums.update(zip(unknown, sums_of_squares(shards, kernels)))
    # those in host memory are uploaded together, without a wait on the host
    elsewhere = list[GradientBuffer]()
    for gradient in unknown:
        if sums[gradient].device != device:
            elsewhere.append(gradient)
    if elsewhere:
        crossed = pinned.upload(torch.stack([sums[gradient] for gradient in elsewhere]), device)
        sums.update(zip(elsewhere, crossed.unbind()))
    return torch.stack(list(map(sums.__getitem__, gradients))).sum()


def sums_of_squares(
    grads: Sequence[torch.Tensor], kernels: str | tuple[str, ...] = "off"
) -> list[torch.Tensor]:
    """Return the sum of squares of each of ``grads`` (0-dim, float64, on its device); not finite if
    an element is not.
    """
    sums: dict[int, torch.Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    by_kernel: dict[torch.device, bool] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        device = grad.device
        if device not in by_kernel:
            wanted = kernels != "off" and dispatch.wanted("optimizer", kernels, device)
            by_kernel[device] = wanted and RUNS.name not in dispatch.broken()
        if by_kernel[device] and grad.dtype != torch.float64:
            by_device.setdefault(device, []).append(index)
        elif device.type == "cpu" and grad.dtype != torch.float64:
            sums[index] = torch.tensor(native.squared_norm(grad), dtype=torch.float64)
        else:
            by_kind.setdefault((device, grad.dtype), []).append(index)
    for indices in by_device.values():
        sums.update(zip(indices, squared_norms([grads[index] for index in indices]).unbind()))
    for indices in by_kind.values():
        sums.update(zip(indices, _sums_over_runs([grads[index] for index in indices])))
    return list(map(sums.__getitem__, range(len(grads))))


def _sums_over_runs(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of squares of ``grads``, of one device and dtype."""
    # A single long fp32 sum is wrong in the third digit, many short ones are not.
    counts = [-(-grad.numel() // RUN) for grad in grads]
    # each begins at 32 bytes, so that it is summed in the same order beside any others
    starts = [0, *itertools.accumulate(-(-count // 4) * 4 for count in counts)]
    kind = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    norms = grads[0].new_empty(starts[-1], dtype=kind)
    for grad, start in zip(grads, starts):
        even = grad.numel() // RUN
        for piece, at in ((grad[: even * RUN], start), (grad[even * RUN :], start + even)):
            if piece.numel():
                rows = piece.view(-1, min(RUN, piece.numel()))
                out = norms[at : at + len(rows)]
                torch.linalg.vector_norm(rows, dim=1, dtype=kind, out=out)
    squares = norms.double().square()
    return [squares[start : start + count].sum() for start, count in zip(starts, counts)]


class NormCheck:
    """The warning, once and on rank 0, of a gradient norm that is not finite."""

    def __init__(self, device: torch.device, precision: str, rank: int):
        self._device, self._precision = device, precision
        self._on_host = kinds.is_synchronous(device)
        self._warns = rank == 0  # until it has
        self._loss: torch.Tensor | None = None
        self._numbers: torch.Tensor | None = None  # norm and loss of ``_step``, in host memory
        self._copied: streams.Event | None = None  # recorded after their copy
        self._step = 0

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of this rank's backward."""
        if self._warns:
            self._loss = loss.detach()

    def check(self, norm: torch.Tensor, step: int) -> None:
        """Check the gradient norm of ``step``, 0-dim on the device, without waiting for it."""
        loss, self._loss = self._loss, None
        if not self._warns:
            return
        if self._numbers is None:
            empty = torch.empty if self._on_host else pinned.empty
            self._numbers = empty(2, dtype=torch.float64)
        # read without an operation of torch, which could wait
        values = (ctypes.c_double * 2).from_address(self._numbers.data_ptr())
        if self._copied is not None:
            if not self._copied.query():
                return
            if not all(map(math.isfinite, values)):
                self._warn(*values)
        loss = torch.zeros_like(norm) if loss is None or loss.device != norm.device else loss
        self._numbers.copy_(torch.stack([norm.double(), loss.double().reshape(())]), True)
        self._step = step
        if not self._on_host:
            self._copied = streams.record_here(self._device)
        elif not all(map(math.isfinite, values)):
            self._warn(*values)

    def _warn(self, norm: float, loss: float) -> None:
        what = f"the gradient norm is {norm:g}"
        after = "a NaN in the weights stays there: go on from a checkpoint before this step"
        if not math.isfinite(loss):
            what = f"the loss of rank 0 is {loss:g} and the gradient norm {norm:g}"
        if math.isfinite(norm):
            after = "the weights are still finite"
        bf16 = "its precision (bf16: does it happen in fp32?), "
        narrow = bf16 if self._precision == "bf16" else ""
        self._warns = False
        logger.warning(
            "%s",
            f"step {self._step}: {what}; {after}. Look at the learning rate and its warm-up, the "
            "batches of this step (inputs that are not finite, labels that are all ignored), "
            f"{narrow}gradient_clipping; torch.autograd.set_detect_anomaly(True) names the "
            "operation",
        )
