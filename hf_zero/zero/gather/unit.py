"""Units: the flat buffers that are gathered and released together for one module, and what a unit
does in a pass. Before a forward it is gathered and its inputs are marked; after it, it is released,
and its outputs are watched; the hooks on these begin and end its backward.

[Note: the end of a unit's backward]
Autograd runs ready nodes in reverse order of creation. The mark on a unit's inputs is created
before every node of its forward, so its backward runs after all of them. ``AccumulateGrad`` nodes
have the highest priority and run as soon as they are ready. So when the mark's backward runs,
gradients are complete and no saved weight will be read again. If no input requires grad there is no
mark, and the unit's backward ends with the whole backward.

If the input of a module is the output that another module of its unit has just returned, the two
are chained. Chained modules of one unit form one call; only the first one's inputs are marked. A
backward may begin at the outputs of any of them.

An output whose node is older than the forward, such as an input that is returned, is replaced by a
view: the hooks on outputs hold the marks, and marks lead to older nodes.

Pending calls are kept in weak sets, not counted, so a dropped graph stops being pending by itself.
Recomputation (activation checkpointing) runs forwards inside a backward; a forward there never
releases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd import profiler
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from hf_zero.device import spans, streams
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.handle import Handle
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.gather_source import GatherSource
from hf_zero.zero.gather.unit_streams import UnitStreams
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.parameter_views import ParameterGuard
from hf_zero.zero.layout.tree import map_tensors, requiring_grad, tensors_in, with_replaced

_shard_offloaded = attrgetter("shard_offloaded")
unit_of: Callable[[FlatBuffer], Unit] = attrgetter("unit")  # that gathers a flat buffer
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The sequence number of this thread's next autograd node; a backward runs higher numbers first.
_next_node: Callable[[], int] = torch.autograd._get_sequence_nr
# Numbers the moments at which this rank enters and leaves forwards.
next_tick: Callable[[], int] = count(1).__next__


class GatherState(Enum):
    """State of a unit's values."""

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


class OutermostForward:
    """An outermost forward, with the units gathered for its backward. It lives with its graph."""

    __slots__ = (
        "__weakref__", "began", "calls", "drawn", "idle", "left_out", "of_whole_model", "path",
        "reads", "tracked",
    )  # fmt: skip

    def __init__(self, of_whole_model: bool, began: int = 0, path: str = ""):
        self.began = began  # the tick (``next_tick``) at which it began
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
        return any(call in call.unit.calls.pending for call in self.calls)


