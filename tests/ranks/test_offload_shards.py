"""Parameters in files: shards of any sizes, read before they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.storage.nvme import NvmeStorage
from tests.helpers.engines import config_of, start
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks
from tests.helpers.training import adamw

STEPS = 4


class Growing(nn.Module):
    """Blocks of which each is larger than the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [16, 32, 64, 128, 256, 512]
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def trained(rank: int, model: nn.Module, section: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = start(model, adamw(model), config_of(3, zero_optimization=section))
    for step in range(STEPS):
        engine.backward(
            engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)))
        )
        engine.step()
    weights = {
        name: hf_zero.safe_get_full_fp32_param(p).clone()
        for name, p in engine.module.named_parameters()
    }
    engine.destroy()
    return weights


@pytest.mark.turns
@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("prefetch", [0, 5_000_000])
def test_shards_are_read_ahead_of_their_gather(
    prefetch: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, fetch = [], NvmeStorage.fetch_into

    def counted(self: NvmeStorage, name: str, start: int, out: torch.Tensor) -> None:
        found.append(0 in self._blocks)
        fetch(self, name, start, out)

    monkeypatch.setattr(NvmeStorage, "fetch_into", counted)
    section = {**offload("all in files", 3, tmp_path), "stage3_prefetch_bucket_size": prefetch}
    section["offload_param"] |= {"max_in_cpu": 0, "buffer_count": count}
    want, got = (
        on_ranks(2, trained, {"stage": 3}, build=Growing)[0],
        on_ranks(2, trained, section, build=Growing)[0],
    )
    for name, weights in want.items():
        torch.testing.assert_close(got[name], weights, rtol=1e-5, atol=1e-6)
    assert sum(found) >= (STEPS - 1) * 2 * 3, (
        "two ranks; of the six units that a backward gathers half at least"
    )
