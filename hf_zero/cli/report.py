"""``hf-zero report``: one page that shows a run."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from hf_zero.cli.printing import AsJson, PrintableTable, print_json, print_table
from hf_zero.errors import ConfigError


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
