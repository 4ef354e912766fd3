"""SIGINT ends one or both ranks at any moment of a save: all end, no process is aborted, and each
checkpoint is whole. A signal to the group of one rank and the workers of its loader: one save.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from hf_zero.checkpoint import verify_all
from tests.helpers.cells import fast
from tests.helpers.launched import plainly

SCRIPT = Path(__file__).with_name("signalled_save.py")
LIMIT, LONGEST = 120.0, 0.6  # seconds: far below the timeout; until the signal
INTERRUPTED, FAILED, STOPPED = -signal.SIGINT, 1, 85
CELLS = [(what, number) for what in ("one", "all", "group") for number in range(10)]


@pytest.mark.parametrize("what, number", fast(CELLS, lambda what, number: number == 0))
def test_ranks_end_and_checkpoints_are_whole(what: str, number: int, tmp_path: Path) -> None:
    seconds = random.Random(f"{what} {number}").uniform(0.0, LONGEST)
    ended = plainly(SCRIPT, str(tmp_path / "run"), what, f"{seconds:.3f}", limit=LIMIT)
    codes, outputs = zip(*ended, strict=True)
    found = list(verify_all(tmp_path / "run", progress=False))
    assert all(each.whole for each in found), [each.problems for each in found]
    names = {each.folder.name for each in found}
    assert (tmp_path / "run" / "latest").read_text().strip() in names
    if what == "group":
        assert codes == (STOPPED, STOPPED) and len(names) == 1, outputs
        return
    # with both, one rank may meet the end of the other before its own signal
    assert codes[1] == INTERRUPTED or (what == "all" and INTERRUPTED in codes), outputs
    assert set(codes) <= {INTERRUPTED, FAILED}, outputs
    if codes[0] == FAILED:
        assert "rank 1 has failed: KeyboardInterrupt" in outputs[0]
