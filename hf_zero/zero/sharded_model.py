"""A model with its parameters laid out over the ranks: units and the schedule of gathers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds, streams
from hf_zero.device.process_settings import ProcessSetting
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import UnsupportedOptimizerError
from hf_zero.offload.placement import Placement
from hf_zero.ops import native
from hf_zero.optim.bound_optimizer import BoundOptimizer
from hf_zero.optim.elementwise import check
from hf_zero.optim.existing_state import collect
from hf_zero.optim.group_member import member_class
from hf_zero.optim.moment_formats import refuse_on_device
from hf_zero.optim.probing import switches_weights
from hf_zero.optim.whole_tensor import ShardRanks, WholeTensorOptimizer
from hf_zero.zero.extensions import Extensions
from hf_zero.zero.gather.model_patches import ModelPatches
from hf_zero.zero.gather.schedule import Schedule
from hf_zero.zero.gather.shared_shards import SharedShards
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.engine_plan import EnginePlan, FlatPlan
from hf_zero.zero.layout.flat_buffer import EngineFlats, FlatBuffer, owner_of
from hf_zero.zero.layout.flat_layout import Slot
from hf_zero.zero.layout.outside import check_outside
from hf_zero.zero.layout.parameter import OwningEngine
from hf_zero.zero.layout.parameter_codec import agreements, report
from hf_zero.zero.layout.walk import modules_of
from hf_zero.zero.layout.wrap import packed_elements
from hf_zero.zero.materialize import check_parameters, check_statistics, materialize

T = TypeVar("T")
# Whether steps on the host, too, return before the gathers of updated parameters are done: gloo's
# threads would compete with the computation for its cores.
OVERLAPS_ON_HOST = False


class ShardedModel:
    """The units of ``plan`` on ``mesh``, built by the constructor (collective).

    Raises PartitionError for parameters that cannot be laid out, the errors of
    :func:`hf_zero.zero.materialize.materialize`, and UnsupportedOptimizerError for an
    optimizer that flat shards cannot run; the model is then unchanged.
    """

    def __init__(self, plan: EnginePlan, mesh: Mesh, placement: Placement):
        self.module = plan.model
        self.mesh = mesh
        self.placement = placement
        self.shard_only = plan.shard_only
        self.policy = plan.policy
        self.aliases = plan.aliases
        self.updates_in_backward = plan.updates_in_backward
        zero = plan.settings.zero
        # maximum number of elements of small units in one message
        self.packed_elements = packed_elements(zero.module_granularity_threshold)
        check_parameters(plan.units, mesh.device)
        check_statistics(plan, mesh.device)
        self.parameters = {name: p for spec in plan.units for name, p in spec.parameters}
        self.param_dtypes = {
            name: str(p.dtype).removeprefix("torch.") for name, p in self.parameters.items()
        }
        self.group_of = plan.group_of
        check_optimizer(plan)
        self.engine_flats = EngineFlats(mesh)
        self.units = materialize(plan, self.engine_flats, placement)
        # a rebuild keeps each rank's buffers in them
        self.modules = weakref.WeakSet(modules_of(plan.model))
        self.extensions: Extensions = plan.extensions
        for unit in self.units:
            if self.extensions.gathers is not None and unit.sharded_flats:
                unit.source = self.extensions.gathers(unit.sharded_flats, unit.label)
        self.flats: list[FlatBuffer] = [flat for unit in self.units for flat in unit.flats]
        self.trainable = [flat for flat in self.flats if flat.trainable]
        report(self.flats, plan.wire_dtype)
        itemsize = max((flat.dtype.itemsize for flat in self.flats), default=4)
        # whether a step returns before the gathers of updated parameters are done
        self.overlaps = OVERLAPS_ON_HOST or not kinds.is_synchronous(mesh.device)
        self.schedule = Schedule(
            self.units,
            mesh,
            SharedShards(self.units, mesh, self.packed_elements, self.overlaps),
            int(zero.prefetch_bucket_size) * itemsize,
            placement.reads_ahead,
            agreements(self.flats),
        )
        self.patches = ModelPatches(plan.model, self.units, self.schedule)

    def attach(self, engine: Callable[[], OwningEngine[FlatBuffer] | None]) -> None:
        """Set ``engine``, a weak reference, as the engine of these parameters."""
        self.engine_flats.engine = engine

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """Context in which ``unit`` is whole (collective); graphs recorded on its parameters and
        views of them keep its values alive.
        """
        self.schedule.pin(unit)
        unit.guard.watch()
        try:
            yield
        finally:
            unit.guard.unwatch()
            self.schedule.unpin(unit)

    def wait_for_updates(self) -> None:
        """Wait for the updates of all units, as their first readers would."""
        for unit in self.units:
            unit.wait_for_update()

    def lend_to_hooks(self) -> None:
        """Wait until hooks of the optimizer may read and write shards, of which members of its
        groups are views: for all updates, and on the host for copies of shards to the device.
        """
        self.wait_for_updates()
        offloaded = any(flat.shard_offloaded for flat in self.flats)
        reads = streams.shard_stream(self.mesh.device) if offloaded else None
        if reads is not None:
            streams.record_event(reads).synchronize()

    def wait_until_writable(self) -> None:
        """Take the lease for writing of all training state (:meth:`OptimizerShard.writing`)."""
        for flat in self.flats:
            flat.optimizer_shard.writing()

    def forget_streams(self) -> None:
        """Forget the streams on which units have run, as :meth:`UnitStreams.forget` does."""
        for unit in self.units:
            unit.streams.forget()

    def release(self, gather: bool) -> None:
        """Release every sharded unit, or with ``gather`` gather it permanently (collective)."""
        for unit in self.units:
            if unit.sharded_flats and gather:
                self.schedule.pin(unit)
            elif unit.sharded_flats:
                unit.release(keep_views=True)  # on every rank, even if still gathered on this one

    def end_gathers(self) -> Exception | None:
        """Wait for the gathers of updated parameters, and return the first exception, if any: the
        values of other ranks are then old.
        """
        failure: Exception | None = None
        for flat in self.flats:
            try:
                flat.optimizer_shard.wait_for_update()
            except Exception as error:
                failure = failure or error
                flat.end_update(None)
        return failure

    def retire(self) -> None:
        """Detach the parameters from their flat buffers, as :func:`retire_flats` does."""
        for flat in self.flats:
            flat.retire()
        for unit in self.units:
            if unit.source is not None:
                unit.source.free()

    def bind(self, optimizer: torch.optim.Optimizer, config: ZeroConfig) -> BoundOptimizer:
        """Return ``optimizer`` bound to this rank's segments, with its state where the placement
        puts it.

        Raises UnsupportedOptimizerError for one that needs whole tensors if tensor or expert
        parallelism has cut a parameter.
        """
        cut = [flat for flat in self.trainable if flat.mesh.axes]
        if cut and isinstance(optimizer, WholeTensorOptimizer):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} needs whole tensors, but "
                f"{' and '.join(cut[0].mesh.axes)} parallelism leaves each rank only a part of "
                f"{cut[0].layout.slots[0].name}; use an optimizer that updates each element "
                "independently (AdamW, Lion, SGD)"
            )
        shards = [flat.optimizer_shard for flat in self.trainable]
        return BoundOptimizer(
            optimizer,
            shards,
            self.group_of,
            self.parameters,
            config.kernels,
            self.placement.moments,
            MeshRanks(self.mesh),
            self.extensions.narrow,
            frozenset(flat.key for flat in self.trainable if flat.copies_master),
            self._members(optimizer),
        )

    @property
    def shards_masters(self) -> bool:
        """Return whether this rank has master weights of a part of the model alone."""
        return self.policy.shards_optimizer and self.mesh.shard.size > 1

    def _members(
        self, optimizer: torch.optim.Optimizer
    ) -> list[list[tuple[str, torch.Tensor | None]]]:
        """Return the name of each parameter in each group of ``optimizer``, with the parameter if
        it is frozen: whole, or this rank's part if it is sharded.
        """
        members = dict[int, tuple[str, torch.Tensor | None]]()
        for flat in self.flats:
            for name, p in flat.parameters.items():
                members[id(p)] = (name, None)
                if not flat.trainable:
                    values = flat.member(name) if flat.sharded else p
                    kind = member_class(flat.shard_bytes())
                    part = kind(values, False) if flat.sharded else p
                    members[id(p)] = (name, part)
        groups = optimizer.param_groups
        return [[members.get(id(p), ("", p)) for p in group["params"]] for group in groups]


class MeshRanks(ShardRanks):
    """Collectives over the shard dimension of ``mesh``, for optimizers."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._device, self._axis = mesh, mesh.device, mesh.shard
        self.rank, self.size = mesh.shard.rank, mesh.shard.size

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        total = sums.to(self._device, copy=True)
        self._axis.all_reduce(total, "sums over whole tensors").wait()
        return total

    def exchange(
        self, sent: torch.Tensor, sizes: Sequence[int], counts: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        handle, received = self._axis.all_to_all(
            sent.to(self._device), sizes, counts, "parts of matrices"
        )
        handle.wait()
        parts: Sequence[torch.Tensor] = received.split(list(counts))
        return parts

    def gather_objects(self, value: T) -> list[T]:
        every = dict(
            zip(self._mesh.ranks, self._mesh.all_gather_object(value, "what optimizers keep"))
        )
        return [every[rank] for rank in self._axis.ranks]


def check_optimizer(plan: EnginePlan) -> None:
    """Raise UnsupportedOptimizerError for an optimizer that flat shards cannot run, PartitionError
    for parameters of it outside the model that cannot train, before the model is changed.
    """
    settings, optimizer = plan.settings, plan.optimizer
    if optimizer is None:
        return
    parameters = {name: p for spec in plan.units for name, p in spec.parameters}
    check(optimizer, settings.elementwise_optimizers, settings.allow_untested_optimizer)
    if plan.names_in_8_bits and settings.offload_optimizer.moments != "fp32":
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} keeps moments in 8 bits, and "
            f"zero_optimization.offload_optimizer.moments is "
            f"{settings.offload_optimizer.moments!r}; remove that key, or use AdamW with it"
        )
    if plan.outside:
        check_outside(plan.model, plan.outside, plan.group_of)
    if switches_weights(optimizer):
        _refuse_switched_weights(optimizer, plan.trainable)
    offloaded = [flat for flat in plan.trainable if flat.sub_groups is not None]
    if offloaded:
        plan.extensions.offloaded_moments.refuse(optimizer)
    for flat in plan.trainable:
        if flat.sub_groups is None:
            refuse_on_device(optimizer, plan.device, flat.spec.key)
    for flat in offloaded:
        plan.piece_bytes(flat)  # raises for formats that its moments are not kept in
    # state that cannot be carried over
    slots = {name: Slot(name, tuple(parameters[name].shape), 0) for name in plan.group_of}
    collect(optimizer, parameters, slots, plan.group_of)


