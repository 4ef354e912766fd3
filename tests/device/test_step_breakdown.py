"""Where the milliseconds of a step go, by a trace: traces written by hand in the format of
torch.profiler, and one of the CPU.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def in_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    correlation = more.pop("correlation", None)
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur} | {
        "args": args,
        **more,
    }


def kernel(name: str, ts: float, dur: float, stream: int = 7, **more: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, pid=0, tid=stream, **more)


GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1"
FUSED = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3"
ADDED = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"
NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EVENTS = [
    event("user_annotation", "hf_zero::update ", 100, 50),
    event("cpu_op", "aten::add", 60, 5),
    event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
    event("cuda_driver", "cuLaunchKernelEx", 110, 5, correlation=2),
    event("cuda_runtime", "cudaLaunchKernel", 120, 5, correlation=3),
    kernel(GEMM, 1000, 400),
    kernel(FLASH, 1400, 200),
    kernel(FUSED, 1600, 100, correlation=1),
    kernel(NCCL, 1650, 100, stream=20, correlation=3),  # half of it beside the fused one
    # nothing runs for 50 µs
    kernel(ADDED, 1800, 150, correlation=2),  # of the update
    kernel("update_kernel", 1950, 40),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1990, 10, pid=0, tid=7),
    {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 5000},
]


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_kernels_of_a_device_by_kind(tmp_path: Path) -> None:
    from step_breakdown import NOTHING, break_down, read, table

    found = break_down(read(write(tmp_path, EVENTS)), steps=2)
    rows = {row["of"]: row for row in found.rows()}
    ms = {kind: round(row["ms"] * 2, 6) for kind, row in rows.items()}
    assert ms == {
        "matrix products": 0.4,
        "attention": 0.2,
        "optimizer": 0.19,
        "compiled by inductor": 0.075,
        "communication": 0.075,
        NOTHING: 0.05,
        "copies and casts": 0.01,
    }
    assert found.span == 1000 and round(found.long_gaps_ms * 2, 6) == 0.05
    assert abs(sum(row["share"] for row in rows.values()) - 1) < 1e-9
    assert rows["optimizer"]["number"] == 1.0  # two in two steps
    names = [(row["of"], row["kind"]) for row in found.rest(2)]
    assert {*names} == {(FUSED, "compiled by inductor"), (NCCL, "communication")}
    told = table(found, 20)
    assert "| matrix products | 0.200 | 40.0% | 0.5 |" in told and "a step: 0.500 ms" in told
    assert f"| {FUSED} | compiled by inductor |" in told and GEMM not in told


def test_operations_of_the_host_where_there_are_no_kernels() -> None:
    from step_breakdown import break_down

    events = [
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::addmm", 10, 80),
        event("cpu_op", "aten::layer_norm", 100, 20),
        event("user_annotation", "Optimizer.step#AdamW.step", 150, 50),
        event("cpu_op", "Optimizer.step#AdamW.step", 150, 50),
        event("cpu_op", "aten::mul_", 160, 30),
        event("cpu_op", "aten::_softmax", 180, 40, tid=2),  # autograd's thread
    ]
    found = break_down(events)
    us = {row["of"]: round(row["ms"] * 1e3, 6) for row in found.rows()}
    assert us == {
        "matrix products": 100,
        "norms": 20,
        "optimizer": 25,
        "other": 35,
        "nothing runs": 40,
    }
    assert sum(us.values()) == found.span == 220


def test_a_trace_of_the_cpu(tmp_path: Path) -> None:
    from step_breakdown import break_down, main, read

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(2):
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
    path = tmp_path / "trace.json"
    seen.export_chrome_trace(str(path))
    found = break_down(read(path), steps=2)
    ms = {row["of"]: row["ms"] for row in found.rows()}
    assert ms["matrix products"] > 0 and ms["optimizer"] > 0 and ms["norms"] > 0, ms
    assert abs(sum(ms.values()) - found.span / 2e3) < 1e-6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["step_breakdown.py", str(path), "--steps", "2"])
        main()


def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path) -> None:
    from step_breakdown import break_down, read

    (tmp_path / "text").write_text("no trace")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(SystemExit, match=f"{path} is no trace of torch.profiler"):
            read(path)
    with pytest.raises(SystemExit, match="neither kernels of a device nor operations of the host"):
        break_down(read(write(tmp_path, [])))


def test_goals_are_of_cells_that_exist() -> None:
    """Each contender of a goal is a cell of the command that judges it."""
    import gpu_cells
    import gpu_goals
    import gpu_large

    by_name = {cell.work: cell for cell in gpu_cells.CELLS}
    cells = {(cell.work, cell.of) for cell in gpu_cells.CELLS}
    for goal in gpu_goals.GOALS:
        for of in filter(None, (goal.ours, goal.over, *goal.peers)):
            many = not by_name[goal.work].of  # rows name their contenders
            assert many or (goal.work, of) in cells, (goal.title, of)
    for part, goals in gpu_large.GOALS.items():
        large = {(cell.work, cell.of) for cell in gpu_large.PARTS[part]}
        assert {
            (goal.work, of) for goal in goals for of in filter(None, (goal.ours, goal.over))
        } <= (large)
