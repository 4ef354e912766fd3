"""Intake of gradients: from the parameters into flat memory.

[Note: who divides]
A backward leaves the gradient of the loss it was given, times the fp16 loss scale. The engine
multiplies by the weight of the micro-batch (1 / accumulation steps) and averages over ranks when it
takes a gradient in; nothing else divides. So ``engine.backward(loss)`` and plain
``loss.backward()`` give the same gradient. These factors are applied after the reduction, in the
precision of the accumulator, to this rank's chunk (:class:`Scaling` has the exceptions).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.distributed.mesh import Mesh
from hf_zero.logging import log_rank0
from hf_zero.offload.gradient_offload import GradientOffload
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradient_buffer import GradState
from hf_zero.zero.layout.precision import Scaling
from hf_zero.zero.layout.raw_grads import any_raw_grad, drop_raw_grads, raw_grads
from hf_zero.zero.layout.unit import Unit

_warned: weakref.WeakSet[Mesh] = weakref.WeakSet()  # meshes of engines
KEPT = 2  # free buffers kept per size


@dataclass(frozen=True)
class MicroBatch:
    """Properties of the backward under way.

    weight: of the micro-batch, equal on all ranks. unscale: this rank's own factor, applied before
    the reduction. reduces: the backward ends an accumulation window. on_reduced: called with each
    unit whose last gradient of the window has been reduced.
    """

    weight: float = 1.0
    unscale: float = 1.0
    reduces: bool = True
    on_reduced: Callable[[Unit], None] | None = None


class WireBuffers:
    """Buffers for gradients in messages, reused by units of the same size."""

    def __init__(self, flats: Iterable[FlatBuffer]):
        self._sizes = Counter(flat.layout.padded for flat in flats)
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for this caller's use until :meth:`release`: [numel], uninitialised."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def release(self, buffer: torch.Tensor | None) -> None:
        """Put ``buffer`` back into the pool. Sizes that occur once in a backward, as of an
        embedding or a head, are not kept.
        """
        if buffer is not None and self._sizes[buffer.numel()] > 1:
            free = self._free.setdefault((buffer.numel(), buffer.dtype), [])
            if len(free) < KEPT:
                free.append(buffer)

    def clear(self) -> None:
        """Free all buffers."""
        self._free.clear()


class GradientIntake:
    """Takes gradients off the parameters of a unit."""

    def __init__(self, scaling: Scaling, buffers: WireBuffers, offload: GradientOffload | None):
        self.scaling = scaling
        self._buffers = buffers
        self._offload = offload

    def accumulate(self, unit: Unit, batch: MicroBatch) -> bool:
        """Add this backward's gradients to the whole gradients of the window; return whether there
        were any.
        """
        unit.await_gradients()
        brought = False
        factor = self.scaling.before(batch.weight) * batch.unscale
        for flat in unit.trainable:
            gradient = flat.gradient
            adds = False
            if gradient.state is not GradState.EMPTY:
                self.upcast(flat)
                gradient.keep_reduced()
                adds = gradient.has_unreduced
            accumulated = gradient.accumulated_grad
            assert accumulated is not None
            if adds and accumulated.dtype != flat.dtype:
                # A list with another dtype would be added one parameter at a time.
                taken = self._buffers.acquire(flat.layout.padded, flat.dtype, flat.full.device)
                used = take_in(flat, taken, False, 1.0)
                accumulated.add_(taken, alpha=factor)
                self._buffers.release(taken)
            else:
                used = take_in(flat, accumulated, adds, factor)
            gradient.mark_accumulated(used)
            brought |= used > 0
        return brought

    def upcast(self, flat: FlatBuffer) -> None:
        """Upcast the gradient of ``flat``, which was kept in 16 bits, before something is added to
        it.
        """
        if flat.gradient.upcast_on_accumulate:
            if self._offload is not None:
                self._offload.wait()
            flat.optimizer_shard.wait_for_update()
            flat.gradient.upcast()


def grad_versions(unit: Unit) -> list[Any]:
    """Return a value that changes when autograd adds to a gradient of ``unit``."""
    grads = (grad for flat in unit.trainable for grad in raw_grads(flat.members))
    return [
        None if grad is None else (grad._version, id(grad) if grad.is_sparse else grad.data_ptr())
        for grad in grads
    ]


def mark_present(flat: FlatBuffer) -> None:
    """Record the parameters of ``flat`` with a gradient that is not taken in yet."""
    bits = 0
    for place, grad in enumerate(raw_grads(flat.members)):
        if grad is not None:
            bits |= 1 << place
    flat.gradient.mark_used(bits)


def drop_grads(flat: FlatBuffer) -> None:
    """Drop unused gradients from the parameters of ``flat``."""
    if any_raw_grad(flat.members):
        drop_raw_grads(flat.members)


@torch.no_grad()
def take_in(flat: FlatBuffer, target: torch.Tensor, accumulate: bool, factor: float) -> int:
    """Compute ``target = factor * grad`` (or ``+=``) for every parameter; a missing gradient counts
    as zero. Clears ``.grad``. Return a bit for each parameter with a gradient.
    """
    grads, views = [], []
    # Parameters are adjacent: one call creates the views of all, and one takes all gradients in.
    given = raw_grads(flat.members)
    lacking = 0
    for place, (grad, view) in enumerate(
        zip(given, torch._C._nn.unflatten_dense_tensors(target, list(flat.views.values())))
    ):
        if grad is None:
            lacking |= 1 << place
            if not accumulate:
                view.zero_()
        elif view.numel():
            grads.append(dense(flat, place, grad) if grad.is_sparse else grad)
            views.append(view)
    del given
    drop_raw_grads(flat.members)
    if grads and accumulate:
        torch._foreach_add_(views, grads, alpha=factor)
    elif grads:
        torch._foreach_copy_(views, grads)
        if factor != 1.0:
            target[: flat.layout.numel].mul_(factor)
    if not accumulate:
        target[flat.layout.numel :].zero_()
    return flat.gradient.all_used & ~lacking


def dense(flat: FlatBuffer, place: int, grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad``, the sparse gradient of the parameter at ``place`` of ``flat``, as a dense
    tensor; logs this once per engine.
    """
    if flat.engine_mesh not in _warned:
        _warned.add(flat.engine_mesh)
        log_rank0(
            f"the gradient of {flat.layout.slots[place].name} is sparse and is made dense, because "
            "flat buffers travel whole; "
            "sparse=True saves nothing here and costs a copy",
            logging.WARNING,
        )
    return grad.to_dense()
