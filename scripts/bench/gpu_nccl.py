"""Ranks that speak NCCL on the one GPU there is: four parts, each a call of at most nine minutes,
each with a page. Values, orders, waits, ends and memory are checked; ranks take turns on the GPU,
so that no time between them means anything.

    scripts/gpu --nccl 1            # stages 0 to 3 on two and four ranks, beside one plain process
    scripts/gpu --nccl 2            # communicators, few bits, offload, float8 gathers, graphs
    scripts/gpu --nccl 3            # parallel axes; Accelerate, Trainer, TRL and Lightning
    scripts/gpu --nccl 4            # ranks that go wrong, resume on other ranks, memory
    scripts/gpu --nccl PART --cpu   # the same cases over gloo, on CPU ranks, up to an hour

Each part first sends plain collectives of torch by each of two ways (tests/nccl/ways.py), and takes
the first way that works. Rows go to OUT as they come, and at the end a page, ``nccl-PART.md``. The
exit code is 1 if a case fails, 2 if the part cannot run here, 3 if no way works.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cells import Cell, Rows, about, here
from gpu_first_hour import MINUTES, STOPPED, page
from gpu_run import parser_of_parts, part_run, refuse_part

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FAILED, REFUSED = 1, 2
WAYS, WAY, LOGS = "plain collectives", "NCCL_PARTS_WAY", "NCCL_PARTS_LOGS"
OTHERS = 4 << 30  # bytes on the card that this process cannot have taken
COLLECTIVES = 2  # ranks that send them
SLOWER = 6  # times the seconds of a card that CPU ranks may take


def logs() -> Path:
    return Path(os.environ[LOGS])


def device(cpu: bool) -> Any:
    import torch

    return torch.device("cpu" if cpu else "cuda")


def ways_here(cpu: bool) -> tuple[str, ...]:
    from tests.nccl import ways

    return (ways.GLOO,) if cpu else ways.ON_CARD


def collectives(cpu: bool) -> Rows:
    """Plain collectives of two ranks by each way: how many are right, or what went wrong."""
    from tests.nccl import ranks

    for way in ways_here(cpu):
        begun, right, wrong, late = time.monotonic(), 0, list[str](), ""
        folder = logs() / f"way-{way}"
        with ranks.started(
            "tests.nccl.collectives", count=COLLECTIVES, way=way, logs=folder
        ) as job:
            try:
                for _, line in job.lines(60.0):
                    if line.startswith("{"):
                        row = json.loads(line)
                        right += row["right"]
                        wrong += [] if row["right"] else [row["collective"]]
            except TimeoutError as error:
                late = str(error)
            codes = job.codes(5.0)
            said = [text.strip().splitlines()[-1:] for text in map(job.said, range(COLLECTIVES))]
        row = {"work": WAYS, "of": way, "right": right, "s": time.monotonic() - begun}
        if wrong or late or any(codes):
            last = "; ".join(line[0][-200:] for line in said if line)
            row["why"] = f"wrong {wrong}, codes {codes}, {late or last}"
        yield row


def way_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the first way whose collectives were all right, or ""."""
    tried = [row for row in rows if row.get("work") == WAYS and row.get("right")]
    return next((row["of"] for row in tried if "why" not in row), "")


def cases(work: str, module: str, count: int, seconds: int, table: str = "CASES") -> Cell:
    """The cases of a module of tests/nccl on ``count`` ranks."""

    def run(cpu: bool) -> Rows:
        import importlib

        from tests.nccl.cases import outcomes

        name = f"tests.nccl.{module}"
        found = getattr(importlib.import_module(name), table).values()
        chosen = [case for case in found if case.ranks == count]
        for case in [case for case in chosen if case.needs and not here(case.needs)]:
            yield {"work": work, "of": case.name, "missing": f"{case.needs} is not installed"}
        chosen = [case for case in chosen if not case.needs or here(case.needs)]
        chosen = [case for case in chosen if case.on_cpu or not cpu]
        begun, folder = time.monotonic(), logs() / module / table
        for outcome in outcomes(name, chosen, count, os.environ[WAY], folder, device(cpu)):
            taken, begun = time.monotonic() - begun, time.monotonic()
            row = {"work": work, "of": outcome.case.name, **outcome.figures, "s": taken}
            yield {**row, "failed": outcome.failure} if outcome.failure else row

    return Cell(work, "", seconds, run)


def endings(cpu: bool) -> Rows:
    from tests.nccl import endings as ends

    at_once = 2 if cpu else len(ends.ENDINGS)
    for row in ends.run(os.environ[WAY], logs() / "endings", at_once=at_once):
        yield {"work": "ranks that go wrong", "of": row.pop("case"), **row}


def library(name: str, seconds: int) -> Cell:
    """A library's script on two ranks beside one process."""
    from_package = {"Accelerate": "accelerate", "Trainer": "accelerate", "TRL": "trl"}

    def run(cpu: bool) -> Rows:
        from tests.nccl import libraries

        begun = time.monotonic()
        row = libraries.run(name, os.environ[WAY], logs() / name)
        yield {"work": "libraries", "of": name, **row, "s": time.monotonic() - begun}

    return Cell("libraries", name, seconds, run, from_package.get(name, "lightning"))


