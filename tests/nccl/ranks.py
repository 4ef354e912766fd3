"""Ranks of one job, each a process of this machine, in one of the ways of ``ways.py``."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hf_zero.launch.hosts import free_port
from tests.helpers import launched
from tests.nccl import ways

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).parent / "site"
DUMP = signal.SIGUSR1  # a rank writes its stacks to its log
START = 180.0  # seconds for the imports of all ranks, and until they have met


def environment(way: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of processes whose ranks get the variables of ``way``, also where a
    launcher starts them.
    """
    if way == ways.LATE:
        from tests.late import build, launch

        build.library()

        own = {**launch.environment(True), "LATE_MODE": "eager", "LATE_DEVICES": "1"}
        return {**own, "HF_ZERO_LOG_LEVEL": "ERROR", **(more or {})}
    own = launched.environment()
    own["PYTHONPATH"] = os.pathsep.join([str(SITE), own["PYTHONPATH"]])
    if way == ways.GLOO:
        own |= ways.NO_GPU
    return {**own, ways.VARIABLE: way, **(more or {})}


class Ranks:
    """``python -m MODULE ARGUMENTS`` as each rank of a job of ``count``; what a rank prints to
    stderr is in ``logs``.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        count: int,
        way: str,
        logs: Path,
        more: Mapping[str, str] | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"rank-{rank}.txt" for rank in range(count)]
        shared = {
            **environment(way, more),
            "MASTER_ADDR": launched.HOST,
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        command = [sys.executable, "-m", module, *arguments]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._open = selectors.DefaultSelector()
        self._parts = [b""] * count
        for rank, log in enumerate(self.logs):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("ab") as errors:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=errors
                )
            self.processes.append(process)
            self._open.register(self._output(rank), selectors.EVENT_READ, rank)

    def _output(self, rank: int) -> IO[bytes]:
        output = self.processes[rank].stdout
        assert output is not None
        return output

    def lines(self, seconds: float) -> Iterator[tuple[int, str]]:
        """Yield (rank, line) as lines come, and (rank, "") once a rank prints no more, until all
        have ended. Raises TimeoutError if nothing comes for ``seconds``, or for :data:`START` until
        each rank has printed something.
        """
        silent = set(range(len(self.processes)))
        while self._open.get_map():
            limit = START if silent else seconds
            ready = self._open.select(limit)
            if not ready:
                raise TimeoutError(f"nothing for {limit:.0f} s")
            for key, _ in ready:
                rank = int(key.data)
                silent.discard(rank)
                read = os.read(key.fd, 1 << 16)
                *whole, self._parts[rank] = (self._parts[rank] + read).split(b"\n")
                for line in whole:
                    if text := line.decode(errors="replace").strip():
                        yield rank, text
                if not read:
                    self._open.unregister(key.fileobj)
                    yield rank, ""

    def codes(self, seconds: float) -> list[int | None]:
        """Return the exit codes of all ranks; None: of one that has not ended in time."""
        end = time.monotonic() + seconds
        return [launched.ended(each, max(0.0, end - time.monotonic())) for each in self.processes]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def dump(self) -> None:
        """Have each rank that runs write its stacks to its log."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(DUMP)
        time.sleep(0.5)

    def end(self) -> None:
        """End all ranks that run, and read the rest of nothing."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._open.close()


@contextmanager
def started(
    module: str,
    *arguments: str,
    count: int,
    way: str,
    logs: Path,
    more: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """The ranks at work; at the end none is left."""
    made = Ranks(module, *arguments, count=count, way=way, logs=logs, more=more)
    try:
        yield made
    finally:
        made.end()
