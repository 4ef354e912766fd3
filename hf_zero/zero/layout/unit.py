"""Units: flat buffers that are gathered and released together, the forwards that use them, and the
access of other ranks to their shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from hf_zero.device import kinds, streams
from hf_zero.device.spans import NOTHING, span
from hf_zero.distributed.collectives import GatherCodec, Handle, MeshDim
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter import raw_grads
from hf_zero.zero.layout.parameter_views import ParameterGuard
from hf_zero.zero.layout.training_state import CopiedState

_shard_offloaded = attrgetter("shard_offloaded")


class GatherState(Enum):
    """State of a unit's values."""

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


class OutermostForward:
    """An outermost forward, with the units gathered for its backward. It lives with its graph."""

    __slots__ = (
        "__weakref__",
        "began",
        "calls",
        "drawn",
        "idle",
        "left_out",
        "of_whole_model",
        "path",
        "reads",
        "tracked",
    )

    def __init__(self, of_whole_model: bool, began: int = 0, path: str = ""):
        self.began = began  # the tick (``RemainingForwards.tick``) at which it began
        # the outermost module is the whole model, not a part of it
        self.of_whole_model = of_whole_model
        self.path = path  # of the outermost module in the model
        # units that its backward reads at a point our hooks cannot see
        self.reads: set[Unit] = set()
        self.tracked = False  # a hook on its graph fires when its backward runs
        # calls with hooks on their outputs
        self.calls: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        self.drawn: dict[object, object] = {}  # random draws by owner; recomputations reuse them
        self.left_out: frozenset[Unit] = frozenset()  # units that no rank uses in it
        # parameters that no rank uses in it: a bit for each member of a flat buffer
        self.idle: dict[FlatBuffer, int] = {}

    @property
    def pending(self) -> bool:
        """Return whether the backward of a call in it is still pending."""
        return any(call in call.unit.forwards.pending for call in self.calls)


class UnitCall:
    """One forward of a unit with a possible backward: of one of its modules, or of several in a
    row, each with the output of the one before as its input. It lives as long as its graph.
    """

    __slots__ = (
        "__weakref__",
        "began",
        "ended_at",
        "last_node",
        "marked",
        "marks",
        "marks_left",
        "root",
        "unit",
    )

    def __init__(self, unit: Unit, root: OutermostForward, began: int):
        self.unit = unit
        self.root = root
        # moments, numbered in the order in which this rank enters and leaves forwards
        self.began = self.ended_at = began
        # an input carries the mark whose backward ends this call's backward
        self.marked = False
        self.last_node = -1  # number of the last graph node before the forward
        # marks of its inputs, while the forward is running
        self.marks: Sequence[torch.autograd.graph.Node] = ()
        # number of marks in the backward under way that have not fired yet, if there are several
        # inputs
        self.marks_left = 0


def _no_call() -> None:
    """Initial value of ``awaited``: no call has been examined yet."""


class UnitForwards:
    """The forwards of one unit that are running, or whose backward is pending or running."""

    def __init__(self) -> None:
        # calls whose backward is pending: decides the reduction
        self.pending: weakref.WeakSet[UnitCall] = weakref.WeakSet()
        # calls whose backward is under way: decides the release
        self.in_backward: set[UnitCall] = set()
        # weak reference to the call among these that a backward reaches last
        self.awaited: Callable[[], UnitCall | None] = _no_call
        self.in_forward: list[UnitCall | None] = []  # forwards under way, innermost last
        # forwards without a graph in training; a reentrant checkpoint may rerun them in the
        # backward
        self.expected_reruns = 0
        # those that the last backward has rerun, and a second one over its graph reruns again
        self.seen_reruns = 0
        # forwards with this unit in ``reads``: it stays gathered for their backward
        self.read_by: weakref.WeakSet[OutermostForward] = weakref.WeakSet()


