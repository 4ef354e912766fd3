"""An update that is still under way keeps nobody waiting who does not read what it changes."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_zero.offload.sub_group_update import Update
from tests.helpers import offloads
from tests.helpers.models import ARCHITECTURES

LLAMA = ARCHITECTURES["llama"]


def train(engine, step: int) -> None:
    engine.backward(engine(**LLAMA.batch(step, 0, 0)).loss)
    engine.step()


def opened(folder, stage: int = 2, way: str = "optimizer on cpu"):
    return offloads.opened(LLAMA.build(), offloads.offload(way, stage, folder))


def test_step_returns_while_units_are_updated_and_a_forward_waits_unit_by_unit(
    tmp_path, monkeypatch
):
    """The forward of the first unit runs while the last one is still being updated."""
    engine = opened(tmp_path)
    train(engine, 0)
    engine.updater.finish()
    order, run = [], Update.run
    unit_of = {flat.optimizer_shard: flat.unit for flat in engine.flats}
    last = threading.Event()

    def held_up(update, shard, place, placed):
        if unit_of[shard] is engine.updater.units[-1]:
            assert last.wait(120)
        run(update, shard, place, placed)
        order.append(unit_of[shard])

    monkeypatch.setattr(Update, "run", held_up)
    train(engine, 1)
    assert engine.updater.pending
    reached = []
    for unit in engine.units:
        unit.module.register_forward_hook(
            lambda module, args, output, label=unit.label: reached.append(label)
        )
    blocks = [unit for unit in engine.updater.units if unit.label.startswith("model.layers")]
    assert [unit.label for unit in blocks] == ["model.layers.0", "model.layers.1"]
    blocks[1].module.register_forward_pre_hook(lambda module, args: last.set(), prepend=True)
    assert engine.updater.units[-1] is blocks[1], "it is needed last"
    train(engine, 2)
    assert reached[0] == "model.layers.0" and order[-1] is not None
    engine.destroy()


@pytest.mark.parametrize("way", ["all on cpu", "optimizer in files"])
def test_a_thread_that_reads_for_other_ranks_waits_by_itself(way, gate, tmp_path, monkeypatch):
    """The thread that trains has to wait all the same: in its stream, and under its watch."""
    engine = opened(tmp_path, 3, way)
    train(engine, 0)
    engine.updater.finish()
    unit = engine.units[1]
    before = unit.chunk_bytes()
    gate.clear()
    train(engine, 1)
    finished = []
    finish = engine.updater.finish
    monkeypatch.setattr(
        engine.updater,
        "finish",
        lambda *units: (finished.append(threading.current_thread().name), finish(*units))[1],
    )
    answers = []
    reader = threading.Thread(target=lambda: answers.append(unit.chunk_bytes()), name="reader")
    reader.start()
    reader.join(0.05)
    assert not answers
    gate.set()
    reader.join(120)
    assert "reader" not in finished and unit in engine.updater.pending
    own = b"".join(flat.shard.detach().view(torch.uint8).numpy().tobytes() for flat in unit.sharded)
    assert answers == [own] and own != before
    engine.destroy()
