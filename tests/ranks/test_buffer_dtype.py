"""``data_types.buffer_dtype``: floating-point buffers are cast, if it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.helpers.engines import STAGES, config_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan, plain_sgd

FREQUENCIES = torch.linspace(0, 1, 4)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("frequencies", FREQUENCIES.clone())
        self.up.register_buffer("same", self._buffers["frequencies"])
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x) * self.frequencies.to(x.dtype))
        return found


@pytest.mark.parametrize("written", [None, "bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_cast_where_it_is_asked_for(stage, written, tmp_path):
    models = [WithBuffers() for _ in range(2)]
    for p in models[1].buffers():
        p.zero_()  # rank 0's values count
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[written]

    def run(rank):
        model: Any = models[rank]
        config = config_of(stage, Plan(precision="bf16"))
        config["data_types"] = {"buffer_dtype": written} if written else {}
        engine = hf_zero.initialize(model=model, optimizer=plain_sgd(model), config=config)[0]
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        assert model.frequencies.dtype == dtype and model.up.same is model.frequencies
        assert model.count.dtype == torch.long and model.count == 3
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(tmp_path / "checkpoint")
        model.frequencies.zero_()
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert torch.equal(model.frequencies, FREQUENCIES.to(dtype))
        engine.destroy()

    run_ranks(2, run)
