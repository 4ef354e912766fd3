"""The check before training: needs of a plan against free memory, on all ranks together; the
report, the refusal in words, and the communicators that no figure counts.

How much memory a communicator takes on a device depends on NCCL's version, channels and links. No
figure has been measured here; users report 0.5 to 0.7 GB for one on some machines, which
:data:`REPORTED` repeats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from hf_zero.config.variables import is_off
from hf_zero.device import kinds
from hf_zero.device.free_memory import FreeBytes, measure
from hf_zero.distributed.rank_hosts import own_host
from hf_zero.distributed.world_group import get_world_group, raise_on_all_ranks
from hf_zero.errors import DoesNotFitError
from hf_zero.logging import in_units, logger
from hf_zero.planning.fit import ACTIVATIONS, Fit, MemoryVerdict, fit, judge
from hf_zero.planning.needs import Needs, needs
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.planner import replan
from hf_zero.zero.layout.walk import parameters_of

SWITCH = "HF_ZERO_PREFLIGHT"
REPORTED = (500_000_000, 700_000_000)  # bytes of a communicator, as users report of some machines


@dataclass(frozen=True)
class PreflightReport:
    """Result of :func:`check`.

    ``note`` is a line for rank 0's log, "" if there is none; ``warning`` is the text of a refusal
    that was overridden; ``hosts`` is the number of the ranks' hosts; ``spare`` says whether the
    memory that the model occupies now fits beside the plan, on all ranks.
    """

    plan: EnginePlan
    needs: Needs
    free: FreeBytes
    verdict: MemoryVerdict
    note: str = ""
    warning: str = ""
    hosts: int = 1
    spare: bool = False


def check_on_all_ranks(plan: EnginePlan, freed: tuple[int, int] = (0, 0)) -> PreflightReport:
    """Refuse, on all ranks alike and before any memory is taken, a plan that does not fit; return
    the report of one that does. ``freed``: bytes on the device and in RAM that engines give back
    which end before this one begins. Collective.

    Raises DoesNotFitError on the ranks whose state does not fit, and RankMismatchError on the
    others.
    """
    dims = plan.dims
    free = free_memory_for(plan.model, plan.settings, plan.device).plus(*freed)
    hosts = {own_host()}
    if dims.world > 1:
        local = free.numbers(), own_host(), free.held
        every = get_world_group().all_gather_object(local, "free memory")
        numbers, names, pinned = zip(*every)
        free = free.with_numbers([min(values) for values in zip(*numbers)])
        free = replace(free, held=tuple(max(values) for values in zip(*pinned)))
        hosts = set(names)
    # The needs of ranks differ: by pipeline stage, state of whole tensors, and ranks on a host.
    part = "pipeline stage" if dims.pipeline > 1 else "state"
    with raise_on_all_ranks(f"fit its {part} into its memory"):
        report = check(plan, free)
    spare = report.spare
    if dims.world > 1:
        spare = all(get_world_group().all_gather_object(spare, "room for the model"))
    if plan.rank % dims.pp_stage_ranks == 0:
        for line in filter(None, (report.warning, report.note)):
            logger.warning("%s", line)
    return replace(report, hosts=len(hosts), spare=spare)


def check(plan: EnginePlan, free: FreeBytes | None = None) -> PreflightReport:
    """Check whether a model can train by ``plan`` in the free memory. Allocates none itself.

    Args:
        plan: the plan of this rank's engine.
        free: free memory of this rank, agreed over the ranks by :meth:`FreeBytes.numbers`, so that
            all ranks reach the same verdict. None measures this rank's own and adds what the model
            itself occupies, which is given back.

    Raises:
        DoesNotFitError: some tier is too small. If the variable HF_ZERO_PREFLIGHT is 0, the report
            has the text as its ``warning`` instead.
    """
    free = free if free is not None else free_memory_for(plan.model, plan.settings, plan.device)
    needed = needs(plan)
    verdict = judge(needed, free)
    beside = _of_communicators(plan, needed, free)
    if verdict.fits:
        note = "; ".join([*_slower(plan, free), *verdict.notes, *beside])
        spare = judge(needed, free.without_held()).fits
        return PreflightReport(plan, needed, free, verdict, note=note, spare=spare)
    if is_off(SWITCH):
        return PreflightReport(
            plan,
            needed,
            free,
            verdict,
            note="; ".join(verdict.notes),
            warning="\n".join(shortage(plan, verdict)),
        )
    reason = refusal(plan, needed, verdict, fit([plan], free))
    last = "; ".join(
        [*verdict.notes, *beside, f"{SWITCH}=0 in the environment tries it all the same"]
    )
    raise DoesNotFitError(f"{reason}\n{last}")


def free_memory_for(module: nn.Module, config: ZeroConfig, device: torch.device) -> FreeBytes:
    """Return the free memory of this rank plus what ``module`` occupies now, which the engine gives
    back as it takes the parameters over.
    """
    ram = gpu = 0
    counted: set[int] = set()
    for parameter in parameters_of(module):
        key, on_device, in_ram = _occupied(parameter)
        if key not in counted:
            counted.add(key)
            gpu, ram = gpu + on_device, ram + in_ram
    free = measure(device, [*config.offload_optimizer.nvme_path, *config.offload_param.nvme_path])
    occupied = (ram, 0) if free.host_device else (gpu, ram)
    return replace(free.plus(*occupied), held=occupied)


def _occupied(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Return (key, bytes on an accelerator, bytes of host memory) of what holds the values of
    ``parameter``: its storage, or its flat buffer with its shard.
    """
    flat = owner_of(parameter)
    if flat is not None and flat.sharded:
        key, tiers, device = id(flat), flat.shard_bytes(), flat.full.device
        nbytes, in_ram = tiers["device"] + flat.full.untyped_storage().nbytes(), tiers["ram"]
    else:
        with torch._C.DisableTorchFunctionSubclass():
            storage = parameter.untyped_storage()
            key, device, nbytes, in_ram = storage._cdata, parameter.device, storage.nbytes(), 0
    if device.type == "cpu":
        return key, 0, in_ram + nbytes
    return key, 0 if kinds.is_synchronous(device) or device.type == "meta" else nbytes, in_ram