def _refuse_switched_weights(optimizer: torch.optim.Optimizer, flats: Sequence[FlatPlan]) -> None:
    """Raise UnsupportedOptimizerError if modules compute with other memory than that which
    ``optimizer`` writes in its ``train`` and ``eval``: nothing is gathered or cast after these.
    """
    for flat in flats:
        spec = flat.spec
        copied = flat.needs_master and not flat.casts_master
        gathered = spec.owned_numel < spec.layout.padded and not spec.sharded
        if copied or gathered or flat.sub_groups is not None:
            raise UnsupportedOptimizerError(
                f"optimizer {type(optimizer).__name__} has its own train() and eval(), with which "
                "schedule-free optimizers write the weights; other ranks, and copies of the "
                "weights, would miss that. Train it in fp32 at stage 0, or at stage 3 with "
                "stage3_param_persistence_threshold 0, without offload; without such methods it "
                "trains at every stage"
            )


def retire_flats(plan: EnginePlan, mesh: Mesh) -> None:
    """Detach the parameters of ``plan`` from the flat buffers on ``mesh``: whole ones become plain,
    sharded ones stay released until another engine takes them over.
    """
    parameters = [parameter for spec in plan.units for _, parameter in spec.parameters]
    owners = {id(flat): flat for flat in map(owner_of, parameters) if flat is not None}
    for flat in owners.values():
        if flat.engine_mesh is mesh:
            flat.retire()


_threads = ProcessSetting(lambda: native.threads(), lambda threads: native.set_threads(threads))


def limit_native_threads(placement: Placement) -> Callable[[], None]:
    """Limit the native kernels of an offloaded update to the share of cores in ``placement``;
    return a function that undoes it.
    """
    if not native.available() or not placement.offloads_optimizer or placement.cores >= 1.0:
        return _nothing
    return _threads.change(max(1, int(placement.cores * native.default_share().threads)))


def _nothing() -> None:
    """Do nothing: no limit was set."""
