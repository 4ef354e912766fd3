"""``hf-zero estimate --link``: bytes and seconds of a step on a link, dense and compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_zero.cli.printing import in_units
from hf_zero.logging import parse_rate, rate_in_units

if TYPE_CHECKING:
    from hf_zero.planning.traffic import Traffic

# a way of sending, its seconds on the link, the speed in bits per second below which it pays
Row = tuple["Traffic", float, float | None]


def link_rows(
    model: str,
    ranks: int,
    precision: str,
    stage: int | None,
    link: str,
    **given: Any,
) -> dict[int, list[Row]]:
    """Return the ways of sending of each stage, the dense one first. ``given``: further arguments
    of :func:`hf_zero.planning.estimate.traffic`. Raises ConfigError for an invalid ``link`` speed.
    """
    rate = parse_rate(link)
    from hf_zero.planning.estimate import traffic

    found = traffic(model, ranks, precision, stage, **given)
    return {
        each: [
            (way, way.seconds(rate), None if way is ways[0] else way.pays_below(ways[0]))
            for way in ways
        ]
        for each, ways in found.items()
    }


def link_json(rows: dict[int, list[Row]]) -> list[dict[str, Any]]:
    """Return ``rows`` as values for JSON."""
    return [
        {
            "stage": stage,
            "way": way.name,
            "bytes": way.nbytes,
            "seconds": seconds,
            "coding": way.coding,
            "pays_below": below,
        }
        for stage, ways in rows.items()
        for way, seconds, below in ways
    ]


def link_table(rows: dict[int, list[Row]], ranks: int, link: str) -> Table:
    table = Table(
        title=f"{ranks} ranks, each with a link of {rate_in_units(parse_rate(link))}: a step sends",
        caption="Per rank and step, if nothing is computed meanwhile; with the seconds that "
        "putting elements into few bits takes on this machine. Below the last column's speed a "
        "step is shorter than a dense one.",
    )
    for name in ("stage", "how", "bytes", "of dense", "seconds", "pays below"):
        table.add_column(name, justify="left" if name == "how" else "right")
    for stage, ways in rows.items():
        dense = ways[0][0].nbytes
        for way, seconds, below in ways:
            table.add_row(
                str(stage),
                way.name,
                in_units(way.nbytes),
                f"{way.nbytes / dense:.2f}" if dense else "",
                f"{seconds:.3g}",
                "" if way is ways[0][0] else "never" if below is None else rate_in_units(below),
            )
    return table
