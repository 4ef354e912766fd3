"""Cases that ranks run one after another in the same processes, and what one plain process makes of
their answers: ``python -m tests.nccl.cases MODULE FOLDER NAME...`` is a rank.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import hf_zero
from hf_zero.distributed.backends import backend_string
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.process_group import default_device
from hf_zero.zero.layout import wrap
from tests.helpers.training import At, Driver, Job, Plan, Trace, merge
from tests.nccl import ranks, ways

TIMEOUT = 60  # seconds that a rank waits for others
LIMIT = {True: 60.0, False: 240.0}  # seconds of a case without a word, on the card and on CPUs
GRACE = 15.0  # seconds that other ranks may still report once one has failed
GIVEN_UP = 3  # launches in a row whose ranks end before their first case
ERROR = re.compile(
    r"^(?:\[rank\d+\]: )?(?:\[hf-zero ERROR [^\]]*\] |hf-zero[^:\n]*: (?=\w*Error)|"
    r"(?=[\w.]*(?:Error|Exception|Interrupt)\b))(.*)",
    re.MULTILINE,
)
ELSEWHERE = "see the error logged above"

Answers = list[Any]  # of the ranks
Figures = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A rank, as a case sees it; ``folder`` is one for all ranks of the case."""

    rank: int
    world: int
    device: torch.device
    folder: Path

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Case:
    """``run`` returns what ``check`` compares in one plain process, with tensors in host memory.

    ``on_cpu``: it has a meaning over gloo on the CPU, too. ``needs``: a package that it imports.
    """

    name: str
    run: Callable[[Place], Any]
    check: Callable[[Answers, torch.device], Figures]
    ranks: int = 2
    on_cpu: bool = True
    needs: str = ""


@dataclass(frozen=True)
class Outcome:
    """``failure`` is the error of a rank or of the comparison, "" if there is none."""

    case: Case
    failure: str = ""
    figures: Figures = field(default_factory=dict)


def moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


class Moving(Driver):
    """``net``, whose inputs are moved to ``device``."""

    def __init__(self, net: Driver, device: torch.device) -> None:
        self.net, self.device = net, device
        self.module, self.dtype, self.memory = net.module, net.dtype, net.memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*moved(args, self.device), **moved(kwargs, self.device))

    def backward(self, loss: torch.Tensor) -> None:
        self.net.backward(loss)

    def __getattr__(self, name: str) -> Any:  # the engine of a session
        return getattr(self.net, name)


class OnDevice(Job):
    """``job`` with its model and its inputs on ``device``."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device, self.name = job, device, f"{job.name}, on {device.type}"

    def build(self) -> torch.nn.Module:
        return self.job.build().to(self.device)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return self.job.optimizer(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return self.job.loss(Moving(net, self.device), at)

    def micro(self, net: Driver, at: At) -> torch.Tensor:
        return self.job.micro(Moving(net, self.device), at)

    def window(
        self, net: Driver, at: Sequence[At], end_micro: Callable[[], None]
    ) -> list[torch.Tensor]:
        return self.job.window(Moving(net, self.device), at, end_micro)


def on_device(trace: Trace, device: torch.device) -> Trace:
    return Trace(
        trace.losses, trace.norms, moved(trace.grads, device), moved(trace.weights, device)
    )


def merged(answers: Answers, device: torch.device) -> Trace:
    """One trace of all ranks, whose weights, gradients and norms are equal bit for bit."""
    return on_device(merge([answer["trace"] for answer in answers]), device)


def factor_of(plan: Plan, stage: int) -> float:
    """Return how far a run in 16 bits may be from one in fp32, by that of the plain loop: NCCL
    adds up the gradients of more than two ranks in an order of its own.
    """
    from tests.helpers import oracle

    return oracle.MIXED_FACTOR_OTHER_ORDER if plan.ranks > 2 else oracle.factor_at(stage, 1)


class Orders:
    """The collectives that this rank issues on each communicator, while it is entered."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, tuple[int, ...]], list[str]] = {}

    def __enter__(self) -> Orders:
        self._issue, self._withdraw = CollectiveLog.issue, CollectiveLog.withdraw
        orders, issue, withdraw = self, CollectiveLog.issue, CollectiveLog.withdraw

        def noting(log: CollectiveLog, what: str, *more: Any) -> Any:
            pending = issue(log, what, *more)
            if len(log.ranks) > 1:
                orders.of.setdefault((log.name, log.ranks), []).append(what)
            return pending

        def taking_back(log: CollectiveLog) -> None:
            withdraw(log)
            orders.of[log.name, log.ranks].pop()

        CollectiveLog.issue, CollectiveLog.withdraw = noting, taking_back  # type: ignore
        return self

    def __exit__(self, *_: object) -> None:
        CollectiveLog.issue, CollectiveLog.withdraw = self._issue, self._withdraw  # type: ignore


def same_orders(answers: Answers) -> Figures:
    """Check that all ranks of each communicator have issued the same collectives in one order."""
    seen = [answer["orders"] for answer in answers]
    count = 0
    for rank, own in enumerate(seen):
        for (name, members), order in own.items():
            for other in members:
                theirs = seen[other].get((name, members), [])
                place = next(
                    (at for at, pair in enumerate(zip(order, theirs)) if pair[0] != pair[1]),
                    min(len(order), len(theirs)),
                )
                assert order == theirs, (
                    f"{name}: rank {rank} issues {order[place : place + 2]} as number {place}, "
                    f"rank {other} {theirs[place : place + 2]}"
                )
            count += len(order) if rank == members[0] else 0
    assert count, "no collective was noted"
    return {"collectives": count}


