"""Runs of every route under every launcher that get a signal: one whole checkpoint, the exit code
of ``docs/hosts.md``, and a resume whose losses are those of one plain process.
"""

import json
import os
import random
import signal
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hf_zero.checkpoint import verify_all
from tests.helpers import launched

SCRIPT = Path(__file__).parent / "scripts" / "signalled.py"
LAUNCHERS = ("torchrun", "accelerate", "hf-zero launch", "srun")
ROUTES = ("stock", "ours", "lightning", "accelerated", "loop")
KINDS = (signal.SIGTERM, signal.SIGUSR1)
TO = {"one rank": 1, "ranks": -1, "launcher": -2}
STOPPED, PATIENCE = 85, 240.0
AT, MORE = 3, 2  # of the script


def environment(launcher, rank, job):
    """Return the variables that a launcher sets, srun for ``rank`` of the job ``job``."""
    if launcher != "srun":
        return {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1"}
    number = str(rank)
    return {
        "SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(job), "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost",
    }  # fmt: skip


@contextmanager
def started(launcher, out, arguments):
    """Yield the processes of the launcher: with srun those of the ranks."""
    command = {
        "torchrun": lambda: launched.torchrun_command(SCRIPT),
        "accelerate": lambda: launched.accelerate_command(SCRIPT, out, 3, gradient_clipping=0.0),
        "hf-zero launch": lambda: [
            launched.python(), os.path.join(launched.PROGRAMS, "hf-zero"), "launch",
            "--ranks", "2", str(SCRIPT),
        ],
        "srun": lambda: [launched.python(), str(SCRIPT)],
    }[launcher]()  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    command, job = [*command, "--out", str(out), *arguments], random.randrange(1, 50_000)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                launched.running(
                    command,
                    out,
                    out / f"log-{rank}.txt",
                    {**launched.environment(), **environment(launcher, rank, job)},
                )
            )
            for rank in range(2 if launcher == "srun" else 1)
        ]


def codes(processes, out):
    found = [launched.ended(process, PATIENCE) for process in processes]
    assert None not in found, logs(out)
    return found


def logs(out):
    return "\n".join(path.read_text()[-6000:] for path in sorted(out.glob("log-*.txt")))


def expected(launcher, to, kind):
    """Return the exit codes that ``docs/hosts.md`` names."""
    if launcher == "srun":
        return [STOPPED, STOPPED]
    if launcher == "hf-zero launch":
        return [128 + kind if to == "launcher" else STOPPED]
    return [1]


def losses(out, step):
    """Return by step the mean of what both ranks have seen, and their exit codes."""
    found = [json.loads((out / f"rank-{rank}-{step}.json").read_text()) for rank in range(2)]
    pairs = zip(*(each["losses"] for each in found), strict=True)
    return [sum(pair) / 2 for pair in pairs], [each["code"] for each in found]


def run(launcher, route, kind, to, between, out):
    given = ["--once", "--routes", route]
    more = ["--kind", kind.name, "--to", str(TO[to]), *["--between"] * between]
    with started(launcher, out, [*given, *more]) as processes:
        until = time.monotonic() + PATIENCE
        while to == "launcher" and not all((out / f"begun-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < until and processes[0].poll() is None, logs(out)
            time.sleep(0.01)
        for process in processes if to == "launcher" else ():
            process.send_signal(kind)
        ended = codes(processes, out)
    assert ended == expected(launcher, to, kind), logs(out)
    (verdict,) = verify_all(out / "run", progress=False)
    assert verdict.whole, verdict.problems
    before, ends = losses(out, 0)
    assert ends == [STOPPED, STOPPED] and AT <= len(before) < 1000, (len(before), logs(out))
    step = json.loads((verdict.folder / "manifest.json").read_text())["counters"]["global_steps"]
    assert step == len(before)
    with started(launcher, out, [*given, "--step", str(step)]) as processes:
        assert codes(processes, out) == [0] * len(processes), logs(out)
    after, _ = losses(out, step)
    assert len(after) == MORE
    plain = launched.alone(SCRIPT, out, "--routes", "plain", "--step", str(step))
    assert [*before, *after] == pytest.approx(plain["losses"], rel=1e-5), (before, plain)
    rows = sorted(row for batch in plain["rows"] for row in batch)
    assert len(set(rows)) == 4 * (step + MORE) and (route == "loop" or rows == [*range(len(rows))])


CELLS = [(launcher, route) for launcher in LAUNCHERS for route in ROUTES]


@pytest.mark.long
@pytest.mark.parametrize("launcher, route", CELLS)
def test_a_signal_saves_once_and_the_run_goes_on(launcher, route, tmp_path):
    """The signal, who gets it and when are drawn, other ones in each cell."""
    draw = random.Random(f"{launcher} {route}")
    kind, to, between = draw.choice(KINDS), draw.choice([*TO]), draw.random() < 0.5
    run(launcher, route, kind, to, between, tmp_path)
