"""A line plot as an SVG file, for recipes that compare runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 720, 420  # without the legend, which is on the right
LEFT, RIGHT, TOP, BOTTOM = 72, 20, 48, 52  # of the axes, from the edges
LETTER = 7.5  # at most, of the average one
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # also told apart by the color-blind
DASHES = ("none", "7 3", "2 3", "9 3 2 3")
INK, FAINT = "#1f2328", "#d8dee4"

Points = Sequence[tuple[float, float]]


def line_plot(
    path: Path,
    curves: Mapping[str, Points],
    title: str,
    x: str,
    y: str,
    crosses: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Write a plot of curves, each a name and its points, from x = 0 on; what is not finite is left
    out. ``crosses``: by curve, places on the axis of x that are marked in its color.
    """
    drawn = {name: [each for each in curve if finite(each)] for name, curve in curves.items()}
    points = [point for curve in drawn.values() for point in curve] or [(1.0, 0.0)]
    across = ticks(0.0, max(at for at, _ in points))
    up = ticks(min(value for _, value in points), max(value for _, value in points))

    longest = max(map(len, drawn), default=0)
    whole = round(max(WIDTH + 52 + LETTER * longest, LEFT + 1.2 * LETTER * len(title)))

    def place(at: float, value: float) -> tuple[float, float]:
        """Where a point lies, in pixels from the upper left corner."""
        share = (at - across[0]) / (across[-1] - across[0])
        height = (value - up[0]) / (up[-1] - up[0])
        return (
            round(LEFT + share * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM), 1),
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT}" width="{whole}" '
        f'height="{HEIGHT}" role="img" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{whole}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="14" font-weight="600">{escape(title)}</text>',
    ]

    def line(a: tuple[float, float], b: tuple[float, float], color: str) -> None:
        out.append(f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="{color}"/>')

    def text(at: float, height: float, words: str, anchor: str, more: str = "") -> None:
        out.append(
            f'<text x="{at}" y="{height}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
        )

    for value in up:
        line(place(across[0], value), place(across[-1], value), FAINT)
        text(LEFT - 8, place(across[0], value)[1] + 4, f"{value:g}", "end")
    for value in across:
        at, floor = place(value, up[0])
        line((at, floor), (at, floor + 5), INK)
        text(at, floor + 19, f"{value:,g}" if value < 1e6 else f"{value:g}", "middle")
    line(place(across[0], up[0]), place(across[-1], up[0]), INK)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x, "middle")
    text(16, middle, y, "middle", f' transform="rotate(-90 16 {middle})"')
    for number, (name, curve) in enumerate(drawn.items()):
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        style = f'stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'
        pixels = " ".join(f"{a},{b}" for a, b in (place(*point) for point in curve))
        out.append(f'<polyline points="{pixels}" fill="none" stroke-linejoin="round" {style}/>')
        height = TOP + 14 + 20 * number
        start = WIDTH
        for at in (crosses or {}).get(name, ()):
            here, floor = place(at, up[0])
            text(here, floor - 4 - 14 * number, "×", "middle", f' fill="{color}" font-size="18"')
        out.append(f'<line x1="{start}" y1="{height}" x2="{start + 32}" y2="{height}" {style}/>')
        text(start + 40, height + 4, name, "start")
    path.write_text("\n".join([*out, "</svg>"]) + "\n")


def finite(point: tuple[float, float]) -> bool:
    return all(map(math.isfinite, point))


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, equally far apart, of which the first is not above ``low`` and the last not
    below ``high``.
    """
    width = (high - low) or abs(high) or 1.0
    scale = 10.0 ** math.floor(math.log10(width / 5))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= width / 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]
