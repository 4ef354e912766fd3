"""Captured trainings on the device, beside the same trainings as they are: ``python -m
tests.late.capture MODE STAGES [CASE ...]``, with RANK and so on set. A line of JSON for each pair:
what differs, the graphs launched, what the host did in their launches. ``faults`` in the place of
stages: with each of :data:`FAULTS`; ``operators``: those that a step launches.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from transformers import BertConfig, BertLMHeadModel

import hf_zero  # noqa: F401
from hf_zero.device import graphs
from hf_zero.device.graphs import Graph
from hf_zero.ops import dispatch, flat_reference, flat_tiles
from hf_zero.zero.step.captured_step import WARM_UP
from tests.gpu import test_capture as jobs

_rows: dict[int, tuple[list[Any], torch.Tensor]] = {}  # of tables, by address, with a copy


def rows_of(table: torch.Tensor, cut: bool = False) -> tuple[list[Any], torch.Tensor]:
    """Return the rows of ``table``, and on the device 1.0, or NaN once the table has lost them. A
    capture takes those that were read last: kernels of a GPU read them there, in each launch.
    ``cut``: the host has the rows since they were cut.
    """
    if not graphs.capturing():
        rows = _rows[table.data_ptr()][0] if cut else table.tolist()
        _rows[table.data_ptr()] = rows, table.clone()
    rows, copied = _rows[table.data_ptr()]
    graphs.hold(copied)
    return rows, torch.where((table == copied).all(), 1.0, float("nan"))


def _tiles(
    table: torch.Tensor, coefficients: torch.Tensor, found_inf: torch.Tensor | None
) -> Iterator[tuple[list[slice], Any]]:
    rows, intact = rows_of(table, cut=True)
    for *places, length, row, _, _ in rows:
        yield (
            [slice(start, start + length) for start in places],
            (coefficients[row, :11] * intact).unbind(),
        )


def _squares(base: torch.Tensor, runs: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    (table, intact), (at, _) = rows_of(runs), rows_of(bounds)
    sums = [
        torch.stack([base[s : s + n].double().square().sum() for s, n, _, _ in table[a:b]]).sum()
        for a, b in itertools.pairwise(at)
    ]
    return torch.stack(sums) * intact


def use_references_as_kernels() -> None:
    """Have one launch update all segments, as on a GPU, in plain torch that waits for nothing."""
    dispatch.wanted = lambda name, kernels, device: name in ("optimizer", "loss")
    flat_reference._tiles = _tiles  # type: ignore[assignment]
    object.__setattr__(flat_tiles.RUNS, "reference", _squares)
    cut = flat_tiles.Tiles.cut.__func__  # type: ignore[attr-defined]

    def read(cls: type, *given: Any, **named: Any) -> flat_tiles.Tiles:
        tiles: flat_tiles.Tiles = cut(cls, *given, **named)
        here: flat_tiles.Tiles = cut(cls, given[0], torch.device("cpu"), *given[2:], **named)
        # without a wait of the host, which would order streams
        _rows[tiles.table.data_ptr()] = here.table.tolist(), tiles.table.clone()
        return tiles

    flat_tiles.Tiles.cut = classmethod(read)  # type: ignore[assignment, method-assign]


def pytest_configure(config: object) -> None:
    """Run the tests for GPUs, as a plugin of pytest."""
    use_references_as_kernels()


def counts() -> dict[str, int]:
    from tests.late import device

    found = device.stats()
    waits = sum(found["sync_ops"].values())
    return {
        "waits": found["syncs"] + waits,
        "queries": found["queries"],
        "allocations": found["allocations"],
    }


def inside() -> tuple[Callable[[Graph], None], dict[str, int]]:
    """Return a launch of graphs that adds to the counts, returned as well, what it does itself."""
    launch, total = Graph.launch, dict.fromkeys(("launches", *counts()), 0)

    def counted(graph: Graph) -> None:
        before = counts()
        launch(graph)
        total["launches"] += 1
        for name, after in counts().items():
            total[name] += after - before[name]

    return counted, total


def pair(
    stage: int, case: dict[str, Any], between: Callable[[Any, int], None] | None
) -> dict[str, Any]:
    """Return what differs between a training and its capture, and the counts of its launches."""
    from tests.late import device

    counted, total = inside()
    micros, found = case.get("micros", 1), []
    with mock.patch.object(Graph, "launch", counted):
        for capture in (False, True):
            engine = jobs.build(stage, capture, **case)
            torch.manual_seed(7)
            data = jobs.batches(jobs.STEPS * micros, seed=3 + int(os.environ.get("RANK", "0")))
            losses = jobs.train(engine, data, between or (lambda engine, number: None))
            sent = engine.measures.counts.totals() if case.get("metrics") else []
            messages = [(row["operation"], row["count"], row["wire_bytes"]) for row in sent]
            found.append((losses, jobs.weights(engine), messages))
            engine.destroy()
            device.synchronize_all()
    (one, weights, sent), (other, captured, resent) = found
    differ = [name for name in weights if not torch.equal(weights[name], captured[name])]
    if one != other:
        differ.append(f"losses {one} {other}")
    if sent != resent:
        differ.append(f"collectives {sent} {resent}")
    return {"differ": differ, **total}


FOLDER = f"{tempfile.gettempdir()}/late-capture-{os.environ.get('MASTER_PORT', '')}"


def go_back(engine: Any, number: int) -> None:
    """Save while steps are launched, and go on from what was saved."""
    if number == 6:
        engine.save_checkpoint(f"{FOLDER}/saved")
    if number == 8:
        engine.load_checkpoint(f"{FOLDER}/saved")


class NormsAfterSublayers(BertLMHeadModel):
    """Reads numbers as tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=32, intermediate_size=64, use_cache=False, **sizes, **none)
        super().__init__(config)

    def forward(self, input_ids: Any, weight: float = 1.0, **more: Any) -> Any:
        if input_ids.is_floating_point():
            input_ids = input_ids.mul(10).long().abs() % 32
            return super().forward(input_ids=input_ids, labels=input_ids, use_cache=False)
        return super().forward(input_ids=input_ids, **more)


