"""An exception at any line of a start, a step, a save or a load: the change is complete, or undone,
or refused from then on with the reason. The fast suite takes a sample of the lines, the long one
all of them.
"""

from __future__ import annotations

import gc
import opcode
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import verify_all
from hf_zero.errors import PartitionError
from hf_zero.zero.transaction import snapshot_of
from tests.helpers.cells import fast, runs_long
from tests.helpers.engines import config_of, start
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import layers

PACKAGE = os.path.dirname(hf_zero.__file__)
ROWS, SAMPLE = 4, 9  # rows of a batch; lines of a stage that the fast suite takes
Weights = Sequence[torch.Tensor]


class Injected(Exception):
    """The exception of the test."""


def unlike_a_signal(frame: FrameType) -> bool:
    """Return whether no signal raises at the instruction that ``frame`` is about to run, as signals
    raise after calls: the call of ``__exit__(None, None, None)``, below a value that is returned,
    and the no-operation of a ``try``. No ``with`` covers these, and its lock would stay locked.
    """
    code, at, constants = frame.f_code.co_code, frame.f_lasti, frame.f_code.co_consts
    if opcode.opname[code[at]] == "NOP":
        return True
    while opcode.opname[code[at]] in ("SWAP", "EXTENDED_ARG"):
        at += 2
    operations = [
        (opcode.opname[code[n]], code[n + 1]) for n in range(at, at + 6, 2) if n < len(code)
    ]
    passed = [constants[index] for name, index in operations if name == "LOAD_CONST"]
    return len(passed) == 3 and not any(each is not None for each in passed)


class Lines:
    """A trace function: counts lines of the package, or of ``folder`` once each; raises at one."""

    def __init__(self, at: int, folder: str = "") -> None:
        self.at, self.count, self.where = at, 0, ""
        self._folder, self._once = os.path.join(PACKAGE, folder), bool(folder)
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(self._folder) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event != "line" or (self._once and line in self._seen) or unlike_a_signal(frame):
            return self.line
        self._seen.add(line)
        self.count += 1
        if self.count == self.at:
            name = os.path.relpath(frame.f_code.co_filename, PACKAGE)
            self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            sys.settrace(None)
            raise Injected("injected")
        return self.line

    @contextmanager
    def over(self) -> Iterator[None]:
        """Trace this thread, and catch what the exception becomes. Without garbage collections: in
        the finalizer of an earlier engine the exception would reach nobody.
        """
        before = sys.gettrace()
        gc.disable()
        sys.settrace(self)
        try:
            yield
        except (Injected, hf_zero.HfZeroError) as error:
            assert isinstance(error, Injected) or "injected" in str(error), error
        finally:
            sys.settrace(before)
            gc.enable()


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


def plainly(windows: Sequence[Sequence[int]]) -> Weights:
    """Return the weights of torch after a step over the batches of each of ``windows``."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for window in windows:
        for step in window:
            model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


def model_with_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = layers()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def engine_at(stage: int, given: Any = None, **more: Any) -> Any:
    """Start an engine over ``given``, a model with its optimizer; None: over new ones."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    model, optimizer = given or model_with_optimizer()
    keys = config_of(stage, train_micro_batch_size_per_gpu=ROWS, zero_optimization=zero)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    return start(model, optimizer, keys, lr_scheduler=scheduler, **more)


def backward(engine: Any, step: int) -> None:
    engine.backward(engine(batch(step)).square().mean())


def equal(engine: Any, want: Weights, steps: int) -> bool:
    got = engine.state_dict().values()
    near = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))
    return near and engine.global_steps == steps


def refused(error: hf_zero.HfZeroError) -> bool:
    return "half changed" in str(error) or "broken by an exception" in str(error)


def begin(lines: Lines, stage: int, folder: Path) -> str:
    engine = engine_at(stage)
    backward(engine, 0)
    engine.step()
    engine.save_checkpoint(str(folder))
    engine.destroy()
    given, engine = model_with_optimizer(), None
    with lines.over():
        engine = engine_at(stage, given, resume=str(folder))
    became = "undone" if engine is None else "complete"
    if engine is None:
        engine = engine_at(stage, given, resume=str(folder))
    backward(engine, 1)
    engine.step()
    right = equal(engine, plainly([[0], [1]]), 2)
    engine.destroy()
    return became if right else "other weights"


def step(lines: Lines, stage: int, folder: Path) -> str:
    engine = engine_at(stage)
    try:
        for number in range(4):
            backward(engine, number)
            if number == 1:
                with lines.over():
                    engine.step()
            else:
                engine.step()
        if equal(engine, plainly([[0], [1], [2], [3]]), 4):
            return "complete"
        return "undone" if equal(engine, plainly([[0], [1, 2], [3]]), 3) else "other weights"
    except hf_zero.HfZeroError as error:
        return "refused" if refused(error) else f"raised {error}"
    finally:
        engine.destroy()


def save(lines: Lines, stage: int, folder: Path) -> str:
    engine = engine_at(stage)
    try:
        for number in range(3):
            backward(engine, number)
            engine.step()
            if number == 0:
                engine.save_checkpoint(str(folder))
            if number == 1:
                with lines.over():
                    engine.save_checkpoint(str(folder))
        left = [path.name for path in folder.glob(".*")]
        if left:
            return f"left {left}"
        if not equal(engine, plainly([[0], [1], [2]]), 3):
            return "other weights"
        engine.save_checkpoint(str(folder))
        damaged = [verdict for verdict in verify_all(folder) if verdict.problems]
        return f"damaged {damaged}" if damaged else "complete"
    finally:
        engine.destroy()


