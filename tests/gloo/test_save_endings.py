"""Real ranks that end while a checkpoint is being written: whole where they could finish, else
not to be seen.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hf_zero.checkpoint import verify_checkpoint
from tests.helpers.launched import plainly

SCRIPT = Path(__file__).with_name("saving_ending.py")
LIMIT = 120.0  # seconds: less than the timeout of the configuration


@pytest.mark.parametrize(
    "way, whole",
    [
        pytest.param("return", True, marks=pytest.mark.long),
        pytest.param("raise", True, marks=pytest.mark.long),
        ("kill", False),
        ("full", False),
    ],
)
def test_a_rank_ends_while_a_checkpoint_is_written(way: str, whole: bool, tmp_path: Path) -> None:
    begun = time.monotonic()
    codes, outputs = zip(*plainly(SCRIPT, way, str(tmp_path), limit=LIMIT))
    assert time.monotonic() - begun < LIMIT
    assert all((code == 0) == (way in ("return", "full")) for code in codes), outputs
    if way == "full":  # nobody is left to raise it to
        assert all(
            "No space left on device" in output
            and "free space or save into another folder" in output
            for output in outputs
        ), outputs
    assert (tmp_path / "latest").read_text() == ("new" if whole else "old"), outputs
    assert verify_checkpoint(tmp_path).problems == ()
    assert (tmp_path / "new").exists() == whole
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".hf-zero-saving-new")], (
        "rank 0 has cleaned up"
    )
