"""Offloaded state that a script removes from ``optimizer.state`` or requires by a setting, a state
dict that it keeps, and reads of weights in another process than the one that updates them.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import OffloadError, UnsupportedOptimizerError
from hf_zero.optim import CPUAdam
from tests.helpers.cells import in_one_item

ROWS = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def started(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tier: dict[str, Any]) -> Any:
    zero = {"stage": 2, "offload_optimizer": tier}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero}
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def tier_of(device: str, folder: Path) -> dict[str, Any]:
    return {"device": device} | ({"nvme_path": str(folder)} if device == "nvme" else {})


def assign(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def delete(optimizer: torch.optim.Optimizer) -> None:
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


MAKERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def steps_beside(
    plain: torch.nn.Module,
    torchs: torch.optim.Optimizer,
    engine: Any,
    change: Callable[[torch.optim.Optimizer], None],
    steps_before: int = 3,
) -> Iterator[None]:
    """Step ``plain`` and ``engine`` over ROWS; ``change`` both optimizers after ``steps_before``
    steps. Yield after each step.
    """
    for number, rows in enumerate(ROWS):
        if number == steps_before:
            change(torchs)
            change(engine.optimizer)
        plain(rows).square().mean().backward()
        torchs.step()
        torchs.zero_grad()
        engine.backward(engine(rows).square().mean())
        engine.step()
        yield


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("remove", [assign, delete])
@pytest.mark.parametrize("name", MAKERS)
def test_it_begins_anew(name: str, remove: Any, device: str, tmp_path: Path) -> None:
    plain, model = build(), build()
    torchs, given = MAKERS[name](plain.parameters()), MAKERS[name](model.parameters())
    engine = started(model, given, tier_of(device, tmp_path))
    for _ in steps_beside(plain, torchs, engine, remove):
        pass
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    engine.destroy()


def switch(name: str) -> Callable[[torch.optim.Optimizer], None]:
    def change(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[name] = True

    return change


@in_one_item([
    ("AdamW", "amsgrad", 0, "cpu"), ("AdamW", "amsgrad", 0, "nvme"),
    ("RMSprop", "centered", 0, "cpu"), ("CPUAdam", "amsgrad", 3, "nvme"),
])  # fmt: skip
def test_a_setting_that_keeps_a_further_state(case: tuple[str, str, int, str]) -> None:
    """Before the first step, as with every class of torch; CPUAdam's also later."""
    name, setting, steps_before, device = case
    plain, model = build(), build()
    make = MAKERS.get(name, CPUAdam)
    torchs, given = make(plain.parameters()), make(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        engine = started(model, given, tier_of(device, Path(folder)))
        for _ in steps_beside(plain, torchs, engine, switch(setting), steps_before):
            pass
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        engine.destroy()


def test_maxima_of_steps_that_kept_none_are_refused() -> None:
    model = build()
    engine = started(model, MAKERS["AdamW"](model.parameters()), {"device": "cpu"})
    engine.backward(engine(ROWS[0]).square().mean())
    engine.step()
    switch("amsgrad")(engine.optimizer)
    engine.backward(engine(ROWS[1]).square().mean())
    with pytest.raises(UnsupportedOptimizerError, match=r"amsgrad of group 0 .* set it before the"):
        engine.step()


def scale(optimizer: torch.optim.Optimizer) -> None:
    for entries in optimizer.state.values():
        for name, value in entries.items():
            if name != "step" and isinstance(value, torch.Tensor):
                value.mul_(4)


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_script_writes_to_the_factors_of_whole_tensors(device: str, beta1: float | None) -> None:
    """They are entries as others are, and not in a dictionary that such a script passes over."""
    plain, model = build(), build()
    settings = {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": beta1}
    torchs = transformers.Adafactor(plain.parameters(), **settings)
    given = transformers.Adafactor(model.parameters(), **settings)
    engine = started(model, given, {"device": device})
    for _ in steps_beside(plain, torchs, engine, scale):
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    engine.destroy()


def put_zeros(engine: Any, shard: Any) -> None:
    offloaded = engine.bound._table.offloaded
    for segment in offloaded.segments(shard):
        offloaded.put(segment, "exp_avg", 0, torch.zeros(segment.tensor.numel()))


def step_anew(engine: Any, shard: Any) -> None:
    delete(engine.optimizer)
    engine.backward(engine(ROWS[1]).square().mean())
    engine.step()


@pytest.mark.parametrize("change", [put_zeros, step_anew])
def test_a_change_first_waits_for_the_copy_of_a_save(change: Any) -> None:
    model = build()
    engine = started(model, MAKERS["AdamW"](model.parameters()), {"device": "cpu"})
    engine.backward(engine(ROWS[0]).square().mean())
    engine.step()
    shard = engine.flats[0].optimizer_shard
    saved = engine.bound.state.arrays(shard)["exp_avg"].clone()
    copies: list[torch.Tensor] = []

    def wait_until_copied() -> None:
        copies.append(shard.reading().fetch("exp_avg").clone())
        shard.end_copy()

    shard.begin_copy(wait_until_copied)
    change(engine, shard)
    assert len(copies) == 1 and torch.equal(copies[0], saved) and saved.any()
    engine.destroy()


def test_a_kept_state_dict_has_the_steps_of_its_moments() -> None:
    model = build()
    engine = started(model, MAKERS["AdamW"](model.parameters()), {"device": "cpu"})
    for number, rows in enumerate(ROWS):
        if number == 2:
            kept = engine.optimizer.state_dict()
        engine.backward(engine(rows).square().mean())
        engine.step()
    assert {int(state["step"]) for state in kept["state"].values()} == {2}
    engine.destroy()


def test_a_forked_process_does_not_wait_for_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    engine = started(model, MAKERS["AdamW"](model.parameters()), {"device": "cpu"})
    engine.backward(engine(ROWS[0]).square().mean())
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.updater, "_process", -1)
        with pytest.raises(OffloadError, match="forked child"):
            model[0].weight.sum()
    assert model[0].weight.sum().isfinite()
    engine.destroy()
