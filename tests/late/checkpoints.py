"""Checkpoints of state in bf16, and saves that fail while copies are under way, of engines on ranks
of the device, which poses as CUDA: ``python -m tests.late.checkpoints MODE JOB ...``, with RANK and
so on set. A line of JSON a job: what was wrong (nothing, if right), and the reports.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.late import device, training

import torch  # isort: skip
import hf_zero  # isort: skip
from hf_zero.checkpoint import staging  # isort: skip
from hf_zero.distributed import world_group  # isort: skip
from hf_zero.errors import CheckpointError  # isort: skip
from tests.late.ways_out import equal  # isort: skip

BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
KAHAN = {**BF16, "kahan_summation": True}
HOST = {"offload_optimizer": training.HOST}
IN_PART = {"offload_optimizer": {**training.HOST, "ratio": 0.5}}


def engine_of(bf16: dict[str, Any], zero: dict[str, Any]) -> Any:
    """An engine at stage 2."""
    config = {
        **training.config("stage 2"),
        **training.ONCE,
        "bf16": bf16,
        "zero_optimization": {"stage": 2, **zero},
    }
    with torch.device("cpu"):
        model = training.tower()
    engine, *_ = hf_zero.initialize(model=model, config=config)
    return engine


def run(engine: Any, rank: int, steps: int = 2) -> None:
    for values in training.batches(steps, rank, 2):
        batch = values.bfloat16().pin_memory().to(engine.device, non_blocking=True)
        engine.backward(engine(batch).float())
        engine.step()


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """The master weights, in fp32 on the host."""
    named = engine.module.named_parameters()
    return {name: hf_zero.safe_get_full_fp32_param(p).cpu().clone() for name, p in named}


def errors_of(engine: Any) -> dict[str, torch.Tensor]:
    """The rounding errors of the master weights."""
    named = engine.module.named_parameters()
    return {
        name: hf_zero.safe_get_full_optimizer_state(p, "compensation").cpu().float()
        for name, p in named
    }


def moments_of(engine: Any) -> dict[str, torch.Tensor]:
    """The first moments, in fp32 on the host."""
    named = engine.module.named_parameters()
    return {
        f"{name} exp_avg": hf_zero.safe_get_full_optimizer_state(p, "exp_avg").cpu().float()
        for name, p in named
    }


def sums_are_loaded(rank: int, folder: Path) -> list[str]:
    """A run with master weights in fp32, on the host, takes the sums of those in bf16."""
    engine = engine_of(KAHAN, {})
    run(engine, rank)
    engine.save_checkpoint(folder)
    weights, errors = weights_of(engine), errors_of(engine)
    sums = {name: value + errors[name] for name, value in weights.items()}
    engine.destroy()
    engine = engine_of({"enabled": True}, HOST)
    engine.load_checkpoint(folder)
    wrong = [] if equal(weights_of(engine), sums) else ["master weights are not the sums"]
    run(engine, rank)
    engine.destroy()
    return wrong


def a_resume_takes_steps(rank: int, folder: Path) -> list[str]:
    """A run resumes with its rounding errors, on the GPU and on the host, with the weights of one
    that goes on.
    """
    wrong = list[str]()
    for zero in ({}, HOST):
        engine = engine_of(KAHAN, {})
        run(engine, rank)
        engine.save_checkpoint(folder)
        run(engine, rank)
        weights = weights_of(engine)
        engine.destroy()
        engine = engine_of(KAHAN, zero)
        engine.load_checkpoint(folder)
        run(engine, rank)
        near = all(
            torch.allclose(value, weights[name], rtol=2**-7, atol=1e-4)
            for name, value in weights_of(engine).items()
        )
        wrong += [] if near else [f"other weights with {zero}"]
        engine.destroy()
    return wrong


def a_copy_fails(rank: int, folder: Path) -> list[str]:
    """A save in the background runs out of memory after it has launched copies to the host."""
    engine = engine_of(BF16, {})
    run(engine, rank)
    copies = staging.copy_to_memory

    def failing(memory: Any, plan: Any, tensors: Any, on: Any, start: int) -> None:
        last = plan.entries[-1].name

        def fail() -> torch.Tensor:
            raise torch.OutOfMemoryError("no room for decoded state")

        copies(memory, plan, {**tensors, last: fail}, on, start)

    staging.copy_to_memory, wrong = failing, list[str]()
    try:
        engine.save_checkpoint(folder, blocking=False)
        wrong.append("the save has not failed")
    except CheckpointError:
        pass
    finally:
        staging.copy_to_memory = copies
    gc.collect()
    device.synchronize_all()
    engine.destroy()
    return wrong


def a_save_is_copied_later(
    sections: Sequence[dict[str, Any]], rank: int, folder: Path
) -> list[str]:
    """Staging memory of a part of the file is filled again beside forwards and backwards, and the
    updates wait: the checkpoint is that of a blocking save, with each of the sections
    ``zero_optimization``.
    """
    wrong, later, fill = list[str](), list[int](), staging.StagedFile._stage_next_part

    def counted(staged: Any) -> None:
        later.append(staged._stop)
        fill(staged)

    staging.StagedFile._stage_next_part = counted
    for zero in sections:
        engine = engine_of(KAHAN if "offload_optimizer" not in zero else {"enabled": True}, zero)
        writer = engine.background_saves.get_saver()
        run(engine, rank)
        engine.save_checkpoint(folder, tag="blocking")
        files = [path.stat().st_size for path in (folder / "blocking").glob("rank-*")]
        writer._staging_bytes = bound = min(files) * 3 // 4
        later.clear()
        engine.save_checkpoint(folder, tag="later", blocking=False)
        wrong += [] if writer.nbytes <= bound + 4096 else [f"{writer.nbytes} bytes are staged"]
        run(engine, rank)
        found = []
        for tag in ("blocking", "later"):
            engine.load_checkpoint(folder, tag=tag)
            found.append(weights_of(engine) | moments_of(engine))
        wrong += [] if equal(*found) else [f"another checkpoint with {zero}"]
        wrong += [] if later else [f"all was copied in the call with {zero}"]
        engine.destroy()
    staging.StagedFile._stage_next_part = fill
    return wrong


def a_default_device_is_set(rank: int, folder: Path) -> list[str]:
    """A script sets torch's default device to its GPU: what the engine keeps, sends and saves from
    the host is not there.
    """
    wrong = list[str]()
    torch.set_default_device(torch.device("cuda", rank))
    try:
        for zero in ({}, HOST):
            engine = engine_of(KAHAN, zero)
            with torch.device("cpu"):
                batches = list(training.batches(2, rank, 2))
            for values in batches:
                engine.backward(engine(values.to(engine.device, torch.bfloat16)).float())
                engine.step()
            weights = weights_of(engine)
            engine.save_checkpoint(folder)
            engine.save_checkpoint(folder, tag="background", blocking=False)
            engine.load_checkpoint(folder)
            wrong += [] if equal(weights_of(engine), weights) else [f"other weights with {zero}"]
            engine.destroy()
    finally:
        torch.set_default_device(None)
    return wrong


JOBS: dict[str, Callable[[int, Path], list[str]]] = {
    "sums": sums_are_loaded,
    "resumed": a_resume_takes_steps,
    "a copy fails": a_copy_fails,
    "a default device": a_default_device_is_set,
    "copied later": partial(a_save_is_copied_later, ({"stage": 3}, IN_PART)),
    "copied later, elsewhere": partial(a_save_is_copied_later, ({}, HOST)),
}


def main() -> None:
    rank = device.begin(sys.argv[1])
    hf_zero.init_distributed()
    for name in sys.argv[2:]:
        device.forget()
        with tempfile.TemporaryDirectory() as own:
            folder = Path(world_group.get_world_group().broadcast_object(own))
            wrong = JOBS[name](rank, folder)
            world_group.barrier()
        gc.collect()
        device.tell(job=name, rank=rank, wrong=wrong, reports=device.reports())
    world_group.barrier()


if __name__ == "__main__":
    main()