class UnitCall:
    """One forward of a unit with a possible backward: of one of its modules, or of several in a
    row, each with the output of the one before as its input. It lives as long as its graph.
    """

    __slots__ = (
        "__weakref__", "began", "ended_at", "last_node", "marked", "marks", "marks_left",
        "outermost", "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, outermost: OutermostForward, began: int):
        self.unit = unit
        self.outermost = outermost
        # ticks
        self.began = self.ended_at = began
        # an input carries the mark whose backward ends this call's backward
        self.marked = False
        self.last_node = -1  # number of the last graph node before the forward
        # marks of its inputs, while the forward is running
        self.marks: Sequence[Node] = ()
        # number of marks in the backward under way that have not fired yet, if there are several
        # inputs
        self.marks_left = 0


class LastOutput(NamedTuple):
    """An output of the call that has ended last, and the marks of its inputs."""

    call: UnitCall
    output: torch.Tensor
    marks: Sequence[Node]


def _no_call() -> None:
    """Initial value of ``awaited``: no call has been examined yet."""


class UnitCalls:
    """The calls of one unit that are running, or whose backward is pending or running."""

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


class GatherOrder(Protocol):
    """``Schedule`` (``schedule.py``), as units call it."""

    def ensure_gathered(self, unit: Unit, module: nn.Module | None = None) -> None: ...

    def release_later(self, unit: Unit) -> None: ...


class BackwardPasses(Protocol):
    """``BackwardTracker`` (``passes.py``), as units call it."""

    def enter(self) -> None: ...

    def add_call(self, call: UnitCall) -> None: ...

    def begin_call(self, call: UnitCall) -> None: ...

    def add_unmarked(self, call: UnitCall) -> None: ...

    def end_call(self, call: UnitCall) -> None: ...

    def launch_complete_units(self, call: UnitCall, tick: int) -> None: ...


class Unit:
    """One module, or several small ones, with the flat buffers that are gathered and released
    together for them. The unit of parameters outside the model has no module. :meth:`connect`
    completes it.
    """

    _schedule: GatherOrder
    _backward: BackwardPasses

    def __init__(
        self,
        index: int,
        name: str,
        modules: Mapping[str, nn.Module],
        flats: Sequence[FlatBuffer],
        device: torch.device,
    ):
        self.index, self.name = index, name
        self.label = name or "(root)"
        self.modules = dict(modules)  # by path in the model
        self.flats = list(flats)
        self.sharded_flats = [flat for flat in flats if flat.sharded]
        self.trainable_flats = [flat for flat in flats if flat.trainable]
        self._optimizer_shards = [flat.optimizer_shard for flat in self.trainable_flats]
        # those with the same ranks share a gather
        self._flats_of_dim: dict[MeshDim, list[FlatBuffer]] = {}
        for flat in self.sharded_flats:
            self._flats_of_dim.setdefault(flat.mesh.shard, []).append(flat)
        # a flat buffer of one rank is copied without a collective: other streams wait for an event
        self._copies_alone = any(dim.size == 1 for dim in self._flats_of_dim)
        self.state = GatherState.GATHERED
        self.calls = UnitCalls()
        self.guard = ParameterGuard(
            list(modules.values()), [p for flat in self.sharded_flats for p in flat.members]
        )
        self.streams = UnitStreams(device, self.sharded_flats, self.trainable_flats)
        # handles of the gathers under way, and the event that ends this rank's own copies for them
        # (shards from the host, flat buffers of one rank); None without such copies
        self.in_flight: tuple[list[Handle], streams.Event | None] | None = None
        self.source: GatherSource | None = None  # besides the shards of all ranks
        for flat in self.flats:
            flat.join(self, self.guard)

    def connect(self, schedule: GatherOrder, backward: BackwardPasses) -> None:
        """Set what the passes of this unit call. Called once, before the first pass."""
        self._schedule, self._backward = schedule, backward

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self.state.value})"

    def name_of(self, module: nn.Module) -> str:
        """Return the path in the model of ``module``, one of this unit's."""
        return next((name for name, other in self.modules.items() if other is module), self.label)

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

    @property
    def offloaded_flats(self) -> list[FlatBuffer]:
        """The flat buffers with offloaded optimizer state."""
        return [flat for flat in self.trainable_flats if flat.optimizer_shard.offloaded]

    @property
    def in_use(self) -> bool:
        """Return whether a forward, a backward or a script still reads the values."""
        calls = self.calls
        return bool(self.guard.pins or calls.in_forward or calls.in_backward or calls.read_by)

    @property
    def is_rounded(self) -> bool:
        """Return whether gathered values may differ from the shards: a codec rounds them, or
        modules compute with changed values.
        """
        return any(
            flat.spec.gather_codec is not None or flat.transform is not None
            for flat in self.sharded_flats
        )

    def launch_gather(self, exact: bool = False, backward: bool = False) -> None:
        """Launch the all-gather into the storage of the flat buffers. ``exact``: uncompressed and
        unchanged values. ``backward``: for a backward, which needs the values of its forward.

        If the unit is gathered already, this waits for the gather and the values are new on return.
        A gather that is in flight stays so: the other ranks may join it only later.
        """
        if self.source is not None and self.source.awaits_values():
            self.finish_gather()
        handles, earlier = self.in_flight or ([], None)
        self.take_user_writes()
        self.guard.exact = exact
        with torch.inference_mode(False):
            for flat in self.sharded_flats:  # allocate, without a call for each gather of a step
                storage = flat.full.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(flat.layout.padded * flat.dtype.itemsize)
                if flat.transform is not None:
                    flat.transform.expect(exact)
            device = self.sharded_flats[0].full.device
            if earlier is not None:
                streams.current_stream(device).wait_event(earlier)
            offloaded = any(map(_shard_offloaded, self.sharded_flats))
            copying = streams.shard_stream(device) if offloaded else None
            if copying is not None:
                # it must follow the compute stream, which has used this memory before
                copying.wait_stream(streams.current_stream(device))
            on_stream = streams.on_stream(copying) if copying is not None else spans.NOTHING
            with torch.no_grad(), on_stream:
                request = None if self.source is None else self.source.request(exact, backward)
                if request is not None:
                    dim, key, pairs, codecs = request
                    handles.append(dim.all_gather(pairs, key, codecs))
                else:
                    for dim, flats in self._flats_of_dim.items():
                        shards, gather_codecs = [], []
                        for flat in flats:
                            shards.append((flat.full, flat.fetch_shard()))
                            gather_codecs.append(None if exact else flat.spec.gather_codec)
                        handles.append(dim.all_gather(shards, self.label, gather_codecs))
                if copying is None and self.streams.device is not None and self._copies_alone:
                    copying = streams.current_stream(device)
                copied = streams.record_event(copying) if copying is not None else None
            self.in_flight = handles, copied
        if self.state is GatherState.GATHERED:
            self.finish_gather()
        else:
            self.state = GatherState.GATHERING

    def finish_gather(self) -> None:
        """Wait for the all-gather and point the parameters at the values."""
        if self.in_flight is not None:
            handles, copied = self.in_flight
            if copied is not None:
                streams.current_stream(self.sharded_flats[0].full.device).wait_event(copied)
            failure: Exception | None = None
            with spans.span("wait_all_gather", self.label):
                for handle in handles:  # all: what still arrives may not find its memory freed
                    try:
                        handle.wait()
                    except Exception as error:
                        failure = failure or error
            if failure is not None:
                self.in_flight = None
                raise failure
            if self.streams.device is not None:
                self.streams.record_gather()
            if self.source is not None:
                self.source.keep()
            self.in_flight = None  # not before: after an interrupt it is waited for again
            for flat in self.sharded_flats:
                if flat.transform is not None:
                    flat.transform.gathered()
        if self.state is GatherState.GATHERING:
            with torch.inference_mode(False), torch.no_grad():
                for flat in self.sharded_flats:
                    flat.parameter_views.point_at_full(self.guard.gathered_class)
            self.state = GatherState.GATHERED

    def gather_from(self, shards: Mapping[int, bytes], exact: bool = False) -> None:
        """Gather the unit without a collective, from the shards that other ranks serve
        (``shared_shards.py``), by global rank; ``exact`` as for :meth:`launch_gather`.
        """
        self.finish_gather()
        self.take_user_writes()
        self.guard.exact = exact
        with torch.inference_mode(False), torch.no_grad():
            at = 0
            for flat in self.sharded_flats:
                size = flat.layout.shard_numel * flat.dtype.itemsize
                flat.allocate(exact)
                own, shard = flat.full[flat.owned[0] : flat.owned[1]], flat.fetch_shard()
                if shard.data_ptr() != own.data_ptr():
                    own.copy_(shard)
                for rank, data in shards.items():
                    if not size or rank not in flat.mesh.shard.ranks:
                        continue
                    part = bytearray(data[at : at + size])
                    values = torch.frombuffer(part, dtype=torch.uint8).view(flat.dtype)
                    start, stop = flat.layout.shard_range(flat.mesh.shard.ranks.index(rank))
                    flat.full[start:stop].copy_(values)
                codec = flat.spec.gather_codec
                if codec is not None and not exact:  # same rounding as a gather
                    codec.decode(codec.encode(flat.full, flat.layout.num_shards), flat.full)
                if flat.transform is not None:
                    flat.transform.gathered()
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
        viewed = keep_views or self.guard.aliased
        recorded = spans.logs or profiler._is_profiler_enabled  # else without a call
        span = spans.span("release", self.label, self.nbytes) if recorded else spans.NOTHING
        with torch.inference_mode(False), torch.no_grad(), span:
            for flat in self.sharded_flats:
                references = viewed and flat.references
                # tensor.numpy() has made it an array's, too
                references = references or not flat.full.untyped_storage().resizable()
                flat.user_writes.drop_aliases()
                flat.parameter_views.point_at_nothing()
                if references:
                    flat.leave_storage()
                elif self.streams.device is not None:
                    self.streams.record_release(flat.full)
                flat.full.untyped_storage().resize_(0)
        self.state = GatherState.RELEASED
        self.guard.released()

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

    def wait_for_update(self) -> None:
        """Wait for the update of this unit: its parameters then have the last step's values."""
        for shard in self._optimizer_shards:
            shard.wait_for_update()

    def pre_forward(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        outermost: OutermostForward | None,
        last: LastOutput | None,
        recomputes: bool,
    ) -> object:
        """Gather the unit for a forward of ``module``, one of its own or a part of the root, and
        mark the inputs: the backward of the marks ends the backward of the unit. Return what
        replaces ``args`` and ``kwargs``, if anything.

        outermost: the outermost forward. last: what the module before has returned. recomputes:
        the forward is inside a backward.
        """
        grads, calls = torch.is_grad_enabled(), self.calls
        inputs = requiring_grad(args, kwargs) if grads else {}
        call, continues = None, False
        if not grads:
            if module.training and self.trainable_flats and not recomputes:
                calls.expected_reruns += 1
        elif (
            last is not None
            and last.call.unit is self
            and id(last.output) in inputs
            and last.call in calls.pending
            and not recomputes
        ):
            # the call continues: in a backward, all nodes of its graph run before its marks
            call, continues = last.call, True
            call.marks = last.marks
        else:
            assert outermost is not None, "a module's forward is under way outside any pass"
            call = UnitCall(self, outermost, next_tick())
        calls.in_forward.append(call)
        if self.sharded_flats or not continues:
            self._schedule.ensure_gathered(self, module)
        if self.streams.device is not None:
            self.streams.record_compute()
        if call is None:
            return None
        if continues or not inputs:
            call.last_node = _next_node() - 1
            return None
        call.marked = True
        views, nodes = [], []
        # Views, since a block may change its inputs in place. They are hidden from dispatch modes:
        # selective checkpointing compares the operations of a forward with those of its
        # recomputation, which marks other calls.
        with _disable_current_modes() if _modes() else spans.NOTHING:
            for tensor in inputs.values():
                view = tensor.view_as(tensor)
                views.append(view)
                if view.grad_fn is not None:
                    nodes.append(view.grad_fn)
        ends = partial(self.post_backward, call)
        if len(nodes) == 1:
            nodes[0].register_hook(ends)
        else:
            call.marks = nodes

            def passed(*_: object) -> None:
                # Not every input takes part in every backward: those that do are counted when it
                # begins. Negative if it began inside the forward: no hook on outputs has set it.
                call.marks_left -= 1
                if call.marks_left == 0:
                    ends()

            for node in nodes:
                node.register_hook(passed)
        call.last_node = _next_node() - 1
        return with_replaced(args, kwargs, dict(zip(inputs, views)))

    def post_forward(
        self, module: nn.Module, output: object, raised: BaseException | None, recomputes: bool
    ) -> tuple[object, LastOutput | None]:
        """Release the unit after a forward of ``module``, unless it ``recomputes``, and watch its
        outputs: hooks on them begin the backward of the unit. One that a backward reads at a point
        our hooks cannot see stays gathered. Return what replaces ``output``, if anything, and the
        output that a next module may continue from.
        """
        call, replaced, last = self.calls.in_forward.pop(), None, None
        if call is not None:
            call.ended_at = next_tick()
            marks, call.marks = call.marks, ()
            newest = call.last_node  # nodes after it belong to the forward
            older: dict[int, torch.Tensor] = {}
            if raised is not None:  # the forward has returned, and a later hook raised
                output = None
            for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
                node = tensor.grad_fn
                if node is not None:
                    number = node._sequence_nr()
                    if marks and number <= call.last_node:
                        older[id(tensor)] = tensor
                        continue
                    newest = max(newest, number)
                    node.register_prehook(partial(self.pre_backward, call, module, marks))
                    last = LastOutput(call, tensor, marks)
                elif tensor.requires_grad:
                    # a parameter itself, read again in backward
                    self.keep_for_backward(call.outermost)
            # Nodes recorded after the outputs belong to values returned in another way: in an
            # object, a dict, or ``self``. Their backward runs before the hooks.
            unseen = raised is None and newest < _next_node() - 1
            if unseen and (call.marked or self.trainable_flats):
                self.keep_for_backward(call.outermost)
            if older:
                replaced, watched = self._watch_older(call, module, output, marks, older)
                last = last or watched
            if last is not None and call not in self.calls.pending:
                self._backward.add_call(call)
        if recomputes:
            return replaced, None
        if self.sharded_flats:
            self._schedule.release_later(self)
        return replaced, last

    def _watch_older(
        self,
        call: UnitCall,
        module: nn.Module,
        output: object,
        marks: Sequence[Node],
        older: Mapping[int, torch.Tensor],
    ) -> tuple[object, LastOutput]:
        """Return ``output`` with watched views of the tensors ``older``, whose nodes are older than
        the forward, and the first of these.

        A hook on such a node that holds the marks would be a cycle through autograd, which Python's
        garbage collector does not see.
        """
        views: dict[int, torch.Tensor] = {}

        def viewed(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in older:
                return tensor
            if id(tensor) not in views:
                views[id(tensor)] = tensor.view_as(tensor)
            return views[id(tensor)]

        with _disable_current_modes() if _modes() else spans.NOTHING:
            replaced = map_tensors(output, viewed, in_place=True)
        for key, tensor in older.items():
            watched = views.get(key, tensor)
            assert watched.grad_fn is not None
            # One in an object stays: its call ends with the whole backward.
            seen = marks if key in views else ()
            watched.grad_fn.register_prehook(partial(self.pre_backward, call, module, seen))
        first = next(iter(older))
        return replaced, LastOutput(call, views.get(first, older[first]), marks)

    def keep_for_backward(self, forward: OutermostForward) -> None:
        """Keep the unit gathered for the backward of ``forward``, which reads it without a hook."""
        forward.reads.add(self)
        self.calls.read_by.add(forward)

    def pre_backward(
        self, call: UnitCall, module: nn.Module, marks: Sequence[Node], grads: object
    ) -> None:
        """Gather the unit for the backward of ``call``, which begins at an output of ``module``.

        ``marks``: autograd nodes of the marks on its inputs. ``grads`` is unused: this is a prehook
        of an autograd node.
        """
        self._backward.enter()
        if call not in self.calls.in_backward:
            if torch.is_grad_enabled() and self.sharded_flats:
                raise PartitionError(
                    "create_graph=True at stage 3: the second backward would read weights of "
                    f"{self.label} that the first has released; "
                    "use stage 2 for losses with gradients of gradients"
                )
            self._backward.begin_call(call)
            self._backward.launch_complete_units(call, call.ended_at)
            if not call.marked:
                self._backward.add_unmarked(call)
            call.marks_left = sum(map(torch._C._will_engine_execute_node, marks))
            self.calls.in_backward.add(call)
        elif not self.sharded_flats:
            # Another output of the call. The unit is whole, and was made ready at the first one; a
            # sharded one may need its gather, and its guard off for ``module``.
            return
        self._schedule.ensure_gathered(self, module)
        if self.streams.device is not None:
            self.streams.record_compute()
        if spans.blocks:
            spans.ended(call)
            spans.began(call, "backward", self.name_of(module))

    def post_backward(self, call: UnitCall, *_: object) -> None:
        """Release the unit after the backward of ``call``, all of whose marks have fired: its
        gradients are complete if no other call is pending.
        """
        self._backward.enter()
        if spans.blocks:
            spans.ended(call)
        self.calls.pending.discard(call)
        self.calls.in_backward.discard(call)
        if self.sharded_flats:
            self._schedule.release_later(self)
        self._backward.end_call(call)
        self._backward.launch_complete_units(call, call.began)
