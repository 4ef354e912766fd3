"""Engines made and ended again and again leave nothing behind: memory, threads, keys in the
store, hooks on the model.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import squared
from tests.helpers.training import At, Plan, adamw

RANKS, TIMES = 2, 10
ALLOWED = 1 << 20

Ending = Callable[[Any], None]


def large() -> nn.Module:
    """2.3 MiB of weights: one engine of ten that stays behind is seen."""
    return seeded(lambda: Stack(depth=4, width=128))


def live_bytes() -> int:
    """Bytes of the storages of all tensors that the interpreter can reach, each once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not each.is_meta:
            with torch._C.DisableTorchFunctionSubclass():
                storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def keys_in_the_store() -> int:
    """Keys of hf-zero's own; torch keeps some for each process group it has ever made."""
    return sum(
        key.startswith("hf_zero/") for key in dist.distributed_c10d._get_default_store().list_keys()
    )


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hf_zero")]


def train(model: nn.Module, stage: int, rank: int, precision: str = "fp32") -> Any:
    engine = start(model, adamw(model), config_of(stage, Plan(precision=precision)))
    dtype = next(model.parameters()).dtype
    for step in range(2):
        engine.backward(squared(engine, At(step, 0, rank), dtype))
        engine.step()
    with torch.no_grad():
        squared(engine, At(0, 0, rank), dtype)
    return engine


def gathered(engine: Any) -> None:
    engine.destroy(gather=True)


def sharded(engine: Any) -> None:
    engine.destroy()


def forgotten(engine: Any) -> None:
    """Dropped without a word."""


@pytest.fixture
def collecting() -> None:
    """Collections look at what a test makes alone."""
    gc.collect()
    gc.freeze()


def grown(stage: int, ending: Ending, precision: str = "fp32") -> tuple[int, int, int]:
    """What ``TIMES`` engines leave on two ranks: bytes, threads, keys in the store."""
    place = threading.Barrier(RANKS)
    others = set(serving())  # of engines that other tests have not ended
    seen: list[tuple[int, int, int]] = []

    def together(act: Callable[[], object]) -> None:
        if place.wait() == 0:
            act()
        place.wait()

    def look() -> None:
        for thread in set(serving()) - others:
            thread.join(5.0)  # they look at their engine at least once a second
        seen.append((live_bytes(), len(set(serving()) - others), keys_in_the_store()))

    def run(rank: int) -> None:
        for made in range(TIMES + 2):
            if made == 2:
                together(look)  # what is made once is made by now
            engine = train(large(), stage, rank, precision)
            ending(engine)
            del engine
            together(gc.collect)
        together(look)

    run_ranks(RANKS, run)
    before, after = seen
    return tuple(b - a for a, b in zip(before, after))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "ending, stage",
    fast(
        itertools.product((gathered, sharded, forgotten), STAGES),
        lambda ending, stage: stage == 3 or (stage, ending) == (0, sharded),
    ),
)
@pytest.mark.usefixtures("collecting")
def test_nothing_is_left(stage: int, ending: Ending) -> None:
    found = grown(stage, ending)
    print(stage, ending.__name__, found)
    nbytes, threads, keys = found
    assert nbytes < ALLOWED
    assert threads == 0
    assert keys <= TIMES * (2 * RANKS + 2), "more than who has closed it, and the last agreement"


@pytest.mark.usefixtures("collecting")
def test_the_measure_sees_what_stays() -> None:
    kept: list[Any] = []

    def keep(engine: Any) -> None:
        kept.append([flat.full for flat in engine.flats])
        engine.destroy()

    nbytes, _, _ = grown(0, keep)
    assert nbytes > 5 * ALLOWED
