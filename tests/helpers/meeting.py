"""Makes PyTorch's threaded process group behave like a real backend: asynchronous, and loud where
ranks disagree.

As it comes, a collective of the threaded group blocks until all ranks have joined, also with
``async_op=True``, and takes whatever the ranks bring. Here the k-th collective of each rank on a
group meets the k-th of the others; the last to arrive does the work, waiting happens in ``wait()``,
and a meeting of different operations or sizes raises on the spot. An input that is changed before
``wait()``, or an output that is read before it, goes wrong as it would on a network.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

# same sizes on each rank
SYMMETRIC = (threaded.AllReduce, threaded.AllGather, threaded.ReduceScatter)


class Pending(dist.Work):
    """One rank's view of a collective under way."""

    def __init__(self, meeting: Meeting):
        super().__init__()
        self._meeting = meeting

    def wait(self, timeout: Any = None) -> bool:
        self._meeting.over.wait()
        if not self._meeting.done:
            sys.exit("another rank has failed")  # hidden by the run: the failure is what is shown
        return True

    def is_completed(self) -> bool:
        return self._meeting.done


class Meeting:
    """A collective: the data of each rank, and the work to do once all have joined."""

    def __init__(self, world: int, name: str):
        self._name = name
        self._brought: list[Any] = [None] * world
        self._said: list[str] = [""] * world
        self._missing = world
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.done = False

    def join(self, rank: int, data: Any, collective: Any) -> Pending:
        with self._lock:
            self._brought[rank], self._said[rank] = data, self._describe(collective, data)
            self._missing -= 1
            last = self._missing == 0
        if last:
            if len(set(self._said)) > 1:
                raise AssertionError(
                    f"ranks meet in different collectives ({self._name}): "
                    f"{dict(enumerate(self._said))}"
                )
            collective.work(self._brought)
            self._brought = []
            self.done = True
            self.over.set()
        return Pending(self)

    def forget(self, rank: int) -> None:
        """Hold nothing of ``rank``, which has destroyed the group and will wait for nothing."""
        with self._lock:
            if not self.done:
                self._brought[rank] = None

    @staticmethod
    def _describe(collective: Any, data: Any) -> str:
        kind = type(collective).__name__
        if not isinstance(collective, SYMMETRIC):
            return kind
        sizes = [
            f"{tuple(t.shape)} {t.dtype}".replace("torch.", "")
            for t in threaded.flatten_list(data)
            if isinstance(t, torch.Tensor)
        ]
        return f"{kind} of {', '.join(sizes)}"


class Message:
    """A tensor between two ranks: it is copied, as it is then, once both of them have come."""

    def __init__(self) -> None:
        self._sent: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None
        self.over = threading.Event()
        self.done = False

    def lacks(self, sends: bool) -> bool:
        return (self._sent if sends else self._buffer) is None

    def join(self, tensor: torch.Tensor, sends: bool) -> Pending:
        if sends:
            self._sent = tensor
        else:
            self._buffer = tensor
        if self._sent is not None and self._buffer is not None:
            with torch.no_grad():
                self._buffer.copy_(self._sent)
            self._sent = self._buffer = None
            self.done = True
            self.over.set()
        return Pending(self)


class _Seat:
    """The result of ``_start_coll`` on a rank: the meeting, and the collective that this rank
    expects.
    """

    def __init__(self, meeting: Meeting, collective: Any):
        self._meeting, self._collective = meeting, collective

    def join(self, rank: int, data: Any) -> Pending:
        return self._meeting.join(rank, data, self._collective)


def _name_of_group(group: Any) -> str:
    """Return the group's name like torch's own function, but also while the group is being
    destroyed: torch asks for it after the entry is gone.
    """
    return group.__dict__.get("kept_name") or group._world().pg_names[group]


class Meetings:
    """Stands in for the bookkeeping of ``ProcessLocalGroup`` while it is installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], Meeting] = {}
        self._messages: dict[tuple[Any, ...], list[Message]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._before: dict[str, Any] = {}
        self._returned: set[int] = set()  # threads of ranks that have done their work

    def _start(self, collective: Any, group: Any) -> _Seat:
        with self._lock:
            mine = (threading.get_ident(), group.pg_name)
            number = self._counts[mine] = self._counts.get(mine, -1) + 1
            key = (group.pg_name, number)
            meeting = self._open.get(key)
            if meeting is None:
                meeting = self._open[key] = Meeting(
                    group.size(), f"number {number} of group {group.pg_name}"
                )
            return _Seat(meeting, collective)

    def _transfer(
        self, group: Any, tensors: list[torch.Tensor], peer: int, tag: int, sends: bool
    ) -> Pending:
        ends = (group.rank(), peer) if sends else (peer, group.rank())
        with self._lock:
            messages = self._messages.setdefault((group.pg_name, *ends, tag), [])
            messages[:] = [each for each in messages if not each.done]
            message = next((each for each in messages if each.lacks(sends)), None)
            if message is None:
                messages.append(message := Message())
            return message.join(tensors[0], sends)

    def _shut_down(self, group: Any) -> None:
        group.kept_name = group._world().pg_names[group]
        with self._lock:
            if threading.get_ident() in self._returned:
                return
            for (name, _), meeting in self._open.items():
                if name == group.kept_name:
                    meeting.forget(group.rank())

    def returned(self) -> None:
        """Keep what this rank has brought: it ends, and the others may still come."""
        with self._lock:
            self._returned.add(threading.get_ident())

    def release_all(self) -> None:
        """Let every rank that waits go: it ends quietly."""
        with self._lock:
            messages = itertools.chain.from_iterable(self._messages.values())
            for each in (*self._open.values(), *messages):
                each.over.set()

    def install(self) -> None:
        group = threaded.ProcessLocalGroup
        replaced: dict[str, Callable[..., Any]] = {
            "_start_coll": lambda collective, pg: self._start(collective, pg),
            "_end_coll": lambda collective, pg: None,
        }
        for name, function in replaced.items():
            self._before[name] = group.__dict__[name]
            setattr(group, name, staticmethod(function))
        self._before["pg_name"] = group.__dict__["pg_name"]
        group.pg_name, group.shutdown = property(_name_of_group), lambda pg: self._shut_down(pg)
        group.send = lambda pg, *given: self._transfer(pg, *given, sends=True)
        group.recv = lambda pg, *given: self._transfer(pg, *given, sends=False)

    def uninstall(self) -> None:
        for name in ("shutdown", "send", "recv"):
            delattr(threaded.ProcessLocalGroup, name)
        threaded.ProcessLocalGroup.pg_name = self._before.pop("pg_name")
        for name, function in self._before.items():
            setattr(threaded.ProcessLocalGroup, name, function)
