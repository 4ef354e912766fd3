"""Part 3: tensor, expert, sequence, context and pipeline parallelism, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from tests.nccl.cases import Answers, Case, Figures, Orders, Place, moved, same_orders
from tests.nccl.rows import CPU, named, of_row
from tests.parallel import pipelines
from tests.parallel import test_pipeline_gloo as over_four

MICROS = 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # stages of each of two ranks
OF_FOUR = (
    "2 stages",
    "interleaved, evaluated between steps",
    "4 stages, fewer micro-batches",
    "stage 0, gpipe, recomputed, frozen layers",
)


def windows() -> list[Any]:
    return list(pipelines.windows_of(pipelines.batches(MICROS * pipelines.STEPS), MICROS, 1))


def pipeline(schedule: str) -> Case:
    """A pipeline of tied layers over two ranks: losses, norms and weights."""

    def run(place: Place) -> Any:
        module = pipelines.pipeline(2, 2, base_seed=1234, stages_per_rank=SCHEDULES[schedule])
        keys: dict[str, Any] = {"pipeline": {"schedule": schedule}, "kernels": "off"}
        config = pipelines.config(MICROS, 1, **keys)
        with Orders() as orders:
            engine = hf_zero.initialize(model=module, config=config, optimizer=pipelines.sgd)[0]
            told = []
            for window in windows():
                loss = float(engine.train_batch(iter(window)))
                told.append((loss, engine.get_global_grad_norm()))
            weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            engine.destroy()
        return {"told": told, "weights": moved(weights, CPU), "orders": orders.of}

    def check(answers: Answers, device: torch.device) -> Figures:
        whole = pipelines.Whole()
        want, _ = pipelines.plain(
            whole, windows(), lambda model, batch: pipelines.loss_of(model(batch[0]), batch[1])
        )
        off = 0.0
        for answer in answers:
            assert answer["told"] == answers[0]["told"]  # to the bit, on all ranks
            for name, value in answer["weights"].items():
                right = whole.get_parameter(name)
                assert (value - right).norm() <= 1e-5 * right.norm(), name
        for (loss, norm), (right, of) in zip(answers[0]["told"], want, strict=True):
            assert loss == pytest.approx(right, rel=1e-5) and norm == pytest.approx(of, rel=1e-5)
            off = max(off, abs(loss - right) / abs(right))
        return {"losses_off": off, **same_orders(answers)}

    return Case(f"pipeline, {schedule}, 2 ranks", run, check)


def of_table(name: str) -> Case:
    """A pipeline of the table that gloo processes run, over four ranks."""

    def run(place: Place) -> Any:
        return moved(over_four._train(place.rank, over_four.CASES[name]), CPU)

    def check(answers: Answers, device: torch.device) -> Figures:
        over_four._check([{name: answer} for answer in answers], name)
        return {"steps": pipelines.STEPS}

    return Case(f"pipeline, {name}, 4 ranks", run, check, 4)


TENSOR = named(
    of_row("tensor parallel", 2, ranks=2, readers=1),
    *(of_row("tensor parallel", s) for s in (1, 3)),
)
EXPERT = named(
    *(of_row("expert parallel", stage) for stage in (1, 3)),
    of_row("expert parallel", 2, ranks=4, readers=4),
)
SEQUENCE = named(
    *(of_row("sequence parallel", stage) for stage in (1, 3)),
    of_row("sequence parallel", 2, ranks=4, readers=2),
)
CONTEXT = named(
    *(of_row("context parallel", stage) for stage in (1, 3)),
    of_row("context parallel", 2, ranks=4, readers=2),
)
PIPELINE = named(*map(pipeline, SCHEDULES), *map(of_table, OF_FOUR))
CASES = {**TENSOR, **EXPERT, **SEQUENCE, **CONTEXT, **PIPELINE}
