"""A backward that closes a window makes its update: between it and ``step()`` weights, state,
counters, hooks and schedules are those of a plain loop after its step, and saves and reads have
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import hf_zero
from hf_zero.errors import PartitionError
from tests.helpers.cells import by_stage, in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.models import features
from tests.helpers.offloads import Values, same
from tests.helpers.stacks import on_ranks, squared, stack
from tests.helpers.training import At, Plan, adamw

EARLY = "update_in_backward"
RANKS, STEPS = 2, 3
OFFLOADS = ({}, {"offload_optimizer": {"device": "cpu"}})


def opened(model: nn.Module, stage: int, early: bool = True, make: Any = adamw, **keys: Any) -> Any:
    zero = {
        "stage": stage,
        EARLY: early,
        "stage3_param_persistence_threshold": 0,
        "stage3_module_granularity_threshold": 0,
        **keys.pop("zero", {}),
    }
    plan = Plan(precision=keys.pop("precision", "fp32"), accumulation=keys.pop("accumulation", 1))
    return start(model, make(model), config_of(stage, plan, zero_optimization=zero), **keys)


def backward(engine: Any, rank: int, step: int, micro: int = 0) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(squared(engine, At(step, micro, rank), dtype))


def train(engine: Any, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        backward(engine, rank, step)
        engine.step()


def state_of(engine: Any) -> Values:
    """Whole weights, master weights and moments. Collective."""
    values = dict(engine.state_dict())
    for name, parameter in engine.module.named_parameters():
        values[f"{name} master"] = hf_zero.safe_get_full_fp32_param(parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = hf_zero.safe_get_full_optimizer_state(parameter, kind)
            values[f"{name} {kind}"] = moment
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def plain_run(
    micros: int = 1,
    steps: int = STEPS,
    make: Any = adamw,
    before: Callable[[int, nn.Module, Any], None] = lambda step, model, optimizer: None,
    after: Callable[[int, nn.Module, Any], None] = lambda step, model, optimizer: None,
    ranks: int = RANKS,
) -> list[Values]:
    """The state after each step of one plain process."""
    model = stack()
    optimizer, states = make(model), []
    for step in range(steps):
        optimizer.zero_grad()
        for micro, rank in product(range(micros), range(ranks)):
            (squared(model, At(step, micro, rank)) / (micros * ranks)).backward()
        before(step, model, optimizer)
        optimizer.step()
        after(step, model, optimizer)
        values = dict(model.state_dict())
        for name, parameter in model.named_parameters():
            values[f"{name} master"] = parameter.detach()
            values |= {f"{name} {kind}": optimizer.state[parameter][kind] for kind in MOMENTS}
        states.append({name: value.detach().clone() for name, value in values.items()})
    return states


MOMENTS = ("exp_avg", "exp_avg_sq")


@in_turn("stage, accumulation, offload", *by_stage((0, 1, 2, 3), (1, 2), OFFLOADS))
def test_what_is_read_before_step_is_what_a_plain_loop_has_after_it(stage, accumulation, offload):
    plain = plain_run(accumulation)

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, accumulation=accumulation, zero=offload)
        for step in range(STEPS):
            for micro in range(accumulation):
                backward(engine, rank, step, micro)
                closes = micro + 1 == accumulation
                assert engine.is_gradient_accumulation_boundary() is closes
                assert (engine.changes.unconfirmed is not None) is closes
                assert engine.global_steps == step + closes
                if closes:
                    assert engine.window_is_open is False and engine.holds_gradients()
                    same(state_of(engine), plain[step])
                engine.step()
            assert engine.global_steps == step + 1
            assert engine.micro_steps == accumulation * (step + 1)
            same(state_of(engine), plain[step])
        engine.destroy()

    on_ranks(RANKS, run)


@in_turn("stage, offload", *by_stage((0, 1, 2, 3), OFFLOADS))
def test_bits_in_16_bits(stage, offload):
    """Those of an engine whose ``step()`` makes the update, after it."""

    def run(rank: int, model: nn.Module, early: bool) -> list[Values]:
        engine, states = opened(model, stage, early, precision="bf16", zero=offload), []
        for step in range(STEPS):
            backward(engine, rank, step)
            if early:
                states.append(state_of(engine))
            engine.step()
            if not early:
                states.append(state_of(engine))
        engine.destroy()
        return states

    early, late = (on_ranks(RANKS, run, chosen) for chosen in (True, False))
    for got, want in zip(early[0], late[0]):
        same(got, want, exact=True)


@in_turn("stage, offload", *by_stage((0, 1, 2, 3), OFFLOADS))
def test_a_run_resumes_from_a_save_before_step(stage, offload, tmp_path):
    plain = plain_run(steps=5)

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, zero=offload)
        for step in range(3):
            backward(engine, rank, step)
            if step == 2:
                engine.save_checkpoint(str(tmp_path), client_state={"step": step})
                engine.save_16bit_model(str(tmp_path))
                saved = engine.optimizer.state_dict()
            engine.step()
        after = engine.optimizer.state_dict()
        assert saved["state"].keys() == after["state"].keys()
        for number, entries in after["state"].items():
            for name, value in entries.items():
                assert torch.equal(torch.as_tensor(saved["state"][number][name]), value)
        backward(engine, rank, 3)
        engine.step()
        same(state_of(engine), plain[3])
        engine.destroy()

    def resume(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, zero=offload)
        _, client = engine.load_checkpoint(str(tmp_path))
        assert client == {"step": 2} and engine.global_steps == 3
        same(state_of(engine), plain[2])
        train(engine, rank, (3, 4))
        same(state_of(engine), plain[4])
        engine.destroy()

    on_ranks(RANKS, run)
    whole = load_file(tmp_path / "model.safetensors")
    same(whole, {name: plain[2][name] for name in whole})
    on_ranks(RANKS, resume)


def test_a_load_before_step_drops_its_gradients(tmp_path):
    plain = plain_run()

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        backward(engine, rank, 0)
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        backward(engine, rank, 1)
        engine.load_checkpoint(str(tmp_path))
        with pytest.raises(PartitionError, match="no gradient"):
            engine.step()
        train(engine, rank, (1, 2))
        same(state_of(engine), plain[2])
        engine.destroy()

    on_ranks(RANKS, run)


def test_settings_on_a_device_are_not_read():
    """A tensor on the meta device has no value: ``item()`` of it raises."""

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        engine.optimizer.param_groups[0]["scale"] = torch.ones((), device="meta")
        train(engine, rank, range(2))
        assert engine.global_steps == 2
        engine.destroy()

    on_ranks(RANKS, run)


@in_turn("stage, offload", *by_stage((0, 2, 3), OFFLOADS))
def test_hooks_of_the_optimizer_run_once_in_the_backward(stage, offload):
    """In the step, from when one before it is there."""

    def run(rank: int, model: nn.Module) -> list[str]:
        engine, calls = opened(model, stage, zero=offload), list[str]()
        optimizer = engine.optimizer
        optimizer.register_step_post_hook(lambda *given: calls.append("post"))
        for step in range(STEPS):
            if step == STEPS - 1:
                optimizer.register_step_pre_hook(lambda *given: calls.append("pre"))
            backward(engine, rank, step)
            calls.append("before step")
            engine.step()
        same(state_of(engine), plain[-1])
        engine.destroy()
        return calls

    plain = plain_run()
    in_backward = ["post", "before step"] * (STEPS - 1)
    assert on_ranks(RANKS, run) == [[*in_backward, "before step", "pre", "post"]] * RANKS


def test_an_error_of_a_post_hook_comes_from_step():
    def fail(*given: Any) -> None:
        raise ZeroDivisionError

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        handle = engine.optimizer.register_step_post_hook(fail)
        backward(engine, rank, 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        handle.remove()
        train(engine, rank, (1, 2))
        same(state_of(engine), plain[-1])
        engine.destroy()

    plain = plain_run()
    on_ranks(RANKS, run)


@in_turn("whose", ["engine", "script"])
def test_schedules_act_as_in_a_plain_loop(whose):
    """The engine's has made its step before ``step()``, a script's makes it after."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    rates = []

    def before(step: int, model: nn.Module, optimizer: Any) -> None:
        if not step:
            optimizer.schedule = schedule(optimizer)

    def after(step: int, model: nn.Module, optimizer: Any) -> None:
        rates.append(optimizer.schedule.get_last_lr()[0])
        optimizer.schedule.step()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-2)

    plain = plain_run(make=make, before=before, after=after)
    followed = [1e-2 / (1 + step) for step in range(STEPS + 1)]
    assert rates == pytest.approx(followed[:STEPS])

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2, make=make)
        made = schedule(engine.optimizer)
        if whose == "engine":
            engine.lr_scheduler = made
        for step in range(STEPS):
            assert engine.get_lr() == [pytest.approx(followed[step])]
            backward(engine, rank, step)
            done = step + (whose == "engine")
            assert engine.get_lr() == [pytest.approx(followed[done])]
            assert made.last_epoch == done
            with pytest.raises(PartitionError, match=r"settings comes after .* before its step"):
                mistaken(engine)
            engine.step()
            if whose == "script":
                made.step()
        same(state_of(engine), plain[-1])
        engine.destroy()

    def mistaken(engine: Any) -> None:
        """A script that steps a schedule before the optimizer changes the rate of this step."""
        group = engine.optimizer.param_groups[0]
        before = group["lr"]
        group["lr"] = before * 0.5
        try:
            engine.step()
        finally:
            group["lr"] = before

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(RANKS, run)


