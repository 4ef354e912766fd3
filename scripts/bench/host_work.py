"""Python work of a training step on the host: bytecodes, calls and CPU time of its main thread,
for two states of this repository. Counts do not depend on what else the machine does; CPU time is
the least of one step in several runs of both states in turn.

    python scripts/bench/host_work.py BEFORE [AFTER] --stages 0 1 2 3

BEFORE and AFTER are folders with a checkout of each (`git worktree add`); AFTER is this one by
default. Rows go to results/host_work-DATE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
BLOCKS, WIDTH, ROWS = 12, 256, 4
WARM, COUNTED, TIMED = 4, 3, 60  # steps: orders are recorded in the first ones
RUNS = 5  # of each state, in turn


def count(stage: int, accumulation: int) -> None:
    """Print the bytecodes, the calls and the least CPU microseconds of one optimizer step, on one
    of two ranks with a group that sends nothing.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import hf_zero

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    )
    model = nn.ModuleDict({"blocks": nn.ModuleList(model)})
    model.forward = lambda x: _through(model["blocks"], x)  # type: ignore[method-assign]
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]
    x = torch.zeros(ROWS, WIDTH)

    def step() -> None:
        for _ in range(accumulation):
            engine.backward(engine(x).pow(2).mean())
            engine.step()

    for _ in range(WARM):
        step()
    times = []
    for _ in range(TIMED // accumulation):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    found = {"bytecodes": 0, "calls": 0}

    def trace(frame, event, arg):  # type: ignore[no-untyped-def]
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found["bytecodes"] += 1
        elif event == "call":
            found["calls"] += 1
        return trace

    sys.settrace(trace)
    for _ in range(COUNTED):
        step()
    sys.settrace(None)
    counts = {key: value // COUNTED for key, value in found.items()}
    counts["cpu_us"] = round(min(times) * 1e6)
    os.write(1, json.dumps(counts).encode())
    os._exit(0)


def _through(blocks, x):  # type: ignore[no-untyped-def]
    for block in blocks:
        x = x + block(x)
    return x


def counted(tree: Path, stage: int, accumulation: int) -> dict[str, int]:
    made = subprocess.run(
        [sys.executable, str(HERE), "--count", str(stage), str(accumulation)],
        env={**os.environ, "PYTHONPATH": str(tree), "HF_ZERO_LOG_LEVEL": "ERROR"},
        cwd=tree, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return dict(json.loads(made.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=HERE.parents[2])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    rows = []
    for stage in args.stages:
        for accumulation in args.accumulation:
            row: dict[str, object] = {"stage": stage, "accumulation": accumulation}
            trees = {"before": args.before.resolve(), "after": args.after.resolve()}
            found: dict[str, dict[str, int]] = {}
            for _ in range(args.runs):
                for name, tree in trees.items():
                    counts = counted(tree, stage, accumulation)
                    least = min(counts["cpu_us"], found.get(name, counts)["cpu_us"])
                    found[name] = {**counts, "cpu_us": least}
            for name, tree in trees.items():
                head = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
                commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
                row[name] = {"commit": commit, **found[name]}
            for ratio, what in (("ratio", "bytecodes"), ("cpu_ratio", "cpu_us")):
                row[ratio] = round(found["after"][what] / found["before"][what], 4)
            rows.append(row)
            print(json.dumps(row), flush=True)
    out = HERE.parent / "results" / f"host_work-{time.strftime('%Y-%m-%d')}.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count(int(sys.argv[2]), int(sys.argv[3]))
    main()
