"""The agent on each host: reads its order from standard input, starts the ranks, and ends them when
the input ends.

The order is one line of JSON: ``{"command": [...], "environment": {...}}``. It is not passed on the
command line, which would go through two shells and be visible to all users of the machine. The
input stays open as long as the process that gave the order lives: whether that process is killed,
loses its connection or exits, the agent notices, and no rank is left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

GRACE_SECONDS = 40.0  # longer than the 30 s that torchrun gives its ranks
CANNOT_START = 127
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Carry out the order on standard input. Returns the command's exit code, as a shell does."""
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return CANNOT_START  # standard input is closed: the caller is gone
    _adopt_orphans()
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before there is a child
        signal.signal(number, lambda *_: ending.set())
    try:
        child = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"hf-zero: cannot start {order['command'][0]}: {error}", file=sys.stderr, flush=True)
        return CANNOT_START
    threading.Thread(target=_watch_input, args=(ending,), daemon=True).start()
    threading.Thread(target=_watch_child, args=(child, ending), daemon=True).start()
    ending.wait()
    end(child, order.get("grace", GRACE_SECONDS))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end(child: subprocess.Popen[Any], grace: float) -> None:
    """Terminate ``child``, and kill it after ``grace`` seconds. If it failed, also kill all of its
    descendants, in any session.
    """
    import psutil

    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.returncode:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _adopt_orphans() -> None:
    """Adopt orphaned descendants, so that this process can find and kill them (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _watch_input(ending: threading.Event) -> None:
    while os.read(0, 4096):
        continue
    ending.set()


def _watch_child(child: subprocess.Popen[Any], ending: threading.Event) -> None:
    child.wait()
    ending.set()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for the thread that reads the input
