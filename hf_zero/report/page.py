"""The page of a run: one HTML file with charts, tables, data and the library that draws them; it
loads nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.logging import counted, in_units, listed
from hf_zero.report import charts, timeline_chart
from hf_zero.report.charts import Chart
from hf_zero.report.run import RecordedRun, RunReader, is_loss
from hf_zero.report.timeline import Timeline, read_timeline

NAME = "report.html"
FOLDER = Path(__file__).parent
EMBED = "window.vegaEmbed = vegaEmbed;"


@dataclass(frozen=True)
class PageContent:
    """Contents of a page: its title, its HTML, and the specifications of its charts by name."""

    title: str
    body: str
    specs: Mapping[str, object]


def write_report(
    run: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    trace: str | None = None,
) -> tuple[Path, list[dict[str, Any]]]:
    """Write the page of the run in the folder ``run`` to ``output``, by default ``report.html`` in
    it, and return the file and a summary of each run.

    Args:
        against: the folder of another run, which is shown beside it.
        trace: a trace of ``engine.trace``, by default the last one of the run.

    Raises:
        ConfigError: a folder has no figures, both are one, a file does not exist or cannot be
            written, the trace has no steps, or the package that draws is not installed.
    """
    runs = distinct([reader.read() for reader in readers(run, against, trace)])
    to = Path(output) if output is not None else runs[0].folder / NAME
    text = page(content(runs, [timeline(run) for run in runs]), javascript())
    if to.exists() and not to.is_file():  # a pipe would be waited for
        raise ConfigError(f"the page {to} cannot be written (no regular file); pass --output")
    try:
        if to.is_symlink():  # it is not written through
            to.unlink()
        to.write_text(text, "utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"the page {to} cannot be written ({error}); pass --output") from error
    return to, [run.summary() for run in runs]


def javascript() -> str:
    """Return the library that draws, Vega with Vega-Lite and Vega-Embed, as one script."""
    try:
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            f"a report needs {error.name}, which holds the library that draws its charts; pip "
            "install 'hf-zero[report]'"
        ) from error
    return str(vl_convert.javascript_bundle(EMBED)).replace("</script", "<\\/script")


def content(runs: Sequence[RecordedRun], timelines: Sequence[Timeline | None]) -> PageContent:
    """Return what a page of one or two ``runs`` with their ``timelines`` shows."""
    drawn: list[Chart] = []
    body = "\n".join(_sections(runs, timelines, drawn))
    title = " against ".join(run.name for run in runs)
    return PageContent(title, body, {chart.name: chart.spec for chart in drawn})


def page(shown: PageContent, script: str, attributes: str = "") -> str:
    """Return the page that shows ``shown``; ``attributes``: those of its body."""
    text = (FOLDER / "page.html").read_text("utf-8")
    for name, value in {
        "TITLE": escape(shown.title),
        "STYLE": (FOLDER / "page.css").read_text("utf-8"),
        "ATTRIBUTES": attributes,
        "BODY": shown.body,
        "SPECS": json.dumps(shown.specs, separators=(",", ":")).replace("<", "\\u003c"),
        "DRAW": (FOLDER / "page.js").read_text("utf-8"),
        "LIBRARY": script,
    }.items():
        text = text.replace(f"<!--{name}-->", value, 1)
    return text


def _sections(
    runs: Sequence[RecordedRun], timelines: Sequence[Timeline | None], drawn: list[Chart]
) -> Iterator[str]:
    """Yield the parts of the page; ``drawn`` collects its charts."""
    yield f"<header>{_heading(runs)}</header>"
    for run in runs:
        yield _tiles(run, len(runs) > 1)
    yield from _messages(runs)
    yield _section("Training", _smoothing(runs), _charts(charts.curves(runs), drawn))
    yield _section("Evaluation", _charts(charts.evaluations(runs), drawn))
    yield _section("Speed", _charts(charts.speeds(runs), drawn))
    yield _section("Memory", _charts(charts.memory(runs), drawn))
    tables = [_named(runs, run, _collectives(run)) for run in runs]
    yield _section("Communication", _charts(charts.traffic(runs), drawn), *tables)
    parts = [
        _named(
            runs,
            runs[index],
            _charts([timeline_chart.timeline(index, chart)], drawn) + _exposed(chart),
        )
        for index, chart in enumerate(timelines)
        if chart is not None
    ]
    yield _section("Timeline", *parts)
    yield _section("Configuration", *_configuration(runs))
    yield _section("Environment", *(_named(runs, run, _environment(run)) for run in runs))


def _section(title: str, *parts: str) -> str:
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _smoothing(runs: Sequence[RecordedRun]) -> str:
    """Return the slider of all noisy curves, which begins at TensorBoard's default; short runs
    begin without smoothing.
    """
    begin = 0.6 if max(len(run.steps) for run in runs) >= 50 else 0
    return (
        '<label class="smoothing">Smoothing <input type="range" id="smoothing" min="0" max="0.99" '
        f'step="0.01" value="{begin}"><output>{begin}</output></label>'
    )


def _named(runs: Sequence[RecordedRun], run: RecordedRun, body: str) -> str:
    """Return ``body`` under the name of its run, if there are two."""
    return body if len(runs) == 1 or not body else f"<h3>{escape(run.name)}</h3>{body}"


def _charts(charts: Iterable[Chart], drawn: list[Chart]) -> str:
    """Return the places of charts, and add them to ``drawn``."""
    places = []
    for chart in charts:
        drawn.append(chart)
        places.append(
            f'<figure class="{"wide" if chart.wide else ""}"><figcaption>{escape(chart.title)}'
            f"<small>{escape(chart.note)} <span class=hint>{escape(chart.hint)}</span></small>"
            "</figcaption>"
            f'<div class="chart" id="{chart.name}"></div></figure>'
        )
    return f'<div class="charts">{"".join(places)}</div>' if places else ""


def _heading(runs: Sequence[RecordedRun]) -> str:
    title = ' <span class="faint">against</span> '.join(
        f'<span class="run{index}">{escape(run.name)}</span>' for index, run in enumerate(runs)
    )
    lines = [_line(run) for run in runs]
    named = lines if len(runs) == 1 else [f"{run.name}: {line}" for run, line in zip(runs, lines)]
    return f"<h1>{title}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in named if line)


def _line(run: RecordedRun) -> str:
    header = run.header
    if not header:
        return f"{run.folder}; no header: an older version wrote its figures"
    mesh = [f"{size} {name}" for name, size in header["mesh"].items() if size > 1]
    hosts = {host["host"]: host["device"] for host in header["hosts"]}
    parts = [
        f"{header['model']}, {in_numbers(header['parameters'])} parameters on a rank"
        if "tensor" in header["mesh"] or "pipeline" in header["mesh"]
        else f"{header['model']}, {in_numbers(header['parameters'])} parameters",
        f"stage {header['stage']}",
        header["precision"],
        counted(header["ranks"], "rank") + (f" ({', '.join(mesh)})" if mesh else ""),
        f"{len(hosts)} hosts"
        if len(hosts) > 1
        else next(iter(hosts.values()), "an unknown device"),
        f"started {run.starts[0].time} UTC",
    ]
    return " · ".join(parts)


def _tiles(run: RecordedRun, named: bool) -> str:
    summary = run.summary()
    tiles = [("steps", f"{summary['steps']:,}", counted(summary["restarts"], "restart"))]
    if "loss" in summary:
        loss = "not finite" if summary["loss"] is None else f"{summary['loss']:.4g}"
        tiles.append(("loss", loss, "of the last step"))
    for name in filter(is_loss, run.evaluated):
        row = next(row for row in reversed(run.evaluations) if name in row)
        loss = "not finite" if row[name] is None else f"{row[name]:.4g}"
        tiles.append((name, loss, f"after step {row['step']:,}"))
    for name, what in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if name in summary:
            tiles.append((what, in_numbers(summary[name]), "median, all ranks"))
            break
    if "mfu" in summary:
        tiles.append(("MFU", f"{summary['mfu']:.1%}", "median"))
    if "step_ms" in summary:
        tiles.append(("step", f"{summary['step_ms']:,.4g} ms", "median"))
    if "device_bytes" in summary:
        tiles.append(("state on the device", in_units(summary["device_bytes"]), "of rank 0"))
    if summary.get("ram_bytes"):
        tiles.append(("state in host memory", in_units(summary["ram_bytes"]), "of rank 0"))
    if summary.get("wire_bytes"):
        tiles.append(("on the wire", in_units(summary["wire_bytes"]), "a step, by rank 0"))
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return (f"<h3>{escape(run.name)}</h3>" if named else "") + f'<dl class="tiles">{cells}</dl>'


def _messages(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield restarts, warnings and errors, in the order of their times."""
    parts = []
    for run in runs:
        rows = [
            (
                start.after,
                "restart",
                start.time,
                f"continued after step {start.after:,}; "
                f"{counted(start.repeated, 'step')} taken again",
            )
            for start in run.restarts
        ]
        rows += [
            (message.after, message.level, message.time, message.text) for message in run.messages
        ]
        body = _table(
            ("after step", "", "UTC", ""),
            [
                (f"{after:,}", level, time, text)
                for after, level, time, text in sorted(rows, key=lambda row: row[2])
            ],
            ("number", "level", "nowrap", "text"),
        )
        parts.append(_named(runs, run, _stacked(body)) if rows else "")
    yield _section("Restarts and warnings", *parts)


