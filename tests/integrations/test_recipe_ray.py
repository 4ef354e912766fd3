"""The recipe of Ray Train on a Ray cluster of two nodes on this machine, one of which is lost: the
losses are those of one plain process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from hf_zero.measures.metrics_file import read_metrics
from hf_zero.report.run import read_run
from tests.integrations.test_recipes import RECIPES, module_of

SCRIPT = RECIPES / "ray" / "train_on_ray.py"
STEPS, ROWS = 60, 8
PATIENT = {"health_check_period_ms": 5000, "health_check_timeout_ms": 20000}


def plain_losses() -> list[float]:
    script = module_of(SCRIPT)
    model, losses = script.build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        ids = script.batch(step, ROWS)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with a stand-in for Ray."""
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, SCRIPT.stem, None)
    return module_of(SCRIPT)


def test_the_last_step_is_saved(script: Any, tmp_path: Path) -> None:
    train = script.ray.train
    train.get_checkpoint.return_value = None
    context = train.get_context.return_value
    context.get_world_rank.return_value, context.get_world_size.return_value = 0, 1
    script.train({"batch": 2, "stage": 0, "steps": 3, "save_every": 2, "shared": str(tmp_path)})
    assert [call.args[0]["step"] for call in train.report.call_args_list] == [2, 3]


def test_workers_that_cannot_share_a_batch_are_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_on_ray.py", "--workers", "3", "--batch", "8"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "--batch 8 is not a multiple of --workers 3" in capsys.readouterr().err
    assert not script.TorchTrainer.called


@pytest.mark.long
def test_a_lost_node_leaves_the_run_to_fewer_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_USAGE_STATS", "1")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2]))
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": PATIENT}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    options = ["--storage", str(tmp_path), "--steps", str(STEPS), "--batch", str(ROWS)]
    try:
        other = cluster.add_node(num_cpus=1)
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        with open(tmp_path / "log", "w") as log:
            ran = subprocess.Popen(
                [sys.executable, str(SCRIPT), *options, "--save_every", "5"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        known = tmp_path / "gpt2" / "checkpoint_manager_snapshot.json"  # Ray knows a checkpoint
        until = time.monotonic() + 300
        while ran.poll() is None and not known.exists() and time.monotonic() < until:
            time.sleep(0.05)
        cluster.remove_node(other, allow_graceful=False)
        code = ran.wait(timeout=400)
    finally:
        cluster.shutdown()
    said = (tmp_path / "log").read_text()
    assert code == 0 and f"step {STEPS}, loss" in said and "workers: 1" in said, said[-8000:]
    folder = tmp_path / "shared" / "metrics"
    starts = read_run(folder).starts
    assert [start.header["ranks"] for start in starts] == [2, 1] and starts[1].after >= 5
    losses = [row["loss"] for row in read_metrics(folder)]
    assert losses == pytest.approx(plain_losses(), rel=1e-3)
