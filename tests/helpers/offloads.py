"""Ways of offloading, by name: what a configuration says; engines of each, trained alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_zero
from tests.helpers.engines import config_of, start
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, adamw

PIECE = 4096  # elements: small enough that the flats of the tests have several pieces

WAYS = (
    "optimizer on cpu",
    "all on cpu",
    "optimizer in files",
    "all in files",
    "half on cpu",
    "parameters on cpu",
)
DEVICE = "device"  # nothing is offloaded: what each way is compared with
PLACES = ("optimizer on cpu", "optimizer in files")  # of what the optimizer alone decides

Values = dict[str, torch.Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]
Told = Callable[[int, torch.optim.Optimizer], None]


def stages_of(way: str) -> tuple[int, ...]:
    return (3,) if way.startswith(("all", "parameters")) else (0, 1, 2, 3)


def offload(
    way: str, stage: int, folder: Path, max_in_cpu: int = 20_000, **more: Any
) -> dict[str, Any]:
    """The section ``zero_optimization`` for ``way``; ``more`` are keys of offload_optimizer."""
    files = way.endswith("files")
    optimizer: dict[str, Any] = {
        "device": "nvme" if files else "cpu",
        "buffer_size": PIECE,
        "buffer_count": 3,
    }
    if files:
        optimizer["nvme_path"] = str(folder)
    if way.startswith("half"):
        optimizer["ratio"] = 0.5
    section: dict[str, Any] = {"stage": stage}
    if way != DEVICE and not way.startswith("parameters"):
        section["offload_optimizer"] = optimizer | more
    if way.startswith(("all", "parameters")):
        section["offload_param"] = (
            {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": max_in_cpu}
            if files
            else {"device": "cpu"}
        )
    return section


def opened(
    model: nn.Module, section: dict[str, Any], make: Make = adamw, **keys: Any
) -> hf_zero.Engine:
    """An engine of ``section``; ``keys`` are others of the configuration."""
    return start(model, make(model), config_of(section["stage"], zero_optimization=section, **keys))


def train(engine: Any, rank: int, steps: range, told: Told = lambda step, optimizer: None) -> None:
    """Steps of a stack; ``told`` is called after each with its number and the optimizer."""
    for step in steps:
        engine.backward(squared(engine, At(step, 0, rank), next(engine.module.parameters()).dtype))
        engine.step()
        told(step, engine.optimizer)


def ended(engine: Any) -> Values:
    """Whole master weights, in their own dtype, of an engine that is destroyed. Collective."""
    named = engine.module.named_parameters()
    weights = {name: hf_zero.safe_get_full_fp32_param(p).detach().clone() for name, p in named}
    engine.destroy()
    return weights


def trained(
    section: dict[str, Any],
    make: Make = adamw,
    told: Told = lambda step, optimizer: None,
    build: Callable[[], nn.Module] = stack,
    ranks: int = 1,
    steps: int = 4,
    **keys: Any,
) -> Values:
    """Whole weights after some steps of ``ranks`` threads."""

    def run(rank: int, model: nn.Module) -> Values:
        engine = opened(model, section, make, **keys)
        train(engine, rank, range(steps), told)
        return ended(engine)

    return on_ranks(ranks, run, build=build)[0]


def same(got: Values, want: Values, exact: bool = False) -> None:
    """Bit for bit where ``exact``."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        limits = (0.0, 0.0) if exact else (1e-5, 1e-6)
        torch.testing.assert_close(
            got[name],
            value,
            rtol=limits[0],
            atol=limits[1],
            msg=lambda text, n=name: f"{n}: {text}",
        )