class GatherRequest(NamedTuple):
    """One call of :meth:`MeshDim.all_gather`: ``(full, shard)`` of each flat buffer, and their
    codecs. It is issued as one collective per flat buffer and counted as one.
    """

    dim: MeshDim
    key: str
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    codecs: Sequence[GatherCodec | None] = ()


class ShardGather:
    """Source of the values that one unit gathers: the shards of all ranks.

    A subclass may take the same values from other memory. Must choose the same on every rank.
    """

    # whether :meth:`keep` and :meth:`forget` do something
    keeps_values = False

    def __init__(self, unit: Unit):
        self.unit = unit
        # flat buffers by dimension: those with the same ranks share a request
        self._together = [
            [flat for flat in unit.sharded_flats if flat.mesh.shard is dim]
            for dim in dict.fromkeys(flat.mesh.shard for flat in unit.sharded_flats)
        ]

    def requests(self, exact: bool, backward: bool) -> Sequence[GatherRequest]:
        """Return the requests of one gather; arguments as for :meth:`Unit.launch_gather`."""
        requests = []
        for flats in self._together:
            pairs, codecs = [], []
            for flat in flats:
                pairs.append((flat.full, flat.shard_to_send()))
                codecs.append(None if exact else flat.spec.gather_codec)
            requests.append(GatherRequest(flats[0].mesh.shard, self.unit.label, pairs, codecs))
        return requests

    def keep(self) -> None:
        """Keep gathered values for a later gather, before modules or scripts change them."""

    def forget(self) -> None:
        """Mark kept values as stale. Called when a forward begins."""

    def nbytes(self) -> int:
        """Return the bytes that this rank keeps besides its shards."""
        return 0

    def free(self) -> None:
        """Free what :meth:`nbytes` counts."""


