"""Generations that stay or go with the way in which their process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.ops import native

# the end of a script, and whether its generations stay
ENDS = {
    "pass": False,
    "sys.exit()": False,
    "sys.exit(0)": False,
    "try:\n    sys.exit(0)\nfinally:\n    engine.destroy()": False,
    "sys.exit(1)": True,
    "sys.exit('no data')": True,
    "raise SystemExit(3)": True,
    "try:\n    sys.exit(1)\nfinally:\n    engine.destroy()": True,
    "del engine; sys.exit(1)": True,
    "raise RuntimeError('the loss is wrong')": True,
    "os.kill(os.getpid(), signal.SIGTERM)": True,
    "os.kill(os.getpid(), signal.SIGKILL)": True,
    "os._exit(1)": True,
}
# the ends of two ranks of one host, and whether their generations stay
TOGETHER = {
    "pass | pass": False,
    "engine.destroy() | sys.exit(0)": False,
    "pass | time.sleep(1); sys.exit(1)": True,
    "time.sleep(1); sys.exit(1) | pass": True,
    "engine.destroy() | time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)": True,
    "raise RuntimeError('the loss is wrong') | pass": True,
}
LAUNCHED = """
import os, signal, sys, time
import torch
import hf_zero, hf_zero.engine, hf_zero.launch.hosts

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
@pytest.mark.parametrize("ends", [ENDS, TOGETHER], ids=["one rank", "two ranks"])
def test_an_exit_code_of_0_removes_generations_and_no_other(
    ends: dict[str, bool], tmp_path: Path
) -> None:
    script, base = tmp_path / "train.py", tmp_path / "memory"
    script.write_text(LAUNCHED)
    launched = [sys.executable, str(script), str(base), *ends]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=600)
    stayed = {
        end: any(base.glob(f"hf-zero-*-{number}/*/engine-0/slot-*/*.json"))
        for number, end in enumerate(ends)
    }
    assert stayed == ends, done.stderr
    assert len(list(base.iterdir())) == sum(ends.values()), "nothing at all is left of the others"
