"""The Trainer and signals: one checkpoint and exit code 85, handlers of others, and the key that
switches it off. ``matrix/test_going_on.py`` sends signals to ranks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_zero.integrations import signal_saves
from hf_zero.integrations.checkpoint_folders import trainer_folder_error
from tests.helpers.cells import in_turn
from tests.helpers.plain_process import forget
from tests.helpers.trainers import ROUTES, STEPS, began_at, routed

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


@in_turn("native", [True, False])
def test_sigusr1_that_something_handles_is_left_alone(
    native: bool, tmp_path: Path, handlers: None
) -> None:
    if native:
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.register(signal.SIGUSR1, file=file)
            assert handled_during(routed("ours", 2, tmp_path)) == [True, False]
            faulthandler.unregister(signal.SIGUSR1)
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert handled_during(routed("ours", 2, tmp_path)) == [True, False]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


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


def test_what_is_saved_on_a_signal_can_be_resumed(tmp_path: Path, handlers: None) -> None:
    only = {"save_only_model": True}
    run = routed("stock", 1, tmp_path, callbacks=[Between(terminated)], **only)
    with pytest.raises(SystemExit):
        run.train()
    run.deepspeed.destroy()
    forget()
    again = routed("stock", 1, tmp_path, **only)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2
