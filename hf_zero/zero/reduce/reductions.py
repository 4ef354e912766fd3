"""Gradients on their way: taken off the parameters into flat memory, sent in messages, waited for,
and written into each rank's shard.

[Note: who divides]
A backward leaves the gradient of the loss it was given, times the fp16 loss scale. The engine
multiplies by the weight of the micro-batch (1 / accumulation steps) and averages over ranks;
nothing else divides. So ``engine.backward(loss)`` and plain ``loss.backward()`` give the same
gradient. Weight and rank average are applied to this rank's reduced shard, in the precision of the
accumulator; fp16 on the wire and prescale are the exceptions (:class:`AveragingFactors`). Gradients
accumulated before the reduction carry the weight from the accumulation on.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from hf_zero.device import kinds, streams
from hf_zero.device.spans import span
from hf_zero.device.streams import TensorPool
from hf_zero.distributed.handle import Handle, minus_zero
from hf_zero.distributed.mesh import Mesh
from hf_zero.logging import log_rank0
from hf_zero.offload.unit_updates import GradientCopies
from hf_zero.zero.gather.shared_shards import Pack
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradients import GradState
from hf_zero.zero.layout.parameter_views import any_raw_grad, drop_raw_grads, raw_grads
from hf_zero.zero.reduce.norm import sums_of_squares

# Messages with acquired buffers that may be in flight at once; unlimited while ranks wait jointly
# (:meth:`ReductionMessages.set_waits_jointly`): in the first backward of a kind with gathers, and
# while the backward of an older forward is pending.
IN_FLIGHT = 2


@dataclass(eq=False)
class _Reduction:
    """The reduction of one flat buffer; its result times ``scale`` goes to the gradient shard."""

    flat: FlatBuffer
    wire: torch.Tensor  # [padded], to be summed
    scale: float
    acquired: torch.Tensor | None  # ``wire``, if it must be released
    # stream that fills ``wire``, while the reduction waits for others; None on the host
    stream: streams.Stream | None = None


@dataclass(eq=False)
class _Message:
    """A message in flight, with the reduction of one flat buffer or of several small ones."""

    reductions: Sequence[_Reduction]
    handles: Sequence[Handle]  # one per reduction
    number: int  # number of the message in its backward
    takes_memory: bool  # besides the gradients themselves, until it is over


class ReductionMessages:
    """Messages of gradients: sends them in call order, waits for the oldest, and writes its results
    into the gradient shards.

    ``before_wait`` is called before this waits for a message in a backward. Small reductions, of at
    most ``packed`` elements together, share a message; others are sent at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        sums: WindowSums,
        buffers: TensorPool,
        offload: GradientCopies | None,
        kernels: str | tuple[str, ...],
        packed: int,
        before_wait: Callable[[], None],
    ):
        self._mesh = mesh
        # whose streams fill messages; None on the host
        self._device = None if kinds.is_synchronous(mesh.device) else mesh.device
        self._sums, self._buffers, self._offload = sums, buffers, offload
        self._kernels = kernels
        self._pack = Pack(packed if mesh.pp_stage_ranks > 1 else 0)  # of the waiting reductions
        self._before_wait = before_wait
        self.waiting: list[_Reduction] = []  # to share a message with others
        self._messages: list[_Message] = []
        self._taking_memory = 0  # number of those that take memory
        # On a single rank nothing is on the wire, and gradients for the host should leave at once.
        self._max_in_flight = IN_FLIGHT if mesh.pp_stage_ranks > 1 else 0
        self._waits_jointly = False
        self._on_reduced: Callable[[FlatBuffer], None] | None = None
        self.sent = 0  # messages in this backward
        if self._device is not None:
            minus_zero(mesh.device)  # before streams that do not wait for each other read it

    def begin(self, joint: bool, on_reduced: Callable[[FlatBuffer], None] | None) -> None:
        """Begin a backward. ``joint`` as in :meth:`set_waits_jointly`; ``on_reduced`` is called
        with each flat buffer whose reduction is over.
        """
        self.sent, self._on_reduced = 0, on_reduced
        self.set_waits_jointly(joint)

    def set_waits_jointly(self, joint: bool) -> None:
        """Set whether, before the end of the backward, this waits only for messages that all ranks
        have sent. No effect on a single rank.
        """
        self._waits_jointly = joint and self._mesh.pp_stage_ranks > 1

    def _is_small(self, flat: FlatBuffer) -> bool:
        """Return whether the gradient of ``flat`` may share a message. A sum over two dimensions
        needs two messages per flat buffer and does not.
        """
        is_small = flat.layout.padded <= self._pack.small and flat.spec.reduce_codec is None
        return is_small and not flat.mesh.sums_twice

    def send(
        self,
        flat: FlatBuffer,
        wire: torch.Tensor,
        acquired: torch.Tensor | None,
        scale: float,
        alone: bool = False,
    ) -> None:
        """Sum ``wire`` [padded] over the ranks: a small one in a message with others, unless it is
        sent ``alone``. ``acquired`` is ``wire`` if it must be released afterwards.
        """
        if not alone and self._is_small(flat):
            elements = flat.layout.padded
            if not self._pack.fits(elements, wire.dtype, flat.mesh):
                self.flush()
            stream = None if self._device is None else streams.current_stream(self._device)
            self.waiting.append(_Reduction(flat, wire, scale, acquired, stream))
            self._pack.add(elements, wire.dtype, flat.mesh)
            return
        if flat.layout.num_shards > 1:
            handle = flat.mesh.shard.reduce_scatter(wire, flat.key, flat.spec.reduce_codec)
        else:
            handle = flat.mesh.replicate.all_reduce(wire, flat.key, ordered=True)
        takes_memory = (
            acquired is not None
            or flat.spec.reduce_codec is not None
            or (flat.gradient.offloaded and self._offload is not None)
            or self._on_reduced is not None  # which frees the gradients
        )
        self._track([_Reduction(flat, wire, scale, acquired)], [handle], takes_memory)

    def flush_unless_fits(self, flats: Sequence[FlatBuffer]) -> None:
        """Send the waiting reductions, unless the small ones of ``flats``, the next flat buffers,
        fit into their message.
        """
        small = [flat.layout.padded for flat in flats if self._is_small(flat)]
        if not small or not self._pack.fits(sum(small)):
            self.flush()

    def flush(self) -> None:
        """Send the waiting reductions in one message."""
        reductions, self.waiting = self.waiting, []
        self._pack.clear()
        if reductions and reductions[0].stream is not None:
            filled_on = {item.stream for item in reductions if item.stream is not None}
            streams.wait_for(filled_on, streams.current_stream(reductions[0].wire.device))
        if len(reductions) == 1:
            one = reductions[0]
            self.send(one.flat, one.wire, one.acquired, one.scale, alone=True)
        elif reductions:
            wires, flat = [reduction.wire for reduction in reductions], reductions[0].flat
            key = f"{flat.key}..{reductions[-1].flat.key}"
            if flat.layout.num_shards > 1:
                handles = flat.mesh.shard.reduce_packed(wires, key)
            else:
                message = torch.cat(wires)
                packed = flat.mesh.replicate.all_reduce(message, key, ordered=True).hold(message)
                handles = packed.split([wire.numel() for wire in wires])
            self._track(reductions, handles, takes_memory=True)

    def _track(
        self, reductions: Sequence[_Reduction], handles: Sequence[Handle], takes_memory: bool
    ) -> None:
        """Record a message that was sent, and wait for the oldest if too many are in flight."""
        self._messages.append(_Message(reductions, handles, self.sent, takes_memory))
        self._taking_memory += takes_memory
        self.sent += 1
        if self._waits_jointly or self._taking_memory <= self._max_in_flight:
            return
        self._before_wait()
        while self._taking_memory > self._max_in_flight:
            self._finish_oldest()

    def finish(self) -> None:
        """Send the waiting reductions, and wait for all messages."""
        self.flush()
        while self._messages:
            self._finish_oldest()

    def finish_beyond(self, number: int) -> None:
        """Wait for the oldest messages in excess of those that may be in flight, among the first
        ``number``, which all ranks have sent.
        """
        while self._messages and self._messages[0].number < number - IN_FLIGHT:
            self._finish_oldest()

    def drop(self) -> None:
        """Drop all messages and their results, once other ranks have them."""
        if self._messages:
            self._before_wait()
        for message in self._messages:
            for reduction, handle in zip(message.reductions, message.handles):
                handle.drop()
                self._buffers.release(reduction.acquired)
        for waiting in self.waiting:
            self._buffers.release(waiting.acquired)
        self._messages, self.waiting = [], []
        self._pack.clear()
        self._taking_memory = 0

    def _finish_oldest(self) -> None:
        """Wait for the oldest message, and take its results into the gradient shards."""
        message = self._messages.pop(0)
        self._taking_memory -= message.takes_memory
        for reduction, handle in zip(message.reductions, message.handles):
            flat, gradient = reduction.flat, reduction.flat.gradient
            adds = gradient.adds_to_shard
            if adds:
                self._sums.upcast(flat)
            shard = gradient.writing()
            if flat.layout.num_shards > 1 and flat.mesh.replicate.size > 1:
                # memory of the stream that waits, not of the one that has sent the message
                part = reduction.wire.new_empty(flat.layout.shard_numel)
                with span("wait_reduction", flat.key):
                    handle.reduce_into(part, False, 1.0)
                handle = flat.mesh.replicate.all_reduce(part, flat.key, ordered=True)
            if gradient.offloaded and self._offload is not None:
                gradient.mark_reduced(self._send_to_host(reduction, handle, adds))
            else:
                with span("wait_reduction", flat.key):
                    handle.reduce_into(shard, adds, reduction.scale)
                gradient.mark_reduced()
            self._buffers.release(reduction.acquired)
            if self._on_reduced is not None:
                self._on_reduced(flat)

    def _send_to_host(
        self, reduction: _Reduction, handle: Handle, adds: bool
    ) -> torch.Tensor | None:
        """Copy the result to host memory; return its sum of squares, if all is in it."""
        gradient, wire = reduction.flat.gradient, reduction.acquired
        if wire is None:
            wire = gradient.accumulated_grad  # 32 bits by now, if it was upcast meanwhile
        assert gradient.shard is not None and wire is not None
        values = torch.empty(gradient.shard.numel(), dtype=wire.dtype, device=wire.device)
        # If the host adds or casts, it also multiplies.
        host_scale = reduction.scale if adds or gradient.shard.dtype != wire.dtype else 1.0
        with span("wait_reduction", gradient.key):
            handle.reduce_into(values, False, reduction.scale / host_scale)
        squares = None if adds else sums_of_squares([values], self._kernels)[0] * host_scale**2
        assert self._offload is not None
        self._offload.send(gradient, values, adds, host_scale)
        return squares


