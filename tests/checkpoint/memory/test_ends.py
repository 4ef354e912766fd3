"""Generations after their processes have ended: by an exit code, at a named point of a save or of a
resume; what identifies a job, and the command that removes what jobs have left.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_zero.checkpoint.memory import folders
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from hf_zero.ops import native

# the end of a script, or those of two ranks of one host, and whether the generations stay
ENDS = {
    "pass": False,
    "sys.exit('no data')": True,
    "os.kill(os.getpid(), signal.SIGTERM)": True,
    "pass | time.sleep(1); sys.exit(1)": True,
    "engine.destroy() | time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)": True,
}
LAUNCHED = """
import gc, os, signal, sys, time
import torch, torch._dynamo  # which the first optimizer imports
import hf_zero, hf_zero.engine, hf_zero.launch.hosts

gc.freeze()  # or else the end of each process goes through all that was imported
base, ends = sys.argv[1], sys.argv[2:]
ports = [hf_zero.launch.hosts.free_port() for _ in ends]
ranks = [(number, rank, *each.split(" | ")) for number, each in enumerate(ends)
         for rank in range(each.count(" | ") + 1)]
for number, rank, *each in ranks:  # a process for each end: one import for all
    if os.fork() == 0:
        break
else:
    for _ in ranks:
        os.wait()
    os._exit(0)
end = each[rank]
if len(each) > 1:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[number]))
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
memory = {"every": 1, "folder": base, "job": str(number)}
config = {"train_micro_batch_size_per_gpu": 1, "checkpoint": {"memory": memory}}
engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
engine.memory.wait()
exec(end)
"""


@pytest.mark.skipif(
    not hasattr(native.core(), "release_at_exit"), reason="the native core alone sees exit codes"
)
def test_an_exit_code_of_0_removes_generations_and_no_other(tmp_path: Path) -> None:
    script, base = tmp_path / "train.py", tmp_path / "memory"
    script.write_text(LAUNCHED)
    launched = [sys.executable, str(script), str(base), *ENDS]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=600)
    stayed = {
        end: any(base.glob(f"hf-zero-*-{number}/*/engine-0/slot-*/*.json"))
        for number, end in enumerate(ENDS)
    }
    assert stayed == ENDS, done.stderr
    assert len(list(base.iterdir())) == sum(ENDS.values()), "nothing at all is left of the others"


# ---- processes that end at named points ----

KILLED, STEPS = 3, 5  # the save at whose point a process ends, and steps in all


# ---- folders ----

VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RANK")
# the key, values of VARIABLES, how the identity begins, and whether it lasts
JOBS = [
    ("run/7", ["5", None, None], "run-7", True),
    (None, ["5", "x", None], "slurm-5", True),
    (None, [None, "x y", None], "run-x-y", True),
    (None, [None, "none", "0"], f"launcher-{os.getppid()}-", True),
    (None, [None, None, None], f"process-{os.getpid()}-", False),
]


def test_a_job_is_known_by_what_its_restarts_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, values, job, lasting in JOBS:
        for name, value in zip(VARIABLES, values):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        found, lasts = folders.job_identity(asked)
        assert found.startswith(job) and lasts == lasting
        assert folders.job_identity(asked)[0] == found, "it is the same at each call"


def left(base: Path, job: str) -> Path:
    folder = folders.job_folder(base, job)
    slot = folder / "host" / "engine-0" / "slot-0"
    slot.mkdir(parents=True)
    (slot / "rank-00000-of-00001.safetensors").write_bytes(bytes(1000))
    return folder


def test_clean_names_what_jobs_have_left_and_removes_what_none_uses(tmp_path: Path) -> None:
    old, live = left(tmp_path, "old"), left(tmp_path, "live")
    (tmp_path / "hf-zero-other").mkdir()
    mark = folders.InUse(live)

    def clean(folder: Path, *options: str) -> str:
        told = CliRunner().invoke(app, ["clean", "--folder", str(folder), *options])
        assert told.exit_code == 0, told.output
        return told.output

    def states(*options: str) -> dict[str, str]:
        rows = json.loads(clean(tmp_path, "--json", *options))
        assert all(row["bytes"] == 1000 for row in rows)
        return {Path(row["folder"]).name: row["state"] for row in rows}

    assert states() == {old.name: "left", live.name: "in use"}
    assert old.exists()
    assert states("--remove") == {old.name: "removed", live.name: "in use"}
    assert not old.exists() and live.exists() and (tmp_path / "hf-zero-other").exists()
    mark.close()
    assert states() == {live.name: "left"}
    assert "1 of them can go" in clean(tmp_path)
    (tmp_path / "empty").mkdir()
    assert clean(tmp_path / "empty") == f"no checkpoints in memory in {tmp_path / 'empty'}\n"


def test_clean_takes_no_mark_that_is_not_a_file(tmp_path: Path) -> None:
    def remove() -> Any:
        return CliRunner().invoke(app, ["clean", "--folder", str(tmp_path), "--remove"])

    makes = (
        lambda mark: mark.symlink_to(tmp_path / "made"),
        os.mkfifo,
        os.mkdir,
    )
    job = left(tmp_path, "a")
    for make in makes:
        make(job / folders.IN_USE)
        done = remove()
        assert isinstance(done.exception, CheckpointError), done.output
        assert "in-use is no regular file" in str(done.exception)
        assert not (tmp_path / "made").exists()
        mark = job / folders.IN_USE
        mark.rmdir() if mark.is_dir() else mark.unlink()
    if os.getuid() == 0:  # another user's folder of this user's name
        os.chown(job, 65534, 65534)
        assert remove().exit_code == 0 and job.exists()
