"""Schedules of pipelines, played by stages that only do what they are told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import deepspeed

from tests.helpers.cells import in_one_item

schedule = deepspeed.runtime.pipe.schedule
SHAPES = [(1, 1), (4, 1), (1, 3), (3, 3), (8, 3), (5, 2)]  # micro-batches, stages


class Stage:
    """One stage with its buffers; what it holds of a micro-batch is the work done on it."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.buffers: dict[int, str] = {}
        self.loaded = 0
        self.done: Counter[str] = Counter()

    def sent(self, order: Any) -> str:
        wanted = "forward" if type(order) is schedule.SendActivation else "backward"
        number, work = self.buffers[order.buffer_id].split()
        assert work == wanted
        return number

    def do(self, order: Any, inbox: dict[type, list[str]]) -> None:
        kind = type(order)
        self.done[order.name] += 1
        if not isinstance(order, schedule.BufferOpInstruction):
            return
        at = order.buffer_id
        assert 0 <= at < self.plan.num_pipe_buffers()
        held = self.buffers.get(at, "")
        if kind is schedule.RecvActivation:
            assert not held or held.endswith(self.last_work)
            self.buffers[at] = f"{inbox[schedule.SendActivation].pop(0)} in"
        elif kind is schedule.LoadMicroBatch:
            if self.plan.is_first_stage:
                assert not held or held.endswith(self.last_work)
                self.buffers[at] = f"{self.loaded} in"
            assert self.buffers[at] == f"{self.loaded} in"
            self.loaded += 1
        elif kind is schedule.RecvGrad:
            assert held == f"{inbox[schedule.SendGrad].pop(0)} forward"
        elif kind is schedule.ForwardPass:
            assert held.endswith("in")
            self.buffers[at] = held.replace("in", "forward")
        elif kind is schedule.BackwardPass:
            assert held.endswith("forward")
            self.buffers[at] = held.replace("forward", "backward")

    @property
    def last_work(self) -> str:
        """After which a buffer is free."""
        return "backward" if isinstance(self.plan, schedule.TrainSchedule) else "forward"


def played(kind: Any, micro_batches: int, stages: int) -> list[Stage]:
    plans = [kind(micro_batches, stages, stage) for stage in range(stages)]
    played = [Stage(plan) for plan in plans]
    for step in zip(*plans, strict=True):
        inboxes: list[dict[type, list[str]]] = [
            {schedule.SendActivation: [], schedule.SendGrad: []} for _ in plans
        ]
        for place, (stage, orders) in enumerate(zip(played, step)):
            for order in orders:
                for sends, to in ((schedule.SendActivation, 1), (schedule.SendGrad, -1)):
                    if type(order) is sends:
                        inboxes[place + to][sends].append(stage.sent(order))
        for stage, orders, inbox in zip(played, step, inboxes):
            for order in orders:
                stage.do(order, inbox)
            assert not any(inbox.values())  # all that was sent was received in the same step
    return played


@in_one_item(SHAPES)
def test_training_by_its_schedule(shape: tuple[int, int]) -> None:
    micro_batches, stages = shape
    for place, stage in enumerate(played(schedule.TrainSchedule, micro_batches, stages)):
        assert stage.done["ForwardPass"] == stage.done["BackwardPass"] == micro_batches
        assert stage.done["OptimizerStep"] == stage.done["ReduceGrads"] == 1
        assert stage.done["ReduceTiedGrads"] == 1
        assert stage.done["SendActivation"] == micro_batches * (place < stages - 1)
        assert stage.done["SendGrad"] == micro_batches * (place > 0)
        plan = stage.plan
        assert len(list(plan)) == 2 * (micro_batches + stages - 1)
        assert (plan.is_first_stage, plan.is_last_stage) == (place == 0, place == stages - 1)
        assert (plan.stage, plan.num_stages) == (place, stages)
        assert plan.num_micro_batches == micro_batches


@in_one_item(SHAPES)
def test_forwards_by_their_schedule(shape: tuple[int, int]) -> None:
    micro_batches, stages = shape
    for stage in played(schedule.InferenceSchedule, micro_batches, stages):
        assert stage.done["ForwardPass"] == micro_batches
        assert not stage.done["BackwardPass"] and not stage.done["OptimizerStep"]
        assert len(list(stage.plan)) == micro_batches + stages - 1


def test_instructions_show_their_arguments() -> None:
    assert repr(schedule.SendGrad(1)) == "SendGrad(buffer_id=1)"
    assert schedule.PipeInstruction(place=3).place == 3
    assert schedule.PipeSchedule.num_pipe_buffers(schedule.TrainSchedule(2, 1, 0)) == 2
