"""Publication of the complete files of a conversion in a folder that may hold others: all of them
are put in place, or none.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hf_zero.checkpoint import find, storage
from hf_zero.logging import logger

FOLDER = find.NEW + "publish"


class Publication:
    """Files that replace those of the folder ``target``. An exception in the ``with`` block puts
    back what they have replaced, of which hard links are kept until the end.

    A process that is killed meanwhile leaves some old and some new files, and the links.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folder = target / FOLDER
        self.new = self._folder / "new"  # for files that are not yet in place
        self._old = self._folder / "old"
        self._before: dict[Path, Path | None] = {}  # by path: the copy of what was there

    def __enter__(self) -> Publication:
        storage.remove_tree(self._folder)  # of a process that was killed
        self.new.mkdir(parents=True)
        self._old.mkdir()
        return self

    def replace(self, file: Path, name: str) -> None:
        """Rename ``file`` to ``name`` in the target."""
        self._keep(self._target / name)
        os.replace(file, self._target / name)

    def replace_all(self) -> None:
        """Rename the files in :attr:`new`, also those in folders, to their names in the target. A
        link in place of one of these folders, which could lead out of the target, is replaced.
        """
        for item in sorted(self.new.rglob("*")):
            name = str(item.relative_to(self.new))
            if item.is_dir():
                self._make(self._target / name)
            else:
                self.replace(item, name)

    def remove(self, name: str) -> None:
        """Remove the file ``name`` from the target if it exists."""
        self._keep(self._target / name)
        (self._target / name).unlink(missing_ok=True)

    def _make(self, folder: Path) -> None:
        if not folder.is_symlink() and folder.exists():
            return
        self._keep(folder)
        folder.unlink(missing_ok=True)
        folder.mkdir()

    def _keep(self, path: Path) -> None:
        """Keep a copy of the file or link ``path``, unless there is one already."""
        if path in self._before or (path.is_dir() and not path.is_symlink()):
            return
        copy = self._old / path.relative_to(self._target)
        self._before[path] = copy if os.path.lexists(path) else None
        if self._before[path] is None:
            return
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy, follow_symlinks=False)
        except OSError:  # a file system without hard links
            os.rename(path, copy)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failures = {} if error is None else self._put_back()
        if failures:
            logger.error(
                "%s: %s could not be put back after an error (%s); the files from before are in %s",
                self._target,
                ", ".join(failures),
                ", ".join(dict.fromkeys(failures.values())),
                self._old,
            )
            return
        try:
            shutil.rmtree(self._folder)
        except OSError as failure:
            logger.warning("%s is left and can be removed (%s)", self._folder, failure)

    def _put_back(self) -> dict[str, str]:
        """Undo what was done, last first. Returns the names for which that failed, and why."""
        failures = {}
        for path, copy in reversed(self._before.items()):
            try:
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()  # a folder that was made
                if copy is None:
                    path.unlink(missing_ok=True)
                elif os.path.lexists(copy):  # else it was not touched
                    os.replace(copy, path)
            except OSError as failure:
                failures[str(path.relative_to(self._target))] = failure.strerror or str(failure)
        return failures
