"""The preflight check: needs of a configuration against free memory, the report, and the
refusal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.device.free_memory import Free, measure
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import DoesNotFitError
from hf_zero.logging import in_units
from hf_zero.planning.communicators import REPORTED, allowance, communicators
from hf_zero.planning.fit import Fit, fit
from hf_zero.planning.needs import Needs, needs
from hf_zero.planning.plan import FlatParameters, MemoryPlan, groups_of
from hf_zero.planning.verdict import ACTIVATIONS, MemoryVerdict, judge
from hf_zero.zero.layout.parameter import owner_of
from hf_zero.zero.layout.wrap import UnitSpec, find_units, persistent_names

SWITCH = "HF_ZERO_PREFLIGHT"


@dataclass(frozen=True)
class PreflightReport:
    """Result of :func:`check`.

    ``note`` is a line for rank 0's log, "" if there is none; ``warning`` is the text of a refusal
    that was overridden.
    """

    plan: MemoryPlan
    needs: Needs
    free: Free
    verdict: MemoryVerdict
    note: str = ""
    warning: str = ""


def check(
    model: nn.Module | Sequence[UnitSpec],
    config: ZeroConfig,
    world: int,
    *,
    device: torch.device | None = None,
    free: Free | None = None,
    moments: int | None = None,
    trains: bool = True,
) -> PreflightReport:
    """Check whether a model can train with ``config`` in the free memory. Allocates none itself.

    Args:
        model: the module, on any device, or its units by
            :func:`hf_zero.zero.layout.wrap.find_units` (the first is the root).
        config: resolved for ``world`` ranks, those of one pipeline stage.
        device: the device on which the model computes; None: a GPU if there is one.
        free: free memory of this rank, agreed over the ranks by :meth:`Free.numbers`, so that all
            ranks reach the same verdict. None measures this rank's own and adds what the model
            itself occupies, which is given back.
        moments: numbers the optimizer keeps per parameter; None: those of the configuration's
            optimizer.
        trains: False for an engine without an optimizer.

    Raises:
        DoesNotFitError: some tier is too small. If the variable HF_ZERO_PREFLIGHT is 0, the report
            has the text as its ``warning`` instead.
    """
    granularity = config.zero.module_granularity_threshold
    specs = find_units(model, granularity)[0] if isinstance(model, nn.Module) else list(model)
    root = specs[0].module
    where = device or torch.device(kinds.accelerator() or "cpu")
    persistent = persistent_names(
        root, config.zero.param_persistence_threshold, config.zero.model_persistence_threshold
    )
    groups = groups_of(specs, root, config.precision, persistent)
    if not trains:
        groups = [replace(group, trainable=False) for group in groups]
    plan, parallel = MemoryPlan.of(config, world, not kinds.is_host(where), moments), get_parallel()
    if parallel is not None:  # the configuration does not have all of the parallel sizes
        dims = parallel.dims
        plan = replace(
            plan,
            tensor=dims.tensor,
            sequence=dims.sequence,
            expert=dims.expert,
            pipeline=dims.pipeline,
        )
    found = free if free is not None else room_for(root, config, where)
    own = needs(groups, plan)
    verdict = judge(own, found)
    beside = _of_communicators(groups, plan, own, found)
    if verdict.fits:
        return PreflightReport(
            plan,
            own,
            found,
            verdict,
            note="; ".join([*_slower(groups, plan, found), *verdict.notes, *beside]),
        )
    said = "\n".join([refusal(plan, own, verdict, fit(groups, plan, found)), *beside])
    if os.environ.get(SWITCH, "1").strip() != "0":
        raise DoesNotFitError(f"{said}\n{SWITCH}=0 in the environment tries it all the same")
    return PreflightReport(plan, own, found, verdict, note="; ".join(verdict.notes), warning=said)


def room_for(module: nn.Module, config: ZeroConfig, device: torch.device) -> Free:
    """Return the free memory of this rank plus what ``module`` occupies now, which the engine gives
    back as it takes the parameters over.
    """
    ram = gpu = 0
    seen: set[int] = set()
    for parameter in module.parameters():
        key, where, nbytes = _occupied(parameter)
        if key not in seen:
            seen.add(key)
            ram += nbytes if where == "cpu" else 0
            gpu += 0 if kinds.is_host(where) else nbytes
    found = measure(device, [*config.offload_optimizer.nvme_path, *config.offload_param.nvme_path])
    return found.with_room(
        device=ram if found.host_device else gpu, ram=0 if found.host_device else ram
    )


def _occupied(parameter: torch.Tensor) -> tuple[int, str, int]:
    """Return (key, device, bytes) of the memory that holds the values of ``parameter``: its
    storage, or its shard of a flat buffer.
    """
    flat = owner_of(parameter)
    if flat is not None and flat.sharded:
        return (
            id(flat),
            flat.full.device.type,
            flat.layout.chunk * flat.dtype.itemsize + flat.full.untyped_storage().nbytes(),
        )
    with torch._C.DisableTorchFunctionSubclass():
        storage = parameter.untyped_storage()
        return storage._cdata, parameter.device.type, storage.nbytes()


def refusal(plan: MemoryPlan, own: Needs, verdict: MemoryVerdict, found: Fit) -> str:
    """Return the error text: a table of the tiers, and the nearest configuration that fits."""
    one = "the one rank" if plan.ranks == 1 else f"each of {plan.ranks} ranks"
    one += " of this pipeline stage" if plan.pipeline > 1 else ""
    lines = [
        f"training as configured does not fit on this machine (bytes for {one}, "
        "activations not counted):"
    ]
    lines += table(verdict)
    chosen = found.chosen
    if chosen is None:
        files = (
            ""
            if own.files or any("files" in trial.name for trial in found.trials)
            else ", or name a folder for files (nvme_path)"
        )
        lines.append(
            f"no other stage or place that was tried fits either ({len(found.trials)} tried); "
            f"use more ranks{files}"
        )
    else:
        lines.append(
            f"what fits, with {found.margin:.0%} of the device left to activations: "
            f"{chosen.name}; write"
        )
        lines.append(json.dumps(chosen.to_config()))
    lines += verdict.notes
    return "\n".join(lines)


def table(verdict: MemoryVerdict) -> list[str]:
    """Return aligned lines: tier, needed, free, shortage, with the parts of each tier below it."""
    cells = [("", "needed", "free", "")]
    for row in verdict.rows:
        limit = f"({row.limited_by})" if row.limited_by else ""
        cells.append(
            (
                row.tier,
                in_units(row.needed),
                in_units(row.free),
                limit if row.fits else f"TOO LITTLE {limit}".strip(),
            )
        )
        cells += [(f"  {part.what}", in_units(part.nbytes), "", "") for part in row.parts]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    return [
        f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip()
        for a, b, c, d in cells
    ]


def _of_communicators(
    groups: Sequence[FlatParameters], plan: MemoryPlan, own: Needs, free: Free
) -> list[str]:
    """What to say of communicators on a device that may be too small for them."""
    if not plan.gpu or free.host_device or plan.ranks * plan.pipeline == 1:
        return []
    count = sum(communicators((group.axes for group in groups), plan).values())
    fits = own.device_bytes + count * REPORTED[1] <= free.device
    return [] if fits else [allowance(count)]


def _slower(groups: Sequence[FlatParameters], plan: MemoryPlan, free: Free) -> list[str]:
    """Return a note if the offload only costs time, because everything fits on the device."""
    if not plan.offloads or free.host_device:
        return []
    without = needs(groups, plan.on_device())
    if not judge(without, free, ACTIVATIONS).fits:
        return []
    return [
        "offload is slower than no offload here: all of it fits on the device "
        f"({in_units(without.device_bytes)} of "
        f"{in_units(free.device)}, {ACTIVATIONS:.0%} left to activations); remove "
        "offload_optimizer and offload_param unless you need the room"
    ]
