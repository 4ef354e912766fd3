"""Commands that tests run, with a limit each: their output goes to files and not through pipes,
which a process that outlives the command keeps open, and at the limit their whole group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own session, and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def completed(
    command: Sequence[str | Path],
    timeout: float = 300.0,
    *,
    input: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The exit code and output of ``command``, once it has ended; what it has started and left is
    killed.

    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds; ``CalledProcessError`` where
    ``check`` is true and the exit code not 0. Both have the output.
    """
    with _file() as given, _file() as out, _file() as err:
        given.write(input)
        given.seek(0)
        process = subprocess.Popen(
            command,
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=given,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end_group(process)
        out.seek(0)
        err.seek(0)
        texts = out.read(), err.read()
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    if check and code:
        raise subprocess.CalledProcessError(code, command, *texts)
    return subprocess.CompletedProcess(command, code, *texts)
