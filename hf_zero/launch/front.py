"""The front process: starts the agents of all hosts, prints their output and ends them together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from hf_zero.errors import LaunchError
from hf_zero.launch.agent import GRACE_SECONDS
from hf_zero.launch.plan import LaunchPlan, Start

# Agents give their ranks GRACE_SECONDS; an agent that needs longer than this is killed.
PATIENCE_SECONDS = GRACE_SECONDS + 10.0
LAST_WORDS_SECONDS = 5.0  # for the output of all hosts together
# A wait that two signals interrupt at once may go on sleeping (CPython 3.11), so each is short.
POLL_SECONDS = 0.5
SAY_SECONDS = 1.0  # that a message waits for a reader who has stopped reading
# A terminal that closes sends its signal twice; one that comes later is of someone impatient.
IMPATIENCE_SECONDS = 1.0
UNREACHABLE = 255  # the exit code of ssh
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PIECE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")


@dataclass(frozen=True)
class Ended:
    """End of one host's agent, or a signal to this process."""

    what: str
    code: int
    signaled: bool = False


def carry_out(plan: LaunchPlan, patience: float = PATIENCE_SECONDS) -> int:
    """Run the plan to its end. Returns 0 if every host ended with 0, else the code of the first one
    that did not, or 128 and the number of the signal that ended them.

    A plan for this machine alone replaces this process and never returns. A failing host ends the
    others; so do Ctrl-C, SIGTERM and a hang-up, and the same once more, a second later or more,
    kills agents that have not ended yet.

    Raises LaunchError for a host that cannot be reached.
    """
    if not plan.alone:
        return _Front(plan.starts, patience).run()
    (start,) = plan.starts
    os.environ.update(start.environment)
    sys.stdout.flush()
    os.execv(start.command[0], start.command)


