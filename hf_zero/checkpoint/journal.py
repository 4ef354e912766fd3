"""What an interrupted conversion has written already, so that the next one of the same kind goes on
behind it.

The journal is a text file in the target, beside the temporary files it speaks of: a first line that
says which conversion this is, then a line for each stretch that lies on the device. A line cut off
by a crash is not counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_zero.checkpoint import folders

JOURNAL = folders.NEW + "journal"


def temporary(target: Path, name: str) -> Path:
    """The path under which the file ``name`` of ``target`` is written until it is whole."""
    return (target / name).with_name(folders.NEW + Path(name).name)


class Journal:
    """The journal in ``target`` of the conversion ``identity`` into ``names``.

    What another conversion left there is removed.
    """

    def __init__(self, target: Path, identity: str, names: Sequence[str]) -> None:
        self._path, self._names = target / JOURNAL, tuple(names)
        self._target = target
        left = _read(self._path)
        self._kept: dict[str, int] = {}
        if left and left[0].get("identity") == identity:
            self._kept = dict(_stretches(target, names, left[1:]))
        else:
            _remove(target, left)
        # Written anew, so that the lines that follow do not stand behind one that was cut off.
        lines = [
            {"identity": identity, "files": list(names)},
            *({"file": f, "bytes": n} for f, n in self._kept.items()),
        ]
        new = self._path.with_name(self._path.name + "-new")
        folders.write_file(new, "".join(json.dumps(line) + "\n" for line in lines).encode())
        os.replace(new, self._path)

    def kept(self, name: str) -> int:
        """Bytes from the start of the temporary file of ``name`` that need not be written again."""
        return self._kept.get(name, 0)

    def note(self, name: str, nbytes: int) -> None:
        """The first ``nbytes`` of the temporary file of ``name`` are on the device."""
        with open(self._path, "ab") as file:
            file.write(json.dumps({"file": name, "bytes": nbytes}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def clear(self) -> None:
        """Remove the journal and every temporary file of this conversion."""
        _remove(self._target, [{"files": list(self._names)}])


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    lines: list[dict[str, Any]] = []
    # behind the last newline stands nothing, or a line that was cut off
    for line in content.split(b"\n")[:-1]:
        try:
            read = json.loads(line)
        except ValueError:
            break
        if not isinstance(read, dict):
            break
        lines.append(read)
    return lines


def _stretches(
    target: Path, names: Sequence[str], lines: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, int]]:
    """What ``lines`` say of files that are still there, and as long as that."""
    for line in lines:
        name, nbytes = line.get("file"), line.get("bytes")
        if isinstance(name, str) and name in names and isinstance(nbytes, int):
            with suppress(FileNotFoundError):
                if temporary(target, name).stat().st_size >= nbytes:
                    yield name, nbytes


def _remove(target: Path, lines: Sequence[dict[str, Any]]) -> None:
    listed = lines[0].get("files") if lines else None
    for name in listed if isinstance(listed, list) else ():
        # What a journal names is trusted no further than to lie in its own folder, one level down
        # at most.
        if (
            isinstance(name, str)
            and name
            and ".." not in Path(name).parts
            and not Path(name).is_absolute()
        ):
            with suppress(FileNotFoundError):
                temporary(target, name).unlink()
    (target / JOURNAL).unlink(missing_ok=True)
