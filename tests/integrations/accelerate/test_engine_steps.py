"""Steps of one or several engines of an Accelerator, and the results and messages of
``clip_grad_norm_``; in one process.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn

import hf_zero
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations.accelerate.engine_steps import EngineSteps
from tests.helpers.cells import in_turn
from tests.helpers.models import features
from tests.helpers.plain_process import forget
from tests.helpers.stacks import stack


def accelerator_with(clip: float | None = 1.0, stage: int = 2, **more: Any) -> Accelerator:
    """``clip``: None: the configuration leaves it open."""
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": 3,
        **({} if clip is None else {"gradient_clipping": clip}),
        "gradient_accumulation_steps": "auto",
        **more,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)


def prepared(accelerator: Accelerator) -> tuple[Engine, torch.optim.Optimizer]:
    model = stack()
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return engine, optimizer


def squared(engine: nn.Module, step: int = 0, rank: int = 0) -> torch.Tensor:
    return engine(features(step, 0, rank)).pow(2).mean()


def loss_of(*engines: nn.Module) -> torch.Tensor:
    return torch.stack([squared(engine) for engine in engines]).sum()


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs)


def test_one_model_steps_when_its_optimizer_is_told() -> None:
    """Two backwards of one step add up, zero_grad drops them, and a teacher is no second model."""
    accelerator = accelerator_with(0.0)
    teacher = accelerator.prepare(stack().requires_grad_(False))
    engine, optimizer = prepared(accelerator)
    plain, other = stack(), stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for at in (2 * step, 2 * step + 1)[: 1 if step == 0 else 2]:
            x = features(at, 0, 0)
            accelerator.backward((engine(x) - teacher(x + 1)).pow(2).mean())
            ((plain(x) - other(x + 1).detach()).pow(2).mean() / 2).backward()
        if step != 1:
            optimizer.step()
            theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
        optimizer.step()  # without gradients
        assert engine.global_steps == (1, 1, 2)[step]
    assert_same_weights(engine.module, plain)


@pytest.mark.parametrize("models", [1, 2])
def test_gradients_that_are_set_to_zeros_are_stepped(models: int) -> None:
    """As in torch, weight decay and momentum act on a layer that the second step does not use."""
    forget()
    accelerator = accelerator_with(0.0, gradient_accumulation_steps=1)
    accelerator.gradient_accumulation_steps = 1
    engine, optimizer = prepared(accelerator)
    others = [prepared(accelerator) for _ in range(models - 1)]
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for group in (*optimizer.param_groups, *theirs.param_groups):
        group["weight_decay"] = 0.1
    for step in range(3):
        for model in (engine.module, plain):
            model.blocks[1].requires_grad_(step == 0)
        accelerator.backward(squared(engine, step) + sum(squared(other) for other, _ in others))
        squared(plain, step).backward()
        for each in (optimizer, theirs, *(mine for _, mine in others)):
            each.step()
        for each in (optimizer, theirs, *(mine for _, mine in others)):
            each.zero_grad(set_to_none=step == 1)
    assert_same_weights(engine.module, plain)


def test_one_model_of_a_script_that_leaves_steps_to_its_backward() -> None:
    """As DeepSpeed allows: the first is made before the next forward. One that overflows is one."""
    accelerator = accelerator_with(fp16={"enabled": True, "loss_scale": 2.0})
    engine, _ = prepared(accelerator)
    for step, factor in enumerate((1.0, 1.0, float("inf"))):
        loss = engine(features(step, 0, 0).half()).float().pow(2).mean() * factor
        assert engine.global_steps == step
        accelerator.backward(loss)
        assert engine.global_steps == (0 if step == 0 else step + 1)
    assert engine.skipped_steps == 1


def test_backwards_inside_no_sync_add_up() -> None:
    accelerator = accelerator_with(clip=0.0)
    engine, optimizer = prepared(accelerator)
    plain = stack()
    for rank in range(3):
        with accelerator.no_sync(engine) if rank < 2 else nullcontext():
            accelerator.backward(squared(engine, rank=rank))
        # Accelerate divides by gradient_accumulation_steps
        (squared(plain, rank=rank) / 2).backward()
        assert engine.global_steps == 0
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_weights(engine.module, plain)


@in_turn("stage", range(4))
def test_a_model_that_drops_the_gradients_of_a_due_step(stage: int) -> None:
    """``model.zero_grad()`` in place of a step: the next window is as long as any."""
    forget()
    accelerator = accelerator_with(0.0, stage)
    engine, optimizer = prepared(accelerator)
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for at in range(6):  # in several processes accumulate itself enters no_sync
        within = nullcontext() if at % 2 else engine.no_sync()
        with accelerator.accumulate(engine), within:
            accelerator.backward(squared(engine, at))
            (squared(plain, at) / 2).backward()
            if at == 3:
                engine.zero_grad()
                plain.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        if at % 2:
            theirs.step()
            theirs.zero_grad()
        assert engine.held_micro_batches == (at + 1) % 2
    assert engine.global_steps == 2
    with hf_zero.GatheredParameters(list(engine.module.parameters())):
        assert_same_weights(engine.module, plain)


def test_two_models_step_and_forget_when_their_optimizers_are_told() -> None:
    accelerator = accelerator_with()
    (one, of_one), (two, of_two) = prepared(accelerator), prepared(accelerator)
    assert isinstance(accelerator.deepspeed_engine_wrapped, EngineSteps)
    accelerator.backward(loss_of(one, two))
    assert (one.global_steps, two.global_steps) == (0, 0)
    assert one.gradient_norm() == two.gradient_norm() > 0.0
    of_two.step()
    assert (one.global_steps, two.global_steps) == (0, 1)
    of_one.zero_grad()
    assert one.gradient_norm() == 0.0
    accelerator.backward(loss_of(one))
    of_one.step()
    assert (one.global_steps, two.global_steps) == (1, 1)
    # the end of all of them
    accelerator.free_memory()
    assert one.bound is None and two.bound is None
    assert accelerator.deepspeed_engine_wrapped is None
    engine, optimizer = prepared(accelerator)
    accelerator.backward(loss_of(engine))
    optimizer.step()
    assert engine.global_steps == 1


@in_turn("models", [1, 2])
def test_the_step_of_an_engine_that_was_destroyed_is_no_step_of_another(models: int) -> None:
    forget()
    accelerator = accelerator_with()
    former, of_former = prepared(accelerator)
    former.destroy()
    pairs = [prepared(accelerator) for _ in range(models)]
    engines = [engine for engine, _ in pairs]
    accelerator.backward(loss_of(*engines))
    with pytest.raises(PartitionError, match=r"SGD\.step\(\): no engine that this"):
        of_former.step()
    assert [engine.global_steps for engine in engines] == [0] * models
    for _, optimizer in pairs:
        optimizer.step()
    assert [engine.global_steps for engine in engines] == [1] * models


def test_a_scheduler_of_torch_and_the_end_of_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerator_with()
    (one, of_one), (two, _) = prepared(accelerator), prepared(accelerator)
    schedule = torch.optim.lr_scheduler.StepLR(of_one, 1, gamma=0.5)
    accelerator.backward(loss_of(one))
    of_one.step()
    schedule.step()
    assert one.global_steps == 1 and one.get_lr() == [0.05]

    def fail() -> None:
        raise RuntimeError("no answer from rank 1")

    monkeypatch.setattr(one, "destroy", fail)
    with pytest.raises(RuntimeError, match="rank 1"):
        accelerator.free_memory()
    assert two.destroyed


def test_inside_a_window_nothing_steps_and_nothing_is_forgotten() -> None:
    accelerator = accelerator_with()
    (one, of_one), (two, of_two) = prepared(accelerator), prepared(accelerator)
    norms = []
    for micro in range(2):
        with accelerator.accumulate(one, two):
            accelerator.backward(loss_of(one, two))
            norms.append(accelerator.clip_grad_norm_(two.parameters(), 1.0))
            for optimizer in (of_one, of_two):
                optimizer.step()
                optimizer.zero_grad()
        assert [engine.global_steps for engine in (one, two)] == [micro, micro]
    alone = stack()
    loss_of(alone).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    assert norms == [None, pytest.approx(norm)]


@in_turn("clip", [None, 0.5])
def test_a_norm_over_several_models_is_refused(clip: float | None) -> None:
    """Each engine would clip alone; frozen models and weights of the loss take no part."""
    forget()
    accelerator = accelerator_with(clip)
    teacher, alone, scale = stack().requires_grad_(False), stack(), nn.Parameter(torch.ones(()))
    model = stack()
    engine, of_one = accelerator.prepare(
        model, torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    )
    two, of_two = prepared(accelerator)
    for step in range(2):
        accelerator.backward(loss_of(engine, two) * scale, retain_graph=step == 0)
    before = [parameter.detach().clone() for parameter in two.parameters()]
    for others in (two, alone):
        squared(alone).backward()
        with pytest.raises(PartitionError, match="several models"):
            accelerator.clip_grad_norm_([*engine.parameters(), *others.parameters()], 0.5)
    alone.zero_grad()
    rest = [*teacher.parameters(), *alone.parameters(), scale]
    norms = [accelerator.clip_grad_norm_([*engine.parameters(), *rest], 0.5)]
    norms.append(accelerator.clip_grad_norm_(two.parameters(), 0.5))
    assert all(float(norm) > 0.5 for norm in norms)
    of_one.step()
    of_two.step()
    moved = [(after.detach() - was).norm() for after, was in zip(two.parameters(), before)]
    assert float(torch.stack(moved).norm()) == pytest.approx(0.1 * 0.5, rel=1e-5)


@in_turn("stage", range(4))
def test_clipping_by_the_groups_of_the_optimizer_and_of_a_model_without_an_engine(
    stage: int,
) -> None:
    """The groups have this rank's members; a plain model is clipped as by torch."""
    forget()
    accelerator = accelerator_with(None, stage)
    engine, optimizer = prepared(accelerator)
    plain, alone = stack(), stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        accelerator.backward(2 * squared(engine, step))
        squared(plain, step).backward()
        squared(alone, step).backward()
        members = [member for group in optimizer.param_groups for member in group["params"]]
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for tensors in (members, alone.parameters()):
            norm = accelerator.clip_grad_norm_(tensors, 0.05)
            assert norm is not None and float(norm) == pytest.approx(float(want), rel=1e-5)
        for ours, clipped in zip(alone.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, clipped.grad)
        for stepping in (optimizer, theirs):
            stepping.step()
            stepping.zero_grad()
        alone.load_state_dict(plain.state_dict())
        alone.zero_grad()
        with hf_zero.GatheredParameters(list(engine.parameters())):
            assert_same_weights(engine.module, plain)