def test_a_schedule_that_a_script_steps_too_is_refused():
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        engine.lr_scheduler = StepLR(engine.optimizer, 1)
        backward(engine, rank, 0)
        engine.step()
        engine.lr_scheduler.step()
        before = state_of(engine)
        with pytest.raises(PartitionError, match="remove the call"):
            backward(engine, rank, 1)
        same(state_of(engine), before, exact=True)
        engine.destroy()

    on_ranks(RANKS, run)


@in_turn("stage, offload", *by_stage((0, 2, 3), OFFLOADS))
def test_an_evaluation_before_step_has_the_weights_after_it(stage, offload):
    plain = plain_run()
    model = stack()
    model.load_state_dict({name: plain[-1][name] for name in model.state_dict()})
    want = model(features(9, 0, 0))

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, zero=offload)
        for step in range(STEPS):
            backward(engine, rank, step)
            if step == STEPS - 1:
                engine.eval()
                with torch.no_grad():
                    torch.testing.assert_close(
                        engine(features(9, 0, 0)), want, rtol=1e-4, atol=1e-5
                    )
                with pytest.raises(PartitionError, match=r"a forward .* before its step"):
                    engine(features(9, 0, 0))  # records a graph
                engine.train()
                with torch.no_grad(), pytest.raises(PartitionError, match=r"a forward .* before"):
                    engine(features(9, 0, 0))
            engine.step()
        same(state_of(engine), plain[-1])
        engine.destroy()

    on_ranks(RANKS, run)