# Captured steps beside each feature that they go with, by its name.
BESIDE: dict[str, dict[str, Any]] = {
    "fused_modules": {},  # the kernel of the optimizer, which each case has
    "metrics": {"keys": {"metrics": {"enabled": True}}},
    "replicate_size": {"keys": {"replicate_size": 2}},
    "compile.blocks": {"keys": {"compile": {"blocks": True, "backend": "eager"}}},
    "checkpoint.async_save": {"keys": {"checkpoint": {"async_save": True}}},
    "checkpoint.memory": {
        "keys": {"checkpoint": {"memory": {"every": 1, "folder": f"{FOLDER}/memory", "job": "job"}}}
    },
    "pre_layer_norm": {"keys": {"pre_layer_norm": True}, "make": NormsAfterSublayers},
    "quantization_aware_training": {
        "keys": {"quantization_aware_training": {"config": "int8_weight"}}
    },
    "float8_training": {"keys": {"float8_training": {"recipe": "tensorwise", "emulate": True}}},
}


def operators(capture: bool) -> Counter[str]:
    """Return what a step of a Llama launches, after the steps before a capture."""
    from tests.late import device

    engine = jobs.llama(capture, 128, bf16={"enabled": True})
    batches = jobs.tokens(32)[: 2 * WARM_UP]
    for number, ids in enumerate(batches, 1):
        device.synchronize_all()
        device.C.set_tracing(number == len(batches))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    device.synchronize_all()
    device.C.set_tracing(False)
    launched = Counter(name for _, name, *_ in device.C.trace())
    engine.destroy()
    device.forget()
    return launched


FAULTS: dict[str, Callable[[], Any]] = {}


def fault(make: Callable[[], Any]) -> Callable[[], Any]:
    FAULTS[make.__name__.replace("_", " ")] = make
    return make


@fault
def rates_in_the_graph() -> Any:
    """The settings of the optimizer's groups are those of the captured step."""
    from hf_zero.optim.fused import FusedStep

    own, first = FusedStep.prepare, list[torch.Tensor]()

    def once(self: Any, *given: Any) -> Any:
        places = own(self, *given)
        first.append(self._settings.clone())
        self._settings.copy_(first[0])
        return places

    return mock.patch.object(FusedStep, "prepare", once)


@fault
def a_stale_batch() -> Any:
    """A launch reads the batch of the capture."""
    from hf_zero.zero.step import captured_step

    own = captured_step.CapturedStep._capture_forward

    def capture(self: Any, args: Any, kwargs: Any) -> Any:
        captured = own(self, args, kwargs)
        for tensor in captured.inputs:
            tensor.fill_(0.5)
        captured.inputs = [torch.empty_like(tensor) for tensor in captured.inputs]
        return captured

    return mock.patch.object(captured_step.CapturedStep, "_capture_forward", capture)


@fault
def a_read_of_the_host() -> Any:
    """The update reads the norm."""
    from hf_zero.zero.step.optimizer_step import OptimizerStep

    own = OptimizerStep._own_squares

    def reads(self: Any, local: bool = False) -> Any:
        total = own(self, local)
        float(total)
        return total

    return mock.patch.object(OptimizerStep, "_own_squares", reads)


