"""A load of the state of Adam with ``amsgrad`` into an engine that has stepped without."""

from pathlib import Path

import pytest
import torch

from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks, run_steps, stack


@pytest.mark.parametrize("tier, stage", [("device", 1), ("device", 3), ("optimizer on cpu", 2)])
def test_a_load_gives_a_stepped_optimizer_the_maxima(tier: str, stage: int, tmp_path: Path) -> None:
    config = config_of(stage, zero_optimization=offload(tier, stage, tmp_path))

    def train(rank, models):
        saving, loading = (
            start(model, torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=amsgrad), config)
            for model, amsgrad in zip(models, (True, False))
        )
        run_steps(saving, rank, range(2))
        saving.save_checkpoint(tmp_path / "run")
        run_steps(saving, rank, range(2, 4))
        run_steps(loading, rank, range(3))
        loading.load_checkpoint(tmp_path / "run")
        run_steps(loading, rank, range(2, 4))
        want = full_weights(saving)
        for name, value in full_weights(loading).items():
            torch.testing.assert_close(value, want[name], msg=name)
        saving.destroy()
        loading.destroy()

    on_ranks(2, train, build=lambda: (stack(), stack()))
