"""Saves in the background: a thread writes the staged file of each rank and commits beside the
training, and actions wait for that commit.

[Note: without a collective]
A background save copies the state into staging memory at the call, or what fits into it
(``staging.py``). All collectives (tag, folder, copies, manifest) run before its thread starts.
Afterwards each rank publishes the outcome of its file in the store; rank 0 commits once all ranks
have succeeded, and publishes the result. A thread that waits for another rank therefore never
interleaves with a collective of the training. Every rank adopts the result of rank 0, so that a
call that waits for the save (another save, a load, ``wait_for_checkpoint``) raises on all ranks or
on none. Rank 0 waits for the outcomes for ``timeout``; the others wait for its result as long as it
lives, since another rank's disk and the removal of old checkpoints may take longer. A rank that has
lost the store, or rank 0, reads the result from the folder instead.

The threads are not daemons: an interpreter that exits, even by an exception, waits for them. A
process that is killed leaves a temporary folder and no checkpoint.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint.commit import CommitTarget
from hf_zero.checkpoint.failures import describe_error, describe_failures
from hf_zero.checkpoint.file_writer import write_image
from hf_zero.checkpoint.save_job import NOTHING_SAVED, ByMessages, Outcome, SaveJob
from hf_zero.checkpoint.staging import DeferredState, StagedFile, Tensors, plan_in_call
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FileHashes, FilePlan
from hf_zero.distributed.rank_requests import STOP
from hf_zero.errors import CheckpointError, ConfigError, HostMemoryError
from hf_zero.logging import in_units, logger
from hf_zero.ops.host_memory import HostArena

if TYPE_CHECKING:
    from hf_zero.config.sections import CheckpointSection
    from hf_zero.distributed.mesh import Mesh
    from hf_zero.zero.gather.shared_shards import SharedShards

SAVE_FAILED = STOP - 1  # minus the number of the save: the event announced to all ranks


class BackgroundSaves:
    """The ``saver`` of an engine, made by its first background save, and the way in which all ranks
    learn that such a save has failed: rank 0 announces it, and all raise after the same step.
    """

    def __init__(self, mesh: Mesh, shards: SharedShards, config: CheckpointSection) -> None:
        self.saver: BackgroundSaver | None = None
        self._config = config
        self._mesh = mesh
        self._shards = shards

    def get_saver(self) -> BackgroundSaver:
        """Return the saver, which the first call on all ranks makes. Raises ConfigError in a
        pipeline.
        """
        if self._mesh.dims.pipeline > 1:
            raise ConfigError(
                "checkpoint.async_save (or blocking=False) writes the shards of one stage beside "
                "the training, and a pipeline has several; remove the key, or pass blocking=True"
            )
        if self.saver is None:
            self.saver = BackgroundSaver(self._mesh, self._config)
            # so that all ranks learn of a failure after the same step
            self._shards.serve()
        return self.saver

    def wait(self, who: str, below: str | None = None) -> None:
        """Return when no checkpoint, or none in the folder ``below``, is being written. Raises
        CheckpointError, on all ranks, if a save failed; ``who`` waits is logged.
        """
        assert self.saver is not None
        self.saver.wait(who, None if below is None else Path(below))

    def announce_failure(self) -> None:
        """Announce a failed save of the ``saver``, seen on rank 0, before the barrier at the end of
        a step.
        """
        saver, consensus = self.saver, self._mesh.consensus
        assert saver is not None
        if saver.failed and self._mesh.rank == 0 and consensus is not None:
            consensus.steps.broadcast_event(SAVE_FAILED - saver.number)

    def raise_failure(self) -> None:
        """Raise the error of a failed save of the ``saver`` on all ranks, at the end of a step."""
        saver, consensus = self.saver, self._mesh.consensus
        assert saver is not None
        if consensus is None:
            failed = saver.failed
        else:
            failed = SAVE_FAILED - saver.number in consensus.steps.events
        if failed:
            saver.wait()

    def close(self) -> None:
        """Wait for the current save and free its memory; raises like :meth:`wait`."""
        saver, self.saver = self.saver, None
        if saver is not None:
            saver.wait("destroy")


class BackgroundSaver:
    """Background saves of one engine, one at a time, whose threads exchange messages through the
    store of ``mesh``. The staging memory, pinned for a GPU, is as large as this rank's file, or
    ``staging_bytes`` of ``config`` if that is less. It is freed when the file is written, unless
    ``config`` keeps it.
    """

    def __init__(self, mesh: Mesh, config: CheckpointSection) -> None:
        self._rank, self._world, self._device = mesh.rank, mesh.pp_stage_ranks, mesh.device
        self._timeout = mesh.timeout
        self._keeps_staging, self._staging_bytes = config.keep_staging, config.staging_bytes
        self._mail = mesh.store_messages("saves")
        self._arena = HostArena(pin=True, device=mesh.device)
        self._memory = torch.empty(0, dtype=torch.uint8)  # kept between saves
        self._staged: StagedFile | None = None  # of the save that starts next
        self.number = 0  # sequence number of the last save that was started
        self._running: tuple[SaveJob, Future[None]] | None = None
        self._thread: threading.Thread | None = None  # of the last save that was started

    @property
    def failed(self) -> bool:
        """Return whether a save has failed whose outcome no call has collected yet."""
        return (
            self._running is not None
            and self._running[1].done()
            and self._running[1].exception() is not None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the staging memory that exists."""
        return self._arena.nbytes

    def wait(self, what: str = "", below: Path | None = None) -> None:
        """Return when no save is being written; with ``below``, when none is being written into
        that folder. If this blocks, a warning names ``what`` as the waiting operation.

        Raises CheckpointError, with the same text on all ranks, if the save failed.
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
            if future.done():  # after an interrupted wait the thread still uses its memory
                self._running = None

    def is_writing(self) -> bool:
        """Return whether a save is being written."""
        return self._running is not None and not self._running[1].done()

    def copy_to_host(
        self,
        plan: FilePlan,
        tensors: Tensors,
        image: torch.Tensor | None = None,
        deferred: Callable[[], Sequence[DeferredState]] = tuple,
    ) -> str:
        """Copy the file of ``plan``, with the values of ``tensors``, to staging memory: all of it,
        or a first part and what ``deferred`` does not return, which is called for a part alone.
        With an ``image`` of it in host memory, page-aligned, take that. Return "" on success,
        otherwise the reason why it could not be copied.
        """
        if self._mail is None and self._world > 1:
            return "the ranks of this process group share no store"
        if image is not None:
            self._staged = StagedFile(plan, image, self._device)
            return ""
        size, bound = plan.size, self._staging_bytes
        states: Sequence[DeferredState] = ()
        if bound is not None and bound < size:
            states = deferred()
            in_call = plan_in_call(plan, states).size
            size = bound - (bound - in_call) % DATA_ALIGNMENT
            if size < in_call + DATA_ALIGNMENT:
                return (
                    f"{in_units(in_call)} of it must be copied in the call, and "
                    f"checkpoint.staging_bytes is {in_units(bound)}; raise it to "
                    f"{in_call + DATA_ALIGNMENT} or more"
                )
        memory = self._memory
        if memory.numel() < size:
            memory = self._memory = self._memory.new_empty(0)  # free the old block first
            try:
                # without: a search for huge pages can cost more than the copy, in every save
                huge_pages = self._keeps_staging or self._arena.pinned
                memory = self._arena.take(size, torch.uint8, huge_pages=huge_pages)
            except HostMemoryError as error:
                return str(error)
        staged = StagedFile(plan, memory[:size], self._device, self._timeout)
        staged.stage(tensors, states)
        self._staged = staged
        if self._keeps_staging:
            self._memory = memory
        return ""

    def discard(self) -> None:
        """Drop the copy of a save that has not been started; nothing to do after :meth:`start`."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def start(self, job: SaveJob, plan: FilePlan) -> None:
        """Start the thread that writes the staged file of ``plan`` and commits. Returns at once."""
        self._thread = None
        self.number += 1
        staged, self._staged = self._staged, None  # the thread alone refers to it
        assert staged is not None
        ended: Future[None] = Future()
        exchange = ByMessages(self._mail, self.number, job)
        work = partial(_run, job, staged, plan, exchange)
        run = partial(_set_result, ended, work)
        self._thread = threading.Thread(target=run, name="hf-zero save")
        self._running = (job, ended)
        try:
            if job.rank == 0:
                register_save(job.target.final)
            self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # no thread will end the save
                staged.close()
                self._running = None
                if job.rank == 0:
                    unregister_save(job.target.final, complete=False)
            raise

    def runs(self, number: int) -> bool:
        """Return whether the thread of save ``number`` has been started."""
        started = self._thread is not None and self._thread.ident is not None
        return self.number >= number and started

    def report_not_started(
        self, number: int, target: CommitTarget, error: BaseException, others_started: bool
    ) -> None:
        """Send ``error``, which keeps this rank alone from starting save ``number``, to the threads
        of the other ranks, which may wait for it. Not to be called if this rank's thread runs,
        which sends its own outcome.

        ``others_started``: they have certainly started, so that the next wait raises here, too.
        """
        if self._mail is None:
            return
        why = describe_error(error, target.final)
        failure = f"{describe_failures({self._rank: why}, self._world)}. "
        failure += NOTHING_SAVED.format(target.tag)
        failed: Future[None] = Future()
        failed.set_exception(CheckpointError(failure))
        job = SaveJob(target, target.final, self._rank, self._world, None)
        self.number, self._running = number, (job, failed) if others_started else None
        exchange = ByMessages(self._mail, self.number, job)
        if self._rank > 0:
            exchange.gather(Outcome(None, why))
        else:
            exchange.broadcast(failure)


