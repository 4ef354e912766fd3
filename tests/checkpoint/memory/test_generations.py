"""Generations in the memory of hosts: what a restarted job goes on from, whatever was lost."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.memory.jobs import Kept, attempt, heard, hosts, same

__all__ = ["heard", "hosts"]


def with_folders(setup: Kept, tmp_path: Path) -> Kept:
    (tmp_path / "disk").mkdir()
    return dataclasses.replace(setup, folder=tmp_path / "disk", base=tmp_path / "memory")


ROWS = [Kept(stage=stage) for stage in range(4)]


@pytest.mark.parametrize("setup", ROWS, ids=lambda setup: f"stage {setup.stage}")
def test_a_restart_goes_on_as_if_nothing_had_happened(setup: Kept, tmp_path: Path) -> None:
    setup = with_folders(setup, tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert [first for first, *_ in resumed] == [3, 3]
    same(resumed, whole)


def test_the_files_of_a_lost_host_come_from_their_copies(tmp_path: Path) -> None:
    setup = with_folders(Kept(ranks=4, hosts="aabb"), tmp_path)
    whole = attempt(dataclasses.replace(setup, base=tmp_path / "other"), range(6))
    attempt(setup, range(3))
    shutil.rmtree(setup.folder_of("b"))
    resumed = attempt(setup, range(6), tmp_path / "disk")
    assert [first for first, *_ in resumed] == [3] * 4
    same(resumed, whole)
