"""Flat buffers: the parameters of one unit with equal dtype and trainability, concatenated in one
buffer that is sharded over the ranks.

[Note: one storage for life]
A whole buffer keeps one storage, unless views of it were taken outside the engine
(``leave_storage``). A release frees its memory (``resize_(0)``), and a gather fills the same
storage again, so views that autograd saved in between (``weight.t()``) have their values again. A
release must follow the last read of such a view: a later read would crash the process.

[Note: how a write is noticed]
A script may write to parameters in place, through ``parameter.data``, or by assignment to it. torch
counts the changes of a tensor in ``_version``. A parameter has its own count although its memory is
a view of a flat buffer, so the engine's writes to the buffer do not change the count.
``parameter.data`` has a new count each time it is read; the engine therefore returns views of one
alias per parameter, which share its count. So a step compares one sum of integers per flat buffer,
and examines single parameters only after a write. An update of the engine increments the
parameters' own counts, too, so that autograd raises for a backward after it over a graph from
before it.

[Note: whose values count]
Each rank keeps its own part of a write, as of everything else. Ranks that write the same values, as
in a script that is the same on all of them, lose nothing; if the values differ, the rank that owns
an element decides, and all ranks have its value after the next gather. Unchanged elements keep
their master weights in full precision, except where steps send differences
(``FlatSpec.sends_differences``): whole values lag behind the master weights there, and do not tell
which elements were written, so the master weights of a written parameter become these values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import nn

from hf_zero.device import streams
from hf_zero.device.spans import NOTHING, span
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.logging import abridged
from hf_zero.offload.storage import SHARD, CastStorage, DeviceStorage, Storage
from hf_zero.ops.coded_arrays import decoded
from hf_zero.zero.layout.compute_copy import Change, WeightTransform
from hf_zero.zero.layout.flat_layout import Slot
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.gradients import GradientBuffer, GradientMemory, GradientVersion
from hf_zero.zero.layout.optimizer_shard import OptimizerShard
from hf_zero.zero.layout.parameter import OwnedParameter, OwningEngine, UpdatingParameter
from hf_zero.zero.layout.parameter_views import ParameterGuard, ParameterViews, UserWrites

_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
E = TypeVar("E")


class EngineFlats:
    """The flat buffers of one engine, their mesh, and the engine itself."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.flats: list[FlatBuffer] = []
        # a weak reference
        self.engine: Callable[[], OwningEngine[FlatBuffer] | None] = lambda: None
        # whether requires_grad of a frozen parameter has been switched since the engine looked
        self.trainability_changed = False
        self._switched: str | None = ""  # None: to be listed again
        self.gradient_version = GradientVersion()

    def note_requires_grad(self, trainable: bool) -> None:
        """Note that requires_grad of a parameter was switched, which is laid out as ``trainable``
        or as frozen.
        """
        self.trainability_changed |= not trainable
        self._switched = None

    @property
    def switched(self) -> str:
        """The names of the parameters whose requires_grad differs from that at initialize."""
        if self._switched is None:
            views = (flat.parameter_views for flat in self.flats)
            self._switched = abridged(sorted(name for view in views for name in view.switched))
        return self._switched


