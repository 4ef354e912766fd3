"""A rank is killed, raises, or is through before the others: these end, and what they print
names it and its error.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_zero.hosts.reaching import free_port
from tests.helpers.launched import HOST, environment, plainly

SCRIPT = Path(__file__).with_name("ending.py")
LIMIT = 240.0  # seconds for a whole launch: less than the timeout of the configuration
DEAD = r"rank {odd}.* died"
ENDED = {
    "kill": DEAD,
    "raise": r"rank {odd} has failed: ValueError: bad batch$",
    "shape": r"rank {odd} has failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "device": r"rank {odd} has failed: RuntimeError: .*meta",
    "dtype": r"rank {odd} has failed: RuntimeError: .*dtype",
    "late": r"rank {odd} has failed: PartitionError: gradients of \['blocks\.2'\] came "
    r"after their reduction",
    "finish": r"rank {odd}.* has ended",
}


def launched(command: list[str], folder: Path, *arguments: str) -> str:
    """What a user sees of a launch that fails."""
    with subprocess.Popen(
        [sys.executable, *command, str(SCRIPT), *arguments],
        cwd=folder,
        env={**environment(), "MASTER_PORT": str(free_port())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    assert process.returncode != 0, output
    return output


def check_plain(way: str, odd: int, stage: int) -> None:
    ends = plainly(SCRIPT, way, str(odd), str(stage), limit=LIMIT)
    code, own = ends[odd]
    assert code == {"kill": -9, "finish": 0}.get(way, 1), own
    if way not in ("kill", "finish"):
        assert "Traceback" in own and "RankMismatchError" not in own, own
    code, other = ends[1 - odd]
    assert code == 1, other
    assert re.search(ENDED[way].format(odd=odd), other, re.MULTILINE), other
    assert re.search(
        rf"rank {1 - odd} (waits for|could not finish) (all-gather|reduce-scatter|all-reduce) of",
        other,
    ), other


def test_a_rank_that_is_killed_is_named_by_the_other():
    check_plain("kill", 1, 3)


def test_an_exception_on_one_rank_ends_the_other_by_its_first_line():
    check_plain("raise", 1, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "way, odd, stage",
    [
        ("kill", 1, 0),
        ("kill", 0, 2),
        ("raise", 0, 0),
        ("raise", 1, 3),
        ("shape", 1, 3),
        ("device", 1, 3),
        ("dtype", 1, 0),
        ("late", 1, 2),
        ("finish", 0, 3),
        ("finish", 1, 2),
    ],
)
def test_a_rank_that_ends_is_named_by_the_other(way: str, odd: int, stage: int):
    check_plain(way, odd, stage)


TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    f"{HOST}:0",
]
CONFIGURATION = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {"zero_stage": 3},
    "main_process_ip": HOST,
    "main_process_port": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
    "use_cpu": True,
}
LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--local-addr", HOST],
    "accelerate launch": ["-m", "accelerate.commands.launch", "--config", "zero.yaml"],
    "spawn": [],
}


@pytest.mark.long
@pytest.mark.parametrize("way", ["kill", "raise"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_user_of_a_launcher_sees(launcher: str, way: str, tmp_path: Path):
    """The launcher ends the other rank at once: its message is printed before.

    The first failure is the right one.
    """
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(CONFIGURATION))
    output = launched(LAUNCHERS[launcher], tmp_path, way, "1", "3")
    # it ends the others the moment it sees that, and says who was first
    if launcher == "spawn" and way == "kill":
        assert "process 1 terminated with signal SIGKILL" in output, output
        return
    assert re.search(r"hf-zero ERROR rank 0\] rank 0 .* of \(root\), ", output), output
    if launcher == "spawn" and way == "raise":  # it swallows the exception, and shows it itself
        assert (
            "rank 1 will never join: it has ended" in output and "ValueError: bad batch" in output
        ), output
    else:
        assert re.search(
            r"rank 1 died without a word"
            if way == "kill"
            else r"rank 1 has failed: ValueError: bad batch",
            output,
        ), output
    if launcher != "spawn":
        first = output.partition("Root Cause (first observed failure)")[2]
        assert re.search(r"rank +: 1 ", first), output


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = f"import hf_zero; hf_zero.init_distributed(timeout=20, port={port})"
        place = {"MASTER_ADDR": HOST, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment(), **place},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    assert done.returncode == 1
    assert re.search(
        rf"ConfigError: the ranks cannot meet at {HOST}:{port}: another program .* uses "
        rf"the port.*--master-port",
        done.stderr,
    ), done.stderr
