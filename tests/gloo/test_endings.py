"""A rank is killed, raises, gets a signal, has a disk that fails, or is through before the others,
in a step or while a checkpoint is written: all ranks end, what they print names that rank and its
error, and checkpoints are whole.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint import verify_all, verify_checkpoint
from hf_zero.launch.hosts import free_port
from tests.helpers.cells import fast
from tests.helpers.commands import completed
from tests.helpers.launched import HOST, environment, plainly, python

SCRIPT = Path(__file__).with_name("ending.py")
LIMIT = 240.0  # seconds for a whole launch: less than the timeout of the configuration
WAITS = r"rank {other} (waits for|could not finish) (all-gather|reduce-scatter|all-reduce) of"
FULL = r"OffloadError: a write of offloaded state has failed: rank {odd}: \[Errno 28\].*{disk}"


@dataclass(frozen=True)
class Ending:
    """Patterns of what either rank prints, what the first does not print, and its exit code."""

    own: tuple[str, ...]
    other: tuple[str, ...]
    code: int = 1
    absent: str = ""


ENDINGS = {
    "kill": Ending((), ("rank {odd}.* exited", WAITS), -9),
    "raise": Ending(
        ("Traceback",),
        ("rank {odd} has failed: ValueError: bad batch$", WAITS),
        absent="RankMismatchError",
    ),
    "finish": Ending((), ("rank {odd}.* has ended", WAITS), 0),
    "read": Ending(
        (r"OSError: \[Errno 5\] Input/output error \(reading .* of rank {odd};.*{disk}",),
        (r"rank {odd} has failed: OSError: \[Errno 5\] Input/output error",),
    ),
    "write": Ending((FULL,), (FULL,)),
}
FAST = [("kill", 1, 3), ("raise", 1, 2), ("read", 1, 3)]
SELDOM = [("finish", 0, 3), ("write", 1, 3)]


@pytest.mark.parametrize("way, odd, stage", fast([*FAST, *SELDOM], lambda *cell: cell in FAST))
def test_a_rank_that_ends_is_named_by_the_other_and_leaves_no_file(way, odd, stage, tmp_path):
    whole = sys.executable if way == "finish" else ""  # its interpreter ends as it does
    disk = [str(tmp_path)] if way in ("read", "write") else []
    arguments = [way, str(odd), str(stage), *disk]
    outputs = plainly(SCRIPT, *arguments, interpreter=whole, limit=LIMIT)
    ending, (code, own), (other_code, other) = ENDINGS[way], outputs[odd], outputs[1 - odd]
    assert (code, other_code) == (ending.code, 1), own + other
    for patterns, output in ((ending.own, own), (ending.other, other)):
        for pattern in patterns:
            wanted = pattern.format(odd=odd, other=1 - odd, disk=tmp_path)
            assert re.search(wanted, output, re.MULTILINE), output
    assert not ending.absent or ending.absent not in own, own
    assert list(tmp_path.iterdir()) == [], "files are left behind"


def test_a_rank_that_reads_the_model_alone_is_served_by_one_that_is_through():
    outputs = plainly(SCRIPT, "reads alone", "1", "3", limit=LIMIT)
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert re.findall(r"^read (.*)$", outputs[1][1], re.MULTILINE) == ["True"] * 2, outputs


@pytest.mark.parametrize(
    "way, whole",
    fast([("return", True), ("kill", False), ("full", False)], lambda way, whole: way == "kill"),
)
def test_a_checkpoint_that_is_being_written_is_whole_or_not_there(way, whole, tmp_path):
    codes, outputs = zip(*plainly(SCRIPT, "saving", way, str(tmp_path), limit=LIMIT))
    assert all((code == 0) == (way in ("return", "full")) for code in codes), outputs
    if way == "full":  # no step is left that could raise it
        for output in outputs:
            assert "No space left on device" in output, output
            assert "free space or save into another folder" in output, output
    assert (tmp_path / "latest").read_text() == ("new" if whole else "old"), outputs
    assert verify_checkpoint(tmp_path).problems == ()
    assert (tmp_path / "new").exists() == whole
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".hf-zero-saving-new")]


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = f"import hf_zero; hf_zero.init_distributed(timeout=20, port={port})"
        place = {"MASTER_ADDR": HOST, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
        done = completed([python(), "-c", code], env={**environment(), **place}, timeout=LIMIT)
    assert done.returncode == 1
    wanted = rf"ConfigError: the ranks cannot meet at {HOST}:{port}: another program .* uses"
    assert re.search(wanted + r" the port.*--master-port", done.stderr), done.stderr


@pytest.mark.parametrize(
    "rank, reason",
    [(0, "rank 0 has waited 2 s, .* for rank 1"), (1, "nothing has answered for 2 s")],
)
def test_a_rank_that_never_comes_ends_the_other_at_the_timeout(rank, reason):
    """Without a launcher that would end it, and whichever of them hosts the store."""
    port = free_port()
    code = f"import hf_zero; hf_zero.init_distributed(timeout=2, port={port})"
    place = {"MASTER_ADDR": HOST, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    done = completed([python(), "-c", code], env={**environment(), **place}, timeout=20)
    assert done.returncode == 1
    wanted = rf"LaunchError: the ranks cannot meet at {HOST}:{port}: {reason}"
    assert re.search(wanted, done.stderr), done.stderr
    assert "c10d" not in done.stderr  # torch's lines about its own attempts


@pytest.mark.parametrize("way", ["step", "sequences", "layers"])
def test_ranks_that_are_forked_after_a_training_alone_train_together(way):
    """As ``notebook_launcher`` starts them: the process group of the cell before is copied."""
    script = Path(__file__).with_name("forked.py")
    command = [python(), str(script), str(free_port()), way]
    done = completed(command, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    found = sorted(map(json.loads, done.stdout.splitlines()))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    (model(torch.tensor([[1.0, -2.0], [2.0, -1.0]])).square().sum() / 2).backward()
    wanted = model.weight - 0.5 * model.weight.grad
    assert [each[:2] for each in found] == [[0, 2], [1, 2]]
    for weights in [each[2] for each in found if way == "step"]:
        torch.testing.assert_close(torch.tensor(weights), wanted.detach())


SIGNALED = Path(__file__).with_name("signaled_save.py")
LONGEST = 0.6  # seconds until the signal
INTERRUPTED, FAILED, STOPPED = -signal.SIGINT, 1, 85
CELLS = [(what, number) for what in ("one", "all", "group") for number in range(10)]


@pytest.mark.parametrize("what, number", fast(CELLS, lambda what, number: number == 0))
def test_ranks_end_and_checkpoints_are_whole(what: str, number: int, tmp_path: Path) -> None:
    seconds = random.Random(f"{what} {number}").uniform(0.0, LONGEST)
    ended = plainly(SIGNALED, str(tmp_path / "run"), what, f"{seconds:.3f}", limit=LIMIT)
    codes, outputs = zip(*ended, strict=True)
    found = list(verify_all(tmp_path / "run", progress=False))
    assert all(each.whole for each in found), [each.problems for each in found]
    names = {each.folder.name for each in found}
    assert (tmp_path / "run" / "latest").read_text().strip() in names
    if what == "group":
        assert codes == (STOPPED, STOPPED) and len(names) == 1, outputs
        return
    # with both, one rank may meet the end of the other before its own signal
    assert codes[1] == INTERRUPTED or (what == "all" and INTERRUPTED in codes), outputs
    assert set(codes) <= {INTERRUPTED, FAILED}, outputs
    if codes[0] == FAILED:
        assert "rank 1 has failed: KeyboardInterrupt" in outputs[0]
