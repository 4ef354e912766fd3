"""The plan of this rank's file in a save, and the report of it to rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint.manifest import (
    BUFFER,
    FORMAT,
    MASTER,
    SHARD,
    FileEntry,
    is_tensor_name,
    tensor_state_key,
)
from hf_zero.checkpoint.model_entries import ModelEntries, pp_stage_key
from hf_zero.checkpoint.random_generators import rng_states
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan, plan_file
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed
from hf_zero.optim.group_scalars import GroupReport
from hf_zero.optim.segments import FetchedArrays
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.whole_names import WholeNames, persistent_buffers
from hf_zero.zero.state_entries import EngineState

if TYPE_CHECKING:
    from hf_zero.zero.layout.engine_plan import EnginePlan, FlatPlan
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.training_engine import TrainingEngine


def saved_by_this_pp_stage(flat: FlatBuffer) -> bool:
    """Return whether this rank's stage saves ``flat``: the first of the stages that hold it."""
    mesh, stages = flat.engine_mesh, flat.spec.sharding.pp_stages
    return not stages or mesh.dims.coordinate(mesh.rank, "pipeline") == stages[0]


def saved_key(flat: FlatBuffer) -> str:
    """Return the key of ``flat`` in a checkpoint; if tensor or expert parallelism cuts it, that of
    this rank's part. Raises CheckpointError for a part of a tensor whose Sharding has no box.
    """
    axes, dims = flat.mesh.axes, flat.engine_mesh.dims
    lost = []
    for slot in flat.layout.slots if axes else ():
        named = bool(sharding_of(flat.parameters[slot.name]).names)
        if slot.box is None and axes[named:]:
            lost.append(slot.name)
    if lost:
        raise CheckpointError(
            f"{listed(lost)} are parts of tensors at unknown places; give their Sharding a box"
        )
    rank = flat.engine_mesh.rank
    return "|".join(
        [pp_stage_key(flat), *(f"{axis} {dims.coordinate(rank, axis)}" for axis in axes)]
    )


@dataclass(frozen=True)
class TensorOnDemand:
    """A tensor of this rank that is fetched when it is called, to be written."""

    dtype: torch.dtype
    length: int
    fetch: Callable[[], torch.Tensor]

    def numel(self) -> int:
        return self.length

    def __call__(self) -> torch.Tensor:
        return self.fetch()


Stored = torch.Tensor | TensorOnDemand


def stored_arrays(flat: FlatBuffer, state: EngineState) -> dict[str, Stored]:
    """Return the weights and per-element optimizer states that this rank stores for ``flat``, by
    their names in files. Those that take memory are read one after another.
    """
    arrays = state.arrays(flat)
    if not isinstance(arrays, FetchedArrays):
        return dict(arrays)  # of a trained flat, whose weights are master weights
    # without master weights the array MASTER is the parameter shard, which files call SHARD
    numel, names = flat.spec.owned_numel, {} if flat.optimizer_shard.has_master else {MASTER: SHARD}
    return {
        names.get(kind, kind): TensorOnDemand(dtype, numel, partial(arrays.__getitem__, kind))
        for kind, dtype in arrays.dtypes.items()
    }