def refusal(plan: EnginePlan, needed: Needs, verdict: MemoryVerdict, fitting: Fit) -> str:
    """Return the error text: a table of the tiers, and the nearest configuration that fits."""
    lines = shortage(plan, verdict)
    chosen = fitting.chosen
    if chosen is None:
        files = ", or name a folder for files (nvme_path)"
        if needed.files or any("files" in trial.name for trial in fitting.trials):
            files = ""
        lines.append(
            f"no other stage or place that was tried fits either ({len(fitting.trials)} tried); "
            f"use more ranks{files}"
        )
    else:
        lines.append(
            f"what fits, with {fitting.margin:.0%} of the device reserved for activations: "
            f"{chosen.name}; write"
        )
        lines.append(json.dumps(chosen.to_config()))
    return "\n".join(lines)


def shortage(plan: EnginePlan, verdict: MemoryVerdict) -> list[str]:
    """Return the lines that say what does not fit: a table of the tiers."""
    ranks = plan.dims.pp_stage_ranks
    one = "the one rank" if ranks == 1 else f"each of {ranks} ranks"
    one += " of this pipeline stage" if plan.dims.pipeline > 1 else ""
    return [
        f"training as configured does not fit on this machine (bytes for {one}, "
        "activations not counted):",
        *table(verdict),
    ]


