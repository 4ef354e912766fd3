"""``hf-zero clean``: checkpoints in memory that jobs have left on this host."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table


def clean(
    folder: Annotated[
        str | None,
        typer.Option(
            help="Where to look: the folder of checkpoint.memory.folder; default: /dev/shm and the "
            "folder of temporary files."
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what no process uses.")] = False,
    as_json: AsJson = False,
) -> None:
    """Name the checkpoints in memory (checkpoint.memory) that jobs of this user have on this host,
    and with --remove remove those that no process uses. A job that is between two attempts uses
    its own at the next one: look at the time of the last change.

    Example: hf-zero clean --remove
    """
    from hf_zero.checkpoint.memory.folders import bases, jobs_in, remove_job

    jobs = [job for base in bases(folder) for job in jobs_in(base)]
    removed = {job.folder for job in jobs if remove and remove_job(job.folder)}
    rows = [
        {
            "folder": str(job.folder),
            "bytes": job.nbytes,
            "changed": job.changed,
            "state": "removed" if job.folder in removed else "in use" if job.in_use else "left",
        }
        for job in jobs
    ]
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no checkpoints in memory in {' or '.join(map(str, bases(folder)))}")
        return
    table = PrintableTable("folder", "size", "last change", "state")
    for job, row in zip(jobs, rows):
        ago = f"{(time.time() - job.changed) / 60:,.0f} min ago"
        table.add_row(str(job.folder), in_units(job.nbytes), ago, str(row["state"]))
    print_table(table)
    removable = sum(row["state"] == "left" for row in rows)
    if removable:
        typer.echo(f"{removable} of them can go: hf-zero clean --remove", err=True)
