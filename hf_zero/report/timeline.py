"""The timeline of one step, from a trace of ``engine.trace``: compute, gathers, reductions, updates
and transfers of some ranks, and the communication that computation waited for.

[Note: in flight]
A gather is in flight from its launch until the wait for it ends, a reduction likewise: on a host
the spans are those of its threads, and the wait is what was exposed. Where the trace has kernels,
they are taken in place of spans, and what was exposed is communication beside which no other kernel
ran.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_zero.errors import ConfigError
from hf_zero.logging import parse_json
from hf_zero.measures.trace import END, PIDS
from hf_zero.report.rows import EVENT, misfits

RANKS = 4  # ranks that are drawn
PREFIX = "hf_zero::"
END_OF_STEP = re.compile(rf"{PREFIX}{END} (\d{{1,18}})")
CATEGORIES = ("user_annotation", "kernel", "gpu_memcpy")
LANES = ("compute", "gathers", "reductions", "updates", "transfers")
COLLECTIVES = ("reduce_scatter", "all_reduce", "all_to_all", "send_to_next")
TRANSFERS = ("copy_to_device", "copy_to_host", "read_file", "write_file")
UPDATES = ("update", "prepare_update", "wait_update")
GAP = 20.0  # microseconds between two kernels that count as one


class Bar(NamedTuple):
    """A stretch of time of one rank, in microseconds. ``kind``: its color; ``lane``: its line."""

    rank: int
    lane: str
    kind: str
    name: str
    begin: float
    end: float


class Interval(NamedTuple):
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step of some ranks. ``bars`` begin at 0; ``length``: its microseconds. ``shown`` of
    ``ranks`` ranks are drawn.
    """

    step: int
    length: float
    ranks: int
    shown: int
    bars: Sequence[Bar]

    def rows(self) -> list[dict[str, object]]:
        """Return for each rank the milliseconds of compute, of communication in flight, and of
        what was exposed.
        """
        by_rank = []
        for rank in sorted({bar.rank for bar in self.bars}):
            bars = [bar for bar in self.bars if bar.rank == rank]
            row: dict[str, Any] = {"rank": rank, "step": self.length / 1e3}
            for lane in LANES:
                parts = [bar for bar in bars if bar.lane == lane and bar.kind != "exposed"]
                row[lane] = covered(parts) / 1e3
            for lane in ("gathers", "reductions"):
                parts = [bar for bar in bars if bar.lane == lane and bar.kind == "exposed"]
                row[f"{lane} exposed"] = covered(parts) / 1e3
            by_rank.append(row)
        return by_rank


def read_timeline(file: Path) -> Timeline:
    """Return the last step of the trace in ``file``. Raises ConfigError if empty or damaged."""
    try:
        step = _last_step(file)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(
            f"the trace {file} is damaged ({error}); remove it, or name another with --trace"
        ) from error
    if step is None or not step.bars:
        raise ConfigError(
            f"the trace {file} has no steps of an engine; make it with engine.trace() or the "
            "section trace"
        )
    return step


def _last_step(file: Path) -> Timeline | None:
    """Return the last step of all drawn ranks, None if there is none."""
    spans: dict[int, list[Bar]] = defaultdict(list)
    kernels: dict[int, list[Bar]] = defaultdict(list)
    ranks = set()
    for event in _events(file):
        rank = event["pid"] // PIDS
        ranks.add(rank)
        if len(ranks) > RANKS and rank == max(ranks) and rank not in spans:
            continue
        begin = event["ts"]
        bar = Bar(
            rank, str(event.get("tid")), event["cat"], event["name"], begin, begin + event["dur"]
        )
        (spans if event["cat"] == "user_annotation" else kernels)[rank].append(bar)
    shown = sorted(spans)[:RANKS]
    ends = {rank: _ends_of(spans[rank]) for rank in shown}
    steps = set.intersection(*map(set, ends.values())) if ends else set()
    if not steps:
        return None
    step = max(steps)
    bars: list[Bar] = []
    begins = {r: ends[r].get(step - 1, min(bar.begin for bar in spans[r])) for r in shown}
    first, last = min(begins.values()), max(ends[rank][step] for rank in shown)
    for rank, begin in begins.items():
        end = ends[rank][step]
        step_bars = [*_of_host(spans[rank])]
        if kernels[rank]:
            updates = [bar for bar in step_bars if bar.lane == "updates"]
            step_bars = updates + [*_of_device(kernels[rank])]
        inside = [bar for bar in step_bars if bar.end > begin and bar.begin < end]
        bars += [bar._replace(begin=max(bar.begin, begin), end=min(bar.end, end)) for bar in inside]
    bars = [bar._replace(begin=bar.begin - first, end=bar.end - first) for bar in bars]
    return Timeline(step, last - first, len(ranks), len(shown), bars)


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete events of the engine and of devices, line by line."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        for line in opened:
            if PREFIX in line or '"kernel"' in line or '"gpu_mem' in line:
                event = parse_json(line.strip().rstrip(","))
                if not isinstance(event, dict) or event.get("cat") not in CATEGORIES:
                    continue
                if event.get("ph") != "X":
                    continue
                if problem := next(misfits(event, EVENT), None):
                    raise ValueError(f"of an event, {problem}")
                if event.get("args", {}).get("finished", True):
                    yield event


