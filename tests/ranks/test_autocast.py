"""``torch_autocast``: the engine's forward under torch.autocast, against a plain loop under it."""

from __future__ import annotations

import pytest
import torch

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import NotBuiltError
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.models import features
from tests.helpers.stacks import on_ranks, stack
from tests.helpers.training import adamw

RANKS, STEPS = 2, 3


def loss_of(model: torch.nn.Module, step: int, rank: int) -> tuple[torch.Tensor, torch.dtype]:
    out = model(features(step, 0, rank))
    return out.float().square().mean(), out.dtype


@pytest.mark.parametrize("stage", STAGES)
def test_the_forward_computes_in_fewer_bits_and_parameters_keep_theirs(stage):
    def run(rank, model):
        section = {"enabled": True, "dtype": "torch.bfloat16"}
        engine = start(model, adamw(model), config_of(stage, torch_autocast=section))
        losses = []
        for step in range(STEPS):
            loss, dtype = loss_of(engine, step, rank)
            assert dtype is torch.bfloat16
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        weights = full_weights(engine)
        assert {value.dtype for value in weights.values()} == {torch.float32}
        engine.destroy()
        return losses, weights

    got = on_ranks(RANKS, run)
    plain = stack()
    optimizer = adamw(plain)
    for step in range(STEPS):
        for rank in range(RANKS):
            with torch.autocast("cpu", torch.bfloat16):
                loss, _ = loss_of(plain, step, rank)
            assert got[rank][0][step] == pytest.approx(float(loss.detach()), rel=1e-5)
            (loss / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = dict(plain.named_parameters())
    for name, value in got[0][1].items():
        torch.testing.assert_close(value, exact[name].detach(), rtol=1e-4, atol=1e-5)


def test_autocast_in_fp16_is_refused():
    section = {"enabled": True, "dtype": "torch.float16"}
    with pytest.raises(NotBuiltError, match=r"torch_autocast\.dtype = 'fp16' .* loss scale"):
        ZeroConfig.coerce(config_of(1, torch_autocast=section))


def test_a_section_that_is_off_changes_nothing():
    model = stack()
    section = {"enabled": False, "dtype": "torch.bfloat16"}
    engine, *_ = hf_zero.initialize(model=model, config=config_of(0, torch_autocast=section))
    assert engine(features(0, 0, 0)).dtype is torch.float32
    engine.destroy()
