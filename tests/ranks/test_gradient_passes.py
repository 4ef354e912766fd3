"""Cost of moving a backward's gradients into flat buffers: passes, elements, calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Plan, sgd

RANKS = 3  # no power of two


class Passes(TorchDispatchMode):
    """Elements that were multiplied in place or added, and calls over lists, by the dtypes of
    what is written and what is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiplied = 0
        self.lists: set[tuple[str, torch.dtype, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        if func._schema.name in ("aten::mul_", "aten::mul") and (
            out is not None or func._schema.name.endswith("_")
        ):
            self.multiplied += args[0].numel()
        if (
            func._schema.name.startswith("aten::_foreach_")
            and len(args) > 1
            and isinstance(args[1], (list, tuple))
        ):
            self.lists.add((func._schema.name, args[0][0].dtype, args[1][0].dtype))
        return func(*args, **(kwargs or {}))


def backwards(rank, models, stage, plan):
    engine = start(models[rank], sgd(models[rank]), config_of(stage, plan))
    step = 0
    for micro in range(plan.accumulation):
        loss = engine(**ARCHITECTURES["gpt2"].batch(step, micro, rank)).loss
        if micro == plan.accumulation - 1:
            with Passes() as passes:
                engine.backward(loss)
        else:
            engine.backward(loss)
    numbers = passes.multiplied, sum(flat.layout.padded for flat in engine.flats), passes.lists
    engine.destroy()
    return numbers


@pytest.mark.parametrize("stage, precision", [(2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_the_average_is_one_pass_over_this_ranks_chunk(stage, precision):
    models = [ARCHITECTURES["gpt2"].build() for _ in range(RANKS)]
    for multiplied, padded, _ in run_ranks(
        RANKS, backwards, models, stage, Plan(ranks=RANKS, precision=precision)
    ):
        assert 0 < multiplied <= padded // RANKS


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_another_dtype_are_added_in_one_call(stage):
    """A list whose dtypes differ falls out of torch's fast path: it is added one parameter, one
    launch, after the other.
    """
    models = [ARCHITECTURES["gpt2"].build() for _ in range(2)]
    plan = Plan(ranks=2, precision="bf16", accumulation=2)
    for _, _, lists in run_ranks(2, backwards, models, stage, plan):
        assert lists and all(
            one == other for name, one, other in lists if name != "aten::_foreach_copy_"
        ), lists
