"""Kernels that copy, cast, fill or scale in one step, for each unit, on one of two ranks:
``python -m tests.late.copies``, with RANK and so on set. One line of JSON a case, and one of a
write to shards whose gather is under way.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.late import device

import torch  # isort: skip
from torch import nn  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # isort: skip
import hf_zero  # isort: skip

ROWS, WIDTH = 4, 512
PACKAGE = str(Path(hf_zero.__file__).parent)
COUNTED = frozenset(
    (
        *("copy_", "_to_copy", "clone", "cat", "stack", "constant_pad_nd", "_foreach_copy_"),
        *("zero_", "fill_", "zeros", "zeros_like", "new_zeros", "full", "ones", "_foreach_zero_"),
        *("add", "add_", "mul", "mul_", "div", "div_"),
        *("_foreach_add_", "_foreach_mul_", "_foreach_div_"),
    )
)
KEPT = {"keep_parameter_shards": True}
# stage, bf16, keys of zero_optimization
CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "stage 3, bf16": (3, True, {}),
    "stage 3, bf16, shards kept": (3, True, KEPT),
    "stage 3, fp32": (3, False, {}),
    "stage 2, bf16": (2, True, {}),
    "stage 2, fp32": (2, False, {}),
    "stage 1, bf16": (1, True, {}),
    "stage 1, fp32": (1, False, {}),
}


class Kernels(TorchDispatchMode):
    """Counts the operations of :data:`COUNTED` that hf_zero calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in COUNTED and self._is_ours():
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _is_ours() -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False


def engine_of(blocks: int, stage: int, bf16: bool, zero: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(blocks)
        )
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "steps_per_print": 100,  # else a line every 30 seconds
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_prefetch_bucket_size": 10,
            **zero,
        },
    }
    return hf_zero.initialize(model=model, config=config)[0]


def counted(blocks: int, stage: int, bf16: bool, zero: dict[str, Any]) -> tuple[Counter[str], int]:
    """The kernels of the fourth step, and the number of units."""
    engine, kernels = engine_of(blocks, stage, bf16, zero), Kernels()
    inputs = torch.randn(ROWS, WIDTH).to(engine.device, torch.bfloat16 if bf16 else torch.float32)
    for step in range(4):
        if step == 3:
            kernels.__enter__()
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    kernels.__exit__(None, None, None)
    units = len(engine.units)
    engine.destroy()
    return kernels.found, units


def write_under_a_gather() -> dict[str, Any]:
    """Gathers read the shard of a rank itself, so that a write waits for them."""
    engine = engine_of(2, 3, False, {})
    unit = next(unit for unit in engine.units if unit.sharded_flats)
    [flat] = unit.sharded_flats
    old = flat.shard.clone()
    unit.launch_gather(exact=True)
    with engine.schedule.shards.writing():
        flat.store_shard(torch.zeros_like(old))
    start, stop = flat.owned
    same = torch.equal(flat.full[start:stop].cpu(), old.cpu())
    unit.release()
    engine.destroy()
    return {"old values gathered": same}


def main() -> None:
    device.begin("eager")
    for name, (stage, bf16, zero) in CASES.items():
        (few, units), (many, more) = (counted(blocks, stage, bf16, zero) for blocks in (3, 6))
        each = {key: (many[key] - few[key]) / (more - units) for key in few | many}
        device.tell(case=name, kernels={key: number for key, number in each.items() if number})
    device.tell(case="write", **write_under_a_gather(), reports=device.reports())


if __name__ == "__main__":
    os.environ.setdefault("HF_ZERO_LOG_LEVEL", "ERROR")
    main()
