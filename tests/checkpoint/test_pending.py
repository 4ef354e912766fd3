"""Work deferred until async saves end: it runs once, when all checkpoints in its folder are
complete, and never if one fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.checkpoint import async_save


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(async_save, "_in_flight", {})
    return []


def test_at_once_where_nothing_is_written(tmp_path: Path, done: list[str]) -> None:
    async_save.started(tmp_path / "other" / "global_step1")
    async_save.after_commit(tmp_path / "run", lambda: done.append("run"))
    async_save.after_commit(tmp_path / "other" / "global_step1", lambda: done.append("beside"))
    assert done == ["run", "beside"]


def test_after_the_last_of_several(tmp_path: Path, done: list[str]) -> None:
    for name in ("pytorch_model", "pytorch_model_1"):
        async_save.started(tmp_path / "state" / name)
    async_save.after_commit(tmp_path, lambda: done.append("run"))
    for name in ("pytorch_model_1", "pytorch_model"):
        assert not done
        async_save.finished(tmp_path / "state" / name, whole=True)
    assert done == ["run"]
    async_save.finished(tmp_path / "state" / "pytorch_model", whole=True)
    assert done == ["run"]


@pytest.mark.parametrize("fails", [0, 1])
def test_not_where_one_fails(fails: int, tmp_path: Path, done: list[str]) -> None:
    for index in range(2):
        async_save.started(tmp_path / str(index))
    async_save.after_commit(tmp_path, lambda: done.append("run"))
    for index in range(2):
        async_save.finished(tmp_path / str(index), whole=index != fails)
    assert not done
    async_save.after_commit(tmp_path, lambda: done.append("next"))
    assert done == ["next"]


def test_a_folder_by_another_way_to_it(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    async_save.started(Path("run") / "step")
    async_save.after_commit(tmp_path / "link", lambda: done.append("run"))
    assert not done
    async_save.finished(Path("run") / "step", whole=True)
    assert done == ["run"]
