"""Weights of a loss in the optimizer, on every route to ZeRO, beside plain PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.commands import completed
from tests.integrations import losses_on_routes


@pytest.mark.parametrize("stages", ["two", pytest.param("all", marks=pytest.mark.long)])
def test_two_ranks_train_as_plain_pytorch_on_every_route(stages: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", losses_on_routes.__name__, str(tmp_path), stages]
    said = completed(command, check=True, timeout=900.0).stdout
    assert [line for line in said.splitlines() if line.startswith("equal ")] == [
        f"equal {name}" for name in losses_on_routes.ROUTES
    ]
