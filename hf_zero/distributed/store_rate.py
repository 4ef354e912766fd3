"""The rate at which a store of this host answers, for simulations of more ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from hf_zero.distributed.store import STORE_SECONDS


def requests_a_second(clients: int = 4, calls: int = 500) -> float:
    """Return the requests a second that a store of this host answers ``clients`` threads, each of
    which sends ``calls``. Their time is part of it, so a store alone may answer more.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=STORE_SECONDS)

    def ask(client: dist.TCPStore) -> None:
        for number in range(calls // 2):
            client.set(f"key {number}", "value")
            client.check([f"key {number}"])

    threads = [
        threading.Thread(
            target=ask,
            args=(dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit),),
        )
        for _ in range(clients)
    ]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * 2 * (calls // 2) / (time.perf_counter() - begun)
