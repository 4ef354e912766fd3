"""8-bit blocks with bitsandbytes' dynamic maps: the nearest codes on every instruction set."""

from __future__ import annotations

import pytest
import torch

from hf_zero.ops import dynamic_map
from hf_zero.ops import reference as reference_kernels
from hf_zero.ops.host import Blocks
from tests.helpers.buffers import reference


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_keep_the_nearest_value_and_survive_a_checkpoint_in_fp32(isa, signed):
    for numel in (0, 1, 255, 256, 257, 70_001):
        values = torch.randn(numel) * torch.randn(numel).mul(3).exp()
        values = values if signed else values.square()
        blocks = Blocks.zeros(numel, signed, dynamic=True)
        blocks.encode(values)
        with reference():
            again = Blocks.zeros(numel, signed, dynamic=True)
            again.encode(values)
            decoded = again.decode()
        assert torch.equal(blocks.codes, again.codes) and torch.equal(blocks.scales, again.scales)
        assert torch.equal(blocks.decode(), decoded)
        # decoded values are found again, also where a block's largest magnitude is negative
        loaded = Blocks.zeros(numel, signed, dynamic=True)
        loaded.encode(decoded)
        assert torch.equal(loaded.decode(), decoded)
        if not numel:
            continue
        part = values / blocks.scales.repeat_interleave(256)[:numel]
        table = dynamic_map.values(signed)
        nearest = (part[:1000, None] - table).abs().amin(1)
        found = (part[:1000] - table[blocks.codes[:1000].long()]).abs()
        assert torch.allclose(found, nearest, rtol=1e-3, atol=0)
    zeros = Blocks.zeros(300, signed, dynamic=True)
    zeros.encode(torch.zeros(300))
    assert torch.equal(zeros.codes, Blocks.zeros(300, signed, dynamic=True).codes)
    spoilt = torch.ones(512)
    spoilt[300] = torch.inf
    blocks = Blocks.zeros(512, signed, dynamic=True)
    blocks.encode(spoilt)
    assert blocks.decode()[256:].isnan().all() and blocks.decode()[:256].eq(1).all()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_at_the_edges_of_regions_are_those_of_the_reference(isa, signed):
    edges = dynamic_map.regions(signed)[0].view(torch.int32)
    near = (edges[:, None] + torch.arange(-64, 65)).view(-1)
    everywhere = torch.arange(0, 0x3F81, dtype=torch.int32) << 16
    parts = torch.cat([near.int(), everywhere]).view(torch.float32)
    parts = torch.cat([parts, -parts])
    parts = torch.nn.functional.pad(parts, (0, -parts.numel() % 255)).view(-1, 255)
    values = torch.nn.functional.pad(parts, (1, 0), value=1.0).view(-1)  # the scale of each block
    made = Blocks.zeros(values.numel(), signed, dynamic=True)
    made.encode(values)
    codes, _ = reference_kernels.encode_dynamic(values, signed)
    assert torch.equal(made.codes, codes)
