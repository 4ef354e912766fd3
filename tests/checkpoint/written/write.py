"""Writes the checkpoints beside this file, one a version of the format, by the code as it was
before files had hashes of their blocks: python -m tests.checkpoint.written.write.

Each weight and moment is a function of its name and kind (``value``), so that what a load gives
needs no recording.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.engine import Engine
from hf_zero.zero.layout.sharding import sharding_of
from tests.checkpoint.jobs import Job, run, small, train_some, value
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Split, batches, config_of_split, split
from tests.helpers.training import adamw

HERE = Path(__file__).resolve().parent
TWO = Job(2, 3, units=("first",))
CLIENT_STATE = {"epoch": 2, "when": (1, 2)}  # a tuple is no JSON: there is an objects.pt
TAG = "global_step1"


def cut_model() -> nn.Module:
    return seeded(lambda: Split(blocks=1))


@torch.no_grad()
def give_values(engine: Engine) -> None:
    """Give weights and moments the values of their names."""
    parameters = dict(engine.module.named_parameters())
    for flat in engine.flats:
        held = engine.bound.tensors(flat.optimizer_shard)
        for piece in flat.layout.pieces(*flat.owned):
            slot, at = flat.layout.by_name[piece.name], piece.offset - flat.owned[0]
            box = sharding_of(parameters[piece.name]).box
            for kind, tensor in ({"weights": flat.optimizer_shard.master} | held).items():
                if kind == "master":
                    continue
                whole = value(kind, piece.name, slot.shape if box is None else box.whole)
                own = (whole if box is None else box.take(whole)).reshape(-1)
                tensor[at : at + len(piece)] = own[piece.start : piece.stop]


def write_small(folder: Path) -> None:
    def action(engine: Engine) -> None:
        train_some(engine, 1)
        give_values(engine)
        engine.save_checkpoint(str(folder), client_state=CLIENT_STATE)

    run(TWO, small, action)


def write_cut(folder: Path) -> None:
    models = [cut_model() for _ in range(2)]

    def on_rank(rank: int) -> None:
        axes = init_parallel(ParallelDims.over(2, tensor=2))
        model: Any = split(copy.deepcopy(models[rank]), axes)
        engine = start(model, adamw(model), config_of_split(3))
        engine.backward(engine(batches(1, 1, 1)[0, 0, 0]))
        engine.step()
        give_values(engine)
        engine.save_checkpoint(str(folder))
        engine.destroy()

    run_ranks(2, on_rank)


def as_version_1(folder: Path) -> None:
    """Change the checkpoint in ``folder`` to what version 1 of the format would have."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["version"] = 1
    del manifest["digest"]
    for entry in [*manifest["files"], manifest["objects"]]:
        del entry["hash"]
        entry["sha256"] = hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def main() -> None:
    makers = {"version1": write_small, "version2": write_small, "version3": write_cut}
    for name, make in makers.items():
        shutil.rmtree(HERE / name, ignore_errors=True)
        make(HERE / name)
        (HERE / name / "zero_to_fp32.py").unlink()
    as_version_1(HERE / "version1" / TAG)


if __name__ == "__main__":
    main()
