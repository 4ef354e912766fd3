"""SIGKILL in the middle of saves, of two real ranks, at random moments: each time the job
resumes exactly, and loses no step it had saved.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

import hf_zero
from hf_zero.checkpoint import find
from hf_zero.launch.hosts import free_port
from tests.gloo.killing import Plan, rank_main

PATIENCE = 120.0
# Before the first rank is forked, so that none spends its time on it.
IMPORTED = [
    "tests.gloo.killing",
    "torch._dynamo",
    "hf_zero.initialize",
    "hf_zero.optim",
    "hf_zero.checkpoint.save_sharded",
    "hf_zero.checkpoint.load_sharded",
]


class Running:
    """Two ranks at work, and what they have said."""

    def __init__(self, plan, expected):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.pipes: list[Connection] = []
        self.ranks: list[Any] = []
        self.said: list[list[tuple[str, Any]]] = [[], []]
        port = free_port()
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(rank, port, plan, expected[rank], theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def hear(self, seconds):
        """Wait for words of any rank; False if both have nothing more to say."""
        open_pipes = [pipe for pipe in self.pipes if not pipe.closed]
        if not open_pipes:
            return False
        for pipe in wait(open_pipes, timeout=seconds):
            assert isinstance(pipe, Connection)
            try:
                self.said[self.pipes.index(pipe)].append(pipe.recv())
            except EOFError:
                pipe.close()
        return True

    def until(self, word, count=1):
        """Until a rank has said ``word`` that often, or all have ended."""
        deadline = time.monotonic() + PATIENCE
        while not any(sum(kind == word for kind, _ in words) >= count for words in self.said):
            assert time.monotonic() < deadline, self.said
            if not self.hear(1.0):
                return

    def kill(self, first):
        for rank in (first, 1 - first):
            self.ranks[rank].kill()
        self.end()

    def end(self):
        deadline = time.monotonic() + PATIENCE
        while self.hear(1.0):
            assert time.monotonic() < deadline, self.said
        for process in self.ranks:
            process.join(PATIENCE)

    def steps(self, word):
        return [value for words in self.said for kind, value in words if kind == word]


@pytest.fixture
def draw():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"random moments of seed {seed}")  # shown where the test fails
    yield random.Random(seed)


def uninterrupted(plan):
    """Each rank's digests after 0, 1, 2 … steps, and the seconds that a save takes."""
    running = Running(plan, [[], []])
    began, spent = 0.0, []
    while running.hear(PATIENCE):
        last = running.said[0][-1:] or [("", 0)]
        if last[0][0] == "saving" and not began:
            began = time.monotonic()
        elif last[0][0] == "saved" and began:
            spent.append(time.monotonic() - began)
            began = 0.0
    running.end()
    digests = [[value for kind, value in words if kind == "digest"] for words in running.said]
    assert [len(each) for each in digests] == [plan.steps + 1] * 2 and len(
        set(digests[0])
    ) == plan.steps + 1
    return digests, sorted(spent)[len(spent) // 2]


def kill_again_and_again(tmp_path, stage, kills, draw, **how):
    steps = 2 * kills
    expected, seconds = uninterrupted(Plan(tmp_path / "whole", stage, steps, **how))
    plan = Plan(tmp_path / "killed", stage, steps, **how)
    reached = inside = 0
    resumed_from = set()
    for attempt in range(20 * kills):
        running = Running(plan, expected)
        running.until("saving", draw.randint(1, 2))
        time.sleep(draw.uniform(0, 1.3 * seconds))
        running.kill(draw.randrange(2))
        assert not running.steps("differs"), (
            f"another state than that of the uninterrupted run: {running.said}"
        )
        loaded = running.steps("loaded")
        assert loaded and set(loaded) <= {reached, reached + 1}, (
            f"{reached} was saved, resumed from {loaded}"
        )
        resumed_from |= set(loaded)
        reached = max([reached, *loaded, *running.steps("saved")])
        # In a save: begun by one, not ended on both.
        inside += bool(running.steps("saving")) and min(
            _last(running.said[rank], "saved") for rank in range(2)
        ) < max(running.steps("saving"))
        if (plan.folder / "latest").exists():
            assert hf_zero.verify_checkpoint(plan.folder).problems == ()
            for tag in find.tags_in(plan.folder):
                assert hf_zero.verify_checkpoint(plan.folder, tag).problems == (), tag
        if running.steps("done"):
            reached = 0
            plan = Plan(tmp_path / f"killed{attempt}", stage, steps, **how)
        if inside >= kills and len(resumed_from) > 1:
            break
    assert inside >= kills and len(resumed_from) > 1, f"only {inside} kills met a save"
    last = Running(plan, expected)
    last.until("done")
    last.end()
    assert last.steps("done") == [steps, steps] and not last.steps("differs")
    left = [
        path.name
        for path in plan.folder.iterdir()
        if path.name.startswith(find.RESERVED) and not path.name.startswith(find.SAVING)
    ]
    # A save removes old checkpoints once it is complete: a kill before or while they are removed
    # leaves one until the next save.
    more = 0 if last.steps("saved") else 1
    assert len(left) <= more and len(find.tags_in(plan.folder)) + len(left) <= (
        (how.get("keep") or 1) + more
    ), left


def _last(words, wanted):
    return max((value for kind, value in words if kind == wanted), default=0)


def test_killed_a_few_times(tmp_path, draw):
    kill_again_and_again(tmp_path, 3, 2, draw, keep=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "stage, how",
    [(3, {"keep": 2}), (1, {"tag": "last"}), (2, {"keep": 1})],
    ids=["tags of their own", "over the same tag", "one that stays"],
)
def test_killed_at_many_moments(tmp_path, stage, how, draw):
    kill_again_and_again(tmp_path, stage, 60, draw, **how)
