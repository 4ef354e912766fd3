"""Training scripts as their users write and start them: alone in one process, or on two CPU ranks
under a launcher.

A script takes ``--out FOLDER`` and writes ``report-RANK.json`` there. It is started as a command
with the launcher's environment, but in a process that is forked from one that has imported torch
and transformers (``python_server.py``); ``integrations/test_autoload.py``,
``matrix/test_launching.py`` and some cases of ``gloo/test_endings.py`` start whole interpreters.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from hf_zero.launch.hosts import free_port
from tests.helpers.commands import end_group
from tests.helpers.python_server import PRELOADED, server

ROOT = Path(__file__).resolve().parents[2]
SITE = str(Path(__file__).parent / "site")
PROGRAMS = os.path.dirname(sys.executable)
HOST = "127.0.0.1"
LAUNCHERS = (
    "ACCELERATE_",
    "MPI_LOCAL",
    "MV2_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "SLURM_",
    "TORCHELASTIC_",
)
# The last one is set by every group that a test has made in this process, and would lead the ranks
# to this host's loopback.
RANK_VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
}

Report = dict[str, Any]

KEYS: Report = {
    "kernels": ["norms", "activations", "rotary", "qkv", "residual", "loss", "optimizer"],
    "compile": {"blocks": True, "backend": "aot_eager"},
    "activation_checkpointing": {"blocks": True},
    "activation_offload": True,
}
"""All that changes how a model computes, for what no number may change."""


@cache
def python() -> str:
    """A command that runs Python in a fork of one server, which ends with this process; where
    there is a GPU, whose library does not outlive a fork, Python itself.
    """
    if torch.cuda.is_available():
        return sys.executable
    return _served(server(environment(), (*PRELOADED, "tests.helpers.engine_imports")))


@cache
def python_with_torch() -> str:
    """Like :func:`python`, of a server that has imported torch alone: in each fork hf-zero is
    registered, or is not, as the fork's own environment says, before any library that it patches.
    """
    if torch.cuda.is_available():
        return sys.executable
    without = {**environment(), "HF_ZERO_AUTOLOAD": "0"}
    preloaded = ("torch", "torch._dynamo", "torch.distributed.fsdp")
    return _served(server(without, preloaded, "torch:_import_device_backends"))


def _served(running: AbstractContextManager[str]) -> str:
    atexit.register(running.__exit__, None, None, None)
    return running.__enter__()


def alone(script: Path, out: Path, *arguments: str, timeout: float = 300.0) -> Report:
    """The report of ``python script --out out``, with hf-zero installed and no launcher and no
    configuration.
    """
    return _reports([python(), str(script)], out, arguments, 1, timeout)[0]


@contextmanager
def beside(
    script: Path, out: Path, *arguments: str, timeout: float = 300.0
) -> Iterator[Callable[[], Report]]:
    """Start ``script`` like :func:`alone`, while the caller starts something else; yield a function
    that waits for the report and caches it.
    """
    with started([python(), str(script)], out, arguments) as process:
        yield cache(lambda: _read(process, out, 1, timeout)[0])


def torchrun(
    script: Path, out: Path, *arguments: str, ranks: int = 2, timeout: float = 300.0
) -> list[Report]:
    """The reports of all ranks under torchrun."""
    return _reports(torchrun_command(script, ranks), out, arguments, ranks, timeout)


def torchrun_command(script: Path, ranks: int = 2) -> list[str]:
    command = [python(), "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [
        *command,
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{HOST}:0",
        "--local-addr",
        HOST,
        str(script),
    ]


def accelerate_launch(
    script: Path,
    out: Path,
    *arguments: str,
    stage: int,
    ranks: int = 2,
    timeout: float = 300.0,
    top: dict[str, Any] | None = None,
    **keys: Any,
) -> list[Report]:
    """The reports of all ranks under ``accelerate launch --config``.

    ``keys`` go below ``deepspeed_config``, ``top`` beside it.
    """
    return _reports(
        accelerate_command(script, out, stage, ranks, top, **keys), out, arguments, ranks, timeout
    )


def accelerate_command(
    script: Path,
    out: Path,
    stage: int,
    ranks: int = 2,
    top: dict[str, Any] | None = None,
    **keys: Any,
) -> list[str]:
    """Writes the configuration below ``out``, too."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "zero.yaml"
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": stage,
            **({"zero3_init_flag": True, "zero3_save_16bit_model": True} if stage == 3 else {}),
            **keys,
        },
        "main_process_ip": HOST,
        "main_process_port": free_port(),
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": ranks,
        "use_cpu": True,
        **(top or {}),
    }
    file.write_text(yaml.safe_dump(content))
    return [python(), "-m", "accelerate.commands.launch", "--config", str(file), str(script)]