class Unit:
    """One module, or several small ones, with the flat buffers that are gathered and released
    together for them. The unit of parameters outside the model has no module.
    """

    def __init__(
        self, index: int, name: str, modules: Mapping[str, nn.Module], flats: Sequence[FlatBuffer]
    ):
        self.index, self.name = index, name
        self.label = name or "(root)"
        self.modules = dict(modules)  # by path in the model
        self.flats = list(flats)
        self.sharded_flats = [flat for flat in flats if flat.sharded]
        self.trainable_flats = [flat for flat in flats if flat.trainable]
        self._optimizer_shards = [flat.optimizer_shard for flat in self.trainable_flats]
        self.state, self.pins = GatherState.GATHERED, 0
        self.exact = True  # the last gather was for uncompressed and unchanged values
        self.forwards = UnitForwards()
        self.guard = ParameterGuard(
            list(modules.values()), [p for flat in self.sharded_flats for p in flat.members]
        )
        # streams of forwards, which read the values and on which gradients accumulate
        self.streams: set[streams.Stream] = set()
        self._gathered_on: streams.Stream | None = None  # that has waited for the last gather
        self._aliased = False  # views of the values may be alive
        # handles of the gathers under way, and the event that ends this rank's own copies for them
        # (shards from the host, flat buffers of one rank); None without such copies
        self._in_flight: tuple[list[Handle], streams.Event | None] | None = None
        self.source = ShardGather(self)
        for flat in self.flats:
            flat.join(self)

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self.state.value})"

    def name_of(self, module: nn.Module) -> str:
        """Return the path in the model of ``module``, one of this unit's."""
        return next((name for name, unit in self.modules.items() if unit is module), self.label)

    @property
    def module(self) -> nn.Module:
        """The module, or the first of several."""
        return next(iter(self.modules.values()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered flat buffers."""
        return sum(flat.layout.padded * flat.dtype.itemsize for flat in self.sharded_flats)

    @cached_property
    def needs_no_peer(self) -> bool:
        """Return whether a gather sends nothing: this rank has all elements of the unit."""
        return all(flat.mesh.shard.size == 1 for flat in self.sharded_flats)

    @cached_property
    def copies_alone(self) -> bool:
        """Return whether a gather copies a flat buffer without a collective, so that other streams
        must wait for an event.
        """
        return self.device_of_streams is not None and any(
            f.mesh.shard.size == 1 for f in self.sharded_flats
        )

    @property
    def offloaded_flats(self) -> list[FlatBuffer]:
        """The flat buffers with offloaded optimizer state."""
        return [flat for flat in self.trainable_flats if flat.optimizer_shard.offloaded]

    def wait_for_update(self) -> None:
        """Wait for the update of this unit: its parameters then have the last step's values."""
        for shard in self._optimizer_shards:
            if shard.finish_update is not None:
                shard.finish_update()

    def record_compute_stream(self) -> None:
        """Register the current stream of :attr:`device_of_streams` as one on which a forward, or
        its backward, runs: it waits for the gather, and the values are not released under it.
        """
        assert self.device_of_streams is not None
        current = streams.current_stream(self.device_of_streams)
        self.streams.add(current)
        if self._gathered_on is not None and current != self._gathered_on:
            current.wait_stream(self._gathered_on)

    def forget_streams(self) -> None:
        """Forget the streams that have used this unit: the device has completed their work, or its
        graph orders them.
        """
        self.streams.clear()
        self._gathered_on = None
        for flat in self.trainable_flats:
            if flat.gradient.memory is not None:
                flat.gradient.memory.forget_stream()

    def record_gather_stream(self) -> None:
        """Record that the current stream has waited for the last gather: others wait for it."""
        if self.device_of_streams is not None:
            self._gathered_on = streams.current_stream(self.device_of_streams)

    @cached_property
    def device_of_streams(self) -> torch.device | None:
        """The device whose streams read its gathered values and accumulate its gradients; None if
        there are neither, or on the host.
        """
        flats = self.trainable_flats or self.sharded_flats
        device = flats[0].full.device if flats else None
        return None if device is None or kinds.is_synchronous(device) else device

    def await_gradients(self) -> None:
        """Make the current stream wait for gradients that a backward has accumulated.

        Autograd accumulates on the stream of the forward, and orders it before the caller's stream
        only at the end of the backward.
        """
        current = streams.current_stream(self.trainable_flats[0].full.device)
        if streams.wait_for(self.streams, current):
            # their memory is given back while the current stream reads it
            for grad in raw_grads(
                member for flat in self.trainable_flats for member in flat.members
            ):
                if grad is not None and grad.device == self.device_of_streams:
                    streams.record_use(grad, current)

    @property
    def in_use(self) -> bool:
        """Return whether a forward, a backward or a script still reads the values."""
        forwards = self.forwards
        return bool(self.pins or forwards.in_forward or forwards.in_backward or forwards.read_by)

    def mark_aliased(self) -> None:
        """Record that views of the gathered values exist (``p.detach()``, ``p.t()``): their storage
        must not be freed.
        """
        self._aliased = True

    @property
    def is_rounded(self) -> bool:
        """Return whether gathered values may differ from the shards: a codec rounds them, or
        modules compute with changed values.
        """
        return any(
            flat.spec.gather_codec is not None or flat.computing is not None
            for flat in self.sharded_flats
        )

    def launch_gather(self, exact: bool = False, backward: bool = False) -> None:
        """Launch the all-gather into the storage of the flat buffers. ``exact``: uncompressed and
        unchanged values. ``backward``: for a backward, which needs the values of its forward.

        If the unit is gathered already, this waits for the gather and the values are new on return.
        """
        self.finish_gather()
        self.take_user_writes()
        self.exact = exact
        with torch.inference_mode(False):
            for flat in self.sharded_flats:  # allocate, without a call for each gather of a step
                storage = flat.full.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(flat.layout.padded * flat.dtype.itemsize)
                if flat.computing is not None:
                    flat.computing.expect(exact)
            device = self.sharded_flats[0].full.device
            away = any(map(_shard_offloaded, self.sharded_flats))
            beside = streams.shard_stream(device) if away else None
            if beside is not None:
                # ``beside`` must follow the compute stream, which has used this memory before
                beside.wait_stream(streams.current_stream(device))
            handles = []
            stream = streams.on_stream(beside) if beside is not None else NOTHING
            with torch.no_grad(), stream:
                for request in self.source.requests(exact, backward):
                    dim, key, pairs, codecs = request
                    handles.append(dim.all_gather(pairs, key, codecs))
                here = beside or (streams.current_stream(device) if self.copies_alone else None)
                copied = streams.record_event(here) if here is not None else None
            self._in_flight = handles, copied
        if self.state is GatherState.RELEASED:
            self.state = GatherState.GATHERING
        else:
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for the all-gather and point the parameters at the values."""
        if self._in_flight is not None:
            handles, copied = self._in_flight
            if copied is not None:
                streams.current_stream(self.sharded_flats[0].full.device).wait_event(copied)
            failure: Exception | None = None
            with span("wait_all_gather", self.label):
                for handle in handles:  # all: what still arrives may not find its memory freed
                    try:
                        handle.wait()
                    except Exception as error:
                        failure = failure or error
            if failure is not None:
                self._in_flight = None
                raise failure
            if self.device_of_streams is not None:
                self.record_gather_stream()
            if self.source.keeps_values:
                self.source.keep()
            self._in_flight = None  # not before: after an interrupt it is waited for again
            for flat in self.sharded_flats:
                if flat.computing is not None:
                    flat.computing.gathered()
        if self.state is GatherState.GATHERING:
            with torch.inference_mode(False), torch.no_grad():
                for flat in self.sharded_flats:
                    flat.parameter_views.point_at_full(self.guard.gathered_class)
            self.state = GatherState.GATHERED

    def take_user_writes(self) -> None:
        """Copy a script's writes to whole parameters into the shards (modules may write theirs)."""
        for flat in self.flats:
            if not flat.sharded or self.state is GatherState.GATHERED:
                flat.take_user_writes()

    def drop_user_writes(self) -> None:
        """Discard the counts of writes to sharded parameters inside GatheredParameters, which has
        kept what it should.
        """
        for flat in self.sharded_flats:
            flat.user_writes.accept()

    def shard_bytes_to_serve(self) -> bytes:
        """Return this rank's shards of all sharded flat buffers, end to end: for other ranks, from
        a thread other than the training thread.
        """
        return b"".join(
            flat.shard_for_others().detach().cpu().view(torch.uint8).numpy().tobytes()
            for flat in self.sharded_flats
        )

    def gather_from(self, shards: Mapping[int, bytes], exact: bool = False) -> None:
        """Gather the unit without a collective, from the :meth:`shard_bytes_to_serve` of other
        ranks, by global rank; ``exact`` as for :meth:`launch_gather`.
        """
        self.finish_gather()
        self.take_user_writes()
        self.exact = exact
        with torch.inference_mode(False), torch.no_grad():
            at = 0
            for flat in self.sharded_flats:
                size = flat.layout.shard_numel * flat.dtype.itemsize
                flat.allocate(exact)
                flat.bring_shard()
                for rank, data in shards.items():
                    if rank not in flat.mesh.shard.ranks:
                        continue
                    values = torch.frombuffer(
                        bytearray(data[at : at + size]), dtype=torch.uint8
                    ).view(flat.dtype)
                    start, stop = flat.layout.shard_range(flat.mesh.shard.ranks.index(rank))
                    flat.full[start:stop].copy_(values)
                codec = flat.spec.gather_codec
                if codec is not None and not exact:  # same rounding as a gather
                    codec.decode(codec.encode(flat.full, flat.layout.num_shards), flat.full)
                flat.mark_filled()
                at += size
        self.state = GatherState.GATHERING
        self.finish_gather()

    def release(self, keep_views: bool = False) -> None:
        """Release the whole values; every rank keeps its shard.

        ``keep_views``: views of the values stay readable.
        """
        self.finish_gather()
        if self.state is GatherState.RELEASED or not self.sharded_flats:
            return
        self.take_user_writes()
        with torch.inference_mode(False), torch.no_grad(), span("release", self.label, self.nbytes):
            for flat in self.sharded_flats:
                references = (keep_views or self._aliased) and flat.references
                # tensor.numpy() has made it an array's, too
                references = references or not flat.full.untyped_storage().resizable()
                flat.user_writes.drop_aliases()
                flat.parameter_views.point_at_nothing()
                if references:
                    flat.leave_storage()
                elif self.device_of_streams is not None:
                    for stream in {*self.streams, streams.current_stream(self.device_of_streams)}:
                        streams.record_use(flat.full, stream)
                flat.full.untyped_storage().resize_(0)
        self.state, self._aliased = GatherState.RELEASED, False
        self.guard.released()


# ---- access of other ranks to shards, through the store (consensus.py, the note) ----

EVENTS = 256  # writes whose events are kept; a GPU's queue of launches holds fewer


class SharedShards(CopiedState):
    """The shards of ``units``, numbered by their writes: all ranks write in the same order. As
    :class:`CopiedState`, the training state of ``units`` that is not offloaded.
    """

    def __init__(self, units: Sequence[Unit], mesh: Mesh):
        self._units = list(units)
        self._sharded = [unit for unit in units if unit.sharded_flats]
        self._mesh = mesh
        # on a GPU: when the shards were written, by epoch
        self._written: dict[int, streams.Event] = {}

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context around every change of this rank's shards: gathers, other ranks that fetch them,
        and a save in the background may be reading them.
        """
        if self.wait_until_copied is not None:
            self.wait_for_copy()
        consensus = self._mesh.consensus
        if consensus is None:
            yield
            return
        for unit in self._sharded:
            if unit._in_flight is not None:
                unit.finish_gather()
        with consensus.fetches.writing():
            yield
            if not self._mesh.blocks:
                current = streams.current_stream(self._mesh.device)
                self._written[consensus.fetches.epoch + 1] = streams.record_event(current)
                self._written.pop(consensus.fetches.epoch + 1 - EVENTS, None)

    def serve(self) -> None:
        """Answer other ranks' fetches from now on, on a thread of its own. Idempotent."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.fetches.serve(
                self.read, partial(kinds.set_device, self._mesh.device)
            )

    def read(self, index: int, epoch: int) -> bytes:
        """Return this rank's shards of a unit after ``epoch`` writes, for another rank's fetch.

        Raises PartitionError if they have been overwritten since.
        """
        written = self._written.get(epoch)
        if written is None:
            assert self._mesh.consensus is not None
            if not self._mesh.blocks or epoch != self._mesh.consensus.fetches.epoch:
                raise PartitionError(
                    "the values asked for have been overwritten since; keep the ranks together "
                    "around writes to parameters"
                )
            return self._units[index].shard_bytes_to_serve()
        # On a side stream: work that this host has queued on the compute stream may wait for the
        # rank that asks.
        device = self._units[index].sharded_flats[0].full.device
        stream = streams.side_stream(device, streams.Use.FETCHES)
        with streams.on_stream(stream):
            stream.wait_event(written)
            return self._units[index].shard_bytes_to_serve()

    def fetch(self, unit: Unit, outside_passes: bool = False) -> None:
        """Gather ``unit`` without the other ranks, whose order does not contain it;
        ``outside_passes``: where no other rank asks for it, with exact values.
        """
        consensus = self._mesh.consensus
        assert consensus is not None
        peers = sorted(
            {rank for flat in unit.sharded_flats for rank in flat.mesh.shard.other_ranks}
        )
        size = sum(flat.layout.shard_numel * flat.dtype.itemsize for flat in unit.sharded_flats)
        fetches = consensus.fetches
        fetch = fetches.fetch_alone if outside_passes else fetches.fetch
        unit.gather_from(fetch(unit.index, unit.label, peers, size), exact=outside_passes)

    def end_asking(self) -> None:
        """Tell the other ranks, once this rank's fetches are complete, that they may end."""
        if self._mesh.consensus is not None:
            self._mesh.consensus.gathers.end_asking()
