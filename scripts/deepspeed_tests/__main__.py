#!/usr/bin/env python
"""Run DeepSpeed's own unit tests over the facade, on two CPU ranks.

Their source is fetched afresh into a temporary folder and is not kept: ``python
scripts/deepspeed_tests --peer FOLDER runtime/zero/test_zero_context.py ...``, or with ``--source
FOLDER`` a checkout that is there; ``--kind public`` names all files of a kind. FOLDER is an
installed DeepSpeed with its requirements (``pip install --target FOLDER deepspeed``, without its
torch): a file runs over it first, and over the facade those tests that it passes.

Results are added to ``tests/deepspeed/deepspeed_tests.json`` file by file, and
DEEPSPEED_TESTS.md is written anew from all of them. What is there from the same versions is not run
again, so a run that was broken off, or ended by ``--minutes``, goes on with what is missing;
``--again failed`` and ``--again all`` run tests over the facade anew.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.deepspeed_tests.figures import RAW, write
from scripts.deepspeed_tests.kinds import KINDS, about, kind_of
from scripts.deepspeed_tests.rows import over_facade, over_peer
from scripts.deepspeed_tests.runs import ROOT, Deadline, Run

URL = "https://github.com/deepspeedai/DeepSpeed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="below tests/unit, such as runtime/test_pld.py")
    parser.add_argument("--kind", choices=KINDS, help="all files of a kind")
    parser.add_argument("--ref", default="v0.19.8", help="tag of DeepSpeed (default: %(default)s)")
    parser.add_argument("--source", type=Path, help="a checkout of DeepSpeed, instead of fetching")
    parser.add_argument("--peer", type=Path, required=True, help="an installed DeepSpeed's folder")
    parser.add_argument("--also", type=Path, help="a folder with packages that the tests import")
    parser.add_argument("--limit", type=int, default=120, help="seconds of one test")
    parser.add_argument("--batch", type=int, default=4, help="files that one process runs")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after as many")
    parser.add_argument("--again", choices=("none", "failed", "all"), default="none")
    given = parser.parse_args()
    until = Deadline(time.monotonic() + given.minutes * 60)
    signal.signal(signal.SIGTERM, lambda *_: until.end())
    signal.signal(signal.SIGINT, lambda *_: until.end())
    with tempfile.TemporaryDirectory() as folder:
        source = given.source
        if source is None:
            source = Path(folder) / "DeepSpeed"
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", given.ref, URL, str(source)]
            subprocess.run(clone, check=True)
        unit = source / "tests" / "unit"
        kinds = {str(f.relative_to(unit)): kind_of(f) for f in sorted(unit.rglob("test_*.py"))}
        rows = json.loads(RAW.read_text()) if RAW.is_file() else {"files": {}}
        rows |= {"ref": given.ref, "all": Counter(kinds.values())}
        for file, row in rows["files"].items():
            row |= about(unit, file)
        installed = next(given.peer.glob("deepspeed-*.dist-info")).name.split("-")[1]
        installed = installed.removesuffix(".dist")
        torch, own = f"torch {version('torch')}", f"hf_zero {version('hf_zero')}"
        more = [str(given.also)] if given.also else []
        chosen = given.files or [file for file, kind in kinds.items() if kind == given.kind]
        for start in range(0, len(chosen), given.batch):
            files = chosen[start : start + given.batch]
            if until.passed:
                break
            some = {file: rows["files"].get(file, {}) | about(unit, file) for file in files}
            peer = Run(source / "tests", [str(given.peer)], False, given.limit)
            over_peer(some, peer, f"deepspeed {installed}, {torch}", until)
            facade = Run(source / "tests", [str(ROOT), *more], True, given.limit)
            over_facade(some, facade, f"{own}, {torch}", given.again, until)
            rows["files"] |= some
            for file, row in some.items():
                tests, ours = row["peer"]["passed"], row["facade"]
                said = f"{len(ours['failed'])} of {len(tests)} fail, {len(ours['not_run'])} not run"
                print(f"{file}: {said}", flush=True)
            write(rows, kinds)
        write(rows, kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