def environment() -> dict[str, str]:
    """This process's environment without what a launcher or our conftest has set in it, for
    ranks of one thread that reach no hub and shard small parameters, too.
    """
    # with it every kernel of a script would run in the interpreter
    left = RANK_VARIABLES | {"TRITON_INTERPRET"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in left
    }
    # what is there already comes first: the simulated device's site does what SITE's does
    path = os.pathsep.join([*filter(None, [kept.get("PYTHONPATH")]), SITE, str(ROOT)])
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def plainly(
    script: Path, *arguments: str, interpreter: str = "", ranks: int = 2, limit: float
) -> list[tuple[int, str]]:
    """Exit code and output of each rank of ``script``, started without a launcher: rank 0 hosts
    the store. All end within ``limit`` seconds.

    ``interpreter``: that Python instead of forks of the server.
    """
    place = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    place["PYTHON_EXEC"] = sys.executable
    command, end = [interpreter or python(), str(script), *arguments], time.monotonic() + limit
    with TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder) / f"{rank}.txt" for rank in range(ranks)]
        started = []
        for rank, log in enumerate(logs):
            own = {**environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(stack.enter_context(running(command, Path.cwd(), log, own)))
        codes = [ended(each, max(0.0, end - time.monotonic())) for each in started]
        outputs = [log.read_text() for log in logs]
    found = []
    for code, output in zip(codes, outputs):
        assert code is not None, "\n".join((f"not all ended within {limit} s", *outputs))
        found.append((code, output))
    return found


@contextmanager
def running(
    command: list[str], folder: Path, log: Path, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[Any]]:
    """``command`` at work in ``folder``, its output in ``log``; whatever is left of it at the end
    is killed.

    Not through a pipe, which a rank that outlives its launcher keeps open.
    """
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PYTHON_EXEC": python(), **(environment() if environ is None else environ)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end_group(process)


def output(
    command: list[str],
    folder: Path,
    log: Path,
    timeout: float = 300.0,
    environ: Mapping[str, str] | None = None,
) -> str:
    """Return the output of ``command``, which must succeed within ``timeout`` seconds.

    A program of the environment is run by the server of Python, too.
    """
    if os.sep not in command[0] and (found := shutil.which(command[0], path=PROGRAMS)):
        command = [python(), found, *command[1:]]
    with running(command, folder, log, environ) as process:
        code = ended(process, timeout)
    assert code == 0, f"ended with {code} (None: after {timeout} s)\n{log.read_text()[-8000:]}"
    return log.read_text()


@contextmanager
def started(
    command: list[str], out: Path, arguments: Iterable[str] = ()
) -> Iterator[subprocess.Popen[Any]]:
    """``command --out out arguments`` at work as of :func:`running`, in ``out``, its output in
    ``out/log.txt``.
    """
    out.mkdir(parents=True, exist_ok=True)
    with running([*command, "--out", str(out), *arguments], out, out / "log.txt") as process:
        yield process


def ended(process: subprocess.Popen[Any], timeout: float) -> int | None:
    """The exit code of ``process``; None if it has none after ``timeout`` seconds."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None


def reports(out: Path, ranks: int) -> list[Report]:
    return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(ranks)]


def _reports(
    command: list[str], out: Path, arguments: tuple[str, ...], ranks: int, timeout: float
) -> list[Report]:
    with started(command, out, arguments) as process:
        return _read(process, out, ranks, timeout)


def _read(process: subprocess.Popen[Any], out: Path, ranks: int, timeout: float) -> list[Report]:
    code = ended(process, timeout)
    assert code == 0, (
        f"ended with {code} (None: after {timeout} s)\n{(out / 'log.txt').read_text()[-8000:]}"
    )
    return reports(out, ranks)
