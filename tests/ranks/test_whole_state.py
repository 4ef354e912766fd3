"""State that is whole: what a source does not name begins as torch's does, a save holds what is
there at the call, and a partial load changes what it names and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.optim import Lion
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import DEVICE, offload
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import layers, on_ranks, squared, stack
from tests.helpers.training import At, adamw

Make = Callable[[Any], torch.optim.Optimizer]
ROWS = 4
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, 1e-2),
    "RAdam": lambda params: torch.optim.RAdam(params, 1e-2),
    "Adamax": lambda params: torch.optim.Adamax(params, 1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 1e-2, initial_accumulator_value=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, 1e-1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "ASGD": lambda params: torch.optim.ASGD(params, 1e-2, t0=1),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "SGD with dampening": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, dampening=0.5),
    "Lion": lambda params: Lion(params, 1e-3),
}


def batch(step: int) -> torch.Tensor:
    return torch.randn(2 * ROWS, 8, generator=torch.Generator().manual_seed(step))


def settings(stage: int, offload: bool = False, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if offload and stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    keys = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return (
        config_of(stage, train_micro_batch_size_per_gpu=ROWS, zero_optimization=zero) | keys | more
    )


def train(engine: Any, rank: int, steps: range) -> None:
    for step in steps:
        rows = batch(step)[rank * ROWS : (rank + 1) * ROWS]
        engine.backward(engine(rows).square().mean())
        engine.step()


class Scaled(nn.Sequential):
    """Layers with a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__(*layers())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * self.scale


def plainly(make: Make, frozen_for: int, steps: int) -> list[torch.Tensor]:
    """Return the weights after ``steps`` steps of torch, whose first layer trains after
    ``frozen_for`` of them.
    """
    model = Scaled()
    model[0].requires_grad_(False)
    optimizer = make(model.parameters())
    for step in range(steps):
        model[0].requires_grad_(step >= frozen_for)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, 1e-2)


def by_way(rank: int, folder: Path, way: str) -> str:
    """Return the source that ``way`` makes of the checkpoint in ``folder``."""
    if way not in ("universal", "dcp"):
        return str(folder)
    target = folder.with_name(f"{folder.name}-{way}")
    if rank == 0:
        hf_zero.convert_checkpoint(folder, target, to=way)
    torch.distributed.barrier()
    return str(target)


def unfrozen(rank: int, make: Make, stage: int, offload: bool, way: str, folder: Path) -> Any:
    model = Scaled()
    model[0].requires_grad_(False)
    engine = start(model, make(model.parameters()), settings(stage, offload))
    train(engine, rank, range(3))
    engine.save_checkpoint(str(folder / "run"))
    engine.destroy()
    source, keys = by_way(rank, folder / "run", way), settings(stage, offload)
    model = Scaled()
    if way == "resume":
        engine = start(model, make(model.parameters()), keys, resume=source)
    else:
        engine = start(model, make(model.parameters()), keys)
        if way == "after steps":  # what the steps have left is in the engine
            train(engine, rank, range(5, 7))
        engine.load_checkpoint(source)
    for step in (3, 4):  # before the unfrozen layer has made a step, and with fewer than others
        engine.save_checkpoint(str(folder / f"{step}"))
        engine.load_checkpoint(by_way(rank, folder / f"{step}", way))
        train(engine, rank, range(step, step + 1))
    assert engine.global_steps == 5
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights


