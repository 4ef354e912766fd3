"""The program of one rank of a comparison: ``python -m hf_zero.parity.rank RUN.json SCRIPT ...``
runs the script as RUN.json says.
"""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

from hf_zero.parity.runs import ComparedRun, recording

SEED = 0


def seed() -> None:
    """Seed all generators: a script that seeds none of them draws the same in each run."""
    import numpy
    import torch

    random.seed(SEED)
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)


def main(arguments: list[str]) -> None:
    file, script, *rest = arguments
    run = ComparedRun.read(Path(file))
    seed()
    sys.argv = [script, *rest]
    with recording(run, ends_process=True):
        try:
            if run.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(script).resolve().parent)
                runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise


if __name__ == "__main__":
    main(sys.argv[1:])
