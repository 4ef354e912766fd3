"""The charts of a page, as Vega-Lite specifications with their data.

Colors are names of CSS variables, so that one drawing serves light and dark screens and paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_zero.measures.run_record import BUFFERS
from hf_zero.report.rows import TIERS
from hf_zero.report.run import RecordedRun, is_loss

Spec = dict[str, Any]

POINTS = 1500  # of one curve; more steps are averaged
HEIGHT = 190
TICKS = {"expr": "ceil(width / 80)"}  # of the axis of steps
RUNS = ("var(--c1)", "var(--c2)")
KINDS = {
    "parameters": "var(--c1)",
    "gradients": "var(--c2)",
    "optimizer": "var(--c3)",
    BUFFERS: "var(--c6)",
    "state": "var(--c4)",
    "allocated at most": "var(--c4)",
}
OPERATIONS = {
    "all_gather": "var(--c1)",
    "reduce_scatter": "var(--c2)",
    "all_reduce": "var(--c3)",
    "all_to_all": "var(--c4)",
    "send_to_next": "var(--c5)",
    "send_activations": "var(--c5)",
    "send_gradients": "var(--c6)",
    "broadcast": "var(--c7)",
}
PARTS = {"forward_ms": "forward", "backward_ms": "backward", "update_ms": "update"}
WAITS = {"gather_wait_ms": "gathers", "reduction_wait_ms": "reductions"}


@dataclass(frozen=True)
class Chart:
    """A chart: ``name`` of its element, its heading, a line below it, its specification, and how to
    move it on a screen.
    """

    name: str
    title: str
    note: str
    spec: Spec
    wide: bool = False
    hint: str = ""


@dataclass(frozen=True)
class CurveStyle:
    """How curves are drawn: the format of numbers at the axis and its scale, the interpolation, and
    whether they are ``noisy``: smooth ones are drawn over them.
    """

    form: str = ",~r"
    scale: Mapping[str, object] = field(default_factory=lambda: {"zero": False})
    interpolate: str = "linear"
    noisy: bool = False


def curves(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield the charts of the training itself."""
    noisy = CurveStyle(noisy=True)
    yield from _with_evaluations(
        runs, _curve(runs, "loss", "Loss", "mean over ranks and micro-batches", noisy)
    )
    rate = CurveStyle(".2~e")
    yield from _curve(runs, "learning_rate", "Learning rate", "of the first group", rate)
    yield from _curve(runs, "grad_norm", "Gradient norm", "before clipping", noisy)
    steps = CurveStyle(",", {"type": "log", "base": 2, "nice": False}, "step-after")
    yield from _curve(runs, "loss_scale", "Loss scale", "fp16", steps)


