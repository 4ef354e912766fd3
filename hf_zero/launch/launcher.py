"""Run ``torch.distributed.run`` or ``accelerate.commands.launch`` as ``python -m`` does, bind its
store to the address of the rendezvous, and report a failing rank in one line.

    python -m hf_zero.launch.launcher torch.distributed.run --nproc-per-node 2 train.py

A rank prints its own error. The launchers add their own traceback and a table, which say nothing
about that error and are left out.
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from hf_zero.distributed.torchrun import bind_rendezvous, signal_ranks_alone, start_ranks_whole
from hf_zero.distributed.uncaught import shows_tracebacks

# about the ends of ranks, which are reported below, and about files of torchrun's own
NOISE = ("failed (exitcode", "closing signal", "no error file defined for parent")
THREADS = "OMP_NUM_THREADS"
HANDLED = "PET_SIGNALS_TO_HANDLE"  # the default of --signals-to-handle of torchrun
STOPPED = (-signal.SIGTERM, -signal.SIGABRT)  # ends of ranks that follow another
LONGEST = 160  # characters of an error that are repeated at the end
# messages of torchrun and accelerate launch about a rendezvous port in use
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
IGNORED = signal.SIG_IGN  # of SIGHUP under nohup
TAKEN = re.compile(r"port:? `?(\d+).*(?:EADDRINUSE|another process is utilizing it)", re.DOTALL)
LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
    "torch.distributed.run",
    "__main__",  # the same module, run as a program
)


def main() -> int:
    """Run the launcher named by the first argument. Returns the exit code of the rank that failed
    first, as a shell would give it.
    """
    launcher = sys.argv[1]
    sys.argv = sys.argv[1:]
    # torchrun hands these to the ranks; any other signal ends it and leaves them behind
    handled = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) is not IGNORED]
    os.environ.setdefault(HANDLED, ",".join(handled))
    whole = shows_tracebacks()
    for name in () if whole else LOGGERS:
        logging.getLogger(name).addFilter(_wanted)
    bind_rendezvous()
    signal_ranks_alone()
    start_ranks_whole()
    try:
        runpy.run_module(launcher, run_name="__main__", alter_sys=True)
    except Exception as error:
        ended = _ended(error)
        if ended is None:
            raise
        if whole:
            traceback.print_exc()
        code, message = ended
        print(f"hf-zero launch: {message}", file=sys.stderr, flush=True)
        return code
    return 0


def _wanted(record: logging.LogRecord) -> bool:
    """Return whether a message of torchrun is shown; its notice of threads becomes one line."""
    message = record.getMessage()
    if THREADS in message:
        print(
            f"hf-zero launch: torch uses one CPU thread in each rank, as torchrun sets it; set "
            f"{THREADS} for more",
            file=sys.stderr,
            flush=True,
        )
        return False
    return not any(part in message for part in NOISE)


def _ended(error: Any) -> tuple[int, str] | None:
    """Return the exit code and a message: the rank that failed and its end, or that a port is in
    use. None for another error of the launcher itself.
    """
    kind = type(error).__name__
    if kind == "ChildFailedError":
        rank, failure, why = _first(error.failures)
        others = len(error.failures) - 1
        note = f"; {others} other{'s' if others > 1 else ''} ended after it" if others else ""
        # a rank with an error of its own ends with 1, unless torchrun stops it while it ends
        code = 1 if why and failure.exitcode == -signal.SIGTERM else failure.exitcode
        return _described(f"rank {rank} (pid {failure.pid})", code, why + note)
    if kind == "SignalException":  # a signal to the launcher itself, which has ended the ranks
        return _described("this launcher", -error.sigval, "")
    if taken := TAKEN.search(str(error)):
        return 1, (
            f"port {taken[1]}, where the ranks are to meet, is taken on this machine; leave "
            "--master-port out for a free one, or pass another (main_process_port in a YAML; "
            "0 is a free one)"
        )
    if kind == "CalledProcessError":  # accelerate launch with one process and no torchrun
        return _described("the script", error.returncode, "")
    return None


def _first(failures: Mapping[int, Any]) -> tuple[int, Any, str]:
    """Return the rank that failed first, its failure, and its error if it has recorded one
    (``distributed/uncaught.py``): a rank that has none may have followed another. Of ranks with
    the same error, it is the lowest, which has printed it.
    """
    errors: dict[int, str] = {}
    for rank, failure in failures.items():
        message = failure.error_file_data.get("message")
        if isinstance(message, dict):
            errors[rank] = message["message"]

    def order(rank: int) -> tuple[int, int, int]:
        # torchrun notes all ends at once: a rank that follows another fails, or is stopped
        code = failures[rank].exitcode
        follows = 2 if code in STOPPED else 1 if code == 1 else 0
        return follows, failures[rank].timestamp, rank

    rank = min(errors or failures, key=order)
    ended = (1, -signal.SIGTERM)  # with its error; torchrun may stop it while it ends
    alike = [n for n in errors if errors[n] == errors[rank] and failures[n].exitcode in ended]
    rank = min(alike, default=rank)
    error = _short(errors.get(rank, ""))
    return rank, failures[rank], f" ({error})" if error else ""


def _short(error: str) -> str:
    """Return ``CLASS: MESSAGE`` whole if it is short, else its first sentence or clause, else the
    class alone: the rank has printed the rest.
    """
    first, *_ = re.split(r"(?<=\w\w)[.;] ", error)
    for part in (error.rstrip(":"), first):
        if len(part) <= LONGEST:
            return part
    return error.partition(": ")[0]


def _described(who: str, code: int, note: str) -> tuple[int, str]:
    if code >= 0:
        return code or 1, f"{who} ended with code {code}{note}"
    name = (
        signal.Signals(-code).name
        if -code in signal.Signals.__members__.values()
        else f"signal {-code}"
    )
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    return 128 - code, f"{who} was ended by {name}{hint}{note}"


if __name__ == "__main__":
    sys.exit(main())
