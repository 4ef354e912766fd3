"""Make, extend or reuse the virtual environment of quickstart, test and docs.

``scripts/environment.sh`` runs this file with the interpreter that the environment is made with:
``environment.py FOLDER EXTRA ...``. It uses the standard library alone. torch is installed first,
because it has two builds for Linux: one for CPUs, of PyTorch's own index, and the ordinary one of
the package index, with gigabytes of CUDA libraries.

The stamp in the folder names what a finished installation was made of. A call that finds it
unchanged installs nothing; one that finds none, after an interruption, continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILDS = {"cpu": "the build for CPUs", "cuda": "the build for NVIDIA GPUs"}
BROKEN = {(3, 14, 1): "the pinned networkx and torchvision refuse it for a bug of its dataclasses"}
# MB of downloads and on disk, measured with the pins of constraints.txt: the package with a build
# of torch, and what each extra adds. The ordinary build of torch brings Triton.
SIZES = {
    "cpu": (310, 1400),
    "cuda": (2860, 5300),
    "test": (60, 180),
    "lint": (90, 390),
    "docs": (20, 90),
    "triton": (200, 690),
}
RATE = 100 / 8  # MB/s: a line of 100 Mbit/s
INSTALLED = 25  # MB/s written by pip on a laptop


class Refused(Exception):
    """A condition that ends the installation. The message names it and the remedy, in one line."""


@dataclass(frozen=True)
class Stamp:
    """A finished installation: version of Python, build of torch, extras, and a hash of the files
    that describe the package.
    """

    python: str
    torch: str
    extras: tuple[str, ...]
    files: str

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """Return the stamp at ``path``; None if the installation has not finished."""
        try:
            row = json.loads(path.read_text())
            return cls(**{**row, "extras": tuple(row["extras"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")


class Environment:
    """The virtual environment in ``folder``."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = folder / "hf-zero.json"
        self.log = folder / "install.log"
        self.variables = variables

    def prepare(self, extras: Sequence[str]) -> None:
        """Install the package with ``extras``, unless they are there.

        Raises Refused.
        """
        started = time.monotonic()
        refuse_platform()
        self._refuse_other_python()
        asked = self.variables.get("HF_ZERO_TORCH", "")
        if asked and asked not in BUILDS:
            raise Refused(f"HF_ZERO_TORCH is {asked!r}; it takes {' or '.join(BUILDS)}")
        before = Stamp.read(self.stamp)
        files = digest()
        fresh = before and before.files == files and asked in ("", before.torch)
        if before and fresh and {*extras} <= {*before.extras}:
            print(f"environment: {self.folder} is up to date")
            return
        wanted = tuple(sorted({*extras, *(before.extras if before else ())}))
        build = asked or (before.torch if before else "cuda" if has_nvidia_driver() else "cpu")
        kept = before.extras if before and before.torch == build else ()
        added = tuple(name for name in wanted if name not in kept)
        if before is None or before.torch != build:
            extra = f"[{','.join(added)}]" if added else ""
            what = f"installs torch {pinned('torch')} ({BUILDS[build]}) and hf-zero{extra} into"
            parts = [build, *added]
        else:
            what = f"adds {' and '.join(added) or 'changes of the project files'} to"
            parts = [*added]
        if build == "cpu" and "test" in added:
            parts.append("triton")
        size = announced(parts)
        self._announce(f"{what} {self.folder}", size)
        self.stamp.unlink(missing_ok=True)
        self._create()
        build = self._install_torch(build, asked)
        named = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
        self._pip(["--editable", named], size[1])
        Stamp(platform.python_version(), build, wanted, files).write(self.stamp)
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        if not [*(ROOT / "hf_zero").glob(f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}")]:
            headers = "python{}.{}-dev".format(*sys.version_info)
            print(
                "environment: the C++ core was not built, for want of a compiler or of Python's "
                f"headers (Debian: g++ {headers}); torch's operations run in its place"
            )
        print(f"environment: ready after {time.monotonic() - started:.0f} s")

    def _refuse_other_python(self) -> None:
        """Raise Refused if the environment is that of another Python, or of one that is gone."""
        try:
            settings = (self.folder / "pyvenv.cfg").read_text()
        except OSError:
            return
        found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", settings, re.MULTILINE)
        version = found[1] if found else "?"
        mine = "{}.{}".format(*sys.version_info)
        remedy = f"remove it (rm -r {self.folder}), or set HF_ZERO_VENV to another folder"
        if version != mine:
            raise Refused(f"{self.folder} was made by Python {version}, not {mine}; {remedy}")
        if self.python.is_symlink() and not self.python.exists():
            raise Refused(f"the Python {version} that made {self.folder} is gone; {remedy}")

    def _announce(self, what: str, size: tuple[int, int]) -> None:
        """Print ``what`` is installed, how large it is and how long that takes.

        Raises Refused if the disk has no room for it.
        """
        load, disk = size
        minutes = max(1, round((load / RATE + disk / INSTALLED) / 60))
        long = f"about {minutes} min at 100 Mbit/s"
        sizes = f"{load:,} MB to download, {disk / 1000:.1f} GB on disk, {long}, once"
        print(f"environment: {what}{': ' if load else ''}{sizes if load else ''}", flush=True)
        parent = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        free = shutil.disk_usage(parent).free / 1e6
        if free < disk:
            raise Refused(
                f"{parent} has {free / 1000:.1f} GB free and {disk / 1000:.1f} GB are needed; make "
                "room, or set HF_ZERO_VENV to a folder on another disk"
            )

    def _create(self) -> None:
        """Make the environment, or complete one whose making was interrupted. Raises Refused."""
        pip = [self.python, "-m", "pip", "--version"]
        if self.python.exists() and subprocess.run(pip, capture_output=True).returncode == 0:
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.folder], capture_output=True, text=True
        )
        if made.returncode:
            said = (made.stderr.strip() or made.stdout.strip() or "no message").splitlines()[-1]
            raise Refused(
                f"{self.folder} cannot be made ({said}); set HF_ZERO_VENV to another folder"
            )

    def _install_torch(self, build: str, asked: str) -> str:
        """Install the pinned torch and return its build.

        A build for CPUs is looked for in PyTorch's index and in the places that pip's settings
        name; ``===`` keeps pip from taking it for the ordinary one. Raises Refused.
        """
        version = pinned("torch")
        if build == "cpu":
            wheel = ["--extra-index-url", CPU_INDEX, "--no-deps", f"torch=={version}+cpu"]
            try:
                self._pip([*wheel, "--retries", "0", "--timeout", "20"], SIZES["cpu"][1])
                return "cpu"
            except Refused as error:
                absent = re.search("No matching distribution found", self.log.read_text())
                if asked or not absent:
                    raise
                self._refuse_without_index(error)
            self._announce(
                f"PyTorch's index offers no build of torch {version} for CPUs here (Python "
                "{}.{}): the ordinary build comes instead".format(*sys.version_info),
                SIZES["cuda"],
            )
        self._pip([f"torch==={version}"], SIZES["cuda"][1])
        return "cuda"

    def _refuse_without_index(self, error: Refused) -> None:
        """Raise Refused if the package index cannot be reached either."""
        ask = [self.python, "-m", "pip", "index", "versions", "--retries", "0", "packaging"]
        if subprocess.run(ask, capture_output=True).returncode:
            raise Refused(explained(self.log.read_text(), self.log)) from error

    def _pip(self, arguments: Sequence[str], disk: int) -> None:
        """Install ``arguments`` under the constraints; show progress towards ``disk`` MB.

        Raises Refused, with the cause in pip's output.
        """
        scratch = self.folder.resolve() / "tmp"  # one disk for downloads and what becomes of them
        scratch.mkdir(exist_ok=True)
        command = [self.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        if "--no-deps" not in arguments:
            command += ["-c", ROOT / "constraints.txt"]
        environment = {**os.environ, "TMPDIR": str(scratch), "PIP_PROGRESS_BAR": "off"}
        with self.log.open("w", buffering=1) as log:
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
            progress = Progress(self.folder, disk)
            try:
                for line in process.stdout or ():
                    log.write(line)
                    progress.line(line)
            finally:
                progress.stop()
                process.wait()
        if process.returncode:
            raise Refused(explained(self.log.read_text(), self.log))


class Progress:
    """A bar on a terminal: MB written to the disk since it began, of those expected.

    pip's own bars would be dozens, one for each package.
    """

    WIDTH = 24

    def __init__(self, folder: Path, expected: int) -> None:
        self.folder, self.expected = folder, expected
        self.used, self.began = shutil.disk_usage(folder).used, time.monotonic()
        self.doing = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)
        if sys.stderr.isatty():
            self._thread.start()

    def line(self, text: str) -> None:
        """Take a line of pip's output: the package that it collects, downloads or installs."""
        found = re.match(r"\s*(Collecting|Downloading|Installing|Building)\s+([\w.-]*)", text)
        if found:
            self.doing = f"{found[1].lower()} {found[2].partition('-')[0]}"

    def stop(self) -> None:
        """Remove the bar."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        while not self._ended.wait(0.5):
            megabytes = max(0, shutil.disk_usage(self.folder).used - self.used) // 10**6
            part = min(0.99, megabytes / self.expected)
            bar = ("#" * round(self.WIDTH * part)).ljust(self.WIDTH, ".")
            minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
            print(
                f"\r\x1b[K  [{bar}] {megabytes:,} of {self.expected:,} MB  {minutes}:{seconds:02}  "
                f"{self.doing[:32]}",
                end="",
                file=sys.stderr,
                flush=True,
            )


def announced(parts: Sequence[str]) -> tuple[int, int]:
    """Return MB of downloads and MB on disk of ``parts``: a build of torch, extras."""
    rows = [SIZES[name] for name in parts]
    return sum(load for load, _ in rows), sum(disk for _, disk in rows)


def refuse_platform() -> None:
    """Raise Refused on a system that torch has no wheels for."""
    version = sys.version_info[:3]
    if version in BROKEN:
        named = ".".join(map(str, version))
        raise Refused(f"Python {named} cannot be used: {BROKEN[version]}; set PYTHON to another")
    if sys.platform != "linux":
        raise Refused(f"hf-zero runs on Linux, and this is {sys.platform}; use a container or WSL")
    if sys.maxsize < 2**32:
        raise Refused(
            f"{sys.executable} is a 32-bit Python; torch needs one of 64 bits: set PYTHON"
        )
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        raise Refused(
            f"{sys.executable} is built for musl, and torch has wheels for glibc alone; use an "
            "image of Debian, Ubuntu or Fedora"
        )


def has_nvidia_driver() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")  # WSL has the tool alone
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def pinned(name: str) -> str:
    """Return the version of ``name`` in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text()
    found = re.search(rf"^{re.escape(name)}==(\S+)", text, re.MULTILINE)
    if found is None:
        raise Refused(f"constraints.txt pins no {name}; restore the file")
    return found[1]


