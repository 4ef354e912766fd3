"""Ranks that do not come to a collective, and ranks that are slow: ``python -m tests.late.absences
MODE CASE …``, with RANK and so on set.

The host waits for no collective here, so what ends the job, or leaves it alone, is what hf_zero
follows on its own thread. Rank 1 is the one that stays away. A line of JSON a case and rank; a case
that raises is the last.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.late import device, training

import torch  # isort: skip
import hf_zero  # isort: skip
from hf_zero.distributed import world_group  # isort: skip
from hf_zero.logging import logger  # isort: skip

JOB = "stage 3, one micro-batch"
STEPS = 2  # before rank 1 stays away
# The block that each rank does not use in each step, -1: none.
LEFT_OUT: dict[str, tuple[tuple[int, ...], ...]] = {
    # rank 1 uses fewer than the order of gathers that was recorded, others in each step
    "leaves out blocks": ((-1,) * 6, (-1, -1, 1, 3, 2, 0)),
    # rank 0 alone uses one that no order holds, which rank 1 serves beside its own step
    "fetches a block": ((1, 1, 1, -1, 1, 2), (1,) * 6),
}
LIMIT = 60.0  # seconds, in which rank 0 must have ended by itself
SLOW = 2.0  # seconds: waits are looked at after one


class Tower(training.Tower):
    left_out = -1  # a block that the next forward does not use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            x = x if place == self.left_out else block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


class Job:
    def __init__(self, rank: int, **more: Any):
        self.rank = rank
        self.model = tower()
        config = {**training.config(JOB), "kernels": "off", **more}
        self.engine, *_ = hf_zero.initialize(model=self.model, config=config)
        self.batches = training.batches(100, rank, 2)

    def step(self) -> float:
        """One optimizer step; the loss is read, which waits for the device."""
        loss = self.engine(next(self.batches).to(self.engine.device))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())

    def alone(self) -> list[float]:
        """Steps on rank 0 until they raise."""
        limit, losses = time.monotonic() + LIMIT, []
        while time.monotonic() < limit:
            losses.append(self.step())
        return losses


def leaves(job: Job) -> list[float]:
    """Rank 1 is over with its engine; its process goes on until rank 0 knows."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if job.rank:
        job.engine.mesh.close(groups=False)
        store.wait(["known"], timedelta(seconds=LIMIT))
        return []
    try:
        return job.alone()
    finally:
        store.set("known", "")


def dies(job: Job) -> list[float]:
    """The process of rank 1 is killed."""
    if job.rank:
        os._exit(0)
    return job.alone()


def is_elsewhere(job: Job, first: bool = False) -> list[float]:
    """Rank 1 is at a barrier of the hosts, rank 0 at a forward."""
    if job.rank:
        world_group.barrier()
        return []
    if first:
        torch.distributed.all_reduce(torch.ones(3, device=job.engine.device))
        job.engine(next(job.batches).to(job.engine.device)).item()
    return job.alone()


def misses_a_collective(job: Job) -> list[float]:
    """Rank 1 leaves out a collective of the script on the device, and is at a barrier of the hosts;
    rank 0 goes on behind it, and waits for its loss.
    """
    return is_elsewhere(job, first=True)


def is_slow(job: Job) -> list[float]:
    """Rank 1 computes for a while in each step."""
    losses = []
    for _ in range(2):
        if job.rank:
            time.sleep(SLOW)
        losses.append(job.step())
    return losses


def leaves_out(case: str, rank: int, **more: Any) -> list[float]:
    """The losses of steps that leave out the blocks of a case."""
    job = Job(rank, **more)
    losses = []
    for left_out in LEFT_OUT[case][rank]:
        job.model.left_out = left_out
        losses.append(job.step())
    world_group.barrier()  # rank 0 hosts the store, which the others still ask
    job.engine.destroy()
    return losses


def plain(case: str, rank: int) -> list[float]:
    """The losses in a plain loop over the global batch, on the CPU."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    each = [training.batches(len(LEFT_OUT[case][0]), place, 2) for place in range(2)]
    losses = []
    for left_out in zip(*LEFT_OUT[case]):
        found = []
        for place, values in enumerate(map(next, each)):
            model.left_out = left_out[place]
            found.append(model(values))
        optimizer.zero_grad()
        torch.stack(found).mean().backward()
        torch.nn.utils.clip_grad_norm_(
            model.parameters(), training.config(JOB)["gradient_clipping"]
        )
        optimizer.step()
        losses.append(found[rank].item())
    return losses


CASES: dict[str, tuple[Callable[[Job], list[float]], dict[str, Any]]] = {
    "leaves": (leaves, {}),
    "dies": (dies, {}),
    "is elsewhere": (is_elsewhere, {"timeout": 6}),
    "misses a collective": (misses_a_collective, {"timeout": 6}),
    "is slow": (is_slow, {}),
}


def judged(name: str, rank: int, said: list[str]) -> dict[str, Any]:
    """Run a case; its row."""
    job, worst, raised = None, 0.0, ""
    said.clear()
    device.forget()
    try:
        if name in LEFT_OUT:
            worst = training.worst(leaves_out(name, rank, timeout=60), plain(name, rank))
        else:
            run, more = CASES[name]
            job = Job(rank, **more)
            for _ in range(STEPS):
                job.step()
            run(job)
    except RuntimeError as error:
        raised = f"{type(error).__name__}: {error}"
    if job is not None and not raised:
        job.engine.destroy()
    found = {"raised": raised, "said": said, "worst": worst, "reports": device.reports()}
    return {"case": name, "rank": rank, **found}


def main() -> None:
    rank, kind = int(os.environ["RANK"]), sys.argv[1]
    device.configure(kind, seed=rank, max_us=300, nap=0.2)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    for name in sys.argv[2:]:
        row = judged(name, rank, said)
        device.tell(**row)
        if row["raised"]:
            break
    os._exit(0)  # what is under way will not end


if __name__ == "__main__":
    main()
