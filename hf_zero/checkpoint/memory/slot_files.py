"""Files in the slots of a host's memory: mapped as tensors, this rank's own with its plan and
record, and the copies that it keeps of other ranks' files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import torch

from hf_zero.checkpoint.memory.record import RankRecord
from hf_zero.checkpoint.save_plan import RankFile
from hf_zero.checkpoint.tensorfile import FilePlan
from hf_zero.ops.coded_arrays import CodedArray
from hf_zero.ops.host_memory import HostArena

if TYPE_CHECKING:
    from hf_zero.optim.optimizer_state import OptimizerState
    from hf_zero.zero.training_engine import TrainingEngine


class SlotFiles:
    """Files of this rank's slots as tensors: kept mapped, so that a save allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._arena = HostArena(pin=True, device=device)
        self._mapped: dict[Path, tuple[int, torch.Tensor]] = {}

    def open(self, path: Path, size: int) -> torch.Tensor:
        """Return the file ``path`` as a tensor: [size] of uint8, of undefined content. Raises
        OSError where there is no room, HostMemoryError.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            number = os.fstat(fd).st_ino
            held = self._mapped.get(path)
            if held is not None and held[0] == number and held[1].numel() == size:
                return held[1]
            del held
            self._mapped.pop(path, None)
            os.ftruncate(fd, size)
            tensor = self._arena.take(size, torch.uint8, fd)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(fd)
        self._mapped[path] = number, tensor
        return tensor

    def leave(self, path: Path) -> None:
        """Leave the file to those who read its tensor: the next one of ``path`` is another."""
        self._mapped.pop(path, None)
        path.unlink(missing_ok=True)

    def close(self) -> None:
        self._mapped.clear()


@dataclass(frozen=True, eq=False)
class Staged:
    """This rank's file in its slot; its record, still without hashes; the :func:`changes_of` the
    engine before it.
    """

    path: Path
    image: torch.Tensor
    plan: FilePlan
    record: RankRecord
    changes: tuple[object, ...]

    @property
    def save_id(self) -> str:
        return self.record.save_id

    def image_of(self, plan: RankFile) -> torch.Tensor | None:
        """Return the file if it is the one that ``plan`` describes, tensors outside of flat buffers
        included (generators, buffers, the place in the data); else None.
        """
        if plan.file != self.plan:
            return None
        chunks = plan.report.chunks.items()
        of_flats = {f"{key}::{name}" for key, (_, _, names) in chunks for name in names}
        at = len(self.plan.header)
        for entry in self.plan.entries:
            if entry.name not in of_flats:
                given = plan.tensors[entry.name]
                now = given if isinstance(given, torch.Tensor) else given()
                kept = self.image[at + entry.begin : at + entry.end]
                if not torch.equal(kept, now.detach().cpu().reshape(-1).view(torch.uint8)):
                    return None
        return self.image


@dataclass(frozen=True, eq=False)
class SlotCopy:
    """The place of a copy that this rank keeps of ``rank``'s file: its tensor, and its record."""

    rank: int
    path: Path
    image: torch.Tensor
    record: torch.Tensor


class TensorVersion:
    """A tensor as it is now: equal to another one of the same tensor without a write in place in
    between. It keeps no tensor alive, and equals none of a freed tensor, whose id another may have.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._writes = ref(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersion):
            return False
        tensor = self._tensor()
        return tensor is not None and (tensor is other._tensor() and self._writes == other._writes)


def state_version(state: OptimizerState) -> tuple[object, ...]:
    """Return a value that differs after every load, write in place to or replacement of optimizer
    state. After a step it may be equal. Stores what a script has written to ``optimizer.state``.
    """
    state.members.shown.take()
    versions = list[object]()
    # lists: an update on another thread may add entries
    for entry in [*state.table.entries.states.values()]:
        for name, value in [*entry.items()]:
            value = value.codes if isinstance(value, CodedArray) else value
            versions += name, TensorVersion(value) if isinstance(value, torch.Tensor) else value
    return state.scalars.loads, state.writes, *versions


def changes_of(engine: TrainingEngine) -> tuple[object, ...]:
    """Return values of which one differs once a step, a load or a script has changed a flat buffer
    or its optimizer state.
    """
    state = () if engine.bound is None else state_version(engine.bound.state)
    return engine.counters.global_steps, sum(flat.version for flat in engine.flats), state
