"""Flats: the parameters of one unit that share dtype and trainability, end to end in one buffer of
which each rank keeps a part.

[Note: one storage for life]
A flat's whole buffer keeps one storage, unless somebody outside has taken views of it
(``leave_storage``). Releasing gives its memory back (``resize_(0)``), gathering fills the same
storage again, so the views that autograd saved in between (``weight.t()``) come back to life with
their values. Whoever releases must know that nobody will read such a view before the next gather:
that would crash the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.core.layout import FlatLayout, Slot
from hf_zero.core.parameter import (
    LiveParameter,
    OwnedParameter,
    ReleasedParameter,
    become,
    given_class,
    owned_class,
)
from hf_zero.core.writes import UserWrites
from hf_zero.device import streams
from hf_zero.distributed.collectives import MeshDim
from hf_zero.errors import PartitionError
from hf_zero.spans import span
from hf_zero.storage.states import MASTER, States
from hf_zero.storage.storage import Storage

if TYPE_CHECKING:
    from hf_zero.core.unit import Unit

_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


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
        axis: MeshDim,
        writes: bool,
    ):
        self.number = number  # of the flat in its engine
        self.key = key
        self.layout = layout
        self.parameters = parameters
        # in the order of the buffer
        self.members = [parameters[slot.name] for slot in layout.slots]
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
        self.every = (1 << len(self.members)) - 1  # a bit for each of ``members``
        self.used = 0  # those for which this rank has had a gradient in the accumulation window
        # those for which no rank has, once the ranks have agreed
        self.unused: frozenset[str] = frozenset()
        # reduced gradients set aside while ``window`` fills again
        self.held: torch.Tensor | None = None
        # parameters whose requires_grad is another one than at initialize
        self.switched: set[str] = set()
        self.user_writes = UserWrites(parameters)
        self.unit: Unit
        self.mesh: Any = None
        self.engine_flats: list[Flat] = [self]
        self.engine: Callable[[], Any] = lambda: None  # a weak reference
        self.full: torch.Tensor
        self.views: dict[str, torch.Tensor] = {}
        # where master weights and moments live that are offloaded
        self.states: States | None = None
        self.grad: torch.Tensor | None = None  # this rank's part of the gradient, over ``owned``
        self.widens = False  # gradients are kept in 16 bits as long as nothing is added to them
        # the sum of its squares, where that was taken on the device before it left
        self.squares: torch.Tensor | None = None
        # the whole gradient of the accumulation window, where the stage keeps it whole
        self.window: torch.Tensor | None = None
        # waits for the update of this flat that is under way
        self.updating: Callable[[], None] | None = None
        # that one; it gives what tells of its last copy to the device
        self.update: Future[streams.Event | None] | None = None
        # the same of the last update that is over: only streams that compute wait for it
        self.copied: streams.Event | None = None
        self._master: torch.Tensor | None = None
        self._storage: Storage | None = None
        self._at = 0
        # classes of members, by state
        self._made: dict[type[OwnedParameter], list[type[OwnedParameter]]] = {}
        self._placeholders: dict[str, torch.Tensor] = {}
        # torch.utils.swap_tensors would exchange what a view of the flat stands for; it refuses
        # tensors with weak references.
        self._no_swaps = [weakref.ref(parameter) for parameter in parameters.values()]

    def __repr__(self) -> str:
        return f"Flat({self.key}, {self.layout.numel} elements, owned {self.owned})"

    @property
    def references(self) -> int:
        """How many tensors besides this flat's own share the memory of ``full``, which is
        gathered.
        """
        # Its own: ``full``, the object asked here, for each parameter a view and the parameter
        # itself, and aliases.
        own = 2 + 2 * len(self.parameters) + self.user_writes.aliases
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) - own

    @property
    def holds_gradient(self) -> bool:
        return self.filled or self.reduced

    @property
    def items(self) -> Iterator[tuple[nn.Parameter, Slot]]:
        for slot in self.layout.slots:
            yield self.parameters[slot.name], slot

    def use(self, name: str) -> None:
        """There is a gradient for parameter ``name``, wherever it came from."""
        self.used |= 1 << next(
            place for place, slot in enumerate(self.layout.slots) if slot.name == name
        )

    def write_gradient(
        self, name: str, value: torch.Tensor | None, unreduced: float, scale: float
    ) -> None:
        """Replace what this rank has of the gradient of ``name``, in the window and reduced; None:
        it has none.

        ``scale`` is what reduced gradients carry, ``unreduced`` what those carry that are yet to be
        summed over the ranks.
        """
        slot, (first, start, stop) = self.layout.by_name[name], self.own_range(name)
        bit = 1 << self.layout.slots.index(slot)
        flattened = (
            None
            if value is None
            else (value.to_dense() if value.is_sparse else value).detach().reshape(-1)
        )
        self.used = self.used & ~bit if value is None else self.used | bit
        parts = [(self.held[start:stop], False)] if self.held is not None else []
        if self.reduced and self.grad is not None:
            parts.append((self.grad[start:stop], not self.filled))
        for own, stays in parts:
            own.zero_() if flattened is None or not stays else own.copy_(
                flattened[first : first + stop - start]
            ).mul_(scale)
        if self.filled and self.window is not None:
            whole = self.window[slot.offset : slot.end]
            whole.zero_() if flattened is None else whole.copy_(flattened).mul_(unreduced)
        self.squares = None

    def wait_for_update(self) -> None:
        """Return when no update of this flat is under way."""
        if self.updating is not None:
            self.updating()

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements in compute dtype, on the compute device: [owned].

        Written with :meth:`store_shard`.
        """
        self.wait_for_update()
        return self._shard_as_it_is()

    def _shard_as_it_is(self) -> torch.Tensor:
        if self._storage is None:
            return self.full[self.owned[0] : self.owned[1]]
        return self._storage.fetch(self._at, self._at + self.layout.chunk)

    def shard_for_others(self) -> torch.Tensor:
        """As :attr:`shard`, for a thread beside the one that trains, which has to wait for the
        update all the same: its stream does.
        """
        update = self.update
        copied = update.result() if update is not None else self.copied
        if copied is not None:
            copied.synchronize()
        return self._shard_as_it_is()

    def shard_to_fill(self) -> torch.Tensor:
        """Memory for new values of this rank's elements, to be given to :meth:`store_shard`:
        [owned].
        """
        if self._storage is None:
            return self.shard
        return self._storage.open(self._at, self._at + self.layout.chunk)

    def bring_shard(self) -> torch.Tensor:
        """This rank's elements where they stand in ``full``, brought there if they live
        elsewhere: [owned].
        """
        self.wait_for_update()
        own = self.full[self.owned[0] : self.owned[1]]
        if self._storage is not None:
            with span("copy_to_device", self.key, own.nbytes):
                self._storage.fetch_into(self._at, own)
        return own

    def announce(self) -> None:
        """Say that the shard will be needed soon.

        One that is going to be another one is not read ahead.
        """
        if self._storage is not None and (self.update is None or self.update.done()):
            self._storage.ahead(self._at, self._at + self.layout.chunk)

    def store_shard(self, values: torch.Tensor) -> None:
        """Overwrite this rank's elements, casting to compute dtype."""
        self.wait_for_update()
        self.store_part(0, values)

    def store_part(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the elements from ``start`` of ``owned`` on: for the update under way, which
        waits for nobody.
        """
        if self._storage is not None:
            self._storage.store(self._at + start, values)
            return
        at = self.owned[0] + start
        own = self.full[at : at + values.numel()]
        if own.data_ptr() != values.data_ptr() or own.dtype != values.dtype:
            own.copy_(values, non_blocking=True)

    def part_in_host_memory(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements ``[start, stop)`` of ``owned`` where the host can write them, if it can."""
        if self._storage is not None:
            return self._storage.in_host_memory(self._at + start, self._at + stop)
        own = self.full[self.owned[0] + start : self.owned[0] + stop]
        return own if own.device.type == "cpu" else None

    def updated(self) -> None:
        """All parts have been written by the host."""
        if self._storage is not None:
            self._storage.complete()

    @property
    def is_away(self) -> bool:
        """Whether this rank's elements live somewhere else than on the compute device."""
        return self._storage is not None and self._storage.nbytes()["device"] == 0

    def shard_bytes(self) -> dict[str, int]:
        """Bytes by tier of the shard, which is away."""
        assert self._storage is not None
        return self._storage.nbytes()

    def keep_shard_in(self, storage: Storage, at: int) -> None:
        self._storage, self._at = storage, at

    @property
    def master(self) -> torch.Tensor | None:
        """The master weights: [owned], fp32, or fp64 of parameters that are; None for what does
        not train. Written with :meth:`store_master`.
        """
        if self.states is None:
            return self._master
        self.wait_for_update()
        return self.states.fetch(MASTER)

    @master.setter
    def master(self, master: torch.Tensor | None) -> None:
        self._master = master

    def store_master(self, values: torch.Tensor, start: int = 0) -> None:
        """Overwrite the master weights from element ``start`` of ``owned`` on."""
        if self.states is not None:
            self.wait_for_update()
            self.states.store(MASTER, start, values)
        elif self._master is not None:
            own = self._master[start : start + values.numel()]
            if own.data_ptr() != values.data_ptr():
                own.copy_(values)

    @property
    def has_master(self) -> bool:
        """Whether this flat trains, and so has master weights."""
        return self.states is not None or self._master is not None

    @property
    def has_own_master(self) -> bool:
        """Whether the master weights are others than the shard."""
        return self.states is not None or (
            self._master is not None and self._master.dtype != self.dtype
        )

    def widen_gradient(self) -> None:
        """Keep gradients in 32 bits from now on: they are going to be sums, which would lose
        what is small.
        """
        self.wait_for_update()
        self.widens = False
        if self.window is not None and self.window.itemsize == 2:
            self._widen_windows(self.window.untyped_storage()._cdata)
        if self.grad is not None and (self.window is None or self.states is not None):
            self.grad = self.grad.float()

    def _widen_windows(self, storage: int) -> None:
        """Widen all windows of one allocation at once: they stay neighbours, and the narrow memory
        is free again when this returns.

        It is freed first where nothing is in it. A reduction under way keeps what it works on, and
        is cast when it lands.
        """
        places = {
            flat: int(flat.window.storage_offset())
            for flat in self.engine_flats
            if flat.window is not None and flat.window.untyped_storage()._cdata == storage
        }
        assert self.window is not None
        device, numel = (
            self.window.device,
            self.window.untyped_storage().nbytes() // self.window.itemsize,
        )
        narrow = (
            self.window.as_strided((numel,), (1,), 0)
            if any(flat.holds_gradient for flat in places)
            else None
        )
        for flat in places:
            flat.window = None
            flat.grad = None if flat.states is None else flat.grad
        wide = (
            torch.zeros(numel, dtype=torch.float32, device=device)
            if narrow is None
            else narrow.float()
        )
        for flat, at in places.items():
            flat.window = wide[at : at + flat.layout.padded]
            if flat.states is None:
                flat.grad = flat.window[flat.owned[0] : flat.owned[1]]

    def bring_states_back(self, master: torch.Tensor | None, grad: torch.Tensor | None) -> None:
        """Keep master weights and gradient on the device from now on; the caller takes the moments
        first.

        ``master`` [owned] is the memory for the first, None where the shard is the master weights;
        ``grad`` [owned], in zeros, the one for the second, None where there is a window.
        """
        values = self.master
        assert self.states is not None and values is not None
        self.states.close()
        self.states = None
        self.master = self.shard if master is None else master.copy_(values)
        if self.window is not None:
            self.grad = self.window[self.owned[0] : self.owned[1]]
        else:
            self.grad, self.widens = grad, False

    def own_range(self, name: str) -> tuple[int, int, int]:
        """Where this rank's part of parameter ``name`` lies: (first element of it, start in
        owned, stop in owned).
        """
        slot = self.layout.by_name[name]
        start, stop = max(slot.offset, self.owned[0]), min(slot.end, self.owned[1])
        if start >= stop:
            return 0, 0, 0
        return start - slot.offset, start - self.owned[0], stop - self.owned[0]

    def own_part(self, name: str) -> torch.Tensor:
        _, start, stop = self.own_range(name)
        return self.shard[start:stop]

    def adopt(self, name: str) -> None:
        """Take the gathered values of parameter ``name`` over into this rank's shard and master
        weights.
        """
        first, start, stop = self.own_range(name)
        values = self.views[name].reshape(-1)[first : first + stop - start]
        self.wait_for_update()
        self.store_part(start, values)
        self.store_master(values, start)

    def data_of(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """``values``, the memory of parameter ``name``, as a tensor whose changes are noticed."""
        view = self.views.get(name)
        if view is None or values.data_ptr() != view.data_ptr():
            return values  # somebody has put the parameter elsewhere (``Tensor.set_``)
        return self.user_writes.alias(name, view)

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Copy ``value`` over the whole parameter ``name``. False where torch is to put the
        parameter elsewhere.

        Raises PartitionError for a parameter that trains and would not fit its place any more.
        """
        view, parameter = self.views.get(name), self.parameters[name]
        if view is None or self.retired:
            return False
        fits = (
            value.shape == view.shape and value.dtype == view.dtype and value.device == view.device
        )
        if not fits:
            if self.trainable and not self.unit.watched:
                raise PartitionError(
                    f"{name}.data of shape {tuple(view.shape)}, {view.dtype} on {view.device} was "
                    "given a tensor of shape "
                    f"{tuple(value.shape)}, {value.dtype} on {value.device}, but the place of a "
                    "parameter that an engine "
                    "trains is fixed; assign values of the same kind, or change the model "
                    "before hf_zero.initialize"
                )
            return False
        self.wait_for_update()
        with torch.no_grad():
            if value.untyped_storage()._cdata != view.untyped_storage()._cdata:
                self.user_writes.alias(name, view).copy_(value)
            elif value.data_ptr() != view.data_ptr() or value.stride() != view.stride():
                self.user_writes.alias(name, view).copy_(value.clone())
            if _get_data(parameter).data_ptr() != view.data_ptr() or parameter.shape != view.shape:
                _set_data(parameter, view)
        return True

    @torch.no_grad()
    def take_user_writes(self) -> None:
        """Take what the script has written to whole parameters over into this rank's shard and
        master weights.
        """
        names = self.user_writes.names()
        if not names:
            return
        self.wait_for_update()
        for name in names:
            self._take_written(name)
        self.user_writes.accept()

    def _take_written(self, name: str) -> None:
        parameter, view = self.parameters[name], self.views[name]
        if parameter.numel() and parameter.data_ptr() != view.data_ptr():  # Tensor.set_
            self.assign(name, parameter.detach())
        first, start, stop = self.own_range(name)
        if start == stop:
            return
        values = view.reshape(-1)[first : first + stop - start]
        master = self.master if self.has_own_master else None
        if master is not None:
            before = master[start:stop]
            given = values.to(before.device)
            self.store_master(
                torch.where(given == before.to(self.dtype), before, given.to(before.dtype)), start
            )
        self.store_part(start, values)

    def use_full(self, full: torch.Tensor) -> None:
        """Make ``full`` [padded] the buffer of this flat and the parameters views of it.

        Their values must be in it.
        """
        kind = LiveParameter if self.sharded else OwnedParameter
        self._lay(full)
        for number, (parameter, slot) in enumerate(self.items):
            # One element, expanded: true shape and dtype, no memory. In floats all bits set are
            # NaN: a leak cannot pass for a weight.
            bits = torch.full(
                (self.dtype.itemsize,),
                255 if self.dtype.is_floating_point else 0,
                dtype=torch.uint8,
                device=full.device,
            )
            self._placeholders[slot.name] = bits.view(self.dtype).view(()).expand(slot.shape)
            become(parameter, kind)
            parameter.__dict__.update(
                _hf_zero_flat=self,
                _hf_zero_name=slot.name,
                _hf_zero_id=self.number * 1_000_000 + number,
            )
            _set_data(parameter, self.views[slot.name])

    def _lay(self, full: torch.Tensor) -> None:
        self.full = full
        self.views = {
            slot.name: full[slot.offset : slot.end].view(slot.shape) for slot in self.layout.slots
        }

    def point_at_full(self, kind: type[OwnedParameter] = LiveParameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, made, view in zip(
                self.members, self._classes(kind), self.views.values()
            ):
                parameter.__class__ = made
                _set_data(parameter, view)

    def leave_storage(self) -> None:
        """Go on in another storage: this one, with the values it has, belongs to the views that
        others hold.
        """
        self._lay(torch.empty_like(self.full))

    def point_at_nothing(self) -> None:
        self.user_writes.drop_aliases()
        with torch._C.DisableTorchFunctionSubclass():
            released = self._classes(ReleasedParameter)
            for parameter, made, placeholder in zip(
                self.members, released, self._placeholders.values()
            ):
                _set_data(parameter, placeholder)
                parameter.__class__ = made

    def _classes(self, kind: type[OwnedParameter]) -> list[type[OwnedParameter]]:
        """The class of each member in the state ``kind``; the classes that they were given do
        not change.
        """
        if kind not in self._made:
            self._made[kind] = [
                owned_class(kind, given_class(parameter)) for parameter in self.members
            ]
        return self._made[kind]

    def retire(self) -> None:
        """Give whole parameters back to plain PyTorch.

        Released ones stay so; another engine can take them from the shards.
        """
        self.wait_for_update()
        self.retired = True
        self.master = self.grad = self.window = self.held = self.squares = None
        if self.states is not None:
            self.states.close()
            self.states = None
        for parameter, slot in self.items:
            if not isinstance(parameter, ReleasedParameter):
                if self.sharded:
                    _set_data(parameter, self.views[slot.name].clone())
                forget(parameter)
        if not self.sharded:
            self.drop()  # the parameters alone keep the memory from now on

    def drop(self) -> None:
        """Let go of this rank's memory: the parameters belong to another flat by now, or to
        themselves.
        """
        self._storage, self.views, self._placeholders = None, {}, {}
        self.user_writes.drop_aliases()
        self.full = self.full.new_empty(0)

    def whole_from_shards(self) -> torch.Tensor:
        """A new buffer with the values of all ranks' shards, past the parameters: [padded].

        Collective.
        """
        whole = torch.empty(self.layout.padded, dtype=self.dtype, device=self.full.device)
        self.axis.all_gather([(whole, self.shard)], self.key).wait()
        return whole


def packs(flats: Iterable[Flat], limit: int) -> list[list[Flat]]:
    """``flats`` in their order, those together that one message may carry: neighbours of one
    dtype with at most ``limit`` elements.
    """
    found: list[list[Flat]] = []
    room = 0
    for flat in flats:
        if found and flat.layout.padded <= room and found[-1][0].dtype == flat.dtype:
            found[-1].append(flat)
        else:
            found.append([flat])
            room = limit
        room -= flat.layout.padded
    return found


def forget(parameter: nn.Parameter) -> None:
    """Make ``parameter`` what it was when it was given, with the data it has."""
    for key in ("_hf_zero_flat", "_hf_zero_name", "_hf_zero_id"):
        parameter.__dict__.pop(key, None)
    parameter.__class__ = given_class(parameter)
