"""This rank's memory for the gradients of flat buffers, and what it holds for the next step.

[Note: gradients between steps]
Gradients of neighboring flat buffers are adjacent, so that an update kernel processes them as one
tensor. Their memory is freed after each step and allocated again before the first gradient is
written, in one storage for life, as whole parameters are (``flat_buffer.py``): the views in
gradient buffers and their places stay the same. Each gradient that an update in the backward uses,
and frees, has memory of its own. Code must not read or write a view unless its gradient buffer
holds a gradient or :meth:`GradientBuffer.allocate` has been called. An allocation has at most
:data:`LARGEST` bytes, unless one gradient has more: an allocator that has split a freed block for
activations finds room for the next one more easily.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from hf_zero.device import kinds, streams
from hf_zero.ops.host_memory import MAPPED_ALONE, advise_huge_pages
from hf_zero.zero.layout.flat_spec import FlatSpec

Key = TypeVar("Key", bound=Hashable)
LARGEST = 1 << 28  # bytes of an allocation with several gradients
_NONE: frozenset[str] = frozenset()


class GradState(Enum):
    """The gradients that a :class:`GradientBuffer` holds for the next step."""

    EMPTY = "empty"
    UNREDUCED = "unreduced"  # this rank's own, in ``accumulated_grad``
    REDUCED = "reduced"  # of all ranks, in ``shard``
    BOTH = "reduced, and unreduced ones of later backwards"
    APPLIED = "applied by an update in the backward, and freed"


class GradientReader(Protocol):
    """The optimizer state of the same elements, whose update reads the gradient."""

    has_update: bool

    def wait_for_update(self) -> None: ...


class GradientVersion:
    """The version of the gradients of one engine: ``number`` grows with each reduction into one of
    them and each write to one.
    """

    def __init__(self) -> None:
        self.number = 0


class GradientBuffer:
    """This rank's memory for the gradient of one flat buffer.

    ``shard`` [owned] is this rank's part of the reduced gradient. If the ZeRO stage reduces once
    per accumulation window, ``accumulated_grad`` [padded] is the sum of this rank's gradients until
    then, and ``shard`` is a view of it unless the gradient is ``offloaded`` to host memory. Both
    are None for frozen parameters. On the device both are views of ``memory``, which is freed
    between steps (see the note). Only the methods here change attributes; reductions write into the
    tensors.
    """

    def __init__(self, spec: FlatSpec, version: GradientVersion):
        self.spec = spec
        self.key, self.layout, self.owned = spec.key, spec.layout, spec.owned
        self.version = version  # of all gradients of the engine
        self.state = GradState.EMPTY
        self.memory: GradientMemory | None = None
        self.shard: torch.Tensor | None = None
        self.accumulated_grad: torch.Tensor | None = None
        # reduced gradients, set aside while ``accumulated_grad`` takes further ones in
        self.earlier_reduced_grad: torch.Tensor | None = None
        # sum of squares of ``shard``, if computed on the device before it was offloaded (0-dim)
        self.grad_sq_norm: torch.Tensor | None = None
        # 16 bits are enough as long as nothing is added
        self.upcast_on_accumulate = False
        # ``accumulated_grad`` is not reduced: the optimizer sends its momentum instead
        self.stays_local = False
        self.offloaded = False  # ``shard`` is in host memory, apart from ``accumulated_grad``
        self.all_used = (1 << len(spec.layout.slots)) - 1  # a bit for each parameter
        self.used = 0  # bits of parameters with a gradient on this rank in the accumulation window
        # bits of those that have had one since the script last set gradients to None, and of those
        # that it has set to zeros since the last step
        self.present = self.zeroed = 0
        # bits of parameters that no backward of the window has used on any rank, known to all ranks
        self.idle = 0
        self.reader: GradientReader
        # names of parameters without a gradient on any rank, once the ranks have agreed
        self.unused = _NONE

    def __repr__(self) -> str:
        return f"GradientBuffer({self.key}, {self.state.value})"

    def set_memory(
        self,
        memory: GradientMemory | None,
        accumulates: bool = False,
        host: torch.Tensor | None = None,
        upcast_on_accumulate: bool = False,
    ) -> None:
        """Set the memory: the next part of ``memory``, on the device, for this rank's part or, if
        it ``accumulates``, for ``accumulated_grad``; ``host`` [owned], of an offloaded gradient.
        """
        self.memory, self.offloaded = memory, host is not None
        self.accumulated_grad = self.shard = None
        self.upcast_on_accumulate = upcast_on_accumulate
        if memory is not None:
            part = memory.take(self)
            self.accumulated_grad = part if accumulates else None
            self.move(part)
        if host is not None:
            self.shard = host

    def move(self, part: torch.Tensor) -> None:
        """Continue in ``part`` of the memory on the device."""
        if self.accumulated_grad is None:
            self.shard = part
            return
        self.accumulated_grad = part
        if not self.offloaded:
            self.shard = part[self.owned[0] : self.owned[1]]

    def writing(self) -> torch.Tensor:
        """Return ``shard``, with memory, to be written to: the update that reads it is over."""
        if self.reader.has_update:
            self.reader.wait_for_update()
        if self.memory is not None and not self.memory.is_ready:
            self.memory.set_allocated(True)
        assert self.shard is not None
        return self.shard

    def allocate(self) -> None:
        """Allocate the memory on the device before a gradient is written to it."""
        if self.memory is not None:
            self.memory.set_allocated(True)

    def move_to_device(self, memory: GradientMemory | None) -> None:
        """End the offload: the next part of ``memory`` holds this rank's part of the gradient; None
        if ``accumulated_grad`` does.
        """
        self.offloaded = False
        if memory is not None:
            self.set_memory(memory)
        elif self.accumulated_grad is not None:
            self.allocate()
            self.move(self.accumulated_grad)

    @property
    def holds_gradient(self) -> bool:
        return self.state is not GradState.EMPTY

    @property
    def has_unreduced(self) -> bool:
        """Return whether ``accumulated_grad`` holds gradients that are not reduced yet."""
        return self.state is GradState.UNREDUCED or self.state is GradState.BOTH

    @property
    def has_reduced(self) -> bool:
        """Return whether reduced gradients are held for the next step."""
        return self.state is GradState.REDUCED or self.state is GradState.BOTH

    @property
    def ready(self) -> bool:
        """Return whether a step can use the gradients held, or an update in the backward has."""
        applied = self.state is GradState.APPLIED
        return applied or self.has_reduced or (self.stays_local and self.has_unreduced)

    @property
    def all_unused(self) -> bool:
        """Return whether the ranks have agreed that none has a gradient of any parameter here."""
        return len(self.unused) == len(self.layout.slots)

    @property
    def adds_to_shard(self) -> bool:
        """Return whether the next reduction must be added to ``shard``."""
        return self.has_reduced and (self.accumulated_grad is None or self.offloaded)

    def keep_local(self, local: bool) -> None:
        """Set whether later reductions leave out ``accumulated_grad``."""
        self.stays_local = local

    def keep_reduced(self) -> None:
        """Set reduced gradients aside if they are in the memory of ``accumulated_grad``, before
        more are accumulated there: they must not be averaged again.
        """
        if self.state is GradState.REDUCED and not self.offloaded:
            assert self.shard is not None
            self.earlier_reduced_grad = self.shard.clone()

    def mark_accumulated(self, used: int) -> None:
        """Record that gradients of parameters ``used`` (bits) are in ``accumulated_grad``."""
        self.mark_used(used)
        if self.state is GradState.EMPTY:
            self.state = GradState.UNREDUCED
        elif self.state is GradState.REDUCED:
            self.state = GradState.BOTH

    def mark_reduced(self, sq_norm: torch.Tensor | None = None) -> None:
        """Record that ``shard`` holds the result of a reduction, and add the gradients set aside.

        ``sq_norm``: its sum of squares, if known.
        """
        self.grad_sq_norm, self.unused = sq_norm, _NONE
        self.version.number += 1
        if self.earlier_reduced_grad is not None:
            assert self.shard is not None
            self.shard.add_(self.earlier_reduced_grad)
            self.earlier_reduced_grad = None
        self.state = GradState.REDUCED

    def mark_applied(self, sq_norm: torch.Tensor) -> None:
        """Record that an update in the backward has used the gradient, and free it; its sum of
        squares ``sq_norm`` remains.
        """
        self.state, self.grad_sq_norm = GradState.APPLIED, sq_norm
        self.free_on_device()

    def free_on_device(self) -> None:
        """Free the memory on the device, which only this gradient uses, in the backward."""
        if self.memory is not None:
            self.memory.set_allocated(False)

    def mark_used(self, bits: int) -> None:
        """Record that this rank has had gradients of the parameters in ``bits``."""
        self.used |= bits
        self.unused = _NONE
        self.version.number += 1

    def leave_out(self) -> None:
        """Set the gradient to zero: all ranks know that no backward of the window used it."""
        self.writing().zero_()
        self.mark_reduced()
        if not self.used:
            self.set_unused(self.names_of(self.all_used))

    def set_idle(self, bits: int) -> None:
        """Record that all ranks know that no backward of the window has used the parameters in
        ``bits``.
        """
        self.idle = bits

    def set_unused(self, names: frozenset[str]) -> None:
        """Record that no rank has had gradients of these parameters."""
        self.unused = names

    def clear(self) -> None:
        """Drop all gradients that backwards have left."""
        self.state, self.earlier_reduced_grad = GradState.EMPTY, None
        self.used, self.idle, self.unused = self.zeroed, 0, _NONE

    def end_step(self) -> None:
        """Drop all gradients, once the ranks have agreed on the used parameters."""
        self.present |= self.all_used & ~(self.bits_of(self.unused) if self.unused else 0)
        self.zeroed = 0
        self.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients. Without ``set_to_none`` parameters that had one count as used by the
        next step, which updates them with zeros, as in torch, if no backward uses them.
        """
        self.zeroed = self.present = 0 if set_to_none else self.present | self.used
        self.clear()

    def set_to_none(self, name: str) -> None:
        """Count ``name`` as without a gradient, also one of zeros by ``zero_grad``."""
        others = ~self.bits_of([name])
        self.present &= others
        self.zeroed &= others
        self.used &= others

    def restore_zeros(self, present: Collection[str], zeroed: Collection[str]) -> None:
        """Continue, after a rebuild, with parameters that have had gradients, or zeros."""
        self.present = self.bits_of(present)
        self.zeroed = self.used = self.bits_of(zeroed)

    def names_of(self, bits: int) -> frozenset[str]:
        """Return the names of the parameters in ``bits``."""
        return frozenset(s.name for at, s in enumerate(self.layout.slots) if bits >> at & 1)

    def bits_of(self, names: Collection[str]) -> int:
        """Return the bits of the parameters ``names``."""
        return sum(1 << at for at, slot in enumerate(self.layout.slots) if slot.name in names)

    def record_state(self) -> Callable[[], None]:
        """Return a function that sets what is held now, after a backward that did what the last
        one has done is launched from a graph.
        """
        state, used = self.state, self.used
        pending, sq_norm = self.earlier_reduced_grad, self.grad_sq_norm

        def restore() -> None:
            self.state, self.used, self.unused = state, self.used | used, _NONE
            self.version.number += 1
            self.earlier_reduced_grad, self.grad_sq_norm = pending, sq_norm

        return restore

    def free(self) -> None:
        """Free the memory for good."""
        self.shard = self.accumulated_grad = self.earlier_reduced_grad = self.grad_sq_norm = None
        self.memory = None

    def write(
        self,
        name: str,
        value: torch.Tensor | None,
        unreduced_scale: float | torch.Tensor,
        scale: float | torch.Tensor,
    ) -> None:
        """Replace this rank's gradient of ``name``, reduced and unreduced; None removes it.

        ``scale``: the factor on gradients already reduced; ``unreduced_scale``: the factor on those
        that a reduction will still sum and divide.
        """
        self.reader.wait_for_update()
        slot, (first, start, stop) = self.layout.by_name[name], self.spec.own_range(name)
        flattened = None
        if value is None:
            self.set_to_none(name)
        else:
            self.mark_used(self.bits_of([name]))
            flattened = (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
        if self.earlier_reduced_grad is not None:
            self.earlier_reduced_grad[start:stop].zero_()
        elif self.has_reduced and self.shard is not None:
            part = self.shard[start:stop]
            if flattened is None or self.has_unreduced:
                part.zero_()
            else:
                part.copy_(flattened[first : first + stop - start]).mul_(scale)
        if self.has_unreduced and self.accumulated_grad is not None:
            unreduced = self.accumulated_grad[slot.offset : slot.end]
            if flattened is None:
                unreduced.zero_()
            else:
                unreduced.copy_(flattened).mul_(unreduced_scale)
        self.grad_sq_norm = None
        self.version.number += 1

    def write_own(self, name: str, value: torch.Tensor) -> None:
        """Replace this rank's part of the reduced gradient of ``name`` by ``value`` (1-D), which
        includes the loss scale.
        """
        _, start, stop = self.spec.own_range(name)
        self.writing()[start:stop].copy_(value)
        self.grad_sq_norm = None
        self.mark_used(self.bits_of([name]))

    @property
    def address(self) -> int:
        """The address of the gradient in ``memory``, which an upcast changes."""
        return self.on_device().data_ptr()

    def on_device(self) -> torch.Tensor:
        """Return the gradient in ``memory``."""
        on_device = self.shard if self.accumulated_grad is None else self.accumulated_grad
        assert on_device is not None
        return on_device

    def upcast(self) -> None:
        """Keep gradients in 32 bits from now on: sums in 16 bits would lose small terms."""
        self.reader.wait_for_update()
        self.upcast_on_accumulate = False
        if self.memory is not None and self.on_device().itemsize == 2:
            self.memory.upcast()
        if self.shard is not None and self.offloaded:
            self.shard = self.shard.float()


class GradientMemory:
    """Device memory of adjacent gradients of one dtype, [sum of ``sizes``]: zeros at first; freed
    and allocated again by :meth:`set_allocated`, uninitialized from then on. ``keeps``: never freed
    between steps.
    """

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, keeps: bool = False
    ):
        self._sizes, self._keeps = list(sizes), keeps
        self._buffers: list[GradientBuffer] = []
        self._elements = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._on_streams = kinds.drives_streams(device.type)
        self._in_host_memory = device.type == "cpu"
        self._taken = 0  # elements
        self.is_allocated = True  # views are made of allocated memory only
        self.is_ready = True  # allocated, and no stream has to wait for that
        # the stream on which memory was allocated, and the end of its work until then
        self._origin: tuple[streams.Stream, streams.Event] | None = None

    def take(self, buffer: GradientBuffer) -> torch.Tensor:
        """Return the next part, which ``buffer`` will hold."""
        start, size = self._taken, self._sizes[len(self._buffers)]
        self._buffers.append(buffer)
        self._taken += size
        return self._elements[start : start + size]

    @property
    def nbytes(self) -> int:
        """The bytes allocated now."""
        return self._elements.untyped_storage().nbytes()

    def set_allocated(self, allocated: bool) -> None:
        """Allocate the memory, uninitialized, for the current stream, or free it unless it is kept:
        none of the gradients is needed any more.
        """
        current = streams.current_stream(self._elements.device) if self._on_streams else None
        if not (allocated or self._keeps):  # tensor.numpy() has made it an array's, too
            self._keeps = self.is_allocated and not self._elements.untyped_storage().resizable()
        if allocated == self.is_allocated or self._keeps:
            if allocated and current is not None and self._origin and current != self._origin[0]:
                # torch's allocator may have reused memory that work on that stream still reads
                current.wait_event(self._origin[1])
                streams.record_use(self._elements, current)
            return
        if current is not None and not allocated:
            streams.record_use(self._elements, current)
        with torch.inference_mode(False):
            self._elements.untyped_storage().resize_(self._elements.nbytes if allocated else 0)
        self.is_allocated = allocated
        self.is_ready = allocated and current is None
        self._origin = (current, streams.record_event(current)) if allocated and current else None
        if allocated and self._in_host_memory and self._elements.nbytes >= MAPPED_ALONE:
            advise_huge_pages(self._elements)

    def forget_stream(self) -> None:
        """Forget the stream on which memory was allocated: its work is complete."""
        self._origin = None

    def upcast(self) -> None:
        """Keep the gradients in fp32 from now on. The 16-bit memory is free on return, and before
        the new one is allocated if it holds no gradients. A reduction under way keeps its own
        reference and is cast when it lands. Other streams wait for the cast before they use the new
        memory.
        """
        narrow: torch.Tensor | None = self._elements
        assert narrow is not None
        device = narrow.device
        current = streams.current_stream(device) if self._on_streams else None
        if not any(buffer.holds_gradient for buffer in self._buffers):
            narrow = None
        elif current is not None:
            streams.record_use(narrow, current)
        self._elements = self._elements.new_empty(0)
        for buffer in self._buffers:
            buffer.move(self._elements)
        self._elements = (
            torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
            if narrow is None
            else narrow.float()
        )
        for buffer, view in zip(self._buffers, self._elements.split(self._sizes)):
            buffer.move(view)
        self.is_ready = current is None
        self._origin = (current, streams.record_event(current)) if current is not None else None
        allocated, self.is_allocated = self.is_allocated, True
        self.set_allocated(allocated)


