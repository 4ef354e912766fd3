"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import pytest

from hf_zero.checkpoint.save_log import SaveLog


@pytest.fixture
def without_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the file for other jobs of this host, which is not in the folder of the run."""
    monkeypatch.setattr(SaveLog, "note", lambda self, save: None)
    monkeypatch.setattr(SaveLog, "others", lambda self: {})
