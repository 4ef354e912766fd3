"""Small programs of two ranks over the device's collectives, right and broken: what is reported of
each.

``python -m tests.late.rank_programs MODE [program ...]``, with RANK and so on set. A name says what
must be found: ``order_…`` collectives in another order, ``interleaved_…`` those of a thread on two
communicators, ``threads_…`` two threads on a communicator, ``deadlock_…`` ranks that wait
for each other, ``race_…`` a race, and ``right_…`` nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

RANKS = 2
PROGRAMS: dict[str, Callable[[Any], Any]] = {}


def program(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[function.__name__] = function
    return function


class Job:
    """The resources of a program: its rank, two communicators over all ranks, and device memory."""

    def __init__(self, rank: int, groups: Sequence[Any]):
        import torch
        import torch.distributed as dist

        from tests.late.device import NAME

        self.rank, self.dist, self.torch, self.device = rank, dist, torch, NAME
        self.first, self.second = groups

    def ones(self, count: int = 64) -> Any:
        return self.torch.ones(count, device=self.device) * (self.rank + 1)

    def sum(self, group: Any, count: int = 64, async_op: bool = False) -> Any:
        """Return the tensor that is all-reduced, with its work if ``async_op``."""
        values = self.ones(count)
        work = self.dist.all_reduce(values, group=group, async_op=async_op)
        return (values, work) if async_op else values

    def gather(self, group: Any, count: int = 64) -> Any:
        out = self.torch.empty(RANKS * count, device=self.device)
        return out, self.dist.all_gather_into_tensor(
            out, self.ones(count), group=group, async_op=True
        )


@program
def right_sums(job: Job) -> Any:
    return [job.sum(job.first)[0].item(), job.sum(job.second, 7)[0].item()]


@program
def right_wait_orders_the_stream_alone(job: Job) -> Any:
    """The host continues while another rank has not even begun."""
    if job.rank:
        job.dist.barrier(group=job.dist.group.WORLD)  # of the hosts
    values, work = job.sum(job.first, async_op=True)
    work.wait()
    twice = values * 2
    before = work.is_completed()
    if not job.rank:
        job.dist.barrier(group=job.dist.group.WORLD)
    return [bool(job.rank) or not before, twice[0].item()]


@program
def right_backward_issues(job: Job) -> Any:
    """Autograd's thread is not another one: whoever called backward waits for it."""
    weight = job.ones().requires_grad_()
    weight.register_hook(lambda grad: job.sum(job.first) * grad)
    for _ in range(3):
        job.sum(job.first)
        weight.grad = None
        (weight * 2).sum().backward()
    return weight.grad[0].item()


@program
def right_thread_hands_over(job: Job) -> Any:
    job.sum(job.first)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(job.sum(job.first)[0].item()))
    thread.start()
    thread.join()
    return found


@program
def race_no_wait(job: Job) -> Any:
    values, _ = job.sum(job.first, async_op=True)
    return (values * 2)[0].item()


@program
def order_swapped(job: Job) -> Any:
    kinds = [lambda: job.gather(job.first)[1], lambda: job.sum(job.first, async_op=True)[1]]
    wait_for([kind() for kind in (kinds if job.rank else reversed(kinds))])
    job.torch.accelerator.synchronize()


@program
def order_of_unequal_sizes(job: Job) -> Any:
    return job.sum(job.first, 64 + job.rank)[0].isnan().item()


def _two_threads(job: Job, first_of_all: bool) -> list[float]:
    """The main thread sums on one communicator and another thread on the other one."""
    pending: list[Any] = []

    def issue(group: Any) -> None:
        pending.append(job.sum(group, async_op=True))

    beside = threading.Thread(target=issue, args=[job.second])
    if first_of_all:
        issue(job.first)
    beside.start()
    beside.join()
    if not first_of_all:
        issue(job.first)
    for _, work in pending:
        work.wait()
    return [values[0].item() for values, _ in pending]


@program
def right_two_threads_in_one_order(job: Job) -> Any:
    return _two_threads(job, True)


@program
def order_of_two_threads_on_two_communicators(job: Job) -> Any:
    """It ends here, where two streams run at once; a real device may run one alone."""
    return _two_threads(job, bool(job.rank))


@program
def threads_take_turns(job: Job) -> Any:
    """Though they never run at once here: nothing but a clock orders them."""
    turn, begun = threading.Semaphore(0), threading.Event()

    def background() -> None:
        turn.acquire()
        begun.set()
        job.sum(job.first)
        turn.release()

    thread = threading.Thread(target=background)
    thread.start()
    job.sum(job.first)
    turn.release()
    while not begun.is_set():  # on a loaded machine long after its turn has come
        time.sleep(0.01)
    turn.acquire()
    found = job.sum(job.first)[0].item()
    thread.join()
    return found


@program
def deadlock_of_streams(job: Job) -> Any:
    for group in (job.first, job.second) if job.rank else (job.second, job.first):
        job.sum(group)
    job.torch.accelerator.synchronize()


@program
def deadlock_of_hosts(job: Job) -> Any:
    for group in (job.first, job.second) if job.rank else (job.second, job.first):
        job.sum(group)[0].item()


