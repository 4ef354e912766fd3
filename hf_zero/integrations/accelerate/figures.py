"""Figures of an Accelerator's engines: for its trackers, and in files of the run. Imported while
``import accelerate`` runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.integrations.accelerate.memory_saves import engines_of
from hf_zero.integrations.seams import Original
from hf_zero.measures.figures import tracked

if TYPE_CHECKING:
    from accelerate import Accelerator


def add_figures(
    original: Original,
    self: Accelerator,
    values: dict[str, object],
    step: int | None = None,
    log_kwargs: object = None,
) -> None:
    """Wraps ``Accelerator.log``: trackers get the figures of the first engine beside the script's
    values, which keep their names; results of an evaluation join the figures of that engine.
    """
    for engine in engines_of(self)[:1]:
        engine.measures.note_evaluation(engine, values)
    figures = (engine.figures for engine in engines_of(self) if engine.figures)
    figures_now = tracked(next(figures, {}))
    original(self, {**figures_now, **values}, step, {} if log_kwargs is None else log_kwargs)


def keep_measures_in(accelerator: Accelerator, folder: Path) -> None:
    """Have engines of ``accelerator`` write files to ``folder``, further ones to folders in it."""
    for number, engine in enumerate(engines_of(accelerator)):
        engine.measures.keep_in(str(folder / f"model_{number}" if number else folder))
