"""States that Accelerate saves and loads, in the folder of a run instead of the script's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hf_zero.parity.recorder import StepRecorder

if TYPE_CHECKING:
    from accelerate import Accelerator


def folder_to_save(recorder: StepRecorder, accelerator: Accelerator, folder: Any) -> str | None:
    """Return the folder of the run for a state that is saved in ``folder``. None: in the folder of
    the project, which is one of the run from then on.
    """
    project = accelerator.project_configuration
    project.project_dir = recorder.saves_in(project.project_dir) or project.project_dir
    return recorder.saves_in(folder)


def folder_to_load(recorder: StepRecorder, folder: Any) -> Any:
    """Return the folder in which this run has saved what ``folder`` names, or ``folder``."""
    saved = recorder.saves_in(folder)
    return saved if saved is not None and os.path.isdir(saved) else folder