def test_clipping_in_a_script_without_zero() -> None:
    forget()
    accelerator = Accelerator(cpu=True)
    model = stack()
    model = accelerator.prepare(model)
    accelerator.backward(squared(model))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
    assert norm is not None and float(norm) > 0.05


@in_turn(("models", "of_model"), [(n, m) for n in (1, 2) for m in (False, True)])
def test_the_norm_of_gradients_that_were_dropped_is_zero(models: int, of_model: bool) -> None:
    forget()
    accelerator = accelerator_with(None)
    (engine, optimizer), *_ = [prepared(accelerator) for _ in range(models)]
    for drops in (False, True):
        accelerator.backward(squared(engine))
        if drops:
            (engine if of_model else optimizer).zero_grad()
        norm = accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        assert norm is not None and (float(norm) == 0.0) == drops
        if not drops:
            optimizer.step()


@in_turn("clip", [2.0, 0.5])
def test_a_limit_that_the_engine_does_not_use_is_told_once(clip: float, heard: list[str]) -> None:
    forget()
    accelerator = accelerator_with(clip)
    engine, optimizer = prepared(accelerator)
    for _ in range(2):
        accelerator.backward(loss_of(engine))
        norm = accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        assert norm == engine.get_global_grad_norm()
        optimizer.step()
    told = [message for message in heard if "clip_grad_norm_" in message]
    assert len(told) == 1
    assert "at gradient_clipping = 2 of the configuration" in told[0]
    assert "write gradient_clipping: 0.5" in told[0]


