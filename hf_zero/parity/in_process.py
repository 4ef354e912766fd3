"""``hf_zero.parity``: the comparison of a function that trains, in this process."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.random_generators import restorer_of_generators
from hf_zero.distributed import process_group, world_group
from hf_zero.parity.answers import Answer
from hf_zero.parity.comparison import RunRecord
from hf_zero.parity.runs import ComparedRun, recording
from hf_zero.parity.session import Resume, compare


def parity(
    train: Callable[[], object], steps: int = 6, keep: bool = False, resume_at: int | None = None
) -> Answer:
    """Call ``train`` with untouched torch in place of the engine, then with hf-zero, and compare
    every loss, gradient norm, learning rate and weight of each step. Collective: the ranks of a
    process group that exists call it together.

    Args:
        train: a function that makes its model, its data and, by ``hf_zero.initialize`` or a
            trainer, its engine anew in each call. It begins with the same states of random
            generators each time.
        steps: number of optimizer steps after which a call is ended; 0: it ends by itself.
        keep: whether to keep settings that change the training on purpose.
        resume_at: step after which a third run is stopped and resumed.

    Returns:
        The answer: ``equal``, and ``str(answer)`` in words.

    Raises:
        ParityError: ``train`` makes no engine that trains, or makes no step, or none after
            ``resume_at``.
    """
    with ExitStack() as stack:
        text = ""
        if process_group.get_rank() == 0:
            # where this rank raises, the others may still write
            kept = tempfile.TemporaryDirectory(prefix="hf-zero-parity-", ignore_cleanup_errors=True)
            text = stack.enter_context(kept)
        if process_group.get_world_size() > 1:
            text = world_group.get_world_group().broadcast_object(text)
        restore, python = restorer_of_generators(), random.getstate()

        def run(name: str, ranks: None = None, **fields: Any) -> RunRecord:
            folder = Path(text, name)
            folder.mkdir(exist_ok=True)
            restore()
            random.setstate(python)
            fixed = {"folder": str(folder), "steps": steps, "keep": keep}
            with recording(ComparedRun(**{**fixed, **fields})):
                train()
            process_group.barrier()
            return RunRecord(folder)

        answer = compare(run, None, None if resume_at is None else Resume(resume_at))
        process_group.barrier()  # all have read the files
        return answer
