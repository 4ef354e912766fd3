"""Saves that a thread writes while training goes on: state is copied into staging memory at
the call.

[Note: without a collective]
All that is collective comes before the thread begins: tag, folder, the copies, what the manifest
says. Afterwards each rank publishes in the store what came of its file; rank 0 commits once all are
well, and publishes the outcome. A thread that waits for another rank so never meets a collective of
the training. Every rank ends with the outcome of rank 0, so that what waits for it (a save, a load,
``wait_for_checkpoint``) raises on all ranks or on none. A rank that has lost the store looks at the
folder, which decides.

Threads are no daemons: an interpreter that ends, by an exception too, waits for them. A process
that is killed leaves a temporary folder and no checkpoint.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.collective_try import describe_error, describe_failures
from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.file_writer import copy_bytes, write_image
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.plan import RankReport, SavePlan, SharedFiles, announce, publish
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.checkpoint.tensorfile import bytes_view
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError, HfZeroError, HostMemoryError
from hf_zero.logs import logger
from hf_zero.ops.host_memory import HostArena

Action = Callable[[], object]

_in_flight_lock = threading.Lock()
_in_flight: dict[AnyPath, list[Action]] = {}


def started(final: AnyPath) -> None:
    """A thread is going to publish ``final``."""
    with _in_flight_lock:
        _in_flight[final] = []


def finished(final: AnyPath, whole: bool) -> None:
    """``final`` is whole, and what waits for it is done now; or nothing has come of it, and that
    is left undone.
    """
    with _in_flight_lock:
        actions = _in_flight.pop(final, [])
    for action in actions if whole else ():
        action()


def is_below(final: AnyPath, folder: Path) -> bool:
    """Whether the checkpoint ``final`` is in ``folder``, however deep; one in an object store is
    in no folder.
    """
    return not is_remote(final) and final.parent.resolve().is_relative_to(folder.resolve())


def after_commit(folder: Path, action: Action) -> None:
    """Run ``action`` when nothing is being written in ``folder``: now, or from the thread that
    writes there, before its save is over.

    Where a save in ``folder`` fails the action is not run: what it would remove is still needed.
    Only the process that publishes knows of a save, which is rank 0's.
    """
    with _in_flight_lock:
        final = next((each for each in _in_flight if is_below(each, folder)), None)
        if final is not None:
            _in_flight[final].append(lambda: after_commit(folder, action))
            return
    action()


UNTOUCHED = "Nothing was saved as {!r}; earlier checkpoints are as they were."


@dataclass(frozen=True)
class SaveJob:
    """A save whose image is staged: where it goes, this rank's file, on rank 0 all the other
    files; how many checkpoints stay.
    """

    to: CommitTarget
    path: AnyPath
    rest: SharedFiles | None
    keep: int | None = None


class AsyncSaver:
    """The saves of one engine that a thread writes, one at a time. Staging memory is as large as
    this rank's file and kept.

    comm: a ``contract.Comm`` with a mailbox; rank and world size of this rank beside it.
    device: where the state is; staging memory is pinned if that is a GPU.
    """

    def __init__(self, mesh: Any, rank: int, world: int, device: torch.device):
        self._rank, self._world = rank, world
        self._mail = mesh.store_messages("saves")
        self._arena = HostArena(pin=True, device=device)
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._size = 0
        self._stall = 0.0
        self.number = 0  # of the last save that was begun
        self._running: tuple[SaveJob, Future[None]] | None = None

    @property
    def failed(self) -> bool:
        """Whether a save has ended that nobody has waited for, and not well."""
        return (
            self._running is not None
            and self._running[1].done()
            and self._running[1].exception() is not None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory."""
        return self._memory.numel()

    def wait(self, what: str = "", below: Path | None = None) -> None:
        """Return when nothing is being written, in the folder ``below`` if one is given; ``what``
        waits is said where it has to.

        Raises CheckpointError, alike on all ranks.
        """
        if self._running is None or (
            below is not None and not is_below(self._running[0].to.final, below)
        ):
            return
        job, future = self._running
        if what and not future.done() and self._rank == 0:
            logger.warning(
                "%s waits for %s, which is still being written: saves come faster "
                "than the disk takes them",
                what,
                job.to.final,
            )
        try:
            future.result()
        finally:
            if future.done():  # a wait that was interrupted leaves the thread with its memory
                self._running = None

    def stage(self, draft: SavePlan) -> RankReport | str:
        """Copy the file of ``draft`` to staging memory; or why there is none for it."""
        if self._mail is None and self._world > 1:
            return "the ranks of this process group share no store"
        begun, size = time.perf_counter(), draft.plan.size
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before more is taken
            try:
                self._memory = self._arena.take(size, torch.uint8)
            except HostMemoryError as error:
                return str(error)
        at = len(draft.plan.header)
        copy_bytes(
            self._memory[:at], torch.frombuffer(bytearray(draft.plan.header), dtype=torch.uint8)
        )
        for entry in draft.plan.entries:
            values = draft.tensors[entry.name].values().detach().reshape(-1)
            copy_bytes(self._memory[at + entry.begin : at + entry.end], values, wait=False)
            del values
        kinds.synchronize(self._device)  # before training goes on to change it
        self._size, self._stall = size, time.perf_counter() - begun
        return draft.written

    def start(self, job: SaveJob) -> None:
        """Write what was staged, from a thread. Training goes on."""
        self.number += 1
        image = bytes_view(self._memory)[: self._size]
        ended: Future[None] = Future()
        self._running = (job, ended)
        if job.rest is not None:
            started(job.to.final)
        work = _Work(job, image, self._mail, self._rank, self._world, self.number, self._stall)
        threading.Thread(target=_settle, args=(ended, work.run), name="hf-zero save").start()


