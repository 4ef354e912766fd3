"""Part 4: a rank goes wrong, and all ranks end. ``python -m tests.nccl.endings WAY FOLDER`` is one
of two ranks, the second of which does what the way says.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint import verify_checkpoint
from tests.helpers import launched
from tests.nccl import ranks

ODD = 1
SECONDS = 30  # the timeout of the configuration
LIMIT = 180.0  # of a job, with its start
STEPS, AT = 8, 2
STOPPED = -signal.SIGKILL  # how a stopped rank ends: it is killed with what is left


@dataclass(frozen=True)
class Ending:
    """Exit codes of the odd rank, and patterns of what both print."""

    codes: tuple[int, ...]
    own: str
    other: str
    other_code: int = 1


NAMED = f"rank {ODD}"
ENDINGS = {
    "raises": Ending((1,), "ValueError: bad batch", f"{NAMED} has failed: ValueError: bad batch"),
    "leaves": Ending((0,), "", f"{NAMED}.* has ended"),
    "is killed": Ending((-signal.SIGKILL,), "", f"{NAMED}.* exited"),
    "is stopped": Ending((STOPPED,), "", f"{NAMED}"),
    "calls another collective": Ending(
        (1,), "RankMismatchError", f"{NAMED} waits for broadcast of"
    ),
    "sends another shape": Ending((1,), "RankMismatchError", rf"{NAMED} is at broadcast of \(4,\)"),
    "has another model": Ending((1,), "hold different models", "hold different models"),
    "ends in a save": Ending((-signal.SIGKILL,), "", f"{NAMED}"),
}


def main(way: str, folder: Path) -> None:
    import hf_zero
    from hf_zero.checkpoint import background_saves
    from hf_zero.distributed.world_group import get_world_group
    from hf_zero.zero.layout import wrap
    from tests.helpers.engines import config_of, start
    from tests.helpers.models import Stack, features, seeded
    from tests.helpers.training import Plan, adamw

    torch.set_num_threads(1)
    wrap.GRANULARITY = wrap.PERSISTENCE = 0
    hf_zero.init_distributed(timeout=SECONDS)
    rank = get_world_group().rank
    is_odd = rank == ODD
    depth = 2 if way == "has another model" and is_odd else 3
    model = seeded(lambda: Stack(depth))
    config = config_of(3, Plan(clip=1.0), timeout=SECONDS)
    engine = start(model, adamw(model), config)

    def step(number: int) -> None:
        inputs = features(number, 0, rank).to(engine.device)
        engine.backward(engine(inputs).square().mean())
        engine.step()

    for number in range(AT):
        step(number)
    if way == "ends in a save":
        engine.save_checkpoint(str(folder), tag="old")
        if is_odd:
            background_saves.write_image = lambda *_: time.sleep(3600)
        engine.save_checkpoint(str(folder), tag="new", blocking=False)
    if is_odd:
        time.sleep(1.0)  # the other one waits by now
        act(way, get_world_group(), engine.device)
    elif way == "sends another shape":
        get_world_group().broadcast(torch.ones(3, device=engine.device), 0)
    for number in range(AT, STEPS):
        if is_odd and way == "leaves":
            return
        step(number)
    print("ENDED", flush=True)


def act(way: str, world: Any, device: torch.device) -> None:
    if way == "raises":
        raise ValueError("bad batch")
    if way in ("is killed", "ends in a save"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "calls another collective":
        world.broadcast(torch.ones(3, device=device), ODD)
    if way == "sends another shape":
        world.broadcast(torch.ones(4, device=device), 0)


def problems(way: str, job: ranks.Ranks, codes: list[int | None], folder: Path) -> list[str]:
    """Return what is not as it must be at the end of both ranks."""
    ending, found = ENDINGS[way], []
    own, other = job.said(ODD), job.said(1 - ODD)
    if codes[ODD] not in ending.codes and not (way == "is stopped" and codes[ODD] is None):
        found.append(f"rank {ODD} ended with {codes[ODD]} (None: not within {LIMIT:.0f} s)")
    if codes[1 - ODD] != ending.other_code:
        found.append(f"rank {1 - ODD} ended with {codes[1 - ODD]} (None: not within {LIMIT:.0f} s)")
    for rank, pattern, text in ((ODD, ending.own, own), (1 - ODD, ending.other, other)):
        if not re.search(pattern, text):
            last = text.strip().splitlines()[-1:] or ["nothing"]
            found.append(f"rank {rank} does not say {pattern!r}, but {last[0][-200:]!r}")
    if way == "ends in a save":
        latest = (folder / "latest").read_text() if (folder / "latest").exists() else ""
        if latest != "old" or verify_checkpoint(folder).problems:
            found.append(f"the newest checkpoint is {latest!r} and not the old one, whole")
    return found


def run(
    way: str, logs: Path, chosen: tuple[str, ...] = tuple(ENDINGS), at_once: int = 2
) -> Iterator[dict[str, Any]]:
    """Run the endings, ``at_once`` of them at the same time; yield a row of each."""
    for start in range(0, len(chosen), at_once):
        yield from _together(way, logs, dict(enumerate(chosen[start : start + at_once], start)))


def _together(way: str, logs: Path, names: dict[int, str]) -> Iterator[dict[str, Any]]:
    begun = time.monotonic()
    with ExitStack() as stack:
        jobs = {}
        for number, name in names.items():
            folder = logs / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            given = ("tests.nccl.endings", name, str(folder / "saved"))
            jobs[number] = stack.enter_context(ranks.started(*given, count=2, way=way, logs=folder))
        for number, name in names.items():
            job = jobs[number]
            left = max(1.0, LIMIT - (time.monotonic() - begun))
            if name == "is stopped":
                other = job.processes[1 - ODD]
                codes = [launched.ended(other, left), None]
                codes = codes if ODD else codes[::-1]
            else:
                codes = job.codes(left)
            wrong = problems(name, job, codes, logs / str(number) / "saved")
            figures = {"s": round(time.monotonic() - begun, 1)}
            yield {"case": f"a rank {name}", **({"failed": "; ".join(wrong)} if wrong else figures)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
