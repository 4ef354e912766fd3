"""An interrupt at any line of a save or a load on one of two ranks, caught there: both get the
checkpoint or an error, and none waits until the timeout.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gloo import interrupted
from tests.helpers.cells import runs_long

KINDS = ("save", "background", "load")
FAST, LONG = 1, 60  # lines of each kind


def test_an_interrupt_on_one_rank_leaves_no_other_waiting(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    count = LONG if runs_long(pytestconfig) else FAST
    draws = random.Random(0)
    cases = [(kind, (at + draws.random()) / count) for kind in KINDS for at in range(count)]
    launched = [sys.executable, "-m", interrupted.__name__, str(tmp_path), json.dumps(cases)]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    wrong = []
    for folder in tmp_path.iterdir():
        told = [folder / f"rank-{rank}" for rank in range(2)]
        became = [json.loads(path.read_text())[0] if path.exists() else "hangs" for path in told]
        if not all(each == "done" or each.startswith("refused") for each in became):
            wrong.append(f"{folder.name}: {became}")
    assert not wrong, "\n".join(wrong)