class GradientPart(NamedTuple):
    """The part of a memory of gradients that one of them has. freed_by: what frees it; None: the
    step, as all others.
    """

    numel: int
    dtype: torch.dtype
    freed_by: Hashable


def gradient_memories(
    parts: Mapping[Key, GradientPart], device: torch.device, keeps: bool
) -> dict[Key, Callable[[], GradientMemory]]:
    """Return functions that return the memory of each of ``parts``, which are taken in this order:
    consecutive ones of a dtype that are freed together share one, up to :data:`LARGEST` bytes. It
    is allocated at the first call for one of them.
    """
    memories: dict[Key, Callable[[], GradientMemory]] = {}
    sizes: dict[torch.dtype, list[int]] = {}  # of the last memory
    last: dict[torch.dtype, Key] = {}
    for key, (numel, dtype, freed_by) in parts.items():
        fits = dtype in last and (sum(sizes[dtype]) + numel) * dtype.itemsize <= LARGEST
        if fits and parts[last[dtype]].freed_by == freed_by:
            sizes[dtype].append(numel)
            memories[key] = memories[last[dtype]]
        else:
            sizes[dtype] = [numel]
            memories[key] = cache(partial(GradientMemory, sizes[dtype], dtype, device, keeps))
        last[dtype] = key
    return memories
