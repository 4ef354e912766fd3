"""Ranks for tests: threads over PyTorch's threaded process group, and real gloo processes. Neither
can hang a suite.

Threads start in milliseconds and show the logic; processes show the transport. The threaded group
(asynchronous and strict, see helpers/meeting.py) waits for ever on a missing collective: every run
has a deadline, after which the stack of each rank is shown.
Build and seed models before the ranks start, because threads share the random generator.
Class-level state is shared between threads too.
"""

from __future__ import annotations

import ast
import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import _ops
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.helpers.meeting import Meetings

_MAKING = threading.RLock()


def _make_one_at_a_time(kind: type) -> None:
    """Torch makes the Python object of an operator when it is first asked for, and its dispatcher
    keeps a pointer to it that is no reference. Of two threads that make one at the same time,
    under a dispatch mode, the second puts its own in the first one's place: the pointer is to
    freed memory.
    """
    make = kind.__getattr__  # type: ignore[attr-defined]

    def made(parent: Any, name: str) -> Any:
        with _MAKING:
            return vars(parent)[name] if name in vars(parent) else make(parent, name)

    kind.__getattr__ = made  # type: ignore[attr-defined]


_make_one_at_a_time(_ops._OpNamespace)
_make_one_at_a_time(_ops.OpOverloadPacket)


def _parsing_one_at_a_time(*args: Any, **kwargs: Any) -> ast.AST:
    """In Python 3.11 threads share the depth that a tree has while it is built, which
    ``numpy.load`` does for each header: "AST constructor recursion depth mismatch".
    """
    with _MAKING:
        return _parse(*args, **kwargs)


if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 asks for it as a group ends
    threaded.ThreadLocalWorld.comms = property(lambda self: [])

_parse, ast.parse = ast.parse, _parsing_one_at_a_time  # type: ignore[assignment]

LINGER = 60.0  # seconds the others may still run once the first rank has returned


class RankFailed(AssertionError):
    """A rank raised.

    The message names the rank and holds its traceback; ``__cause__`` is the exception itself.
    """


class RanksHung(AssertionError):
    """A rank did not return in time. The message names it, and the position of every rank."""


class _Rank(threading.Thread):
    def __init__(
        self,
        rank: int,
        world: int,
        store: dist.Store,
        timeout: float,
        meetings: Meetings,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ):
        super().__init__(name=f"rank-{rank}", daemon=True)
        self.rank, self.world, self.store, self.limit, self.fn, self.args = (
            rank,
            world,
            store,
            timeout,
            fn,
            args,
        )
        self.meetings = meetings
        self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "threaded",
                rank=self.rank,
                world_size=self.world,
                store=self.store,
                timeout=timedelta(seconds=self.limit),
            )
            try:
                self.result = self.fn(self.rank, *self.args)
            finally:
                self.meetings.returned()
                if dist.is_initialized() and not self.abandoned:  # it may be another run's by now
                    dist.destroy_process_group()
        except SystemExit as ended:  # how a rank ends that waits for one that has failed
            self.error = ended
        except BaseException as error:
            self.error = error
            self.meetings.release_all()

    def where(self) -> str:
        """Return the innermost frames of this rank's stack, or that it has ended."""
        if not self.is_alive():
            return f"rank {self.rank}: {'failed' if self.error is not None else 'returned'}"
        frame = sys._current_frames().get(self.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-12:]) if frame else "  (no frame)\n"
        return f"rank {self.rank}: still running in\n{stack}"

    def end(self) -> None:
        """Make an abandoned thread stop at its next line of Python."""
        if self.ident is not None and self.is_alive():
            self.abandoned = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(SystemExit)
            )


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world`` threads that share a process group; return the results
    in rank order.

    Raises :class:`RankFailed` with the first failure (the other ranks are stopped) and
    :class:`RanksHung` after ``timeout`` seconds, or :data:`LINGER` seconds after one rank has
    returned and another has not.
    """
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    meetings = Meetings()
    meetings.install()
    of_a_rank = threading.Thread.start
    threading.Thread.start = _start_in_the_same_rank  # type: ignore[method-assign]
    ranks = [_Rank(rank, world, store, timeout, meetings, fn, args) for rank in range(world)]
    try:
        for thread in ranks:
            thread.start()
        hung = _wait(ranks, timeout, meetings)
        _raise_failure([thread for thread in ranks if not isinstance(thread.error, SystemExit)])
        if hung:
            raise RanksHung(hung)
        _raise_failure(ranks)  # a rank that ended by itself
        return [thread.result for thread in ranks]
    finally:
        for thread in ranks:
            thread.end()
        threading.Thread.start = of_a_rank  # type: ignore[method-assign]
        meetings.uninstall()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


_start_thread = threading.Thread.start


def _start_in_the_same_rank(thread: threading.Thread) -> None:
    """A thread that a rank starts belongs to that rank, as it would in a process of its own."""
    world = threaded.ThreadLocalWorld._world.__dict__.get("world")
    run = thread.run

    def run_as_rank() -> None:
        if world is not None:
            threaded.ThreadLocalWorld._world.world = world
        run()

    if not isinstance(thread, _Rank):
        thread.run = run_as_rank  # type: ignore[method-assign]
    _start_thread(thread)


def _wait(ranks: list[_Rank], timeout: float, meetings: Meetings) -> str:
    """Wait for all ranks; return '' or, when they do not come, where each one is."""
    start = time.monotonic()
    first_end: float | None = None
    while alive := [thread for thread in ranks if thread.is_alive()]:
        alive[0].join(0.05)
        now = time.monotonic()
        if first_end is None and any(not thread.is_alive() for thread in ranks):
            first_end = now
        failed = any(thread.error is not None for thread in ranks)
        late = now - start > timeout or (
            first_end is not None and now - first_end > (2.0 if failed else LINGER)
        )
        if late:
            waited = f"ranks did not all return within {now - start:.0f} s"
            story = "\n".join([waited, *(thread.where() for thread in ranks)])
            meetings.release_all()
            for thread in ranks:
                thread.join(1.0)
            return story
    return ""


def _raise_failure(ranks: list[_Rank]) -> None:
    failed = [thread for thread in ranks if thread.error is not None]
    if not failed:
        return
    text = "\n".join(
        f"rank {t.rank} of {t.world} raised:\n{''.join(traceback.format_exception(t.error))}"
        for t in failed[:2]
    )
    if len(failed) > 2:
        text += f"\nand so did ranks {[t.rank for t in failed[2:]]}"
    raise RankFailed(text) from failed[0].error
