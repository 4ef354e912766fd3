"""Schedules after ``Accelerator.load_state`` on another number of ranks.

Accelerate steps a prepared scheduler once for each data-parallel rank, so a script gives the
schedule as many steps as all ranks together have batches. The saved position counts the ranks of
the save; the script's functions of it, which a ``LambdaLR`` does not save, count those of this run.
The saved learning rate tells which of the two positions a schedule of this run means.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hf_zero.logging import counted, log_rank0

if TYPE_CHECKING:
    from accelerate import Accelerator


def keep_curves(
    accelerator: Accelerator, folder: Path, before: int, now: int, same_batches: bool
) -> None:
    """Move the schedules of ``accelerator``, loaded from ``folder``, to their positions on ``now``
    data-parallel ranks instead of ``before``; warn of those that leave their curves.

    Args:
        same_batches: whether a rank trains in a step on as many samples as before.
    """
    from accelerate.scheduler import AcceleratedScheduler

    for scheduler in accelerator._schedulers:
        steps_once_a_rank = (
            type(scheduler) is AcceleratedScheduler
            and scheduler.step_with_optimizer
            and not scheduler.split_batches
        )
        if not steps_once_a_rank or _goes_on(scheduler.scheduler, before, now, same_batches):
            continue
        log_rank0(
            f"{folder} was saved by {counted(before, 'data-parallel rank')}, this run has {now}: "
            f"Accelerate steps the scheduler ({type(scheduler.scheduler).__name__}) once a rank, "
            "and its learning rates leave the curve of the saved run from here on. Resume on "
            f"{before}, or let a run begin with Accelerator(step_scheduler_with_optimizer=False) "
            "and a schedule over its own steps, which any number of ranks can resume",
            logging.WARNING,
        )


def _goes_on(schedule: LRScheduler, before: int, now: int, same_batches: bool) -> bool:
    """Return whether ``schedule`` goes on with its curve, at its position or at one to which it is
    moved here.
    """
    # `same_batches`: the schedule counts batches, of which all ranks train on `now`
    if not isinstance(schedule, LambdaLR):
        return same_batches  # it has loaded the numbers of the save, too
    if same_batches and _has_rates_at(schedule, schedule.last_epoch):
        return True
    position, rest = divmod(schedule.last_epoch * now, before)
    if rest or not _has_rates_at(schedule, position):
        return False
    schedule.last_epoch, schedule._step_count = position, position + 1
    return True


def _has_rates_at(schedule: LambdaLR, position: int) -> bool:
    """Return whether the functions of ``schedule`` give its last learning rates at ``position``."""
    rates = (
        base * function(position)
        for base, function in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    )
    return all(
        math.isclose(float(rate), float(last), rel_tol=1e-6, abs_tol=1e-15)
        for rate, last in zip(rates, schedule.get_last_lr(), strict=True)
    )
