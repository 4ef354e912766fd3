"""Saves into the memory of hosts: this rank's file is copied into a memory-mapped file, and a
thread beside the training hashes it, exchanges copies with other hosts (``copy_exchange.py``) and
commits.

[Note: two slots]
A host has two slots, folders of rank files with a record each. A save removes the records of the
slot that does not hold the newest generation, overwrites its files in place, and writes each record
once its file is complete. When all ranks have written theirs (one agreement), the other slot may be
overwritten. At any moment one complete generation exists on all hosts, wherever a process ends. A
process that dies within a commit may leave a generation that is complete and lacks copies: the
first save of the next attempt then overwrites that one, and keeps the one before.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_zero.checkpoint import find, host_folders
from hf_zero.checkpoint.failures import collective_try, describe_error
from hf_zero.checkpoint.file_writer import copy_to_memory
from hf_zero.checkpoint.generations import Generations
from hf_zero.checkpoint.memory import folders
from hf_zero.checkpoint.memory.claimed_folders import KEY, ClaimedFolders
from hf_zero.checkpoint.memory.copy_exchange import CopyExchange
from hf_zero.checkpoint.memory.inventory import generation_to_keep, is_later, records_in
from hf_zero.checkpoint.memory.job_folders import JobFolders, remember
from hf_zero.checkpoint.memory.record import RankRecord, record_path
from hf_zero.checkpoint.memory.slot_files import SlotFiles, Staged, changes_of
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.checkpoint.save_plan import (
    RankFile,
    buffers_of_other_stages,
    model_buffers,
    plan_save,
    stored_width,
)
from hf_zero.checkpoint.save_sharded import config_files, manifest_head
from hf_zero.checkpoint.script_state import copy_as_saved, non_tensor_state, objects_file
from hf_zero.checkpoint.storage import place_of, remove_tree
from hf_zero.config import ZeroConfig
from hf_zero.config.memory import MemorySection
from hf_zero.distributed.host_transfers import HostTransfers
from hf_zero.distributed.rank_hosts import host_name
from hf_zero.errors import CheckpointError
from hf_zero.logging import counted, in_units, log_rank0, logger
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.checkpoint.background_saves import BackgroundSaver
    from hf_zero.distributed.world_group import WorldGroup
    from hf_zero.zero.layout.engine_plan import EnginePlan

ENDING_SECONDS = 2.0  # a process that fails waits so long for its thread
_claimed: weakref.WeakValueDictionary[tuple[str, int, int], MemoryCheckpoints] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True)
class EarlyCopy:
    """This rank's file at ``step``, copied for a save on disk before the trainer's save into
    memory, which takes it; None if the copy failed.
    """

    step: int
    staged: Staged | None


def next_folders(settings: MemorySection, ranks: WorldGroup, rank: int) -> JobFolders:
    """Return the folders that the next engine of this process has. Collective."""
    return JobFolders(settings, ranks, rank, host_name(), _living())


def _living() -> list[JobFolders]:
    """Return the engines' checkpoints in memory of this process that are not closed."""
    return [made for ref in _claimed.valuerefs() if (made := ref()) is not None]