WAYS = ("resume", "load", "after steps", "dcp")  # a universal folder has no place for some state
CELLS = [
    *((name, at % 4, at % 3 == 2, WAYS[(at + at // 4) % 4]) for at, name in enumerate(OPTIMIZERS)),
    ("AdamW", 1, False, "universal"),
    ("AdamW", 3, True, "load"),
    ("Adafactor", 1, True, "load"),  # torch's keeps a step count and factors alone
    ("Adafactor", 3, False, "resume"),
]


@in_turn("name, stage, offload, way", CELLS)
def test_what_was_frozen_begins_as_torchs_does(
    tmp_path: Path, name: str, stage: int, offload: bool, way: str
) -> None:
    make = OPTIMIZERS.get(name, adafactor)
    want = plainly(make, 3, 5)
    for got in run_ranks(2, unfrozen, make, stage, offload, way, tmp_path):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


PRESTEPPED = ("AdamW", "SGD with dampening", "ASGD", "Adagrad", "NAdam")
PLACES = (DEVICE, "optimizer on cpu", "optimizer in files")


@in_turn(
    "name, stage, way",
    [(name, (0, 1, 3)[at % 3], PLACES[at % 3]) for at, name in enumerate(PRESTEPPED)],
)
def test_an_optimizer_whose_parameters_have_made_different_steps_goes_on(
    tmp_path: Path, name: str, stage: int, way: str
) -> None:
    """The first layer has made no step, the second one fewer than the others."""

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Scaled()
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            model(batch(step)).square().mean().backward()
            model[0].zero_grad()  # type: ignore[operator]
            if step == 0:
                model[2].zero_grad()  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def over(rank: int) -> Any:
        model, optimizer = made[rank]
        section = {"zero_optimization": offload(way, stage, tmp_path)}
        engine = start(model, optimizer, settings(stage) | section)
        train(engine, rank, range(3, 5))
        weights = [*engine.state_dict().values()]
        engine.destroy()
        return weights

    model, optimizer = begun()
    for step in range(3, 5):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    made = [begun() for _ in range(2)]
    for got in run_ranks(2, over):
        torch.testing.assert_close(got, [*model.state_dict().values()], rtol=1e-4, atol=1e-6)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 4, 5], 0.5),
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, 2e-2, total_steps=9),
    "ChainedScheduler": lambda optimizer: schedules.ChainedScheduler(
        [schedules.MultiStepLR(optimizer, [2, 5]), schedules.ExponentialLR(optimizer, 0.9)]
    ),
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, 1, 2), schedules.MultiStepLR(optimizer, [1, 2])],
        [2],
    ),
    "SequentialLR that changes later": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, 1, 2), schedules.MultiStepLR(optimizer, [1, 2])],
        [4],
    ),
}


SOURCES = ("load", "universal", "dcp")


@in_turn("way, schedule", [(SOURCES[at % 3], name) for at, name in enumerate(SCHEDULES)])
def test_a_schedule_goes_on_from_every_source(tmp_path: Path, way: str, schedule: str) -> None:
    def made() -> Any:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        return start(model, optimizer, settings(1), lr_scheduler=SCHEDULES[schedule](optimizer))

    def rates(engine: Any, steps: range) -> list[float]:
        got = []
        for step in steps:
            train(engine, 0, range(step, step + 1))
            got.append(float(engine.optimizer.param_groups[0]["lr"]))
        return got

    def over(rank: int) -> None:
        engine = made()
        rates(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "run"))
        want = rates(engine, range(3, 6))
        engine.destroy()
        engine = made()
        engine.load_checkpoint(by_way(rank, tmp_path / "run", way))
        assert rates(engine, range(3, 6)) == want
        engine.destroy()

    run_ranks(1, over)


def back_and_forth(optimizer: torch.optim.Optimizer, make_steps: Callable[[range], None]) -> None:
    """Take two state dicts and load both, the later one last, before the last two steps."""
    begun = deepcopy(optimizer.state_dict())
    make_steps(range(2))
    early = deepcopy(optimizer.state_dict())
    make_steps(range(2, 3))
    late = optimizer.state_dict()
    for each in (begun, early, late, late):
        optimizer.load_state_dict(each)
    make_steps(range(3, 4))
    optimizer.load_state_dict(begun)
    make_steps(range(4, 6))


KINDS = ("optimizer on cpu", "optimizer in files", DEVICE)


