"""A pipeline on two ranks of the device: ``python -m tests.late.pipelines MODE SCHEDULE …``, with
RANK and so on set.

One line of JSON a schedule: the worst difference of its losses from the plain loop's, and the
reports.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.late import device, training

import hf_zero  # isort: skip
from tests.parallel import pipelines  # isort: skip

MICROS, STEPS = 4, pipelines.STEPS
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # stages of each rank


def train(schedule: str) -> list[float]:
    """The losses of a pipeline of tied layers; reports are left to be read."""
    hf_zero.init_distributed()
    module = pipelines.pipeline(2, 2, base_seed=1234, stages_per_rank=SCHEDULES[schedule])
    optimizer = {"lr": pipelines.LR, "momentum": pipelines.MOMENTUM}
    config = pipelines.config(
        MICROS,
        1,
        optimizer={"type": "SGD", "params": optimizer},
        pipeline={"schedule": schedule},
        kernels="off",
    )
    engine, *_ = hf_zero.initialize(model=module, config=config)
    data = iter(pipelines.batches(MICROS * STEPS))
    try:
        losses = [engine.train_batch(data) for _ in range(STEPS)]
        return [float(loss) for loss in losses]
    finally:
        engine.destroy()
        device.synchronize_all()


def plain() -> list[float]:
    """The losses of a plain loop over the same layers, on the CPU."""
    windows = list(pipelines.windows_of(pipelines.batches(MICROS * STEPS), MICROS, 1))

    def loss(model: Any, batch: Any) -> Any:
        return pipelines.loss_of(model(batch[0]), batch[1])

    told, _ = pipelines.plain(pipelines.Whole(), windows, loss)
    return [loss for loss, _ in told]


def main() -> None:
    rank, expected = device.begin(sys.argv[1]), plain()
    for schedule in sys.argv[2:]:
        device.forget()
        worst = training.worst(train(schedule), expected)
        device.tell(rank=rank, job=schedule, worst=worst, reports=device.reports())


if __name__ == "__main__":
    main()
