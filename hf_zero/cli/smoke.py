"""Program of the ranks of ``hf-zero smoke``: a short training at each stage, compared with the same
training by the reference engine of ``hf-zero parity``, which is plain PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hf_zero.cli.printing import PrintableTable, print_json, print_table
from hf_zero.logging import JsonObject, counted

if TYPE_CHECKING:
    import torch

    from hf_zero.config import ZeroConfig
    from hf_zero.engine import Engine
    from hf_zero.parity.reference import Reference

STEPS, SAMPLES, FEATURES = 6, 4, 48
BOUND = 1e-4  # of the distance that training has moved the weights
WRONG = 1


def _model() -> torch.nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(FEATURES, 1))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _batches(ranks: int) -> list[torch.Tensor]:
    """Return the batches of the steps, float32[ranks × SAMPLES, FEATURES]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (ranks * SAMPLES, FEATURES)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def _config(stage: int) -> ZeroConfig:
    import hf_zero

    return hf_zero.ZeroConfig(
        stage=stage,
        train_micro_batch_size_per_gpu=SAMPLES,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    )


def _train(engine: Engine | Reference, rank: int, batches: Sequence[torch.Tensor]) -> None:
    for batch in batches:
        mine = batch[rank * SAMPLES : (rank + 1) * SAMPLES].to(engine.device)
        engine.backward(engine(mine).square().mean())
        engine.step()


def _reference(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after the training with untouched torch in place of the engine."""
    from hf_zero.parity.reference import Reference

    model = _model()
    engine = Reference(model, _optimizer(model), _config(0).resolve(ranks))
    _train(engine, rank, _batches(ranks))
    return model.state_dict()


def _sharded(stage: int, folder: Path, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after the training at ``stage``, which is saved and resumed half-way."""
    import hf_zero

    def start(**more: Any) -> Engine:
        return hf_zero.initialize(model=_model(), config=_config(stage), **more)[0]

    engine, batches = start(), _batches(ranks)
    _train(engine, rank, batches[: STEPS // 2])
    engine.save_checkpoint(str(folder))
    engine.destroy()
    engine = start(resume=str(folder))
    _train(engine, rank, batches[STEPS // 2 :])
    weights = engine.state_dict()
    engine.destroy()
    assert weights is not None  # every rank asks for them
    return weights


def largest_difference(
    weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest difference of elements of the same name; NaN if one is NaN."""
    import torch

    differences = [
        (weights[name].cpu() - other.cpu()).abs().max() for name, other in others.items()
    ]
    return float(torch.stack(differences).max())


def fork(ranks: int, environment: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Run :func:`main` on CPU ranks that are forks of this process, and return the exit code of the
    first that ends with another one than 0: torch, whose import takes longer than the training, is
    imported once. A process that has asked for GPUs must not fork.
    """
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        ProcessRaisedException,
        start_processes,
    )

    import hf_zero
    from hf_zero.launch.hosts import free_port

    os.environ.update(environment)
    assert hf_zero.initialize is not None  # imported here, and with it what the engine consists of
    _optimizer(_model())  # the first optimizer of a process imports torch's compiler
    try:
        start_processes(_fork, (ranks, free_port(), list(arguments)), ranks, start_method="fork")
    except ProcessExitedException as ended:
        return ended.exit_code
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return WRONG
    return 0


def _fork(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    names |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    os.environ.update(names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.exit(main(arguments))


def main(arguments: list[str]) -> int:
    """Run on each rank: train at all stages, and print the result on rank 0, with "--json" as
    JSON. Returns the exit code.
    """
    import hf_zero
    from hf_zero.distributed.world_group import get_world_group

    hf_zero.init_distributed()
    world = get_world_group()
    rank, ranks = world.rank, len(world.ranks)
    expected = _reference(rank, ranks)
    moved = largest_difference(expected, _model().state_dict())
    rows = []
    with TemporaryDirectory() if rank == 0 else nullcontext("") as folder:
        shared = world.broadcast_object(folder)
        for stage in range(4):
            weights = _sharded(stage, Path(shared, str(stage)), rank, ranks)
            if rank == 0:
                difference = largest_difference(weights, expected)
                right = difference <= BOUND * moved
                rows.append({"stage": stage, "largest_difference": difference, "right": right})
        world.barrier()
    if "--json" in arguments:
        if rank == 0:
            print_json(rows)
    elif rank == 0:
        _print(rows, ranks)
    return 0 if all(row["right"] for row in rows) else WRONG


def _print(rows: list[JsonObject], ranks: int) -> None:
    table = PrintableTable(
        "stage",
        "largest difference of a weight",
        "",
        title=f"{counted(ranks, 'rank')}, {STEPS} steps, saved and resumed after step {STEPS // 2}",
    )
    for row in rows:
        verdict = "as in plain PyTorch" if row["right"] else "WRONG"
        table.add_row(str(row["stage"]), f"{row['largest_difference']:.1e}", verdict)
    print_table(table)
    print(
        "this machine trains with hf-zero"
        if all(row["right"] for row in rows)
        else "weights differ from plain PyTorch's; attach this and `hf-zero doctor --probe --json` "
        "to an issue"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
