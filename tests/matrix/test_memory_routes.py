"""Jobs of the Trainer and Accelerate on two ranks, each on a host of its own: one ends without a
word, and the next attempt goes on from the memory of the hosts, on other ranks too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launched
from tests.helpers.cells import fast

SCRIPT = Path(__file__).parent / "scripts" / "memory_routes.py"


def attempt(out: Path, memory: Path, *arguments: str, ranks: int = 2) -> list[dict[str, Any]]:
    return launched.torchrun(SCRIPT, out, "--memory", str(memory), *arguments, ranks=ranks)


def failed_attempt(out: Path, memory: Path, *arguments: str) -> None:
    command = launched.torchrun_command(SCRIPT)
    more = ["--memory", str(memory), "--fails", "5", *arguments]
    with launched.started(command, out, more) as process:
        assert launched.ended(process, 300) != 0
    assert list(memory.glob("hf-zero-*-job/*/engine-0/slot-*/rank-*.json"))


@pytest.mark.parametrize("route", fast(["trainer", "accelerate"], lambda route: route == "trainer"))
def test_the_next_attempt_is_as_if_nothing_had_happened(route: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    whole = attempt(tmp_path / "whole", tmp_path / "other", "--route", route)
    failed_attempt(tmp_path / "failed", memory, "--route", route)
    resumed = attempt(tmp_path / "resumed", memory, "--route", route, "--resume")
    for found, wanted in zip(resumed, whole, strict=True):
        assert found["begins"] == 4
        assert found["losses"] == wanted["losses"][len(wanted["losses"]) - len(found["losses"]) :]
    assert not memory.exists() or not list(memory.iterdir())


@pytest.mark.parametrize("ranks", fast([1, 4], lambda ranks: ranks == 1))
def test_a_trainer_on_other_ranks_keeps_the_samples_of_a_step(ranks: int, tmp_path: Path) -> None:
    """The host of rank 1 is lost: its file comes from its copy."""
    memory, given = tmp_path / "memory", ("--route", "trainer", "--dropout", "0")
    whole = attempt(tmp_path / "whole", tmp_path / "other", *given)
    failed_attempt(tmp_path / "failed", memory, *given)
    shutil.rmtree(next(memory.glob("hf-zero-*-job/b")))
    for found in attempt(tmp_path / "resumed", memory, *given, "--resume", ranks=ranks):
        assert found["begins"] == 4 and found["accumulation"] == 4 // ranks
        if found["losses"]:  # those of rank 0
            assert found["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)


@pytest.mark.long
def test_a_trainer_on_ranks_that_cannot_keep_them_is_refused(tmp_path: Path) -> None:
    memory, given = tmp_path / "memory", ("--route", "trainer")
    failed_attempt(tmp_path / "failed", memory, *given)
    more = ["--memory", str(memory), "--resume", *given]
    with launched.started(launched.torchrun_command(SCRIPT, 3), tmp_path / "three", more) as job:
        assert launched.ended(job, 300) not in (0, None)
    said = (tmp_path / "three" / "log.txt").read_text()
    assert "was saved with steps of 8 samples by 2 data-parallel ranks" in said
    assert "micro-batches of 2 on 3 ranks do not make; start 1 or 2 or 4 or 8 of them" in said