def _settle(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        result = action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


@dataclass(frozen=True)
class _Work:
    """What the thread of one rank does for one save."""

    job: SaveJob
    image: memoryview
    mail: Any
    rank: int
    world: int
    number: int
    stall: float

    def run(self) -> None:
        begun = time.perf_counter()
        own = self._write()
        try:
            verdict = self._conclude(own) if self.rank == 0 else self._hear(own)
        finally:
            if self.rank == 0:
                # what waits is done by now, or is not to be done
                finished(self.job.to.final, whole=False)
        if verdict:
            text = f"{verdict} (written beside the training)"
            # the program has ended: nobody asks for the outcome any more
            if not threading.main_thread().is_alive():
                logger.error("%s", text)
            raise CheckpointError(text)
        if self.rank == 0:
            seconds = time.perf_counter() - begun
            logger.info(
                "saved %s beside the training: it waited %.2f s, the files took %.2f s",
                self.job.to.final,
                self.stall,
                seconds,
            )

    def _write(self) -> tuple[str, str]:
        """The hash of this rank's file, and what was wrong."""
        try:
            return write_image(self.job.path, self.image), ""
        except Exception as error:
            return "", describe_error(error, self.job.path)

    def _hear(self, own: tuple[str, str]) -> str:
        """Tell rank 0 what came of this rank's file; what was wrong with the save, "" if nothing.

        The same on all ranks.
        """
        try:
            self.mail.send("wrote", self.number, json.dumps(own))
            return str(json.loads(self.mail.receive("verdict", self.number, 0)))
        except (RuntimeError, HfZeroError) as error:  # the store is gone, or rank 0
            return self._on_disk(error)

    def _conclude(self, own: tuple[str, str]) -> str:
        """Publish, or clean up, as the files of all ranks are; tell the others."""
        outcomes = [own]
        for rank in range(1, self.world):
            try:
                digest, text = json.loads(self.mail.receive("wrote", self.number, rank))
                outcomes.append((digest, text))
            except (RuntimeError, HfZeroError) as error:
                outcomes.append(
                    ("", str(error) if isinstance(error, HfZeroError) else describe_error(error))
                )
        verdict = self._publish(outcomes)
        if self.mail is not None:
            try:
                self.mail.send("verdict", self.number, json.dumps(verdict))
            except RuntimeError as error:  # nobody can be told; the others look at the folder
                logger.warning(
                    "%s: the other ranks do not hear of it, because their store is gone (%s)",
                    self.job.to.final,
                    error,
                )
        return verdict

    def _publish(self, outcomes: list[tuple[str, str]]) -> str:
        failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text}
        to, rest = self.job.to, self.job.rest
        assert rest is not None, "rank 0 knows all other files"
        if not failed:
            try:
                publish(to, rest, [digest for digest, _ in outcomes])
            except Exception as error:
                failed = {0: describe_error(error, self.job.path.parent)}
        if failed:
            to.abandon()
            return f"{describe_failures(failed, self.world)}. {UNTOUCHED.format(to.tag)}"
        try:
            announce(to, rest, self.job.keep)
            finished(to.final, whole=True)
        except Exception as error:
            return (
                f"rank 0: {describe_error(error, to.final)}. {to.final} itself is whole; "
                "pass its tag to load it."
            )
        return ""

    def _on_disk(self, error: Exception) -> str:
        """Without the store: whether the checkpoint is there all the same."""
        final = self.job.to.final
        try:
            whole = Manifest.read(final / MANIFEST_NAME).save_id == self.job.to.save_id
        except (CheckpointError, OSError):
            whole = False
        if whole:
            return ""
        return (
            f"rank {self.rank} does not know what became of {final} ({error}); hf-zero verify "
            "says whether it is whole"
        )