def with_limits(engine: Any, backward: Any, clip: Any, optimizer: Any, limits: Any) -> list[Any]:
    norms = []
    for step, limit in enumerate(limits):
        backward(squared(engine, step))
        norms.append(float(clip(engine.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def plain_with_limits(limits: list[float]) -> tuple[nn.Module, list[Any]]:
    plain = stack()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    clip = torch.nn.utils.clip_grad_norm_
    return plain, with_limits(plain, lambda loss: (loss / 2).backward(), clip, optimizer, limits)


@in_turn(("stage", "numbers"), [(s, n) for s in (1, 3) for n in ([3] * 6, [2, 2, 3, 3, 3, 3])])
def test_an_accumulation_that_the_script_sets(stage: int, numbers: list[int]) -> None:
    """Before the ``prepare`` of a second engine, or after a step."""
    forget()
    accelerator = accelerator_with(0.0, stage)
    prepared(accelerator)
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = numbers[0]
    engine, optimizer = prepared(accelerator)
    assert accelerator.gradient_accumulation_steps == numbers[0]
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    steps = 0
    for micro_batch, number in enumerate(numbers):
        accelerator.gradient_accumulation_steps = number
        with accelerator.accumulate(engine):
            accelerator.backward(squared(engine, micro_batch))
            optimizer.step()
            optimizer.zero_grad()
        (squared(plain, micro_batch) / number).backward()
        if (micro_batch + 1) % number == 0:
            theirs.step()
            theirs.zero_grad()
            steps += 1
    assert engine.global_steps == steps
    engine.destroy(gather=True)
    assert_same_weights(engine.module, plain)


def test_an_accumulation_that_the_script_sets_for_two_models() -> None:
    forget()
    accelerator = accelerator_with()
    engines = [prepared(accelerator)[0] for _ in range(2)]
    accelerator.gradient_accumulation_steps = 4
    accelerator.backward(loss_of(*engines))
    assert [engine.gradient_accumulation_steps() for engine in engines] == [4, 4]


def test_an_accumulation_that_the_script_sets_inside_a_window_is_refused() -> None:
    forget()
    accelerator = accelerator_with()
    engine, _ = prepared(accelerator)
    with accelerator.accumulate(engine):
        accelerator.backward(squared(engine))
    accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ConfigError, match="gradient_accumulation_steps = 4"):
        accelerator.backward(squared(engine))


@in_turn(
    ("stage", "written", "limits"),
    [
        (3, {"gradient_clipping": "auto"}, [0.05, 0.3, 0.1]),
        (1, {"gradient_clipping": 0}, [0.05, 0.3, 0.1]),
        (0, {}, [float("inf")] * 3),
    ],
)
def test_a_limit_that_the_configuration_leaves_open_is_the_scripts(
    stage: int, written: dict[str, Any], limits: list[float], heard: list[str]
) -> None:
    forget()
    accelerator = accelerator_with(clip=None, stage=stage, **written)
    engine, optimizer = prepared(accelerator)
    plain, want = plain_with_limits(limits)
    arguments = (accelerator.backward, accelerator.clip_grad_norm_, optimizer, limits)
    assert with_limits(engine, *arguments) == pytest.approx(want, rel=1e-5)
    assert engine.global_steps == len(limits)
    engine.destroy(gather=True)
    assert_same_weights(engine.module, plain)
    assert not [words for words in heard if "clip_grad_norm_" in words or "clipped at" in words]


def test_a_limit_that_is_left_open_is_the_scripts_for_later_engines_too() -> None:
    """After one that ended, and beside another: Accelerate fills the key in its configuration."""
    accelerator = accelerator_with(None, gradient_clipping="auto")
    prepared(accelerator)
    accelerator.free_memory()
    limits = [0.05, 0.3]
    plain, want = plain_with_limits(limits)
    for _ in range(2):
        engine, optimizer = prepared(accelerator)
        arguments = (accelerator.backward, accelerator.clip_grad_norm_, optimizer, limits)
        assert with_limits(engine, *arguments) == pytest.approx(want, rel=1e-5)
        assert_same_weights(engine.module, plain)


def test_a_limit_that_is_written_between_engines_is_that_of_the_later_ones(
    heard: list[str],
) -> None:
    forget()
    accelerator = accelerator_with(None, gradient_clipping="auto")
    first, _ = prepared(accelerator)
    accelerator.free_memory()
    accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.5
    engine, optimizer = prepared(accelerator)
    assert (first.max_norm, engine.max_norm) == (1.0, 0.5)
    accelerator.backward(squared(engine))
    accelerator.clip_grad_norm_(engine.parameters(), 0.3)
    optimizer.step()
    assert (engine.global_steps, engine.max_norm) == (1, 0.5)
    assert any("write gradient_clipping: 0.3" in message for message in heard)


def test_a_limit_that_the_script_has_named_is_known_beside_a_second_engine(
    heard: list[str],
) -> None:
    """Its step without clipping is unclipped, as in torch, after the ``prepare`` of another."""
    forget()
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    plain, _ = plain_with_limits([0.05])
    with_limits(engine, accelerator.backward, accelerator.clip_grad_norm_, optimizer, [0.05])
    prepared(accelerator)
    accelerator.backward(squared(engine, 1))
    optimizer.step()
    (squared(plain, 1) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_weights(engine.module, plain)
    assert not [message for message in heard if "gradients are clipped" in message]


@in_turn(
    ("stage", "gradients", "mode"),
    [(s, g, m) for s in (1, 3) for g, m in ((False, True), (True, False), (True, True))],
)
def test_a_forward_between_a_backward_and_its_limit(
    stage: int, gradients: bool, mode: bool
) -> None:
    """It changes nothing, unless it has gradients, in training mode, before the script has first
    called ``optimizer.step()``: that step is made before it, and the clipping is refused.
    """
    forget()
    accelerator = accelerator_with(None, stage)
    engine, optimizer = prepared(accelerator)

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        engine.train(mode)
        with torch.set_grad_enabled(gradients):
            engine(features(0, 0, 0))
        engine.train()

    limits = [0.05, 0.3, 0.1]
    plain, want = plain_with_limits(limits)
    arguments = engine, backward, accelerator.clip_grad_norm_, optimizer, limits
    if gradients and mode:
        for refused in (lambda: with_limits(*arguments), optimizer.step):
            with pytest.raises(PartitionError, match=r"with torch\.no_grad\(\)"):
                refused()
        return
    assert with_limits(*arguments) == pytest.approx(want, rel=1e-5)
    assert engine.global_steps == 3
    engine.destroy(gather=True)
    assert_same_weights(engine.module, plain)


def test_a_second_limit_and_a_write_to_a_gradient_act_on_this_step() -> None:
    """Clipping acts on clipped gradients, which are read and written, as in torch."""
    forget()
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        accelerator.backward(squared(engine, step))
        (squared(plain, step) / 2).backward()
        for limit in (0.3, 0.05):
            norm = accelerator.clip_grad_norm_(engine.parameters(), limit)
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            assert float(norm) == pytest.approx(float(want), rel=1e-5)
        grad = hf_zero.safe_get_full_grad(engine.module.head.weight)
        torch.testing.assert_close(grad, plain.head.weight.grad)
        hf_zero.safe_set_full_grad(engine.module.head.weight, grad * 0.5)
        plain.head.weight.grad.mul_(0.5)
        with pytest.raises(PartitionError, match="safe_get_full_grad"):
            _ = engine.module.head.weight.grad
        if step == 1:  # before the first optimizer.step() the forward would be refused
            loss = squared(engine, step)
            with pytest.raises(PartitionError, match="after clip_grad_norm_"):
                accelerator.backward(loss)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    assert_same_weights(engine.module, plain)


def test_the_limit_of_the_configuration_clips_where_the_script_names_it() -> None:
    """What is written after the clipping is not clipped again, as in torch."""
    accelerator = accelerator_with(0.05)
    engine, optimizer = prepared(accelerator)
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        accelerator.backward(squared(engine, step))
        (squared(plain, step) / 2).backward()
        accelerator.clip_grad_norm_(engine.parameters(), 0.05)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        grad = hf_zero.safe_get_full_grad(engine.module.head.weight)
        torch.testing.assert_close(grad, plain.head.weight.grad)
        hf_zero.safe_set_full_grad(engine.module.head.weight, grad * 8)
        plain.head.weight.grad.mul_(8)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    assert_same_weights(engine.module, plain)


def test_a_script_that_clips_only_sometimes_loses_no_last_step() -> None:
    """It calls no ``optimizer.step()``, as DeepSpeed allows."""
    forget()
    accelerator = accelerator_with(None)
    engine, _ = prepared(accelerator)
    for step in range(5):
        accelerator.backward(squared(engine, step))
        if step in (0, 3):
            accelerator.clip_grad_norm_(engine.parameters(), 0.3)
    assert engine.global_steps == 5


@in_turn("saves", [False, True])
def test_the_last_step_of_a_script_that_clips_all_others_is_in_what_it_saves(
    saves: bool, tmp_path: Path
) -> None:
    forget()
    accelerator = accelerator_with(None, stage=2 if saves else 3)
    engine, _ = prepared(accelerator)
    for step in range(3):
        accelerator.backward(squared(engine, step))
        if step < 2:
            accelerator.clip_grad_norm_(engine.parameters(), 0.3)
    assert engine.global_steps == 2
    accelerator.save_state(str(tmp_path)) if saves else accelerator.get_state_dict(engine)
    assert engine.global_steps == 3


def test_a_save_between_a_backward_and_its_step_leaves_the_step_to_the_script() -> None:
    forget()
    accelerator = accelerator_with(None, stage=3)
    engine, optimizer = prepared(accelerator)
    for step, limit in enumerate([0.3, 0.1]):
        accelerator.backward(squared(engine, step))
        accelerator.get_state_dict(engine)
        assert engine.global_steps == step
        accelerator.clip_grad_norm_(engine.parameters(), limit)
        optimizer.step()
    assert (engine.global_steps, engine.max_norm) == (2, 0.1)


@in_turn("stage", [2, 3])
def test_an_unwrapped_model_has_the_state_dict_of_its_engine(stage: int) -> None:
    forget()
    accelerator = accelerator_with(None, stage)
    engine, _ = prepared(accelerator)
    whole = accelerator.get_state_dict(engine)
    unwrapped = accelerator.get_state_dict(accelerator.unwrap_model(engine))
    assert unwrapped.keys() == whole.keys()
    assert all(torch.equal(unwrapped[name], whole[name]) for name in whole)


@in_turn(("configured", "accumulation"), [(c, a) for c in (0.05, None) for a in (1, 2)])
def test_a_load_between_a_backward_and_its_step(
    configured: float | None, accumulation: int, tmp_path: Path
) -> None:
    """It drops that step, with the gradients of the window, which plain Accelerate keeps: as plain
    PyTorch that restores its weights and calls ``zero_grad()``.
    """
    forget()
    accelerator = accelerator_with(configured)
    accelerator.gradient_accumulation_steps = accumulation
    engine, optimizer = prepared(accelerator)
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses, want = [], []
    kept: dict[str, torch.Tensor] = {}
    for step in range(5):
        for micro in range(accumulation):
            batch = step * accumulation + micro
            with accelerator.accumulate(engine):
                loss = squared(engine, batch)
                accelerator.backward(loss)
                losses.append(loss.item())
            loss = squared(plain, batch)
            (loss / accumulation).backward()
            want.append(loss.item())
        if step == 2:
            accelerator.load_state(str(tmp_path))
            plain.load_state_dict(kept)
        else:
            if configured is None:
                accelerator.clip_grad_norm_(engine.parameters(), 0.05)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            theirs.step()
        theirs.zero_grad()
        optimizer.zero_grad()
        if step == 0:
            accelerator.save_state(str(tmp_path))
            kept = {name: value.clone() for name, value in plain.state_dict().items()}
    assert losses == pytest.approx(want, rel=1e-5)
    assert engine.global_steps == 3
    assert_same_weights(engine.module, plain)


@in_turn(("models", "trained_before"), [(n, t) for n in (1, 2) for t in (True, False)])
def test_a_step_that_follows_a_load(models: int, trained_before: bool, tmp_path: Path) -> None:
    """It does nothing, once, with or without a backward before the load; after another backward it
    is a step.
    """
    forget()
    accelerator = accelerator_with(0.05)
    accelerator.gradient_accumulation_steps = 1
    pairs = [prepared(accelerator) for _ in range(models)]
    engines = [engine for engine, _ in pairs]
    accelerator.save_state(str(tmp_path))
    plain = stack()

    def step() -> None:
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        if trained_before:
            accelerator.backward(loss_of(*engines))
        accelerator.load_state(str(tmp_path))
        step()
        for engine in engines:
            assert engine.global_steps == 0
            assert_same_weights(engine.module, plain)
    accelerator.load_state(str(tmp_path))
    accelerator.backward(loss_of(*engines))
    step()
    squared(plain).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for engine in engines:
        assert engine.global_steps == 1
        assert_same_weights(engine.module, plain)
    step()  # without a backward
    assert {engine.global_steps for engine in engines} == {1}


def test_limits_act_on_their_steps_again_after_one_forward_too_many() -> None:
    forget()
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    limits, used = [0.5, 0.4, 0.3, 0.2, 0.1], []
    engine.optimizer.register_step_post_hook(lambda *_: used.append(engine.max_norm))
    for step, limit in enumerate(limits):
        accelerator.backward(squared(engine, step))
        if step == 1:
            squared(engine, step)  # with a graph
        accelerator.clip_grad_norm_(engine.parameters(), limit)
        optimizer.step()
    assert used == limits


def updating_in_backward() -> tuple[Accelerator, Engine, torch.optim.Optimizer]:
    zero = {"stage": 2, "update_in_backward": True}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 3}
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=0.0)
    accelerator, model = Accelerator(cpu=True, deepspeed_plugin=plugin), stack()
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert engine.sharded_model.updates_in_backward
    return accelerator, engine, optimizer


def test_a_clipping_that_is_refused_names_no_limit() -> None:
    accelerator, engine, optimizer = updating_in_backward()
    for step in range(2):
        accelerator.backward(squared(engine, step))
        with pytest.raises(PartitionError, match="after"):
            accelerator.clip_grad_norm_(engine.parameters(), 0.5)
        optimizer.step()
    assert engine.global_steps == 2 and engine.max_norm == 0.0


@pytest.mark.parametrize("first", [True, False])
def test_a_metric_after_a_backward_that_updates(first: bool) -> None:
    """The engine refuses it in training mode, as it has the weights after the step."""
    accelerator, engine, optimizer = updating_in_backward()
    plain = stack()
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(2):
        accelerator.backward(squared(engine, step))
        theirs.zero_grad()
        squared(plain, step).backward()
        theirs.step()
        if step == (0 if first else 1):
            with torch.no_grad():
                with pytest.raises(PartitionError, match="Call step"):
                    squared(engine, step)
                engine.eval()
                torch.testing.assert_close(squared(engine, step), squared(plain, step))
                engine.train()
        assert engine.global_steps == step + 1
        optimizer.step()
        assert engine.global_steps == step + 1
    assert_same_weights(engine.module, plain)


def test_a_schedule_beside_a_backward_that_updates() -> None:
    """Accelerate's wrapper steps it after each ``optimizer.step()``, as in plain torch."""

    def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    accelerator, engine, optimizer = updating_in_backward()
    plain = stack()
    theirs = torch.optim.AdamW(plain.parameters())
    wrapped, schedule = accelerator.prepare(schedule_of(optimizer.optimizer)), schedule_of(theirs)
    for step in range(3):
        accelerator.backward(squared(engine, step))
        assert engine.get_lr() == schedule.get_last_lr()
        optimizer.step()
        wrapped.step()
        optimizer.zero_grad()
        squared(plain, step).backward()
        theirs.step()
        schedule.step()
        theirs.zero_grad()
        assert wrapped.get_last_lr() == engine.get_lr() == schedule.get_last_lr()
    assert_same_weights(engine.module, plain)


def test_the_norm_is_read_after_a_backward_that_updates() -> None:
    """As the Trainer does before it logs: a limit of infinity clips nothing."""
    accelerator, engine, optimizer = updating_in_backward()
    plain = stack()
    theirs = torch.optim.AdamW(plain.parameters())
    for step in range(2):
        accelerator.backward(squared(engine, step))
        norm = accelerator.clip_grad_norm_(engine.parameters(), float("inf"))
        optimizer.step()
        squared(plain, step).backward()
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
        theirs.step()
        theirs.zero_grad()
        assert float(norm) == pytest.approx(float(want), rel=1e-5)
    assert_same_weights(engine.module, plain)


@pytest.mark.parametrize("configured", [0.3, None])
def test_settings_between_a_backward_and_its_step_act_on_it(
    configured: float | None, heard: list[str]
) -> None:
    forget()
    heard.clear()
    accelerator = accelerator_with(configured)
    engine, optimizer = prepared(accelerator)
    plain = stack()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        accelerator.backward(squared(engine, step))
        (squared(plain, step) / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), configured or 1.0)
        theirs.param_groups[0]["lr"] = 0.4 / (1 + step)
        optimizer.param_groups[0]["lr"] = 0.4 / (1 + step)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        theirs.param_groups[0]["lr"] = 0.4 / (1 + step)
    assert_same_weights(engine.module, plain)
    assert not [message for message in heard if "a new lr" in message]


