"""``hf-zero doctor``: the findings about this installation; and ``hf-zero smoke``: a training of a
minute.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from hf_zero.cli.examination import examine
from hf_zero.cli.printing import AsJson, PrintableTable, print_json, print_table
from hf_zero.logging import set_level

COLORS = {"ok": "green", "off": "yellow", "broken": "red"}
BROKEN = 1
ATTACH = (
    "When you open an issue, attach the output of `hf-zero doctor --probe --json`, the "
    "configuration (`hf-zero explain FILE --json`), the command, and the whole output of one rank "
    "with HF_ZERO_LOG_LEVEL=debug."
)
NEXT = (
    "Next: `hf-zero parity --ranks 2 -- train.py` compares the training of your script with the "
    "same script over untouched torch."
)


def doctor(
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Try what hf-zero relies on in each library; without it, only in releases that "
            "the tests have not run with.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report versions, devices, the slot in Accelerate and the kernels: which are active, and why
    others are not. Exit code 1 if something is broken.

    Example: hf-zero doctor --probe --json
    """
    findings = examine(probe)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = PrintableTable("part", "", "status", "detail", title="hf-zero doctor")
        for finding in findings:
            table.add_row(
                finding.part,
                finding.name,
                Text(finding.status, style=COLORS[finding.status]),
                finding.detail,
            )
        print_table(table)
        print(ATTACH)
        if all(finding.status != "broken" for finding in findings):
            print(NEXT)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(BROKEN)


def smoke(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Default: the GPUs of this machine, or 2 CPU ranks.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small model for a minute on this machine's ranks, at stages 0 to 3, save and resume
    it, and compare its weights with plain PyTorch's. Exit code 1 if they differ.

    Example: hf-zero smoke --ranks 2
    """
    from hf_zero.cli.launch import default_ranks
    from hf_zero.cli.smoke import fork
    from hf_zero.device import kinds
    from hf_zero.launch.front import carry_out
    from hf_zero.launch.plan import Request, plan

    if "HF_ZERO_LOG_LEVEL" not in os.environ:
        os.environ["HF_ZERO_LOG_LEVEL"] = "error"
        set_level(logging.ERROR)  # of forks, which do not read the variable again
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun says so at length otherwise
    request = Request(
        "hf_zero.cli.smoke", ("--json",) if as_json else (), module=True, num_procs=ranks
    )
    launch = plan(request, default_ranks)
    if kinds.accelerator() is not None or not launch.alone:
        raise typer.Exit(carry_out(launch))
    (start,) = launch.starts
    raise typer.Exit(fork(len(start.host.slots), start.environment, request.arguments))
