"""A disk that fails on one rank, and a rank that is killed, while state is in files: all ranks
end with words, and no file is left.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.gloo.test_endings import LIMIT
from tests.helpers.launched import plainly

SCRIPT = Path(__file__).with_name("offload_ending.py")


def check(way: str, odd: int, stage: int, disk: Path) -> None:
    found = plainly(SCRIPT, way, str(odd), str(stage), str(disk), limit=LIMIT)
    (code, own), (other_code, other) = found[odd], found[1 - odd]
    assert other_code == 1 and code == (-9 if way == "kill" else 1), own + other
    if way == "read":
        assert re.search(
            rf"OSError: \[Errno 5\] Input/output error \(reading .* of rank {odd};.*{disk}", own
        ), own
        assert re.search(
            rf"rank {odd} has failed: OSError: \[Errno 5\] Input/output error", other
        ), other
    elif way == "write":
        for output in (own, other):
            assert re.search(
                rf"OffloadError: a write of offloaded state has failed: rank {odd}: "
                rf"\[Errno 28\].*{disk}",
                output,
            ), output
    elif way == "no room":
        assert "Error" in own and re.search(r"ulimit|RLIMIT_FSIZE|file size", own), own
        assert re.search(rf"rank {odd}|does not fit", other), other
    else:
        assert re.search(rf"rank {odd}.* died", other), other
    assert list(disk.iterdir()) == [], "files are left behind"


@pytest.mark.parametrize("way, odd, stage", [("read", 1, 3)])
def test_a_disk_that_fails_on_one_rank_ends_both(
    way: str, odd: int, stage: int, tmp_path: Path
) -> None:
    check(way, odd, stage, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "way, odd, stage",
    [
        ("read", 0, 0),
        ("read", 1, 2),
        ("write", 1, 3),
        ("write", 0, 2),
        ("no room", 0, 3),
        ("no room", 1, 2),
        ("kill", 1, 3),
        ("kill", 0, 2),
        ("kill", 1, 0),
    ],
)
def test_every_end(way: str, odd: int, stage: int, tmp_path: Path) -> None:
    check(way, odd, stage, tmp_path)