class _Front:
    def __init__(self, starts: Sequence[Start], patience: float) -> None:
        self._patience = patience
        self._news: SimpleQueue[Ended] = SimpleQueue()
        self._lock = threading.Lock()
        self._starts = starts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ordered: set[int] = set()  # processes that have taken their order
        self._pumps: list[threading.Thread] = []  # by the names of their hosts
        self._unwritable = set[int]()  # descriptors of the standard output or error

    def run(self) -> int:
        if sys.stdout is not None:
            sys.stdout.flush()  # what follows is written to its descriptor
        with ExitStack() as stack:
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                before = signal.signal(
                    number,
                    lambda caught, _: self._news.put(
                        Ended(signal.Signals(caught).name, 128 + caught, True)
                    ),
                )
                stack.callback(signal.signal, number, before)
            stack.callback(self._cut_off)
            for start in self._starts:
                self._start(start)
            code = self._until_one_fails()
            if code:
                self._end()
        return code

    def _start(self, start: Start) -> None:
        # Each agent has its own session: Ctrl-C reaches this process only, which ends them in
        # order.
        try:
            process = subprocess.Popen(
                start.reached_by, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            program = start.reached_by[0]
            missing = isinstance(error, FileNotFoundError)
            remedy = "; install it, or name another program with --ssh" if missing else ""
            raise LaunchError(
                f"{start.host.name} cannot be reached through {program}: {error}{remedy}"
            ) from error
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        name = start.host.name
        for source, sink in ((process.stdout, 1), (process.stderr, 2)):
            pump = threading.Thread(
                target=self._pump, args=(name, source, sink), name=name, daemon=True
            )
            pump.start()
            self._pumps.append(pump)
        threading.Thread(target=self._attend, args=(start, process), daemon=True).start()

    def _attend(self, start: Start, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        # The agent has already ended, and its exit code says why; or all are being ended.
        with suppress(BrokenPipeError, ValueError):
            process.stdin.write(start.order)
            process.stdin.flush()
            self._ordered.add(process.pid)
        code = process.wait()
        self._news.put(Ended(start.host.name, code if code >= 0 else 128 - code))

    def _until_one_fails(self) -> int:
        """Wait until all hosts have ended with 0, or until one has not or a signal comes; return
        its code.
        """
        running = len(self._processes)
        while running:
            news = self._next()
            if news.signaled:
                self._say(f"{news.what}, ending all hosts")
                return news.code
            running -= 1
            if news.code:
                others = (
                    "; ending the other hosts (a job that is to go on without one is started by "
                    "torchrun --nnodes MIN:MAX)"
                )
                self._say(
                    f"{news.what} ended with code {news.code}{self._unreached(news)}"
                    f"{others if running else ''}"
                )
                return news.code
        return 0

    def _next(self) -> Ended:
        while True:
            with suppress(Empty):
                return self._news.get(timeout=POLL_SECONDS)

    def _unreached(self, news: Ended) -> str:
        """Return what 255 means of the program that reaches a host, or ""."""
        start = next(start for start in self._starts if start.host.name == news.what)
        if news.code != UNREACHABLE or start.here:
            return ""
        program = Path(start.reached_by[0]).name
        return f"; {program} could not reach it, or its connection broke"

    def _end(self) -> None:
        """Close the agents' inputs, which makes them end; those that do not are killed later. A
        process that has not taken its order has started nothing: it is terminated, because closing
        its input would wait, beyond the reach of signals, for the thread that writes the order.
        """
        for process in self._processes:
            assert process.stdin is not None
            if process.pid not in self._ordered:
                process.terminate()
                continue
            with suppress(BrokenPipeError):
                process.stdin.close()
        waited = threading.Event()  # for all agents, or long enough for someone
        for wait in (self._wait_for_all, self._wait_for_impatience):
            threading.Thread(target=wait, args=(waited,), daemon=True).start()
        deadline = time.monotonic() + self._patience
        while not (in_time := waited.wait(POLL_SECONDS)) and time.monotonic() < deadline:
            continue
        late = [
            start.host.name
            for start, process in zip(self._starts, self._processes)
            if process.poll() is None
        ]
        if late:
            why = "" if in_time else f" did not end within {self._patience:.0f} s:"
            self._say(
                f"{', '.join(late)}{why} cut off from here; look for what is left of it there"
            )

    def _wait_for_all(self, waited: threading.Event) -> None:
        for process in self._processes:
            process.wait()
        waited.set()

    def _wait_for_impatience(self, waited: threading.Event) -> None:
        begun = time.monotonic()
        while not self._next().signaled or time.monotonic() - begun < IMPATIENCE_SECONDS:
            continue
        waited.set()

    def _cut_off(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for pump in self._pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
        if held := dict.fromkeys(pump.name for pump in self._pumps if pump.is_alive()):
            self._say(f"{', '.join(held)}: a process left behind holds the output, cut off here")

    def _pump(self, name: str, source: IO[bytes], sink: int) -> None:
        """Copy ``source`` to the descriptor ``sink`` line by line, with the host's name before each
        line. A carriage return ends a line too, for progress bars.
        """
        prefix = f"[{name}] ".encode() if len(self._starts) > 1 else b""
        line = b""
        while block := os.read(source.fileno(), 1 << 16):
            line += block
            end = 0
            pieces = []
            for piece in PIECE.finditer(line):
                pieces.append(prefix + piece[0])
                end = piece.end()
            line = line[end:]
            self._write(sink, b"".join(pieces))
        if line:
            self._write(sink, prefix + line + b"\n")

    def _write(self, sink: int, data: bytes) -> None:
        # What cannot be written is discarded: the ranks must not block.
        with self._lock:
            error = _write_to(sink, data)
            # a reader that has gone, such as head, wants no more
            if error is None or isinstance(error, BrokenPipeError) or sink in self._unwritable:
                return
            self._unwritable.add(sink)
            name, other = ("output", 2) if sink == 1 else ("error", 1)
            _write_to(
                other,
                f"hf-zero: the standard {name} cannot be written ({error}): "
                "what the ranks print there is lost from here on, and they go on\n".encode(),
            )

    def _say(self, text: str) -> None:
        """Print ``text`` on stderr. Where nobody reads it, hosts are to be ended all the same."""
        data = f"hf-zero: {text}\n".encode()
        writer = threading.Thread(target=self._write, args=(2, data), daemon=True)
        writer.start()
        writer.join(SAY_SECONDS)


def _write_to(sink: int, data: bytes) -> OSError | None:
    """Write ``data`` to a descriptor; return the error if that is impossible. Buffers of Python's
    streams have locks, which a thread that waits for a reader would hold as the process ends.
    """
    try:
        while data:
            data = data[os.write(sink, data) :]
    except OSError as error:
        return error
    return None
