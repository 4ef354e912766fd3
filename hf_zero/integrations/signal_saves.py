"""Saves of the Trainer and of Lightning on SIGTERM and SIGUSR1: all ranks save after the same step,
and end with the code :data:`STOPPED`.

A handler only notes its signal; ``zero/step/preemption.py`` has the ranks agree on the step.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from hf_zero.integrations.engine_protocol import EngineProtocol

STOPPED = 85  # ERESTART of Linux: a job script queues such a run again
_ending: list[object] = []  # keeps the handlers, which hold their requests weakly, until the exit


def listen(engine: EngineProtocol, *others: int) -> None:
    """Listen for SIGTERM, and for SIGUSR1 and ``others`` unless something handles them. Threads
    beside the main one get no signals: such a run stops if another rank does.
    """
    if threading.current_thread() is not threading.main_thread():
        engine.stop_on()
        return
    more = {signal.SIGUSR1, *others} - {signal.SIGTERM}
    engine.stop_on(signal.SIGTERM, *(number for number in more if not _is_handled(number)))


def _is_handled(number: int) -> bool:
    """Return whether Python or native code, such as faulthandler's, handles signal ``number``."""
    status = Path("/proc/self/status")
    caught = re.search(r"SigCgt:\s*(\w+)", status.read_text()) if status.exists() else None
    native = caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return native or signal.getsignal(number) is not signal.SIG_DFL


def stop_listening(engine: EngineProtocol, goes_on: bool = False) -> None:
    """Restore the handlers at the end of a run. A signal that was received after the last step
    acts now, if it has the default action and no exception ends the run. ``goes_on``: the script
    goes on after a save on a signal.
    """
    stopped = engine.stop_requested
    if stopped and not goes_on:
        return  # the process is about to end, and no other signal must end it earlier
    received = [] if stopped else engine.stop_requests.received
    engine.stop_on()
    for number in received:
        if signal.getsignal(number) is signal.SIG_DFL and sys.exc_info()[1] is None:
            os.kill(os.getpid(), number)


def end(engine: EngineProtocol, kind: type[SystemExit] = SystemExit) -> NoReturn:
    """Raise SystemExit with :data:`STOPPED` once the checkpoint is complete. Collective."""
    engine.wait_for_checkpoint()
    _ending.append(engine.stop_requests)
    log_rank0(f"the checkpoint is complete: ending with code {STOPPED}")
    raise kind(STOPPED)