def _set_result(future: Future[None], action: Callable[[], None]) -> None:
    """Run ``action`` and give ``future`` its end or its error, which no thread would raise."""
    try:
        action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _run(job: SaveJob, staged: StagedFile, plan: FilePlan, exchange: ByMessages) -> None:
    """Run one save on the thread of one rank. Raises CheckpointError if it failed. The memory of
    ``staged`` is freed when the file is written.
    """
    started, final = time.perf_counter(), job.target.final

    def write() -> FileHashes:
        try:
            return write_image(job.path, staged.parts(), plan)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the memory
            raise
        finally:
            staged.close()

    try:
        failure, _ = job.run(write, exchange, lambda: unregister_save(final, complete=True))
    finally:
        if job.rank == 0:
            unregister_save(final, complete=False)  # no effect once `on_finished` has called it
    if failure:
        text = f"{failure} (written in the background)"
        # The main thread has ended: no call will collect the outcome, so log it.
        if not threading.main_thread().is_alive():
            logger.error("%s", text)
        raise CheckpointError(text)
    if job.shared is not None:
        logger.info(
            "saved %s in the background: %s; training waited %.2f s, the files took %.2f s",
            final,
            in_units(job.shared.nbytes),
            staged.stall,
            time.perf_counter() - started,
        )


