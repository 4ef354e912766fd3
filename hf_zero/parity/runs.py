"""One run of a comparison in this process: which engine answers ``initialize``, and its record."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.initialize import replace_start, start_engine
from hf_zero.integrations.save_redirection import redirect_saves
from hf_zero.parity import plain_frameworks, real_deepspeed
from hf_zero.parity.deepspeed_reference import DeepSpeedReference
from hf_zero.parity.fewer_layers import make_fewer
from hf_zero.parity.framework_resumes import FrameworkResumes, follow
from hf_zero.parity.observed import Observed
from hf_zero.parity.recorder import (
    Finished,
    StepRecorder,
    recorded,
    recording_plain_backwards,
    saved_engine,
)
from hf_zero.parity.start import comparable, own_update, start_reference
from hf_zero.setup.request import SetupRequest

# what answers requests for engines
ENGINE, TORCH, PLAIN, DEEPSPEED = "hf-zero", "torch", "plain", "deepspeed"
OBSERVED = {PLAIN: plain_frameworks, DEEPSPEED: real_deepspeed}
ALL_STEPS, BY_ITSELF = "all steps are recorded", "the script ended"


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs of a comparison.

    engine: :data:`ENGINE`, as configured, or a reference: :data:`TORCH`, untouched torch in place
        of the engine; :data:`PLAIN`, the framework's own DDP; :data:`DEEPSPEED`, DeepSpeed. The
        last two take the whole process.
    variant: of the reference, as for :func:`hf_zero.parity.start.start_reference`.
    steps: number of steps after which it ends; 0: the script ends by itself.
    keep: whether settings that change the training on purpose stay.
    module: whether the script is a module.
    skipped: of a reference in full precision, the steps that fp16 has skipped.
    stop_at: number of steps after which the engines, or the Trainer, save, and it ends; 0: none.
    resume: the folder of a run that was stopped, from whose end it goes on.
    layers: number of blocks of models of Transformers; 0: all.
    """

    folder: str
    engine: str
    variant: str = ""
    steps: int = 6
    keep: bool = False
    module: bool = False
    skipped: tuple[int, ...] = ()
    stop_at: int = 0
    resume: str = ""
    layers: int = 0

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> ComparedRun:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


class _Installed:
    """The run under way in this process; its recorders by thread, as ranks may be threads."""

    def __init__(self, run: ComparedRun):
        self.run = run
        self.users = 0
        self.recorders: dict[int, StepRecorder] = {}
        self.undo = ExitStack()
        self.resumes = FrameworkResumes(run.stop_at, run.resume, self.recorder)

    def recorder(self) -> StepRecorder:
        """Return the recorder of the calling rank; a thread of its own is part of the only one."""
        recorders = self.recorders
        return recorders.get(threading.get_ident()) or next(iter(recorders.values()))

    def start(self, request: SetupRequest[Any]) -> Any:
        """Make the engine of ``request`` and begin its record."""
        run = self.run
        compared = comparable(request, run.keep)
        request = compared.request
        recorder = self.recorder()
        trains = request.optimizer is not None or request.config.optimizer is not None
        if run.resume and trains and not self.resumes.takes_part:
            folder = saved_engine(Path(run.resume), len(recorder.engines))
            request = replace(request, resume=folder)
        if run.engine == DEEPSPEED:
            return real_deepspeed.start_deepspeed(request)  # which begins its record
        if run.engine == ENGINE:
            answer = start_engine(
                replace(request, engine_class=recorded(request.engine_class, self.recorder))
            )
        else:
            answer = start_reference(request, run.variant, run.skipped, run.engine == PLAIN)
            self._unwrap_references()
            answer[0].__class__ = recorded(type(answer[0]), self.recorder)
        header = {"left_out": compared.left_out, "own_update": own_update(answer[1])}
        header["kept"] = compared.kept
        if run.engine != ENGINE:
            header["bytes"] = answer[0].nbytes
        recorder.add(answer[0], header)
        return answer

    def _unwrap_references(self) -> None:
        """Let libraries that unwrap models of ``deepspeed.DeepSpeedEngine`` unwrap references."""
        module: Any = sys.modules.get("deepspeed")
        with _lock:
            if getattr(module, "DeepSpeedEngine", None) is DeepSpeedEngine:
                self.undo.callback(setattr, module, "DeepSpeedEngine", DeepSpeedEngine)
                module.DeepSpeedEngine = DeepSpeedReference


def _end_process(recorder: StepRecorder) -> None:
    recorder.close(ALL_STEPS)
    os._exit(0)


_lock = threading.Lock()
_installed: dict[str, _Installed] = {}


@contextmanager
def recording(run: ComparedRun, ends_process: bool = False) -> Iterator[None]:
    """Context in which every request for an engine is answered as ``run`` says, and its steps are
    recorded. Ends a script whose steps are all recorded, and then its engines; with
    ``ends_process`` also one that catches that exception, with the process.
    """
    with _lock:
        installed = _installed.setdefault(run.folder, _Installed(run))
        steps = run.stop_at or run.steps
        recorder = StepRecorder(Path(run.folder), steps, bool(run.stop_at), bool(run.resume))
        if ends_process:
            recorder.when_ignored = lambda: _end_process(recorder)
        installed.recorders[threading.get_ident()] = recorder
        installed.users += 1
        if installed.users == 1:
            replace_start(installed.start)
            installed.undo.callback(replace_start, None)
            redirect_saves(lambda folder: installed.recorder().saves_in(folder) or folder)
            installed.undo.callback(redirect_saves, None)
            follow(installed.resumes)
            installed.undo.callback(follow, None)
            installed.undo.enter_context(recording_plain_backwards(installed.recorder))
            if run.engine in OBSERVED:
                OBSERVED[run.engine].observe(installed.recorder, run.variant)
            if run.layers:
                make_fewer(run.layers)
    how = BY_ITSELF
    try:
        yield
    except Finished:
        how = ALL_STEPS
    finally:
        with _lock:
            installed.users -= 1
            if not installed.users:
                installed.undo.close()
                del _installed[run.folder]
    for engine in recorder.engines:
        if not isinstance(engine, Observed) and not engine.destroyed:
            engine.destroy()
    recorder.close(how)
