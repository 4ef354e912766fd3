"""Command line arguments of DeepSpeed scripts, including those of learning rate schedules
(``add_tuning_arguments``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.deepspeed import schedule_names as n
from hf_zero.optim.schedules import VALID_LR_SCHEDULES


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to ``parser`` and return it.

    ``--local_rank`` is left to the script.
    """
    group = parser.add_argument_group(
        "ZeRO", "arguments of DeepSpeed scripts, read by hf_zero.initialize(args=...)"
    )
    group.add_argument(
        "--deepspeed",
        action="store_true",
        default=False,
        help="the script asks this flag whether to use ZeRO",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        default=None,
        help="the ZeRO configuration, a JSON file",
    )
    return parser


# ---- Learning rate schedules ----

DEFAULTS: dict[str, dict[str, float]] = {
    n.LR_RANGE_TEST: {
        n.LR_RANGE_TEST_MIN_LR: 0.001,
        n.LR_RANGE_TEST_STEP_RATE: 1.0,
        n.LR_RANGE_TEST_STEP_SIZE: 1000,
    },
    n.ONE_CYCLE: {
        n.CYCLE_FIRST_STEP_SIZE: 1000,
        n.CYCLE_FIRST_STAIR_COUNT: -1,
        n.CYCLE_SECOND_STEP_SIZE: -1,
        n.CYCLE_SECOND_STAIR_COUNT: -1,
        n.DECAY_STEP_SIZE: 1000,
        n.CYCLE_MIN_LR: 0.01,
        n.CYCLE_MAX_LR: 0.1,
        n.DECAY_LR_RATE: 0.0,
        n.CYCLE_MIN_MOM: 0.8,
        n.CYCLE_MAX_MOM: 0.9,
        n.DECAY_MOM_RATE: 0.0,
    },
    n.WARMUP_LR: {n.WARMUP_MIN_LR: 0.0, n.WARMUP_MAX_LR: 0.001, n.WARMUP_NUM_STEPS: 1000},
    n.WARMUP_COSINE_LR: {n.WARMUP_MIN_RATIO: 0.01, n.COS_MIN_RATIO: 0.01},
}
"""The arguments that are numbers, by the schedule that first uses them, with their defaults."""
FLAGS = (n.LR_RANGE_TEST_STAIRCASE, "cycle_momentum")
OF = {
    n.LR_RANGE_TEST: (*DEFAULTS[n.LR_RANGE_TEST], n.LR_RANGE_TEST_STAIRCASE),
    n.ONE_CYCLE: (*DEFAULTS[n.ONE_CYCLE], "cycle_momentum"),
    n.WARMUP_LR: (*DEFAULTS[n.WARMUP_LR], n.WARMUP_TYPE),
    n.WARMUP_DECAY_LR: (*DEFAULTS[n.WARMUP_LR], n.WARMUP_TYPE),
    n.WARMUP_COSINE_LR: (*DEFAULTS[n.WARMUP_COSINE_LR], n.WARMUP_NUM_STEPS, n.WARMUP_TYPE),
}
"""The arguments of each schedule."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule NAME`` and an argument for each parameter of the schedules."""
    group = parser.add_argument_group("learning rate schedule")
    group.add_argument(f"--{n.LR_SCHEDULE}", default=None, help=", ".join(VALID_LR_SCHEDULES))
    for values in DEFAULTS.values():
        for name, default in values.items():
            group.add_argument(f"--{name}", type=type(default), default=default)
    for name in FLAGS:
        group.add_argument(f"--{name}", action="store_true")
    group.add_argument(f"--{n.WARMUP_TYPE}", default=n.WARMUP_LOG_RATE, help="log or linear")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse this process's arguments: return those of schedules, and the others."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return the section ``scheduler`` that the arguments describe; or None, and the error."""
    chosen = getattr(args, n.LR_SCHEDULE, None)
    if chosen is None:
        return None, f"--{n.LR_SCHEDULE} not specified on command line"
    if chosen not in VALID_LR_SCHEDULES:
        return None, f"{chosen} is not supported LR schedule"
    given = {name: getattr(args, name, None) for name in OF[chosen]}
    params = {name: value for name, value in given.items() if value is not None}
    return {"type": chosen, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the target learning rate of the section ``scheduler``; or None, and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    chosen, params = config["type"], config["params"]
    if chosen not in VALID_LR_SCHEDULES:
        return None, f"{chosen} is not a valid LR schedule"
    aims = {n.LR_RANGE_TEST: n.LR_RANGE_TEST_MIN_LR, n.ONE_CYCLE: n.CYCLE_MAX_LR}
    if chosen == n.WARMUP_COSINE_LR:
        return None, f"{chosen} multiplies the optimizer's own learning rate"
    return params[aims.get(chosen, n.WARMUP_MAX_LR)], ""


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set each group's learning rate, in place if it is a tensor; return the learning rates."""
    for group, lr in zip(param_groups, lrs):
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]