Action = Callable[[], object]

_in_flight_lock = threading.Lock()
_in_flight: dict[AnyPath, list[Action]] = {}


def register_save(final: AnyPath) -> None:
    """Register the save of the checkpoint ``final``, which a thread is about to write."""
    with _in_flight_lock:
        _in_flight[final] = []


def unregister_save(final: AnyPath, complete: bool) -> None:
    """Unregister the save of ``final``. If the checkpoint is ``complete``, run the actions deferred
    until then; otherwise drop them.
    """
    with _in_flight_lock:
        actions = _in_flight.pop(final, [])
    for action in actions if complete else ():
        action()


def is_below(final: AnyPath, folder: Path) -> bool:
    """Return whether the checkpoint ``final`` is below ``folder``; False for an object store."""
    return not is_remote(final) and final.parent.resolve().is_relative_to(folder.resolve())


def after_commit(folder: Path, action: Action) -> None:
    """Run ``action`` once no save writes into ``folder``: now, or from the thread that writes
    there, before its save ends.

    If a save in ``folder`` fails, the action is dropped: what it would remove is still needed. Only
    the process that publishes, rank 0, knows of a save.
    """
    with _in_flight_lock:
        final = next((final for final in _in_flight if is_below(final, folder)), None)
        if final is not None:
            _in_flight[final].append(lambda: after_commit(folder, action))
            return
    action()
