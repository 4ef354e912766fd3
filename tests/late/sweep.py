"""Trains all jobs in one rank of a group: ``python -m tests.late.sweep MODE [JOB ...]``, with RANK
and so on set.

One line of JSON a job: the worst difference of its losses from the plain loop's, and the reports.
"""

from __future__ import annotations

import json
import os
import sys

from tests.late import device, training


def main() -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    mode, _, seed = sys.argv[1].partition(":")
    device.configure(mode, seed=int(seed or 0) + rank, max_us=300, nap=0.2)
    device.only_device(int(os.environ.get("LOCAL_RANK", "0")))
    for job in sys.argv[2:] or training.JOBS:
        device.forget()
        steps = training.steps_of(job)
        losses = training.train(job, steps, rank, world)
        worst = training.worst(losses, training.plain(job, steps, rank, world))
        found = device.reports()
        print(json.dumps({"rank": rank, "job": job, "worst": worst, "reports": found}), flush=True)


if __name__ == "__main__":
    main()
