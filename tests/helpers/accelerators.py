"""An accelerator that is not there, as far as hf_zero asks which one and how many."""

from __future__ import annotations

import pytest

from hf_zero.device import kinds


def play_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", count: int = 1) -> None:
    """``count`` devices of ``kind`` are here, the first of them current; 0: none."""
    monkeypatch.setattr(kinds, "accelerator", lambda: kind if count else None)
    monkeypatch.setattr(kinds, "device_count", lambda: count)
    monkeypatch.setattr(kinds, "current_index", lambda device: 0)
    monkeypatch.setattr(kinds, "set_device", lambda device: None)
