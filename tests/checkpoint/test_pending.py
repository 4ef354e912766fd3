"""Work deferred until async saves end: it runs once, when all checkpoints in its folder are
complete, and never if one fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_zero.checkpoint import save_job


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(save_job, "_in_flight", {})
    return []


def test_at_once_where_nothing_is_written(tmp_path: Path, done: list[str]) -> None:
    save_job.started(tmp_path / "other" / "global_step1")
    save_job.after_commit(tmp_path / "run", lambda: done.append("run"))
    save_job.after_commit(tmp_path / "other" / "global_step1", lambda: done.append("beside"))
    assert done == ["run", "beside"]


def test_after_the_last_of_several(tmp_path: Path, done: list[str]) -> None:
    for name in ("pytorch_model", "pytorch_model_1"):
        save_job.started(tmp_path / "state" / name)
    save_job.after_commit(tmp_path, lambda: done.append("run"))
    for name in ("pytorch_model_1", "pytorch_model"):
        assert not done
        save_job.finished(tmp_path / "state" / name, whole=True)
    assert done == ["run"]
    save_job.finished(tmp_path / "state" / "pytorch_model", whole=True)
    assert done == ["run"]


@pytest.mark.parametrize("fails", [0, 1])
def test_not_where_one_fails(fails: int, tmp_path: Path, done: list[str]) -> None:
    for index in range(2):
        save_job.started(tmp_path / str(index))
    save_job.after_commit(tmp_path, lambda: done.append("run"))
    for index in range(2):
        save_job.finished(tmp_path / str(index), whole=index != fails)
    assert not done
    save_job.after_commit(tmp_path, lambda: done.append("next"))
    assert done == ["next"]


def test_a_folder_by_another_way_to_it(
    tmp_path: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    save_job.started(Path("run") / "step")
    save_job.after_commit(tmp_path / "link", lambda: done.append("run"))
    assert not done
    save_job.finished(Path("run") / "step", whole=True)
    assert done == ["run"]
