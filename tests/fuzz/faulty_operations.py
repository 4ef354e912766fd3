"""Saves, loads and conversions while a call of the C library fails: each ends, or raises an error
of hf-zero, and leaves what was there before or the new files, whole.

Run under the library of ``faulty_calls.c``, with the folder of the files in ``FAULTY_FOLDER``:
``python -m tests.fuzz.faulty_operations OPERATION,… [SAMPLE [SEED]]`` prints what it has run and
found as JSON. Without a sample, each call of each operation fails in each way.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import itertools
import json
import logging
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint import find
from hf_zero.checkpoint.convert.publish import FOLDER
from hf_zero.checkpoint.convert.to_universal import LATEST_UNIVERSAL as LATEST
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.errors import HfZeroError
from tests.checkpoint.jobs import same, trained, weights
from tests.checkpoint.test_cut_off import STATE, Reader
from tests.checkpoint.test_publish import TARGETS, content

FOREVER = 10**9
# error, or 0 for a part of the bytes, and how many calls in sequence fail
FAULTS = {
    "EIO": (errno.EIO, 1),
    "ENOSPC": (errno.ENOSPC, 1),
    "EINTR": (errno.EINTR, 1),
    "half of the bytes": (0, FOREVER),
    "EIO from then on": (errno.EIO, FOREVER),
}
HANGS = 120.0  # seconds until the stacks of an operation are printed and the process ends


@dataclass
class Operation:
    """``run`` works in a copy of the folder that ``prepare`` has filled.

    ``check`` asserts that a folder is whole, after a run that has ended or raised an error, and
    tells whether it holds what ``run`` writes.
    """

    prepare: Callable[[Path], object]
    run: Callable[[Path], object]
    check: Callable[[Path, bool], bool]
    repeats: bool = True  # whether it replaces what it has written before


@dataclass
class Calls:
    """The functions of the preloaded library."""

    library: Any = field(default_factory=lambda: ctypes.CDLL(None))

    def __post_init__(self) -> None:
        self.library.arm.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_int]
        self.library.calls.restype = ctypes.c_long
        self.library.first_faulty.restype = ctypes.c_char_p

    def during(self, action: Callable[[], object], at: int, fault: str) -> tuple[int, str, Any]:
        """Run ``action`` with a fault from call ``at`` on, none at 0. Returns the number of calls,
        the name of the one that failed, and the exception of ``action``, if any.
        """
        error, length = FAULTS[fault]
        self.library.arm(at, at + length - 1, error)
        raised = None
        try:
            action()
        except Exception as caught:
            raised = caught
        made, failed = self.library.calls(), self.library.first_faulty()
        self.library.arm(0, 0, 0)
        return made, (failed or b"").decode(), raised


def save_over_a_tag() -> Operation:
    """Replace a checkpoint and remove an older one."""
    tag = "global_step2"
    older, replaced, new, reader = trained(1), trained(2), trained(3), Reader()

    def prepare(folder: Path) -> None:
        older.save_checkpoint(folder, tag="global_step1", client_state=STATE)
        replaced.save_checkpoint(folder, tag=tag, client_state=STATE)
        (folder / tag / "notes.txt").write_text("of the user")

    def check(folder: Path, ended: bool) -> bool:
        tags = find.tags_in(folder)
        wrong = [integrity_error(folder / each) for each in tags]
        assert not any(wrong), wrong
        steps = Manifest.read(folder / tag / MANIFEST_NAME).counters["global_steps"]
        assert steps == 3 or (steps == 2 and not ended), steps
        assert steps == 3 or "global_step1" in tags, tags
        assert not ended or (folder / tag / "notes.txt").exists()
        reader.weights(folder)
        return steps == 3

    def run(folder: Path) -> None:
        new.save_checkpoint(folder, tag=tag, client_state=STATE, keep=1)

    return Operation(prepare, run, check)


def load_into_an_engine() -> Operation:
    """Load a checkpoint, verified."""
    new, reader = trained(2), Reader()
    found: list[dict[str, torch.Tensor]] = []

    def prepare(folder: Path) -> None:
        new.save_checkpoint(folder, client_state=STATE)

    def run(folder: Path) -> None:
        found.append(reader.weights(folder))

    def check(folder: Path, ended: bool) -> bool:
        assert not ended or same(found.pop(), weights([new]))
        return ended

    return Operation(prepare, run, check)


def conversion(kind: str) -> Operation:
    """Convert to the format ``kind``, over what is in the target."""
    prepare_target, convert = TARGETS[kind]
    states: dict[bool, dict[str, Any]] = {}

    def prepare(folder: Path) -> None:
        source = folder / "source"
        trained(2).save_checkpoint(source)
        (source / "additional_chat_templates").mkdir()
        for name in ("config.json", "vocab.txt", "additional_chat_templates/tool.jinja"):
            (source / name).write_text("{}")
        (folder / "into").mkdir()
        prepare_target(source, folder / "into" / "out")
        states[False] = held(folder / "into")

    def run(folder: Path) -> None:
        convert(folder / "source", folder / "into" / "out")

    def check(folder: Path, ended: bool) -> bool:
        assert not integrity_error(folder / "source" / "global_step2")
        found = held(folder / "into")
        whole = states.setdefault(True, found)  # the first run has no fault
        kept = content(folder / "into" / "out" / FOLDER / "old")
        if kept and not ended:  # not put back, on a storage that fails for good
            lost = [k for k, v in states[False].items() if v not in (kept.get(k), found.get(k))]
            assert not lost, lost
            return False
        if found and not ended:  # an error at this file says that the folder is whole
            found = {name: whole[name] for name in whole if name == LATEST} | found
        assert found == whole or (found == states[False] and not ended), _compared(found, whole)
        return found == whole

    def held(folder: Path) -> dict[str, Any]:
        latest = folder / LATEST
        beside = {LATEST: latest.read_bytes()} if latest.exists() else {}
        return content(folder / "out") | beside

    return Operation(prepare, run, check, repeats=kind == "model")


def _compared(found: dict[str, Any], whole: dict[str, Any]) -> str:
    names = sorted(found.keys() | whole.keys())
    return f"{[name for name in names if found.get(name) != whole.get(name)]} differ"


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "save": save_over_a_tag,
    "load": load_into_an_engine,
    "safetensors": partial(conversion, "model"),
    "dcp": partial(conversion, "dcp"),
    "universal": partial(conversion, "universal"),
}


def damage(
    name: str, folder: Path, sample: int | None, seed: int, report: dict[str, Any]
) -> Iterator[dict[str, str]]:
    """Run an operation with faults, all without a ``sample``; yield what is wrong after each. Add
    the numbers of calls, of faults, and of those that a call has met, to ``report``.
    """
    operation = OPERATIONS[name]()
    calls, start, work = Calls(), folder / "start", folder / "work"
    operation.prepare(start)
    shutil.copytree(start, work, symlinks=True)
    made, _, raised = calls.during(lambda: operation.run(work), 0, "EIO")
    if raised is not None:
        raise raised
    operation.check(work, True)
    cases = list(itertools.product(range(1, made + 1), FAULTS))
    if sample is not None:
        cases = random.Random(f"{name} {seed}").sample(cases, sample)
    report |= {"calls": made, "faults": len(cases), "met": 0}
    for at, fault in cases:
        shutil.rmtree(work)
        shutil.copytree(start, work, symlinks=True)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        _, call, raised = calls.during(lambda: operation.run(work), at, fault)
        report["met"] += bool(call)
        try:
            if raised is not None and not isinstance(raised, HfZeroError):
                raise raised
            left_open = _open_files(folder)
            assert not left_open, f"left open: {left_open}"
            written = operation.check(work, raised is None)
            if operation.repeats or not written:
                operation.run(work)
                operation.check(work, True)
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            yield {"at": f"{call} {at} of {made}, {fault}", "raised": repr(raised), "wrong": told}
        faulthandler.cancel_dump_traceback_later()


def _open_files(folder: Path) -> list[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if os.path.lexists(path):
            links.append(os.readlink(path))
    return [link for link in links if link.startswith(f"{folder}/")]


def main(names: str, sample: int | None = None, seed: int = 0) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    reports: dict[str, dict[str, Any]] = {}
    for name in names.split(","):
        folder = Path(os.environ["FAULTY_FOLDER"], name)
        reports[name] = {}
        reports[name]["wrong"] = list(damage(name, folder, sample, seed, reports[name]))
    print(json.dumps(reports))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
