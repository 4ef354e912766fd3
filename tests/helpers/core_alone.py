"""Training by a package of which only the core is there, on two ranks: a script without imports of
tests, because it runs beside a copy of that package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANKS, STEPS, MICRO, CLIP = 2, 3, 2, 0.5
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def inputs(rank: int, step: int, micro: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.rand(2, 4, generator=generator).to(dtype)


def oracle() -> dict[str, torch.Tensor]:
    """Return the weights of plain torch in fp32, trained on the batches of all ranks."""
    model, optimizer = model_and_optimizer()
    for step in range(STEPS):
        batches = [inputs(r, step, m, torch.float32) for m in range(MICRO) for r in range(RANKS)]
        model(torch.cat(batches)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def engine_of(stage: int, precision: str) -> Any:
    import hf_zero

    model, optimizer = model_and_optimizer()
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_clipping": CLIP,
        "gradient_accumulation_steps": MICRO,
        "train_micro_batch_size_per_gpu": 2,
        "log_level": "warning",
        **PRECISIONS[precision],
    }
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(rank: int, stage: int, precision: str, folder: Path) -> None:
    """Train, save and load after the second step, and compare with plain torch."""
    engine = engine_of(stage, precision)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for step in range(STEPS):
        if step == 2:
            engine.save_checkpoint(str(folder))
            engine.destroy()
            engine = engine_of(stage, precision)
            engine.load_checkpoint(str(folder))
        for micro in range(MICRO):
            engine.backward(engine(inputs(rank, step, micro, dtype)).float().square().mean())
            engine.step()
    assert engine.global_steps == STEPS
    tolerance = 1e-6 if precision == "fp32" else 2e-2
    for name, value in oracle().items():
        weight = engine.state_dict()[name].float()
        torch.testing.assert_close(weight, value, rtol=tolerance, atol=tolerance)
    engine.destroy()


def lose_a_rank(rank: int) -> None:
    """Check that a rank raises once the other one has ended without a word."""
    from hf_zero.errors import RankMismatchError

    engine = engine_of(3, "fp32")
    try:
        for step in range(STEPS):
            if step and rank:
                os._exit(0)
            for micro in range(MICRO):
                engine.backward(engine(inputs(rank, step, micro, torch.float32)).square().mean())
                engine.step()
    except RankMismatchError as error:
        assert "a connection was lost" in str(error), error
    else:
        raise AssertionError("the rank has trained on alone")


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    for stage in range(4):
        for precision in PRECISIONS:
            train(rank, stage, precision, Path(folder, f"{stage} {precision}"))
    lose_a_rank(rank)


if __name__ == "__main__":
    given = (int(sys.argv[1]), sys.argv[2])
    torch.multiprocessing.start_processes(run, given, nprocs=RANKS, start_method="fork")
