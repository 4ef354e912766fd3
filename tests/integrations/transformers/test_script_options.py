"""Features of published example scripts that the other tests lack: a resume at another stage, less
usual options, and a plain exit.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launched
from tests.helpers.trainers import assert_same_training, distance, logged, routed, weights

# A rank that answers fetches through the store, and reports at exit: what was registered first runs
# last.
ENDS = """
import atexit, threading, time
atexit.register(lambda: print(sorted(thread.name for thread in threading.enumerate())))
import torch.distributed as dist
from hf_zero.distributed.consensus import Consensus
class Owner:
    def read(self, unit):
        return b""
consensus, owner = Consensus(dist.HashStore(), 0, range(2), 0.5), Owner()
consensus.fetches.serve(owner.read)
while threading.active_count() < 3:
    time.sleep(0.01)
print(sorted(thread.name for thread in threading.enumerate()))
"""


@pytest.mark.usefixtures("plain_process")
@pytest.mark.parametrize(("saved", "stage"), [(3, 0), (0, 3), (2, 3)])
def test_a_run_goes_on_at_another_stage(saved: int, stage: int, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2}
    whole = routed("ours", saved, tmp_path / "whole", **changes)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = routed("ours", stage, tmp_path / "again", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == pytest.approx(logged(whole), rel=1e-5)
    expected = weights(whole)
    assert distance(weights(resumed), expected) <= 1e-5 * distance(expected)


@pytest.mark.usefixtures("plain_process")
@pytest.mark.parametrize(
    "option",
    [
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_less_usual_options_of_the_trainer(option: dict[str, Any], tmp_path: Path) -> None:
    oracle = routed("plain", 0, tmp_path, "gpt2", **option)
    oracle.train()
    run = routed("stock", 3, tmp_path, "gpt2", config={"gradient_clipping": 0.5}, **option)
    run.train()
    assert_same_training(run, oracle)


def test_no_thread_is_in_the_store_when_the_interpreter_ends(tmp_path: Path) -> None:
    """One that returns from there into an interpreter that is going aborts a rank whose training
    has succeeded.
    """
    printed = launched.output([sys.executable, "-c", ENDS], tmp_path, tmp_path / "log")
    running, at_exit = (line for line in printed.splitlines() if line.startswith("["))
    assert running == "['MainThread', 'hf_zero-bell', 'hf_zero-serve']"
    assert at_exit == "['MainThread']"
