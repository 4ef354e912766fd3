"""Pipelines whose ranks part ways, on gloo processes: no stage trains on the wrong pairs."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.distributed import stage_messages
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats
from hf_zero.distributed.hang_detection import HangDetection
from hf_zero.distributed.stage_messages import StageMessages
from hf_zero.errors import PartitionError, RankMismatchError
from tests.helpers.cells import in_one_item
from tests.helpers.processes import run_processes
from tests.parallel.pipelines import batches, config, pipeline, sgd

MICRO = 2
FAILS = 5  # a step in which no rank compares batches with the others
ALIKE = "After an exception every rank must go on alike"
# the rank that catches an exception, in which micro-batch; whether it evaluates then; and what all
# ranks are told: nothing if they go on alike, because all messages of the run have arrived
CASES = {
    "the first stage fails": (0, 0, False, ALIKE),
    "the first stage fails before it has sent": (0, 1, False, "forward, left by an exception"),
    "the last stage fails": (1, 0, False, ALIKE),
    "the last stage fails at the end of an evaluation": (1, 1, True, ""),
}


def _parts(rank, case):
    """The error of a rank after one has caught an exception, and how many steps it has run."""
    fails, micro_batch, evaluates, _ = CASES[case]
    module = pipeline(2, 2)
    engine, _, _, _ = hf_zero.initialize(
        model=module, config=config(MICRO, 0, timeout=30.0), optimizer=sgd
    )
    real, now = engine._run_forward, [0]

    def run_forward(stage, number, inputs):
        if (rank, now[0], number) == (fails, FAILS, micro_batch):
            raise ArithmeticError("one bad micro-batch")
        return real(stage, number, inputs)

    for stage in engine.pipeline_run.stages:
        stage._forward = run_forward
    data = batches(MICRO, seed=3) * 9
    for step in range(9):
        now[0] = step
        window = data[MICRO * step : MICRO * (step + 1)]
        try:
            if evaluates and step == FAILS:
                engine.eval_batch(iter(window), compute_loss=False)
            else:
                engine.train_batch(iter(window))
        except ArithmeticError:
            assert rank == fails
        except RankMismatchError as error:
            return str(error), engine.global_steps
    return "", engine.global_steps


@in_one_item(CASES)
def test_an_exception_on_one_stage_ends_all(case):
    """At the next run, before activations meet other labels."""
    words = CASES[case][-1]
    for text, steps in run_processes(2, _parts, case, timeout=120.0):
        assert words in text and bool(words) == bool(text), text
        assert "timeout" not in text and "within" not in text, text
        assert steps <= FAILS if words else steps == 8


def messages(monkeypatch, rank):
    """The messages of a rank of two, of which no process exists."""
    dim: Any = SimpleNamespace(
        stats=CollectiveStats(),
        gathers=CollectiveLog("gathers", (0, 1), 9.0),
        reductions=CollectiveLog("reductions", (0, 1), 9.0),
    )
    monkeypatch.setattr(stage_messages, "serving_backend", lambda device: "gloo")
    monkeypatch.setattr(stage_messages, "group_backend", lambda device: "gloo")
    detection, on = HangDetection(), torch.device("cpu")
    return StageMessages((0, 1), rank, None, on, dim, detection, "engine 1", 9.0)


def test_a_message_of_another_run(monkeypatch):
    headers = deque[list[int]]()
    monkeypatch.setattr(StageMessages, "announce", lambda self, peer, sent: headers.append(sent))
    monkeypatch.setattr(StageMessages, "announced_by", lambda self, *_: headers.popleft())
    monkeypatch.setattr(StageMessages, "_operation", lambda *_: [])
    first, second = messages(monkeypatch, 0), messages(monkeypatch, 1)
    with first.running(training=False):
        first.send(1, 0, 1, (torch.ones(2),), torch.Tensor)
        first.send(1, 0, 0, (torch.ones(2),), torch.Tensor)
    with second.running(training=False):
        second.receive(0, 0, 1)
    with second.running(training=True), pytest.raises(RankMismatchError) as raised:
        second.receive(0, 0, 0)
    assert str(raised.value).startswith(
        "rank 1 awaits micro-batch 0 of stage 0 in run 2 of the pipeline (training), and rank 0 "
        "has sent micro-batch 0 of stage 0 in run 1 of the pipeline (evaluation): an exception has "
    )


@in_one_item(["one work a message", "one for the batch"])
def test_a_finished_batch_of_messages_is_not_left_by_an_exception(works):
    """Whether the backend has one work for a message, or, as NCCL, one for the batch."""
    with pytest.MonkeyPatch.context() as patch:
        here = messages(patch, 0)
        patch.setattr(dist, "P2POp", lambda *_, **__: SimpleNamespace())
        count = 2 if works == "one work a message" else 1
        launched = [SimpleNamespace(wait=lambda: None)] * count
        gradient = torch.ones(2)
        with pytest.raises(ArithmeticError), here.running(training=True):
            sent = here.send_gradients(1, 0, 0, [gradient])
            received = here.receive_gradients(1, 0, 0, [gradient])[1]
            for work in here.launch(lambda *_: launched, [*sent, *received]):
                work.wait()
            raise ArithmeticError("one bad micro-batch")
    left = [what for log in here.logs for what in log.recent if what.endswith("by an exception")]
    assert len(here.logs) == 2 and not left


def test_a_dtype_that_no_message_has_is_named():
    complex_numbers = torch.zeros(1, dtype=torch.complex64)
    with pytest.raises(PartitionError, match=r"of torch\.complex64; pass one of .*_as_real"):
        stage_messages._header((complex_numbers,), torch.Tensor)


def test_a_header_says_which_class_its_activations_are_of():
    for kind in stage_messages.PASSED_CLASSES:
        assert stage_messages._announced(stage_messages._header((torch.ones(2),), kind))[2] is kind
