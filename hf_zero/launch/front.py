"""The front process: starts the agents of all hosts, prints their output and ends them together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import BinaryIO

from hf_zero.errors import LaunchError
from hf_zero.launch.agent import GRACE_SECONDS
from hf_zero.launch.plan import LaunchPlan, Start

# Agents give their ranks GRACE_SECONDS; an agent that needs longer than this is killed.
PATIENCE_SECONDS = GRACE_SECONDS + 10.0
LAST_WORDS_SECONDS = 5.0
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
    that did not.

    A plan for this machine alone replaces this process. A failing host ends the others; so do
    Ctrl-C, SIGTERM and a hang-up.
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
        self._names = [start.host.name for start in starts]
        self._starts = starts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ordered: set[int] = set()  # processes that have taken their order
        self._pumps: list[threading.Thread] = []
        self._lost: list[BinaryIO] = []  # sinks that cannot be written

    def run(self) -> int:
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
            raise LaunchError(
                f"{start.host.name} cannot be reached through {program}: {error}; install it, or "
                "name another program with --ssh"
            ) from error
        self._processes.append(process)
        assert process.stdout is not None and process.stderr is not None
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            pump = threading.Thread(
                target=self._pump, args=(start.host.name, source, sink.buffer), daemon=True
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
        running = len(self._processes)
        while running:
            news = self._news.get()
            running -= not news.signaled
            if news.code:
                hint = ""
                if news.code == UNREACHABLE:
                    hint = "; ssh could not reach it, or its connection broke"
                self._say(
                    f"{news.what}, ending all hosts"
                    if news.signaled
                    else f"{news.what} ended with code {news.code}{hint}; ending the other hosts "
                    "(a job that is to go on without one is started by torchrun --nnodes MIN:MAX)"
                )
                return news.code
        return 0

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
        waiting = threading.Event()
        threading.Thread(target=self._wait_for_all, args=(waiting,), daemon=True).start()
        impatient = threading.Thread(target=self._wait_for_impatience, args=(waiting,), daemon=True)
        impatient.start()
        if not waiting.wait(self._patience):
            late = [
                name
                for name, process in zip(self._names, self._processes)
                if process.poll() is None
            ]
            self._say(
                f"{', '.join(late)} did not end within {self._patience:.0f} s: cut off from here; "
                "look for what is left of it there"
            )

    def _wait_for_all(self, ended: threading.Event) -> None:
        for process in self._processes:
            process.wait()
        ended.set()

    def _wait_for_impatience(self, ended: threading.Event) -> None:
        while True:
            if self._news.get().signaled:  # a second Ctrl-C
                ended.set()
                return

    def _cut_off(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pump in self._pumps:
            pump.join(LAST_WORDS_SECONDS)

    def _pump(self, name: str, source: BinaryIO, sink: BinaryIO) -> None:
        """Copy ``source`` to ``sink`` line by line, with the host's name before each line. A
        carriage return ends a line too, for progress bars.
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

    def _write(self, sink: BinaryIO, data: bytes) -> None:
        # What cannot be written is discarded: the ranks must not block.
        with self._lock:
            error = _write_to(sink, data)
            # a reader that has gone, such as head, wants no more
            if error is None or isinstance(error, BrokenPipeError) or sink in self._lost:
                return
            self._lost.append(sink)
            streams = [sys.stdout.buffer, sys.stderr.buffer]
            at = int(sink is streams[1])
            _write_to(
                streams[1 - at],
                f"hf-zero: the standard {('output', 'error')[at]} cannot be written ({error}): "
                "what the ranks print there is lost from here on, and they go on\n".encode(),
            )

    def _say(self, text: str) -> None:
        self._write(sys.stderr.buffer, f"hf-zero: {text}\n".encode())


def _write_to(sink: BinaryIO, data: bytes) -> OSError | None:
    """Write ``data``; return the error if that is impossible."""
    try:
        sink.write(data)
        sink.flush()
    except OSError as error:
        return error
    return None
