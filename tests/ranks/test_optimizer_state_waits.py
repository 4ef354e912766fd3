"""``optimizer.state`` while an update is under way, or half of one is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_zero.errors import PartitionError
from hf_zero.optim.sub_group_update import Update
from tests.helpers.engines import config_of, start
from tests.helpers.models import features
from tests.helpers.stacks import stack
from tests.helpers.training import Plan, adamw


def opened(**more: Any) -> Any:
    model = stack()
    section = {"stage": 2, "offload_optimizer": {"device": "cpu", **more}}
    return start(model, adamw(model), config_of(2, Plan(), zero_optimization=section))


def backward(engine: Any) -> None:
    engine.backward(engine(features(0, 0, 0)).float().pow(2).mean())


@pytest.mark.parametrize(
    "look",
    [
        len,
        lambda state: state.keys(),
        lambda state: state.popitem(),
        lambda state: state.pop(0, None),
        lambda state: 0 in state,
    ],
    ids=["len", "keys", "popitem", "pop", "in"],
)
def test_whoever_looks_waits_for_the_update(
    look: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, run = threading.Event(), Update.run
    engine = opened()
    backward(engine)
    engine.step()
    engine.updater.finish()

    def held_up(update: Update, *args: Any) -> None:
        assert gate.wait(30)
        run(update, *args)

    monkeypatch.setattr(Update, "run", held_up)
    backward(engine)
    engine.step()
    assert engine.updater.pending
    threading.Timer(0.05, gate.set).start()
    look(engine.optimizer.state)
    assert gate.is_set() and not engine.updater.pending
    engine.destroy()


def test_state_is_not_cleared_when_a_backward_has_used_it_for_a_part() -> None:
    engine = opened(update_in_backward=True)
    for _ in range(2):
        backward(engine)
        engine.step()
    backward(engine)
    assert engine.updater.updated_early
    with pytest.raises(PartitionError, match=r"optimizer\.state\.clear\(\) comes after a backward"):
        engine.optimizer.state.clear()
    engine.step()
    engine.optimizer.state.clear()
    backward(engine)
    engine.step()
    engine.destroy()
