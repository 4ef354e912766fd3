"""The table of hf-zero beside DeepSpeed, FSDP2 and DDP in the documentation, from the rows in
``results/``. ``scripts/readme.py`` writes it; ``picture.py`` draws a selection of the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
PEERS = ("hf-zero", "DeepSpeed 0.19.8", "FSDP2", "DDP")
Rows = list[dict[str, Any]]
Cells = Sequence[float | None]  # of PEERS


class Comparison(NamedTuple):
    """``what`` is measured, in the unit of ``text``; ``measured`` finds the figures of the peers in
    the rows of the file ``source``.
    """

    what: str
    text: str
    source: str
    measured: Callable[[Rows], Cells]


def steps(stage: int, ddp: bool = False) -> Callable[[Rows], Cells]:
    """Return the best round's seconds of a step, that of DDP at stage 0 or with ``ddp``."""
    peers = ("fsdp2" if stage == 3 else "", "ddp" if ddp or stage == 0 else "")

    def measured(rows: Rows) -> Cells:
        (best,) = [row["best"] for row in rows if "best" in row]
        return [best.get(name) for name in (f"hfz{stage}", f"ds{stage}", *peers)]

    return measured


def _small_blocks(rows: Rows) -> Cells:
    """Return the best round's seconds of CPU time of a step."""

    def best(kind: str) -> float:
        return min(row["cpu"] for row in rows if row.get("case") == "all" and row["kind"] == kind)

    return [1e3 * best("hfz3"), None, 1e3 * best("fsdp2"), 1e3 * best("ddp")]


def memory(column: str) -> Callable[[Rows], Cells]:
    """Return MiB of the largest of two ranks in the better round."""

    def measured(rows: Rows) -> Cells:
        def of(contender: str) -> float:
            rounds: dict[int, float] = {}
            for row in rows:
                if (row["contender"], row["ranks"]) == (contender, 2):
                    rounds[row["round"]] = max(rounds.get(row["round"], 0.0), row[column])
            return min(rounds.values())

        return [of("hf-zero 3"), None, of("fsdp2"), None]

    return measured


def offload(contenders: Sequence[str], column: str) -> Callable[[Rows], Cells]:
    """Return a figure of ``contenders``: of several values, their median."""

    def measured(rows: Rows) -> Cells:
        found = {row["contender"]: row[column] for row in rows if "contender" in row}
        values = [found.get(name) for name in contenders]
        return [median(value) if isinstance(value, list) else value for value in values]

    return measured


def loading(column: str) -> Callable[[Rows], Cells]:
    """Return the last rank's figure in the best round."""

    def measured(rows: Rows) -> Cells:
        def of(contender: str) -> float:
            rounds: dict[int, list[float]] = {}
            for row in rows:
                if row.get("contender") == contender and row["ranks"] == 2:
                    rounds.setdefault(row["round"], []).append(row[column])
            whole = [max(each) for each in rounds.values()]
            return min(whole) if column == "seconds" else max(whole)

        return [of(contender) for contender in ("hf-zero", "deepspeed", "fsdp")]

    return measured


def converting(column: str) -> Callable[[Rows], Cells]:
    """Return the figure in the best round."""

    def measured(rows: Rows) -> Cells:
        found = {row["contender"]: row[column] for row in rows}
        return [found["hf-zero"], found["deepspeed"], None, None]

    return measured


def _adam(rows: Rows) -> Cells:
    """Return the best round's milliseconds in the last run."""
    *_, best = (row["best"] for row in rows if "best" in row and row["numel"] == 10**8)
    return [1e3 * best["hf-zero fp32"], 1e3 * best["DeepSpeedCPUAdam fp32"], None, None]


STEPS, OFFLOAD = "cpu_ranks-2026-11-30", "offload-2026-11-30"
LOADING, CONVERTING = "loading-2026-11-30", "convert-2026-11-30"
ADAM, MEMORY = "cpu_optimizers-2026-11-20", "memory-2026-11-30"
OPTIMIZER_AWAY, ALL_AWAY = ("cpu", "ds cpu"), ("all cpu", "ds all cpu", "fsdp cpu")
COMPARISONS = (
    Comparison(
        "seconds a step, BERT of 8 layers, fp32, two ranks: stage 0", "{:.2f}", STEPS, steps(0)
    ),
    Comparison("... stage 1", "{:.2f}", STEPS, steps(1)),
    Comparison("... stage 2", "{:.2f}", STEPS, steps(2)),
    Comparison("... stage 3", "{:.2f}", STEPS, steps(3)),
    Comparison(
        "CPU ms a step of 64 tiny blocks, stage 3",
        "{:.3g}",
        "small_blocks-2026-11-21",
        _small_blocks,
    ),
    Comparison(
        "memory kept between steps, 50M parameters, bf16, two ranks: stage 3",
        "{:,.0f} MiB",
        MEMORY,
        memory("kept_mb"),
    ),
    Comparison("... peak of a step", "{:,.0f} MiB", MEMORY, memory("peak_mb")),
    Comparison(
        "optimizer in host memory, seconds a step",
        "{:.3f}",
        OFFLOAD,
        offload(OPTIMIZER_AWAY, "times"),
    ),
    Comparison("... memory kept", "{:,.0f} MiB", OFFLOAD, offload(OPTIMIZER_AWAY, "kept_mb")),
    Comparison(
        "optimizer and parameters in host memory, seconds a step",
        "{:.3f}",
        OFFLOAD,
        offload(ALL_AWAY, "times"),
    ),
    Comparison("... memory kept", "{:,.0f} MiB", OFFLOAD, offload(ALL_AWAY, "kept_mb")),
    Comparison("Adam on the CPU, 100M parameters in fp32, ms", "{:.1f}", ADAM, _adam),
    Comparison(
        "loading 551M parameters on two ranks, seconds", "{:.2f}", LOADING, loading("seconds")
    ),
    Comparison("... peak of a rank over its start", "{:,.0f} MiB", LOADING, loading("peak_mb")),
    Comparison(
        "converting a checkpoint of 437M parameters, seconds",
        "{:.2f}",
        CONVERTING,
        converting("seconds"),
    ),
    Comparison("... peak memory", "{:,.0f} MiB", CONVERTING, converting("peak_mb")),
)


def rows_of(source: str) -> Rows:
    """Return the rows of ``source``, the name of a file of ``results/`` without its suffix."""
    lines = (RESULTS / f"{source}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


def table() -> str:
    """A Markdown table with a row for each comparison and the file of its figures."""
    head = ["", *PEERS, "measured"]
    return "\n".join(_line(each) for each in (head, ["---"] * len(head), *_lines()))


def _lines() -> Iterator[list[str]]:
    for each in COMPARISONS:
        cells = [*each.measured(rows_of(each.source)), *[None] * len(PEERS)][: len(PEERS)]
        shown = ["" if cell is None else each.text.format(cell) for cell in cells]
        yield [each.what, *shown, f"`{each.source}`"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    print(table())
