"""The storage of a state is used under a lease, which waits for updates and for saves; in tests it
raises for any other use.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.offload.storage import MASTER
from tests.helpers.cells import in_turn
from tests.helpers.offloads import PLACES, offload, opened, train
from tests.helpers.stacks import on_ranks

ROOT = Path(hf_zero.__file__).parent


@in_turn("way", PLACES)
def test_a_use_without_a_lease_raises_and_a_lease_waits(way, tmp_path):
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, offload(way, 2, tmp_path))
        train(engine, rank, range(2))
        shards = [flat.optimizer_shard for flat in engine.flats]
        updating = [shard for shard in shards if shard.has_update]
        assert updating  # no one has waited for it
        for shard in updating:
            with pytest.raises(AssertionError, match=r"fetch\('master',\) without a lease"):
                shard._storage.fetch(MASTER)
            with pytest.raises(AssertionError, match=r"store\('master',\) without a lease"):
                shard._storage.store(MASTER, 0, torch.zeros(1))
            lease: Any = shard.reading()
            lease.fetch(MASTER)
            assert not shard.has_update
            with pytest.raises(AssertionError, match=r"lease of reading\(\), which does not allow"):
                lease.store(MASTER, 0, torch.zeros(1))
        train(engine, rank, range(2, 3))
        with pytest.raises(AssertionError, match=r"lease of reading\(\), which ended"):
            lease.fetch(MASTER)
        engine.destroy()

    on_ranks(1, run)


def test_a_lease_for_writing_waits_for_the_copy_of_a_save_and_ends_with_the_next(tmp_path):
    def run(rank: int, model: nn.Module) -> None:
        engine: Any = opened(model, offload("optimizer on cpu", 2, tmp_path))
        train(engine, rank, range(1))
        shard = engine.flats[0].optimizer_shard
        before = shard.writing()
        value = before.fetch(MASTER)[:1].clone()
        shard.begin_copy(shard.end_copy)
        assert torch.equal(shard.reading().fetch(MASTER)[:1], value)
        assert shard.wait_until_copied is not None
        with pytest.raises(AssertionError, match=r"lease of writing\(\), which ended"):
            before.store(MASTER, 0, value)
        shard.writing().store(MASTER, 0, value)
        assert shard.wait_until_copied is None
        shard.begin_copy(shard.end_copy)
        shard.updating()
        assert shard.wait_until_copied is None
        engine.destroy()

    on_ranks(1, run)


def test_a_write_of_state_on_the_device_raises_while_a_save_copies_it_and_safe_set_waits():
    def run(rank: int, model: nn.Module) -> None:
        engine: Any = opened(model, {"stage": 1})
        train(engine, rank, range(1))
        shard, weight = engine.flats[0].optimizer_shard, model.head.weight
        values = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg") + 1
        shards = [flat.optimizer_shard for flat in engine.flats]
        for shard in shards:
            shard.begin_copy(shard.end_copy)
        with pytest.raises(AssertionError, match="put while a save copies it"):
            engine.bound.state.load_tensor(shard, "exp_avg", torch.zeros(shard.spec.owned_numel))
        hf_zero.safe_set_full_optimizer_state(weight, values, "exp_avg")
        assert any(shard.wait_until_copied is None for shard in shards)
        got = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg")
        assert got is not None and torch.equal(got, values)
        engine.destroy()

    on_ranks(1, run)


def test_storages_are_reached_through_leases_alone():
    """No module but those of the leases reads the private storage of a shard."""
    layers = {ROOT / "zero/layout" / name for name in ("optimizer_shard.py", "flat_buffer.py")}
    readers = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in ROOT.rglob("*.py")
        if file not in layers and "zero" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("_storage", "_finish_update")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "torch"))
    }
    assert not readers