def test_a_backward_that_no_hook_sees_is_updated_with_in_step():
    def penalty(model: nn.Module) -> torch.Tensor:
        return sum(p.square().sum() for p in model.parameters())

    def run(rank: int, model: nn.Module) -> Values:
        engine = opened(model, 1)
        train(engine, rank, range(STEPS))
        penalty(engine.module).backward()
        assert engine.changes.unconfirmed is None and engine.global_steps == STEPS
        engine.step()
        assert engine.global_steps == STEPS + 1
        return {n: hf_zero.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}

    model = stack()
    optimizer = adamw(model)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = squared(model, At(step, 0, rank)) if step < STEPS else penalty(model)
            (loss / RANKS).backward()
        optimizer.step()
    same(on_ranks(RANKS, run)[0], {n: p.detach() for n, p in model.named_parameters()})


def put(engine: Any) -> None:
    with torch.no_grad():
        engine.module.head.bias.add_(1.0)
    engine.step()


def read_after_a_write(engine: Any) -> None:
    with torch.no_grad():
        engine.module.head.bias.add_(1.0)
    hf_zero.safe_get_full_fp32_param(engine.module.head.bias)


def save_after_a_write(engine: Any) -> None:
    with torch.no_grad():
        engine.module.head.bias.add_(1.0)
    engine.save_checkpoint("never")


def added(engine: Any) -> None:
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


REFUSED: dict[str, Callable[[Any], None]] = {
    r"a write to head\.bias": put,
    r"a write to head\.bias comes": read_after_a_write,
    r"a write to head\.bias comes after": save_after_a_write,
    r"optimizer\.add_param_group": added,
    "replace": lambda engine: engine.replace(engine.module.head),
    "reading a gradient": lambda engine: hf_zero.safe_get_full_grad(engine.module.head.weight),
}


@in_turn("what", REFUSED)
def test_what_a_plain_loop_would_do_before_its_step_is_refused(what):
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, 2)
        backward(engine, rank, 0)
        with pytest.raises(PartitionError, match=f"{what}.*Call step"):
            REFUSED[what](engine)
        engine.destroy()

    on_ranks(1, run)


@in_turn("stage, offload", *by_stage((1, 3), OFFLOADS))
def test_an_exception_in_the_update_breaks_its_step(stage, offload, tmp_path):
    """As one in ``step()`` does: only a load of all the state mends it."""
    plain = plain_run()

    def fail(*given: Any, **named: Any) -> None:
        raise ZeroDivisionError("the rest of an update")

    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, stage, zero=offload)
        backward(engine, rank, 0)
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine._update = fail
        with pytest.raises(ZeroDivisionError):
            backward(engine, rank, 1)
        del engine._update
        broken = "half changed: step 2 was broken off by ZeroDivisionError"
        for use in (engine.step, engine.state_dict, lambda: engine.save_checkpoint("never")):
            with pytest.raises(PartitionError, match=broken):
                use()
        engine.load_checkpoint(str(tmp_path))
        train(engine, rank, (1, 2))
        same(state_of(engine), plain[2])
        engine.destroy()

    on_ranks(RANKS, run)


def test_reads_inside_the_backward_are_refused():
    def run(rank: int, model: nn.Module) -> None:
        engine, caught = opened(model, 2), list[str]()

        def look(*given: Any) -> None:
            try:
                engine.state_dict()
            except PartitionError as error:
                caught.append(str(error))

        handle = model.enter.register_full_backward_hook(look)
        train(engine, rank, range(2))
        handle.remove()
        assert caught and all("inside a backward that has updated a part" in c for c in caught)
        engine.destroy()

    on_ranks(1, run)
