"""Units: flats that are gathered and released together, and the calls that use them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from hf_zero.device import kinds, streams
from hf_zero.device.spans import span
from hf_zero.distributed.collective_handle import Handle
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter_guard import ParameterGuard


class State(Enum):
    """Where the values of a unit are."""

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Secondary(Enum):
    """Whether secondary shards have the values of the forward under way or before."""

    NONE = "none"
    COMING = "coming"  # with the gather under way
    HERE = "here"


class RootForward:
    """One forward from the outermost module called, with what was gathered for it.

    It lives as long as its graph.
    """

    __slots__ = (
        "__weakref__",
        "began",
        "calls",
        "drawn",
        "idle",
        "left_out",
        "reads",
        "tracked",
        "whole",
    )

    def __init__(self, whole: bool, began: int = 0):
        self.began = began  # as that of a call
        self.whole = whole  # the whole model was called, not a part of it
        self.reads: set[Unit] = set()  # by its backward, where no hook of theirs can tell when
        self.tracked = False  # a hook on its graph tells when its backward runs
        self.calls: weakref.WeakSet[UnitForward] = weakref.WeakSet()  # that tell of their backward
        self.drawn: dict[object, object] = {}  # at random, by who has drawn; for recomputations too
        self.left_out: frozenset[Unit] = frozenset()  # units that no rank uses in it
        # parameters that no rank uses in it: a bit for each member of a flat buffer
        self.idle: dict[FlatBuffer, int] = {}

    @property
    def pending(self) -> bool:
        """Whether the backward of a call in it is to come."""
        return any(call in call.unit.forwards.pending for call in self.calls)


class UnitForward:
    """One forward of a unit whose backward may come: of a module of it, or of several in a row
    where each takes what the one before has returned.

    It lives as long as the graph of that forward.
    """

    __slots__ = (
        "__weakref__",
        "began",
        "last_node",
        "left",
        "marked",
        "marks",
        "marks_left",
        "outer",
        "unit",
    )

    def __init__(self, unit: Unit, outer: RootForward, began: int):
        self.unit = unit
        self.outer = outer
        # places in the order in which this rank enters and leaves forwards
        self.began = self.left = began
        # an input carries the mark that tells when this call's backward is over
        self.marked = False
        self.last_node = -1  # of the graph before the forward
        # of its inputs, while the forward is under way
        self.marks: Sequence[torch.autograd.graph.Node] = ()
        # of several inputs that have a part in the backward under way, those whose gradients are to
        # come
        self.marks_left = 0


def _no_call() -> None:
    """What a unit awaits whose calls have not been looked at."""


class UnitForwards:
    """The forwards of one unit: those under way, and those whose backward is to come or is under
    way.
    """

    def __init__(self) -> None:
        # calls whose backward is to come: decides the reduction
        self.pending: weakref.WeakSet[UnitForward] = weakref.WeakSet()
        # calls whose backward is under way: decides the release
        self.in_backward: set[UnitForward] = set()
        # weakly, one of these that was found to come last
        self.awaited: Callable[[], UnitForward | None] = _no_call
        self.in_forward: list[UnitForward | None] = []  # forwards under way, innermost last
        # forwards without a graph in training, which a reentrant checkpoint may run again in the
        # backward
        self.reruns = 0
        # those that read this unit so: it waits for their backward
        self.pinned_by: weakref.WeakSet[RootForward] = weakref.WeakSet()


class Unit:
    """One module, or several small ones, and the flats that are gathered and released together
    for them.
    """

    def __init__(
        self, index: int, name: str, modules: Mapping[str, nn.Module], flats: Sequence[FlatBuffer]
    ):
        self.index, self.name = index, name
        self.modules = dict(modules)  # by path in the model
        self.flats = list(flats)
        self.sharded = [flat for flat in flats if flat.sharded]
        self.trainable = [flat for flat in flats if flat.trainable]
        self._optimizer_shards = [flat.optimizer_shard for flat in self.trainable]
        self.state, self.pins = State.GATHERED, 0
        self.forwards = UnitForwards()
        self.guard = ParameterGuard(list(modules.values()), self.sharded)
        self._streams: set[streams.Stream] = set()  # on which forwards ran and gradients come
        self._shared = False  # views of the values may be alive
        # those of ``sharded`` that travel together, for they have the same ranks
        self._together = [
            [flat for flat in self.sharded if flat.axis is axis]
            for axis in dict.fromkeys(flat.axis for flat in self.sharded)
        ]
        # the gathers under way, and when the shards are here that they read
        self._coming: tuple[list[Handle], streams.Event | None] | None = None
        self._secondary = Secondary.NONE  # alike on all ranks, but for the moment of a wait
        for flat in self.flats:
            flat.join(self)

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self.state.value})"

    @property
    def label(self) -> str:
        return self.name or "(root)"

    def name_of(self, module: nn.Module) -> str:
        """Where ``module``, one of this unit, stands in the model."""
        return next((name for name, own in self.modules.items() if own is module), self.label)

    @property
    def module(self) -> nn.Module:
        """Its module, or the first of several."""
        return next(iter(self.modules.values()))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered flats."""
        return sum(flat.layout.padded * flat.dtype.itemsize for flat in self.sharded)

    @cached_property
    def needs_no_peer(self) -> bool:
        """Whether a gather sends nothing: this rank holds all elements of the unit."""
        return all(flat.axis.size == 1 for flat in self.sharded)

    @property
    def offloaded(self) -> list[FlatBuffer]:
        """The flats whose states are offloaded."""
        return [flat for flat in self.trainable if flat.optimizer_shard.offloaded]

    def wait_for_update(self) -> None:
        """Return when no update of this unit is under way: its parameters are those of the last
        step.
        """
        for shard in self._optimizer_shards:
            if shard.finish_update is not None:
                shard.finish_update()

    def runs_here(self) -> None:
        """A forward that has a graph begins, in the current stream."""
        if self._device_of_streams is not None:
            self._streams.add(streams.current_stream(self._device_of_streams))

    @cached_property
    def _device_of_streams(self) -> torch.device | None:
        """Where its gradients accumulate on streams; None where it has none, or they come in the
        host's order.
        """
        device = self.trainable[0].full.device if self.trainable else None
        return None if device is None or kinds.is_host(device) else device

    def await_gradients(self) -> None:
        """From now on the current stream may read the gradients that a backward has accumulated.

        Autograd accumulates on the stream of the forward, and orders it before that of the caller
        only when the backward is over.
        """
        if self._streams:
            here = streams.current_stream(self.trainable[0].full.device)
            for stream in self._streams:
                if stream != here:
                    here.wait_stream(stream)

    @property
    def in_use(self) -> bool:
        """Whether a forward, a backward or a script that asked for the values still reads them."""
        forwards = self.forwards
        return bool(self.pins or forwards.in_forward or forwards.in_backward or forwards.pinned_by)

    def share(self) -> None:
        """Somebody has taken a view of the values (``p.detach()``, ``p.t()``): it must not read
        memory that was given back.
        """
        self._shared = True

    @property
    def is_rounded(self) -> bool:
        """Whether a gather gives values that are not quite those of the shards."""
        return any(
            flat.spec.gather_codec is not None or flat.computing is not None
            for flat in self.sharded
        )

    def launch_gather(self, exact: bool = False, backward: bool = False) -> None:
        """Start the all-gather into the flats' own storage. ``exact``: of the values as they are,
        also where they travel in few bits. ``backward``: of secondary shards, where there are some.

        Where the values are here already, they are those of the end of the gather when this
        returns.
        """
        self.finish_gather()
        self.take_user_writes()
        with torch.inference_mode(False):
            for flat in self.sharded:
                storage = flat.full.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(flat.layout.padded * flat.dtype.itemsize)
                if flat.computing is not None:
                    flat.computing.expect(exact)
            node = self.sharded[0].mesh.node
            secondary = backward and self._secondary is Secondary.HERE
            if node is None or exact:
                self._secondary = Secondary.NONE
            elif not secondary:
                self._secondary = Secondary.COMING
            if secondary and node is not None:
                pairs = [
                    (flat.full, flat.secondary_shard)
                    for flat in self.sharded
                    if flat.secondary_shard is not None
                ]
                self._coming = [node.all_gather(pairs, f"{self.label} in a node")], None
            else:
                device = self.sharded[0].full.device
                away = any(flat.is_away for flat in self.sharded)
                beside = streams.shard_stream(device) if away else None
                if beside is not None:
                    # which has used this memory before
                    beside.wait_stream(streams.current_stream(device))
                handles = []
                with torch.no_grad(), streams.on_stream(beside):
                    for flats in self._together:
                        pairs, codecs = [], []
                        for flat in flats:
                            pairs.append((flat.full, flat.bring_shard()))
                            codecs.append(None if exact else flat.spec.gather_codec)
                        handles.append(flats[0].axis.all_gather(pairs, self.label, codecs))
                    brought = streams.record_event(beside) if beside is not None else None
                self._coming = handles, brought
        if self.state is State.RELEASED:
            self.state = State.GATHERING
        else:
            self.finish_gather()

    def forget_secondary(self) -> None:
        """A forward begins: its gathers are of the shards."""
        self._secondary = Secondary.NONE

    def finish_gather(self) -> None:
        """Wait for the all-gather and let the parameters see the values."""
        if self._coming is not None:
            (handles, brought), self._coming = self._coming, None
            if brought is not None:
                streams.current_stream(self.sharded[0].full.device).wait_event(brought)
            with span("wait_all_gather", self.label):
                for handle in handles:
                    handle.wait()
            if self._secondary is Secondary.COMING:
                self._keep_secondary()
            for flat in self.sharded:
                if flat.computing is not None:
                    flat.computing.gathered()
        if self.state is State.GATHERING:
            with torch.inference_mode(False), torch.no_grad():
                for flat in self.sharded:
                    flat.handles.point_at_full(self.guard.gathered_class)
            self.state = State.GATHERED

    def _keep_secondary(self) -> None:
        node = self.sharded[0].mesh.node
        assert node is not None
        self._secondary = Secondary.HERE
        with torch.inference_mode(False), torch.no_grad():
            for flat in self.sharded:
                flat.keep_secondary(node)

    def take_user_writes(self) -> None:
        """What a script has written to parameters that are whole here goes into the shards (a
        module may change its own weights).
        """
        for flat in self.flats:
            if not flat.sharded or self.state is State.GATHERED:
                flat.take_user_writes()

    def drop_user_writes(self) -> None:
        """What was written to sharded parameters inside GatheredParameters has been kept by it,
        or is not to be.
        """
        for flat in self.sharded:
            flat.user_writes.accept()

    def chunk_bytes(self) -> bytes:
        """This rank's chunks of all sharded flats, end to end: for other ranks, from a thread
        beside the one that trains.
        """
        return b"".join(
            flat.shard_for_others().detach().cpu().view(torch.uint8).numpy().tobytes()
            for flat in self.sharded
        )

    def fill(self, chunks: Mapping[int, bytes], exact: bool = False) -> None:
        """Become gathered from the :meth:`chunk_bytes` of other ranks (global), without a
        collective; ``exact`` as for :meth:`launch_gather`.
        """
        self.finish_gather()
        self.take_user_writes()
        with torch.inference_mode(False), torch.no_grad():
            at = 0
            for flat in self.sharded:
                size = flat.layout.chunk * flat.dtype.itemsize
                flat.make_room(exact)
                flat.bring_shard()
                for rank, data in chunks.items():
                    if rank not in flat.axis.ranks:
                        continue
                    values = torch.frombuffer(
                        bytearray(data[at : at + size]), dtype=torch.uint8
                    ).view(flat.dtype)
                    start, stop = flat.layout.rank_range(flat.axis.ranks.index(rank))
                    flat.full[start:stop].copy_(values)
                codec = flat.spec.gather_codec
                if codec is not None and not exact:  # what a gather would have given
                    codec.decode(codec.encode(flat.full, flat.layout.shards), flat.full)
                flat.fill()
                at += size
        self.state = State.GATHERING
        self.finish_gather()

    def release(self, keep_views: bool = False) -> None:
        """Give the whole values back; every rank keeps its shard.

        ``keep_views``: views of the values stay readable.
        """
        self.finish_gather()
        if self.state is State.RELEASED or not self.sharded:
            return
        self.take_user_writes()
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            span("release", self.label, self.nbytes),
        ):
            for flat in self.sharded:
                left = (keep_views or self._shared) and flat.references
                flat.user_writes.drop_aliases()
                flat.handles.point_at_nothing()
                if left:
                    flat.leave_storage()
                flat.full.untyped_storage().resize_(0)
        self.state, self._shared = State.RELEASED, False
        self.guard.released()