_warned: weakref.WeakSet[Mesh] = weakref.WeakSet()  # meshes of engines
KEPT = 2  # free buffers kept per size


def wire_buffers(flats: Iterable[FlatBuffer]) -> TensorPool:
    """Return the pool of buffers for gradients in messages. Sizes that occur once in a backward, as
    of an embedding or a head, are not kept.
    """
    sizes = Counter(flat.layout.padded for flat in flats)
    return TensorPool({numel: KEPT if units > 1 else 0 for numel, units in sizes.items()})


class WindowSums:
    """The sums of this rank's gradients over the accumulation window, where a stage reduces once
    per window (``GradientBuffer.accumulated_grad``).
    """

    def __init__(self, buffers: TensorPool, offload: GradientCopies | None):
        self._buffers, self._offload = buffers, offload

    def add(self, unit: Unit, factor: float) -> bool:
        """Add this backward's gradients of ``unit``, times ``factor``; return whether there were
        any.
        """
        if unit.streams.computing:
            unit.streams.wait_for_gradients()
        has_gradients = False
        for flat in unit.trainable_flats:
            gradient = flat.gradient
            if gradient.has_unreduced and not any_raw_grad(flat.members):
                continue  # taken in when the unit became complete
            adds = False
            if gradient.state is not GradState.EMPTY:
                self.upcast(flat)
                gradient.keep_reduced()
                adds = gradient.has_unreduced
            memory = gradient.memory
            if memory is not None and not memory.is_ready:
                memory.set_allocated(True)
            accumulated = gradient.accumulated_grad
            assert accumulated is not None
            if adds and accumulated.dtype != flat.dtype:
                # A list with another dtype would be added one parameter at a time.
                taken = self._buffers.acquire(flat.layout.padded, flat.dtype, flat.full.device)
                used = collect_gradients(flat, taken, False, 1.0)
                accumulated.add_(taken, alpha=factor)
                self._buffers.release(taken)
            else:
                used = collect_gradients(flat, accumulated, adds, factor)
            gradient.mark_accumulated(used)
            has_gradients |= used > 0
        return has_gradients

    def upcast(self, flat: FlatBuffer) -> None:
        """Upcast the gradient of ``flat``, kept in 16 bits, before something is added to it."""
        if flat.gradient.upcast_on_accumulate:
            if self._offload is not None:
                self._offload.wait()
            flat.gradient.upcast()