@fault
def a_question_for_an_event() -> Any:
    """The update asks whether the norm of the last one has arrived."""
    from hf_zero.zero.step.optimizer_step import OptimizerStep

    own = OptimizerStep._own_squares

    def asks(self: Any, local: bool = False) -> Any:
        event = torch.cuda.Event()
        event.record()
        event.query()
        return own(self, local)

    return mock.patch.object(OptimizerStep, "_own_squares", asks)


@fault
def an_allocation_in_a_launch() -> Any:
    """A launch takes memory."""

    def launch(self: Graph) -> None:
        torch.empty(1000, device="cuda")
        self._captured.replay()

    return mock.patch.object(Graph, "launch", launch)


@fault
def memory_of_a_graph_is_freed() -> Any:
    """A graph reads a table that nobody keeps: the outside gets its memory."""
    from hf_zero.zero.step import captured_step

    own = captured_step.CapturedStep._capture_forward

    def capture(self: Any, args: Any, kwargs: Any) -> Any:
        module, table = self._model.module, torch.ones((), device="cuda")
        forward = type(module).forward
        with mock.patch.object(
            type(module), "forward", lambda m, x, weight=1.0: forward(m, x, table)
        ):
            return own(self, args, kwargs)

    return mock.patch.object(captured_step.CapturedStep, "_capture_forward", capture)


@fault
def a_graph_that_overwrites_what_it_should_add_to() -> Any:
    """The second micro-batch launches the backward of the first."""
    from hf_zero.zero.step import captured_step

    return mock.patch.object(
        captured_step.CapturedStep, "_place_in_window", lambda self: self._window.accumulation_steps
    )


@fault
def writes_of_a_script_are_lost() -> Any:
    """A launched update takes no writes over."""
    from hf_zero.zero.step.captured_step import CapturedStep
    from hf_zero.zero.step.optimizer_step import OptimizerStep

    own = CapturedStep.update

    def update(self: Any, steps: int, may_overflow: bool) -> bool:
        with mock.patch.object(OptimizerStep, "take_user_writes", lambda self: None):
            return own(self, steps, may_overflow)

    return mock.patch.object(CapturedStep, "update", update)


@fault
def state_that_nobody_keeps() -> Any:
    """The update after a load of the optimizer's state is launched with the moments and the tables
    from before.
    """
    from hf_zero.optim.fused import FusedStep

    own, seen = FusedStep.prepare, list[torch.Tensor]()

    def without(self: Any, *given: Any) -> Any:
        tensors = own(self, *given)
        tables = [launch.tiles.table for launch in self.launches]
        for table in seen:  # others get the memory of tables that are gone
            if not any(table is kept for kept in tables):
                table.fill_(-1)
        seen.extend(tables)
        arrays = [array for region in self._device.regions for array in region.arrays.values()]
        dropped = set(map(id, (*tables, *arrays)))
        return [tensor for tensor in tensors if id(tensor) not in dropped]

    return mock.patch.object(FusedStep, "prepare", without)


def main() -> None:
    from tests.late import device

    use_references_as_kernels()
    device.begin(sys.argv[1])
    if sys.argv[2:] == ["faults"]:
        for name, make in FAULTS.items():
            device.forget()
            try:
                with make():
                    case = {"micros": 2, "dropout": 0.2, "bf16": True}
                    between = jobs.write
                    if make is state_that_nobody_keeps:  # its load follows the capture
                        case, between = {}, jobs.load_own_state
                    row = pair(1, case, between)
                row["caught"] = bool(row["differ"] or row["allocations"])
            except Exception as error:
                row = {"caught": str(error)[:300]}
            device.tell(case=name, **row, reports=len(device.reports()))
        return
    if sys.argv[2:] == ["operators"]:
        uncaptured, captured = operators(False), operators(True)
        del captured["reuse"]  # memory is overwritten where a graph gives it out
        device.tell(total=captured.total(), more=captured - uncaptured, fewer=uncaptured - captured)
        return
    if sys.argv[3:4] == ["beside"]:
        for stage, name in itertools.product(map(int, sys.argv[2]), sys.argv[4:]):
            device.forget()
            shutil.rmtree(FOLDER, ignore_errors=True)
            between = go_back if name.startswith("checkpoint.") else None
            row = pair(stage, {"bf16": True, **BESIDE[name]}, between)
            device.tell(stage=stage, case=name, **row, reports=device.reports())
        shutil.rmtree(FOLDER, ignore_errors=True)
        return
    for stage in map(int, sys.argv[2]):
        for name in sys.argv[3:] or [*jobs.CASES, *jobs.BETWEEN]:
            device.forget()
            case = jobs.CASES.get(name, {"dropout": 0.2, "bf16": True})
            row = pair(stage, case, jobs.BETWEEN.get(name))
            device.tell(stage=stage, case=name, **row, reports=device.reports())


if __name__ == "__main__":
    main()
