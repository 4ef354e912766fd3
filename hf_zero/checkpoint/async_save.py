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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.collective_try import describe_error
from hf_zero.checkpoint.file_writer import copy_bytes, write_image
from hf_zero.checkpoint.hashes import BlockHashes, FileHashes
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.plan import Outcome, SaveJob, SavePlan
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.checkpoint.tensorfile import FilePlan, bytes_view
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError, HfZeroError, HostMemoryError
from hf_zero.logging import logger
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


class AsyncSaver:
    """The saves of one engine that a thread writes, one at a time. Staging memory is as large as
    this rank's file and kept.

    mesh: the engine's mesh, which gives threads their messages through the store.
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
        """Whether a save has ended that no call has waited for, and not well."""
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
        """Return when nothing is being written, in the folder ``below`` if one is given. Where that
        takes time, ``what`` is named in a warning as waiting.

        Raises CheckpointError, alike on all ranks.
        """
        if self._running is None or (
            below is not None and not is_below(self._running[0].target.final, below)
        ):
            return
        job, future = self._running
        if what and not future.done() and self._rank == 0:
            logger.warning(
                "%s waits for %s, which is still being written: saves come faster "
                "than the disk takes them",
                what,
                job.target.final,
            )
        try:
            future.result()
        finally:
            if future.done():  # a wait that was interrupted leaves the thread with its memory
                self._running = None

    def stage(self, plan: SavePlan) -> str:
        """Copy the file of ``plan`` to staging memory; why there is none for it, "" if all went
        well.
        """
        if self._mail is None and self._world > 1:
            return "the ranks of this process group share no store"
        begun, size = time.perf_counter(), plan.file.size
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # before more is taken
            try:
                self._memory = self._arena.take(size, torch.uint8)
            except HostMemoryError as error:
                return str(error)
        at = len(plan.file.header)
        copy_bytes(
            self._memory[:at], torch.frombuffer(bytearray(plan.file.header), dtype=torch.uint8)
        )
        for entry in plan.file.entries:
            values = plan.tensors[entry.name].values().detach().reshape(-1)
            copy_bytes(self._memory[at + entry.begin : at + entry.end], values, wait=False)
            del values
        kinds.synchronize(self._device)  # before training goes on to change it
        self._size, self._stall = size, time.perf_counter() - begun
        return ""

    def start(self, job: SaveJob, plan: FilePlan) -> None:
        """Write what was staged, the file of ``plan``, from a thread. Training goes on."""
        self.number += 1
        image = bytes_view(self._memory)[: self._size]
        ended: Future[None] = Future()
        self._running = (job, ended)
        if job.rank == 0:
            started(job.target.final)
        exchange = _ByStore(self._mail, self.number, job)
        work = partial(_run, job, image, plan, exchange, self._stall)
        threading.Thread(target=_set_result, args=(ended, work), name="hf-zero save").start()


def _set_result(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        result = action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _run(job: SaveJob, image: memoryview, plan: FilePlan, exchange: _ByStore, stall: float) -> None:
    """What the thread of one rank does for one save."""
    begun, final = time.perf_counter(), job.target.final
    try:
        failure, _ = job.run(
            lambda: write_image(job.path, image, plan),
            exchange,
            lambda: finished(final, whole=True),
        )
    finally:
        if job.rank == 0:
            finished(final, whole=False)  # nothing, where the commit has called it already
    if failure:
        text = f"{failure} (written in the background)"
        # the program has ended: no call asks for the outcome any more
        if not threading.main_thread().is_alive():
            logger.error("%s", text)
        raise CheckpointError(text)
    if job.rank == 0:
        logger.info(
            "saved %s in the background: training waited %.2f s, the files took %.2f s",
            final,
            stall,
            time.perf_counter() - begun,
        )


def _outcome(sent: dict[str, Any]) -> Outcome:
    """Inverse of ``asdict``."""
    hashes = sent["hashes"]
    if hashes is not None:
        hashes = FileHashes(hashes["whole"], BlockHashes(**hashes["blocks"]))
    return Outcome(hashes, sent["error"])


class _ByStore:
    """The exchange of outcomes through the store, without a collective; the ``number``-th save."""

    def __init__(self, mail: Any, number: int, job: SaveJob) -> None:
        self._mail, self._number, self._job = mail, number, job
        self._lost: Exception | None = None  # why this rank cannot reach the store, or rank 0

    def gather(self, own: Outcome) -> list[Outcome]:
        if self._job.rank > 0:
            try:
                self._mail.send("wrote", self._number, json.dumps(asdict(own)))
            except (RuntimeError, HfZeroError) as error:
                self._lost = error
            return []
        outcomes = [own]
        for rank in range(1, self._job.world):
            try:
                outcome = _outcome(json.loads(self._mail.receive("wrote", self._number, rank)))
            except HfZeroError as error:
                outcome = Outcome(None, str(error))
            except RuntimeError as error:
                outcome = Outcome(None, describe_error(error))
            outcomes.append(outcome)
        return outcomes

    def broadcast(self, failure: str) -> str:
        if self._job.rank > 0:
            if self._lost is None:
                try:
                    return str(json.loads(self._mail.receive("verdict", self._number, 0)))
                except (RuntimeError, HfZeroError) as error:
                    self._lost = error
            return self._read_outcome(self._lost)
        if self._mail is not None:
            try:
                self._mail.send("verdict", self._number, json.dumps(failure))
            except RuntimeError as error:  # the other ranks look at the folder
                logger.warning(
                    "%s: the other ranks do not hear of it, because their store is gone (%s)",
                    self._job.target.final,
                    error,
                )
        return failure

    def _read_outcome(self, error: Exception) -> str:
        """Without the store: whether the checkpoint is there all the same."""
        final = self._job.target.final
        try:
            whole = Manifest.read(final / MANIFEST_NAME).save_id == self._job.target.save_id
        except (CheckpointError, OSError):
            whole = False
        if whole:
            return ""
        return (
            f"rank {self._job.rank} does not know what became of {final} ({error}); hf-zero verify "
            "says whether it is whole"
        )
