"""The explanation of a library's error about the version of deepspeed, which the facade states.

A check of that version is the library's own code, and so is its error. The lines that read the
version are recorded; an uncaught error that one of their files raises, and that says the version or
comes within a few lines of the read, is reported with its line and the variable that states another
release. Standard library only.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from types import FrameType

NEAR = 3  # lines between the read and the check
IMPORTLIB = os.path.dirname(os.path.abspath(importlib.import_module.__code__.co_filename))
_FOLDERS = {  # of the facade and of importlib
    os.path.dirname(os.path.abspath(__file__)),
    IMPORTLIB,
    os.path.join(IMPORTLIB, "metadata"),
}
_reads: dict[str, set[int]] = {}  # lines that have read the version, by file
_stated = list[str]()  # the version, and the variable that states another
_DEEPSPEED = re.compile(r"\bdeepspeed\b", re.IGNORECASE)


def calling_frame() -> FrameType | None:
    """Return the innermost frame outside the facade and Python's import system; None without."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<frozen importlib") or os.path.dirname(file) in _FOLDERS):
            return frame
        frame = frame.f_back
    return None


def caller() -> str:
    """Return "file:line" of :func:`calling_frame`; "" if there is none."""
    frame = calling_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def note_read(version: str, variable: str) -> None:
    """Record the line that reads ``version``, and have errors that follow from it explained:
    ``variable`` of the environment states another release.
    """
    frame = calling_frame()
    if frame is None:
        return
    from hf_zero.distributed import uncaught
    from hf_zero.errors import HfZeroError

    _reads.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    if not _stated:
        uncaught.explanations.append(explain)
    _stated[:] = version, variable
    uncaught.watch(HfZeroError)


def explain(error: BaseException) -> Exception | None:
    """Return the error to report in place of ``error``, if a check of the version has raised it."""
    from hf_zero.errors import ConfigError

    lines = list[tuple[str, int]]()
    trace = error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    if not lines or lines[-1][0] not in _reads or not isinstance(error, Exception):
        return None
    file, line = lines[-1]
    version, variable = _stated
    says_it = version in str(error) and _DEEPSPEED.search(str(error)) is not None
    if not says_it and not any(0 <= line - read <= NEAR for read in _reads[file]):
        return None
    asked = [f", called at {name}:{number}" for name, number in lines if name != file][-1:]
    return ConfigError(
        f"{file}:{line}{''.join(asked)}, refuses version {version} of deepspeed, which hf-zero "
        f"states; {variable} states another release, one that it accepts, and "
        "HF_ZERO_BACKEND=deepspeed chooses DeepSpeed itself, where it is installed"
    )