@in_turn("clips, steps", [(True, False), (False, True)])
def test_scripts_that_leave_out_a_call_train_all_the_same(
    clips: bool, steps: bool, heard: list[str]
) -> None:
    """DeepSpeed allows it; a step that the script never calls is made before the next forward."""
    forget()
    heard.clear()
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    for step in range(3):
        accelerator.backward(squared(engine, step))
        if clips:
            accelerator.clip_grad_norm_(engine.parameters(), 0.05)
        if steps:
            optimizer.step()
    engine(features(3, 0, 0))
    plain, _ = plain_with_limits([0.05 if clips else 1.0] * 3)  # DeepSpeed's default
    assert engine.global_steps == 3
    told = [message for message in heard if "gradients are clipped to a norm of 1: " in message]
    assert len(told) == (not clips) and all("gradient_clipping: 0.0" in each for each in told)
    assert_same_weights(engine.module, plain)


@pytest.mark.parametrize("none", [((None,), {}), ((), {"closure": None})])
def test_a_closure_of_none_is_none(none: tuple[tuple[None, ...], dict[str, None]]) -> None:
    """The second step has no limit: the engine must not make it with that of the first."""
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    for number, limit in enumerate((0.05, 0.0)):
        accelerator.backward(squared(engine, number))
        if limit:
            accelerator.clip_grad_norm_(engine.parameters(), limit)
        optimizer.step(*none[0], **none[1])
        optimizer.zero_grad()
    engine(features(2, 0, 0))
    plain, _ = plain_with_limits([0.05, math.inf])
    assert engine.global_steps == 2
    assert_same_weights(engine.module, plain)