def model_buffers(engine: TrainingEngine, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """Return :func:`persistent_buffers` of the engine's model, or of its pipeline stage."""
    excluded = [flat for flat in engine.flats if exclude_frozen and not flat.trainable]
    names = {slot.name for flat in excluded for slot in flat.layout.slots}
    return persistent_buffers(engine.module, names)


def buffers_of_other_stages(
    engine: TrainingEngine, names: WholeNames, exclude_frozen: bool
) -> dict[str, torch.Tensor]:
    """Return the buffers that rank 0 lacks, on the CPU: those of other pipeline stages, and those
    of modules that differ between ranks. Collective if the model has any of these.
    """
    mesh = engine.mesh
    if mesh.dims.pipeline == 1 and not names:
        return {}
    sent = {}
    if mesh.job.rank:
        sent = {
            # without attributes, such as the sharding of its module
            names.own(name): buffer.detach().cpu()
            for name, buffer in model_buffers(engine, exclude_frozen).items()
            if mesh.rank == mesh.ranks[0] or names.own(name) != name
        }
    by_rank: list[dict[str, torch.Tensor]] = mesh.job.all_gather_object(
        sent, "buffers of the stages"
    )
    return {name: buffer for buffers in by_rank for name, buffer in buffers.items()}


@dataclass(frozen=True)
class RankReport:
    """Report of one rank to rank 0.

    file: its rank file. chunks: by flat, (start, stop, tensor names). groups: the scalars (step) of
    each group's parameters with elements on it. tensor_states: states of whole tensors in its
    file. layouts: for flats that tensor or expert parallelism cuts, key in the checkpoint -> (key,
    layout). model: set by the first rank of each pipeline stage.
    """

    file: FileEntry
    chunks: dict[str, tuple[int, int, tuple[str, ...]]]
    groups: list[GroupReport]
    tensor_states: dict[str, dict[str, tuple[int, ...]]]  # shapes, by parameter and name
    layouts: dict[str, tuple[str, FlatLayout]]
    model: ModelEntries | None


@dataclass(frozen=True)
class RankFile:
    """This rank's file before it is written: the place of each tensor in it, the tensors by name,
    and what other ranks learn of it.
    """

    file: FilePlan
    tensors: dict[str, Stored]
    report: RankReport


def plan_save(
    engine: SavedEngine,
    file_name: str,
    save_id: str,
    exclude_frozen: bool,
    names: WholeNames,
    buffers: Mapping[str, torch.Tensor],
) -> RankFile:
    """Return the plan of this rank's file. ``buffers`` go into the file of rank 0."""
    bound, rank, engine_state = engine.bound, engine.global_rank, EngineState(engine)
    pp_stage_flats = [flat for flat in engine.flats if saved_by_this_pp_stage(flat)]
    tensors: dict[str, Stored] = {}
    chunks: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    layouts: dict[str, tuple[str, FlatLayout]] = {}
    written: set[str] = set()  # the parameters of the flat buffers that this rank writes
    for flat in pp_stage_flats:
        if not flat.saves_shard:
            continue
        written |= {slot.name for slot in flat.layout.slots}
        if exclude_frozen and not flat.trainable:
            continue
        arrays, key = stored_arrays(flat, engine_state), saved_key(flat)
        tensors |= {f"{key}::{name}": array for name, array in arrays.items()}
        chunks[key] = (*flat.owned, tuple(arrays))
        if flat.mesh.axes:  # a part of tensors that ranks along these axes share
            slots = tuple(replace(slot, name=names.own(slot.name)) for slot in flat.layout.slots)
            layouts[key] = pp_stage_key(flat), replace(flat.layout, slots=slots)
    if rank == 0:
        tensors |= {BUFFER + name: buffer for name, buffer in buffers.items()}
    tensors |= rng_states() | engine.window_start.loader_state(engine)
    # the state of a whole tensor is written by the rank that has its first element
    first_elements = {} if bound is None else bound.state.tensor_state.by_parameter(firsts=True)
    tensor_states = {name: state for name, state in first_elements.items() if name in written}
    tensors |= {
        tensor_state_key(parameter, name): tensor.reshape(-1)
        for parameter, state in tensor_states.items()
        for name, tensor in state.items()
    }
    for name in (*written, *(buffers if rank == 0 else ())):
        if not is_tensor_name(name):
            raise CheckpointError(
                f"{name!r} cannot be the name of a tensor in a checkpoint; rename the parameter or "
                "buffer, without control characters"
            )
    plan = plan_file(
        [(name, tensor.dtype, [tensor.numel()]) for name, tensor in tensors.items()],
        {"format": FORMAT, "save_id": save_id, "rank": str(rank)},
        DATA_ALIGNMENT,
    )
    report = RankReport(
        file=FileEntry(file_name, rank, plan.size, ""),
        chunks=chunks,
        groups=[] if bound is None else bound.state.scalars.reports(names.own),
        tensor_states={
            parameter: {name: tuple(tensor.shape) for name, tensor in state.items()}
            for parameter, state in tensor_states.items()
        },
        layouts=layouts,
        model=ModelEntries.of(engine, pp_stage_flats, names, exclude_frozen)
        if rank == engine.mesh.ranks[0]
        else None,
    )
    return RankFile(plan, tensors, report)


def stored_width(plan: EnginePlan, flat: FlatPlan) -> int:
    """Return the bytes that a checkpoint keeps for each element of ``flat``: weight and moments."""
    if not flat.spec.trainable:
        return flat.spec.dtype.itemsize
    moments = sum(state.dtype.itemsize for state in plan.moments_of(flat).values())
    return flat.spec.master_dtype.itemsize + moments
