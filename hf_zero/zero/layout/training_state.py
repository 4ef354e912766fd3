"""The training state of one flat buffer on this rank: its gradient, accumulated and reduced, and
its optimizer state, with the update under way.

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

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from functools import cache, partial
from typing import NamedTuple, TypeVar

import torch

from hf_zero.device import kinds, streams
from hf_zero.offload.storage import MASTER, DeviceStorage, ReadableStorage, Storage, StorageContents
from hf_zero.ops.host_memory import MAPPED_ALONE, advise_huge_pages
from hf_zero.zero.layout.flat_spec import FlatSpec

Key = TypeVar("Key", bound=Hashable)

_NONE: frozenset[str] = frozenset()
LARGEST = 1 << 28  # bytes of an allocation with several gradients


class GradState(Enum):
    """The gradients that a :class:`GradientBuffer` holds for the next step."""

    EMPTY = "empty"
    UNREDUCED = "unreduced"  # this rank's own, in ``accumulated_grad``
    REDUCED = "reduced"  # of all ranks, in ``shard``
    BOTH = "reduced, and unreduced ones of later backwards"
    APPLIED = "applied by an update in the backward, and freed"


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
        # bits of parameters that no backward of the window has used on any rank, known to all ranks
        self.idle = 0
        self.reader: OptimizerShard  # whose update reads the gradient
        # names of parameters without a gradient on any rank, once the ranks have agreed
        self.unused = _NONE

    def __repr__(self) -> str:
        return f"GradientBuffer({self.key}, {self.state.value})"

    def set_memory(
        self,
        memory: GradientMemory | None,
        whole: bool = False,
        host: torch.Tensor | None = None,
        upcast_on_accumulate: bool = False,
    ) -> None:
        """Set the memory: the next part of ``memory``, on the device, for this rank's part or, if
        ``whole``, for ``accumulated_grad``; ``host`` [owned], of an offloaded gradient.
        """
        self.memory, self.offloaded = memory, host is not None
        self.accumulated_grad = self.shard = None
        self.upcast_on_accumulate = upcast_on_accumulate
        if memory is not None:
            part = memory.take(self)
            self.accumulated_grad = part if whole else None
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
        reduced = self.state is GradState.REDUCED or self.state is GradState.BOTH
        return reduced and (self.accumulated_grad is None or self.offloaded)

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
        self.used |= used
        self.unused = _NONE
        self.version.number += 1
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
        self.set_unused(frozenset(slot.name for slot in self.layout.slots))

    def set_idle(self, bits: int) -> None:
        """Record that all ranks know that no backward of the window has used the parameters in
        ``bits``.
        """
        self.idle = bits

    def set_unused(self, names: frozenset[str]) -> None:
        """Record that no rank has had gradients of these parameters."""
        self.unused = names

    def clear(self) -> None:
        """Drop all gradients, after a step and for ``zero_grad``."""
        self.state, self.earlier_reduced_grad = GradState.EMPTY, None
        self.used, self.idle, self.unused = 0, 0, _NONE

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
        bit = 1 << self.layout.slots.index(slot)
        if value is None:
            self.used &= ~bit
        else:
            self.mark_used(bit)
        flattened = (
            None
            if value is None
            else (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
        )
        if self.earlier_reduced_grad is not None:
            self.earlier_reduced_grad[start:stop].zero_()
        elif self.has_reduced and self.shard is not None:
            part = self.shard[start:stop]
            if flattened is None or self.has_unreduced:
                part.zero_()
            else:
                part.copy_(flattened[first : first + stop - start]).mul_(scale)
        if self.has_unreduced and self.accumulated_grad is not None:
            whole = self.accumulated_grad[slot.offset : slot.end]
            if flattened is None:
                whole.zero_()
            else:
                whole.copy_(flattened).mul_(unreduced_scale)
        self.grad_sq_norm = None
        self.version.number += 1

    def write_own(self, name: str, value: torch.Tensor) -> None:
        """Replace this rank's part of the reduced gradient of ``name`` by ``value`` (1-D), which
        includes the loss scale.
        """
        _, start, stop = self.spec.own_range(name)
        self.writing()[start:stop].copy_(value)
        self.grad_sq_norm = None
        self.mark_used(1 << self.layout.slots.index(self.layout.by_name[name]))

    @property
    def address(self) -> int:
        """The address of the gradient in ``memory``, which an upcast changes."""
        return self.on_device().data_ptr()

    def on_device(self) -> torch.Tensor:
        """Return the gradient in ``memory``."""
        whole = self.accumulated_grad
        if whole is not None:
            return whole
        assert self.shard is not None
        return self.shard

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
        self._whole = torch.zeros(sum(sizes), dtype=dtype, device=device)
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
        return self._whole[start : start + size]

    @property
    def nbytes(self) -> int:
        """The bytes allocated now."""
        return self._whole.untyped_storage().nbytes()

    def set_allocated(self, allocated: bool) -> None:
        """Allocate the memory, uninitialized, for the current stream, or free it unless it is kept:
        none of the gradients is needed any more.
        """
        current = streams.current_stream(self._whole.device) if self._on_streams else None
        if not (allocated or self._keeps):  # tensor.numpy() has made it an array's, too
            self._keeps = self.is_allocated and not self._whole.untyped_storage().resizable()
        if allocated == self.is_allocated or self._keeps:
            if allocated and current is not None and self._origin and current != self._origin[0]:
                # torch's allocator may have reused memory that work on that stream still reads
                current.wait_event(self._origin[1])
                streams.record_use(self._whole, current)
            return
        if current is not None and not allocated:
            streams.record_use(self._whole, current)
        with torch.inference_mode(False):
            self._whole.untyped_storage().resize_(self._whole.nbytes if allocated else 0)
        self.is_allocated = allocated
        self.is_ready = allocated and current is None
        self._origin = (current, streams.record_event(current)) if allocated and current else None
        if allocated and self._in_host_memory and self._whole.nbytes >= MAPPED_ALONE:
            advise_huge_pages(self._whole)

    def forget_stream(self) -> None:
        """Forget the stream on which memory was allocated: its work is complete."""
        self._origin = None

    def upcast(self) -> None:
        """Keep the gradients in fp32 from now on. The 16-bit memory is free on return, and before
        the new one is allocated if it holds no gradients. A reduction under way keeps its own
        reference and is cast when it lands. Other streams wait for the cast before they use the new
        memory.
        """
        narrow: torch.Tensor | None = self._whole
        assert narrow is not None
        device = narrow.device
        current = streams.current_stream(device) if self._on_streams else None
        if not any(buffer.holds_gradient for buffer in self._buffers):
            narrow = None
        elif current is not None:
            streams.record_use(narrow, current)
        self._whole = self._whole.new_empty(0)
        for buffer in self._buffers:
            buffer.move(self._whole)
        self._whole = (
            torch.empty(sum(self._sizes), dtype=torch.float32, device=device)
            if narrow is None
            else narrow.float()
        )
        for buffer, view in zip(self._buffers, self._whole.split(self._sizes)):
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


class CopyGate:
    """The wait of changes of state that a save in the background copies after its call, in each
    lease for writing.
    """

    # of the copy under way; None if there is none
    wait_until_copied: Callable[[], None] | None = None

    def begin_copy(self, wait_until_copied: Callable[[], None]) -> None:
        """Register a copy, for which ``wait_until_copied`` waits."""
        self.wait_until_copied = wait_until_copied

    def end_copy(self) -> None:
        """Record the end of the copy, on any thread."""
        self.wait_until_copied = None

    def wait_for_copy(self) -> None:
        """Wait for the copy under way, if any. Returns also if the save has failed."""
        wait = self.wait_until_copied  # another thread may end the copy
        if wait is not None:
            wait()


class OptimizerShard(CopyGate):
    """The optimizer's view of the elements ``owned`` of one flat buffer: its master weights and its
    offloaded moments. Moments on the device are in ``optim/device_state.py``.

    Their memory is used under a lease: :meth:`reading`, :meth:`writing`, and :meth:`updating` of
    the update itself. A lease ends where the next update begins.
    """

    def __init__(self, spec: FlatSpec, gradient: GradientBuffer):
        self.spec = spec
        self.key, self.layout, self.owned = spec.key, spec.layout, spec.owned
        self.trainable, self.tied_pp_stages = spec.trainable, spec.sharding.pp_stages
        self.gradient = gradient
        gradient.reader = self
        self.keep_in(DeviceStorage({}), False)
        # memory of the members of optimizer groups, which counts a script's writes in ``_version``
        self.members: torch.Tensor | None = None
        self._writes_before = 0  # to the memory that members had before
        self.has_update = False  # an update is under way: nobody has waited for it
        self._finish_update: Callable[[], None]  # waits for it
        # result of that update: the event of its last copy to the device
        self._update: Future[streams.Event | None] | None = None
        # that event of the last finished update; compute streams wait for it
        self._copied: streams.Event | None = None

    def __repr__(self) -> str:
        return f"OptimizerShard({self.key}, owned {self.owned})"

    def keep_in(self, storage: Storage, separate_master: bool) -> None:
        """Keep master weights in ``storage``, under the name ``MASTER``, and moments as well if it
        is offloaded. Unless ``separate_master``, the master weights are the memory of the parameter
        shard.
        """
        # whether the master weights are separate from the parameter shard
        self.has_separate_master = separate_master
        self.offloaded = storage.offloaded  # master weights and moments are
        self._storage = storage
        # names, formats and bytes of the arrays, which need no lease
        self.contents: StorageContents = storage

    def move_to_device(
        self, master: torch.Tensor | None, shard: torch.Tensor, separate_master: bool
    ) -> None:
        """End the offload of master weights; the caller moves the moments first.

        ``master`` [owned] is their memory on the device; None if ``shard`` is: the parameter shard,
        or a copy of an offloaded one (``separate_master``).
        """
        former = self.writing()
        target = shard if master is None else master.copy_(former.fetch(MASTER))
        former.close()
        self.keep_in(DeviceStorage({MASTER: target}), separate_master)

    @property
    def master(self) -> torch.Tensor | None:
        """The master weights, under a lease for reading: [owned], in ``spec.master_dtype``; None
        for frozen parameters. Written with :meth:`store_master`.
        """
        storage = self.reading()
        return storage.fetch(MASTER) if MASTER in storage.names() else None

    def memory_of_members(self) -> torch.Tensor:
        """Return the memory of the master weights for the members of optimizer groups to be views
        of: a script's writes to them are counted in :attr:`member_writes`, the engine's are not.
        """
        self._writes_before = self.member_writes
        self.members = self.contents.entry(MASTER).data
        return self.members

    @property
    def member_writes(self) -> int:
        """Number of a script's writes to members of optimizer groups in this flat buffer."""
        return self._writes_before + (0 if self.members is None else self.members._version)

    def store_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Overwrite the master weights, which exist, from element ``start`` of ``owned`` on."""
        self.writing().store(MASTER, start, values)

    @property
    def has_master(self) -> bool:
        """Return whether these parameters have master weights, which may be the parameter shard
        itself: those that train, until their memory is freed.
        """
        return MASTER in self._storage.names()

    def free(self) -> None:
        """Free the memory."""
        self._writes_before, self.members = self.member_writes, None
        self.updating().close()
        self.keep_in(DeviceStorage({}), False)

    def reading(self) -> ReadableStorage:
        """Return the storage, to be read: the update under way is over."""
        self.wait_for_update()
        return self._storage

    def writing(self) -> Storage:
        """Return the storage, to be written to: the update under way is over, and so is the copy
        of a save.
        """
        self.wait_for_update()
        return self.updating()

    def updating(self) -> Storage:
        """Return the storage to the update under way, on any thread, which excludes all other
        leases from :meth:`begin_update` to :meth:`end_update`. The copy of a save is over.
        """
        if self.wait_until_copied is not None:
            self.wait_for_copy()
        return self._storage

    def wait_for_update(self) -> None:
        """Wait for the update under way, if any, and raise its exception."""
        if self.has_update:
            self._finish_update()

    @property
    def update_runs(self) -> bool:
        """Return whether the update thread still works on this shard."""
        return self._update is not None and not self._update.done()

    def begin_update(
        self, finish: Callable[[], None], update: Future[streams.Event | None] | None
    ) -> None:
        """Register an update: ``finish`` waits for it and calls :meth:`end_update`; ``update``
        returns the event of its last copy to the device. None: the shard itself is up to date, and
        only whole parameters are still to come.
        """
        self._finish_update, self._update, self.has_update = finish, update, True

    def end_update(self, copied: streams.Event | None) -> None:
        """Record the end of the update; its copies to the device end with the event ``copied``."""
        self._copied = copied  # first: another thread reads this or ``_update``
        self._update, self.has_update = None, False

    def synchronize_update(self) -> None:
        """Wait for the update on a thread other than the training thread. The host also waits for
        the last copy, because no stream of this thread does.
        """
        update = self._update
        copied = update.result() if update is not None else self._copied
        if copied is not None:
            copied.synchronize()