class FlatBuffer:
    """The values of the parameters of one flat buffer: whole in ``full`` [padded] while gathered;
    this rank's parameter shard [owned] exists always, except where gathers cast the master weights.

    ``gradient`` and ``optimizer_shard`` are the other state of the same parameters. Only the
    methods here change attributes.
    """

    def __init__(
        self, spec: FlatSpec, parameters: dict[str, nn.Parameter], engine_flats: EngineFlats
    ):
        assert spec.mesh is not None
        self.spec = spec
        self.index, self.key = spec.index, spec.key
        self.layout, self.dtype, self.owned = spec.layout, spec.dtype, spec.owned
        self.trainable, self.sharded = spec.trainable, spec.sharded
        self.raw, self.saves_shard = spec.raw, spec.saves_shard
        self.mesh = spec.mesh
        self.engine_flats, self.engine_mesh = engine_flats, engine_flats.mesh
        self.parameter_views = ParameterViews(spec, parameters)
        self.parameters = parameters
        # in buffer order, and as views of the buffer by name
        self.members, self.views = self.parameter_views.members, self.parameter_views.views
        self.gradient = GradientBuffer(spec, engine_flats.gradient_version)
        self.optimizer_shard = OptimizerShard(spec, self.gradient)
        self.user_writes = UserWrites(parameters)
        self.retired = False  # its engine has been destroyed
        # changes of the values, other than updates of steps; also where this rank owns none of them
        self.other_changes = 0
        # the unit that gathers it (``unit_of`` in gather/unit.py), and what the flat buffers of the
        # unit share
        self.unit: object
        self.guard: ParameterGuard
        self.full: torch.Tensor
        self._own: torch.Tensor  # this rank's part of ``full``
        self._storage: Storage = DeviceStorage({})  # storage of the parameter shard
        self.shard_offloaded = False  # that storage is not on the compute device
        self._shard_on_device: torch.Tensor | None = None  # the shard, if it has memory there
        # the shard of frozen parameters, as the optimizer's groups have it; with a count of writes
        self._member: torch.Tensor | None = None
        self._gathered_at = 0  # that count when it was last read for a gather into ``full``
        self.transform: WeightTransform | None = None
        engine_flats.flats.append(self)

    def __repr__(self) -> str:
        return f"FlatBuffer({self.key}, {self.layout.numel} elements, owned {self.owned})"

    def join(self, unit: object, guard: ParameterGuard) -> None:
        """Set the unit that gathers and releases this flat buffer."""
        self.unit, self.guard = unit, guard

    @property
    def engine(self) -> OwningEngine[FlatBuffer] | None:
        """The engine of this flat buffer, which may be destroyed; None once it is gone."""
        return self.engine_flats.engine()

    @property
    def live_engine(self) -> OwningEngine[FlatBuffer] | None:
        """The engine of this flat buffer; None once it is destroyed, or gone."""
        return None if self.retired else self.engine

    def engine_as(self, kind: type[E]) -> E | None:
        """Return :attr:`live_engine`, of the class ``kind``."""
        engine = self.live_engine
        assert engine is None or isinstance(engine, kind)
        return engine

    @property
    def references(self) -> int:
        """Number of tensors outside this flat buffer that share the memory of ``full``, which must
        be gathered.
        """
        # Own references: ``full``, ``_own``, the storage object of this call, for each parameter a
        # view and the parameter itself, and aliases.
        expected = 3 + 2 * len(self.members) + self.user_writes.aliases
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata) - expected

    @property
    def version(self) -> int:
        """Number of changes of the values by steps, loads and scripts, on any rank; those of an
        update under way are counted.
        """
        writes = 0 if self._member is None else self._member._version
        writes += self.optimizer_shard.member_writes + self.user_writes.updates
        return self.other_changes + writes

    def count_change(self) -> None:
        """Count a change of the values, on every rank, whichever owns them."""
        self.other_changes += 1

    @property
    def items(self) -> Iterator[tuple[nn.Parameter, Slot]]:
        """Each parameter with its slot in the buffer."""
        return zip(self.members, self.layout.slots)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements in compute dtype, on the compute device: [owned].

        Waits for the update under way. Written with :meth:`store_shard`.
        """
        self.optimizer_shard.wait_for_update()
        return self.read_shard()

    def read_shard(self) -> torch.Tensor:
        """Return :attr:`shard` without a wait for the update: a thread other than the training
        thread calls ``optimizer_shard.synchronize_update`` before.
        """
        if not self.shard_offloaded:
            return self._storage.fetch(SHARD)
        out = torch.empty(self.layout.shard_numel, dtype=self.dtype, device=self.full.device)
        self._storage.fetch_into(SHARD, 0, out)
        copied = streams.record_here(out.device)
        if copied is not None:
            copied.synchronize()  # the caller may drop the shard, or write to it on the host
        return out

    def fetch_shard(self, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's elements [owned] for a message or a copy issued next: the shard, or,
        if that is not on the device or is a cast of the master weights, ``target``, by default
        their part of ``full``, which is filled. The host does not wait for a copy from its memory:
        call this on the stream of shards. No write may follow before the message is over.
        """
        if self.optimizer_shard.has_update:
            self.optimizer_shard.wait_for_update()
        if target is None and self._member is not None:
            self._gathered_at = self._member._version
        if self._shard_on_device is not None:
            return self._shard_on_device
        target = self._own if target is None else target
        crosses = (
            span("copy_to_device", self.key, target.nbytes) if self.shard_offloaded else NOTHING
        )
        with crosses:
            self._storage.fetch_into(SHARD, 0, target)
        return target

    def store_shard(self, values: torch.Tensor, start: int = 0, waited: bool = False) -> None:
        """Overwrite elements from ``start`` of ``owned`` on, cast to compute dtype. ``waited``: the
        caller has counted the change and waited for the update under way, or is part of it. The
        host waits for gathers that still read an offloaded shard.
        """
        if not waited:
            self.count_change()
            self.optimizer_shard.wait_for_update()
        if self.optimizer_shard.wait_until_copied is not None:
            self.optimizer_shard.wait_for_copy()
        reads = streams.shard_stream(self.full.device) if self.shard_offloaded else None
        if reads is not None:
            streams.record_event(reads).synchronize()
        self._storage.store(SHARD, start, values)

    def member(self, name: str) -> torch.Tensor:
        """Return this rank's part of the frozen, sharded parameter ``name``, 1-D, in the memory of
        the shard; :attr:`version` counts writes. A placeholder where the shard has no memory.
        """
        if self._member is None:
            self._member = self._storage.entry(SHARD).data
        _, start, stop = self.spec.own_range(name)
        return self._member[start:stop]

    def shard_memory(self) -> torch.Tensor:
        """Return this rank's elements [owned] to be overwritten, on the device or the host: the
        live shard, unless it is in a file or a cast of the master weights. Then it is memory of
        its own, and :meth:`store_shard` writes its values. Does not wait for the update under way.
        Call :meth:`end_host_writes` once all elements are written on the host.
        """
        return decoded(self._storage.acquire(0, overwrite=True)[SHARD])

    def end_host_writes(self) -> None:
        """Mark the end of the host's writes to :meth:`shard_memory`."""
        self._storage.release(0)

    def prefetch(self) -> None:
        """Start reading the parameter shard ahead of its use, unless an update is to write it."""
        if not self.optimizer_shard.update_runs:
            self._storage.prefetch(0)

    def begin_update(
        self, finish: Callable[[], None], update: Future[streams.Event | None] | None
    ) -> None:
        """Register an update, as :meth:`OptimizerShard.begin_update`; until its end every use of a
        whole parameter waits for it.
        """
        self.optimizer_shard.begin_update(finish, update)
        if not self.sharded:
            self.parameter_views.turn(OwnedParameter, UpdatingParameter)

    def end_update(self, copied: streams.Event | None) -> None:
        """Record the end of the update, if one was registered; its copies to the device end with
        the event ``copied``.
        """
        if self.optimizer_shard.has_update:
            self.optimizer_shard.end_update(copied)
            if not self.sharded:
                self.parameter_views.turn(UpdatingParameter, OwnedParameter)

    def shard_bytes(self) -> dict[str, int]:
        """Return the bytes of the parameter shard by tier."""
        return self._storage.nbytes()

    @property
    def follows_updates(self) -> bool:
        """Return whether readers of the shard see new values while an update runs: offloaded state,
        or master weights that are the shard or are cast into it.
        """
        shard = self.optimizer_shard
        return shard.offloaded or not shard.has_separate_master or self.cast_master is not None

    @property
    def copies_master(self) -> bool:
        """Return whether modules compute with copies of the master weights, which follow steps and
        loads alone: a shard in another dtype or tier, whole parameters that ranks gather.
        """
        gathered = not self.sharded and self.layout.num_shards > 1
        return gathered or self.optimizer_shard.offloaded or not self.follows_updates

    @property
    def cast_master(self) -> torch.Tensor | None:
        """The master weights that are cast wherever the parameter shard is read; None: it has
        memory of its own.
        """
        return self._storage.master if isinstance(self._storage, CastStorage) else None

    def keep_shard_in(self, storage: Storage) -> None:
        """Keep the parameter shard in ``storage``, under the name ``SHARD``."""
        self._storage, self.shard_offloaded = storage, storage.offloaded
        is_plain = isinstance(storage, DeviceStorage) and not isinstance(storage, CastStorage)
        self._shard_on_device = (
            storage.fetch(SHARD) if is_plain and SHARD in storage.names() else None
        )

    def move_states_to_device(
        self, master: torch.Tensor | None, grad: GradientMemory | None
    ) -> None:
        """Keep master weights and gradient on the device from now on; the caller moves the moments
        first.

        ``master`` [owned] is memory for the master weights, None if the shard is the master
        weights; the next part of ``grad`` is memory for the gradient, None if whole gradients are
        summed.
        """
        separate_master = master is not None or self.shard_offloaded
        self.optimizer_shard.move_to_device(master, self.shard, separate_master)
        self.gradient.move_to_device(grad)

    def cast(self, name: str, dtype: torch.dtype) -> None:
        """Give the released parameter ``name`` another dtype for the engine after this one."""
        self.parameter_views.cast(name, dtype)

    def note_requires_grad(self, name: str) -> None:
        """Note that requires_grad of parameter ``name`` was switched."""
        self.parameter_views.switch(name)
        self.engine_flats.note_requires_grad(self.trainable)

    def mark_views(self, tensors: Sequence[torch.Tensor]) -> None:
        """Mark the gathered values as aliased if one of ``tensors`` is a view of them."""
        storage = self.full.untyped_storage()._cdata
        # sparse tensors, and those under vmap, have no storage
        plain = (t for t in tensors if type(t) is torch.Tensor and torch._C._has_storage(t))
        if any(tensor.untyped_storage()._cdata == storage for tensor in plain):
            self.guard.mark_aliased()

    def refuse_changed(self, name: str) -> None:
        """Raise PartitionError if a script has written to parameter ``name`` while modules compute
        with values that differ from the parameter's, or after an update in the backward.
        """
        if self.engine is not None:
            self.engine.refuse_unconfirmed(f"a write to {name}")
        values = ""
        if self.transform is not None and self.transform.under_way:
            values = self.transform.values
        elif self.sharded and self.spec.gather_codec is not None and not self.guard.exact:
            values = f"weights sent in {self.spec.gather_codec}"
        if values:
            self.user_writes.accept()
            raise PartitionError(
                f"{name} was written to in a forward or backward, where modules compute with "
                f"{values}, and what was written is lost; "
                "write to it between steps, inside GatheredParameters"
            )

    def refuse_to_store(self, name: str) -> None:
        """Raise PartitionError if the gathered values of parameter ``name`` cannot replace this
        rank's part: as :meth:`refuse_changed`, or since members were written to after the gather.
        """
        self.refuse_changed(name)
        if self._member is not None and self._member._version != self._gathered_at:
            raise PartitionError(
                f"{name} was gathered to be written to, and members of optimizer.param_groups, "
                "this rank's parts of frozen parameters, were written to meanwhile; write to these "
                "members without GatheredParameters, or to the gathered parameters alone"
            )

    def store_gathered(self, name: str) -> None:
        """Copy the gathered values of parameter ``name`` into this rank's shard and master weights.
        Master weights that already round to these values stay.
        """
        self.refuse_to_store(name)
        self.count_change()
        first, start, stop = self.spec.own_range(name)
        values = self.views[name].reshape(-1)[first : first + stop - start]
        self.optimizer_shard.wait_for_update()
        if start < stop:
            self._take_part(start, stop, values)

    def data_of(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, the memory of parameter ``name``, as a tensor with counted writes."""
        view = self.views.get(name)
        if view is not None and values.data_ptr() == view.data_ptr():
            return self.user_writes.alias(name, view)
        # other memory than the engine's: a script has moved the parameter (``Tensor.set_``)
        return values if self.transform is None else self.transform.data_of(name, values)

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """Copy ``value`` over the whole parameter ``name``; what a script has from ``.data`` keeps
        the former values. Return False if torch should move the parameter to the memory of
        ``value`` instead.

        A frozen parameter may have another dtype or device than its slot, which then has its
        values, too. Raises PartitionError for other values that do not fit the slot.
        """
        view, parameter = self.views.get(name), self.parameters[name]
        if view is None or self.retired:
            return False
        if (value.shape, value.dtype, value.device) != (view.shape, view.dtype, view.device):
            if self.raw or (self.sharded and (self.guard.watched or not self.trainable)):
                return False  # a release drops what a pass changes of sharded ones
            if self.trainable or value.shape != view.shape or value.is_meta:
                raise PartitionError(
                    f"{name}.data of shape {tuple(view.shape)}, {view.dtype} on {view.device} was "
                    f"given a tensor of shape {tuple(value.shape)}, {value.dtype} on "
                    f"{value.device}, but the place of a parameter in an engine's flat buffer is "
                    "fixed; assign values of the same kind, or change the model before "
                    "hf_zero.initialize"
                )
            with torch.no_grad():
                self.user_writes.write(name, view, value)
            return False
        self.optimizer_shard.wait_for_update()
        with torch.no_grad():
            if value.untyped_storage()._cdata != view.untyped_storage()._cdata:
                self.user_writes.write(name, view, value)
            elif value.data_ptr() != view.data_ptr() or value.stride() != view.stride():
                self.user_writes.write(name, view, value.clone())
            if _get_data(parameter).data_ptr() != view.data_ptr() or parameter.shape != view.shape:
                _set_data(parameter, view)
        return True

    def restore_views(self) -> None:
        """Make the frozen parameters, which a script may have moved (:meth:`assign`), views of
        the buffer again, before a load of values into it.
        """
        if not (self.sharded or self.raw):
            self.take_user_writes()
            self.parameter_views.point_at(self.views)

    @torch.no_grad()
    def take_user_writes(self) -> None:
        """Copy a script's writes to whole parameters into this rank's shard and master weights."""
        names = self.user_writes.names()
        if not names:
            return
        self.refuse_changed(names[0])
        self.optimizer_shard.wait_for_update()
        for name in names:
            self._take_written(name)
        self.user_writes.accept()

    def _take_written(self, name: str) -> None:
        self.count_change()
        parameter, view = self.parameters[name], self.views[name]
        if parameter.numel() and parameter.data_ptr() != view.data_ptr():  # Tensor.set_
            self.assign(name, parameter.detach())
        first, start, stop = self.spec.own_range(name)
        if start == stop:
            return
        self._take_part(start, stop, view.reshape(-1)[first : first + stop - start])

    def _take_part(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Set elements [start, stop) of this rank's shard and master weights to ``values``. Master
        weights that already round to them stay (the note on whose values count).
        """
        master = self.optimizer_shard.master if self.optimizer_shard.has_separate_master else None
        if master is not None:
            before = master[start:stop]
            new = values.to(before.device)
            self.optimizer_shard.store_master(
                torch.where(new == before.to(self.dtype), before, new.to(before.dtype)), start
            )
        self.store_shard(values, start, waited=True)

    def set_transform(self, change: Change | None, values: str) -> None:
        """Let modules compute with the values changed by ``change`` from the next pass on, named
        ``values`` in messages; None: with the values themselves. Called between passes.
        """
        self.transform = None if change is None else WeightTransform(self, change, values)

    def allocate(self, for_script: bool = False) -> None:
        """Allocate ``full`` before new values are written into it. ``for_script``: a script reads
        the values, unchanged.
        """
        storage = self.full.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.layout.padded * self.dtype.itemsize)
        if self.transform is not None:
            self.transform.expect(for_script)

    @property
    def whole_buffers(self) -> Sequence[torch.Tensor]:
        """The buffers that the parameters may be views of."""
        return (self.full, *(self.transform.memory if self.transform is not None else ()))

    def use_full(self, full: torch.Tensor) -> None:
        """Continue in ``full`` [padded], which has the values; parameters become its views."""
        self._set_full(full)
        if not self.sharded:
            self.keep_shard_in(DeviceStorage({SHARD: self._own}))
        self.parameter_views.take(self, full)

    def _set_full(self, full: torch.Tensor) -> None:
        self.full, self._own = full, full[self.owned[0] : self.owned[1]]

    def leave_storage(self) -> None:
        """Continue in a new storage: existing views keep the old one with its values."""
        self._set_full(torch.empty_like(self.full))
        self.parameter_views.lay(self.full)

    def retire(self) -> None:
        """Turn whole parameters back into plain PyTorch parameters.

        Released ones stay released; another engine can take their values from the shards.
        """
        self.optimizer_shard.wait_for_update()
        if self.cast_master is not None:
            self.keep_shard_in(DeviceStorage({SHARD: self.shard}))
        self.retired = True
        self.gradient.free()
        self.optimizer_shard.free()
        if self.parameter_views.restore():
            self.drop()  # only the parameters keep values from now on

    def drop(self) -> None:
        """Free this rank's memory: the parameters now belong to another flat buffer, or to none."""
        self.keep_shard_in(DeviceStorage({}))
        self._member = None
        self.parameter_views.drop_memory()
        self.user_writes.drop_aliases()
        self.full = self.full.new_empty(0)
        self._own = self.full

    def whole_from_shards(self) -> torch.Tensor:
        """Return a new buffer [padded] with the values of all ranks' shards; the parameters stay
        as they are. Collective.
        """
        whole = torch.empty(self.layout.padded, dtype=self.dtype, device=self.full.device)
        self.mesh.shard.all_gather([(whole, self.shard)], self.key).wait()
        return whole


def owner_of(parameter: torch.Tensor) -> FlatBuffer | None:
    """Return the flat buffer that holds ``parameter``, None if no engine owns it."""
    flat: FlatBuffer | None = None
    if issubclass(type(parameter), OwnedParameter):
        flat = parameter.__dict__.get("_hf_zero_flat")
    return flat


def flat_of(parameter: torch.Tensor) -> FlatBuffer:
    """Return the flat buffer that holds ``parameter``, which an engine owns."""
    flat = owner_of(parameter)
    assert flat is not None, "no engine owns this parameter"
    return flat


def engine_of(parameters: Iterable[torch.Tensor], kind: type[E]) -> E | None:
    """Return the engine, of the class ``kind``, of the first of ``parameters`` that an engine owns;
    None if there is none, or if it is destroyed.
    """
    for parameter in parameters:
        flat = owner_of(parameter)
        if flat is not None:
            return flat.engine_as(kind)
    return None