def table(verdict: MemoryVerdict) -> list[str]:
    """Return an aligned line for each tier: needed, free, and what needs most where it is short."""
    cells = []
    for row in verdict.rows:
        parts = sorted(row.parts, key=lambda part: part.nbytes, reverse=True)
        parts_text = ", ".join(
            f"{part.what} {in_units(part.nbytes)}" for part in parts if part.nbytes
        )
        limit = f"({row.limited_by})" if row.limited_by else ""
        text = limit if row.fits else f"TOO LITTLE for {parts_text} {limit}"
        cells.append((row.tier, in_units(row.needed), in_units(row.free), text))
    tier, needed, free = (max(len(cell[column]) for cell in cells) for column in range(3))
    return [
        f"  {a:<{tier}}  {b:>{needed}} needed  {c:>{free}} free  {d}".rstrip()
        for a, b, c, d in cells
    ]


def _slower(plan: EnginePlan, free: FreeBytes) -> list[str]:
    """Return a note if the offload only costs time, because everything fits on the device."""
    settings = plan.settings
    offloads = settings.offload_optimizer.on or settings.offload_param.on
    if not offloads or free.host_device:
        return []
    on_device = settings.placed(settings.stage, OffloadOptimizer(), OffloadParam())
    without = needs(replan(plan, on_device))
    if not judge(without, free, ACTIVATIONS).fits:
        return []
    return [
        "offload is slower than no offload here: all of it fits on the device "
        f"({in_units(without.device_bytes)} of {in_units(free.device)}, {ACTIVATIONS:.0%} reserved "
        "for activations); remove offload_optimizer and offload_param unless you need the room"
    ]


def _of_communicators(plan: EnginePlan, needed: Needs, free: FreeBytes) -> list[str]:
    """Return a note on communicators if the device may be too small for them."""
    if kinds.is_synchronous(plan.device) or free.host_device or plan.dims.world == 1:
        return []
    count = sum(communicators(plan).values())
    fits = needed.device_bytes + count * REPORTED[1] <= free.device
    return [] if fits else [allowance(count)]


def communicators(plan: EnginePlan) -> dict[str, int]:
    """Return the communicators of a rank on its device, at most, by what they are for.

    Of a pipeline, two for each set of stages that tie weights are added to these.
    """
    dims, shards_of_all = plan.dims, plan.num_shards
    counts = {"all ranks": int(dims.world > 1)}
    for axis in ("tensor", "sequence", "context", "expert", "pipeline"):
        counts[f"{axis} parallelism"] = int(dims.size(axis) > 1)
    counts["tokens of a sequence"] = int(min(dims.sequence, dims.context) > 1)
    counts["messages between stages"] = int(dims.pipeline > 1)
    for axes in sorted(plan.axes):
        of = f" of {'- and '.join(axes)}-parallel parts" if axes else ""
        sharing = len(dims.ranks_sharing(plan.rank, axes))
        shards = shards_of_all if not axes else sharing if shards_of_all > 1 else 1
        sharded = shards > 1
        counts[f"gathers and reductions{of}"] = 2 * sharded
        counts[f"sums over replicas{of}"] = 2 * (sharing > shards)
        counts[f"first values{of}"] = int(1 < sharing < dims.world)
        counts[f"gathers of updates{of}"] = int(sharded and plan.gathers_updates)
        in_node, extensions = sharded and not axes, plan.extensions
        counts["gathers in a node"] = int(in_node and extensions.node > 1)
        counts["gathers in two hops"] = 2 * (in_node and bool(extensions.hierarchical))
        if not axes and dims.splits_model:
            counts["sums over all ranks"] = 2 * (sharing > shards)
    return {name: count for name, count in counts.items() if count}


def allowance(count: int) -> str:
    """Return the line on memory that ``count`` communicators may take."""
    least, most = (in_units(count * size) for size in REPORTED)
    return (
        f"{count} NCCL communicator{'s' if count > 1 else ''} of a GPU's rank "
        f"{'are' if count > 1 else 'is'} not counted: users report 0.5 to 0.7 GB each on some "
        f"machines (here {least} to {most}), which was not measured"
    )
