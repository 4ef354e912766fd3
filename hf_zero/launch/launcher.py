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
from hf_zero.errors import LaunchError
from hf_zero.logging import counted

# messages about the ends of ranks, which are reported below, and about files of torchrun's own
NOISE = ("failed (exitcode", "closing signal", "no error file defined for parent")
THREADS = "OMP_NUM_THREADS"
HANDLED = "PET_SIGNALS_TO_HANDLE"  # the default of --signals-to-handle of torchrun
# torchrun hands these to the ranks; any other signal ends it and leaves them behind
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
STOPPED = (-signal.SIGTERM, -signal.SIGABRT)  # ends of ranks that follow another
# ends of a rank with an error of its own; torchrun may stop it while it ends
FAILED = (1, -signal.SIGTERM)
LONGEST = 160  # characters of an error that are repeated at the end
# messages of torchrun and accelerate launch about a rendezvous port in use
TAKEN = re.compile(r"port:? `?(\d+).*(?:EADDRINUSE|another process is utilizing it)", re.DOTALL)
LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.errors.error_handler",
    "torch.distributed.run",
    "__main__",  # the same module, run as a program
)


def main() -> int:
    """Run the launcher named by the first argument, in this process: with its messages shortened,
    SIGNALS handed to the ranks, and its store on the rendezvous address. Returns the exit code of
    the rank that failed first, as a shell would give it.
    """
    if len(sys.argv) < 2:
        raise LaunchError("no launcher is named; pass torch.distributed.run, for instance")
    launcher = sys.argv[1]
    sys.argv = sys.argv[1:]
    ignored = signal.SIG_IGN  # SIGHUP under nohup
    handled = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) is not ignored]
    os.environ.setdefault(HANDLED, ",".join(handled))
    shows_all = shows_tracebacks()
    for name in () if shows_all else LOGGERS:
        logging.getLogger(name).addFilter(_keep_or_shorten)
    bind_rendezvous()
    signal_ranks_alone()
    start_ranks_whole()
    try:
        runpy.run_module(launcher, run_name="__main__", alter_sys=True)
    except Exception as error:
        reported = _exit_of(error)
        if reported is None:
            raise
        if shows_all:
            traceback.print_exc()
        code, message = reported
        print(f"hf-zero launch: {message}", file=sys.stderr, flush=True)
        return code
    return 0


def _keep_or_shorten(record: logging.LogRecord) -> bool:
    """Return whether torchrun logs a message; print one line in place of its notice of threads."""
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


def _exit_of(error: Any) -> tuple[int, str] | None:
    """Return the exit code and a message for the error that ended a launcher: the end of a rank, or
    a port in use. None for another error of the launcher itself.
    """
    kind = type(error).__name__  # of torch.distributed, which hf_zero.distributed alone imports
    if kind == "ChildFailedError":
        rank, failure, message = _first_failure(error.failures)
        others = counted(len(error.failures) - 1, "other")
        note = f"; {others} ended, too" if len(error.failures) > 1 else ""
        code = 1 if message and failure.exitcode == -signal.SIGTERM else failure.exitcode
        return _exit_and_message(f"rank {rank} (pid {failure.pid})", code, message + note)
    if kind == "SignalException":  # a signal to this process, which has ended the ranks
        return _exit_and_message("this launcher", -error.sigval, "")
    if taken := TAKEN.search(str(error)):
        return 1, (
            f"port {taken[1]}, where the ranks are to meet, is taken on this machine; leave "
            "--master-port out for a free one, or pass another (main_process_port in a YAML; "
            "0 is a free one)"
        )
    if kind == "CalledProcessError":  # accelerate launch with one process, no torchrun
        return _exit_and_message("the script", error.returncode, "")
    return None


def _first_failure(failures: Mapping[int, Any]) -> tuple[int, Any, str]:
    """Return the rank that failed first as far as its end tells, its failure, and its error in
    brackets, if it has recorded one (``distributed/uncaught.py``).

    torchrun notes all ends at once, so their times order only ends of one kind: a rank without an
    error, one that was stopped, and one with exit code 1 may have followed another. Of ranks with
    the same error it is the lowest, which has printed it.
    """
    errors: dict[int, str] = {}
    for rank, failure in failures.items():
        message = failure.error_file_data.get("message")
        if isinstance(message, dict):
            errors[rank] = message["message"]

    def order(rank: int) -> tuple[int, int, int]:
        code = failures[rank].exitcode
        follows = 2 if code in STOPPED else 1 if code == 1 else 0
        return follows, failures[rank].timestamp, rank

    rank = min(errors or failures, key=order)
    alike = [n for n in errors if errors[n] == errors[rank] and failures[n].exitcode in FAILED]
    rank = min(alike, default=rank)
    error = _shortened(errors.get(rank, ""))
    return rank, failures[rank], f" ({error})" if error else ""


def _shortened(error: str) -> str:
    """Return ``CLASS: MESSAGE`` whole if it is short, else its first sentence or clause, else the
    class alone: the rank has printed the rest.
    """
    first, *_ = re.split(r"(?<=\w\w)[.;] ", error)
    for part in (error.rstrip(":"), first):
        if len(part) <= LONGEST:
            return part
    return error.partition(": ")[0]


def _exit_and_message(who: str, code: int, note: str) -> tuple[int, str]:
    """Return the exit code of a shell for a process that ended with ``code``, a negative signal or
    not, and the sentence that says so.
    """
    if code >= 0:
        return code, f"{who} ended with code {code}{note}"
    name = f"signal {-code}"
    if -code in signal.Signals.__members__.values():
        name = signal.Signals(-code).name
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    return 128 - code, f"{who} was ended by {name}{hint}{note}"


if __name__ == "__main__":
    sys.exit(main())
