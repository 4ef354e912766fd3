"""Records of a run: what each rank writes after every optimizer step of its engines, one JSON line
each, into a file of its own.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from hf_zero.distributed import process_group
from hf_zero.engine import Engine
from hf_zero.logging import JsonObject, logger
from hf_zero.offload.storage import MASTER
from hf_zero.parity.fewer_layers import blocks_before
from hf_zero.parity.observed import Observed
from hf_zero.parity.reference import Reference
from hf_zero.parity.sketch import CHUNK, PRODUCTS, added, sketch
from hf_zero.zero.layout.tree import tensors_in
from hf_zero.zero.state_entries import EngineState, StateEntry

RecordedEngine = Engine | Reference | Observed
MESSAGE_LENGTH = 300
MOST_SKIPPED = 20  # steps beyond those asked for, while an fp16 loss scale is found


SAVES = "saves"  # in the folder of a run: what it saves


class Finished(BaseException):
    """The end of a script whose steps have all been recorded."""


class StepRecorder:
    """The record of this rank in ``folder``; ends the script after ``steps`` steps of each engine
    that trains, unless ``steps`` is 0. ``saves``: the engines are saved then. ``resumed``: steps
    are numbered as the engine counts them.
    """

    def __init__(self, folder: Path, steps: int, saves: bool = False, resumed: bool = False):
        self.folder = folder
        self._file: TextIO | None = None
        self.steps = steps
        self._resumed = resumed
        self.saves = saves
        self.finished = False  # it has ended the script
        # called in a step of a script that catches every exception, and goes on
        self.when_ignored: Callable[[], None] = lambda: None
        self._engines: dict[int, int] = {}  # number by id
        self.engines: list[RecordedEngine] = []
        # recorded steps by engine, and how many of them an overflow has skipped
        self._taken: list[int] = []
        self._skipped: list[int] = []
        self._losses: list[float] = []
        self._inputs: list[list[float]] = []
        self._evaluations: list[float] = []
        self._nested = 0
        self._after_step: tuple[int, Callable[[], object]] = (-1, lambda: None)
        self._messages: list[str] = []
        self._handler = _WarningCollector(self._messages)
        logger.addHandler(self._handler)

    def write(self, line: JsonObject) -> None:
        """Write ``line`` into the file of this rank, which is known from the first engine on."""
        if self._file is None:
            rank = self.engines[0].global_rank if self.engines else os.environ.get("RANK", "0")
            self._file = (self.folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self, how: str) -> None:
        self.write({"end": how, "evaluations": self._evaluations})
        if self._file is not None:
            self._file.close()
        logger.removeHandler(self._handler)

    def add(self, engine: RecordedEngine, header: JsonObject) -> None:
        """Begin the record of ``engine``, with its weights before the first step."""
        if engine.optimizer is None:
            return  # it trains nothing
        number = len(self.engines)
        self._engines[id(engine)] = number
        self.engines.append(engine)
        self._taken.append(0)
        self._skipped.append(0)
        optimizer = engine.optimizer
        about = {
            "engine": number,
            "step": 0,
            "model": type(engine.module).__name__,
            "optimizer": type(optimizer).__name__,
            "precision": engine.config.precision,
            "autocast": bool(engine.config.torch_autocast.enabled),
            "stage": engine.config.stage,
            "world": process_group.get_world_size(),
            "sizes": _sizes(engine),
            "blocks": blocks_before(),
            "observed": isinstance(engine, Observed),
            "resumed_at": engine.global_steps,
            **header,
        }
        self.write(about | _weights(engine, frozen=True) | {"log": self._take_messages()})

    @contextmanager
    def within(self) -> Iterator[None]:
        """Context of a backward of an engine: that of its own root is no loss of the script."""
        self._nested += 1
        try:
            yield
        finally:
            self._nested -= 1

    def note_loss(self, loss: object) -> None:
        if not self._nested and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(float(loss.detach()))

    def call_after(self, step: int, act: Callable[[], object]) -> None:
        """Call ``act`` once before the first forward after ``step`` that trains: a script has then
        finished the step, and also its schedulers.
        """
        self._after_step = step, act

    def note_inputs(self, inputs: object) -> None:
        """Note the fingerprint of the batch of a forward that trains."""
        step, act = self._after_step
        if max(self._taken, default=0) == step:
            self._after_step = -1, act
            act()
        self._inputs.append(fingerprint(inputs))

    def note_evaluation(self, outputs: object) -> None:
        """Note one number of the outputs of a forward without gradients: the loss, or a norm."""
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
            outputs = outputs["loss"]
        first = next((t for t in tensors_in(outputs) if t.is_floating_point()), None)
        if first is not None:
            self._evaluations.append(float(first.detach().float().norm()))

    def end_step(self, engine: RecordedEngine) -> None:
        """Record a step, and raise :class:`Finished` after the last one."""
        number = self._engines.get(id(engine))
        if number is None:
            return
        if self.finished:
            self.when_ignored()
            raise Finished
        self._taken[number] = engine.global_steps if self._resumed else self._taken[number] + 1
        norm, optimizer = engine.get_global_grad_norm(), engine.optimizer
        assert optimizer is not None
        line = {
            "engine": number,
            "step": self._taken[number],
            "losses": self._losses,
            "inputs": self._inputs,
            "evaluations": self._evaluations,
            "norm": None if norm is None else float(norm),
            "rates": [float(group["lr"] or 0) for group in optimizer.param_groups],
            "applied": bool(engine.was_step_applied()),
            "scale": float(engine.loss_scale()),
        }
        self._losses, self._inputs, self._evaluations = [], [], []
        self.write(line | _weights(engine) | {"log": self._take_messages()})
        self._skipped[number] += not line["applied"]
        counted = zip(self._taken, self._skipped)
        if self.steps and all(t - min(s, MOST_SKIPPED) >= self.steps for t, s in counted):
            self.finished = True
            for index, trained in enumerate(self.engines if self.saves else ()):
                assert not isinstance(trained, Observed)  # its library saves it
                trained.save_checkpoint(saved_engine(self.folder, index), blocking=True)
            raise Finished

    def saves_in(self, folder: Any) -> str | None:
        """Return the folder of this run that stands for ``folder`` of the script."""
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            return None
        path, saves = Path(os.path.abspath(folder)), self.folder / SAVES
        if path.is_relative_to(saves):
            return str(path)
        return str(saves / f"{zlib.crc32(str(path).encode()):08x}" / path.name)

    def _take_messages(self) -> list[str]:
        messages, self._messages[:] = self._messages[:], []
        return messages


def _weights(engine: RecordedEngine, frozen: bool = False) -> JsonObject:
    """Return sketches of the parameters of ``engine`` on this rank, by name: of ``masters``, which
    the optimizer updates, with the range of elements that this rank has; and of ``whole`` ones,
    with which this rank computes.
    """
    if isinstance(engine, Observed):
        return engine.sketches(frozen)
    if isinstance(engine, Reference):
        return _of_reference(engine, frozen)
    masters: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    engine.updater.finish()
    state = EngineState(engine)
    units: dict[str, str] = {}
    for unit in engine.units:
        for flat in unit.flats:
            if not (flat.trainable or frozen):
                continue
            values = state.arrays(flat, optimizer=False)[MASTER]
            for slot in flat.layout.slots:
                entry = StateEntry(flat, slot.name, MASTER)
                start, stop = entry.range
                part = entry.part(values)
                masters[slot.name] = [start, stop, *sketch(part, slot.name, start)]
                units[slot.name] = str(unit.name or "the root unit")
                if not flat.sharded:
                    parameter = flat.parameters[slot.name]
                    whole[slot.name] = sketch(parameter.detach().reshape(-1), slot.name)
    line: JsonObject = {"masters": masters, "whole": whole}
    return line | ({"units": units} if frozen else {})


def _ended_windows(engine: RecordedEngine) -> int:
    """Return how many windows ``step()`` of ``engine`` has ended: an update in the backward counts
    its step in ``global_steps`` before ``step()`` confirms it.
    """
    return engine.accumulation.updates if isinstance(engine, Engine) else engine.global_steps


def _sizes(engine: RecordedEngine) -> dict[str, int]:
    if isinstance(engine, Observed):
        return engine.sizes()
    return {name: parameter.numel() for name, parameter in engine.module.named_parameters()}


def _of_reference(engine: Reference, frozen: bool) -> JsonObject:
    masters: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if not (parameter.requires_grad or frozen):
            continue
        master = engine.masters.get(parameter, parameter).detach()
        masters[name] = [0, master.numel(), *sketch(master.reshape(-1), name)]
        if master is not parameter:
            whole[name] = sketch(parameter.detach().reshape(-1), name)
    return {"masters": masters, "whole": whole}


def fingerprint(value: object) -> list[float]:
    """Return a checksum of the integers among the tensors in ``value``, and a sketch of the first
    floating-point numbers of each: inputs that another model has computed differ by rounding.
    """
    total, sketches = 0, [[0.0] * (1 + PRODUCTS)]
    for number, tensor in enumerate(tensors_in(value)):
        if tensor.is_floating_point():
            values = tensor.detach().reshape(-1)[:CHUNK]
            sketches.append(sketch(values, f"input {number}"))
            continue
        array = tensor.detach().to("cpu").contiguous().view(-1)
        total = zlib.crc32(array.view(torch.uint8).numpy().tobytes(), total)
    return [total, *added(sketches)]


def saved_engine(folder: Path, index: int) -> str:
    """Return the folder in which a run in ``folder`` saves engine ``index`` as it is stopped."""
    return str(folder / SAVES / f"engine{index}")


class RecordedMethods:
    """Methods of an engine that a :class:`StepRecorder` follows, put before those of its class."""

    recorder_of: Callable[[], StepRecorder]

    @property
    def recorder(self) -> StepRecorder:
        return type(self).recorder_of()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled() and self.training  # type: ignore[attr-defined]
        if trains:
            self.recorder.note_inputs((args, kwargs))
        outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not trains:
            self.recorder.note_evaluation(outputs)
        return outputs

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.note_loss(loss)
        with self.recorder.within():
            return super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    def step(self, *args: Any, **kwargs: Any) -> None:
        before = _ended_windows(self)  # type: ignore[arg-type]
        super().step(*args, **kwargs)  # type: ignore[misc]
        if _ended_windows(self) != before:  # type: ignore[arg-type]
            self.recorder.end_step(self)  # type: ignore[arg-type]

    def save_checkpoint(self, save_dir: Any = None, *args: Any, **kwargs: Any) -> bool:
        """Save into the folder of this run, which goes with the comparison."""
        folder = self.recorder.saves_in(save_dir or self.config.checkpoint.folder)  # type: ignore[attr-defined]
        return bool(super().save_checkpoint(folder, *args, **kwargs))  # type: ignore[misc]

    def save_16bit_model(self, save_dir: Any, *args: Any, **kwargs: Any) -> bool:
        """Save into the folder of this run."""
        folder = self.recorder.saves_in(save_dir)
        return bool(super().save_16bit_model(folder, *args, **kwargs))  # type: ignore[misc]

    def load_checkpoint(self, load_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load what this run has saved; else what was there before it."""
        given = load_dir or self.config.checkpoint.folder  # type: ignore[attr-defined]
        folder = self.recorder.saves_in(given)
        chosen = folder if folder is not None and os.path.isdir(folder) else load_dir
        return super().load_checkpoint(chosen, *args, **kwargs)  # type: ignore[misc]


def recorded(kind: type[Any], recorder_of: Callable[[], StepRecorder]) -> type[Any]:
    """Return ``kind``, a class of engines, with its steps recorded by the recorder of its rank."""
    attributes = {
        "recorder_of": staticmethod(recorder_of),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (RecordedMethods, kind), attributes)


@contextmanager
def recording_plain_backwards(recorder_of: Callable[[], StepRecorder]) -> Iterator[None]:
    """Context in which the losses are noted on which the script calls ``backward()`` itself;
    ``recorder_of`` returns the recorder of the calling rank.
    """
    original = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorder = recorder_of()
        recorder.note_loss(self)
        with recorder.within():
            return original(self, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


class _WarningCollector(logging.Handler):
    """Collects the warnings of this package."""

    def __init__(self, messages: list[str]):
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage()[:MESSAGE_LENGTH])


def read(file: Path) -> list[JsonObject]:
    """Return the lines of a record; the last may be missing if its writer was ended."""
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
