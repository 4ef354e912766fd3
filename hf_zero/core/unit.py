"""Units and their flats: the parameters gathered together, and the one-dimensional buffers they live in.

[Note: one storage for life]
A flat's whole buffer keeps one storage, unless somebody outside has taken views of it (``leave_storage``). Releasing gives its memory back (``resize_(0)``), gathering fills the same
storage again, so the views that autograd saved in between (``weight.t()``) come back to life with their values. Whoever
releases must know that nobody will read such a view before the next gather: that would crash the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from hf_zero.core.axis import Axis, Handle
from hf_zero.core.layout import FlatLayout, Slot
from hf_zero.core.parameter import LiveParameter, OwnedParameter, ReleasedParameter, WatchedParameter, become, given_class, owned_class
from hf_zero.core.storage import Storage

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class State(Enum):
    """Where the values of a unit are."""

    RELEASED = "released"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Flat:
    """Parameters of one unit that share dtype and trainability, end to end in one buffer."""

    def __init__(
        self,
        number: int,
        key: str,
        layout: FlatLayout,
        parameters: dict[str, nn.Parameter],
        trainable: bool,
        dtype: torch.dtype,
        raw: bool,
        sharded: bool,
        axis: Axis,
        writes: bool,
    ):
        self.number = number  # of the flat in its engine
        self.key = key
        self.layout = layout
        self.parameters = parameters
        self.trainable = trainable
        self.dtype = dtype
        self.raw = raw  # bytes that only their module can read: never cast
        self.sharded = sharded
        self.axis = axis
        self.owned = layout.rank_range(axis.rank if layout.shards > 1 else 0)
        self.writes = writes
        self.retired = False  # its engine has been destroyed
        self.filled = False  # ``window`` holds gradients that are not reduced yet
        self.reduced = False  # ``grad`` holds reduced gradients that no step has used yet
        self.held: torch.Tensor | None = None  # reduced gradients set aside while ``window`` fills again
        self.switched: set[str] = set()  # parameters whose requires_grad is another one than at initialize
        self.unit: Unit
        self.comm: Any = None
        self.engine_flats: list[Flat] = [self]
        self.engine: Callable[[], Any] = lambda: None  # a weak reference
        self.full: torch.Tensor
        self.views: dict[str, torch.Tensor] = {}
        self.master: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None  # this rank's part of the gradient, over ``owned``
        self.window: torch.Tensor | None = None  # the whole gradient of the accumulation window, where the stage keeps it whole
        self._storage: Storage | None = None
        self._at = 0
        self._placeholders: dict[str, torch.Tensor] = {}
        # torch.utils.swap_tensors would exchange what a view of the flat stands for; it refuses tensors with weak references.
        self._no_swaps = [weakref.ref(parameter) for parameter in parameters.values()]

    def __repr__(self) -> str:
        return f"Flat({self.key}, {self.layout.numel} elements, owned {self.owned})"

    @property
    def references(self) -> int:
        """How many tensors besides this flat's own share the memory of ``full``, which is gathered."""
        # Its own: ``full``, the object asked here, and for each parameter a view and the parameter itself.
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) - 2 - 2 * len(self.parameters)

    @property
    def holds_gradient(self) -> bool:
        return self.filled or self.reduced

    @property
    def items(self) -> Iterator[tuple[nn.Parameter, Slot]]:
        for slot in self.layout.slots:
            yield self.parameters[slot.name], slot

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements in compute dtype: [owned]."""
        if self._storage is None:
            return self.full[self.owned[0] : self.owned[1]]
        return self._storage.fetch(self._at, self._at + self.layout.chunk)

    def store_shard(self, values: torch.Tensor) -> None:
        """Overwrite this rank's elements, casting to compute dtype."""
        if self._storage is None:
            own = self.shard
            if own.data_ptr() != values.data_ptr() or own.dtype != values.dtype:
                own.copy_(values)
        else:
            self._storage.store(self._at, values)

    def keep_shard_in(self, storage: Storage, at: int) -> None:
        self._storage, self._at = storage, at

    def own_range(self, name: str) -> tuple[int, int, int]:
        """Where this rank's part of parameter ``name`` lies: (first element of it, start in owned, stop in owned)."""
        slot = self.layout.by_name[name]
        start, stop = max(slot.offset, self.owned[0]), min(slot.end, self.owned[1])
        if start >= stop:
            return 0, 0, 0
        return start - slot.offset, start - self.owned[0], stop - self.owned[0]

    def own_part(self, name: str) -> torch.Tensor:
        _, start, stop = self.own_range(name)
        return self.shard[start:stop]

    def adopt(self, name: str) -> None:
        """Take the gathered values of parameter ``name`` over into this rank's shard and master weights."""
        first, start, stop = self.own_range(name)
        values = self.views[name].reshape(-1)[first : first + stop - start]
        shard = self.shard
        if shard.data_ptr() != self.full[self.owned[0] : self.owned[1]].data_ptr():
            shard[start:stop].copy_(values)
            self.store_shard(shard)
        if self.master is not None:
            self.master[start:stop].copy_(values)

    def use_full(self, full: torch.Tensor) -> None:
        """Make ``full`` [padded] the buffer of this flat and the parameters views of it. Their values must be in it."""
        kind = LiveParameter if self.sharded else OwnedParameter
        self._lay(full)
        for number, (parameter, slot) in enumerate(self.items):
            # One element, expanded: true shape and dtype, no memory. In floats all bits set are NaN: a leak cannot pass for a weight.
            bits = torch.full((self.dtype.itemsize,), 255 if self.dtype.is_floating_point else 0, dtype=torch.uint8, device=full.device)
            self._placeholders[slot.name] = bits.view(self.dtype).view(()).expand(slot.shape)
            become(parameter, kind)
            parameter.__dict__.update(_hf_zero_flat=self, _hf_zero_name=slot.name, _hf_zero_id=self.number * 1_000_000 + number)
            _set_data(parameter, self.views[slot.name])

    def _lay(self, full: torch.Tensor) -> None:
        self.full = full
        self.views = {slot.name: full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots}

    def point_at_full(self) -> None:
        for parameter, slot in self.items:
            become(parameter, LiveParameter)
            _set_data(parameter, self.views[slot.name])

    def leave_storage(self) -> None:
        """Go on in another storage: this one, with the values it has, belongs to the views that others hold."""
        self._lay(torch.empty_like(self.full))

    def point_at_nothing(self) -> None:
        for parameter, slot in self.items:
            _set_data(parameter, self._placeholders[slot.name])
            become(parameter, ReleasedParameter)

    def retire(self) -> None:
        """Give whole parameters back to plain PyTorch. Released ones stay so; another engine can take them from the shards."""
        self.retired = True
        self.master = self.grad = self.window = self.held = None
        for parameter, slot in self.items:
            if not isinstance(parameter, ReleasedParameter):
                if self.sharded:
                    _set_data(parameter, self.views[slot.name].clone())
                forget(parameter)
        if not self.sharded:
            self.drop()  # the parameters alone keep the memory from now on

    def drop(self) -> None:
        """Let go of this rank's memory: the parameters belong to another flat by now, or to themselves."""
        self._storage, self.views, self._placeholders = None, {}, {}
        self.full = self.full.new_empty(0)

    def whole_from_shards(self) -> torch.Tensor:
        """A new buffer with the values of all ranks' shards, past the parameters: [padded]. Collective."""
        whole = torch.empty(self.layout.padded, dtype=self.dtype, device=self.full.device)
        self.axis.all_gather([(whole, self.shard)], self.key).wait()
        return whole


