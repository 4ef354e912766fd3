"""A rank is killed, raises, has a disk that fails, or is through before the others, in a step or
while a checkpoint is written: all ranks end, what they print names that rank and its error, and
nothing torn is left.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hf_zero.checkpoint import verify_checkpoint
from hf_zero.hosts.reaching import free_port
from tests.helpers.cells import fast
from tests.helpers.commands import completed
from tests.helpers.launched import HOST, environment, plainly

SCRIPT = Path(__file__).with_name("ending.py")
SAVING = Path(__file__).with_name("saving_ending.py")
LIMIT = 240.0  # seconds for a whole launch: less than the timeout of the configuration
WAITS = r"rank {other} (waits for|could not finish) (all-gather|reduce-scatter|all-reduce) of"
FULL = r"OffloadError: a write of offloaded state has failed: rank {odd}: \[Errno 28\].*{disk}"


@dataclass(frozen=True)
class Ending:
    """Patterns of what the rank that ends prints and of what the other one does, what the first
    does not print, and its exit code.
    """

    own: tuple[str, ...]
    other: tuple[str, ...]
    code: int = 1
    absent: str = ""


def raised(first_line: str, shown: str = "Traceback") -> Ending:
    return Ending((shown,), (f"rank {{odd}} {first_line}", WAITS), absent="RankMismatchError")


IN_A_STEP = {
    "kill": Ending((), ("rank {odd}.* died", WAITS), -9),
    "raise": raised("has failed: ValueError: bad batch$"),
    "shape": raised("has failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    "device": raised("has failed: RuntimeError: .*meta"),
    "dtype": raised("has failed: RuntimeError: .*dtype"),
    "late": raised(
        r"has failed: PartitionError: gradients of \['blocks\.2'\] came after their reduction",
        "PartitionError",  # of this package, and so without a traceback
    ),
    "finish": Ending((), ("rank {odd}.* has ended", WAITS), 0),
}
WITH_STATE_IN_FILES = {
    "read": Ending(
        (r"OSError: \[Errno 5\] Input/output error \(reading .* of rank {odd};.*{disk}",),
        (r"rank {odd} has failed: OSError: \[Errno 5\] Input/output error",),
    ),
    "write": Ending((FULL,), (FULL,)),
    "no room": Ending(("Error", r"ulimit|RLIMIT_FSIZE|file size"), (r"rank {odd}|does not fit",)),
    "kill": Ending((), ("rank {odd}.* died",), -9),
}


def check(ending: Ending, odd: int, outputs: list[tuple[int, str]], disk: str = "") -> None:
    (code, own), (other_code, other) = outputs[odd], outputs[1 - odd]
    assert (code, other_code) == (ending.code, 1), own + other
    for patterns, output in ((ending.own, own), (ending.other, other)):
        for pattern in patterns:
            wanted = pattern.format(odd=odd, other=1 - odd, disk=disk)
            assert re.search(wanted, output, re.MULTILINE), output
    assert not ending.absent or ending.absent not in own, own


@pytest.mark.parametrize(
    "way, odd, stage",
    fast(
        [
            ("kill", 1, 3),
            ("raise", 1, 2),
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
        lambda *cell: cell in (("kill", 1, 3), ("raise", 1, 2)),
    ),
)
def test_a_rank_that_ends_is_named_by_the_other(way: str, odd: int, stage: int) -> None:
    whole = sys.executable if way == "finish" else ""  # its interpreter ends as it does
    outputs = plainly(SCRIPT, way, str(odd), str(stage), interpreter=whole, limit=LIMIT)
    check(IN_A_STEP[way], odd, outputs)


@pytest.mark.parametrize(
    "way, odd, stage",
    fast(
        [
            ("read", 1, 3),
            ("read", 0, 0),
            ("read", 1, 2),
            ("write", 1, 3),
            ("write", 0, 2),
            ("no room", 0, 3),
            ("no room", 1, 2),
            ("kill", 1, 3),
            ("kill", 0, 2),
            ("kill", 1, 0),
        ],
        lambda *cell: cell == ("read", 1, 3),
    ),
)
def test_no_file_of_a_rank_that_ends_is_left(
    way: str, odd: int, stage: int, tmp_path: Path
) -> None:
    outputs = plainly(SCRIPT, way, str(odd), str(stage), str(tmp_path), limit=LIMIT)
    check(WITH_STATE_IN_FILES[way], odd, outputs, str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "files are left behind"


@pytest.mark.parametrize(
    "way, whole",
    fast(
        [("return", True), ("raise", True), ("kill", False), ("full", False)],
        lambda way, whole: way == "kill",
    ),
)
def test_a_checkpoint_that_is_being_written_is_whole_or_not_there(
    way: str, whole: bool, tmp_path: Path
) -> None:
    codes, outputs = zip(*plainly(SAVING, way, str(tmp_path), limit=LIMIT))
    assert all((code == 0) == (way in ("return", "full")) for code in codes), outputs
    if way == "full":  # no step is left that could raise it
        for output in outputs:
            assert "No space left on device" in output, output
            assert "free space or save into another folder" in output, output
    assert (tmp_path / "latest").read_text() == ("new" if whole else "old"), outputs
    assert verify_checkpoint(tmp_path).problems == ()
    assert (tmp_path / "new").exists() == whole
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".hf-zero-saving-new")]


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
    if launcher == "spawn":  # which shows one exception, of the rank that it looks at first
        assert "rank 1 will never join: it has ended" in output, output
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
        done = completed(
            [sys.executable, "-c", code],
            env={**environment(), **place},
            timeout=LIMIT,
        )
    assert done.returncode == 1
    assert re.search(
        rf"ConfigError: the ranks cannot meet at {HOST}:{port}: another program .* uses "
        rf"the port.*--master-port",
        done.stderr,
    ), done.stderr