def _collectives(run: RecordedRun) -> str:
    rows = [
        (
            row["operation"].replace("_", " "),
            row["group"],
            f"{row['count']:,}",
            in_units(row["bytes"]),
            in_units(row["wire_bytes"]),
            f"{row['waited_ms']:,.1f} ms",
        )
        for row in sorted(
            run.totals.get("collectives", ()), key=lambda row: row["wire_bytes"], reverse=True
        )
    ]
    heads = ("collective", "group", "number", "bytes", "sent by rank 0", "computation waited")
    note = "<p class='note'>Since the last start of the run.</p>" if run.restarts else ""
    return _table(heads, rows, ("nowrap", "nowrap", *["number"] * 4)) + note if rows else ""


def _exposed(one: Timeline) -> str:
    rows = [
        (
            str(row["rank"]),
            *(
                f"{row[name]:,.2f}"
                for name in (
                    "step", "compute", "gathers", "gathers exposed", "reductions",
                    "reductions exposed", "updates", "transfers",
                )
            ),
        )
        for row in one.rows()
    ]  # fmt: skip
    heads = (
        "rank", "step", "compute", "gathers in flight", "exposed", "reductions in flight",
        "exposed", "updates", "transfers",
    )  # fmt: skip
    note = "<p class='note'>Milliseconds; what overlaps counts once.</p>"
    return _table(heads, rows, ["number"] * len(heads)) + note