def forget(parameter: nn.Parameter) -> None:
    """Make ``parameter`` what it was when it was given, with the data it has."""
    for key in ("_hf_zero_flat", "_hf_zero_name", "_hf_zero_id"):
        parameter.__dict__.pop(key, None)
    parameter.__class__ = given_class(parameter)


class OuterCall:
    """One forward from the outermost module called, with what was gathered for it. It lives as long as its graph."""

    __slots__ = ("__weakref__", "calls", "reads", "tracked", "whole")

    def __init__(self, whole: bool):
        self.whole = whole  # the whole model was called, not a part of it
        self.reads: set[Unit] = set()  # units that its backward reads where no hook of theirs can tell when
        self.tracked = False  # a hook on its graph tells when its backward runs
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()  # those in it whose backward will be told of


class Call:
    """One forward of a unit whose backward may come. It lives as long as the graph of that forward."""

    __slots__ = ("__weakref__", "marked", "outer", "unit")

    def __init__(self, unit: Unit, outer: OuterCall):
        self.unit = unit
        self.outer = outer
        self.marked = False  # an input carries the mark that tells when this call's backward is over


class Unit:
    """A module and the flats it gathers and releases together."""

    def __init__(self, index: int, name: str, module: nn.Module, flats: Sequence[Flat]):
        self.index = index
        self.name = name
        self.module = module
        self.flats = list(flats)
        self.sharded = [flat for flat in flats if flat.sharded]
        self.trainable = [flat for flat in flats if flat.trainable]
        self.state = State.GATHERED
        self.pending: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose backward is to come: decides the reduction
        self.active: set[Call] = set()  # calls whose backward is under way: decides the release
        self.open: list[Call | None] = []  # forwards under way, innermost last
        self.pins = 0
        self.stays: weakref.WeakSet[OuterCall] = weakref.WeakSet()  # those that read this unit so: it waits for their backward
        self._watchers = 0
        self._shared = False  # somebody may hold views of the values
        self._handle: Handle | None = None
        for flat in self.flats:
            flat.unit = self

    def __repr__(self) -> str:
        return f"Unit({self.label}, {self.state.value})"

    @property
    def label(self) -> str:
        return self.name or "(root)"

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered flats."""
        return sum(flat.layout.padded * flat.dtype.itemsize for flat in self.sharded)

    @property
    def in_use(self) -> bool:
        return bool(self.pins or self.open or self.active or self.stays)

    def guard(self) -> None:
        """Let parameters that are here tell of graphs that are recorded on them: their own module is not at work."""
        self._become(LiveParameter, WatchedParameter)

    def unguard(self) -> None:
        if not self._watchers:
            self._become(WatchedParameter, LiveParameter)

    def watch(self) -> None:
        """As :meth:`guard`, for as long as somebody has asked for the values, until :meth:`unwatch`."""
        self._watchers += 1
        if self._watchers == 1:
            self.guard()

    def unwatch(self) -> None:
        self._watchers -= 1

    def share(self) -> None:
        """Somebody has taken a view of the values (``p.detach()``, ``p.t()``): it must not read memory that was given back."""
        self._shared = True

    def _become(self, before: type[OwnedParameter], after: type[OwnedParameter]) -> None:
        for flat in self.sharded:
            for parameter, _ in flat.items:
                if type(parameter) is owned_class(before, given_class(parameter)):
                    become(parameter, after)

    def launch_gather(self) -> None:
        """Start the all-gather into the flats' own storage."""
        pairs = []
        with torch.inference_mode(False):
            for flat in self.sharded:
                storage = flat.full.untyped_storage()
                if storage.size() == 0:
                    storage.resize_(flat.layout.padded * flat.dtype.itemsize)
                pairs.append((flat.full, flat.shard))
            with torch.no_grad():
                self._handle = self.sharded[0].axis.all_gather(pairs, self.label)
        if self.state is State.RELEASED:
            self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Wait for the all-gather and let the parameters see the values."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if self.state is State.GATHERING:
            with torch.inference_mode(False), torch.no_grad():
                for flat in self.sharded:
                    flat.point_at_full()
            self.state = State.GATHERED

    def chunk_bytes(self) -> bytes:
        """This rank's chunks of all sharded flats, end to end."""
        return b"".join(flat.shard.detach().cpu().view(torch.uint8).numpy().tobytes() for flat in self.sharded)

    def fill(self, chunks: Mapping[int, bytes]) -> None:
        """Become gathered from the other shards' :meth:`chunk_bytes`, without a collective."""
        with torch.inference_mode(False), torch.no_grad():
            at = 0
            for flat in self.sharded:
                size = flat.layout.chunk * flat.dtype.itemsize
                flat.full.untyped_storage().resize_(flat.layout.padded * flat.dtype.itemsize)
                flat.full[flat.owned[0] : flat.owned[1]].copy_(flat.shard)
                for shard, data in chunks.items():
                    values = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8).view(flat.dtype)
                    start, stop = flat.layout.rank_range(shard)
                    flat.full[start:stop].copy_(values)
                at += size
        self.state = State.GATHERING
        self.finish_gather()

    def release(self, keep_views: bool = False) -> None:
        """Give the whole values back; every rank keeps its shard. ``keep_views``: views that somebody has stay readable."""
        self.finish_gather()
        if self.state is State.RELEASED or not self.sharded:
            return
        with torch.inference_mode(False), torch.no_grad():
            for flat in self.sharded:
                left = (keep_views or self._shared) and flat.references
                flat.point_at_nothing()
                if left:
                    flat.leave_storage()
                flat.full.untyped_storage().resize_(0)
        self.state, self._shared = State.RELEASED, False
