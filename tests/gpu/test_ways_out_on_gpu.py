"""Weights that leave an engine on one GPU: read on the streams on which vLLM packs them, and put
back while the device has work to do.

tests/late/ways_out.py shows the order on two ranks of a simulated device.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import hf_zero
from hf_zero.integrations.trl.rollout_weights import copies
from hf_zero.ops.host_memory import HostArena
from tests.helpers.models import Stack, seeded

pytestmark = pytest.mark.usefixtures("process_group")
SLOW = 20_000_000  # cycles that a delayed stream sleeps: some 10 ms
AT_ONCE = 3  # tensors packed on one stream: fewer than a bucket has
PLACES: dict[str, dict[str, Any]] = {
    "device": {"stage": 3},
    "optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "host": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def batch() -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(3)).cuda()


def trained(place: str) -> Any:
    model = seeded(lambda: Stack(depth=4, width=128))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": PLACES[place],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    step(engine)
    return engine


def step(engine: Any) -> None:
    """A step that the device has yet to make."""
    torch.cuda._sleep(SLOW)
    engine.backward(engine(batch()).float().square().mean())
    engine.step()


def evaluated(engine: Any) -> torch.Tensor:
    torch.cuda._sleep(SLOW)
    with torch.no_grad():
        loss: torch.Tensor = engine(batch()).float().square().mean()
    return loss


def weights(engine: Any) -> dict[str, torch.Tensor]:
    named = engine.module.named_parameters()
    return {name: hf_zero.safe_get_full_fp32_param(p).cpu() for name, p in named}


def packed(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read ``tensors`` as vLLM packs them: on two streams in turn, which wait for nothing else."""
    beside, found = [torch.cuda.Stream(), torch.cuda.Stream()], dict[str, torch.Tensor]()
    held: list[list[torch.Tensor]] = [[], []]
    for turn in itertools.cycle((0, 1)):
        beside[turn].synchronize()
        with torch.cuda.stream(beside[turn]):
            named = list(itertools.islice(tensors, AT_ONCE))
            held[turn] = [value for _, value in named]
            if turn:
                torch.cuda._sleep(SLOW)
            found.update({name: value * 1 for name, value in named})
        if not named:
            break
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_weights_are_those_of_the_engine_on_any_stream(place: str) -> None:
    engine = trained(place)
    for _ in range(3):
        step(engine)
        stream = engine.iter_weights(bucket=200_000, dtype=None)
        found = packed(itertools.chain.from_iterable(copies(stream, engine.device)))
        want = weights(engine)
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert torch.equal(value.cpu(), want[name]), name
    engine.destroy()


@pytest.mark.parametrize("place", PLACES)
def test_a_state_dict_is_put_behind_what_the_device_has_yet_to_do(place: str) -> None:
    engine = trained(place)
    want = evaluated(engine).item()
    options = StateDictOptions(cpu_offload=True)
    state = get_model_state_dict(engine.module, options=options)
    assert {value.device.type for value in state.values()} == {"cpu"}
    half = {name: value.detach().clone() for name, value in state.items()}
    for value in half.values():
        value.local.mul_(0.5)
    before = weights(engine)
    loss = evaluated(engine)
    set_model_state_dict(engine.module, half)
    assert loss.item() == want
    after = weights(engine)
    assert all(torch.equal(after[name], 0.5 * before[name]) for name in before)
    engine.destroy()


def test_a_file_in_memory_is_pinned_and_keeps_what_is_copied(tmp_path: Path) -> None:
    """What a generation in the memory of hosts is copied into."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    path, size = folder / f"hf-zero-gpu-{os.getpid()}", 1 << 24
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, size)
        image = HostArena(pin=True, device=torch.device("cuda", 0)).take(size, torch.uint8, fd)
        values = torch.arange(size, device="cuda").to(torch.uint8)
        torch.cuda._sleep(10 * SLOW)
        image.copy_(values, non_blocking=True)
        has_waited = torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert image.is_pinned() and not has_waited
        assert path.read_bytes() == values.cpu().numpy().tobytes()
        del image
    finally:
        os.close(fd)
        path.unlink()
