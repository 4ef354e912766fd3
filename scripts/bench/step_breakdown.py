"""Where each millisecond of a training step goes, from a trace of torch.profiler.

    python scripts/bench/step_breakdown.py TRACE [--steps N] [--names 20]

TRACE is a file of ``profile.export_chrome_trace`` or of ``engine.trace``, gzipped or not, of ``N``
steps of one rank. The first table has a row for each kind of work: matrix products, attention, the
optimizer, and what is none of them; and for the time in which nothing runs. The second one names
the kernels that are none of these three. Kernels that overlap share the time, so that the rows of
the first table add up to the step. A kernel that the host launches in the optimizer's span counts
as the optimizer's. A trace without kernels of a device is read by the operations of the host.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PRODUCTS, ATTENTION, OPTIMIZER = "matrix products", "attention", "optimizer"
MESSAGES, OTHER, NOTHING = "communication", "other", "nothing runs"
NAMED = (PRODUCTS, ATTENTION, OPTIMIZER)  # what a step is for
KINDS = {
    MESSAGES: r"nccl|gloo|c10d|all_?gather|all_?reduce|reduce_?scatter",
    ATTENTION: r"flash|fmha|sdpa|attention",
    "norm of gradients": r"run_squares|sum_runs|squared_norms|LpNorm|_foreach_norm",
    OPTIMIZER: r"adam|lamb_|multi_tensor_apply|_foreach_|^(update|advance|apply)_kernel|flat_lion",
    PRODUCTS: r"gemm|nvjet|wgmma|cutlass|xmma|split_?k|triton_tem|_mm_|"
    r"aten::(_scaled_|_grouped_|add|b|badd)?mm$|aten::linear$",
    "loss": r"cross_entropy|log_?softmax|nll_loss|linear_log_probs",
    "compiled by inductor": r"^triton_(poi|per|red)_|^graph_",
    "norms": r"_norm_(forward|backward|add)|layer_?norm|rms_?norm|GammaBeta|hf_zero::norm",
    "activations, rotary, residual": r"_gated|bias_act|act_(forward|both)|silu|gelu|rotary|dropout",
    "copies and casts": r"memcpy|copy|_to$|::to$|cast|CatArray|aten::cat",
    "fills": r"memset|fill|zero_|zeros|aten::empty",
    "embeddings and indices": r"embedding|index|gather|scatter|sort|radix|\bcub\b",
    "sums": r"reduce_kernel|aten::(sum|mean|amax|norm)",
    "elementwise": r"elementwise|aten::(add|sub|mul|div|neg|pow|rsqrt|sqrt|clamp)_?$",
}
PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in KINDS.items()}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
OF_OPTIMIZER = re.compile(r"hf_zero::(prepare_)?update\b|Optimizer\.step")
LONG_GAP = 10.0  # microseconds: more than between two launches of a host that is ahead


class Piece(NamedTuple):
    """Work without a pause, in microseconds."""

    name: str
    kind: str
    begin: float
    end: float


@dataclass
class Row:
    """``us``: microseconds in all steps."""

    us: float = 0.0
    pieces: int = 0


@dataclass
class Breakdown:
    """The time of each kind and of each name, of ``span`` microseconds in ``steps`` steps;
    ``gaps`` are those in which nothing runs.
    """

    steps: int
    span: float
    kinds: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    names: dict[tuple[str, str], Row] = field(default_factory=lambda: defaultdict(Row))
    gaps: list[float] = field(default_factory=list)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the kinds, the longest first, with milliseconds, share and number a step."""
        idle = Row(sum(self.gaps), len(self.gaps))
        for kind, row in sorted(
            [*self.kinds.items(), (NOTHING, idle)], key=lambda each: -each[1].us
        ):
            yield {"of": kind, **self._figures(row)}

    def rest(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield the ``count`` longest names that are no product, no attention, no optimizer."""
        left = [item for item in self.names.items() if item[0][0] not in NAMED]
        for (kind, name), row in sorted(left, key=lambda each: -each[1].us)[:count]:
            yield {"of": name, "kind": kind, **self._figures(row)}

    def _figures(self, row: Row) -> dict[str, Any]:
        share = row.us / self.span if self.span else 0.0
        return {"ms": row.us / 1e3 / self.steps, "share": share, "number": row.pieces / self.steps}

    @property
    def long_gaps_ms(self) -> float:
        """Milliseconds a step of gaps in which the host is behind or waits."""
        return sum(gap for gap in self.gaps if gap > LONG_GAP) / 1e3 / self.steps


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), OTHER)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace. Exits with one line if it cannot be read."""
    try:
        raw = path.read_bytes()
        known = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = known["traceEvents"] if isinstance(known, dict) else known
        return [event for event in events if event.get("ph") == "X" and "dur" in event]
    except (OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise SystemExit(f"{path} is no trace of torch.profiler: {error}") from None


def in_spans(events: Iterable[dict[str, Any]]) -> Callable[[dict[str, Any]], bool]:
    """Return whether an event of the host begins in a span of the optimizer on its thread."""
    spans: dict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if OF_OPTIMIZER.match(event["name"]):
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in spans.values():
        found.sort()

    def inside(event: dict[str, Any]) -> bool:
        found = spans.get((event["pid"], event["tid"]), [])
        at = bisect_right(found, (event["ts"], float("inf"))) - 1
        return at >= 0 and event["ts"] < found[at][1]

    return inside


def on_device(events: Sequence[dict[str, Any]]) -> list[Piece]:
    """Return the kernels, copies and fills of the device."""
    hosts = [event for event in events if event.get("cat") in ("user_annotation", "cpu_op")]
    inside, of_optimizer = in_spans(hosts), set[Any]()
    for event in events:
        if event.get("cat") in LAUNCHES and inside(event):
            of_optimizer.add(event.get("args", {}).get("correlation"))
    pieces = []
    for event in events:
        if event.get("cat") not in ON_DEVICE or not event["dur"] > 0:
            continue
        kind = kind_of(event["name"])
        correlation = event.get("args", {}).get("correlation")
        if kind != MESSAGES and correlation is not None and correlation in of_optimizer:
            kind = OPTIMIZER
        pieces.append(Piece(event["name"], kind, event["ts"], event["ts"] + event["dur"]))
    return pieces


def on_host(events: Sequence[dict[str, Any]]) -> list[Piece]:
    """Return what each operation of the host does itself, between those that it calls."""
    inside = in_spans(
        event for event in events if event.get("cat") in ("user_annotation", "cpu_op")
    )
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and not OF_OPTIMIZER.match(event["name"]):
            threads[event["pid"], event["tid"]].append(event)
    pieces = []

    def add(event: dict[str, Any], begin: float, end: float) -> None:
        kind = kind_of(event["name"])
        kind = OPTIMIZER if kind != MESSAGES and inside(event) else kind
        if end > begin:
            pieces.append(Piece(event["name"], kind, begin, end))

    for calls in threads.values():
        calls.sort(key=lambda event: (event["ts"], -event["dur"]))
        stack: list[tuple[dict[str, Any], float]] = []
        at = 0.0
        for event in calls:
            while stack and stack[-1][1] <= event["ts"]:
                outer, end = stack.pop()
                add(outer, at, end)
                at = end
            if stack:
                add(stack[-1][0], at, event["ts"])
            at = event["ts"]
            stack.append((event, event["ts"] + event["dur"]))
        while stack:
            outer, end = stack.pop()
            add(outer, at, end)
            at = max(at, end)
    return pieces


def break_down(events: Sequence[dict[str, Any]], steps: int = 1) -> Breakdown:
    """Return the times of the events of ``steps`` steps."""
    pieces = on_device(events) or on_host(events)
    if not pieces:
        raise SystemExit("the trace has neither kernels of a device nor operations of the host")
    marks = sorted(
        (at, begins, number)
        for number, piece in enumerate(pieces)
        for at, begins in ((piece.begin, True), (piece.end, False))
    )
    begin, end = marks[0][0], marks[-1][0]
    found, running, before = Breakdown(steps, end - begin), set[int](), begin
    for piece in pieces:
        found.kinds[piece.kind].pieces += 1
        found.names[piece.kind, piece.name].pieces += 1
    for at, begins, number in marks:
        if at > before and not running:
            found.gaps.append(at - before)
        for one in running if at > before else ():
            piece, part = pieces[one], (at - before) / len(running)
            found.kinds[piece.kind].us += part
            found.names[piece.kind, piece.name].us += part
        before = at
        if begins:
            running.add(number)
        else:
            running.discard(number)
    return found


def table(found: Breakdown, names: int) -> str:
    """Return both tables in Markdown."""

    def line(row: dict[str, Any], *more: str) -> str:
        figures = (f"{row['ms']:.3f}", f"{row['share']:.1%}", f"{row['number']:.1f}")
        return "| " + " | ".join((row["of"].replace("|", "/")[:120], *more, *figures)) + " |"

    lines = ["| kind | ms a step | share | number |", "| --- | --- | --- | --- |"]
    lines += [line(row) for row in found.rows()]
    lines += ["", f"a step: {found.span / 1e3 / found.steps:.3f} ms; of the time in which nothing "]
    lines[-1] += f"runs, {found.long_gaps_ms:.3f} ms in gaps over {LONG_GAP:.0f} µs"
    lines += ["", f"| neither {', '.join(NAMED)} | kind | ms a step | share | number |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [line(row, row["kind"]) for row in found.rest(names)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="that the trace has")
    parser.add_argument("--names", type=int, default=20, help="rows of the second table")
    chosen = parser.parse_args()
    print(table(break_down(read(chosen.trace), chosen.steps), chosen.names))


if __name__ == "__main__":
    main()
