"""Operations and host optimizers give the same under any default dtype and device of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hf_zero.ops import lamb, native, reference
from hf_zero.ops.flat_optimizers import FlatRun, RowSettings, Tiles, settings_table
from hf_zero.ops.flat_tiles import run_tables
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.ops.sign_blocks import COMBINE
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    VariableSparsityConfig,
)
from hf_zero.ops.sparse_attention.plan import plan_for
from hf_zero.ops.stochastic_rounding import round_reference, round_stochastically
from hf_zero.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULion

CPU = torch.device("cpu")
MESSAGES = COMBINE.example(CPU)


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def layout(kind: Any, **settings: Any) -> torch.Tensor:
    return kind(2, block=16, different_layout_per_head=True, **settings).make_layout(16 * 40)


def plan(block: int) -> list[torch.Tensor]:
    plan_for.cache_clear()
    config = BigBirdSparsityConfig(2, block=block, num_random_blocks=2)
    made = plan_for(config.handle, 1000, 2, 1, False, CPU)
    of = (made.rows, made.columns)
    return [made.layout] + [x for each in of for x in vars(each).values()]


def tables() -> list[torch.Tensor]:
    run_tables.cache_clear()
    weights = [torch.zeros(n, dtype=torch.float32, device="cpu") for n in (5, 9000)]
    lengths = lamb.tile_table(weights, weights)[0][:, 4]
    return [*run_tables(((0, 20_000), (7, 5)), CPU), lengths]


def blocks() -> list[torch.Tensor]:
    made = Blocks.zeros(600, True)
    made.encode(torch.arange(600, dtype=torch.float32, device="cpu"))
    return [made.codes, made.scales, made.decode()]


def combined() -> list[torch.Tensor]:
    """Numbers such as 1 / 0.9 are not rounded to bf16."""
    given = [value.clone() if isinstance(value, torch.Tensor) else value for value in MESSAGES]
    COMBINE.reference(*given)
    return [value for value in given if isinstance(value, torch.Tensor)]


def trained(kind: Any, **settings: Any) -> list[torch.Tensor]:
    """More steps than bf16 counts."""
    values = torch.linspace(-1, 1, 40, dtype=torch.float32, device="cpu")
    parameter = torch.nn.Parameter(values.clone())
    optimizer = kind([parameter], lr=1e-3, **settings)
    for step in range(260):
        parameter.grad = torch.sin(values * step)
        optimizer.step()
    return [parameter.detach(), *(s for s in optimizer.state[parameter].values() if s is not None)]


def rounded() -> list[torch.Tensor]:
    data = torch.linspace(-1, 1, 5000, dtype=torch.float32, device="cpu")
    made = [torch.empty_like(data, dtype=torch.bfloat16) for _ in range(2)]
    round_stochastically(made[0], data, 7)
    round_reference(made[1], data, 7, 0)
    return made


def summed() -> list[float]:
    data = torch.linspace(-1, 1, 5000, dtype=torch.float32, device="cpu")
    return [native.squared_norm(data), reference.squared_norm(data)]


CASES = {
    "bigbird": partial(layout, BigBirdSparsityConfig, num_random_blocks=3),
    "variable": partial(layout, VariableSparsityConfig, num_random_blocks=2),
    "fixed": partial(layout, FixedSparsityConfig),
    "plan": partial(plan, 64),
    "plan of small blocks": partial(plan, 16),
    "tiles": lambda: Tiles.cut([FlatRun(5000, 0, 3, 3, 3), FlatRun(7, 1, 0, 1, 2)], CPU).table,
    "no tiles": lambda: Tiles.cut([], CPU).table,
    "tables": tables,
    "settings": lambda: settings_table([RowSettings(1e-3)], CPU),
    "blocks": blocks,
    "signs": combined,
    "rounding": rounded,
    "squares": summed,
    "Adam": partial(trained, CPUAdam, amsgrad=True),
    "Lion": partial(trained, CPULion),
    "Adagrad": partial(trained, CPUAdagrad),
    "SGD": partial(trained, CPUSGD, momentum=0.9),
}


@pytest.mark.parametrize("case", CASES)
def test_defaults_of_torch_change_nothing(case: str) -> None:
    wanted = tree_leaves(CASES[case]())
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        with defaults(dtype, device):
            found = tree_leaves(CASES[case]())
        for one, other in zip(found, wanted, strict=True):
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype and one.device == other.device, (dtype, device)
                assert torch.equal(one, other), (dtype, device)
            else:
                assert one == other, (dtype, device)
