"""The chart of one step: what each rank did, and when."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zero.report.charts import Chart, Spec, colors_of
from hf_zero.report.timeline import LANES, Bar, Timeline

BARS = {
    "forward": "var(--c1)",
    "backward": "var(--c5)",
    "kernels": "var(--c1)",
    "gathers": "var(--c3)",
    "reductions": "var(--c4)",
    "updates": "var(--c6)",
    "transfers": "var(--c7)",
    "exposed": "var(--c2)",
}


def timeline(index: int, one: Timeline) -> Chart:
    """Return the chart of one step."""
    lines, bars = _places(one.bars)
    labels = ", ".join(f"'{position:.3f}': '{name}'" for position, name in lines.items())
    depth = max(bar["y2"] for bar in bars)
    spec: Spec = {
        "data": {"values": bars},
        "height": max(140, 18 * depth),
        "params": [
            {
                "name": "zoom",
                "select": {
                    "type": "interval",
                    "encodings": ["x"],
                    "zoom": "wheel![event.shiftKey]",
                },
                "bind": "scales",
            }
        ],
        "mark": {"type": "rect", "clip": True, "tooltip": True},
        "encoding": {
            "x": {
                "field": "begin",
                "type": "quantitative",
                "scale": {"domain": [0, one.length / 1e3], "nice": False},
                "axis": {"title": "milliseconds", "format": ",~f"},
            },
            "x2": {"field": "end"},
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": {"domain": [0, depth], "reverse": True, "nice": False},
                "axis": {
                    "title": None,
                    "values": list(lines),
                    "labelExpr": f"({{{labels}}})[format(datum.value, '.3f')]",
                    "grid": False,
                    "labelOverlap": False,
                    "ticks": False,
                    "domain": False,
                    "labelLimit": 220,
                },
            },
            "y2": {"field": "y2"},
            "color": colors_of("kind", BARS, bars),
            "tooltip": [
                {"field": "name"},
                {"field": "kind"},
                {"field": "begin", "title": "begins at (ms)", "format": ".3f"},
                {"field": "took", "title": "takes (ms)", "format": ".3f"},
            ],
        },
    }
    some = "" if one.shown == one.ranks else f", the first {one.shown} of {one.ranks} ranks"
    note = (
        f"step {one.step}{some}: {one.length / 1e3:,.1f} ms. Gathers and reductions are drawn "
        "from their launch to their end; exposed: computation waited."
    )
    hint = "Drag to move, Shift and the wheel to zoom."
    return Chart(f"timeline{index}", "Timeline of a step", note, spec, True, hint)


def _places(bars: Sequence[Bar]) -> tuple[dict[float, str], list[Spec]]:
    """Return the labels of lanes by their place, and the bars at their places: those of one lane
    that overlap lie below each other; what was exposed is drawn over the lane.
    """
    labels: dict[float, str] = {}
    layers: list[Spec] = []
    top = 0.0
    for rank in sorted({bar.rank for bar in bars}):
        for lane in LANES:
            ordered = sorted(
                (bar for bar in bars if (bar.rank, bar.lane) == (rank, lane)),
                key=lambda bar: (bar.kind == "exposed", bar.begin),
            )
            if not ordered:
                continue
            ends: list[float] = []  # of the last bar of each level
            levels = []
            for bar in ordered:
                if bar.kind == "exposed":
                    levels.append(-1)
                    continue
                level = next((n for n, end in enumerate(ends) if end <= bar.begin), len(ends))
                ends[level:] = [bar.end, *ends[level + 1 :]]
                levels.append(level)
            depth = max(1, min(len(ends), 4)) if lane != "compute" else 1
            height = 1.6 if lane == "compute" else 1.0 if depth == 1 else 0.6 * depth
            for bar, level in zip(ordered, levels):
                whole = level < 0 or lane == "compute"
                low = top if whole else top + height * (level % depth) / depth
                high = top + height if whole else low + height / depth
                layers.append(
                    {
                        "name": bar.name,
                        "kind": bar.kind,
                        "begin": round(bar.begin / 1e3, 4),
                        "end": round(bar.end / 1e3, 4),
                        "took": round((bar.end - bar.begin) / 1e3, 4),
                        "y": round(low, 4),
                        "y2": round(high - 0.08, 4),
                    }
                )
            labels[round(top + height / 2, 4)] = f"rank {rank} {lane}"
            top += height + 0.25
        top += 0.6
    return labels, layers
