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
LAUNCHED = """
import os, signal, sys
import torch
import hf_zero, hf_zero.engine

base, ends = sys.argv[1], sys.argv[2:]
for number, end in enumerate(ends):  # a process for each end: one import for all
    if os.fork() == 0:
        break
else:
    for _ in ends:
        os.wait()
    os._exit(0)
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
    not hasattr(native.core(), "remove_at_exit"), reason="the native core alone sees exit codes"
)
def test_an_exit_code_of_0_removes_generations_and_no_other(tmp_path: Path) -> None:
    script, base = tmp_path / "train.py", tmp_path / "memory"
    script.write_text(LAUNCHED)
    launched = [sys.executable, str(script), str(base), *ENDS]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=300)
    stayed = {
        end: any(base.glob(f"hf-zero-*-{number}/*/engine-0/slot-*/*.json"))
        for number, end in enumerate(ENDS)
    }
    assert stayed == ENDS, done.stderr
    assert len(list(base.iterdir())) == sum(ENDS.values()), "nothing at all is left of the others"
