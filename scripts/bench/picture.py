"""The picture of hf-zero beside DDP, FSDP2 and DeepSpeed in the README: bars of seconds and memory,
with the ratio of a peer's figure to that of hf-zero. ``scripts/readme.py`` writes it.

All figures, versions and dates are from the rows in ``results/``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench import comparison
from bench.comparison import CONVERTING, LOADING, MEMORY, OFFLOAD, STEPS, Cells, Rows, rows_of

NAMES = tuple(name.split()[0] for name in comparison.PEERS)  # without versions
SOURCES = (STEPS, MEMORY, LOADING, CONVERTING, OFFLOAD)
VERSIONS = {"torch": "torch", "deepspeed": "DeepSpeed", "transformers": "Transformers"}
WIDTH, MARGIN, GUTTER = 800, 14, 22
BAR, PITCH = 11, 16  # height of a bar, and from one bar to the next
NAME, FIGURES = 74, 110  # widths for the name before a bar and the figures behind it
LARGE, SMALL = 12.5, 11.5  # sizes of type
BOLD, HALF_BOLD = ' font-weight="600"', ' font-weight="500"'


class Panel(NamedTuple):
    """Bars of one figure: ``text`` formats a value, ``measured`` finds those of :data:`NAMES` in
    the rows of ``source``.
    """

    title: str
    text: str
    source: str
    measured: Callable[[Rows], Cells]

    def bars(self) -> list[tuple[str, float]]:
        """Return the names and values of the contenders that were measured."""
        cells = self.measured(rows_of(self.source))
        return [(name, value) for name, value in zip(NAMES, cells) if value is not None]


STAGES = tuple(
    Panel(f"stage {stage}", "{:.2f} s", STEPS, comparison.steps(stage, ddp=stage in (0, 3)))
    for stage in range(4)
)
SECONDS, MIB = "{:.2f} s", "{:,.0f} MiB"


def groups() -> tuple[tuple[str, tuple[Panel, Panel]], ...]:
    """Return the headings of the pairs of panels beside the steps, and the pairs: time, memory."""
    loaded, (converted, *_) = rows_of(LOADING), rows_of(CONVERTING)
    rounds, parameters = max(row.get("round", 0) for row in loaded), loaded[0]["parameters"]
    timed = next(row for row in rows_of(OFFLOAD) if "times" in row)
    return (
        (
            "Memory of a rank, 50M parameters in bf16, two ranks, stage 3",
            (
                Panel("kept between steps", MIB, MEMORY, comparison.memory("kept_mb")),
                Panel("peak of a step", MIB, MEMORY, comparison.memory("peak_mb")),
            ),
        ),
        (
            f"Loading {parameters / 1e6:.0f}M parameters in bf16 on two ranks, "
            f"best of {rounds} rounds",
            (
                Panel("time", SECONDS, LOADING, comparison.loading("seconds")),
                Panel("peak memory of a rank *", MIB, LOADING, comparison.loading("peak_mb")),
            ),
        ),
        (
            f"Converting a checkpoint of {converted['parameters'] / 1e6:.0f}M parameters, "
            f"best of {len(converted['all_seconds'])} rounds",
            (
                Panel("time", SECONDS, CONVERTING, comparison.converting("seconds")),
                Panel(
                    "peak memory of the process",
                    MIB,
                    CONVERTING,
                    comparison.converting("peak_mb"),
                ),
            ),
        ),
        (
            "Optimizer and parameters in host memory, 38M in bf16, one rank",
            (
                Panel(
                    f"a step, median of {len(timed['times'])}",
                    SECONDS,
                    OFFLOAD,
                    comparison.offload(comparison.ALL_AWAY, "times"),
                ),
                Panel(
                    "memory added, after the steps",
                    MIB,
                    OFFLOAD,
                    comparison.offload(comparison.ALL_AWAY, "kept_mb"),
                ),
            ),
        ),
    )


def drawing(colors: Mapping[str, Any]) -> str:
    """Return the picture as an SVG, in ``colors``: one of ``readme.COLORS``."""
    column = (WIDTH - 2 * MARGIN - 2 * GUTTER) / 3
    left, middle, right = (MARGIN + place * (column + GUTTER) for place in range(3))
    out: list[str] = []

    def text(
        x: float, y: float, words: str, color: str, size: float = SMALL, more: str = ""
    ) -> None:
        out.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{colors[color]}" font-size="{size}"{more}>'
            f"{words}</text>"
        )

    def bars(x: float, y: float, panel: Panel, most: float) -> float:
        """Draw the bars of ``panel`` below ``y``; return where they end."""
        (_, reference), *_ = panel.bars()
        for name, value in panel.bars():
            ours, length = name == NAMES[0], value / most * (column - NAME - FIGURES)
            fill = colors["fill"][0] if ours else colors["line"]
            text(x + NAME - 7, y + 9.5, name, "ink" if ours else "faint", more=' text-anchor="end"')
            out.append(
                f'<rect x="{x + NAME:.1f}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" '
                f'rx="1.5" fill="{fill}"/>'
            )
            shown = [panel.text.format(value)]
            if not ours:
                ratio = _ratio(value / reference)
                less = ' font-weight="700"' if value < reference else ""
                shown.append(f'<tspan dx="6" fill="{colors["ink"]}"{less}>{ratio}</tspan>')
            text(x + NAME + length + 5, y + 9.5, "".join(shown), "ink" if ours else "faint")
            y += PITCH
        return y

    rows = rows_of(STEPS)
    rounds = max(row.get("round", 0) for row in rows)
    y = 20.0
    text(left, y, f"A training step, best of {rounds} rounds", "ink", LARGE, BOLD)
    text(left, y + 16, "BERT of 8 layers, fp32, two ranks", "faint")
    y += 26
    most = max(value for panel in STAGES for _, value in panel.bars())
    for panel in STAGES:
        text(left, y + 10, panel.title, "ink", more=HALF_BOLD)
        y = bars(left, y + 16, panel, most) + 5
    bottom = y
    y = 20.0
    for heading, panels in groups():
        text(middle, y, heading, "ink", LARGE, BOLD)
        ends = []
        for x, panel in zip((middle, right), panels):
            text(x, y + 16, panel.title, "ink", more=HALF_BOLD)
            ends.append(bars(x, y + 23, panel, max(value for _, value in panel.bars())))
        y = max(ends) + 22
    y = max(bottom, y - 22) + 10
    out.append(
        f'<line x1="{left}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" '
        f'stroke="{colors["line"]}" stroke-opacity="0.5"/>'
    )
    for line in footer():
        y += 16
        text(left, y, line, "faint", 11)
    height = round(y + 12)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        'font-family="ui-sans-serif, system-ui, sans-serif">'
    )
    title = "<title>hf-zero measured beside DDP, FSDP2 and DeepSpeed on two CPU cores</title>"
    return "\n".join([head, title, *out, "</svg>"]) + "\n"


def footer() -> Iterator[str]:
    """Yield lines about the ratios, the machine, versions and dates."""
    yield "×: a peer's figure divided by that of hf-zero; bold where the peer is better"
    yield (
        "DDP does not shard; FSDP2 loads a model through Transformers' DistributedConfig; "
        "* includes mapped files"
    )
    rows = [row for source in SOURCES for row in rows_of(source)]
    cores = _values(row["cores"] for row in rows if "cores" in row)
    machine = _values(row["machine"] for row in rows if "machine" in row)
    versions = [
        f"{name} {_values(row['versions'][key] for row in rows if key in row.get('versions', {}))}"
        for key, name in VERSIONS.items()
    ]
    dates = _values(date for source in SOURCES for date in re.findall(r"\d+-\d\d-\d\d", source))
    yield f"{cores} CPU cores ({machine}), no GPU; {', '.join(versions)}; measured {dates}"


def _ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def _values(values: Iterator[Any] | Sequence[Any]) -> str:
    """Return the different ``values``, in order."""
    return " and ".join(str(value) for value in sorted(set(values)))
