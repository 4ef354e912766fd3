"""The model of an engine's bytes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.ops import dispatch
from hf_zero.optim.adam_lion import Lion
from hf_zero.planning import Needs, needs
from tests.helpers.cells import in_turn
from tests.helpers.plans import APART, Blocks, planned

SMALL = [(1001,), (1001,), (9, True, True), (77, False)]


def part(parts: Any, what: str) -> int:
    return sum(each.nbytes for each in parts if each.what == what)


def to(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **more}


def small(ranks: int = 1, stage: int = 3, **zero: Any) -> Needs:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **APART, **zero}}
    return needs(planned(Blocks(SMALL, root=40), config, ranks, gpu=True))


def test_a_step_on_bf16_state_widens_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    what, keys = (
        "state that a step widens to fp32",
        ("master_weights_and_grads", "optimizer_states"),
    )

    def widened(*chosen: str) -> int:
        bf16 = {"enabled": True, **{f"bf16_{key}": True for key in chosen}}
        config = {"bf16": bf16, "zero_optimization": {"stage": 2}}
        found = needs(planned(Blocks(SMALL, root=40), config, 2, gpu=True))
        return part(found.device, what)

    numel = widened(keys[1]) // 8  # two moments, beside master weights and gradients in fp32
    assert numel > 1000 and widened() == 0
    assert widened(keys[0]) == 8 * numel and widened(*keys) == 16 * numel
    monkeypatch.setattr(importlib.import_module("hf_zero.planning.needs"), "WIDENED", 100)
    assert widened(*keys) == 16 * 100


def test_what_is_pinned() -> None:
    for pin in (None, True, False):
        how = to("cpu", pin_memory=pin)
        own = small(offload_optimizer=how, offload_param=how)
        state = part(own.ram, "master weights and moments")
        assert own.pinned == (own.ram_bytes - state if pin is not False else 0)
    auto = small(2, 2, offload_optimizer=to("cpu", ratio="auto"))
    assert auto == small(2, 2, offload_optimizer=to("cpu")), "until the first step is measured"


def test_moments_of_a_living_optimizer_without_touching_it() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1.0}]
    optimizers: list[tuple[torch.optim.Optimizer, int]] = [
        (torch.optim.AdamW(parameters), 2),
        (torch.optim.AdamW(groups, amsgrad=True, fused=True), 3),
        (torch.optim.SGD(parameters, 0.1), 0),
        (torch.optim.SGD(parameters, 0.1, momentum=0.9), 1),
        (torch.optim.Adagrad(parameters), 1),
        (Lion(parameters), 1),
    ]
    for optimizer, moments in optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = {key: list(value) for key, value in optimizer.state.items()}
        assert planned(model, ZeroConfig(0), 1, optimizer).moments == moments
        assert {key: list(value) for key, value in optimizer.state.items()} == before


@in_turn("stage", [2, 3])
def test_gradients_of_a_fused_update_stay_in_16_bits_where_ranks_sum_them_so(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "runs_on", lambda device: True)

    def dtypes(ranks: int, **more: Any) -> set[torch.dtype]:
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        config |= {"kernels": ["optimizer"], "train_micro_batch_size_per_gpu": 1}
        gpu = more.pop("gpu", True)
        plan = planned(Blocks([(4096, True, False)]), config | more, ranks, gpu=gpu)
        return {flat.gradient_dtype for flat in plan.flats}

    assert dtypes(2) == dtypes(1) == dtypes(1, gpu=False) == {torch.bfloat16}
    assert dtypes(2, gpu=False) == {torch.float32}, "gloo sums in the dtype of the shard"
    assert dtypes(2, gradient_accumulation_steps=2) == {torch.float32}
    assert dtypes(2, kernels="off") == {torch.float32}
