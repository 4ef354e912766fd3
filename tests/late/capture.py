"""Captured trainings on the device, beside the same trainings as they are: ``python -m
tests.late.capture MODE STAGES [CASE ...]``, with RANK and so on set. A line of JSON for each pair:
what differs, the graphs launched, what the host did in their launches.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import hf_zero  # noqa: F401
from hf_zero.device import graphs
from hf_zero.device.graphs import Graph
from hf_zero.ops import dispatch, flat_reference, flat_tiles
from tests.gpu import test_capture as jobs

_rows: dict[int, tuple[list[Any], torch.Tensor]] = {}  # of tables, by address, with a copy


def rows_of(table: torch.Tensor) -> tuple[list[Any], torch.Tensor]:
    """Return the rows of ``table``, and on the device 1.0, or NaN once the table has lost them. A
    capture takes those that were read last: kernels of a GPU read them there, in each launch.
    """
    if not graphs.capturing():
        _rows[table.data_ptr()] = table.tolist(), table.clone()
    rows, copied = _rows[table.data_ptr()]
    graphs.hold(copied)
    return rows, torch.where((table == copied).all(), 1.0, float("nan"))


def _tiles(
    table: torch.Tensor, coefficients: torch.Tensor, found_inf: torch.Tensor | None
) -> Iterator[tuple[list[slice], Any]]:
    rows, intact = rows_of(table)
    for *places, length, row, _, _ in rows:
        yield (
            [slice(start, start + length) for start in places],
            (coefficients[row, :10] * intact).unbind(),
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
        rows_of(tiles.table)
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
            found.append((losses, jobs.weights(engine)))
            engine.destroy()
            device.synchronize_all()
    (one, weights), (other, captured) = found
    differ = [name for name in weights if not torch.equal(weights[name], captured[name])]
    if one != other:
        differ.append(f"losses {one} {other}")
    return {"differ": differ, **total}


def main() -> None:
    from tests.late import device

    use_references_as_kernels()
    device.begin(sys.argv[1])
    for stage in map(int, sys.argv[2]):
        for name in sys.argv[3:] or [*jobs.CASES, *jobs.BETWEEN]:
            device.forget()
            case = jobs.CASES.get(name, {"dropout": 0.2, "bf16": True})
            row = pair(stage, case, jobs.BETWEEN.get(name))
            device.tell(stage=stage, case=name, **row, reports=device.reports())


if __name__ == "__main__":
    main()