def load(lines: Lines, stage: int, folder: Path) -> str:
    engine = engine_at(stage)

    def go_back() -> None:
        engine.load_checkpoint(str(folder), "global_step1")

    def went_back() -> bool:
        return equal(engine, plainly([[0], [2]]), 2)

    try:
        for number in range(3):
            backward(engine, number)
            engine.step()
            if number == 0:
                engine.save_checkpoint(str(folder))
            if number == 1:
                with lines.over():
                    go_back()
        if went_back():
            return "complete"
        return "undone" if equal(engine, plainly([[0], [1], [2]]), 3) else "other weights"
    except hf_zero.HfZeroError as error:
        if not refused(error):
            return f"raised {error}"
        go_back()  # a whole load mends it
        backward(engine, 2)
        engine.step()
        return "refused" if went_back() else "other weights after another load"
    finally:
        engine.destroy()


def load_state(lines: Lines, stage: int, folder: Path) -> str:
    engine = engine_at(stage)
    try:
        for number in range(3):
            backward(engine, number)
            engine.step()
            if number == 1:
                state = engine.optimizer.state_dict()
                with lines.over():
                    engine.optimizer.load_state_dict(state)
        right = equal(engine, plainly([[0], [1], [2]]), 3)
        return "complete" if right else "other weights"
    except hf_zero.HfZeroError as error:
        return "refused" if refused(error) else f"raised {error}"
    finally:
        engine.destroy()


Change = Callable[[Lines, int, Path], str]
CHANGES = (begin, step, save, load, load_state)
FOLDERS = {begin: "zero"}  # of the lines, by change; all others: those of the package
RIGHT = ("complete", "undone", "refused")


@pytest.mark.parametrize("stage", fast((0, 1, 2, 3), (1, 3).__contains__))
@pytest.mark.parametrize(
    "change", [begin, step, save, load, load_state], ids=lambda change: change.__name__
)
def test_at_any_line(
    change: Change,
    stage: int,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = FOLDERS.get(change, "")

    def over(rank: int) -> list[str]:
        wrong, missed = [], 0
        for number in range(2):  # the first has caches to fill, too
            lines = Lines(-1, folder)
            assert change(lines, stage, tmp_path / f"{number}") == "complete"
        every = range(1, lines.count + 1)
        chosen = every if runs_long(pytestconfig) else random.Random(stage).sample(every, SAMPLE)
        for at in chosen:
            lines = Lines(at, folder)
            became = change(lines, stage, tmp_path / f"at-{at}")
            missed += not lines.where  # a run may have a few lines less than the counted one
            if became not in RIGHT:
                wrong.append(f"line {at}, {lines.where}: {became}")
        assert missed <= max(1, len(chosen) // 10)
        return wrong

    with caplog.at_level("CRITICAL"):
        (wrong,) = run_ranks(1, over, timeout=3000.0)
    assert not wrong, "\n".join(wrong)


def test_a_hook_that_raises_leaves_the_step_complete() -> None:
    def over(rank: int) -> None:
        for stage in (0, 1, 2, 3):
            engine, calls = engine_at(stage), []

            def raises(*_: Any, calls: list[int] = calls) -> None:
                calls.append(len(calls))
                if len(calls) == 2:
                    raise Injected("injected")

            engine.optimizer.register_step_post_hook(raises)
            for number in range(3):
                engine.backward(engine(batch(number)).square().mean())
                if number == 1:
                    with pytest.raises(Injected):
                        engine.step()
                else:
                    engine.step()
            assert len(calls) == 3 and equal(engine, plainly([[0], [1], [2]]), 3), stage
            engine.destroy()

    run_ranks(2, over)


def test_a_hook_of_a_step_neither_saves_nor_loads(tmp_path: Path) -> None:
    """Its weights are those of a step that the counters and the schedule do not count yet."""

    def over(rank: int) -> None:
        engine = engine_at(1)
        engine.save_checkpoint(str(tmp_path))
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            hook = engine.optimizer.register_step_post_hook(
                lambda *_, call=call: call(str(tmp_path))
            )
            backward(engine, engine.global_steps)
            with pytest.raises(PartitionError, match="in a hook of step"):
                engine.step()
            hook.remove()
        assert equal(engine, plainly([[0], [1]]), 2)
        engine.destroy()

    run_ranks(2, over)


def test_a_restore_that_is_interrupted_is_complete() -> None:
    """At each line: an optimizer has its groups and state, a module its children."""
    for at in range(1, 1000):
        model, optimizer = model_with_optimizer()
        model(batch(0)).sum().backward()
        optimizer.step()
        owners = (optimizer, model)
        before = [{**vars(owner)} for owner in owners]
        children, state = [*model._modules], {**optimizer.state}
        restore = snapshot_of(*owners)
        optimizer.added = model.added = 1  # type: ignore[attr-defined,assignment]
        optimizer.state.clear()
        lines = Lines(at)
        with lines.over():
            restore()
        if "added" in vars(optimizer) and lines.where.endswith("_restore_all"):
            continue  # at the first line
        assert [{**vars(owner)} for owner in owners] == before, lines.where
        assert [*model._modules] == children and {**optimizer.state} == state, lines.where
        if not lines.where:
            break
    assert at > 20
