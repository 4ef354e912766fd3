"""Run the checks and tests of ``scripts/test``, which has prepared the environment.

All processes of a run are descendants of this one, or hold its token in their environment. Whatever
they leave is ended and removed: by this process, or by a guard process if this one is killed.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "SUITE_TOKEN"  # variable of each process of a run
# Tests must not ask the hub. Bytecode is kept: otherwise each process compiles the package anew.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "",
}
FOLDER = "hf-zero-suite-"  # prefix of a run's folder of temporary files; its process's id follows
GRACE = 5.0  # seconds between SIGINT or SIGTERM and SIGKILL
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
HELP = """\
usage: scripts/test [--all] [--part K/N] [--changed [BASE]] [--stress] [pytest's arguments]

Check lint and types and run the fast suite in the pinned environment.
  --all             run the long matrices, too
  --part K/N        run one of N parts of the tests
  --changed [BASE]  run the tests that the change since BASE touches, by default since the main
                    branch of the remote, else the last commit
  --stress          run beside busy loops, with random delays at the store and in collectives
Other arguments are pytest's: -k layout, -n 0 tests/zero."""
# What a change of a package folder touches, beside the tests of that folder's name.
BESIDE = {
    "zero": ("tests/ranks",),
    "optim": ("tests/ranks/test_optimizers.py", "tests/ranks/test_capabilities.py"),
    "ops": ("tests/kernels",),
    "compression": ("tests/ranks/test_compressed.py",),
    "measures": ("tests/ranks/test_measures.py",),
}


@dataclass
class Options:
    """Arguments of ``scripts/test``; ``base`` is a commit, or None for the default."""

    whole: bool = False
    part: str = ""
    changed: bool = False
    base: str | None = None
    stress: bool = False
    pytest: list[str] = field(default_factory=list)

    @property
    def extras(self) -> list[str]:
        return ["test", "lint", *(["docs"] if self.whole else [])]  # the long suite builds the site


def refuse(message: str) -> NoReturn:
    print(f"scripts/test: {message}", file=sys.stderr)
    sys.exit(2)


def part_of(text: str) -> tuple[int, int] | None:
    """Return K and N of ``text``, K/N with K from 1 to N; None for another text."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        return None
    return int(match[1]), int(match[2])


def parse(arguments: list[str]) -> Options:
    """Return the options in ``arguments``, in any order. Exits with 2 for an impossible one."""
    options, rest = Options(), list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name == "--all" and not equals:
            options.whole = True
        elif name == "--stress" and not equals:
            options.stress = True
        elif name == "--part":
            options.part = value if equals else (rest.pop(0) if rest else "")
            if part_of(options.part) is None:
                refuse(
                    f"--part takes K/N with K from 1 to N, for example 2/5, not {options.part!r}"
                )
        elif name == "--changed":
            options.changed = True
            if equals:
                options.base = value
            elif rest and not rest[0].startswith("-") and not Path(rest[0]).exists():
                options.base = rest.pop(0)
            if options.base is not None and not _git("rev-parse", "--verify", "-q", options.base):
                refuse(f"--changed takes a commit, and git knows none of the name {options.base!r}")
        else:
            options.pytest.append(name + equals + value)
    return options


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


# Selection


def changed_files(base: str | None) -> list[str]:
    """Return the files that differ from ``base``, by default the last commit of the main branch's
    remote, else HEAD: committed, uncommitted and new ones.
    """
    remote = ("origin/HEAD", "origin/main")
    known = [name for name in remote if _git("rev-parse", "--verify", "-q", name)]
    base = base or (known[0] if known else "HEAD")
    since = _git("merge-base", base, "HEAD") or base
    names = _git("diff", "--name-only", since).splitlines()
    return sorted({*names, *_git("ls-files", "--others", "--exclude-standard").splitlines()})


def tests_of(changed: Iterable[str]) -> list[str]:
    """Return the test files and folders that ``changed`` files touch: those that import them, also
    through helpers, or name them, and those of the package's folder. A file of the tests that no
    other imports, such as data, touches the tests of its folder.
    """
    texts, imports = _tests()
    chosen, waiting, seen = set[str](), list(changed), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = Path(name)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        users = [
            user
            for user, text in texts.items()
            if module in imports[user] or (path.parts[0] != "tests" and name in text)
        ]
        waiting += users
        chosen.update(_folders(path))
        if path.name == "conftest.py" and path.parts[0] == "tests":
            chosen.add(str(path.parent))
        elif path.name.startswith("test_") and name in texts:
            chosen.add(name)
        elif path.parts[0] == "tests" and path.suffix != ".md" and path.parts[2:] and not users:
            chosen.add(str(Path(*path.parts[:2])))
    return sorted(name for name in chosen if (ROOT / name).exists())


@cache
def _tests() -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the text and the imports of each file of the tests, by its path."""
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}
    texts = {name: path.read_text() for name, path in files.items()}
    return texts, {name: set(_imports(text)) for name, text in texts.items()}


def _folders(path: Path) -> Iterator[str]:
    top, folder = path.parts[0], path.parts[1] if len(path.parts) > 2 else ""
    if path.suffix == ".md":
        yield "tests/docs"
    elif top == "hf_zero":
        yield f"tests/{folder or 'package'}"
        yield from BESIDE.get(folder or "zero", ())
    elif top in ("kernels", "scripts"):
        yield f"tests/{'kernels' if top == 'kernels' else 'package'}"
    elif top == "recipes":
        yield "tests/integrations/test_recipes.py"
    elif len(path.parts) == 1 or top.startswith("."):
        yield "tests/package"


