"""What waits for checkpoints that are being written is done once, when all of them in its folder
are whole, and never when one fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.checkpoint import pending


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(pending, "_pending", {})
    return []


def test_at_once_where_nothing_is_written(tmp_path: Path, done: list[str]) -> None:
    pending.begun(tmp_path / "other" / "global_step1")
    pending.once_whole(tmp_path / "run", lambda: done.append("run"))
    pending.once_whole(tmp_path / "other" / "global_step1", lambda: done.append("beside"))
    assert done == ["run", "beside"]


def test_after_the_last_of_several(tmp_path: Path, done: list[str]) -> None:
    for name in ("pytorch_model", "pytorch_model_1"):
        pending.begun(tmp_path / "state" / name)
    pending.once_whole(tmp_path, lambda: done.append("run"))
    for name in ("pytorch_model_1", "pytorch_model"):
        assert not done
        pending.ended(tmp_path / "state" / name, whole=True)
    assert done == ["run"]
    pending.ended(tmp_path / "state" / "pytorch_model", whole=True)
    assert done == ["run"]


@pytest.mark.parametrize("fails", [0, 1])
def test_not_where_one_fails(fails: int, tmp_path: Path, done: list[str]) -> None:
    for index in range(2):
        pending.begun(tmp_path / str(index))
    pending.once_whole(tmp_path, lambda: done.append("run"))
    for index in range(2):
        pending.ended(tmp_path / str(index), whole=index != fails)
    assert not done
    pending.once_whole(tmp_path, lambda: done.append("next"))
    assert done == ["next"]


def test_a_folder_by_another_way_to_it(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    pending.begun(Path("run") / "step")
    pending.once_whole(tmp_path / "link", lambda: done.append("run"))
    assert not done
    pending.ended(Path("run") / "step", whole=True)
    assert done == ["run"]
