"""A step that ends in its backward, on autograd's thread of the GPU: hooks of the optimizer and the
schedule run there, on the stream of the script.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import hf_zero
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import WAYS, offload, stages_of

pytestmark = pytest.mark.usefixtures("process_group")
STEPS = 4
CELLS = [("device", stage) for stage in (1, 2, 3)] + [(w, s) for w in WAYS for s in stages_of(w)]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 7, generator=generator).cuda() for _ in range(STEPS)]


def train(section: dict[str, Any], early: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Weights after :data:`STEPS` steps, and what hooks after the update have seen."""
    model = seeded(lambda: Stack(depth=4, width=128))
    # additions and products alone: the same bits, however many parameters a launch updates
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False, fused=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": section | {"update_in_backward": early},
        "bf16": {"enabled": True},
    }
    engine, optimizer, _, schedule = hf_zero.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda made: StepLR(made, 2, 0.5),
    )
    seen, threads = list[Any](), set[int]()
    side = torch.cuda.Stream()

    def look(*given: Any) -> None:
        threads.add(threading.get_ident())
        assert torch.cuda.current_stream() == side and not torch.is_grad_enabled()
        engine.eval()
        seen.append(engine(batches()[0].bfloat16()).float().square().mean())
        engine.train()

    optimizer.register_step_post_hook(look)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step, inputs in enumerate(batches()):
            engine.backward(engine(inputs.bfloat16()).float().square().mean())
            assert engine.global_steps == step + early
            engine.step()
            seen.append(schedule.get_last_lr())
        weights = {
            name: hf_zero.safe_get_full_fp32_param(p).float().cpu().clone()
            for name, p in model.named_parameters()
        }
        seen = [value.item() if isinstance(value, torch.Tensor) else value for value in seen]
    # of the backward, if that makes the step
    assert (threads == {threading.get_ident()}) is not early
    engine.destroy()
    return weights, seen


@pytest.mark.parametrize("way, stage", CELLS)
def test_bits_are_those_of_a_step_after_the_backward(way, stage, tmp_path):
    (tmp_path / "early").mkdir()
    want, seen = train(offload(way, stage, tmp_path), early=False)
    got, seen_early = train(offload(way, stage, tmp_path / "early"), early=True)
    assert seen_early == seen
    for name, weights in want.items():
        assert torch.equal(got[name], weights), name
