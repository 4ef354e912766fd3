"""``hf-zero report``: one page that shows a run."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_zero.cli.printing import AsJson, PrintableTable, print_json, print_table


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
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows a run: its figures over steps, memory predicted and measured,
    bytes on the wire, the timeline of a step, configuration, versions, restarts and warnings.

    The page needs no network. Training writes the figures with "metrics": {"enabled": true}, a
    trace with engine.trace() or the section trace. Requires the extra "report" of hf-zero.

    Example: hf-zero report runs/bert-mlm --against runs/bert-mlm-zero1
    """
    from hf_zero.report.page import summary_lines, write_report

    path, found = write_report(run, against, output, trace)
    if as_json:
        print_json({"page": str(path), "bytes": path.stat().st_size, "runs": found})
        return
    names = list(dict.fromkeys(name for each in found for name in each))
    texts = [dict(summary_lines(each)) for each in found]
    table = PrintableTable(*["", *(each["run"] for each in found)])
    for name in names[1:]:
        table.add_row(name.replace("_", " "), *(text.get(name, "") for text in texts))
    print_table(table)
    typer.echo(f"the page: {path}")