def _ends_of(spans: Sequence[Bar]) -> dict[int, float]:
    """Return the time at which each step ended."""
    ends = ((END_OF_STEP.fullmatch(bar.name), bar.begin) for bar in spans)
    return {int(mark[1]): begin for mark, begin in ends if mark is not None}


def _of_host(spans: Iterable[Bar]) -> Iterator[Bar]:
    """Yield the bars of one rank's spans."""
    launched: dict[tuple[str, str], deque[Bar]] = defaultdict(deque)
    blocks: dict[str, list[Bar]] = defaultdict(list)
    waits: list[Bar] = []
    for bar in sorted(spans, key=lambda bar: bar.begin):
        what, _, unit = bar.name.removeprefix(PREFIX).partition(" ")
        if what in ("forward", "backward"):
            blocks[what].append(bar._replace(lane="compute", kind=what, name=unit))
        elif what == "all_gather" or what in COLLECTIVES:
            lane = "gathers" if what == "all_gather" else "reductions"
            first, _, _ = unit.partition("..")  # of a message of several units; its wait ends all
            launched[lane, first].append(bar._replace(lane=lane, kind=lane, name=unit))
        elif what in ("wait_all_gather", "wait_reduction"):
            lane = "gathers" if what == "wait_all_gather" else "reductions"
            exposed = bar._replace(lane=lane, kind="exposed", name=f"wait for {unit}")
            waits.append(exposed)
            yield exposed
            if queue := launched[lane, unit]:
                yield queue.popleft()._replace(end=bar.end)
        elif what in UPDATES:
            yield bar._replace(lane="updates", kind="updates", name=f"{what} {unit}")
        elif what in TRANSFERS:
            yield bar._replace(lane="transfers", kind="transfers", name=f"{what} {unit}")
    for queue in launched.values():  # nobody has waited under this name
        yield from queue
    for block in blocks.values():
        for bar in innermost(block):
            yield from without(bar, waits)


def innermost(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Yield those of ``bars``, in the order of their begins, that no later one lies in."""
    for bar, following in zip(bars, [*bars[1:], None]):
        if bar.name and (following is None or following.begin >= bar.end):
            yield bar


def without(bar: Bar, others: Iterable[Bar]) -> Iterator[Bar]:
    """Yield the parts of ``bar`` outside ``others``."""
    at = bar.begin
    for other in sorted(others, key=lambda bar: bar.begin):
        if other.end <= at or other.begin >= bar.end:
            continue
        if other.begin > at:
            yield bar._replace(begin=at, end=other.begin)
        at = other.end
    if at < bar.end:
        yield bar._replace(begin=at)


def _of_device(kernels: Sequence[Bar]) -> Iterator[Bar]:
    """Yield the bars of one rank's kernels and copies."""
    compute, sent = [], []
    for bar in sorted(kernels, key=lambda bar: bar.begin):
        if bar.kind == "gpu_memcpy":
            if "DtoD" not in bar.name:
                yield bar._replace(lane="transfers", kind="transfers")
        elif "nccl" in bar.name.lower():
            lane = "gathers" if "allgather" in bar.name.lower() else "reductions"
            sent.append(bar._replace(lane=lane, kind=lane))
        else:
            compute.append(bar)
    busy = [Bar(kernels[0].rank, "compute", "kernels", "kernels", *i) for i in merged(compute)]
    yield from busy
    for bar in sent:
        yield bar
        for part in without(bar, busy):
            yield part._replace(kind="exposed", name=f"exposed: {bar.name}")


def merged(bars: Iterable[Bar], gap: float = GAP) -> list[Interval]:
    """Return the times covered by ``bars``, as one where they are at most ``gap`` apart."""
    intervals: list[Interval] = []
    for bar in sorted(bars, key=lambda bar: bar.begin):
        if intervals and bar.begin <= intervals[-1].end + gap:
            intervals[-1] = Interval(intervals[-1].begin, max(intervals[-1].end, bar.end))
        else:
            intervals.append(Interval(bar.begin, bar.end))
    return intervals


def covered(bars: Iterable[Bar]) -> float:
    """Return the microseconds that ``bars`` cover together."""
    return sum(interval.end - interval.begin for interval in merged(bars, 0.0))
