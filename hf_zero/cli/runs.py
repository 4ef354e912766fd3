"""``hf-zero top``: the figures of a run in the terminal, refreshed while it runs; ``report``: one
page that shows a run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, curve

if TYPE_CHECKING:
    from hf_zero.report.run import RecordedRun

RECENT = 20  # steps whose median is a rate
TIERS = {"device": "device_bytes", "ram": "ram_bytes", "disk": "disk_bytes"}

Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps of the whole run; default: as recorded.")
]


def top(
    run: Annotated[str, typer.Argument(help="The folder of a run: that of its metrics.jsonl.")],
    steps: Steps = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks at the file.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show a run in the terminal, running or finished: loss, gradient norm, learning rate, tokens
    per second, MFU where the peak of the device is known, communication that computation waited
    for, memory by tier beside the prediction, the time that is left, and the states of all ranks
    where rank 0 waits for others. It refreshes until the run has ended, or Ctrl-C; in a pipe it
    prints once. All figures but the loss and the norm are those of rank 0.

    Training writes the figures with "metrics": {"enabled": true}. The steps of the whole run are
    those of the Trainer, or of the scheduler's total_num_steps; otherwise pass --steps.

    Example: hf-zero top runs/sft --steps 1000
    """
    from rich.live import Live

    from hf_zero.report.run import RunReader

    reader = RunReader(run)
    if as_json:
        print_json(figures_of(reader.read(), steps))
        return
    if not sys.stdout.isatty():
        print_table(_table(reader.read(), steps))
        return
    recorded = reader.read()
    with suppress(KeyboardInterrupt), Live(_table(recorded, steps), screen=False) as live:
        while recorded.ended is None:
            time.sleep(interval)
            recorded = reader.read()
            live.update(_table(recorded, steps))


def figures_of(run: RecordedRun, steps: int | None) -> JsonObject:
    """Return the figures of the last step, medians of the rates of recent steps, what is left of
    ``steps``, and the states of the ranks.
    """
    from hf_zero.measures.run_record import BUFFERS

    last, recent = run.steps[-1], run.steps[-RECENT:]

    def rate(name: str) -> float | None:
        values = [row[name] for row in recent if row.get(name) is not None]
        return median(values) if values else None

    steps = steps or run.planned_steps
    step_ms = rate("step_ms")
    waits = [rate(name) or 0.0 for name in ("gather_wait_ms", "reduction_wait_ms")]
    rest = None if steps is None or step_ms is None else max(0, steps - last["step"])
    rest = rest if run.ended is None else None
    predicted: Counter[str] = Counter()
    for row in run.header.get("predicted", ()):  # as the bytes of a step, without buffers
        predicted[row["tier"]] += row["bytes"] if row["kind"] != BUFFERS else 0
    return {
        "run": run.name,
        "step": last["step"],
        "steps": steps,
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "learning_rate": last.get("learning_rate"),
        "tokens_per_second": rate("tokens_per_second"),
        "step_ms": step_ms,
        "mfu": rate("mfu"),
        "exposed_communication": sum(waits) / step_ms if step_ms else None,
        "memory": {
            tier: {"bytes": last.get(name), "predicted": predicted.get(tier)}
            for tier, name in TIERS.items()
            if last.get(name) or predicted.get(tier)
        },
        "seconds_left": None if rest is None or step_ms is None else rest * step_ms / 1000,
        "ended": run.ended,
        "ranks": [] if run.ranks is None else run.ranks.groups,
        "seconds_since_update": max(0.0, datetime.now(UTC).timestamp() - run.updated),
        "restarts": len(run.restarts),
        "warnings": len(run.messages),
    }