AXES = ("TENSOR", "EXPERT", "SEQUENCE", "CONTEXT", "PIPELINE")


def axes(count: int, seconds: int) -> tuple[Cell, ...]:
    """Each parallel axis in processes of its own: a job is parallel in one way."""
    return tuple(
        cases(f"{axis.lower()} parallelism, {count} ranks", "axes", count, seconds, axis)
        for axis in AXES
    )


FIRST = Cell(WAYS, "", 40, collectives)
PARTS: dict[int, tuple[Cell, ...]] = {
    1: (
        cases("stages, 2 ranks", "stages", 2, 110),
        cases("stages, 4 ranks", "stages", 4, 150),
    ),
    2: (
        cases("communicators and placements, 2 ranks", "communicators", 2, 140),
        cases("communicators and placements, 4 ranks", "communicators", 4, 120),
    ),
    3: (
        *axes(2, 25),
        *axes(4, 30),
        library("Accelerate", 50),
        library("Trainer", 50),
        library("TRL", 50),
        library("Lightning", 50),
    ),
    4: (
        Cell("ranks that go wrong", "", 120, endings),
        cases("resumed on other ranks, memory", "lasting", 2, 60),
        cases("resumed on one rank", "lasting", 1, 20),
        cases("resumed on four ranks", "lasting", 4, 25),
    ),
}


def cells_of(part: int, cpu: bool) -> list[Cell]:
    """The cells of ``part``, with the seconds that they may take here."""
    slower = SLOWER if cpu else 1
    return [replace(cell, seconds=slower * cell.seconds) for cell in (FIRST, *PARTS[part])]


def processes_on_card() -> list[str]:
    """Return the processes that use the card, as nvidia-smi lists them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    done = subprocess.run(("nvidia-smi", *query), capture_output=True, text=True)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0].strip() != str(os.getpid())]


def refusal(cpu: bool) -> str:
    """Return why ranks cannot share a card here, in one line, or ""."""
    import torch
    import torch.distributed as dist

    again = "`--cpu` runs the same cases over gloo"
    if cpu:
        return ""
    if not torch.cuda.is_available():
        return f"torch sees no GPU here; {again}"
    if not dist.is_nccl_available():
        return (
            f"torch {torch.__version__} is built without NCCL: install a build with CUDA; {again}"
        )
    if others := processes_on_card():
        return f"another process uses the card: {others[0]}; end it: it takes turns with the ranks"
    free, total = torch.cuda.mem_get_info()
    if total - free > OTHERS:
        return (
            f"another process uses the card: {(total - free) / 2**30:.1f} GiB of it are taken; end "
            "it: it takes turns with the ranks"
        )
    return ""


def facts(cpu: bool) -> dict[str, Any]:
    import torch

    found = about(cpu)
    if not cpu:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        found["device"] += f", NCCL {version}"
    return found


def main() -> None:
    parser = parser_of_parts(__doc__, "1 to 4")
    parser.add_argument("--minutes", type=float, help=f"for the part, its page too: {MINUTES}")
    # --tiny: as other benchmarks call it
    parser.add_argument("--cpu", "--tiny", action="store_true", help="over gloo on CPU ranks")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    chosen = parser.parse_args()
    cells = {cell.name: cell for part in PARTS.values() for cell in (FIRST, *part)}
    if chosen.part in cells:  # a process of in_a_process
        known = facts(chosen.cpu)
        for row in cells[chosen.part].run(chosen.cpu):
            print("ROW " + json.dumps({**row, **known}), flush=True)
        return
    if chosen.part not in map(str, PARTS):
        refuse_part(chosen.part, "1 to 4", cells)
    if why := refusal(chosen.cpu):
        print(why, file=sys.stderr)
        raise SystemExit(REFUSED)
    part = int(chosen.part)
    name = f"nccl-{part}{'-cpu' if chosen.cpu else ''}"
    minutes = chosen.minutes or MINUTES * (SLOWER if chosen.cpu else 1)
    first, *cells_here = cells_of(part, chosen.cpu)
    seconds = 60 * minutes - chosen.spent
    run = part_run(Path(__file__), name, chosen.out, chosen.cpu, seconds)
    os.environ[LOGS] = str(run.path.with_suffix("").absolute())
    run.cells([first])
    os.environ[WAY] = way = way_of(run.rows)
    stopped = "" if way else "ranks cannot share this card by any way"
    if way:
        run.cells(cell for cell in cells_here if chosen.only in cell.name)
    else:
        run.write({"stopped": stopped})
    failed = sum("failed" in row for row in run.rows)
    title = f"Ranks over {'gloo on the CPU' if chosen.cpu else 'NCCL on one card'}, part {part}"
    text = page(title, run.rows, stopped)
    (chosen.out / f"{name}.md").write_text(text)
    print(f"{text}\n{failed} failed; rows in {run.path}", flush=True)
    raise SystemExit(STOPPED if stopped else FAILED if failed else 0)


if __name__ == "__main__":
    main()
