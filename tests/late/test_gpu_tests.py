"""Tests for GPUs that need no compiler, on the simulated device, which poses as one."""

from __future__ import annotations

import pytest

from tests.late import launch


@pytest.mark.long
@pytest.mark.parametrize("name", ["engine"])
def test_they_pass(name: str) -> None:
    launch.needs_the_device()
    own = launch.environment(as_cuda=True, HF_ZERO_BACKEND="hf_zero", HF_HUB_OFFLINE="1")
    own.pop("TRITON_INTERPRET", None)
    out = launch.run(
        "pytest", "-o", "addopts=", "-q", f"tests/gpu/test_{name}_on_gpu.py", seconds=900, env=own
    )
    assert " passed" in out and "skipped" not in out, out
