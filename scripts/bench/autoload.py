"""CPU time that ``hf_zero.pth`` adds to the start of a Python process, by state of this repository.

    python scripts/bench/autoload.py BEFORE [AFTER]

BEFORE and AFTER are folders with a checkout of each (`git worktree add`); AFTER is this one by
default. The states take turns; each row is the least of many starts. Rows go to
results/autoload-DATE.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
TURNS = 40
LINE = "import hf_zero._autoload; hf_zero._autoload.register()"


def start(folder: Path, code: str) -> float:
    """Return the milliseconds of CPU time of a process whose path begins with ``folder``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-S", "-c", f"import site; {code}"], cwd=folder, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=HERE.parents[2])
    given = parser.parse_args()
    cases = {
        "nothing registered": (given.after, "pass"),
        "before": (given.before, LINE),
        "after": (given.after, LINE),
    }
    least = dict.fromkeys(cases, float("inf"))
    for _ in range(TURNS):
        for name, (folder, code) in cases.items():
            least[name] = min(least[name], start(folder, code))
    rows = [
        {"case": name, "cpu_ms": round(value, 2), "starts": TURNS, "python": sys.version.split()[0]}
        for name, value in least.items()
    ]
    path = HERE.parent / "results" / f"autoload-{time.strftime('%Y-%m-%d')}.jsonl"
    with open(path, "a") as file:
        for row in rows:
            print(line := json.dumps(row))
            file.write(line + "\n")


if __name__ == "__main__":
    main()