@in_turn(
    "name, stage, way", [(name, at % 3 + 1, KINDS[at % 3]) for at, name in enumerate(OPTIMIZERS)]
)
def test_a_load_leaves_the_other_state_dicts_as_they_are(
    tmp_path: Path, name: str, stage: int, way: str
) -> None:
    def over(rank: int) -> Any:
        model = Scaled()
        section = {"zero_optimization": offload(way, stage, tmp_path)}
        engine = start(model, OPTIMIZERS[name](model.parameters()), settings(stage) | section)
        back_and_forth(engine.optimizer, lambda steps: train(engine, rank, steps))
        weights = [*engine.state_dict().values()]
        engine.destroy()
        return weights

    plain = Scaled()
    optimizer = OPTIMIZERS[name](plain.parameters())

    def make_steps(steps: range) -> None:
        for step in steps:
            plain(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    back_and_forth(optimizer, make_steps)
    for got in run_ranks(2, over):
        torch.testing.assert_close(got, [*plain.state_dict().values()], rtol=1e-4, atol=1e-6)


def by_load_state_dict(engine: Any) -> None:
    state = deepcopy(engine.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].fill_(7.0)
    engine.optimizer.load_state_dict(state)


def in_place(engine: Any) -> None:
    for entry in engine.optimizer.state.values():
        entry["exp_avg"].fill_(6.0)


def by_another_tensor(engine: Any) -> None:
    for entry in engine.optimizer.state.values():
        entry["exp_avg"] = torch.full_like(entry["exp_avg"], 5.0)


def by_safe_set(engine: Any) -> None:
    parameter = engine.module[0].weight
    hf_zero.safe_set_full_optimizer_state(parameter, torch.full((16, 8), 4.0), "exp_avg")


def by_weights(engine: Any) -> None:
    engine.load_state_dict({name: value + 1 for name, value in engine.state_dict().items()})


def by_a_master(engine: Any) -> None:
    hf_zero.safe_set_full_fp32_param(engine.module[0].weight, torch.full((16, 8), 0.3))


def by_settings(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.125


def by_a_buffer(engine: Any) -> None:
    engine.module[1].seen.fill_(3.0)


def by_clearing(engine: Any) -> None:
    engine.optimizer.state.clear()


def by_loading(engine: Any) -> None:
    engine.load_checkpoint(engine.earlier)


CHANGES = (
    by_load_state_dict,
    in_place,
    by_another_tensor,
    by_safe_set,
    by_weights,
    by_a_master,
    by_settings,
    by_a_buffer,
    by_clearing,
    by_loading,
)


def held(engine: Any) -> dict[str, Any]:
    """Return all that a checkpoint of ``engine`` has to hold."""
    own = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, parameter in engine.module.named_parameters():
        own[f"{name} fp32"] = hf_zero.safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq") if engine.optimizer.state else ():
            own[f"{name} {key}"] = hf_zero.safe_get_full_optimizer_state(parameter, key).clone()
    own["lr"] = torch.tensor(engine.optimizer.param_groups[0]["lr"])
    return own


def changed_and_saved(
    rank: int, change: Callable[[Any], None], stage: int, memory: bool, blocking: bool, folder: Path
) -> None:
    keys = settings(stage, bf16={"enabled": True})
    if memory:
        (folder / "memory").mkdir(exist_ok=True)
        section = {"every": 1, "copies": 1, "job": "run", "folder": str(folder / "memory")}
        keys["checkpoint"] = {"memory": section}

    def made() -> Any:
        model = layers()
        model[1].register_buffer("seen", torch.zeros(()))
        return start(model, torch.optim.AdamW(model.parameters(), 1e-2), keys)

    engine = made()
    engine.earlier = str(folder / "earlier")
    for step in range(3):
        rows = batch(step)[rank * ROWS : (rank + 1) * ROWS].bfloat16()
        engine.backward(engine(rows).float().square().mean())
        engine.step()
        if step == 0:
            engine.save_checkpoint(engine.earlier)
    change(engine)
    now = held(engine)
    engine.save_checkpoint(str(folder / "run"), blocking=blocking)
    engine.wait_for_checkpoint()
    engine.destroy()
    keys.pop("checkpoint", None)
    engine = made()
    engine.load_checkpoint(str(folder / "run"))
    loaded = held(engine)
    engine.destroy()
    assert now.keys() == loaded.keys()
    for name, value in now.items():
        assert torch.equal(value, loaded[name]), name


@in_turn(
    "change, stage, memory, blocking",
    [
        (change, 3 if at % 2 else 1, memory, blocking)
        for at, change in enumerate(CHANGES)
        for memory, blocking in ((True, False), *(((False, bool(at % 2)),) if at < 2 else ()))
    ],
)
def test_a_save_holds_what_is_there(
    tmp_path: Path, change: Callable[[Any], None], stage: int, memory: bool, blocking: bool
) -> None:
    run_ranks(2, changed_and_saved, change, stage, memory, blocking, tmp_path)


def masters(engine: Any) -> dict[str, torch.Tensor]:
    named = engine.module.named_parameters()
    return {name: hf_zero.safe_get_full_fp32_param(p).clone() for name, p in named}


@in_turn("stage, precision", [(0, "fp16"), (1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_a_partial_state_dict_changes_what_it_names(stage: int, precision: str) -> None:
    def over(rank: int) -> None:
        scale = {"loss_scale": 1.0} if precision == "fp16" else {}
        model = layers()
        engine = start(
            model,
            torch.optim.AdamW(model.parameters(), 1e-4),
            settings(stage, **{precision: {"enabled": True} | scale}),
        )
        for step in range(3):
            rows = batch(step)[rank * ROWS : (rank + 1) * ROWS].to(model[0].weight.dtype)
            engine.backward(engine(rows).float().square().mean())
            engine.step()
        before = masters(engine)
        engine.load_state_dict({"4.bias": torch.full((1,), 0.5)}, strict=False)
        after = masters(engine)
        assert after.pop("4.bias") == 0.5
        for name, value in after.items():
            assert torch.equal(value, before[name]), name
        engine.load_state_dict(engine.state_dict())
        for name, value in masters(engine).items():
            assert name == "4.bias" or torch.equal(value, before[name]), name
        engine.destroy()

    run_ranks(2, over)


def without_first_moments(optimizer, state):
    state = deepcopy(state)
    for entries in state["state"].values():
        entries["exp_avg"].zero_()
    return state


def zero_first_moments(optimizer):
    for entries in optimizer.state.values():
        entries["exp_avg"].zero_()


@in_turn(
    "hook, stage, offloads",
    [("load pre", 2, False), ("load post", 3, True), ("state_dict post", 2, True)],
    long=[("load pre", 3, True), ("load post", 2, False), ("state_dict post", 3, False)],
)
def test_hooks_of_an_optimizers_state_dict_change_state(hook, stage, offloads):
    """As in plain torch: each register_... hook sees the state, and what it changes counts."""

    def train(optimizer, loss_of, backward):
        register, change = {
            "load pre": (optimizer.register_load_state_dict_pre_hook, without_first_moments),
            "load post": (optimizer.register_load_state_dict_post_hook, zero_first_moments),
            "state_dict post": (optimizer.register_state_dict_post_hook, without_first_moments),
        }[hook]
        register(change)
        for step in range(4):
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            backward(loss_of(step))
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, model):
        zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloads else {})
        engine = start(model, adamw(model), config_of(stage, zero_optimization=zero))
        train(engine.optimizer, lambda step: squared(engine, At(step, 0, rank)), engine.backward)
        return full_weights(engine)

    plain = stack()

    def mean(step):
        return sum(squared(plain, At(step, 0, each)) / 2 for each in range(2))

    train(adamw(plain), mean, lambda loss: loss.backward())
    for name, value in on_ranks(2, run)[0].items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-5, atol=1e-6)


def in_half(entry):
    return entry / 2


@in_turn(
    "make, change, stage, way",
    [
        ("AdamW", torch.zeros_like, 2, "optimizer on cpu"),
        ("AdamW", in_half, 3, "optimizer on cpu"),
        ("NAdam", in_half, 2, "optimizer on cpu"),
        ("AdamW", torch.zeros_like, 3, "optimizer in files"),
        ("AdamW", torch.zeros_like, 1, DEVICE),
    ],
)
def test_arrays_that_a_script_assigns_are_the_state(make, change, stage, way, tmp_path):
    """What stands in for files reads as zeros, so that half of it would be no half there."""

    def train(optimizer, loss_of, backward):
        for step in range(4):
            if step == 2:
                for entries in optimizer.state.values():
                    entries["exp_avg"] = change(entries["exp_avg"])
            backward(loss_of(step))
            optimizer.step()
            optimizer.zero_grad()

    def run(rank, model):
        zero = offload(way, stage, tmp_path)
        optimizer = OPTIMIZERS[make](model.parameters())
        engine = start(model, optimizer, config_of(stage, zero_optimization=zero))
        train(optimizer, lambda step: squared(engine, At(step, 0, rank)), engine.backward)
        entries = next(entries for entries in optimizer.state.values() if entries)
        with pytest.raises(PartitionError, match="exp_avg"):
            entries["exp_avg"] = torch.zeros(3)
        return full_weights(engine)

    plain = stack()

    def mean(step):
        return sum(squared(plain, At(step, 0, each)) / 2 for each in range(2))

    train(OPTIMIZERS[make](plain.parameters()), mean, lambda loss: loss.backward())
    for name, value in on_ranks(2, run)[0].items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-5, atol=1e-6)
