"""The recipe of Ray Train on a Ray cluster of two nodes on this machine, one of which is lost: the
losses are those of one plain process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
