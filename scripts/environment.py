"""Make, extend or reuse the virtual environment of quickstart, test and docs.

``scripts/environment.sh`` runs this file with the interpreter that the environment is made with:
``environment.py FOLDER EXTRA ...``. It uses the standard library alone. torch is installed first,
because it has two builds for Linux: one for CPUs, of PyTorch's own index, and the ordinary one of
the package index, with gigabytes of CUDA libraries.

The stamp in the folder names what a finished installation was made of. A call that finds it
unchanged installs nothing; one that finds none, after an interruption, continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 14))  # the oldest and the newest
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPATIENT = ("--retries", "2", "--timeout", "20")  # of pip with an index that may be out of reach
BUILDS = {"cpu": "the build for CPUs", "cuda": "the build for NVIDIA GPUs"}
BROKEN = {(3, 14, 1): "the pinned networkx and torchvision refuse it for a bug of its dataclasses"}
# Variables that let pip install elsewhere, or nothing, and report success.
ELSEWHERE = {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON", "PIP_DRY_RUN"),
    *("PIP_NO_DEPS", "PIP_REPORT", "PYTHONPATH", "PYTHONHOME"),
}
# MB of downloads and on disk, measured with the pins of constraints.txt: the package with a build
# of torch, and what each extra adds. The ordinary build of torch brings Triton.
SIZES = {
    "cpu": (310, 1400),
    "cuda": (2860, 5300),
    "test": (60, 180),
    "lint": (90, 390),
    "docs": (20, 90),
    "report": (35, 90),
    "triton": (200, 690),
}
RATE = 100 / 8  # MB/s: a line of 100 Mbit/s
INSTALLED = 25  # MB/s written by pip on a laptop


class Refused(Exception):
    """A condition that ends the installation. The message names it and the remedy, in one line."""


@dataclass(frozen=True)
class Stamp:
    """An installation: version of Python, build of torch, extras, and a hash of the files that
    describe the package, which is empty until the installation has finished.
    """

    python: str
    torch: str
    extras: tuple[str, ...]
    files: str

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """Return the stamp at ``path``; None if there is none."""
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
        removal = f"rm -r {shlex.quote(str(folder))}"
        self.remedy = f"remove it ({removal}), or set HF_ZERO_VENV to another"

    def prepare(self, extras: Sequence[str]) -> None:
        """Install the package with ``extras``, unless they are there.

        Raises Refused.
        """
        started = time.monotonic()
        refuse_platform()
        self._refuse_foreign()
        asked = self.variables.get("HF_ZERO_TORCH", "")
        if asked and asked not in BUILDS:
            raise Refused(f"HF_ZERO_TORCH is {asked!r}; it takes {' or '.join(BUILDS)}")
        before, files = Stamp.read(self.stamp), digest()
        done = before if before and before.files else None
        fresh = done and done.files == files and asked in ("", done.torch)
        if done and fresh and {*extras} <= {*done.extras}:
            print(f"environment: {self.folder} is up to date")
            return
        wanted = tuple(sorted({*extras, *(before.extras if before else ())}))
        self._create()
        build, reason = (asked or before.torch, "") if asked or before else self._choose_build()
        size = self._describe(build, wanted, done, reason)
        Stamp(platform.python_version(), build, wanted, "").write(self.stamp)
        self._remove_half_written()
        self._install_torch(build)
        named = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
        self._pip(["--editable", named], size[1])
        self._refuse_elsewhere()
        Stamp(platform.python_version(), build, wanted, files).write(self.stamp)
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        if not [*(ROOT / "hf_zero").glob(f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}")]:
            headers = "python{}.{}-dev".format(*sys.version_info)
            print(
                "environment: the C++ core was not built, for want of a compiler or of Python's "
                f"headers (Debian: g++ {headers}); torch's operations run in its place"
            )
        print(f"environment: ready after {time.monotonic() - started:.0f} s")

    def _refuse_foreign(self) -> None:
        """Raise Refused if the folder is none that these scripts made for this Python and this
        place: what it holds would be lost, or its commands would run another environment.
        """
        if not self.folder.is_dir():
            if self.folder.exists():
                raise Refused(f"{self.folder} is no folder; set HF_ZERO_VENV to another")
            return
        settings = self.folder / "pyvenv.cfg"
        if not settings.is_file():
            if any(self.folder.iterdir()):
                raise Refused(
                    f"{self.folder} holds files and is no virtual environment; set HF_ZERO_VENV to "
                    "another folder"
                )
            return
        found = re.search(
            r"^version(?:_info)?\s*=\s*(\d+\.\d+)", settings.read_text(), re.MULTILINE
        )
        version, mine = found[1] if found else "?", "{}.{}".format(*sys.version_info)
        if version != mine:
            raise Refused(f"{self.folder} was made by Python {version}, not {mine}; {self.remedy}")
        if self.python.is_symlink() and not self.python.exists():
            raise Refused(f"the Python {version} that made {self.folder} is gone; {self.remedy}")
        activate = self.folder / "bin" / "activate"
        text = activate.read_text() if activate.is_file() else ""
        made = re.search(r"""^\s*(?:export )?VIRTUAL_ENV=["']?(/[^"'\n]+)""", text, re.MULTILINE)
        if made and not (os.path.exists(made[1]) and os.path.samefile(made[1], self.folder)):
            raise Refused(f"{self.folder} was moved or copied from {made[1]}; {self.remedy}")

    def _has_pip(self) -> bool:
        pip = [self.python, "-I", "-m", "pip", "--version"]
        return (
            self.python.exists()
            and subprocess.run(pip, capture_output=True, env=self._settings()).returncode == 0
        )

    def _choose_build(self) -> tuple[str, str]:
        """Return the build of torch for this machine, before anything of it is announced, and why
        it is another one than that for CPUs where there is no GPU.

        Raises Refused if no index can be reached.
        """
        if has_nvidia_driver():
            return "cuda", ""
        version = pinned("torch")
        code, output = self._versions_of("torch", "--extra-index-url", CPU_INDEX, *IMPATIENT)
        if code == 0 and f"{version}+cpu" in output:
            return "cpu", ""
        if self._versions_of("packaging", "--retries", "0")[0]:
            self.log.write_text(output)
            raise Refused(explained(output, self.log))
        why = "cannot be reached" if re.search(NETWORK, output) else "has no build for CPUs"
        return "cuda", (
            f"PyTorch's index {why} (torch {version}, Python "
            "{}.{}); HF_ZERO_TORCH=cpu prevents the build with CUDA".format(*sys.version_info)
        )

    def _versions_of(self, package: str, *options: str) -> tuple[int, str]:
        """Return the exit code and the output of pip's list of versions of ``package``."""
        ask = [self.python, "-I", "-m", "pip", "index", "versions", *options, package]
        done = subprocess.run(ask, capture_output=True, text=True, env=self._settings())
        return done.returncode, done.stdout + done.stderr

    def _describe(
        self, build: str, wanted: Sequence[str], done: Stamp | None, reason: str
    ) -> tuple[int, int]:
        """Print ``reason`` and what is installed; return MB of downloads and on disk.

        Raises Refused if the disk has no room for it.
        """
        kept = done.extras if done and done.torch == build else ()
        added = tuple(name for name in wanted if name not in kept)
        if done is None or done.torch != build:
            extra = f"[{','.join(added)}]" if added else ""
            what = f"installs torch {pinned('torch')} ({BUILDS[build]}) and hf-zero{extra} into"
            parts = [build, *added]
        else:
            what = f"adds {' and '.join(added) or 'changes of the project files'} to"
            parts = [*added]
        if build == "cpu" and "test" in added:
            parts.append("triton")
        load, disk = size = announced(parts)
        if reason:
            print(f"environment: {reason}", flush=True)
        minutes = max(1, round((load / RATE + disk / INSTALLED) / 60))
        long = f"about {minutes} min at 100 Mbit/s"
        sizes = f"{load:,} MB to download, {disk / 1000:.1f} GB on disk, {long}, once"
        print(f"environment: {what} {self.folder}{f': {sizes}' if load else ''}", flush=True)
        parent = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        stamp = Stamp.read(self.stamp)
        present = 0.0  # of an installation that was interrupted
        if self.folder.is_dir() and not (stamp and stamp.files):
            found = (path.lstat() for path in self.folder.rglob("*"))
            present = sum(status.st_size for status in found) / 1e6
        free, needed = shutil.disk_usage(parent).free / 1e6, load + disk - present
        if free < needed:
            raise Refused(
                f"{parent} has {free / 1000:.1f} GB free and {needed / 1000:.1f} GB are needed; "
                "make room, or set HF_ZERO_VENV to a folder on another disk"
            )
        return size

    def _create(self) -> None:
        """Make the environment, or make it anew where an interruption left it without pip.

        Raises Refused.
        """
        if self._has_pip():
            return
        packages = (info.name for info in self.folder.glob("lib/python*/site-packages/*.dist-info"))
        if any(not name.startswith(("pip-", "setuptools-")) for name in packages):
            raise Refused(f"{self.folder} has packages and no pip that runs; {self.remedy}")
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.folder], capture_output=True, text=True
        )
        if made.returncode:
            said = (made.stderr.strip() or made.stdout.strip() or "no message").splitlines()[-1]
            raise Refused(
                f"{self.folder} cannot be made ({said}); set HF_ZERO_VENV to another folder"
            )

    def _remove_half_written(self) -> None:
        """Let pip install again what an interruption left half written: pip takes a package with
        metadata for installed, and writes INSTALLER after all else.
        """
        for info in self.folder.glob("lib/python*/site-packages/*.dist-info"):
            if not (info / "INSTALLER").exists():
                shutil.rmtree(info)

    def _refuse_elsewhere(self) -> None:
        """Raise Refused if pip has not installed into this folder, whatever it reported."""
        names = ("torch", "accelerate", "hf_zero")
        find = f"import importlib.util as u; assert all(map(u.find_spec, {names}))"
        command = [self.python, "-I", "-c", find]
        if subprocess.run(command, capture_output=True, env=self._settings()).returncode:
            raise Refused(
                f"pip reported success, but {', '.join(names)} are not all in {self.folder}: look "
                "for target, prefix or user in `pip config list`, and remove it"
            )

    def _settings(self) -> dict[str, str]:
        """Return the variables of pip's process."""
        return {name: value for name, value in os.environ.items() if name not in ELSEWHERE}

    def _install_torch(self, build: str) -> None:
        """Install the pinned torch.

        A build for CPUs is looked for in PyTorch's index and in the places that pip's settings
        name; ``===`` keeps pip from taking it for the ordinary one. Raises Refused.
        """
        version = pinned("torch")
        if build == "cuda":
            self._pip([f"torch==={version}"], SIZES["cuda"][1])
            return
        wheel = f"torch=={version}+cpu"
        try:
            self._pip(
                ["--extra-index-url", CPU_INDEX, "--no-deps", wheel, *IMPATIENT], SIZES["cpu"][1]
            )
        except Refused as error:
            lost = re.search(NETWORK, self.log.read_text())
            if lost is None or self._versions_of("packaging", "--retries", "0")[0]:
                raise
            raise Refused(
                f"PyTorch's index, {CPU_INDEX}, cannot be reached ({lost[0]}): allow it, name a "
                f"place that has {wheel} in PIP_FIND_LINKS, or set HF_ZERO_TORCH=cuda for the "
                f"ordinary build of {SIZES['cuda'][0]:,} MB (pip's output: {self.log})"
            ) from error

    def _pip(self, arguments: Sequence[str], disk: int) -> None:
        """Install ``arguments`` under the constraints; show progress towards ``disk`` MB.

        Raises Refused, with the cause in pip's output.
        """
        scratch = self.folder.resolve() / "tmp"  # one disk for downloads and what becomes of them
        scratch.mkdir(exist_ok=True)
        command = [self.python, "-I", "-m", "pip", "install", "--no-input"]
        command.append("--disable-pip-version-check")
        if "--no-deps" not in arguments:
            command += ["-c", ROOT / "constraints.txt"]
        environment = {**self._settings(), "TMPDIR": str(scratch), "PIP_PROGRESS_BAR": "off"}
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
    """MB written to the disk since it began, of those expected, if any: a bar on a terminal;
    elsewhere a line every 15 seconds.

    pip's own bars would be dozens, one for each package.
    """

    WIDTH = 24
    LINES_SECONDS = 15.0

    def __init__(self, folder: Path, expected: int) -> None:
        self.folder, self.expected = folder, expected
        self.used, self.began = shutil.disk_usage(folder).used, time.monotonic()
        self.doing = ""
        self._ended = threading.Event()
        draw = self._draw if sys.stderr.isatty() else self._print
        self._thread = threading.Thread(target=draw, daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        """Take a line of pip's output: the package that it collects, downloads or installs."""
        found = re.match(r"\s*(Collecting|Downloading|Installing|Building)\s+([\w.-]*)", text)
        if found:
            self.doing = f"{found[1].lower()} {found[2].partition('-')[0]}"

    def stop(self) -> None:
        """Remove the bar."""
        self._ended.set()
        self._thread.join()
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        while not self._ended.wait(0.5):
            part, text = self._state()
            bar = ("#" * round(self.WIDTH * part)).ljust(self.WIDTH, ".")
            print(f"\r\x1b[K  [{bar}] {text}", end="", file=sys.stderr, flush=True)

    def _print(self) -> None:
        while not self._ended.wait(self.LINES_SECONDS):
            print(f"environment: {self._state()[1]}", flush=True)

    def _state(self) -> tuple[float, str]:
        """Return the part of the bytes that is there, and a line about it."""
        megabytes = max(0, shutil.disk_usage(self.folder).used - self.used) // 10**6
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        of = f" of {self.expected:,}" if self.expected else ""
        line = f"{megabytes:,}{of} MB  {minutes}:{seconds:02}  {self.doing[:32]}"
        return min(0.99, megabytes / max(1, self.expected)), line.rstrip()


def announced(parts: Sequence[str]) -> tuple[int, int]:
    """Return MB of downloads and MB on disk of ``parts``: a build of torch, extras."""
    rows = [SIZES[name] for name in parts]
    return sum(load for load, _ in rows), sum(disk for _, disk in rows)


def refuse_platform() -> None:
    """Raise Refused on a system that torch has no wheels for."""
    version = sys.version_info[:3]
    named = ".".join(map(str, version))
    if not PYTHONS[0] <= version[:2] <= PYTHONS[1]:
        oldest, newest = ("{}.{}".format(*python) for python in PYTHONS)
        raise Refused(
            f"this is Python {named}, and the pins support {oldest} to {newest}; set PYTHON, and "
            "HF_ZERO_VENV to another folder"
        )
    if version in BROKEN:
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
    try:
        return bool(tool) and not subprocess.call(
            [tool, "-L"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):  # a tool without its driver
        return False


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
    sources = (path for path in (ROOT / "kernels" / "cpu").iterdir() if path.is_file())
    for path in (*files, *sorted(path for path in sources if path.suffix in (".cpp", ".h"))):
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
        with one_call_at_a_time(Path(folder)):
            Environment(Path(folder), os.environ).prepare(extras)
    except (Refused, OSError) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


@contextmanager
def one_call_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for another call that installs into ``folder``: both would write the same files."""
    parent = next(path for path in folder.absolute().parents if path.is_dir())
    lock = os.open(parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"environment: waits for another call that uses {parent}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