def digest() -> str:
    """Return a hash of the files that an installation depends on, and of the checkout's path."""
    state = hashlib.sha256(str(ROOT).encode())
    files = [ROOT / name for name in ("constraints.txt", "pyproject.toml", "setup.py")]
    for path in (*files, *sorted((ROOT / "kernels" / "cpu").iterdir())):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


NETWORK = (
    "NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout"
    "|Network is unreachable|ReadTimeout|ProxyError|SSLError|ConnectionResetError"
)


def explained(output: str, log: Path) -> str:
    """Return pip's ``output`` of a failed installation as one line: the cause and the remedy."""
    python = "{}.{}".format(*sys.version_info)
    where = f"(pip's output: {log})"
    if re.search(r"No space left on device|Errno 28|Disk quota exceeded", output):
        return (
            f"the disk is full; make room for it and call again, the installation goes on {where}"
        )
    refused = re.search(r"(?:HTTP error|Could not fetch URL \S+:) (4\d\d)[^\n]*", output)
    if refused or "Tunnel connection failed" in output:
        link = re.search(r"(?:/simple/|/packages/\S*/)([\w.-]+)", refused[0] if refused else output)
        package = link[1].split("-")[0] if link else "a package"
        reason = refused[1] if refused else "a proxy"
        return (
            f"the package index or a proxy refuses {package} ({reason}); allow it there, or name "
            f"another index in PIP_INDEX_URL {where}"
        )
    if network := re.search(NETWORK, output):
        return (
            f"the package index cannot be reached ({network[0]}); connect to a network, or name a "
            f"mirror in PIP_INDEX_URL {where}"
        )
    if missing := re.search(r"No matching distribution found for (\S+)", output):
        machine = platform.machine()
        return (
            f"no release of {missing[1]} for Python {python} on {machine}; set PYTHON to another "
            f"version, or name an index that has it in PIP_INDEX_URL {where}"
        )
    if conflict := re.search(r"The conflict is caused by:\s*([^\n]+)\n\s*([^\n]+)", output):
        return f"pins contradict each other: {conflict[1].strip()}; {conflict[2].strip()} {where}"
    lines = re.findall(r"^ERROR: (.*)$", output, re.MULTILINE) or ["no message"]
    return f"pip failed: {lines[-1]} {where}"


def main() -> int:
    folder, *extras = sys.argv[1:]
    folder = min(folder, os.path.relpath(folder), key=len)  # as a person would write it
    try:
        Environment(Path(folder), os.environ).prepare(extras)
    except Refused as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
