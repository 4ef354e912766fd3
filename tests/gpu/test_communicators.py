"""Communicators of NCCL on one GPU: split from the job's own, with the options of the keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.distributed import communicators, process_group
from tests.helpers.stacks import stack

DEVICE = torch.device("cuda", 0)
LIMIT = timedelta(seconds=60)
KEYS = {"min_ctas": 1, "max_ctas": 4, "cta_policy": "efficiency"}


@pytest.fixture
def bound_to_the_device() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
    yield
    process_group.destroy_process_group()


@pytest.mark.usefixtures("bound_to_the_device")
def test_a_bound_job_splits_its_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", None)
    world = dist.group.WORLD
    assert world is not None
    splits = world._get_backend(DEVICE).comm_split_count()
    for high_priority in (True, False):
        options = communicators.nccl_options(KEYS, high_priority, LIMIT)
        group = communicators.make_group([[0]], 0, DEVICE, "nccl", LIMIT, options)
        splits += 1
        assert world._get_backend(DEVICE).comm_split_count() == splits
        backend = group._get_backend(DEVICE)
        assert backend.options.is_high_priority_stream is high_priority
        config = backend.options.config
        policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_EFFICIENCY
        assert (config.min_ctas, config.max_ctas, config.cta_policy) == (1, 4, policy)
        value = torch.arange(8.0, device=DEVICE)
        whole, part = torch.empty_like(value), torch.empty_like(value)
        dist.all_reduce(value, group=group)
        dist.all_gather_into_tensor(whole, value, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        assert part.tolist() == list(range(8))
        dist.destroy_process_group(group)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", (1, 3))
def test_training_with_the_keys_equals_the_plain_loop(stage: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    assert world.bound_device_id == (DEVICE if communicators._selects_backends() else None)
    model = stack()
    plain = copy.deepcopy(model).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-6, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "nccl": KEYS,
    }
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    engine = hf_zero.initialize(model=model, optimizer=ours, config=config)[0]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        inputs = torch.randn(4, 7, generator=generator).cuda()
        want = plain(inputs).square().mean()
        want.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    engine.destroy()
