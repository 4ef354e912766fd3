"""Parameters in files: shards of any sizes, read before they are needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.offload.nvme import NvmeStorage
from tests.helpers.offloads import offload, same, trained

STEPS = 4


class Growing(nn.Module):
    """Blocks of which each is larger than the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [16, 32, 64, 128, 256, 512]
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 7)) for width in widths]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.turns
@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("prefetch", [0, 5_000_000])
def test_shards_are_read_ahead_of_their_gather(prefetch, count, tmp_path, monkeypatch):
    found, fetch = [], NvmeStorage.fetch_into

    def counted(self, name, start, out):
        found.append(0 in self._blocks)
        fetch(self, name, start, out)

    monkeypatch.setattr(NvmeStorage, "fetch_into", counted)
    section = offload("all in files", 3, tmp_path, max_in_cpu=0)
    section["stage3_prefetch_bucket_size"] = prefetch
    section["offload_param"]["buffer_count"] = count
    want, got = (
        trained(each, build=Growing, ranks=2, steps=STEPS) for each in ({"stage": 3}, section)
    )
    same(got, want)
    assert sum(found) >= (STEPS - 1) * 2 * 3, (
        "two ranks; of the six units that a backward gathers half at least"
    )