_joined: list[dist.Store] = []  # the store of the first job of this process


def join() -> torch.device:
    """Join the job as hf-zero does, and after a case that has left it once more, over the same
    store; return the device of this rank.
    """
    if not _joined:
        hf_zero.init_distributed(timeout=TIMEOUT)
        _joined.append(dist.distributed_c10d._get_default_store())
    elif not dist.is_initialized():
        rejoin(f"job {len(_joined)}", backend_string(default_device()))
    return default_device()


def rejoin(name: str, backend: str, device_id: torch.device | None = None) -> None:
    """Make the process group as scripts do, over the store of the first one under ``name``."""
    _joined.append(_joined[0])
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{name}, {len(_joined)}", _joined[0]),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=TIMEOUT),
        device_id=device_id,
    )


def rank_main(module: str, folder: Path, names: Sequence[str]) -> None:
    faulthandler.register(ranks.DUMP, all_threads=True)
    torch.set_num_threads(1)
    wrap.GRANULARITY = wrap.PERSISTENCE = 0  # small blocks are units, and sharded
    cases = importlib.import_module(module).CASES
    join()
    print("READY", flush=True)
    for number, name in enumerate(names):
        device = join()
        rank, world = dist.get_rank(), dist.get_world_size()
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        torch.save(cases[name].run(Place(rank, world, device, own)), own / f"answer-{rank}.pt")
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        print(f"DONE {name}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def outcomes(
    module: str, cases: Sequence[Case], count: int, way: str, logs: Path, device: torch.device
) -> Iterator[Outcome]:
    """Run ``cases`` of ``module`` on ``count`` ranks and yield what becomes of each. A case that
    fails ends its ranks, and the next ones get others.
    """
    left, launches, fruitless = list(cases), 0, 0
    slow: set[str] = set()
    while left and fruitless < GIVEN_UP:
        launches += 1
        folder = logs / f"{count}-ranks-{launches}"
        folder.mkdir(parents=True, exist_ok=True)
        more = ways.ONE_CTA if left[0].name in slow else {}
        names, done = [case.name for case in left], 0
        given = (module, str(folder), *names)
        with ranks.started(
            "tests.nccl.cases", *given, count=count, way=way, logs=folder, more=more
        ) as job:
            for failure in _ends(job, names, way):
                case = left[done]
                if not failure:
                    yield _compared(case, folder / str(done), count, device, more)
                elif "nothing for" in failure and way in ways.ON_CARD and case.name not in slow:
                    slow.add(case.name)  # once more, with kernels of one block
                    break
                else:
                    yield Outcome(case, failure)
                done += 1
        fruitless = 0 if done > 1 or not left[:done] else fruitless + 1
        left = left[done:]
    for case in left:
        yield Outcome(case, f"its ranks were not started after {GIVEN_UP} failures in a row")


def _ends(job: ranks.Ranks, names: Sequence[str], way: str) -> Iterator[str]:
    """Yield "" for each of ``names`` that all ranks have run, and the failure of the first that
    they have not.
    """
    counts, ended = Counter[str](), 0
    waiting = iter(names)
    name = next(waiting, None)
    seconds = LIMIT[way in ways.ON_CARD]
    try:
        for _, line in job.lines(seconds):
            ended += not line
            counts[line.removeprefix("DONE ")] += line.startswith("DONE ")
            while name is not None and counts[name] == len(job.processes):
                yield ""
                name = next(waiting, None)
            if ended and name is not None:
                break
    except TimeoutError as error:
        job.dump()
        yield f"{error}: the stacks are in {job.logs[0].parent}"
        return
    if name is not None:
        job.codes(GRACE)
        yield failure_of(job)


def failure_of(job: ranks.Ranks) -> str:
    """Return the errors of the ranks, each in a line, without those that name another rank's."""
    found = []
    for rank, process in enumerate(job.processes):
        errors = [text for text in ERROR.findall(job.said(rank)) if ELSEWHERE not in text]
        code = process.poll()
        if errors or code:
            found.append(f"rank {rank}: {errors[-1] if errors else f'ended with {code}'}")
    own = [line for line in found if "RankMismatchError" not in line]
    return "; ".join(own or found) or "the ranks ended without a word"


def _compared(case: Case, folder: Path, count: int, device: torch.device, more: Any) -> Outcome:
    answers = [
        torch.load(folder / f"answer-{rank}.pt", weights_only=False) for rank in range(count)
    ]
    try:
        return Outcome(case, figures={**case.check(answers, device), **more})
    except AssertionError as error:
        return Outcome(case, " ".join(str(error).split()) or "a comparison failed")
    except Exception:  # of a comparison: a failure of this case, not of the others
        return Outcome(case, traceback.format_exc().strip().splitlines()[-1])


if __name__ == "__main__":
    # the module that cases import is this one, not a second one by another name
    from tests.nccl.cases import rank_main as main

    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)  # NCCL and torch may take seconds for what the end of the process frees anyway
