"""Options of parameter groups and requires_grad that a script sets on one rank alone: an error on
all ranks that names the rank and the setting, without another message or a wait of the host.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import RankMismatchError
from hf_zero.zero.reduce import rank_codes
from tests.helpers.engines import config_of
from tests.helpers.ranks import run_ranks

Change = Callable[[Any], None]


def built() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]


def freeze(engine: Any) -> None:
    engine.module[0].requires_grad_(False)


def set_option(name: str, value: object, group: int = 1) -> Change:
    return lambda engine: engine.optimizer.param_groups[group].update({name: value})


def scale_all(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= 0.5


CHANGES: dict[str, tuple[Change, str]] = {
    "learning rate": (set_option("lr", 0.05), "rank 1 has lr 0.05 in group 1"),
    "rate of all groups": (scale_all, "rank 1 has lr 0.005 in group 0, lr 0.005 in group 1"),
    "rate in a tensor": (set_option("lr", torch.tensor(0.25), 0), "rank 1 has lr 0.25 in group 0"),
    "betas": (set_option("betas", (0.5, 0.9)), "rank 1 has betas [0.5, 0.9] in group 1"),
    "weight decay": (set_option("weight_decay", 0.1, 0), "rank 1 has weight_decay 0.1 in group 0"),
    "freeze": (freeze, "rank 1 has requires_grad switched of 0.bias, 0.weight. Make"),
}


def step(engine: Any, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    engine.backward(engine(torch.randn(2, 4, generator=generator)).square().mean())
    engine.step()


def train(
    ranks: int, stage: int, change: Change, on: tuple[int, ...], **zero: object
) -> list[list[str]]:
    """Return what each of four steps of each rank has raised; ``change`` is made after the first
    one, on the ranks ``on``.
    """
    models = [built() for _ in range(ranks)]

    def run(rank: int) -> list[str]:
        model = models[rank]
        optimizer = torch.optim.AdamW(groups(model), lr=0.01)
        config = config_of(stage, zero_optimization={"stage": stage, **zero})
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        raised = []
        for number in range(4):
            try:
                step(engine, rank, number)
                raised.append("")
            except RankMismatchError as error:
                raised.append(str(error))
                return raised
            if number == 0 and rank in on:
                change(engine)
        return raised

    return run_ranks(ranks, run)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_setting_of_one_rank_is_refused_on_all(stage: int) -> None:
    for change, words in CHANGES.values():
        for raised in train(2, stage, change, on=(1,)):
            # at stage 0 the next step reads the message
            assert raised[:-1] == [""] * (2 if stage == 0 else 1)
            assert words in raised[-1], raised[-1]
            assert "rank 0 has changed nothing" in raised[-1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_of_the_step_on_one_rank_are_refused_on_all(stage: int) -> None:
    """The exchange of what they write would wait for the others."""

    def register(engine: Any, before: int = 0, after: int = 0) -> None:
        for _ in range(before):
            engine.optimizer.register_step_pre_hook(lambda *_: None)
        for _ in range(after):
            engine.optimizer.register_step_post_hook(lambda *_: None)

    for change, words in (
        (partial(register, after=1), "rank 1 has 1 hooks after the step"),
        (partial(register, before=2), "rank 1 has 2 hooks before the step"),
    ):
        for raised in train(2, stage, change, on=(1,)):
            assert raised[:-1] == [""]
            assert f"rank 0 has changed nothing; {words}" in raised[-1]
        assert train(2, stage, change, on=(0, 1)) == [[""] * 4] * 2
    assert train(2, stage, partial(register, before=1), on=(1,)) == [[""] * 4] * 2


def test_two_replicas_of_two_shards_compare_all_ranks() -> None:
    for raised in train(4, 3, set_option("lr", 0.05), on=(2,), mics_shard_size=2):
        assert "rank 2 has lr 0.05 in group 1" in raised[-1]


@pytest.mark.parametrize("stage", [0, 1])
def test_the_same_setting_on_all_ranks_trains(stage: int) -> None:
    for change, _ in CHANGES.values():
        assert train(2, stage, change, on=(0, 1)) == [[""] * 4] * 2


def test_many_settings_are_abridged_and_told_apart() -> None:
    def last_of_many(engine: Any) -> None:
        for group in engine.optimizer.param_groups:
            rank = engine.global_rank
            group.update(lr=0.5, weight_decay=0.5, eps=1e-3, betas=(0.5, 0.5 + 0.1 * rank))

    for raised in train(2, 2, last_of_many, on=(0, 1)):
        assert "and 5 more (code " in raised[-1] and "rank 1 has lr 0.5" in raised[-1]


class Copied:
    """An event after the copy of a sum."""

    waits = 0

    def synchronize(self) -> None:
        Copied.waits += 1


def test_on_a_device_all_ranks_read_the_sum_of_a_step_two_steps_later(monkeypatch: Any) -> None:
    """Also one that has changed nothing; in the steps before, the host does not wait."""
    monkeypatch.setattr(rank_codes.kinds, "is_synchronous", lambda device: False)
    monkeypatch.setattr(rank_codes.streams, "record_here", lambda device: Copied())
    monkeypatch.setattr(rank_codes.pinned, "empty", lambda n, dtype: torch.empty(n, dtype=dtype))
    monkeypatch.setattr(rank_codes.pinned, "upload", lambda tensor, device: tensor)
    monkeypatch.setattr(Copied, "waits", 0)
    changed = ["", "lr 0.5 in group 0"]
    checks = []
    for rank in (0, 1):
        mesh: Any = types.SimpleNamespace(
            pp_stage_ranks=2, rank=rank, ranks=(0, 1), all_gather_object=lambda *_: changed
        )
        checks.append(rank_codes.SettingsCheck(mesh, torch.device("cpu")))

    def begin(settings: list[str]) -> torch.Tensor:
        numbers = [check.numbers(words) for check, words in zip(checks, settings)]
        return torch.stack(numbers).sum(0)

    for settings, waits in ((["", ""], 0), (changed, 0), (changed, 1)):
        sums = begin(settings)
        assert Copied.waits == 2 * waits
        for check in checks:
            check.receive(sums.clone())
    for check, words in zip(checks, changed):
        with pytest.raises(RankMismatchError) as raised:
            check.numbers(words)
        assert "rank 0 has changed nothing; rank 1 has lr 0.5 in group 0" in str(raised.value)
