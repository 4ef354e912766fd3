"""Tests for GPUs that need no compiler, on the simulated device, which poses as one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.late import launch


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["host_memory", "engine", "offload", "activations", "ways_out", "lightning"]
)
def test_they_pass(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    own = launch.environment(
        as_cuda=True,
        HF_ZERO_BACKEND="hf_zero",
        HF_HUB_OFFLINE="1",
        LATE_DEVICES="2" if name == "lightning" else "1",
        LATE_REPORTS=f"{tmp_path}/{{rank}}-{{process}}.json",
    )
    own.pop("TRITON_INTERPRET", None)
    out = launch.run(
        "pytest",
        *("-o", "addopts=", "-q", f"tests/gpu/test_{name}_on_gpu.py"),
        *("-k", "not compiled"),
        seconds=900,
        env=own,
        interpreter=sys.executable,  # its own: hf_zero is what torch looks for as it is imported
    )
    assert re.search(r"\d passed", out) and not re.search(r"\d (skipped|failed)", out), out
    told = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert told and not any(each["reports"] for each in told), told