def _configuration(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield the tables of keys: written or different ones, and defaults."""
    tables = [{row["key"]: row for row in run.header.get("config", ())} for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    if not keys:
        return
    written: list[tuple[Sequence[str], bool]] = []
    defaults: list[tuple[Sequence[str], bool]] = []
    for key in keys:
        rows = [table.get(key) for table in tables]
        values = ["—" if row is None else _value(row["value"]) for row in rows]
        sources = dict.fromkeys("" if row is None else row["source"] for row in rows)
        cells = (key, *values, "; ".join(filter(None, sources)))
        differs = len(set(values)) > 1
        is_written = any(row is not None and row["source"] != "default" for row in rows)
        (written if is_written or differs else defaults).append((cells, differs))
    names = ["value"] if len(runs) == 1 else [run.name for run in runs]
    heads, classes = ("key", *names, "source"), ("key", *["key"] * len(runs), "faint")
    marks = [differs for _, differs in written]
    yield _stacked(_table(heads, [cells for cells, _ in written], classes, marks))
    if defaults:
        body = _stacked(_table(heads, [cells for cells, _ in defaults], classes))
        yield f"<details><summary>{len(defaults)} defaults</summary>{body}</details>"


def _environment(run: RecordedRun) -> str:
    header = run.header
    if not header:
        return ""
    hosts = [
        (host["host"], host["device"], listed(map(str, host["ranks"]), 16))
        for host in header["hosts"]
    ]
    versions = [(name, version) for name, version in header["versions"].items()]
    files = [("folder", str(run.folder.resolve())), ("program", header["program"])]
    if run.trace is not None:
        files.append(("trace", str(run.trace)))
    return (
        '<div class="columns">'
        + _table(("package", "version"), versions, ("", "key"))
        + _table(("host", "device", "ranks"), hosts, ("", "", ""))
        + _table(("", ""), files, ("", "key"))
        + "</div>"
    )


def _table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    classes: Sequence[str],
    marked: Sequence[bool] = (),
) -> str:
    """Return a table of text; ``classes``: the classes of its columns."""
    head = "".join(f'<th class="{name}">{escape(text)}</th>' for text, name in zip(heads, classes))
    body = "".join(
        f"<tr{' class=differs' if index < len(marked) and marked[index] else ''}>"
        + "".join(f'<td class="{name}">{escape(text)}</td>' for text, name in zip(row, classes))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    first = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="table"><table>{first}<tbody>{body}</tbody></table></div>'


def _stacked(table: str) -> str:
    """Return ``table`` with rows that become lines of text on a narrow screen."""
    return f'<div class="stacked">{table}</div>'


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_numbers(number: float) -> str:
    """Return a number in thousands, millions or billions: 1.23 M."""
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000 or unit == " B":
            return f"{number:.3g}{unit}" if unit or number % 1 else f"{number:.0f}"
        number /= 1000
    raise AssertionError


def readers(
    run: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    trace: str | None = None,
) -> list[RunReader]:
    """Return the readers of the runs of a page. Raises ConfigError if both are in one folder."""
    found = [RunReader(run, trace)] + ([] if against is None else [RunReader(against)])
    if len({reader.folder.resolve() for reader in found}) < len(found):
        raise ConfigError(
            f"--against {against} is the folder of the run itself; name that of another run, or "
            "leave it out"
        )
    return found


def distinct(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Return ``runs``; those of one name under the names of folders above, too, as far as these
    make them differ.
    """
    where = [run.folder.resolve().parts for run in runs]
    for count in range(2, max(map(len, where))):  # a link may have come to lead to the other run
        if len({run.name for run in runs}) == len(runs):
            break
        runs = [replace(run, name="/".join(at[-count:])) for run, at in zip(runs, where)]
    return runs


def timeline(run: RecordedRun) -> Timeline | None:
    """Return the timeline of the run's trace, None if it has none."""
    return None if run.trace is None else read_timeline(run.trace)


def summary_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a summary for a table of text."""
    for name, value in summary.items():
        text = in_units(value) if name.endswith("_bytes") else value
        text = "not finite" if value is None else text
        yield name, f"{text:.6g}" if isinstance(text, float) else str(text)
