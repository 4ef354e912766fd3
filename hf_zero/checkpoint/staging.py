"""Staging memory of a save in the background: the file of one rank passes through it to the thread
that writes.

[Note: deferred copies]
As large as the file, the memory takes all of it in the call. With ``checkpoint.staging_bytes`` it
is smaller, and the thread fills it again each time it has written it, while forwards and backwards
go on: they change neither master weights nor moments. Whatever does change them first takes a lease
for writing, which waits (:class:`CopyGate`): an update, a load, a ``safe_set_*`` function, a write
to parameters that the engine takes over. Offloaded state waits for each flat buffer by itself, on
the thread of updates; state on the device waits for all of it, as one launch updates it. State that
a script can write to without a call of the engine (buffers, generators, weights whose memory is
that of whole parameters) is copied in the call, and so is state in files, whose buffers training
uses. Moments can be written to as well, as tensors of ``optimizer.state``: ``Tensor._version``
shows it, and the save fails. A write through ``.data``, which has a version of its own, is not
seen, nor one that is still being executed when the last part is copied.
A wait depends on this rank's storage alone, and ends if the save fails. Meanwhile the other ranks
may wait for this one in a collective, whose timeout would end the run: before that, the thread of
the change abandons what is not copied (:meth:`StagedFile._abandon`), and the save fails instead.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from hf_zero.checkpoint.file_writer import copy_to_memory
from hf_zero.checkpoint.manifest import MASTER, SHARD
from hf_zero.checkpoint.save_plan import RankFile, RankReport, saved_by_this_pp_stage, saved_key
from hf_zero.checkpoint.tensorfile import DATA_ALIGNMENT, FilePlan, TensorEntry, bytes_view
from hf_zero.device import kinds, streams
from hf_zero.device.spans import span
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, logger
from hf_zero.zero.layout.optimizer_shard import CopyGate

if TYPE_CHECKING:
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.training_engine import TrainingEngine

TensorOrFetch = torch.Tensor | Callable[[], torch.Tensor]
Tensors = Mapping[str, TensorOrFetch]
# of the timeout of collectives: for so long changes wait for the copies of a save
WAITED_PART_OF_TIMEOUT = 0.8
WARN_SECONDS = 60.0
HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class DeferredState:
    """State that a save may copy after its call, because all changes of it by the engine wait.

    label: the flat buffers, in messages. names: its tensors in the file. gates: each change first
    waits at one of them. watched: tensors that a script can write to by itself.
    """

    label: str
    names: frozenset[str]
    gates: tuple[CopyGate, ...]
    watched: tuple[torch.Tensor, ...]


def deferred_states(engine: TrainingEngine, report: RankReport) -> list[DeferredState]:
    """Return the state in this rank's file, which ``report`` describes, that a save may copy after
    its call: one of all flat buffers that an update changes on the device, and one of each other.
    """
    names = {}
    for flat in engine.flats:
        key = saved_key(flat)
        if key in report.chunks and saved_by_this_pp_stage(flat):
            _, _, kinds_in_file = report.chunks[key]
            deferrable = deferrable_kinds(flat, kinds_in_file)
            names[flat] = frozenset(f"{key}::{kind}" for kind in deferrable)
    on_device = [f for f in names if f.trainable and not f.optimizer_shard.offloaded]

    def state_of(flats: Sequence[FlatBuffer], *gates: CopyGate) -> DeferredState:
        return DeferredState(
            listed([flat.key for flat in flats], 3),
            frozenset[str]().union(*(names[flat] for flat in flats)),
            (*(flat.optimizer_shard for flat in flats), *gates),
            tuple(tensor for flat in flats for tensor in _writable(engine, flat)),
        )

    others = [state_of([flat]) for flat in names if flat not in on_device]
    return [state_of(on_device, engine.schedule.shards), *others] if on_device else others


def deferrable_kinds(flat: FlatBuffer, states: Iterable[str]) -> set[str]:
    """Return those of the ``states`` of ``flat`` that a save may copy after its call: none in
    files, whose buffers training uses; no weights in the memory of whole parameters, to which
    scripts write.
    """
    shard = flat.optimizer_shard
    if shard.contents.nbytes()["disk"] or flat.shard_bytes()["disk"]:
        return set()
    return set(states).difference((MASTER, SHARD) if _is_exposed(flat) else ())


def _is_exposed(flat: FlatBuffer) -> bool:
    """Return whether the saved weights of ``flat`` are in the memory of whole parameters."""
    return not (flat.sharded or flat.optimizer_shard.has_separate_master)


def _writable(engine: TrainingEngine, flat: FlatBuffer) -> list[torch.Tensor]:
    """Return the tensors of ``optimizer.state`` and of its groups in ``flat``."""
    shard = flat.optimizer_shard
    names = [] if _is_exposed(flat) else shard.contents.names()
    tensors = [shard.contents.entry(name) for name in names]
    tensors += [shard.members] if names and shard.members is not None else []
    if flat.trainable and engine.bound is not None and not shard.offloaded:
        tensors += engine.bound.state.device.memory(shard)
    return tensors


@dataclass(eq=False)
class _PendingCopy:
    """The copy of one :class:`DeferredState`, complete when byte ``end`` of the file is copied."""

    state: DeferredState
    end: int
    versions: tuple[int, ...]
    copied: threading.Event = field(default_factory=threading.Event)

    def refuse_written(self) -> None:
        """Raise CheckpointError if a script has written to the state."""
        if _versions(self.state) != self.versions:
            raise CheckpointError(
                f"a script has written to the optimizer's state of {self.state.label}, or to "
                "members of its groups, in place before a save in the background had copied it "
                "(checkpoint.staging_bytes); write with "
                "hf_zero.safe_set_full_optimizer_state(parameter, value, name) or "
                "safe_set_full_fp32_param, which wait, or after engine.wait_for_checkpoint()"
            )

    def release(self) -> None:
        """Let changes of the state continue."""
        for gate in self.state.gates:
            gate.end_copy()
        self.copied.set()


def _versions(state: DeferredState) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in state.watched)


class _Waits:
    """Seconds for which at least one thread has waited: threads that wait at the same time hold up
    other ranks together. A ``with`` block is one wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting, self._started, self._ended = 0, 0.0, 0.0  # number, and seconds

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._ended + (time.perf_counter() - self._started if self._waiting else 0.0)

    def __enter__(self) -> None:
        with self._lock:
            if not self._waiting:
                self._started = time.perf_counter()
            self._waiting += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._ended += time.perf_counter() - self._started


