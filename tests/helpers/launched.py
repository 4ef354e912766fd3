"""Training scripts as their users write and start them: alone in one process, or on two CPU ranks under a launcher.

A script takes ``--out FOLDER`` and writes ``report-RANK.json`` there. It is started as a command, so that autoload, the
launcher's environment and the end of the interpreter are those of a user.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
LAUNCHERS = ("ACCELERATE_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}

Report = dict[str, Any]


def alone(script: Path, out: Path, *arguments: str, timeout: float = 300.0) -> Report:
    """The report of ``python script --out out``, with hf-zero installed and no launcher and no configuration."""
    return _reports([sys.executable, str(script)], out, arguments, 1, timeout)[0]


def torchrun(script: Path, out: Path, *arguments: str, ranks: int = 2, timeout: float = 300.0) -> list[Report]:
    """The reports of all ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:0", "--local-addr", HOST, str(script)]
    return _reports(command, out, arguments, ranks, timeout)


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
    """The reports of all ranks under ``accelerate launch --config``. ``keys`` go below ``deepspeed_config``, ``top`` beside it."""
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
        "main_process_port": 0,
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": ranks,
        "use_cpu": True,
        **(top or {}),
    }
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config", str(file), str(script)]
    return _reports(command, out, arguments, ranks, timeout)


def environment() -> dict[str, str]:
    """This process's environment without what a launcher has set in it, for ranks of one thread that reach no hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS) and name not in RANK_VARIABLES}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its own session, and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _reports(command: list[str], out: Path, arguments: tuple[str, ...], ranks: int, timeout: float) -> list[Report]:
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*command, "--out", str(out), *arguments],
            cwd=out,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    assert code == 0, f"ended with {code} (None: after {timeout} s)\n{log.read_text()[-8000:]}"
    return [json.loads((out / f"report-{rank}.json").read_text()) for rank in range(ranks)]
