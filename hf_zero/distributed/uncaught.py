"""The report of an hf-zero error that ends a process: its message once for all ranks, in a few
lines; ``HF_ZERO_TRACEBACK=1`` shows the traceback.

[Note: once for all ranks]
A rank that meets an error prints the traceback, and so do all others that meet the same one; the
launcher adds its own. The message says what to do, so the hook prints it alone, also in a process
without a launcher. Rank 0 prints at once. Any other rank waits a moment for rank 0 to have printed
the same message, then the first of them prints it: messages that differ by rank are always shown.
A rank that ends only because another has failed says so in one line, once for all such ranks of a
host. The ranks compare through the store of torchrun's agent, which exists before any process group
and outlives the ranks; without one each rank prints.

[Note: the first failure]
torchrun reports the rank that ended first, to the second. A rank with an error of its own leaves it
in the file that torchrun gives it for that, so that torchrun and ``hf-zero launch`` name this rank
and its error, and not one that follows from it.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SWITCH = "HF_ZERO_TRACEBACK"
ERRORS = "hf_zero.errors"  # whose classes the documentation has sections for
OFF = {"", "0", "false", "off", "no"}
WAIT_SECONDS = 2.0
PACKAGE = Path(__file__).resolve().parents[1]
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
COMMANDS = Path(sys.executable).parent  # accelerate, torchrun and the like
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
# called with errors of other classes: return an exception to report instead, or None
explanations: list[Callable[[BaseException], Exception | None]] = []
attempt = ""  # the token of this attempt (attempts.py), once its ranks have met
logged: set[str] = set()  # messages that this process has logged as errors before it raised them


def shows_tracebacks() -> bool:
    """Return whether ``HF_ZERO_TRACEBACK`` asks for the traceback of each error."""
    return os.environ.get(SWITCH, "0").strip().lower() not in OFF


class _Report:
    """``sys.excepthook`` of a process. ``before`` handles errors of other classes than ``ours``."""

    def __init__(self, before: Hook, ours: type[Exception]) -> None:
        self.before, self.ours = before, ours
        self.under_way = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # torch's hook of a process group calls the one that it found, which may be this one
        if self.under_way:
            sys.__excepthook__(kind, error, trace)
            return
        self.under_way = True
        try:
            foreign = not isinstance(error, self.ours)
            texts = [explanation(error) for explanation in explanations if foreign]
            for explained in filter(None, texts):
                explained.__cause__ = error
                kind, error = type(explained), explained
            if isinstance(error, self.ours) and not hasattr(error, "failed_rank"):
                _record(error, trace)
            if isinstance(error, self.ours) and not shows_tracebacks():
                _print_once(error, trace)
            else:
                self.before(kind, error, trace)
        finally:
            self.under_way = False


def watch(ours: type[Exception]) -> None:
    """Report uncaught errors of the class ``ours`` in this way, unless the process is interactive.
    Called when such an error is made.
    """
    hook = sys.excepthook
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "__IPYTHON__")
    if not interactive and not isinstance(hook, _Report):
        sys.excepthook = _Report(hook, ours)


def described(error: BaseException, trace: TracebackType | None) -> str:
    """Return the message and its cause, unless the log has them, and the line of the user's script
    that led to it.
    """
    failed_rank = getattr(error, "failed_rank", None)
    if failed_rank is not None and _on_this_host(failed_rank):
        return f"ended because rank {failed_rank} has failed; see the error of that rank"
    is_logged, cause = str(error) in logged, error.__cause__
    lines = [f"{type(error).__name__}: {'see the error logged above' if is_logged else error}"]
    if (
        not is_logged and cause is not None and str(cause) not in str(error)
    ):  # unless the message already includes it
        lines.append(f"  because of {type(cause).__name__}: {cause}")
    where = _line_of_the_script(trace)
    if where:
        lines.append(f"  at {where}")
    topic = type(error).__name__
    hint = f"hf-zero docs {topic}; " if type(error).__module__ == ERRORS else ""
    return "\n".join([*lines, f"  ({hint}{SWITCH}=1 shows the traceback)"])


def _line_of_the_script(trace: TracebackType | None) -> str:
    """Return the innermost line outside installed packages and hf-zero itself."""
    line = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        inside = "site-packages" in file or file.startswith("<") or Path(file).parent == COMMANDS
        if not inside and not any(map(Path(file).resolve().is_relative_to, (PACKAGE, STDLIB))):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _print_once(error: BaseException, trace: TracebackType | None) -> None:
    text = described(error, trace)
    if not os.environ.get("RANK", "").isdecimal():  # the error may be about that
        print(f"hf-zero: {text}", file=sys.stderr, flush=True)
        return
    rank, printed = int(os.environ["RANK"]), _PrintedTexts()
    failed_rank = getattr(error, "failed_rank", None)
    if failed_rank is not None:
        printed.within(WAIT_SECONDS, _report_of(failed_rank))
        if not printed.claim(text):
            return
    elif rank:
        if printed.within(WAIT_SECONDS, text) or not printed.claim(text):
            return
    elif printed.within(0.0, text):
        return
    print(f"hf-zero, rank {rank}: {text}", file=sys.stderr, flush=True)
    printed.claim(text)  # rank 0 claims after it has printed: its end makes the launcher end others
    printed.claim(_report_of(rank))


def _report_of(rank: int) -> str:
    return f"the report of rank {rank}"


def _on_this_host(rank: int) -> bool:
    try:
        rank_here, local, count = (
            int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except ValueError:  # a variable that holds no number: the report says the reason itself
        return False
    return 0 <= rank - (rank_here - local) < count


def _record(error: BaseException, trace: TracebackType | None) -> None:
    """Write the first line about ``error`` to the file that torchrun reads at this rank's end."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or "RANK" not in os.environ:
        return
    first = described(error, trace).partition("\n")[0]
    more = {"py_callstack": first, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": first, "extraInfo": more}}))


class _PrintedTexts:
    """Texts that ranks have printed, recorded in the store of torchrun's agent, which outlives an
    attempt: a text of an earlier one does not count.

    Before the ranks have met, restarts tell attempts apart. Each agent counts its own, and not all:
    so a rank that has reported a text before, in this store, takes part in the next round of it.
    Without that store nothing counts as printed.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._store: TCPStore | None = None
        with suppress(Exception):
            self._store = connect_to_agent_store(timedelta(seconds=WAIT_SECONDS))

    def _key(self, text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        if attempt:
            return f"hf_zero/uncaught/{attempt}/{digest}"
        key = f"hf_zero/uncaught/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}"
        if key not in self._rounds:
            assert self._store is not None
            self._rounds[key] = self._store.add(f"{key}/of/{os.environ.get('RANK')}", 1)
        return f"{key}/{self._rounds[key]}"

    def within(self, seconds: float, text: str) -> bool:
        """Return whether ``text`` has been printed, or is before ``seconds`` have passed."""
        if self._store is None:
            return False
        with suppress(Exception):
            deadline = time.monotonic() + seconds
            while not self._store.check([self._key(text)]):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.05)
            return True
        return False

    def claim(self, text: str) -> bool:
        """Return whether this rank is the first to print ``text``."""
        with suppress(Exception):
            return self._store is None or self._store.add(self._key(text), 1) == 1
        return True


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts a store for the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def connect_to_agent_store(timeout: timedelta) -> TCPStore | None:
    """Return a client of the store at MASTER_ADDR and MASTER_PORT, or None if torchrun's agent
    hosts none.

    ``timeout`` limits the connection, and each call: many ranks connect at once. Raises torch's
    error if the store does not answer.
    """
    if not has_agent_store():
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
