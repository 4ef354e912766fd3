"""Addresses on which the launcher and its ranks listen."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hf_zero.distributed.torchrun import RendezvousStore
from tests.helpers.cells import in_one_item
from tests.helpers.commands import end_group

LIMIT_SECONDS = 240.0
SCRIPT = """
import os, time
import torch.distributed as dist
import hf_zero
hf_zero.init_distributed()
dist.barrier(dist.new_group())
open(f"started{{dist.get_rank()}}", "w").close()
time.sleep({limit})
"""
ALL = {"0.0.0.0", "::"}


def listening(process: psutil.Process) -> dict[int, str]:
    """The ports at which ``process`` listens, and their addresses."""
    found = process.net_connections("tcp")
    return {each.laddr.port: each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@contextlib.contextmanager
def launched(folder: Path) -> Iterator[psutil.Process]:
    """``hf-zero launch`` of ``train.py`` in ``folder``, once its two ranks have met."""
    command = [sys.executable, "-c", "from hf_zero.cli import main; main()", "launch"]
    environ = {name: text for name, text in os.environ.items() if "SOCKET_IFNAME" not in name}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--ranks", "2", "train.py"],
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not all((folder / f"started{rank}").exists() for rank in range(2)):
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        for each in psutil.Process(process.pid).children(recursive=True):
            each.kill()  # ranks lead sessions of their own
        end_group(process)


@pytest.mark.skipif(sys.platform != "linux", reason="gloo takes the interface of an address")
def test_a_launch_on_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(limit=2 * LIMIT_SECONDS))
    with launched(tmp_path) as launcher:
        addresses = [listening(each) for each in (launcher, *launcher.children(recursive=True))]
    assert addresses[0] and all(addresses[1:3]), "the store, and gloo in each rank"
    assert {ip for each in addresses for ip in each.values()} == {"127.0.0.1"}


def serve(address: str, port: int = 0) -> RendezvousStore:
    return RendezvousStore(
        address, port, None, True, timedelta(seconds=20), wait_for_workers=False, multi_tenant=True
    )


@in_one_item(
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
        ("127.0.0.2", {"127.0.0.2"}),  # another address of this host, as of one network of many
        (socket.gethostname(), ALL),  # other hosts may resolve it to another address
    ]
)
def test_a_store_listens_on_the_address_of_the_rendezvous(case: tuple[str, set[str]]) -> None:
    address, expected = case
    store = serve(address)
    assert listening(psutil.Process())[store.port] in expected
    again = serve(address, store.port)  # as torchrun does for its ranks: the server is shared
    client = dist.TCPStore(address, store.port, is_master=False, timeout=timedelta(seconds=20))
    client.set("key", "value")
    assert again.get("key") == b"value"