@program
def right_cpu_tensors_are_refused(job: Job) -> Any:
    backend = job.first._get_backend(job.torch.device(job.device))
    try:
        backend.allreduce([job.torch.ones(3)], job.dist.AllreduceOptions())
    except RuntimeError as error:
        return str(error).splitlines()[0]


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()


def exchange(job: Job, *counts: int, swapped: bool = False) -> tuple[list[Any], list[Any]]:
    """Messages of ``counts`` numbers each way: the receive buffers and the works."""
    dist, other = job.dist, 1 - job.rank
    came = [job.torch.zeros(count, device=job.device) for count in counts]
    sends = [dist.P2POp(dist.isend, job.ones(c), other, job.first, n) for n, c in enumerate(counts)]
    comes = [dist.P2POp(dist.irecv, into, other, job.first, n) for n, into in enumerate(came)]
    return came, dist.batch_isend_irecv(comes + sends if swapped else sends + comes)


@program
def right_messages(job: Job) -> Any:
    """Batches whose parts are in another order meet, if those of one direction have one."""
    came, works = exchange(job, 3, 4, swapped=bool(job.rank))
    wait_for(works)
    total = sum(into[0].item() for into in came) + job.rank * 2
    again, works = exchange(job, 64)
    wait_for(works)
    return [again[0][0].item() + job.rank, total, float(len(works))]


@program
def right_single_messages(job: Job) -> Any:
    """Three numbers there and back."""
    if job.rank:
        values = job.torch.zeros(3, device=job.device)
        job.dist.recv(values, 0, group=job.first)
        job.dist.send(values * 2, 0, group=job.first)
        return values[0].item() * 2
    job.dist.send(job.ones(3), 1, group=job.first)
    values = job.torch.zeros(3, device=job.device)
    job.dist.recv(values, 1, group=job.first)
    return values[0].item()


@program
def race_message_used_before_it_comes(job: Job) -> Any:
    came, works = exchange(job, 64)
    early = came[0] * 2
    wait_for(works)
    return early[0].item()


@program
def order_of_unequal_messages(job: Job) -> Any:
    dist, other = job.dist, 1 - job.rank
    values = job.torch.zeros(5, device=job.device)
    sent = dist.P2POp(dist.isend, job.ones(5 + job.rank), other, job.first)
    wait_for(dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, values, other, job.first)]))
    return values[0].isnan().item() if not job.rank else True


@program
def deadlock_of_messages(job: Job) -> Any:
    """Each rank waits for a message before it sends its own."""
    values = job.torch.zeros(3, device=job.device)
    job.dist.recv(values, 1 - job.rank, group=job.first)
    values.sum().item()
    job.dist.send(values, 1 - job.rank, group=job.first)


@program
def right_a_completed_work_orders_the_host(job: Job) -> Any:
    """A work that says that it is over is as good as a wait of the host."""
    values, work = job.sum(job.first, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    return values[0].item()


@program
def interleaved_on_two_communicators(job: Job) -> Any:
    """Neither waits for the other here, where two streams run at once."""
    both = [job.first, job.second]
    works = [job.sum(group, async_op=True) for group in (reversed(both) if job.rank else both)]
    for _, work in works:
        work.wait()
    return [values[0].item() for values, _ in works]


@program
def order_of_a_thread_that_comes_late(job: Job) -> Any:
    """A thread of rank 0 sums long after all stands still: that is no circle."""
    if job.rank:
        job.sum(job.second)[0].item()
        return [job.sum(group)[0].item() for group in (job.second, job.first)]
    asleep, found = threading.Event(), []

    def background() -> None:
        with job.torch.Stream(device=job.device):  # not behind what the other thread waits for
            for pause in (0.0, 4.0):
                time.sleep(pause)
                found.append(job.sum(job.second)[0].item())
                asleep.set()

    thread = threading.Thread(target=background)
    thread.start()
    asleep.wait()
    found.append(job.sum(job.first)[0].item())
    thread.join()
    return found[:1] + found[-1:]


def judged(name: str, rank: int, kind: str, limit: timedelta) -> dict[str, Any]:
    import torch.distributed as dist

    from tests.late import device

    groups = [dist.new_group(backend=kind, timeout=limit) for _ in range(2)]
    try:
        value = PROGRAMS[name](Job(rank, groups))
    except RuntimeError as error:
        value = f"RuntimeError: {error}"
    try:
        device.synchronize_all()
    except RuntimeError as error:
        value = f"RuntimeError: {error}"
    row = {"program": name, "rank": rank, "value": value, "reports": device.reports()}
    dist.barrier()
    device.forget()
    for group in groups:
        dist.destroy_process_group(group)
    dist.barrier()
    return row


def main(mode: str, *names: str) -> None:
    import torch.distributed as dist

    from tests.late import device

    rank, limit = int(os.environ["RANK"]), timedelta(seconds=60)
    device.configure(mode, seed=rank)
    dist.init_process_group("gloo", timeout=limit)
    for name in names or PROGRAMS:
        kind = "nccl" if device.AS_CUDA else "late"
        print(json.dumps(judged(name, rank, kind, limit)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