def test_what_is_refused() -> None:
    accelerator = accelerator_with(None)
    assert accelerator.clip_grad_norm_(stack().parameters(), 0.5) is None  # of no engine
    engine, optimizer = prepared(accelerator)
    accelerator.backward(loss_of(engine))
    with pytest.raises(PartitionError, match=r"without \d+ of the \d+ that the engine trains"):
        accelerator.clip_grad_norm_(list(engine.parameters())[1:], 0.5)
    with pytest.raises(PartitionError, match=r"clip_grad_norm_\(norm_type=inf\)"):
        accelerator.clip_grad_norm_(engine.parameters(), 1.0, norm_type=float("inf"))
    with pytest.raises(PartitionError, match=r"step\(closure\)"):
        optimizer.step(lambda: torch.zeros(()))
    optimizer.step()
    assert engine.global_steps == 1  # the refused call has left the step to this one
    (_, of_one), (_, of_two) = prepared(accelerator), prepared(accelerator)
    for optimizer in (of_one, of_two):
        with pytest.raises(PartitionError, match=r"step\(closure\)"):
            optimizer.step(lambda: torch.zeros(()))
    forget()
    model = stack()
    optimizers = [kind(model.parameters(), lr=0.1) for kind in (torch.optim.AdamW, torch.optim.SGD)]
    with pytest.raises(ConfigError, match=r"got 2 optimizers \(AdamW, SGD\)"):
        accelerator_with(None).prepare(model, *optimizers)


def test_a_backward_that_accelerate_does_not_see() -> None:
    accelerator = accelerator_with(None)
    engine, optimizer = prepared(accelerator)
    squared(engine).backward()
    with pytest.raises(PartitionError, match=r"call accelerator.backward\(loss\) in place of loss"):
        optimizer.step()
    engine.restart_window()
    accelerator.backward(squared(engine))
    optimizer.step()
    assert engine.global_steps == 1
    with accelerator.no_sync(engine):
        accelerator.backward(squared(engine))
    optimizer.step()
    optimizer.step()  # a second call is no backward
    squared(engine).backward()
    with pytest.raises(PartitionError, match="nothing would be trained"):
        optimizer.step()
