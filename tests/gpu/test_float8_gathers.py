"""Weights that are gathered in float8 on a GPU with float8: the bytes of torchao's cast, one rank
over NCCL beside one plain process, and two ranks that share the GPU, over gloo. They need torchao
and compute capability 8.9; tests/ranks/test_float8_gathers.py emulates float8 on CPUs.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.device import kinds
from hf_zero.techniques.float8_weights import Float8Weights, scales_of
from hf_zero.zero.layout.flat_layout import FlatLayout
from tests.gpu.test_engine_on_gpu import loss_of
from tests.gpu.test_two_ranks_on_one_gpu import run, told
from tests.gpu.two_ranks import float8_config, float8_losses, wide_batches
from tests.helpers.float8 import cast
from tests.helpers.stacks import stack

float8 = pytest.importorskip("torchao.float8", reason="pip install hf-zero[torchao]")
pytestmark = pytest.mark.skipif(
    not kinds.has_float8(torch.device("cuda")), reason="needs compute capability 8.9"
)


WAYS: dict[str, dict[str, object]] = {"eager": {}, "compiled": {"compile": "blocks"}}


def plain(world: int, how: str) -> list[float]:
    """The losses of rank 0 of ``world`` in one process: bf16 weights beside fp32 masters. Compiled
    blocks are of their own: inductor does not round to bf16 before it casts to float8.
    """
    master, working = stack().cuda(), stack().cuda().bfloat16()
    float8.convert_to_float8_training(
        working,
        config=float8.Float8LinearConfig(),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "blocks." in name,
    )
    for block in working.blocks if how == "compiled" else ():
        block.compile()
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3, eps=1e-6, fused=True)
    losses = []
    for inputs in zip(*map(wide_batches, range(world))):
        found = [loss_of(working, part.cuda()) for part in inputs]
        (sum(found) / world).backward()
        losses.append(found[0].item())
        for whole, small in zip(master.parameters(), working.parameters()):
            whole.grad, small.grad = small.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for whole, small in zip(master.parameters(), working.parameters()):
                small.copy_(whole)
    return losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-14, 1e-6, 0.02, 1.0, 1e30])
def test_a_cast_of_what_arrives_has_the_bytes_that_were_sent(dtype, size):
    layout = FlatLayout.build([("a", (1024, 4096)), ("b", (48, 16))], 2)
    whole = (torch.randn(layout.padded, device="cuda") * size).to(dtype)
    codecs = [Float8Weights(layout, layout.shard_range(shard)) for shard in range(2)]
    chunks = whole.chunk(2)
    amax = [codec.amax(chunk, codec._owned[0]) for codec, chunk in zip(codecs, chunks)]
    for codec in codecs:
        codec.set_scales(*scales_of(torch.stack(amax).amax(0)))
    messages = torch.cat([codec.encode(chunk) for codec, chunk in zip(codecs, chunks)])
    out = torch.empty_like(whole)
    codecs[1].decode(messages, out)
    for slot in layout.slots:
        here = slice(slot.offset, slot.end)
        coded, scale = cast(whole[here].view(slot.shape))
        again, its_scale = cast(out[here].view(slot.shape))
        assert torch.equal(coded.view(-1), messages.view(-1)[here])
        assert torch.equal(coded, again) and torch.equal(scale, its_scale)


@pytest.mark.usefixtures("process_group")
def test_one_rank_equals_one_plain_process():
    found = {("plain", how): plain(1, how) for how in WAYS}
    for how, more in WAYS.items():
        losses, sent = float8_losses(stack(), float8_config(True, 32, **more))
        others, _ = float8_losses(stack(), float8_config(False, 32, **more))
        assert losses == others and not sent
        found["ours", how] = losses
    for how in WAYS:
        assert found["ours", how] == pytest.approx(found["plain", how], rel=2e-2), found


def test_two_ranks_on_one_gpu():
    """Bit for bit what layers compute that cast gathered weights, with fewer bytes."""
    rows = told(run("float8"), "FLOAT8 ")
    found = {(gathers, rank): row for gathers, rank, *row in rows}
    assert len(found) == 4
    for (gathers, rank), (losses, sent) in found.items():
        others, dense = found[False, rank]
        assert losses == others and (sent < 0.7 * dense if gathers else sent == dense)
    assert found[True, 0][0] == pytest.approx(plain(2, "eager"), rel=2e-2)