def evaluations(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield the charts of results of evaluations other than losses: those of the training have
    these, unless it has no loss.
    """
    has_loss = any(run.figure("loss") for run in runs)
    names = dict.fromkeys(name for run in runs for name in run.evaluated)
    shown = [name for name in names if not (has_loss and is_loss(name))]
    for index, name in enumerate(shown):
        rows = [
            {"step": row["step"], "value": row[name], "run": run.name}
            for run in runs
            for row in run.evaluations
            if name in row
        ]
        colors = {run.name: color for run, color in zip(runs, RUNS)}
        spec = _drawn(runs, rows, "run", colors, CurveStyle())
        yield Chart(f"evaluation{index}", name, "by evaluations of the script", spec)


def speeds(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield the charts of speed."""
    speed, share = (CurveStyle(form, {"zero": True}, noisy=True) for form in ("~s", ".1~%"))
    tokens = list(_curve(runs, "tokens_per_second", "Tokens per second", "all ranks", speed))
    yield from tokens or _curve(
        runs, "samples_per_second", "Samples per second", "all ranks", speed
    )
    yield from _curve(runs, "mfu", "MFU", "operations of the model over the peak", share)
    yield from _lines(
        runs, "step_time", "Time of a step", "milliseconds", {"step_ms": "step"} | PARTS
    )
    yield from _lines(runs, "waits", "Computation waited", "milliseconds a step, on rank 0", WAITS)


def traffic(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield a chart of bytes on the wire for each run, all on one scale."""
    rows_of = [list(_traffic_rows(run)) for run in runs]
    most = max((_most(rows, "step") for rows in rows_of), default=0)
    for index, (run, rows) in enumerate(zip(runs, rows_of)):
        if not rows:
            continue
        alone = len({row["step"] for row in rows}) == 1
        area = {"type": "area", "interpolate": "step-after", "opacity": 0.85}
        spec: Spec = {
            "data": {"values": rows},
            "height": HEIGHT,
            "mark": {"type": "bar"} if alone else area,
            "encoding": {
                "x": _steps(),
                "y": _bytes(most, "y"),
                "color": colors_of("operation", OPERATIONS, rows),
                "tooltip": [
                    {"field": "step"},
                    {"field": "operation"},
                    {"field": "bytes", "format": ".4~s"},
                ],
            },
        }
        note = "sent by rank 0 in each step"
        yield _for_run(runs, run, Chart(f"wire{index}", "Bytes on the wire", note, spec))


def memory(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield a chart of memory by tier, predicted and measured, for each run, all on one scale."""
    rows_of = [list(_memory_rows(run)) for run in runs]
    most = max((_most(rows, "line") for rows in rows_of), default=0)
    for index, (run, rows) in enumerate(zip(runs, rows_of)):
        if not rows:
            continue
        order = list(dict.fromkeys(row["line"] for row in rows))
        spec: Spec = {
            "data": {"values": rows},
            "height": 30 * len(order),
            "mark": {"type": "bar", "height": {"band": 0.7}},
            "encoding": {
                "y": {
                    "field": "line",
                    "type": "nominal",
                    "sort": order,
                    "axis": {"title": None, "grid": False, "labelLimit": 240},
                },
                "x": _bytes(most, "x"),
                "color": colors_of("kind", KINDS, rows),
                "order": {"field": "place", "type": "quantitative"},
                "tooltip": [
                    {"field": "line"},
                    {"field": "what"},
                    {"field": "bytes", "format": ".4~s"},
                ],
            },
        }
        note = (
            "of rank 0; state: predicted before training, measured as updates begin; buffers of a "
            "step come and go, and activations are in neither"
        )
        yield _for_run(runs, run, Chart(f"memory{index}", "Memory", note, spec))


def _for_run(runs: Sequence[RecordedRun], run: RecordedRun, chart: Chart) -> Chart:
    """Return ``chart`` beside that of another run, or alone over the whole width."""
    if len(runs) == 1:
        return replace(chart, wide=True)
    return replace(chart, title=f"{chart.title}, {run.name}")


def _bytes(most: float, along: str) -> Spec:
    """Return the encoding of stacked bytes, ``most`` at the end of the scale, along "x" or "y"."""
    return {
        "field": "bytes",
        "type": "quantitative",
        "stack": True,
        "scale": {"domain": [0, most]},
        "axis": {
            "title": None,
            "labelExpr": "replace(format(datum.value, '~s'), regexp('([a-zA-Z]?)$'), ' $1B')",
            "tickCount": {"expr": "ceil(width / 110)"} if along == "x" else 6,
            "labelOverlap": "greedy",
            "labelSeparation": 8,
        },
    }


def _most(rows: Sequence[Spec], by: str) -> float:
    """Return the largest sum of bytes that lie on each other."""
    sums: Counter[object] = Counter()
    for row in rows:
        sums[row[by]] += row["bytes"]
    return max(sums.values(), default=0)


def _steps() -> Spec:
    labels = {"format": "~s", "labelOverlap": "greedy", "labelSeparation": 8}
    axis = {"title": "step", "tickMinStep": 1, "tickCount": TICKS, **labels}
    scale = {"nice": False, "zero": False}
    return {"field": "step", "type": "quantitative", "scale": scale, "axis": axis}


def colors_of(field: str, colors: Mapping[str, str], rows: Sequence[Mapping[str, object]]) -> Spec:
    """Return the encoding by the ``colors`` of those values that occur."""
    used = {row[field] for row in rows}
    used_colors = {name: color for name, color in colors.items() if name in used}
    return {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(used_colors), "range": list(used_colors.values())},
        "legend": {"title": None, "orient": "top", "symbolType": "square", "symbolOpacity": 1},
    }


def _thinned(steps: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield steps with their figures; where there are too many, means of several in a row."""
    size = -(-len(steps) // POINTS)
    for begin in range(0, len(steps), size):
        some = steps[begin : begin + size]
        if size == 1:
            yield some[0]["step"], some[0]
            continue
        names = {name for row in some for name, value in row.items() if value is not None}
        yield (
            some[-1]["step"],
            {
                name: sum(values) / len(values)
                for name in names
                if (values := [row[name] for row in some if row.get(name) is not None])
            },
        )


def _curve(
    runs: Sequence[RecordedRun], figure: str, title: str, note: str, style: CurveStyle
) -> Iterator[Chart]:
    """Yield the chart of one figure over steps, if a run has it. Lines have gaps where it is not
    finite.
    """
    rows = [
        {"step": step, "value": row[figure], "run": run.name}
        for run in runs
        for step, row in _thinned(run.steps)
        if figure in row
    ]
    if any(row["value"] is not None for row in rows):
        colors = {run.name: color for run, color in zip(runs, RUNS)}
        spec = _drawn(runs, rows, "run", colors, style)
        yield Chart(figure, title, note, spec)


def _with_evaluations(runs: Sequence[RecordedRun], losses: Iterator[Chart]) -> Iterator[Chart]:
    """Yield the chart of losses with those of evaluations, whose points are marked."""
    rows = [
        {"step": row["step"], "value": row[name], "evaluation": name, "run": run.name}
        for run in runs
        for name in filter(is_loss, run.evaluated)
        for row in run.evaluations
        if name in row
    ]
    for chart in losses:
        if not rows:
            yield chart
            continue
        by = "evaluation" if len(runs) == 1 else "run"
        names = list(dict.fromkeys(row["evaluation"] for row in rows))
        colors = {run.name: color for run, color in zip(runs, RUNS)}
        if by == "evaluation":
            colors = {name: f"var(--c{2 + index % 6})" for index, name in enumerate(names)}
        layer = {
            "data": {"values": rows},
            "mark": {"type": "line", "strokeWidth": 1.8, "point": {"size": 45, "filled": True}},
            "encoding": {
                "x": _steps(),
                "y": {"field": "value", "type": "quantitative"},
                "color": colors_of(by, colors, [{by: name} for name in colors])
                | ({} if by == "evaluation" else {"legend": None}),
                "detail": [{"field": "evaluation"}, {"field": "run"}],
                "tooltip": [
                    {"field": "step"},
                    {"field": "evaluation"},
                    {"field": "run"},
                    {"field": "value", "format": ".6~g"},
                ],
            },
        }
        spec = chart.spec | {
            "layer": [*chart.spec["layer"], layer],
            "resolve": {"scale": {"color": "independent"}},
        }
        yield replace(chart, note=f"{chart.note}; points: {', '.join(names)}", spec=spec)


def _lines(
    runs: Sequence[RecordedRun], name: str, title: str, note: str, figures: Mapping[str, str]
) -> Iterator[Chart]:
    """Yield one chart of several figures over steps, with gaps as in :func:`_curve`."""
    rows = [
        {"step": step, "value": row[figure], "what": what, "run": run.name}
        for run in runs
        for step, row in _thinned(run.steps)
        for figure, what in figures.items()
        if figure in row
    ]
    if any(row["value"] is not None for row in rows):
        colors = {what: f"var(--c{index})" for index, what in enumerate(figures.values(), 1)}
        style = CurveStyle(",~f", {"zero": True}, noisy=True)
        spec = _drawn(runs, rows, "what", colors, style)
        yield Chart(name, title, note, spec)


def _drawn(
    runs: Sequence[RecordedRun],
    rows: list[Spec],
    by: str,
    colors: Mapping[str, str],
    style: CurveStyle,
) -> Spec:
    """Return curves of ``value`` by ``step``, with points at the pointer and rules at restarts.
    Curves that are ``noisy`` are drawn smooth over their faint values, as the page's slider says:
    page.js computes the field ``smooth`` of the rows, curve by curve.
    """
    encoding: Spec = {
        "x": _steps(),
        "y": {
            "field": "value",
            "type": "quantitative",
            "scale": style.scale,
            "axis": {
                "title": None,
                "labelExpr": f"datum.value ? format(datum.value, '{style.form}') : '0'",
            },
        },
        "color": colors_of(by, colors, [{by: name} for name in colors] if by == "run" else rows),
    }
    if by == "run":
        legend = {"symbolType": "stroke", "symbolSize": 300} if len(runs) > 1 else None
        encoding["color"]["legend"] = legend and encoding["color"]["legend"] | legend
    if len(runs) > 1:
        encoding["strokeDash"] = {
            "field": "run",
            "type": "nominal",
            "scale": {"domain": [run.name for run in runs], "range": [[1, 0], [5, 3]]},
            "legend": {
                "title": None,
                "orient": "top",
                "symbolType": "stroke",
                "symbolSize": 300,
                **({} if by == "run" else {"symbolStrokeColor": "var(--ink)"}),
            },
        }
    line = {"type": "line", "interpolate": style.interpolate, "strokeWidth": 1.8}
    points = _points(["step", by] if by == "run" else ["step", by, "run"], style.noisy)
    points["encoding"] |= encoding
    points["encoding"].pop("strokeDash", None)  # filled points would blank the legend's strokes
    layers = [{"mark": line, "encoding": encoding}, points, *_restarts(runs), *_traces(runs)]
    spec: Spec = {"data": {"name": "rows", "values": rows}, "height": HEIGHT, "layer": layers}
    if style.noisy:
        smooth = encoding | {"y": encoding["y"] | {"field": "smooth"}}
        layers[0] = {"mark": line | {"opacity": 0.28}, "encoding": encoding}
        layers.insert(1, {"mark": line, "encoding": smooth})
        points["encoding"]["y"] = smooth["y"]
        spec["usermeta"] = {"smooth": list(dict.fromkeys([by, "run"]))}
    return spec


def _points(fields: Sequence[str], noisy: bool) -> Spec:
    """Return the layer of points that show ``fields`` and their value under the pointer, and the
    smooth one of ``noisy`` curves.
    """
    hover = {
        "name": "hover",
        "select": {
            "type": "point",
            "on": "pointerover",
            "nearest": True,
            "clear": "pointerout",
            "fields": list(fields),
        },
    }
    tooltip = [{"field": name} for name in fields]
    return {
        "params": [hover],
        "mark": {"type": "point", "filled": True, "size": 55},
        "encoding": {
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": [
                *tooltip,
                {"field": "value", "format": ".6~g"},
                *([{"field": "smooth", "format": ".6~g"}] if noisy else ()),
            ],
        },
    }


def _restarts(runs: Sequence[RecordedRun]) -> Iterator[Spec]:
    """Yield the layer of a rule at each restart, if there are any."""
    rows = [
        {"step": start.after, "run": run.name, "restarted": f"after step {start.after}"}
        for run in runs
        for start in run.restarts
    ]
    if rows:
        rule = {"type": "rule", "strokeDash": [3, 3], "color": "var(--faint)", "strokeWidth": 1.2}
        yield {
            "data": {"values": rows},
            "mark": rule | {"tooltip": {"content": "data"}},
            "encoding": {"x": {"field": "step", "type": "quantitative"}},
        }


def _traces(runs: Sequence[RecordedRun]) -> Iterator[Spec]:
    """Yield the layer of a band over the steps of each trace, if there are any."""
    rows = [
        {
            "first": first - 0.5,
            "last": last + 0.5,
            "run": run.name,
            "traced": f"steps {first} to {last}, whose speed is left out",
        }
        for run in runs
        for first, last in run.traced
    ]
    if rows:
        band = {"type": "rect", "color": "var(--faint)", "opacity": 0.15}
        yield {
            "data": {"values": rows},
            "mark": band | {"tooltip": {"content": "data"}},
            "encoding": {"x": {"field": "first", "type": "quantitative"}, "x2": {"field": "last"}},
        }


def _traffic_rows(run: RecordedRun) -> Iterator[Spec]:
    for step, row in _thinned(run.steps):
        for name in OPERATIONS:
            if size := row.get(f"{name}_wire_bytes"):
                yield {"step": step, "operation": name, "bytes": size}


def _memory_rows(run: RecordedRun) -> Iterator[Spec]:
    """Yield the predicted and the measured bytes of a run, by line of the chart: of state in two
    lines that can be compared, and the buffers of a step that were predicted beside it.
    """
    kinds = list(KINDS)

    def row(line: str, tier: str, kind: str, what: str, size: float) -> Spec:
        return {
            "line": f"{TIERS[tier]}, {line}",
            "tier": TIERS[tier],
            "kind": kind,
            "what": what,
            "bytes": size,
            "place": kinds.index(kind),
        }

    for tier in TIERS:
        predicted = [record for record in run.header.get("predicted", ()) if record["tier"] == tier]
        for record in predicted:
            if record["kind"] != BUFFERS:
                yield row("state predicted", tier, record["kind"], record["what"], record["bytes"])
        state = [record for record in run.totals.get("state", ()) if record["tier"] == tier]
        for record in state:
            yield row("state measured", tier, record["kind"], record["kind"], record["bytes"])
        most = max(run.figure(f"{tier}_bytes"), default=0)
        if not state and most:
            yield row("state measured", tier, "state", "state", most)
        for record in predicted:
            if record["kind"] == BUFFERS:
                yield row("buffers predicted", tier, BUFFERS, record["what"], record["bytes"])
        peak = max(run.figure("peak_device_bytes"), default=0)
        if tier == "device" and peak:
            yield row("allocated at most", tier, "allocated at most", "by the allocator", peak)
