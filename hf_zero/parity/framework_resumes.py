"""Runs that are stopped and resumed by their framework: the Trainer, Accelerate and Lightning save
and load what engines do not have, such as schedulers, loops and random states.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint.manifest import RNG
from hf_zero.checkpoint.random_generators import rng_states, set_rng_state
from hf_zero.errors import ParityError
from hf_zero.integrations import finder, seams
from hf_zero.integrations.engine_protocol import is_engine, trains
from hf_zero.integrations.seams import Original, Seam
from hf_zero.integrations.transformers.trainer import choose_resume
from hf_zero.parity.recorder import SAVES, StepRecorder

if TYPE_CHECKING:
    from accelerate import Accelerator

# in the folder of saves
ACCELERATE, LIGHTNING, RANDOM = "accelerate", "lightning.ckpt", "random"
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
        states = rng_states()
        # a DataLoader draws a seed as an iteration begins, which the other run did long before
        recorder.call_after(0, lambda: _draw_on_from(states))
    elif resumes.stop_at:
        recorder.call_after(
            resumes.stop_at, lambda: self.save_state(str(recorder.folder / SAVES / ACCELERATE))
        )
    return prepared


def _draw_on_from(states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        set_rng_state(name.removeprefix(RNG), state)


def go_on_by_lightning(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``Trainer.fit`` of Lightning: it saves after a step, or resumes by ``ckpt_path``, with
    the states of the random generators, which Lightning does not save.
    """
    if _resumes is None or not (_resumes.stop_at or _resumes.resume):
        return original(self, model, *args, **kwargs)
    resumes: FrameworkResumes = _resumes
    recorder = resumes.take_part()
    folder = recorder.folder if resumes.stop_at else Path(resumes.resume)
    checkpoint = folder / SAVES / LIGHTNING
    states = folder / SAVES / f"{RANDOM}{os.environ.get('RANK', '0')}.pt"
    if resumes.resume:
        kwargs["ckpt_path"] = resumes.saved(LIGHTNING, "fit")
    package = type(self).__module__.partition(".trainer")[0]
    base: Any = importlib.import_module(f"{package}.callbacks").Callback

    class StopAndResume(base):  # type: ignore[misc]
        drawn = saved = False

        def on_train_batch_start(self, trainer: Any, *args: object) -> None:
            if resumes.resume and not self.drawn:
                self.drawn = True
                _draw_on_from(torch.load(states))
            elif trainer.global_step == resumes.stop_at and not states.exists():
                torch.save(rng_states(), states)

        def on_train_batch_end(self, trainer: Any, *args: object) -> None:
            if resumes.stop_at == trainer.global_step and not self.saved:
                self.saved = True
                trainer.save_checkpoint(checkpoint)

    self.callbacks.append(StopAndResume())
    return original(self, model, *args, **kwargs)