def grad_versions(unit: Unit) -> list[tuple[int, int] | None]:
    """Return a value that changes when autograd adds to a gradient of ``unit``."""
    grads = (grad for flat in unit.trainable_flats for grad in raw_grads(flat.members))
    return [
        None if grad is None else (grad._version, id(grad) if grad.is_sparse else grad.data_ptr())
        for grad in grads
    ]


def mark_present(flat: FlatBuffer) -> None:
    """Record the parameters of ``flat`` with a gradient that is not taken in yet."""
    bits = 0
    for index, grad in enumerate(raw_grads(flat.members)):
        if grad is not None:
            bits |= 1 << index
    flat.gradient.mark_used(bits)


@torch.no_grad()
def collect_gradients(
    flat: FlatBuffer, target: torch.Tensor, accumulate: bool, factor: float
) -> int:
    """Compute ``target = factor * grad`` (or ``+=``) for every parameter; a missing gradient counts
    as zero. Clears ``.grad``. Return a bit for each parameter with a gradient.
    """
    grads, views = [], []
    # One call creates the views of all parameters, and one takes all gradients in.
    gradients = raw_grads(flat.members)
    lacking = 0
    handles = flat.parameter_views
    parts = torch._C._nn.unflatten_dense_tensors(target, handles.templates)
    views_of_members = map(parts.__getitem__, handles.members_at)
    for index, (grad, view) in enumerate(zip(gradients, views_of_members)):
        if grad is None:
            lacking |= 1 << index
            if not accumulate:
                view.zero_()
        elif view.numel():
            grads.append(dense(flat, index, grad) if grad.is_sparse else grad)
            views.append(view)
    del gradients
    drop_raw_grads(flat.members)
    if grads and accumulate:
        torch._foreach_add_(views, grads, alpha=factor)
    elif grads:
        torch._foreach_copy_(views, grads)
        if factor != 1.0:
            target[: flat.layout.end].mul_(factor)
    if handles.padding_at and not accumulate:
        torch._foreach_zero_(list(map(parts.__getitem__, handles.padding_at)))
    return flat.gradient.all_used & ~lacking


def dense(flat: FlatBuffer, index: int, grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad``, the sparse gradient of the parameter at ``index`` of ``flat``, as a dense
    tensor; logs this once per engine.
    """
    if flat.engine_mesh not in _warned:
        _warned.add(flat.engine_mesh)
        log_rank0(
            f"the gradient of {flat.layout.slots[index].name} is sparse and is made dense, because "
            "flat buffers travel whole; sparse=True saves nothing here and costs a copy",
            logging.WARNING,
        )
    return grad.to_dense()
