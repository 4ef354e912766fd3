"""A script that torchrun restarts. `--kills` lists for each attempt the point, its count, and the
ranks that kill themselves there. Each rank is a host of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch

import deepspeed  # isort: skip
from hf_zero.checkpoint.memory import saving
from tests.checkpoint.memory.jobs import Kept
from tests.checkpoint.test_engine import train

STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=json.loads, default=[])
    options = parser.parse_args()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.environ["HF_ZERO_HOST"] = "ab"[rank]
    point, number, who = options.kills[attempt] if attempt < len(options.kills) else ("", 0, [])
    seen = [0]

    def reached(name: str) -> None:
        seen[0] += name == point
        if name == point and seen[0] == number and rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    saving.reached = reached
    torch.manual_seed(0)
    setup = Kept(stage=2, more={"every": 2, "folder": None, "job": None})
    (model,) = setup.models()[:1]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=setup.optimizer(model), config=setup.config
    )
    path, _ = engine.load_checkpoint(str(options.out / "disk"))
    saving.reached("loaded")
    with (options.out / f"rows-{rank}.jsonl").open("a") as file:
        row = {"pid": os.getpid(), "from": engine.global_steps, "path": path, "attempt": attempt}
        print(json.dumps(row), file=file, flush=True)
        for step in range(engine.global_steps, STEPS):
            losses = train(engine, rank, range(step, step + 1))
            print(json.dumps({"step": step, "losses": losses}), file=file, flush=True)
    engine.destroy()
    (options.out / f"report-{rank}.json").write_text("{}")


if __name__ == "__main__":
    main()