def _imports(text: str) -> Iterator[str]:
    """Yield the modules that ``text`` imports; of ``from a import b`` both a and a.b."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Processes


def _end(token: str, spared: Iterable[int]) -> None:
    """Kill all processes of the run but ``spared``: once more if one has begun meanwhile."""
    import psutil  # not of the interpreter that only parses the options

    for _ in range(5):
        alive = {child.pid for child in psutil.Process().children(recursive=True)}
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get(TOKEN) == token:
                alive.add(process.pid)
        alive -= {*spared, os.getpid()}
        if not alive:
            return
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.2)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _guard(token: str, folder: str) -> None:
    """Wait for the end of the process that holds the other end of standard input; then end what
    the run has left, and remove its files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end(token, [])
    shutil.rmtree(folder, ignore_errors=True)


def _remove_old_folders(parent: Path) -> None:
    """Remove the files of runs whose process has ended."""
    import psutil

    for folder in parent.glob(f"{FOLDER}*"):
        owner = folder.name.removeprefix(FOLDER).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def guarded() -> Iterator[dict[str, str]]:
    """Yield the environment of a run's processes, which end with the block."""
    parent = Path(tempfile.gettempdir())
    _remove_old_folders(parent)
    folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=parent)
    token = secrets.token_hex(8)
    if sys.platform == "linux":  # orphans of the run become children of this process
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    guard = subprocess.Popen(
        [sys.executable, __file__, "--guard", token, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield {**os.environ, TOKEN: token, "TMPDIR": folder}
    finally:
        _end(token, [guard.pid])
        assert guard.stdin is not None
        guard.stdin.close()
        with suppress(ChildProcessError):
            guard.wait()
        shutil.rmtree(folder, ignore_errors=True)


class Run:
    """The commands of a run; a signal ends the one that is running, then the run."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._current: subprocess.Popen[str] | None = None
        self._signal = 0

    def handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._signal = number
        current = self._current
        if current is not None:
            with suppress(ProcessLookupError):
                os.killpg(current.pid, signal.SIGINT)
            threading.Timer(GRACE, current.kill).start()

    def __call__(self, *command: str, **more: str) -> int:
        """Return the exit code of ``command``; after a signal 128 and its number."""
        if self._signal:
            return 128 + self._signal
        self._current = current = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**self._environment, **more},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        complaints: list[str] = []
        reader = threading.Thread(target=_forward, args=(current, complaints), daemon=True)
        reader.start()
        code = current.wait()
        reader.join(GRACE)  # a process that the command has left may hold the pipe
        self._current = None
        if self._signal:
            return 128 + self._signal
        if complaints:
            refuse(complaints[0])
        return code

    def begin(self, *command: str) -> None:
        """Start ``command``, which ends with the run."""
        subprocess.Popen([sys.executable, *command], env=self._environment, start_new_session=True)


def _forward(process: subprocess.Popen[str], complaints: list[str]) -> None:
    """Copy the standard error of ``process``, but for pytest's lines about its usage, of which the
    complaint is added to ``complaints``.
    """
    of_usage = False
    assert process.stderr is not None
    for line in process.stderr:
        of_usage = of_usage or line.startswith("ERROR: usage:")
        if of_usage and ": error: " in line:
            complaints.append(line.rpartition(": error: ")[2].strip())
        elif not of_usage:
            sys.stderr.write(line)


def workers(cores: int) -> int:
    """Return the number of pytest's processes: one a core and one more, which uses the time that
    tests which start processes wait; four at most, because each costs half a minute of imports.
    """
    return min(cores + 1, 4)


def pytest_arguments(options: Options) -> list[str]:
    arguments = ["-q", "-n", str(workers(os.cpu_count() or 1)), "--dist", "loadfile"]
    # A process that ends or crashes ends the run: pytest-xdist 3.8 can hang after it has replaced
    # one (its issues 1323, 1327 and 1378).
    arguments += ["--no-loadscope-reorder", "--max-worker-restart", "0"]
    arguments += ["--long"] if options.whole else ["-m", "not long"]
    arguments += ["--part", options.part] if options.part else []
    return arguments + options.pytest


def run(options: Options) -> int:
    chosen: list[str] = []
    if options.changed:
        chosen = tests_of(changed_files(options.base))
        touched = " ".join(chosen) or "no test is touched: lint and types alone"
        print(f"scripts/test: {touched}", flush=True)
    begun = time.monotonic()
    with guarded() as environment:
        command = Run(environment)
        command.handle_signals()
        code = 0
        if not options.part or options.part.startswith("1/"):
            code = (
                command("-m", "ruff", "check", "-q", ".")
                or command("-m", "ruff", "format", "--check", "-q", ".")
                or command("-m", "mypy", "--no-error-summary")
            )
        if code or (options.changed and not chosen):
            return code
        more = dict(VARIABLES)
        if options.stress:
            more["SUITE_STRESS"] = os.environ.get("SUITE_STRESS") or str(secrets.randbelow(10**6))
            print(f"scripts/test: under load, SUITE_STRESS={more['SUITE_STRESS']}", flush=True)
            for _ in range(2 * (os.cpu_count() or 1)):
                command.begin("-c", "while True: pass")
        code = command("-m", "pytest", *pytest_arguments(options), *chosen, **more)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    wall = time.monotonic() - begun
    print(f"scripts/test: {wall / 60:.1f} minutes, {seconds / 60:.1f} minutes of CPU")
    return 0 if options.changed and code == 5 else code  # no test of what is touched is fast


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
        print(HELP)
        return 0
    if arguments[:1] == ["--guard"]:
        _guard(*arguments[1:])
        return 0
    if arguments[:1] == ["--extras"]:
        print(" ".join(parse(arguments[1:]).extras))
        return 0
    return run(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
