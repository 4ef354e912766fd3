"""Jobs that are killed again and again, at points drawn by a seed, and go on from the memory of
their hosts: ranks as threads, which end as processes do, without a word.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from random import Random

import pytest
import torch.distributed as dist

from hf_zero.checkpoint.memory import saving
from tests.checkpoint.memory.jobs import Kept, hosts
from tests.checkpoint.memory.killed import Killed, Kills
from tests.checkpoint.setups import WINDOW, train
from tests.helpers.cells import fast
from tests.helpers.ranks import RankFailed, run_ranks

__all__ = ["hosts"]

JOBS, KILLS = 20, 5
FAST = {6}
SAVE_POINTS = (
    "before", "staging", "staged", "hashed", "sending", "copied", "recorded", "committing",
    "committed",
)  # fmt: skip
RESUME_POINTS = ("newest", "fetching", "fetched", "loaded")
BETWEEN = "stepped"  # after a step whose copies, if it has any, are whole
LAYOUTS = ("ab", "aabb", "abcd", "abab")


@dataclasses.dataclass(frozen=True)
class Kill:
    """The end of the ranks ``who`` when they reach ``point`` for the ``number``-th time. lost: the
    host whose memory is gone with them. stale: it has what it had an attempt before.
    """

    point: str
    number: int
    who: frozenset[int]
    lost: str | None
    stale: bool


def drawn(random: Random, layout: str, resumes: bool) -> Kill:
    """Return a kill of a rank, rank 0, or all ranks of a host."""
    group = random.choice(("rank", "rank 0", "host"))
    host = random.choice(sorted(set(layout)))
    ranks = {
        "rank": {random.randrange(len(layout))},
        "rank 0": {0},
        "host": {rank for rank, name in enumerate(layout) if name == host},
    }[group]
    points = (*SAVE_POINTS, BETWEEN, *(RESUME_POINTS if resumes else ()))
    point = random.choice(points)
    number = 1 if point in RESUME_POINTS else random.choice((1, 2))
    lost = host if group == "host" and random.random() < 0.7 else None
    return Kill(point, number, frozenset(ranks), lost, random.random() < 0.4)


class Job:
    """A job and its attempts. losses: by rank and step, of the last attempt. resumed_from: its
    first step; None if it ended before. committed: steps that all ranks have committed. safe: the
    newest of them, of steps that an attempt has resumed from, and of the disk.
    """

    def __init__(self, setup: Kept, steps: int, disk: Path) -> None:
        self.setup, self.steps, self.disk = setup, steps, disk
        self.losses: dict[tuple[int, int], list[float]] = {}
        self.resumed_from: int | None = None
        self.safe, self.committed = 0, set[int]()

    def attempt(self, kill: Kill | None) -> int | None:
        """Resume, and go on until the end, or until ``kill``: return the step that it ends."""
        models = self.setup.models()
        saving._claimed.clear()  # the engines of the attempt before are gone with its processes
        self.losses, self.resumed_from = {}, None
        kills = Kills() if kill is None else Kills(kill.point, kill.number, kill.who)

        def on_rank(rank: int) -> None:
            threading.current_thread().host = self.setup.hosts[rank]  # type: ignore[attr-defined]
            engine = self.setup.open(models[rank])
            kills.watch(engine)
            saving.reached("newest")
            if self.disk.is_dir():
                engine.load_checkpoint(str(self.disk))
            saving.reached("loaded")
            self.resumed_from = first = engine.global_steps
            for step in range(first, self.steps):
                self.losses[rank, step] = train(engine, rank, range(step, step + 1))
                if kill is not None and kill.point == BETWEEN:
                    engine.memory.wait()
                    dist.barrier()
                saving.reached(BETWEEN)
            engine.memory.wait()
            saving.reached("ended")
            dist.barrier()
            engine.destroy()

        with kills:
            try:
                run_ranks(self.setup.ranks, on_rank)
            except RankFailed as error:
                if not isinstance(error.__cause__, Killed):
                    raise
        self.committed.update(kills.committed())
        self.safe = max([self.safe, self.resumed_from or 0, *kills.committed()])
        return kills.step

    def begin(self) -> None:
        """Leave the first step on disk, for a job that loses its memory."""
        models = self.setup.models()

        def on_rank(rank: int) -> None:
            threading.current_thread().host = self.setup.hosts[rank]  # type: ignore[attr-defined]
            engine = self.setup.open(models[rank])
            train(engine, rank, range(1))
            engine.save_checkpoint(str(self.disk))
            engine.destroy()

        run_ranks(self.setup.ranks, on_rank)
        self.safe = 1

    def by_step(self) -> dict[int, float]:
        """Return the mean loss of each step that all ranks have ended."""
        found: dict[int, list[float]] = {}
        for (_, step), losses in self.losses.items():
            found.setdefault(step, []).extend(losses)
        return {step: sum(of) / WINDOW for step, of in found.items() if len(of) == WINDOW}

    def folder_of(self, host: str) -> Path:
        """The folder of this job on ``host``, which may not exist."""
        return next(self.setup.base.glob(f"hf-zero-*-job/{host}"), self.setup.base / "none")


def lose(job: Job, kill: Kill, older: Path) -> None:
    """Take the memory of the lost host away, or put that of ``older`` in its place."""
    assert kill.lost is not None
    folder = job.folder_of(kill.lost)
    if folder.is_dir():
        shutil.rmtree(folder)
        if kill.stale and (older / kill.lost).is_dir():
            shutil.copytree(older / kill.lost, folder)


def check(job: Job, whole: Job) -> None:
    """Compare the losses of the last attempt with those of the run that nothing interrupted."""
    if job.setup.hosts == whole.setup.hosts:
        for place, losses in job.losses.items():
            assert losses == whole.losses[place], place
    wanted = whole.by_step()
    for step, loss in job.by_step().items():
        assert loss == pytest.approx(wanted[step], rel=1e-4), step


# pytest reports the SystemExit by which a thread beside the training ends
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", fast(range(JOBS), lambda seed: seed in FAST))
def test_a_job_that_is_killed_again_and_again(seed: int, tmp_path: Path) -> None:
    """Five kills. The next attempt goes on at most ``every`` steps before the step that a kill
    ended, unless the files of two hosts went before the next save: then from the disk. A fifth of
    the jobs go on with other ranks.
    """
    random = Random(seed)
    layout, every = random.choice(LAYOUTS), random.choice((1, 2, 3))
    base = tmp_path / "memory"
    setup = Kept(stage=seed % 4, ranks=len(layout), hosts=layout, base=base, more={"every": every})
    steps = 2 * KILLS * every + 2
    whole = Job(dataclasses.replace(setup, base=tmp_path / "other"), steps, tmp_path / "none")
    assert whole.attempt(None) is None and whole.resumed_from == 0
    job, older = Job(setup, steps, tmp_path / "disk"), tmp_path / "older"
    job.begin()
    lost_at, told = -1, "the first attempt"
    for number in range(KILLS):
        kill = drawn(random, job.setup.hosts, job.safe > 1)
        safe = job.safe
        ended = job.attempt(kill)
        assert ended is not None, f"{kill} was never reached; before it {told}"
        if job.resumed_from is not None:
            assert job.resumed_from >= safe, told
        check(job, whole)
        told = f"kill {number} of {KILLS} at step {ended}: {kill}"
        if kill.lost is not None:
            if lost_at == job.safe or job.safe not in job.committed:
                job.safe = 1  # a file of it may have been on this host alone
            lost_at = job.safe
            lose(job, kill, older)
        if job.safe > 1 and kill.point not in RESUME_POINTS:
            assert ended - job.safe <= every, told
        shutil.rmtree(older, ignore_errors=True)
        for host in sorted(set(job.setup.hosts)):
            if job.folder_of(host).is_dir():
                shutil.copytree(job.folder_of(host), older / host)
        if seed % 5 == 4 and number == KILLS // 2:
            other = random.choice([each for each in LAYOUTS if each != job.setup.hosts])
            job.setup = dataclasses.replace(job.setup, ranks=len(other), hosts=other)
    safe = job.safe
    assert job.attempt(None) is None and job.resumed_from is not None, told
    assert job.resumed_from >= safe, told
    check(job, whole)
    assert not list(base.glob("*"))
