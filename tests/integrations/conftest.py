"""Fixtures for tests of the libraries and the recipes."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def alone_and_by_references(plain_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that no launcher started, and kernels in plain torch on GPUs, too: what they
    compute is tested elsewhere.
    """
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
