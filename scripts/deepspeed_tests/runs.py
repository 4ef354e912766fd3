"""Runs of DeepSpeed's test files in processes of their own, over DeepSpeed or over the facade."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
REGISTER = "import hf_zero._autoload; hf_zero._autoload.register()\n"
PATIENCE = 20  # seconds that a rank may go on after another has raised


class Deadline:
    """The time from which no test is started, and at which running tests are ended."""

    def __init__(self, at: float) -> None:
        self.at = at

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def end(self) -> None:
        self.at = 0.0


class Run:
    """Some files over DeepSpeed or over the facade; tests are named ``file::class::test``."""

    def __init__(self, tests: Path, path: list[str], facade: bool, limit: int) -> None:
        self.tests, self.limit, self.facade = tests, limit, facade
        self.path = [*path, str(tests), str(ROOT / "scripts")]
        self.said: dict[str, str] = {}
        self.missing: list[str] = []  # collected and wanted, but not run
        self.collected: set[str] = set()
        self.not_collected: dict[str, str] = {}  # of a file, why

    def run(self, files: list[str], wanted: list[str] | None, until: Deadline) -> None:
        """Run the ``wanted`` tests (None: all) of ``files``, in as many processes as hanging tests
        need.
        """
        while files and not until.passed:
            before = len(self.said) + len(self.not_collected)
            self._attempt(files, wanted, until)
            if not self.missing or len(self.said) + len(self.not_collected) == before:
                return
            wanted = self.missing
            files = list(dict.fromkeys(file_of(name) for name in wanted))

    def _attempt(self, files: list[str], wanted: list[str] | None, until: Deadline) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if wanted is not None:
                (folder / "wanted.json").write_text(json.dumps(wanted))
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
                + ["-p", "deepspeed_tests_plugin", "--rootdir=.", "--continue-on-collection-errors"]
                + [f"unit/{file}" for file in files],
                cwd=self.tests,
                env=self._environment(folder),
                stdout=(folder / "output").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and not until.passed:
                    time.sleep(0.5)
                    if self._stuck(folder):
                        break
            finally:
                end_session(process.pid)
                crashed = process.returncode is not None
                process.wait()
                release_builds()
                self._read(folder, files, wanted, until.passed, crashed)

    def _environment(self, folder: Path) -> dict[str, str]:
        if self.facade:  # as the .pth of an installation does, which an editable one lacks
            (folder / "sitecustomize.py").write_text(REGISTER)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *self.path]),
            "DEEPSPEED_TESTS_FOLDER": str(folder),
            "LOCAL_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": str(self.limit),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_ZERO_AUTOLOAD": "1" if self.facade else "0",
        }

    def _stuck(self, folder: Path) -> bool:
        """Return whether a test takes longer than it may."""
        events = events_of(folder)
        started = [event for event in events if "starts" in event]
        if not started or "ends" in events[-1]:
            return False
        now = time.monotonic()
        raised = [event for event in events[events.index(started[-1]) :] if "raised" in event]
        if raised and now - raised[0]["at"] > PATIENCE:
            return True
        return bool(now - started[-1]["at"] > self.limit + PATIENCE)

    def _read(
        self,
        folder: Path,
        files: list[str],
        wanted: list[str] | None,
        late: bool,
        crashed: bool,
    ) -> None:
        """Take what became of each test from the events that the plugin wrote."""
        names: list[str] = []
        running, raised = "", ""
        for event in events_of(folder):
            names = event.get("collected", names)
            self.collected.update(names)
            if "not_collected" in event:
                self.not_collected[event["not_collected"]] = event["said"]
            elif "starts" in event:
                running, raised = event["starts"], ""
            elif "raised" in event:
                raised = raised or event["raised"]
            elif "ends" in event:
                running = ""
                if self.said.get(event["ends"], "passed") == "passed":
                    self.said[event["ends"]] = event["said"]
        if running and raised:
            self.said[running] = f"{raised} (on one rank, while another waited)"
        elif running and crashed:
            self.said[running] = "the process ended within the test"
        elif running and not late:
            self.said[running] = f"not run: longer than {self.limit} s"
        if not names and not late:
            lines = (folder / "output").read_text().strip().splitlines() or ["no output"]
            self.not_collected = dict.fromkeys(files, lines[-1][:200]) | self.not_collected
        chosen = names if wanted is None else [name for name in wanted if name in names]
        self.missing = [name for name in chosen if name not in self.said]


def file_of(name: str) -> str:
    return name.partition("::")[0]


def of_file(names: Iterable[str], file: str) -> list[str]:
    """Return those of ``names`` that are in ``file``, without its name."""
    return [name.partition("::")[2] for name in names if file_of(name) == file]


def events_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def end_session(leader: int) -> None:
    """End every process of the session that ``leader`` has started, whoever its parent is now:
    workers, and the compilers of an extension, for which ninja makes groups of their own.
    """

    def running(process: psutil.Process) -> bool:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
        return False

    while left := list(filter(running, psutil.process_iter())):  # one may start another meanwhile
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def release_builds() -> None:
    """Remove the locks of extensions that a killed process was building: another one would wait
    for them without end.
    """
    default = Path.home() / ".cache" / "torch_extensions"
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).glob("**/lock"):
        lock.unlink(missing_ok=True)
