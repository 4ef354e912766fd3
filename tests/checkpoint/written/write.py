"""Writes the checkpoint of the newest version of the format beside this file: python -m
tests.checkpoint.written.write. Those of earlier versions were written by the code of their time:
versions 1 and 2 of the same model, version 3 of :func:`cut_model` on two ranks that share its
matrices; their files have no hashes of blocks.

Each weight and moment is a function of its name and kind (``value``), so that what a load gives
needs no recording.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from hf_zero.engine import Engine
from hf_zero.zero.layout.sharding import sharding_of
from tests.checkpoint.jobs import Job, run, small, train_some, value
from tests.helpers.models import seeded
from tests.helpers.split import Split

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
        held = engine.bound.state.tensors(flat.optimizer_shard)
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


def main() -> None:
    shutil.rmtree(HERE / "version4", ignore_errors=True)
    write_small(HERE / "version4")
    (HERE / "version4" / "zero_to_fp32.py").unlink()


if __name__ == "__main__":
    main()
