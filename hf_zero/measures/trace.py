"""Traces of a few steps: torch's profiler and the spans of the engine, of all ranks in one file for
Perfetto (https://ui.perfetto.dev) and chrome://tracing.

[Note: clocks]
Times of one host come from one clock. Hosts' clocks differ, so all ranks leave a barrier together
when the trace begins, and the events of each host are moved by the time at which its first rank has
left it.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hf_zero.device import kinds, spans
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.errors import ConfigError
from hf_zero.logging import logger

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

END = "end_step"  # span that marks the end of a step
PROFILER_LEVEL = "KINETO_LOG_LEVEL"
PIDS = 1 << 20  # process ids of a rank in the merged file


class RankTrace(NamedTuple):
    """The trace of one rank, in ``file``: gzipped JSON with times in microseconds since 1970.
    ``met``: when it left the barrier at the beginning, on the same clock.
    """

    rank: int
    host: str
    met: float
    file: Path


class StepTrace:
    """Trace ``steps`` steps of ``engine``, from now on (collective); :meth:`end_step` writes them.

    Raises ConfigError if ``folder`` cannot be made, or a profiler is running.
    """

    def __init__(self, engine: TrainingEngine, steps: int, folder: str):
        self._rank = engine.global_rank
        self._first, self._last = engine.global_steps + 1, engine.global_steps + steps
        self.path = Path(folder) / f"trace-steps-{self._first}-{self._last}.json.gz"
        with raise_on_all_ranks("start its trace"):
            if torch.autograd.profiler._is_profiler_enabled:
                raise ConfigError(
                    "trace: another profiler is running; end it first, its profile has the "
                    "engine's spans, too"
                )
            if engine.global_rank == 0:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ConfigError(
                        f"trace: {folder} cannot be made ({error}); write trace.path"
                    ) from error
        kind = getattr(ProfilerActivity, engine.device.type.upper(), ProfilerActivity.CPU)
        activities = {ProfilerActivity.CPU, kind} & torch.profiler.supported_activities()
        engine.mesh.job.barrier()
        self._met = time.time_ns() / 1e3
        spans.show_blocks(True)
        with _quiet(engine.device):
            self._profile = profile(activities=activities)
            self._profile.start()

    def end_step(self, engine: TrainingEngine) -> bool:
        """End a step; after the last one write :attr:`path` on rank 0 (collective), and return
        True. A warning says if it cannot be written.
        """
        with spans.span(END, str(engine.global_steps)):
            pass
        if engine.global_steps < self._last:
            return False
        job = engine.mesh.job
        described = engine.global_rank, socket.gethostname(), self._met
        ranks = job.all_gather_object(described, "ranks of a trace")
        # all ranks join the gather, whatever their disks refuse
        with _ReceivedEvents() as received:
            job.gather_bytes(self._events(engine), received.take, "traces")
            if engine.global_rank == 0:
                self._write(
                    [
                        RankTrace(rank, host, met, received.files[index])
                        for index, (rank, host, met) in enumerate(ranks)
                        if index in received.files
                    ],
                    received.error,
                )
        return True

    def _write(self, ranks: Sequence[RankTrace], error: OSError | None) -> None:
        """Write the events of ``ranks``, unless there are none, or ``error`` has lost some."""
        if error is None and ranks:
            try:
                write_merged(self.path, ranks)
            except OSError as failed:
                error = failed
        if error is not None or not ranks:
            with suppress(OSError):
                self.path.unlink()
            logger.warning(
                "trace: %s cannot be written (%s)", self.path, error or "no rank has events"
            )
            return
        logger.info(
            "trace of steps %d to %d of %d ranks: %s (open it in https://ui.perfetto.dev)",
            self._first,
            self._last,
            len(ranks),
            self.path.resolve(),
        )

    def _events(self, engine: TrainingEngine) -> bytes:
        """End the profile; return this rank's events as gzipped JSON, or nothing, with a warning,
        if its disk refuses them.
        """
        kinds.synchronize(engine.device)  # the last kernels belong to the steps
        self._profile.stop()
        spans.show_blocks(False)
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "rank.json"
                self._profile.export_chrome_trace(str(file))
                trace = json.loads(file.read_text())
        # the profiler raises nothing where a disk is full: its file ends within an event
        except (OSError, ValueError) as error:
            logger.warning(
                "trace: the events of rank %d are left out, as they cannot be written to a "
                "temporary file (%s); set TMPDIR to a folder with room",
                self._rank,
                error,
            )
            return b""
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        events = [
            event | ({"ts": event["ts"] + base} if "ts" in event else {})
            for event in trace["traceEvents"]
        ]
        return gzip.compress(json.dumps(events).encode(), 5)

    def close(self) -> None:
        """End the profile of steps that have not ended; writes nothing, and a warning says so."""
        if self._rank == 0:
            logger.warning(
                "trace: a load or the end of the engine came before step %d had ended; nothing is "
                "written",
                self._last,
            )
        spans.show_blocks(False)
        self._profile.stop()


class _ReceivedEvents:
    """Context manager of a temporary folder with the events of ranks: ``files``, by their places.
    ``error``: what lost some of them.
    """

    def __init__(self) -> None:
        self.files: dict[int, Path] = {}
        self.error: OSError | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> _ReceivedEvents:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def take(self, index: int, part: bytes) -> None:
        """Append ``part`` to the events of the rank at the place ``index``."""
        if self.error is not None or not part:
            return
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory()
            path = self.files.setdefault(index, Path(self._folder.name) / str(index))
            with open(path, "ab") as opened:
                opened.write(part)
        except OSError as error:
            self.error = error


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Make torch's profiler print nothing on a CPU, unless the user has set its level, which it
    reads at its first start. It prints a line (``USDT:``) at the start and the end of a trace at
    each level that shows its errors; on an accelerator those may say why a trace lacks events.
    """
    if not kinds.is_synchronous(device) or PROFILER_LEVEL in os.environ:
        yield
        return
    os.environ[PROFILER_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(PROFILER_LEVEL, None)  # ranks may be threads


def write_merged(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write the trace of ``ranks`` to ``path``; the events of one rank are in memory at a time."""
    with gzip.open(path, "wt", compresslevel=5) as opened:
        opened.write('{"traceEvents": [')
        for number, event in enumerate(merged(ranks)):
            opened.write((",\n" if number else "\n") + json.dumps(event))
        opened.write("\n]}\n")


def merged(ranks: Sequence[RankTrace]) -> Iterator[dict[str, object]]:
    """Yield the events of all ranks on one clock; processes are named by rank, host and device."""
    met: dict[str, float] = {}
    for rank in ranks:
        met.setdefault(rank.host, rank.met)
    for trace in ranks:
        shift = -met[trace.host]  # times begin with the trace
        numbers: dict[object, int] = {}
        for event in json.loads(gzip.decompress(trace.file.read_bytes())):
            pid = event.get("pid")
            event["pid"] = numbers.setdefault(pid, trace.rank * PIDS + len(numbers))
            if event.get("ph") == "M" and event.get("name") == "process_name":
                event["args"]["name"] = f"rank {trace.rank}, {trace.host}: {event['args']['name']}"
            elif event.get("name") == "process_sort_index" and event.get("ph") == "M":
                event["args"]["sort_index"] = event["pid"]
            if "ts" in event:
                event["ts"] += shift
            if "id" in event:
                event["id"] = f"{trace.rank}/{event['id']}"
            yield event
