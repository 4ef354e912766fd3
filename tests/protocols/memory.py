"""Checkpoints in memory without an engine: their folders, files and messages, in a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch

from hf_zero.checkpoint import find
from hf_zero.checkpoint.manifest import FileEntry
from hf_zero.checkpoint.memory import claimed_folders, folders, saving
from hf_zero.checkpoint.memory.copy_exchange import CopyExchange
from hf_zero.checkpoint.memory.job_folders import Hosts
from hf_zero.checkpoint.memory.record import RankRecord
from hf_zero.checkpoint.memory.slot_files import Staged
from hf_zero.checkpoint.save_plan import RankReport
from hf_zero.checkpoint.tensorfile import FilePlan
from tests.protocols.files import PerProcess, numbers, scheduled
from tests.protocols.ranks import World
from tests.protocols.simulation import running

JOB, SIZE = "job", 64  # bytes of a rank's file
LOST = "Connection closed by peer"


def point(what: str) -> None:
    simulation = running()
    assert simulation is not None
    simulation.point(what)


class Connections:
    """``HostTransfers`` of a rank: messages that arrive one by one, in parts."""

    def __init__(self, world: World, rank: int, mail: dict[Any, Any], closed: set[int]) -> None:
        self._world, self._rank, self._mail, self._closed = world, rank, mail, closed
        self._sent: Counter[Any] = Counter()

    def _send(self, peer: int, value: Any) -> None:
        if self._rank in self._closed:
            raise RuntimeError("closed")
        self._world.simulation.point(f"send to {peer}")
        self._mail[self._rank, peer, self._number("to", peer)] = value

    def _receive(self, peer: int) -> Any:
        key = peer, self._rank, self._number("from", peer)
        process = self._world.processes[peer]

        def over() -> bool:
            return key in self._mail or not process.alive or peer in self._closed

        self._world.simulation.wait(over, self._world.timeout, f"receive from {peer}")
        if key not in self._mail or self._rank in self._closed:
            raise RuntimeError(LOST)
        return self._mail.pop(key)

    def _number(self, way: str, peer: int) -> int:
        self._sent[way, peer] += 1
        return self._sent[way, peer]

    def agree(self, ok: bool) -> bool:
        others = [rank for rank in range(self._world.size) if rank != self._rank]
        for peer in others:
            self._send(peer, ok)
        return all([ok, *map(self._receive, others)])

    def transfer(self, sends: Any, receives: Any, received: Any = None) -> None:
        for peer, tensor in sends:
            self._send(peer, tensor.clone())
        for peer, tensor in receives:
            sent, half = self._receive(peer), tensor.numel() // 2
            tensor[:half] = sent[:half]
            point("receive the other half")
            tensor[half:] = sent[half:]

    def close(self) -> None:
        self._closed.add(self._rank)


class Files:
    """``SlotFiles``: files as tensors that share their memory."""

    def open(self, path: Path, size: int) -> torch.Tensor:
        path.parent.mkdir(parents=True, exist_ok=True)
        point(f"map {path}")
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def close(self) -> None:
        pass


def copy_in_parts(image: torch.Tensor, plan: FilePlan, tensors: Any, device: Any) -> None:
    image[: SIZE // 2] = tensors
    point("copy the other half")
    image[SIZE // 2 :] = tensors


class Rank(saving.MemoryCheckpoints):
    """The checkpoints in memory of one rank, as their constructor makes them.

    committed(step): called once this rank knows that the generation of ``step`` is whole.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        base: Path,
        hosts: Sequence[str],
        connections: Any = None,
        copies: int = 1,
        begun: int = 0,
        committed: Callable[[int], object] = lambda step: None,
    ) -> None:
        self.number, self.rank, self.job, self.world, self.copies = 0, rank, JOB, world.size, copies
        self.bases, self.base, self.hosts = [base], base, Hosts(hosts)
        self.is_lasting, self.every, self._limit, self._device = True, 1, None, torch.device("cpu")
        self.saved_by_trainer, self.has_stepped, self.client_state = False, False, {}
        self.token, self.attempt, self._committed = f"attempt {begun}", begun, committed
        self.newest_id, self.ready, self._slot, self._saves, self._last_step = "", "", -1, 0, -1
        self._is_cut_off, self._prevails, self._logged_wait = False, True, False
        self._staged, self._early = None, None
        self._read_by_disk, self._marks, self._running = None, {}, None
        self.transfers = connections or SimpleNamespace(close=lambda: None)
        self._files = Files()  # type: ignore[assignment]
        self._exchange = CopyExchange(self.transfers, self.hosts, rank, world.size, copies)
        self._exchange._kept = self._files
        self._ranks = SimpleNamespace(
            all_gather_object=lambda value, what="": world.collective(
                "objects", rank, value, said=what or "an outcome"
            )
        )

    def _plan(self, engine: Any, *_: Any) -> Any:
        step = engine.counters.global_steps
        save_id = sha256(f"{self.token} {self._saves}".encode()).hexdigest()[:32]
        file = FileEntry(find.rank_file(self.rank, self.world), self.rank, SIZE, "")
        report = RankReport(file, {}, [], {}, {}, None)
        record = RankRecord(save_id, self.attempt, step, self.world, report, None, {}, {})
        plan = SimpleNamespace(file=FilePlan((), bytes(SIZE)), tensors=(7 * step + self.rank) % 251)
        return record, plan

    def _log_save(self, staged: Staged, step: int, stall: float, seconds: float) -> None:
        self._committed(step)


def engine_at(step: int) -> Any:
    """Return what a save asks of an engine after ``step`` steps."""
    nothing = SimpleNamespace(refuse=lambda what: None, check=lambda: None)
    return SimpleNamespace(
        counters=SimpleNamespace(global_steps=step),
        changes=nothing,
        refuse_destroyed=lambda what: None,
        mesh=SimpleNamespace(watchdog=nothing),
        module=None,
        take_user_writes=lambda: None,
        optimizer_step=SimpleNamespace(complete_state=lambda: None),
        flats=(),
        bound=None,
    )


@contextmanager
def processes() -> Iterator[pytest.MonkeyPatch]:
    """Give each simulated process its variables of the modules; schedule calls for files."""
    with scheduled() as patch:
        patch.setattr(folders, "PROCESS", PerProcess("PROCESS", numbers()))
        patch.setattr(folders, "_claims", PerProcess("_claims", WeakValueDictionary))
        patch.setattr(folders, "free", lambda base: 1 << 30)
        patch.setattr(saving, "_claimed", {})
        patch.setattr(saving, "copy_to_memory", copy_in_parts)
        patch.setattr(saving, "WholeNames", lambda module: None)
        patch.setattr(claimed_folders.native, "release_at_exit", lambda *args: False)
        patch.setattr(saving, "buffers_of_other_stages", lambda *args: {})
        yield patch
