"""SIGKILL in the middle of saves, of two real ranks, at random moments: each time the job
resumes exactly, and loses no step it had saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import find
from hf_zero.launch.hosts import free_port
from tests.helpers.engines import config_of, start
from tests.helpers.models import features, seeded
from tests.helpers.processes import forkserver
from tests.helpers.training import adamw

PATIENCE = 120.0
WIDTH, LAYERS = 7, 3


@dataclass(frozen=True)
class Plan:
    """``digests``: the folder of what the first run has held after each step. ``tag``: all saves
    go over the same one, else each step has its own and ``keep`` of them stay.
    """

    folder: Path
    digests: Path
    stage: int
    steps: int
    tag: str | None = None
    keep: int | None = None


# ---- on a rank ----


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        # Bytes to write, so that a save takes a while and is hit in the middle of its data.
        self.ballast = torch.nn.Parameter(torch.zeros(1 << 18))

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean() + (self.ballast * batch.sum()).square().mean()


def digest(engine):
    """Return a hash of this rank's master weights, moments, step counts, counters and LR schedule,
    bit for bit.
    """
    found = hashlib.sha256()
    for flat in engine.flats:
        for name, tensor in sorted(engine.bound.tensors(flat.optimizer_shard).items()):
            held = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            found.update(f"{flat.key} {name}".encode() + held)
    settings = [engine.bound.scalars(), engine.bound.hyperparameters()]
    numbers = [*settings, vars(engine.counters), engine.lr_scheduler.state_dict()]
    found.update(json.dumps(numbers, sort_keys=True, default=str).encode())
    return found.hexdigest()


def rank_main(rank, port, plan, words):
    """Train and save after every step, and write to a file: ``loaded STEP``, ``saving STEP``,
    ``saved STEP``, or ``differs STEP`` if the state is not that of the first run.
    """
    torch.set_num_threads(1)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HF_ZERO_LOG_LEVEL="ERROR")
    model = seeded(Wide)
    numbers = {"warmup_num_steps": 5, "total_num_steps": 500, "warmup_max_lr": 1e-2}
    schedule = {"scheduler": {"type": "WarmupDecayLR", "params": numbers}}
    engine = start(model, adamw(model), {**config_of(plan.stage, timeout=60), **schedule})

    def say(word):
        with open(words, "a") as file:
            file.write(f"{word} {engine.counters.global_steps}\n")

    def compare():
        held = plan.digests / f"{rank}-{engine.counters.global_steps}"
        if not held.exists():
            held.write_text(digest(engine))
        if held.read_text() != digest(engine):
            say("differs")
            os._exit(3)

    # Without `latest` no save has ended yet.
    if (plan.folder / "latest").exists():
        engine.load_checkpoint(str(plan.folder), verify=True)
    compare()
    say("loaded")
    while engine.counters.global_steps < plan.steps:
        engine.backward(engine(features(engine.counters.global_steps, 0, rank)))
        engine.step()
        compare()
        say("saving")
        engine.save_checkpoint(str(plan.folder), tag=plan.tag, keep=plan.keep)
        say("saved")
    say("done")
    os._exit(0)  # the end of a group is not what is looked at


# ---- the test ----


class Running:
    """Two ranks at work, and the steps of which they have said something."""

    def __init__(self, plan, name):
        plan.digests.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.words = [plan.digests.with_name(f"{name}-{rank}.txt") for rank in range(2)]
        self.ranks = [
            forkserver().Process(target=rank_main, args=(rank, port, plan, words), daemon=True)
            for rank, words in enumerate(self.words)
        ]
        for process in self.ranks:
            process.start()

    def by_rank(self, word):
        texts = [file.read_text() if file.exists() else "" for file in self.words]
        lines = [[line.split() for line in text.split("\n")[:-1]] for text in texts]
        return [[int(step) for kind, step in each if kind == word] for each in lines]

    def steps(self, word):
        return [step for steps in self.by_rank(word) for step in steps]

    def until(self, word, count):
        """Until a rank has said ``word`` that often, or one has ended."""
        deadline = time.monotonic() + PATIENCE
        while max(map(len, self.by_rank(word))) < count and self.ranks[0].is_alive():
            assert time.monotonic() < deadline, [file.read_text() for file in self.words]
            time.sleep(0.002)

    def end(self, *killed):
        for rank in killed:
            self.ranks[rank].kill()
        for process in self.ranks:
            process.join(PATIENCE)
            assert process.exitcode is not None, [file.read_text() for file in self.words]


@pytest.fixture
def draw():
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"random moments of seed {seed}")  # shown where the test fails
    yield random.Random(seed)


def uninterrupted(plan):
    """Write the digests; return the seconds that a step with its save takes."""
    running = Running(plan, "whole")
    running.until("saved", 1)
    began = time.monotonic()
    running.end()
    assert running.steps("done") == [plan.steps] * 2
    kept = [file.read_text() for file in plan.digests.glob("0-*")]
    assert len(set(kept)) == len(kept) == plan.steps + 1
    return (time.monotonic() - began) / plan.steps


def kill_again_and_again(tmp_path, stage, kills, draw, **how):
    steps = 2 * kills

    def plan_of(name):
        return Plan(tmp_path / name, tmp_path / "digests", stage, steps, **how)

    seconds, plan = uninterrupted(plan_of("whole")), plan_of("killed")
    reached, inside, resumed_from = 0, 0, set()
    for attempt in range(20 * kills):
        running = Running(plan, f"attempt-{attempt}")
        running.until("saving", draw.randint(1, 2))
        time.sleep(draw.uniform(0, 1.3 * seconds))
        first = draw.randrange(2)
        running.end(first, 1 - first)
        assert not running.steps("differs"), "another state than that of the uninterrupted run"
        loaded = set(running.steps("loaded"))
        assert loaded and loaded <= {reached, reached + 1}, f"{reached} was saved, not {loaded}"
        resumed_from |= loaded
        reached = max([reached, *loaded, *running.steps("saved")])
        # In a save: begun by one, not ended on both.
        saved = min(max(each, default=0) for each in running.by_rank("saved"))
        inside += saved < max(running.steps("saving"), default=0)
        if (plan.folder / "latest").exists():
            for tag in (None, *find.tags_in(plan.folder)):
                assert hf_zero.verify_checkpoint(plan.folder, tag).problems == (), tag
        if running.steps("done"):
            reached, plan = 0, plan_of(f"killed{attempt}")
        if inside >= kills and len(resumed_from) > 1:
            break
    assert inside >= kills and len(resumed_from) > 1, f"only {inside} kills met a save"
    last = Running(plan, "last")
    last.end()
    assert last.steps("done") == [steps, steps] and not last.steps("differs")
    names = [path.name for path in plan.folder.iterdir() if path.name.startswith(find.RESERVED)]
    left = [name for name in names if not name.startswith(find.SAVING)]
    # A save removes old checkpoints once it is complete: a kill before or while they are removed
    # leaves one until the next save.
    more = 0 if last.steps("saved") else 1
    kept = len(find.tags_in(plan.folder)) + len(left)
    assert len(left) <= more and kept <= (how.get("keep") or 1) + more, left


def test_killed_a_few_times(tmp_path, draw):
    kill_again_and_again(tmp_path, 3, 2, draw, keep=2)


@pytest.mark.long
@pytest.mark.parametrize("stage, how", [(3, {"keep": 2}), (1, {"tag": "last"}), (2, {"keep": 1})])
def test_killed_at_many_moments(tmp_path, stage, how, draw):
    kill_again_and_again(tmp_path, stage, 60, draw, **how)
