"""Real gloo processes on 127.0.0.1, for what threads cannot show: asynchronous transport, ends.

A launch costs seconds (each process imports torch), so one launch runs many cases inside the same
processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.zero.layout import wrap
from tests.helpers import stress
from tests.helpers.ranks import RankFailed, RanksHung

HOST = "127.0.0.1"
GRACE = 30.0  # seconds the others get to report once one process has failed


_log: Any = None


def say(text: str) -> None:
    """Note where this process is: shown if it hangs."""
    if _log is not None:
        _log.write(f"{text}\n")
        _log.flush()


def _child(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    log: str,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    test: str,
) -> None:
    global _log
    with open(log, "w") as stacks:
        _log = stacks
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
        os.environ.update(
            MASTER_ADDR=HOST, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
        )
        os.environ["PYTEST_CURRENT_TEST"] = (
            test  # the server may have forked for another test before
        )
        torch.set_num_threads(1)
        stress.install()
        # as in conftest.py: small blocks are units all the same, and their parameters sharded
        wrap.GRANULARITY = wrap.PERSISTENCE = 0
        try:
            store = dist.TCPStore(
                HOST, port, world, is_master=False, timeout=timedelta(seconds=timeout)
            )
            dist.init_process_group(
                "gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout)
            )
            # gloo connects to no rank that has left the group already: none does before all are in
            dist.barrier()
            answer = ("ok", fn(rank, *args))
            dist.destroy_process_group()
        except BaseException:  # whatever it is belongs to the parent, which raises it
            answer = ("error", traceback.format_exc())
        # By value: torch's own reductions would share the memory of a process that is about to end.
        pipe.send_bytes(pickle.dumps(answer))
        pipe.close()


def forkserver() -> Any:
    """Return the context of a process that has imported what ranks need, and forks them.

    It forks the workers of a DataLoader, too. A rank that is a thread would fork them beside the
    main thread: Python clears that thread's state in the child, where torch caches operations on
    a DTensor, so that the destructor of their ProcessGroupGloo waits for threads of the parent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.helpers.preloaded"])
    return context


def run_processes(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
    start: str = "forkserver",
) -> list[Any]:
    """Run ``fn(rank, *args)`` (importable, with picklable arguments and result) in ``world`` gloo
    processes. With ``start="spawn"`` each has this process's environment from its start, and
    imports for itself.

    Raises :class:`RankFailed` with the traceback of the ranks that failed, also of one that died
    without a word, and :class:`RanksHung` with every rank's stack after ``timeout`` seconds. Only
    its own children are ever ended.
    """
    context = forkserver() if start == "forkserver" else multiprocessing.get_context(start)
    store = dist.TCPStore(
        HOST, 0, world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    with tempfile.TemporaryDirectory() as folder:
        logs = [os.path.join(folder, f"rank{rank}.txt") for rank in range(world)]
        children, pipes = [], []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                child = context.Process(
                    target=_child,
                    args=(rank, world, store.port, timeout, logs[rank], theirs, fn, args, test),
                    daemon=False,  # it may fork the workers of a DataLoader
                )
                child.start()
                theirs.close()
                children.append(child)
                pipes.append(ours)
            answers = _collect(pipes, timeout)
            failures = [
                f"process of rank {rank} of {world} failed:\n{text}"
                for rank, (kind, text) in answers.items()
                if kind == "error"
            ]
            if failures:
                raise RankFailed("\n".join(failures))
            if len(answers) < world:
                raise RanksHung(_stacks(children, logs, answers, timeout))
            return [answers[rank][1] for rank in range(world)]
        finally:
            for child in children:
                child.join(2.0)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collect(pipes: list[Connection], timeout: float) -> dict[int, tuple[str, Any]]:
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        for pipe in wait(open_pipes, timeout=left):
            rank = pipes.index(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                answers[rank] = (
                    "error",
                    "it ended without a word (killed, or aborted from native code)",
                )
            if answers[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _stacks(children: list[Any], logs: list[str], answers: dict[int, Any], timeout: float) -> str:
    silent = [rank for rank in range(len(children)) if rank not in answers]
    for rank in silent:
        os.kill(children[rank].pid, signal.SIGUSR1)
    time.sleep(0.5)
    story = [f"ranks {silent} did not return within {timeout:.0f} s"]
    for rank in silent:
        with open(logs[rank]) as log:
            said, _, stack = log.read().partition("Current thread")
        words = [
            line
            for line in said.splitlines()
            if not line.startswith(("  ", "Thread", "Timeout")) and line
        ]
        story.append(f"rank {rank} has said {words[-1:]} and stands in\n{stack[:3000]}")
    return "\n".join(story)
