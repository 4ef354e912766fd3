"""States that Accelerate saves and loads, in the folder of a run instead of the script's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_zero.integrations.seams import Original, Seam
from hf_zero.parity.recorder import StepRecorder

if TYPE_CHECKING:
    from accelerate import Accelerator


def _row(method: str, wrapper: str) -> Seam:
    target = f"accelerate.accelerator:Accelerator.{method}"
    return Seam(target, f"{__name__}:{wrapper}", "the reference of hf-zero parity")


ROWS = (_row("save_state", "save_state_of_this_run"), _row("load_state", "load_state_of_this_run"))

_recorder_of: Callable[[], StepRecorder] | None = None


def redirect_states(recorder_of: Callable[[], StepRecorder]) -> None:
    """Let the wrappers of :data:`ROWS` use the folders of ``recorder_of()`` from now on."""
    global _recorder_of
    _recorder_of = recorder_of


def _recorder() -> StepRecorder:
    assert _recorder_of is not None
    return _recorder_of()


def save_state_of_this_run(
    original: Original, self: Accelerator, output_dir: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``Accelerator.save_state``: saves into the folder of the run. If Accelerate names the
    states, they are in the folder of the project, which is one of the run from then on.
    """
    project, recorder = self.project_configuration, _recorder()
    if project.automatic_checkpoint_naming:
        project.project_dir = recorder.saves_in(project.project_dir) or project.project_dir
    return original(self, recorder.saves_in(output_dir), *args, **kwargs)


def load_state_of_this_run(
    original: Original, self: Accelerator, input_dir: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``Accelerator.load_state``: loads what this run has saved, or what was there before."""
    return original(self, folder_to_load(_recorder(), input_dir), *args, **kwargs)


def folder_to_load(recorder: StepRecorder, folder: Any) -> Any:
    """Return the folder in which this run has saved what ``folder`` names, or ``folder``."""
    saved = recorder.saves_in(folder)
    return saved if saved is not None and os.path.isdir(saved) else folder