class MemoryCheckpoints(ClaimedFolders, Generations):
    """Checkpoints of one engine in the memory of hosts. Holds no reference to the engine. The
    constructor is collective.

    saved_by_trainer: an integration (Accelerate, Lightning) calls
    :func:`hf_zero.checkpoint.memory.save` when :meth:`is_due` and chooses the checkpoint to resume;
    else the engine does both, at the end of its steps and in a load without a tag.
    """

    exist = True
    _is_closed = False
    _saver: BackgroundSaver | None = None  # of saves on disk, beside the training

    def __init__(self, engine: SavedEngine, plan: EnginePlan, number: int | None = None) -> None:
        settings, mesh = engine.config.section_of(MemorySection), engine.mesh
        assert settings.every is not None
        super().__init__(settings, mesh.job, engine.global_rank, host_name(), _living(), number)
        _claimed[self.place] = self
        self.every, self.saved_by_trainer = settings.every, False
        self.has_stepped = False  # a load without a tag then means the folder that it names
        # on rank 0, a copy of what the script gave to its last save on disk, or has loaded
        self.client_state: Mapping[str, object] = {}
        self._folders_of_run: set[str] = set()
        self.note_run(engine.config.checkpoint.folder)
        self.world, self._device = mesh.dims.world, mesh.device
        self.transfers = HostTransfers(  # the token: an engine before may have had this mesh's name
            f"memory/{self.token}", self.rank, self.world, mesh.timeout
        )
        self._exchange = CopyExchange(
            self.transfers, self.hosts, self.rank, self.world, self.copies
        )
        self.newest_id = ""  # save_id of the generation that the next save must not overwrite
        self.ready = ""  # save_id of the generation whose folder has what a load reads
        self._files = SlotFiles(mesh.device)
        self._slot = -1  # the one that the next save overwrites; -1: not chosen yet
        self._saves, self._last_step = 0, -1
        self._is_cut_off = False  # connections are lost: no slot may be overwritten any more
        self._prevails = True  # the next generation, over those of later steps
        self._early: EarlyCopy | None = None
        self._staged: Staged | None = None  # of the last save, unless a save on disk has it
        self._read_by_disk: Path | None = None  # the file that the last save on disk has read
        self._running: Future[None] | None = None
        self._logged_wait = False
        self._warn_of_losses()
        needed = self.choose_base(self._ranks.all_gather_object(_planned_size(plan), KEY))
        if self.acts_for_host:
            folder = self.folder(self.base)
            in_memory = host_folders.is_in_memory(folder)
            logger.info(
                "%s: about %s for generations of every %d steps, in %s%s",
                KEY,
                in_units(needed),
                self.every,
                folder,
                "" if in_memory else " (a disk: there is no room in memory)",
            )
        self.mark()
        _at_exit(self)

    @classmethod
    def are_kept(cls, config: ZeroConfig) -> bool:
        return bool(config.section_of(MemorySection).every)

    @classmethod
    def of(cls, engine: SavedEngine, plan: EnginePlan, before: Generations) -> Generations:
        """Return the checkpoints in memory of ``engine``, built by ``plan``, in the folders of
        those ``before``; none if its configuration has none. Raises CheckpointError on all ranks if
        a host has no room.
        """
        if not cls.are_kept(engine.config):
            return Generations.of(engine, plan, before)
        return cls(engine, plan, before.number if isinstance(before, MemoryCheckpoints) else None)

    def _warn_of_losses(self) -> None:
        """Warn of what these checkpoints do not survive."""
        if not self.is_lasting:
            log_rank0(
                f"{KEY}: no launcher started this process, so that a new one cannot know that it "
                f"goes on with this job; name the job ({KEY}.job) to resume from memory"
            )
        if len(self.hosts.ranks) < self.copies:
            lost = "the host" if len(self.hosts.ranks) == 1 else "so many hosts as it promises"
            log_rank0(
                f"{KEY}.copies is {self.copies} and the ranks are on "
                f"{counted(len(self.hosts.ranks), 'host')}: checkpoints in memory survive "
                f"processes that end, not the loss of {lost}"
            )

    def continue_from(self, before: Generations) -> None:
        """Take over the caller of saves and the script's state from ``before``, the checkpoints of
        the engine before it was built again. Generations that it has saved are gone: the next save
        makes the first one.
        """
        if not isinstance(before, MemoryCheckpoints):
            return
        self.attempt = max(self.attempt, before.attempt)
        if not before.has_saved:  # else that generation is gone, too
            self.newest_id = before.newest_id
            if before.owns_generations:
                self.own()
        self.saved_by_trainer, self.has_stepped = before.saved_by_trainer, before.has_stepped
        self.client_state, self._last_step = before.client_state, before._last_step
        self._folders_of_run = before._folders_of_run

    def note_run(self, folder: str | os.PathLike[str] | None) -> None:
        """Note a ``folder`` of the run: what it resumes from, saves to or is configured with."""
        if folder is not None:
            self._folders_of_run.add(place_of(folder))

    def end_save(self, folder: str, client_state: Mapping[str, Any] | None) -> None:
        self.note_run(folder)
        if client_state is not None:
            self.client_state = copy_as_saved(dict(client_state))

    def end_load(self, run: str | None, client_state: Mapping[str, Any], resumes: bool) -> None:
        if resumes:
            self.note_run(run)
        self.client_state = deepcopy(client_state)

    def is_due(self, step: int) -> bool:
        """Return whether a save belongs to the end of ``step`` and was not made yet."""
        return step > 0 and step % self.every == 0 and step != self._last_step

    def end_step(self, engine: SavedEngine) -> None:
        """Save at the end of a step, if a save is due and no trainer makes it."""
        self.has_stepped = True
        if not self.saved_by_trainer and self.is_due(engine.counters.global_steps):
            self.save(engine)

    def break_step(self) -> None:
        self.has_stepped = False  # the newest one replaces the state

    def save(
        self,
        engine: SavedEngine,
        beside: Mapping[str, bytes] | None = None,
        client_state: Mapping[str, object] | None = None,
        tag: str | None = None,
    ) -> None:
        """Copy the state of ``engine`` into this host's memory, and let a thread do the rest. Every
        rank calls it after the same step.

        Raises CheckpointError for a ``tag`` that cannot name a checkpoint, on all ranks if the
        first save finds no room, and RankMismatchError if this rank's collectives have been
        aborted. Later failures are logged: the generation before stays, and training goes on.
        """
        engine.refuse_destroyed("save")
        tag = None if tag is None else find.check_tag(tag)
        engine.changes.refuse("a save in memory")
        self._wait_for_last()
        started = time.perf_counter()
        step = engine.counters.global_steps
        if client_state is None:
            client_state = self.client_state
        early, self._early = self._early_copy(step), None
        staged = self._copy(engine, beside or {}, client_state, tag, early)
        # The copies have waited for the device. If that was for collectives that have been aborted,
        # what followed them, such as the update, has computed with whatever they left.
        engine.mesh.watchdog.check()
        self._staged = staged if early is None else None
        self._last_step = step
        if self._is_cut_off:
            return
        stall = time.perf_counter() - started
        future: Future[None] = Future()
        self._running = future
        work = partial(self._run, staged, step, stall, future)
        thread = threading.Thread(target=work, name="hf-zero memory", daemon=True)
        try:
            thread.start()
        except BaseException as error:
            if thread.ident is None:  # the other ranks wait for this one's part of the exchange
                logger.error("%s", self._failed(step, describe_error(error)))
                self._run(None, step, stall, future)
            if not isinstance(error, Exception):
                raise

    def _early_copy(self, step: int) -> EarlyCopy | None:
        """Return the copy at ``step`` for a save on disk, made before the trainer's save."""
        return self._early if self._early is not None and self._early.step == step else None

    def _copy(
        self,
        engine: SavedEngine,
        beside: Mapping[str, bytes],
        client_state: Mapping[str, object],
        tag: str | None,
        early: EarlyCopy | None = None,
    ) -> Staged | None:
        """Return this rank's file in its slot: that of ``early`` with a new record if nothing has
        changed since, else copied now; None, logged, if the copy failed.
        """
        engine.take_user_writes()
        engine.optimizer_step.complete_state()
        names = WholeNames(engine.module)
        elsewhere = buffers_of_other_stages(engine, names, False)
        step = engine.counters.global_steps
        self._saves += early is None
        tag = tag or f"global_step{step}"
        plan_file = partial(self._plan, engine, names, elsewhere, beside, client_state, tag)
        planned = self._plan_first(plan_file, step) if self._slot < 0 else None
        if self._is_cut_off:
            return None
        try:
            record, plan = planned or plan_file()
            changes = changes_of(engine)
            copied = None if early is None else early.staged
            if (
                copied is not None
                and copied.changes == changes
                and copied.image_of(plan) is not None
            ):
                return replace(copied, record=record)
            return self._copy_to_slot(record, plan, changes)
        except Exception as error:  # a schedule's state_dict runs code of its own
            logger.error("%s", self._failed(step, describe_error(error)))
        return None

    def _plan_first(
        self, plan_file: Callable[[], tuple[RankRecord, RankFile]], step: int
    ) -> tuple[RankRecord, RankFile]:
        """Choose the base folder by the sizes of the planned files, and the slot for the save of
        ``step``. Return the plan and the record, which is of the attempt that the choice has
        counted. Collective.
        """
        (record, plan), sizes = collective_try(
            self._ranks, plan_file, after="Nothing was saved.", share=lambda made: made[1].file.size
        )
        self.choose_base(sizes)
        self._choose_slot(step)
        head = record.head and replace(record.head, attempt=self.attempt)
        return replace(record, attempt=self.attempt, head=head), plan

    def _plan(
        self,
        engine: SavedEngine,
        names: WholeNames,
        elsewhere: Mapping[str, torch.Tensor],
        beside: Mapping[str, bytes],
        client_state: Mapping[str, object],
        tag: str,
    ) -> tuple[RankRecord, RankFile]:
        """Return this rank's record without hashes, and the plan of its file."""
        save_id = sha256(f"{self.token} {self._saves}".encode()).hexdigest()[:32]
        head, shared, step = None, {}, engine.counters.global_steps
        buffers: dict[str, torch.Tensor] = {}
        if self.rank == 0:
            buffers = model_buffers(engine, False) | dict(elsewhere)
            extra = non_tensor_state(engine, client_state)
            head = manifest_head(engine, tag, save_id, extra, buffers)
            shared = config_files(engine.module)
            remember(save_id, self._folders_of_run)
            objects = objects_file(extra, find.OBJECTS_NAME)
            if objects is not None:
                head = replace(head, objects=objects[0])
                shared[find.OBJECTS_NAME] = objects[1]
        name = find.rank_file(self.rank, self.world)
        own = plan_save(engine, name, save_id, False, names, buffers)
        head, beside = deepcopy(head), dict(beside)
        record = RankRecord(
            save_id, self.attempt, step, self.world, own.report, head, shared, beside
        )
        return record, own

    def ready_file(self, engine: SavedEngine, saver: BackgroundSaver) -> Staged | None:
        """Return this rank's file of the last generation, for a save on disk by ``saver``; None if
        the state has changed since. A generation is given once: at most one save on disk shares
        its save_id. If the trainer has yet to save at this step, the file is copied now.
        Collective.

        While the save on disk reads the file, no save overwrites it. If the last save on disk has
        failed as the process ends, the generations stay.
        """
        self._saver = saver
        step = engine.counters.global_steps
        if self.saved_by_trainer and self.is_due(step) and self._early_copy(step) is None:
            self._wait_for_last()
            self._staged = self._copy(engine, {}, {}, None)
            self._early = EarlyCopy(step, self._staged)
        staged, self._staged = self._staged, None
        if staged is None or staged.changes != changes_of(engine):
            return None
        self._read_by_disk = staged.path
        return staged

    def _copy_to_slot(
        self, record: RankRecord, plan: RankFile, changes: tuple[object, ...]
    ) -> Staged:
        """Copy this rank's file into its slot."""
        if self.acts_for_host:
            self._clear_slot()
        path = self._slot_folder() / record.report.file.name
        record_path(path).unlink(missing_ok=True)  # from here on the old file counts no more
        if path == self._read_by_disk and self._saver is not None and self._saver.is_writing():
            here = self.hosts.ranks[self.hosts.names[self.rank]]
            if plan.file.size > folders.free(self.base) // len(here):
                raise CheckpointError(
                    f"a save on disk still reads {path}, and {self.base} has no room for a third "
                    f"file of each rank; a larger {KEY}.every than {self.every} leaves it the time"
                )
            self._files.leave(path)
        image = self._files.open(path, plan.file.size)
        copy_to_memory(image, plan.file, plan.tensors, self._device)
        return Staged(path, image, plan.file, record, changes)

    def _slot_folder(self) -> Path:
        return self.folder(self.base) / folders.SLOTS[self._slot]

    def _clear_slot(self) -> None:
        """Remove from this host's slot what this job's ranks do not overwrite, and what a resume
        has read.
        """
        for base in self.bases:
            remove_tree(self.folder(base) / folders.RESUME)
        here = self.hosts.files_on(self.rank, self.copies)
        kept = {find.rank_file(rank, self.world) for rank in here}
        slot = self._slot_folder()
        for item in list(slot.iterdir()) if slot.is_dir() else []:
            if f"{item.stem}.safetensors" not in kept:
                item.unlink(missing_ok=True)

    def _run(self, staged: Staged | None, step: int, stall: float, future: Future[None]) -> None:
        started = time.perf_counter()
        try:
            committed = self._exchange.commit(staged, self._slot_folder(), self._log_failure)
        except Exception as error:  # a rank that ended: the training finds out for itself
            why = f"{describe_error(error)}; until the job starts again none is made"
            logger.warning("%s", self._failed(step, why))
            # Others may have committed: a slot that is old to them is the newest one to this rank.
            self._is_cut_off = True
            self.transfers.close()
        else:
            if committed and staged is not None:
                self.newest_id = staged.record.save_id
                self._slot = 1 - self._slot
                if self._prevails and self.acts_for_host:
                    self._drop_later(step)
                self._prevails = False
                self._log_save(staged, step, stall, time.perf_counter() - started)
            elif self.rank == 0:
                logger.error("%s", self._failed(step, "a rank could not write its part"))
        finally:
            future.set_result(None)

    def _drop_later(self, step: int) -> None:
        """Remove the records in the other slot that are of steps after ``step``: training has gone
        back behind them.
        """
        for path in records_in(self._slot_folder()):
            with suppress(CheckpointError, OSError):
                if RankRecord.parse(path.read_bytes(), path).step > step:
                    path.unlink()

    def _failed(self, step: int, why: str) -> str:
        return (
            f"the checkpoint of step {step} in memory failed on rank {self.rank} ({why}); the one "
            "before it stays, and training goes on"
        )

    def _log_failure(self, error: Exception) -> None:
        logger.error("%s", self._failed(self._last_step, describe_error(error)))

    def _log_save(self, staged: Staged, step: int, stall: float, seconds: float) -> None:
        if self.rank == 0:
            level = logger.info if self._saves == 1 else logger.debug
            level(
                "step %d is in memory, in %s: training waited %.3f s, its copies took %.2f s",
                step,
                staged.path.parent,
                stall,
                seconds,
            )

    def _wait_for_last(self) -> None:
        if self._running is None:
            return
        if not self._running.done() and not self._logged_wait:
            self._logged_wait = True
            log_rank0(
                f"{KEY}: a save begins while the copies of the one before are under way, and waits "
                f"for them; a larger {KEY}.every than {self.every} keeps the training from this"
            )
        self._running.result()
        self._running = None

    def _choose_slot(self, step: int) -> None:
        """Choose this host's slot for the save of ``step``: not the one with the generation to
        keep. Collective.
        """
        found, _ = self.exchange_inventories()
        complete = [generation for generation in found if generation.is_complete()]
        kept = generation_to_keep(complete, self.newest_id, min(self.copies, len(self.hosts.ranks)))
        # the clock may have been set back since an attempt before
        self.attempt = max([self.attempt, *(each.attempt + 1 for each in found)])
        if complete and not self.newest_id and complete[0].step >= step and self.rank == 0:
            logger.warning(
                "%s: an attempt of this job before has left step %d in memory, and this one has "
                "not resumed from it; its next saves overwrite it",
                KEY,
                complete[0].step,
            )
        collective_try(self._ranks, self.make_folder)
        self.mark()
        self.own()
        slots = {path.parent.name for held, path in self.scan().items() if held.save_id == kept}
        self._slot = 1 if folders.SLOTS[0] in slots else 0

    def has_stepped_on_all(self) -> bool:
        """Return whether a load without a tag means the folder that it names, alike on all ranks: a
        step may have been broken off on one of them alone. Collective.
        """
        return all(self._ranks.all_gather_object(self.has_stepped, KEY))

    def loaded(self, attempt: int, step: int, goes_back: bool) -> None:
        """Count a load of a checkpoint of ``attempt`` and ``step``: steps behind the last save may
        come again, and what they save prevails, on disk and in memory. If all state ``goes_back``
        to that of the checkpoint, on disk, what this attempt has saved later is removed. Collective
        after all ranks have loaded.
        """
        self.wait()
        if goes_back and self.owns_generations:
            collective_try(self._ranks, partial(self._drop_after, step, attempt))
            self.newest_id = ""
        self._last_step, self._prevails = -1, True
        self._early = None
        # a process that ends before `_drop_later` leaves the other branch, too
        self.attempt = max(self.attempt, attempt) + 1

    def _drop_after(self, step: int, attempt: int) -> None:
        """Remove the records on this host of what was saved after a checkpoint on disk."""
        for held, path in self.scan().items() if self.acts_for_host else ():
            if is_later(held, step, attempt):
                record_path(path).unlink(missing_ok=True)

    def set_ready(self, save_id: str) -> None:
        """Record that the folder of generation ``save_id`` has what a load reads."""
        self.ready = save_id

    def leave_saves_to_trainer(self) -> None:
        """Have an integration make the saves, and choose the checkpoint to resume."""
        self.saved_by_trainer = True

    def protect(self, save_id: str) -> None:
        """Keep generation ``save_id``, from which training continues, through the next save; an
        earlier one instead if that has all copies, and this one does not.
        """
        self.newest_id, self._slot = save_id, -1
        self.own()

    @property
    def has_saved(self) -> bool:
        """Return whether this engine has overwritten a generation since its last load."""
        return self._slot >= 0

    def take_apart(self) -> None:
        self.close(remove=self.has_saved)  # an earlier attempt's stay

    def wait(self) -> None:
        """Return when no save into memory is under way."""
        if self._running is not None:
            self._running.result()

    def close(self, failing: bool | None = None, keep: bool = False, remove: bool = True) -> None:
        """Wait for the save under way, and ``remove`` the generations once the last rank of this
        host has closed its own, unless they are all an earlier attempt's, or the job is
        ``failing``: by default, if an exception is being handled that ends a process with an error.
        ``keep``: they have steps that nothing else has, and stay whatever the exit code of this
        process, until the next attempt ends.
        """
        if self._is_closed:
            return
        failing = _is_failure(sys.exc_info()[1]) if failing is None else failing
        if self._running is not None:
            with suppress(TimeoutError):
                self._running.result(ENDING_SECONDS if failing else None)
        self.transfers.close()
        self._files.close()
        self._exchange.close()
        if keep:
            self.keep_after_exit()
        if self._running is None or self._running.done():  # else the thread may still write
            self.give_up_marks()
        if remove and self.owns_generations and not failing and not keep:
            self.release_folders()
        _claimed.pop(self.place, None)
        self._is_closed = True


