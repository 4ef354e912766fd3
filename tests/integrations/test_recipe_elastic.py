"""The recipe of hosts that fail and return: what its driver reports, refuses and removes."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from tests.integrations.test_recipes import RECIPES, module_of

ELASTIC = RECIPES / "elastic"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module_of(ELASTIC / "hosts.py")


def row(seconds: float, event: str, step: int, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "event": event, "step": step, **more}


def test_a_kill_after_the_last_step_is_reported(
    hosts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(0, "begun", 0), row(1, "step", 1, loss=3.0), row(2, "killed", 1, host=2),
        row(3, "begun", 0), row(4, "step", 1, loss=3.0), row(6, "step", 2, loss=2.0),
    ]  # fmt: skip
    last, end = [row(7, "killed", 2, host=0)], [row(8, "ended", 2)]
    assert hosts.lost([*rows, *last, *end]) == [(2, 1, 1, 4), (0, 2, None, None)]
    assert hosts.lost([*rows, *last, row(7.5, "begun", 1), *end])[1] == (0, 2, 1, None)
    hosts.report({"memory": [*rows, *last, *end]}, "names", tmp_path)
    line = next(line for line in capsys.readouterr().out.splitlines() if "—" in line)
    assert line.split() == ["memory", "0", "2", "—", "—"]
    assert (tmp_path / "loss_over_seconds.svg").is_file()


def test_a_store_that_does_not_start_is_named(
    hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(hosts, "PORT", taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"port {hosts.PORT} of 127.0.0.1"):
            hosts.Hosts(1, None, next(iter(hosts.RUNS)), Namespace(output_dir=tmp_path))


def test_the_end_removes_what_hosts_have_in_memory(
    hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "STORE", "print('ready', flush=True)")
    started = hosts.Hosts(1, None, next(iter(hosts.RUNS)), Namespace(output_dir=tmp_path))
    memory = Path(f"/dev/shm/hf-zero-0-run-{started.job}")
    (memory / "host-0").mkdir(parents=True)
    started.close()
    assert not memory.exists()


def test_the_batch_of_the_card_suits_hosts_of_eight_ranks() -> None:
    card = (ELASTIC / "README.md").read_text()
    assert "192 for 8, 16, 24 and 32 ranks" in card and "--nproc_per_node 8" in card
    config = ZeroConfig.from_file(ELASTIC / "memory.json").to_dict()
    for ranks in (8, 16, 24, 32):
        ZeroConfig.from_dict(config | {"train_batch_size": 192}).resolve(ranks)
        with pytest.raises(ConfigError, match="train_batch_size = 24"):
            ZeroConfig.from_dict(config).resolve(ranks)
