"""Weights of a loss in the optimizer, on every route to ZeRO, beside plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import launched
from tests.integrations import losses_on_routes


@pytest.mark.parametrize("stages", ["two", pytest.param("all", marks=pytest.mark.long)])
def test_two_ranks_train_as_plain_pytorch_on_every_route(stages: str, tmp_path: Path) -> None:
    command = [launched.python(), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "-m", losses_on_routes.__name__, str(tmp_path), stages]
    said = launched.output(command, tmp_path, tmp_path / "log.txt", timeout=900.0)
    assert [line for line in said.splitlines() if line.startswith("equal ")] == [
        f"equal {name}" for name in losses_on_routes.ROUTES
    ]