class HasGenerations(Protocol):
    """An engine, or the reference in its place."""

    @property
    def generations(self) -> object: ...


def checkpoints_of(engine: HasGenerations) -> MemoryCheckpoints | None:
    """Return the checkpoints in memory of ``engine``, or None."""
    kept = engine.generations
    return kept if isinstance(kept, MemoryCheckpoints) else None


def _is_failure(error: BaseException | None) -> bool:
    """Return whether a process that ``error`` ends has an exit code other than 0."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None


def _at_exit(made: MemoryCheckpoints) -> None:
    """Close ``made`` when the interpreter ends, if it lives until then. The native core removes its
    files if all ranks of the host end with code 0, unless the last save on disk has failed; without
    the core, which alone sees the code, they stay.
    """
    held, process = weakref.ref(made), os.getpid()

    def close() -> None:
        alive = held()
        if alive is not None and os.getpid() == process:  # not in a fork, which has no thread
            lost = alive._saver is not None and alive._saver.failed
            alive.close(hasattr(sys, "last_value"), remove=False, keep=lost)

    atexit.register(close)
    weakref.finalize(made, atexit.unregister, close)


def _planned_size(plan: EnginePlan) -> int:
    """Return the bytes of this rank's file in a checkpoint, without header, buffers, generators and
    state of whole tensors.
    """
    coordinate = plan.dims.coordinate(plan.rank, "pipeline")
    return sum(
        flat.spec.owned_numel * stored_width(plan, flat)
        for flat in plan.flats
        if flat.spec.saves_shard
        and coordinate in (flat.spec.sharding.pp_stages or (coordinate,))[:1]
    )
