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
import time
from contextlib import suppress
from typing import Any

GRACE_SECONDS = 40.0  # longer than the 30 s that torchrun gives its ranks
CANNOT_START = 127
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 0.1
KILLS = 5  # passes over the descendants, which may start others meanwhile


class _Flag:
    """A request to end."""

    is_set = False

    def set(self) -> None:
        self.is_set = True


def main() -> int:
    """Carry out the order on standard input. Returns the command's exit code, as a shell does."""
    line = sys.stdin.readline() if sys.stdin else ""
    if not line.endswith("\n"):
        return CANNOT_START  # the caller is gone, and may not have written all of it
    order = json.loads(line)
    _adopt_orphans()
    # The flag is polled: an Event's lock can deadlock where a second signal interrupts the handler
    # of the first.
    told = _Flag()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before there is a child
        signal.signal(number, lambda *_: told.set())
    try:
        child = subprocess.Popen(
            order["command"],
            env={**os.environ, **order["environment"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_terminate_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        print(f"hf-zero: cannot start {order['command'][0]}: {error}", file=sys.stderr, flush=True)
        return CANNOT_START
    threading.Thread(target=_watch_input, args=(told,), daemon=True).start()
    while child.poll() is None and not told.is_set:
        time.sleep(POLL_SECONDS)
    end(child, GRACE_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end(child: subprocess.Popen[Any], grace: float) -> None:
    """Terminate ``child``, then its descendants in any session, and kill what is left after
    ``grace`` seconds. If it has failed by itself, kill its descendants; if it has ended with 0, let
    them live.
    """
    if child.poll() is None:
        deadline = time.monotonic() + grace
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _signal_descendants(signal.SIGTERM, max(0.0, deadline - time.monotonic()))
    elif not child.returncode:
        return
    for _ in range(KILLS):
        _signal_descendants(signal.SIGKILL, 1.0)


def _signal_descendants(number: signal.Signals, timeout: float) -> None:
    """Send a signal to all descendants of this process, and wait until they have ended, at most
    ``timeout`` seconds.
    """
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    psutil.wait_procs(left, timeout)


def _adopt_orphans() -> None:
    """Adopt orphaned descendants, so that this process can find and end them (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _terminate_with_parent() -> None:
    """Have the system terminate this process, a child, if the agent itself is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _watch_input(told: _Flag) -> None:
    while os.read(0, 4096):
        continue
    told.set()


if __name__ == "__main__":
    sys.exit(main())
