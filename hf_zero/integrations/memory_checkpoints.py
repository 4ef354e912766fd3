"""Saves of a trainer into the memory of the hosts: its own save runs into a temporary folder there,
and the engine's part of it becomes a generation with the other files beside it.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from hf_zero.checkpoint import memory
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.integrations.seams import replaced

if TYPE_CHECKING:
    from hf_zero.integrations.engine_protocol import EngineProtocol


def save_if_due(engine: EngineProtocol, write: Callable[[Path], Path]) -> None:
    """Save ``engine`` into the memory of the hosts if its configuration has it saved after this
    step. ``write(folder)`` saves what a trainer saves, and returns the folder of which the files
    are kept beside. Every rank calls it after the same step.
    """
    checkpoints = memory.checkpoints_of(engine)
    if checkpoints is None or not checkpoints.is_due(engine.global_steps):
        return
    assert isinstance(engine, SavedEngine)
    where = checkpoints.folder(checkpoints.base)
    checkpoints.mark_job(checkpoints.base)
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = Path(mkdtemp(dir=where))
    try:
        with _saving_nothing(engine) as call:
            root = write(folder)
        files = [path for path in root.rglob("*") if path.is_file()]
        beside = {str(path.relative_to(root)): path.read_bytes() for path in files}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    memory.save(engine, beside, call.client_state, call.tag)


@dataclass
class _SaveCall:
    """The arguments of a call of ``engine.save_checkpoint``."""

    tag: str | None = None
    client_state: dict[str, object] | None = None


@contextmanager
def _saving_nothing(engine: EngineProtocol) -> Iterator[_SaveCall]:
    """Keep ``engine.save_checkpoint`` from writing; yield the arguments of its call."""
    call = _SaveCall()

    @functools.wraps(engine.save_checkpoint)
    def save_checkpoint(
        save_dir: str | None = None,
        tag: str | None = None,
        client_state: dict[str, object] | None = None,
        **others: object,
    ) -> bool:
        call.tag, call.client_state = tag, client_state
        return True

    with replaced(engine, save_checkpoint=save_checkpoint):
        yield call
