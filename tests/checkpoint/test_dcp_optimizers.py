"""Checkpoints converted for torch.distributed.checkpoint, by optimizer: a plain process loads them
in both forms of its state dict, and has then what it would have after the same steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import hf_zero
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.stacks import by_hand, on_ranks, run_steps

RANKS, STEPS = 2, 2


class Odd(Stack):
    """With frozen parameters, a scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(1)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 2))
        self.enter.requires_grad_(False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) * self.scale + self.none.sum()


def odd() -> nn.Module:
    return seeded(Odd)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2 and parameter.numel() > 0)
    return [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS: dict[str, Any] = {
    "all in one group": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4),
    "those that train": lambda model: torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], 1e-2, eps=1e-4, amsgrad=True
    ),
    "Muon": lambda model: torch.optim.Muon(matrices(model), 1e-2),
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_process_loads_a_converted_run(kind, flat, tmp_path):
    def run(rank: int, model: nn.Module) -> None:
        engine = start(model, OPTIMIZERS[kind](model), config_of(3))
        run_steps(engine, rank, range(STEPS))
        engine.save_checkpoint(tmp_path, tag="run")

    on_ranks(RANKS, run, build=odd)
    hf_zero.convert_checkpoint(tmp_path / "run", tmp_path / "dcp", to="dcp")
    kept: list[Any] = []

    def after(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept[:] = get_state_dict(model, optimizer)

    by_hand(OPTIMIZERS[kind], [[(1.0, 0)]] * STEPS, RANKS, after_step=after, build=odd)
    model = odd()
    optimizer = OPTIMIZERS[kind](model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    asked = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
    dcp.load(asked, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    given = {"model_state_dict": asked["model"], "optim_state_dict": asked["optimizer"]}
    set_state_dict(model, optimizer, **given, options=options)
    weights, states = get_state_dict(model, optimizer)
    compare_tensors("weights", weights, kept[0])
    assert states["state"].keys() == kept[1]["state"].keys()
    for name, want in kept[1]["state"].items():
        compare_tensors(name, states["state"][name], want, 1e-4)
    assert states["param_groups"] == kept[1]["param_groups"]
