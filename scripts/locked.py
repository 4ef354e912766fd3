"""Install a wheel of hf-zero with the files that requirements.lock names: any index may serve them,
because pip compares their hashes.

    python locked.py WHEEL LOCK [EXTRAS]    # EXTRAS: names of extras, separated by commas

A package whose version has a local part, such as the CPU build of torch (2.13.0+cpu), is in no lock
of the package index: it is installed by its version, and the output names it. The file imports the
standard library alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PIP = (sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-input")


class Pin(NamedTuple):
    """A line of a lock: ``name==version`` with a marker, and its hashes as options of pip."""

    requirement: str
    hashes: tuple[str, ...]

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2].partition(";")[0].strip()


def canonical(name: str) -> str:
    """Return a package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, list[Pin]]:
    """Return the pins of a lock by canonical name: several if markers choose among them."""
    found: dict[str, list[Pin]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        head, *hashes = re.split(r"\s+(?=--hash=)", line.partition("#")[0].strip())
        if head:
            name = canonical(re.split(r"[=\[ ]", head)[0])
            found.setdefault(name, []).append(Pin(head, tuple(hash_.strip() for hash_ in hashes)))
    return found


def chosen(
    report: Mapping[str, Any], pins: Mapping[str, list[Pin]], own: str = "hf-zero"
) -> tuple[list[str], list[str]]:
    """Return what pip's ``report`` is to install: lines with hashes, and requirements outside the
    lock, whose versions have a local part. Exit with one line if another one is not in ``pins``.
    """
    locked, outside, missing = [], [], []
    for item in report["install"]:
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
        if name == own:
            continue
        hashes = [each.hashes for each in pins.get(name, []) if each.version == version]
        if hashes:
            locked.append(" ".join([f"{name}=={version}", *hashes[0]]))
        else:
            (outside if "+" in version else missing).append(f"{name}=={version}")
    if missing:
        sys.exit(f"{', '.join(missing)}: not in requirements.lock; update it as its head says")
    return locked, outside


def main(wheel: str, lock: str, extras: str = "") -> None:
    pins = read_lock(Path(lock).read_text())
    with tempfile.TemporaryDirectory() as folder:
        constraints, report, files = (Path(folder) / name for name in ("pins", "report", "files"))
        constraints.write_text(_lines(pin.requirement for each in pins.values() for pin in each))
        asked = f"hf-zero[{extras}] @ {Path(wheel).resolve().as_uri()}"
        dry = ["--dry-run", "--quiet", "--report", report, "--constraint", constraints]
        subprocess.run([*PIP, *dry, asked], check=True)
        locked, outside = chosen(json.loads(report.read_text()), pins)
        files.write_text(_lines(locked))
        subprocess.run([*PIP, "--no-deps", "--require-hashes", "-r", files], check=True)
        for requirement in outside:
            print(
                f"{requirement}: not of the package index, installed without its hash", flush=True
            )
        subprocess.run([*PIP, "--no-deps", *outside, wheel], check=True)


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


if __name__ == "__main__":
    main(*sys.argv[1:])
