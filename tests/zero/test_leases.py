"""A storage of state raises in tests where it is used without a lease, which waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.offload.storage import MASTER
from tests.helpers.cells import in_turn
from tests.helpers.offloads import PLACES, offload, opened, train
from tests.helpers.stacks import on_ranks


@in_turn("way", PLACES)
def test_a_use_without_a_lease_raises_while_an_update_is_under_way(way, tmp_path):
    def run(rank: int, model: nn.Module) -> None:
        engine = opened(model, offload(way, 2, tmp_path))
        train(engine, rank, range(2))
        shards = [flat.optimizer_shard for flat in engine.flats]
        updating = [shard for shard in shards if shard.finish_update is not None]
        assert updating  # no one has waited for it
        for shard in updating:
            with pytest.raises(AssertionError, match="without a lease, while its update"):
                shard.storage.fetch(MASTER)
            with pytest.raises(AssertionError, match="without a lease, while its update"):
                shard.storage.store(MASTER, 0, torch.zeros(1))
            shard.reading().fetch(MASTER)
            assert shard.finish_update is None
        engine.destroy()

    on_ranks(1, run)


def test_a_write_without_a_lease_raises_while_a_save_copies(tmp_path):
    def run(rank: int, model: nn.Module) -> None:
        engine: Any = opened(model, offload("optimizer on cpu", 2, tmp_path))
        train(engine, rank, range(1))
        engine.sharded_model.wait_until_writable()
        shard = engine.flats[0].optimizer_shard
        value = shard.storage.fetch(MASTER)[:1].clone()
        shard.begin_copy(shard.end_copy)
        assert torch.equal(shard.storage.fetch(MASTER)[:1], value)
        with pytest.raises(AssertionError, match="without a lease, while a save copies"):
            shard.storage.store(MASTER, 0, value)
        engine.sharded_model.wait_until_writable()
        assert shard.wait_until_copied is None
        shard.storage.store(MASTER, 0, value)
        engine.destroy()

    on_ranks(1, run)
