"""The Trainer and signals: one checkpoint and exit code 85, handlers of others, and the key that
switches it off. ``matrix/test_going_on.py`` sends signals to ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_zero.integrations import signal_saves
from hf_zero.integrations.checkpoint_folders import trainer_folder_error
from hf_zero.integrations.transformers.stop_callback import LEFT
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget
from tests.helpers.trainers import ROUTES, STEPS, began_at, distance, logged, routed, weights

BOTH = (signal.SIGTERM, signal.SIGUSR1)
OFF = {"checkpoint": {"save_on_signal": False}}
EVERY_EPOCH = {"save_strategy": "epoch", "eval_strategy": "epoch"}


class Between(transformers.TrainerCallback):
    """Runs ``act(step)`` when a step begins."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.on_evaluate = lambda *_, **__: act("evaluation")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(state.global_step)


def terminated(step: Any) -> None:
    """Send SIGTERM in the second step."""
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def handlers() -> Iterator[None]:
    """The default handlers of both signals, which must be back at the end of the test."""
    before = [signal.getsignal(number) for number in BOTH]
    for number in BOTH:
        signal.signal(number, signal.SIG_DFL)
    yield
    assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_DFL] * 2
    for number, handler in zip(BOTH, before, strict=True):
        signal.signal(number, handler)
    forget()


@in_turn("route, stage, number", [*zip(ROUTES, (3, 2, 0), (*BOTH, signal.SIGTERM), strict=True)])
def test_a_signal_saves_once_and_ends_with_85(
    route: str, stage: int, number: int, tmp_path: Path, handlers: None
) -> None:
    """It comes in the second step, twice, and a third time at the end; no evaluation delays it."""
    seen: list[Any] = []

    def act(step: Any) -> None:
        seen.append(step)
        if step == 1:
            for _ in range(2):
                os.kill(os.getpid(), number)

    run = routed(route, stage, tmp_path, callbacks=[Between(act)], **EVERY_EPOCH)
    with pytest.raises(SystemExit) as ended:
        run.train()
    assert ended.value.code == 85 and seen == [0, 1]
    os.kill(os.getpid(), number)  # the process is about to end already
    (folder,) = tmp_path.glob("checkpoint-*")
    assert folder.name == "checkpoint-2" and trainer_folder_error(folder) == ""
    run.deepspeed.destroy()
    forget()
    again = routed(route, stage, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and again.state.global_step == STEPS


def handled_during(run: transformers.Trainer) -> list[bool]:
    """Which signals have another handler than before in the steps of ``run``."""
    found: list[list[bool]] = []
    before = [signal.getsignal(number) for number in BOTH]

    def act(step: Any) -> None:
        found.append([signal.getsignal(n) != b for n, b in zip(BOTH, before, strict=True)])

    run.add_callback(Between(act))
    run.train()
    return found[-1]


@in_turn(
    "config, changes, expected",
    [
        ({}, {}, [True, True]),
        (OFF, {}, [False, False]),
        (OFF, {"enable_jit_checkpoint": True}, [True, True]),
    ],
)
def test_the_key_switches_it_off(
    config: Any, changes: Any, expected: list[bool], tmp_path: Path, handlers: None
) -> None:
    run = routed("stock", 2, tmp_path, config=config, **changes)
    assert handled_during(run) == expected


@in_turn("fails", [False, True])
def test_a_signal_after_the_last_step_acts_when_training_returns(
    fails: bool, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an error ends it, which is then to be seen."""
    sent: list[int] = []

    class AtEnd(transformers.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            monkeypatch.setattr(signal_saves.os, "kill", lambda pid, number: sent.append(number))
            if fails:
                raise RuntimeError("an error of the script's")

    run = routed("ours", 2, tmp_path, callbacks=[AtEnd()])
    if fails:
        with pytest.raises(RuntimeError, match="an error of the script's"):
            run.train()
    else:
        run.train()
    assert sent == ([] if fails else [signal.SIGUSR1])
    assert run.state.global_step == STEPS


class Stopping(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


@in_turn("jit", [True, False])
def test_train_returns_if_jit_or_a_callback_asks_for_it(
    jit: bool, tmp_path: Path, handlers: None
) -> None:
    callbacks = [Between(terminated), *([] if jit else [Stopping()])]
    run = routed("stock", 1, tmp_path, callbacks=callbacks, enable_jit_checkpoint=jit)
    run.train()
    assert run.state.global_step == 2 < STEPS
    (folder,) = tmp_path.glob("checkpoint-*")
    assert folder.name == "checkpoint-2" and trainer_folder_error(folder) == ""
    assert [path.name for path in folder.rglob("*SENTINEL*")] == []


class Dropping(torch.nn.Module):
    """A regression with dropout, whose randomness an evaluation moves on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


def evaluated(folder: Path, callbacks: Any = (), **changes: Any) -> transformers.Trainer:
    """A Trainer of six steps, three in each epoch, that evaluates and saves what ``changes`` say;
    each evaluation finds a better model, or, at so high a rate, a worse one.
    """
    drawn = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in drawn]
    return routed(
        "stock", 2, folder, model=Dropping(), train_dataset=data, eval_dataset=data[:6],
        callbacks=list(callbacks), max_steps=6, per_device_train_batch_size=4,
        metric_for_best_model="loss", **changes,
    )  # fmt: skip


STEPWISE = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.5,
    "lr_scheduler_kwargs": {"patience": 0},
}  # fmt: skip


@in_turn(
    "at, changes",
    [
        (2, {**STEPWISE, **PLATEAU}),
        (3, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
        (6, {**STEPWISE, "load_best_model_at_end": True}),
        (2, {**STEPWISE, "save_strategy": "best"}),
    ],
)
def test_an_evaluation_due_with_the_save_follows_after_the_resume(
    at: int, changes: Any, tmp_path: Path, handlers: None
) -> None:
    """Losses, evaluations and the best model are those of a run without a signal."""

    def act(step: Any) -> None:
        if step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = evaluated(tmp_path / "whole", **changes)
    whole.train()
    whole.deepspeed.destroy()
    forget()
    run = evaluated(tmp_path / "run", [Between(act)], **changes)
    with pytest.raises(SystemExit):
        run.train()
    run.deepspeed.destroy()
    forget()
    newest = f"checkpoint-{at}"
    assert newest in os.listdir(tmp_path / "run")
    assert trainer_folder_error(tmp_path / "run" / newest) == ""
    again = evaluated(tmp_path / "run", **changes)
    again.train(resume_from_checkpoint=True)
    for key in ("loss", "eval_loss", "learning_rate"):
        assert logged(again, key) == logged(whole, key) != [], key
    assert again.state.best_metric == whole.state.best_metric
    assert again.state.best_global_step == whole.state.best_global_step
    assert LEFT not in again.state.stateful_callbacks
    assert distance(weights(again), weights(whole)) == 0.0
