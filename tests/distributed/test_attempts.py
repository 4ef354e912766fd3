"""The ranks of one attempt meet in a store that may hold what earlier attempts left."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_zero.distributed import attempts
from hf_zero.distributed.attempts import store_of_attempt, wait_for_store
from hf_zero.errors import LaunchError
from hf_zero.launch.hosts import free_port

LIMIT = timedelta(seconds=60)


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT)


def test_missing_ranks_are_named_on_all_ranks(connect, capfd):
    """Ranks 1 and 3 never come; rank 2 reports what rank 0 has found."""

    def error_of(rank, seconds):
        with pytest.raises(LaunchError) as caught:
            store_of_attempt(connect(), rank, 4, timedelta(seconds=seconds))
        return str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(error_of, (0, 2), (1, 30))
    assert first == other
    assert "rank 0 has waited 1 s, which is the timeout, for ranks 1, 3. " in first
    assert "waitForInput" not in capfd.readouterr().err  # torch's lines for a wait that timed out


def test_rank_0_never_comes(connect):
    with pytest.raises(
        LaunchError, match=r"rank 1 has waited 0 s.* for rank 0, which has not come"
    ):
        store_of_attempt(connect(), 1, 2, timedelta(seconds=0.1))


def test_no_program_listens(monkeypatch):
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
    port = free_port()
    with pytest.raises(LaunchError, match=r"nothing has answered for 1 s.* \(Connection refused\)"):
        wait_for_store("127.0.0.1", port, 1)


def test_a_program_listens_later(monkeypatch):
    """Ranks may begin before the one that hosts the store."""
    monkeypatch.setattr(attempts, "LAST_PAUSE", 0.05)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(attempts.time, "sleep", lambda seconds: server.listen())
        wait_for_store(*server.getsockname(), 60)
