"""Compiles the simulated device, once for each state of its sources and version of torch.

Nothing here imports torch: to pose as CUDA the library has to be loaded before torch looks for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.commands import completed

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-w", "-DUSE_C10D_GLOO"]
LIBRARIES = ["c10", "torch_cpu", "torch", "torch_python"]


class CannotBuild(RuntimeError):
    """There is no compiler, or the sources do not compile."""


def compiler() -> str | None:
    """The C++ compiler: CXX, or the one on PATH."""
    chosen = os.environ.get("CXX", "").split()
    return shutil.which(chosen[0] if chosen else "g++") or shutil.which("c++")


def why_not() -> str:
    """Why the device cannot be built on this machine; empty where it can."""
    if platform.system() != "Linux":
        return "the simulated device needs Linux: memfd_create and protected pages"
    if compiler() is None:
        return "the simulated device needs a C++20 compiler on PATH (g++), or CXX naming one"
    return ""


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _command() -> list[str]:
    folder = torch_folder()
    headers = [folder / "include", folder / "include/torch/csrc/api/include"]
    headers.append(Path(sysconfig.get_paths()["include"]))
    found = compiler()
    assert found is not None
    return [found, *FLAGS, *(f"-I{path}" for path in headers)]


def fingerprint() -> str:
    """Return a hash of the sources, this torch and this Python."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update((torch_folder() / "version.py").read_bytes())
    digest.update(repr((FLAGS, sys.version, str(torch_folder()))).encode())
    return digest.hexdigest()[:16]


def cache() -> Path:
    """The folder of built libraries: in LATE_CACHE, the user's cache, or the temporary folder."""
    given = os.environ.get("LATE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    root = Path(given) if given else Path.home() / ".cache"
    try:
        (root / "hf-zero-late").mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.gettempdir())
        (root / "hf-zero-late").mkdir(exist_ok=True)
    return root / "hf-zero-late"


def library() -> Path:
    """The library, built where it was not. Processes that ask at once wait for one of them.

    Raises:
        CannotBuild: no compiler, or its errors.
    """
    target = cache() / fingerprint() / "late_C.so"
    if target.exists():
        return target
    if reason := why_not():
        raise CannotBuild(reason)
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                os.replace(_build(Path(work)), target)
    return target


def _build(work: Path) -> Path:
    """Compile all sources as one: torch's headers take most of the time, and are read once."""
    source, linked = work / "late_C.cpp", work / "late_C.so"
    source.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
    libs = torch_folder() / "lib"
    links = [f"-L{libs}", *(f"-l{name}" for name in LIBRARIES), f"-Wl,-rpath,{libs}", "-ldl"]
    _run([*_command(), "-shared", "-pthread", str(source), *links, "-o", str(linked)])
    return linked


def _run(command: Sequence[str]) -> None:
    done = completed(command, timeout=1200)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(library())
