"""Random lives of training state, and random programs of every causal model type with and without
fused kernels, in one process on a GPU beside plain PyTorch there. ``HF_ZERO_SEEDS=N`` runs that
many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.random_programs import Mesh, Program, check, runnable
from tests.helpers.random_states import Life, fails

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = int(os.environ.get("HF_ZERO_SEEDS", 20))
pytestmark = pytest.mark.usefixtures("process_group")


def here(world: int, fn: Callable[..., Any], *args: Any, build: Any = None) -> list[Any]:
    """Run ``fn`` as rank 0 of this process, as run_ranks and on_ranks do on threads."""
    assert world == 1
    return [fn(0, *([build()] if build else []), *args)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_state_as_in_one_process(seed: int) -> None:
    life = Life.drawn(seed).on(1)
    error = fails(life, here, DEVICE)
    assert not error, f"{error}\n{life!r}"


@pytest.mark.parametrize("kernels", ["off", "auto"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_models_as_in_one_process(seed: int, kernels: str, tmp_path: Path) -> None:
    program = replace(Program.drawn(seed), meshes=(Mesh(),) * 3, device=DEVICE, kernels=kernels)
    found = runnable(program)
    if found is None:
        pytest.skip(f"{program.kind} does not train in plain PyTorch here")
    check(*found, tmp_path, here)
