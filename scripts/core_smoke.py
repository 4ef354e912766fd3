"""Runs one kernel of the installed native core with the standard library alone and compares its
result; cibuildwheel calls it for each wheel.

    python scripts/core_smoke.py
"""

from __future__ import annotations

import argparse
import math
from array import array

import hf_zero
from hf_zero import _cpu as core

FP32 = 0  # the number of the dtype in kernels/cpu


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    values = array("f", [index / 7 for index in range(1000)])
    expected = math.fsum(value * value for value in values)
    for name in core.instruction_sets():
        core.set_instruction_set(name)
        found = core.squared_norm(values.buffer_info()[0], FP32, len(values))
        if not math.isclose(found, expected, rel_tol=1e-6):
            raise SystemExit(f"{name}: squared norm {found}, expected {expected}")
    print(f"hf-zero {hf_zero.__version__}: {', '.join(core.instruction_sets())} agree")


if __name__ == "__main__":
    main()
