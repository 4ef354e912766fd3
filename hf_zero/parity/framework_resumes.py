"""Runs that are stopped and resumed by their framework: the Trainer, Accelerate and Lightning save
and load what engines do not have, such as schedulers, loops and random states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.errors import ParityError
from hf_zero.integrations import finder, seams
from hf_zero.integrations.engine_protocol import is_engine, trains
from hf_zero.integrations.seams import Original, Seam
from hf_zero.integrations.transformers.trainer import choose_resume
from hf_zero.parity.recorder import SAVES, StepRecorder

if TYPE_CHECKING:
    from accelerate import Accelerator

ACCELERATE, LIGHTNING = "accelerate", "lightning.ckpt"  # in the folder of saves
ROWS = tuple(
    Seam(target, f"{__name__}:{wrapper}", "--resume-at of hf-zero parity")
    for target, wrapper in (
        ("accelerate.accelerator:Accelerator.prepare", "go_on_by_accelerate"),
        ("lightning.pytorch.trainer.trainer:Trainer.fit", "go_on_by_lightning"),
        ("pytorch_lightning.trainer.trainer:Trainer.fit", "go_on_by_lightning"),
    )
)


@dataclass
class FrameworkResumes:
    """The stop of a run after step ``stop_at``, or its resume from the folder ``resume`` of the run
    that was stopped. ``takes_part``: a framework saves or loads, in place of the engines.
    """

    stop_at: int
    resume: str
    recorder_of: Callable[[], StepRecorder]
    takes_part: bool = False

    def take_part(self) -> StepRecorder:
        """Let a framework save after the step at which the run is stopped."""
        self.takes_part, recorder = True, self.recorder_of()
        if self.stop_at:
            recorder.saves, recorder.steps = False, self.stop_at + 1
        return recorder

    def saved(self, pattern: str, framework: str) -> str:
        """Return the newest of what ``framework`` has saved by this pattern."""
        found = sorted(Path(self.resume, SAVES).glob(pattern))
        if not found:
            raise ParityError(
                f"the run that was stopped has no checkpoint in {self.resume}: its {framework} "
                "made fewer steps; pass a smaller --resume-at"
            )
        return str(found[-1])

    def of_trainer(self, args: Any, resume: str | bool | None) -> str | bool | None:
        """Have a Trainer with ``args`` save at the step at which the run is stopped, or return the
        checkpoint from which it resumes, in place of ``resume``.
        """
        self.take_part()
        if self.stop_at:
            args.save_strategy = type(args.save_strategy)("steps")
            args.save_steps, args.save_only_model = self.stop_at, False
        return self.saved("*/*/checkpoint-*", "Trainer") if self.resume else resume


_resumes: FrameworkResumes | None = None


def follow(resumes: FrameworkResumes | None) -> None:
    """Have frameworks of this process save and load as ``resumes`` says; None: the script says."""
    global _resumes
    _resumes = resumes
    choose_resume(None if resumes is None else resumes.of_trainer)
    if resumes is not None and (resumes.stop_at or resumes.resume):
        seams.add_rows(*ROWS)
        finder.install_hooks()


def go_on_by_accelerate(original: Original, self: Accelerator, *args: Any, **kwargs: Any) -> object:
    """Wraps ``Accelerator.prepare``: the accelerator of a loop loads its state where it has made
    its engines, or saves it before the first forward after a step.
    """
    resumes = _resumes
    if resumes is None or resumes.takes_part:  # of a Trainer, or of another call
        return original(self, *args, **kwargs)
    resumes.takes_part = True
    prepared = original(self, *args, **kwargs)
    values = prepared if isinstance(prepared, tuple) else (prepared,)
    resumes.takes_part = any(is_engine(value) and trains(value) for value in values)
    if not resumes.takes_part:
        return prepared
    recorder = resumes.take_part()
    if resumes.resume:
        self.load_state(resumes.saved(ACCELERATE, "loop"))
    elif resumes.stop_at:
        recorder.call_after(
            resumes.stop_at, lambda: self.save_state(str(recorder.folder / SAVES / ACCELERATE))
        )
    return prepared


def go_on_by_lightning(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``Trainer.fit`` of Lightning: it saves after a step, or resumes by ``ckpt_path``."""
    if _resumes is None:
        return original(self, model, *args, **kwargs)
    recorder = _resumes.take_part()
    if _resumes.resume:
        kwargs["ckpt_path"] = _resumes.saved(LIGHTNING, "fit")
    elif _resumes.stop_at:
        from hf_zero.integrations.lightning.strategy import call_after_batches, callbacks_of

        at, base = (
            _resumes.stop_at,
            next(
                kind for kind in type(callbacks_of(self)[0]).__mro__ if kind.__name__ == "Callback"
            ),
        )

        def save() -> None:
            if self.global_step == at and not (recorder.folder / SAVES / LIGHTNING).exists():
                self.save_checkpoint(recorder.folder / SAVES / LIGHTNING)

        call_after_batches(self, base, save)
    return original(self, model, *args, **kwargs)
