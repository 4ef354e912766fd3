"""Trains jobs in one rank of a group: ``python -m tests.late.sweep MODE [JOB ...]``, with RANK and
so on set.

One line of JSON a job: the worst difference of its losses from the plain loop's, and the reports.
"""

from __future__ import annotations

import os
import sys

from tests.late import device, training


def main() -> None:
    rank, world = device.begin(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    for job in sys.argv[2:] or training.JOBS:
        device.forget()
        steps = training.steps_of(job)
        losses = training.train(job, steps, rank, world)
        worst = training.worst(losses, training.plain(job, steps, rank, world))
        device.tell(rank=rank, job=job, worst=worst, reports=device.reports())


if __name__ == "__main__":
    main()