def plan_in_call(plan: FilePlan, deferred: Sequence[DeferredState]) -> FilePlan:
    """Return the plan of what a save of ``plan`` copies in its call, all but ``deferred`` state:
    its tensors one after another, without a header.
    """
    names = frozenset[str]().union(*(state.names for state in deferred))
    at, entries = 0, list[TensorEntry]()
    for entry in plan.entries:
        if entry.name not in names:
            entries.append(replace(entry, begin=at, end=at + entry.nbytes))
            at = entries[-1].end
    return FilePlan(tuple(entries), b"")


class ReadyFile(Protocol):
    """A copy of the file of this rank, made before a save of the same state."""

    @property
    def save_id(self) -> str: ...

    def image_of(self, plan: RankFile) -> torch.Tensor | None:
        """Return the file if it is the one that ``plan`` describes; else None."""


class StagedFile:
    """The file of ``plan`` as parts in ``memory``: [bytes] of uint8 on the host, page-aligned. It
    holds the whole file unless :meth:`stage` copies parts into it. ``timeout``: seconds for which
    other ranks wait for this one.
    """

    def __init__(
        self, plan: FilePlan, memory: torch.Tensor, device: torch.device, timeout: float = math.inf
    ) -> None:
        # Once ``stage`` has returned, the thread that writes the file alone uses these, but for
        # ``_copies`` and ``_abandoned``, which both threads change with ``_filling`` held, and
        # ``stall``, which the training thread adds up.
        self._plan, self._memory, self._device = plan, memory[: plan.size], device
        self._tensors: dict[str, TensorOrFetch] = {}
        self._fetched: tuple[str, torch.Tensor] | None = None  # the last of those fetched
        self._start, self._stop = 0, plan.size  # of the part in the memory
        self._ends: dict[str, int] = {}  # of the tensors, in the file
        self._copies: list[_PendingCopy] = []
        self._filling = threading.Lock()  # held while a part is copied beside the training
        self._abandoned = ""  # why what was left has not been copied
        self._timeout, self._waits = timeout, _Waits()
        self._training_thread = threading.get_ident()
        self.stall = 0.0  # seconds for which training has waited

    def stage(self, tensors: Tensors, deferred: Sequence[DeferredState] = ()) -> None:
        """Copy the first part of the file, with the values of ``tensors``; changes of ``deferred``
        state that is left wait from now on. In a memory smaller than the file, the end takes what
        is copied in the call, and the rest, a multiple of :data:`DATA_ALIGNMENT`, a part of the
        file.
        """
        started, header = time.perf_counter(), len(self._plan.header)
        self._tensors = {name: self._fetching(name, given) for name, given in tensors.items()}
        self._ends = {e.name: header + e.end for e in self._plan.entries if e.nbytes}
        if self._memory.numel() < self._plan.size:
            self._copy_in_call(deferred)
        self._stage_part(0, self._device)
        self._take_copied()
        for copy in self._copies:
            for gate in copy.state.gates:
                gate.begin_copy(partial(self._wait, copy.copied))
        self.stall = time.perf_counter() - started

    def _copy_in_call(self, deferred: Sequence[DeferredState]) -> None:
        """Copy what is not ``deferred`` to the end of the memory, whose beginning is left for parts
        of the file.
        """
        plan, ends = plan_in_call(self._plan, deferred), self._ends
        for state in deferred:
            end = max((ends[name] for name in state.names if name in ends), default=0)
            self._copies.append(_PendingCopy(state, end, _versions(state)))
        start = self._memory.numel() - plan.size
        start -= start % DATA_ALIGNMENT
        copies, self._memory = self._memory[start:], self._memory[:start]
        copy_to_memory(copies, plan, self._tensors, self._device)
        for entry in plan.entries:
            self._tensors[entry.name] = copies[entry.begin : entry.end]

    def _fetching(self, name: str, given: TensorOrFetch) -> TensorOrFetch:
        """Return ``given``, with a function called once for all parts that its tensor is in."""
        if isinstance(given, torch.Tensor):
            return given

        def fetch() -> torch.Tensor:
            if self._fetched is None or self._fetched[0] != name:
                self._fetched = None  # frees the last one before the next is fetched
                self._fetched = name, given()
            return self._fetched[1]

        return fetch

    @torch.no_grad()
    def _stage_part(self, start: int, device: torch.device) -> None:
        """Copy the part of the file that begins at byte ``start`` into the memory, from ``device``
        and the host.
        """
        plan = self._plan
        copy_to_memory(self._memory, plan, self._tensors, device, start)
        self._start, self._stop = start, min(start + self._memory.numel(), plan.size)
        if self._fetched is not None and self._ends[self._fetched[0]] <= self._stop:
            self._fetched = None

    def parts(self) -> Iterator[memoryview]:
        """Yield the parts of the file in order, on the thread that writes them. Each is valid until
        the next one. The memory is free once all were taken, or with :meth:`close`.

        Raises CheckpointError if a script has written to state that was to be copied.
        """
        while True:
            yield bytes_view(self._memory[: self._stop - self._start])
            if self._stop == self._plan.size:
                return
            self._stage_next_part()

    def _stage_next_part(self) -> None:
        """Copy the next part beside the training. The host has waited for the updates before the
        save with the copy of the first part.
        """
        with self._filling:
            if self._abandoned:
                raise CheckpointError(self._abandoned)
            # the rest, once all state is copied, is on the host: a step may be captured meanwhile
            device, beside = self._device if self._copies else HOST, None
            if not kinds.is_synchronous(device):
                kinds.set_device(device)
                beside = streams.side_stream(device, streams.Use.SAVES)
            with streams.on_stream(beside), span("stage_save", "", self._memory.numel()):
                self._stage_part(self._stop, device)
            for copy in self._copies:
                if copy.end <= self._stop:
                    copy.refuse_written()
            for copy in self._take_copied():
                copy.release()

    def _take_copied(self) -> list[_PendingCopy]:
        """Remove and return the copies that are complete, and drop their tensors."""
        copied = [copy for copy in self._copies if copy.end <= self._stop]
        self._copies = [copy for copy in self._copies if copy.end > self._stop]
        for name in (name for copy in copied for name in copy.state.names):
            self._tensors.pop(name, None)
        return copied

    def _wait(self, copied: threading.Event) -> None:
        """Wait on the thread of a change until it is ``copied``, or abandon it before the other
        ranks end their waits for this one.
        """
        started, limit = time.perf_counter(), WAITED_PART_OF_TIMEOUT * self._timeout
        with span("wait_save", ""), self._waits:
            while not copied.wait(max(min(WARN_SECONDS, limit - self._waits.seconds), 0.0)):
                waited = self._waits.seconds
                if waited >= limit:
                    self._abandon(waited)
                    continue
                logger.warning(
                    "training has waited %.0f s for a save in the background to copy its state: "
                    "this rank's storage takes the file slower than steps come; raise "
                    "checkpoint.staging_bytes",
                    waited,
                )
        if threading.get_ident() == self._training_thread:
            self.stall += time.perf_counter() - started

    def _abandon(self, waited: float) -> None:
        """Let all changes continue after a wait of ``waited`` seconds, and the save fail, unless
        everything is copied. Waits for a part that is being copied.
        """
        with self._filling:
            if self._copies:
                self._abandoned = (
                    f"training has waited {waited:.0f} s to change state that could not be copied "
                    "yet, because this rank's storage is slow, and other ranks wait for the rank "
                    f"at most {self._timeout:g} s (timeout); raise checkpoint.staging_bytes, so "
                    "that more of the state is copied in the call, or timeout"
                )
                self._release_all()

    def _release_all(self) -> None:
        """End all waits."""
        for copy in self._copies:
            copy.release()
        self._copies = []

    def close(self) -> None:
        """Drop memory and state, and end the waits: the file is written, or the save has failed."""
        with self._filling:
            self._release_all()
        self._tensors, self._fetched = {}, None
        self._memory = self._memory.new_empty(0)