def _table(run: RecordedRun, steps: int | None) -> PrintableTable:
    figures, header = figures_of(run, steps), run.header
    of = f" of {figures['steps']}" if figures["steps"] else ""
    title = f"{run.name}: step {figures['step']}{of}{'' if run.ended is None else ', ended'}"
    if header:
        title += f", {header.get('model')}, stage {header.get('stage')}, {header.get('precision')}"
        title += f", {header.get('ranks')} ranks"
    table = PrintableTable(title=title, show_header=False)
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_ms"):
        if figures[name] is not None:
            values = f"{figures[name]:.6g}"
            table.add_row(name.replace("_", " "), values, curve(run.figure(name)))
    for name, label in (("mfu", "MFU"), ("exposed_communication", "exposed communication")):
        if figures[name] is not None:
            table.add_row(label, f"{figures[name]:.1%}", "")
    for tier, row in figures["memory"].items():
        predicted = "" if row["predicted"] is None else f"{in_units(row['predicted'])} predicted"
        table.add_row(f"state, {tier}", in_units(row["bytes"] or 0), predicted)
    if figures["seconds_left"] is not None:
        table.add_row("left", _duration(figures["seconds_left"]), "")
    table.add_row("last written", f"{_duration(figures['seconds_since_update'])} ago", "")
    if run.ended:
        table.add_row("ended by", run.ended, "")
    for group in figures["ranks"]:
        ranks, since = group["ranks"], f"since {run.ranks.time} UTC" if run.ranks else ""
        state = group["state"] + (f": {group['what']}" if group["what"] else "")
        table.add_row(f"rank{'s' * (len(ranks) > 1)} {in_ranges(ranks)}", state, since)
    if figures["restarts"] or figures["warnings"]:
        counts = ", ".join(
            f"{figures[name]} {name if figures[name] != 1 else name[:-1]}"
            for name in ("restarts", "warnings")
        )
        table.add_row("so far", counts, "hf-zero report shows them")
    return table


def in_ranges(ranks: Sequence[int]) -> str:
    """Return ascending ``ranks`` as text, such as ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def report(
    run: Annotated[str, typer.Argument(help="The folder of a run: that of its metrics.jsonl.")],
    against: Annotated[
        str | None, typer.Option(help="The folder of another run, shown beside it.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The file; default: RUN/report.html.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="A trace of the run; default: the last one that it has written."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Show the page on 127.0.0.1 and refresh it until Ctrl-C."),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="With --serve; default: a free one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows a run: its figures over steps, memory predicted and measured,
    bytes on the wire, the timeline of a step, configuration, versions, restarts and warnings.

    The page needs no network. With --serve no file is written: a server on this machine alone shows
    the page, and refreshes it while the run writes.

    Training writes the figures with "metrics": {"enabled": true}, a trace with engine.trace() or
    the section trace. Requires the extra "report" of hf-zero.

    Example: hf-zero report runs/bert-mlm --against runs/bert-mlm-zero1
    """
    from hf_zero.report.page import summary_lines, write_report

    if serve:
        for option, passed in (("--output", output), ("--json", as_json)):
            if passed:
                raise ConfigError(f"--serve writes and prints no report; leave {option} out")
        _serve(run, against, trace, port or 0)
        return
    if port is not None:
        raise ConfigError("--port is that of --serve; leave it out")
    path, written = write_report(run, against, output, trace)
    if as_json:
        print_json({"page": str(path), "bytes": path.stat().st_size, "runs": written})
        return
    names = list(dict.fromkeys(name for row in written for name in row))
    texts = [dict(summary_lines(row)) for row in written]
    table = PrintableTable(*["", *(row["run"] for row in written)])
    for name in names[1:]:
        table.add_row(name.replace("_", " "), *(text.get(name, "") for text in texts))
    print_table(table)
    typer.echo(f"the page: {path}")


def _serve(run: str, against: str | None, trace: str | None, port: int) -> None:
    from hf_zero.report.serve import ReportServer

    with suppress(KeyboardInterrupt), ReportServer(run, against, trace, port) as server:
        typer.echo(f"the page: {server.url} (Ctrl-C ends)")
        server.serve_forever()
