"""One rank's view of 256: a 7B model on the meta device over the fake process group, its bytes
against the table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_zero.config import ZeroConfig
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.offload.placement import Placement
from hf_zero.zero.layout.engine_plan import plan
from hf_zero.zero.layout.materialize import materialize
from hf_zero.zero.layout.stage_policy import POLICIES
from hf_zero.zero.layout.unit import State

META = torch.device("meta")
WORLD, REPLICAS, RANK = 256, 4, 9
SHARDS = WORLD // REPLICAS


@pytest.fixture
def seven_billion() -> Iterator[nn.Module]:
    with META:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    for module in model.modules():  # buffers have values; they move to the device of the engine
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.zeros(buffer.shape, dtype=buffer.dtype)
            )
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield model
    dist.destroy_process_group()


def test_bytes_of_a_rank(seven_billion: nn.Module) -> None:
    """Each chunk is written by one rank, of its replicas; frozen parameters are sharded at stage 3
    alone; a unit's gather moves its bytes, and its release gives them back.
    """
    numel = sum(p.numel() for p in seven_billion.parameters())
    for stage, frozen in ((0, False), (2, True), (3, True), (3, False)):
        model = copy.deepcopy(seven_billion)
        settings = ZeroConfig(stage, bf16=True, replicate_size=REPLICAS).resolve(WORLD)
        optimizer = None if frozen else torch.optim.SGD(model.parameters(), 0.1)
        own = plan(model, settings, ParallelDims(WORLD), optimizer, rank=RANK, device=META)
        mesh = Mesh(own.shards, META)
        units = materialize(own, mesh, Placement(settings, META, mesh.rank, mesh.world))
        flats = [flat for unit in units for flat in unit.flats]
        cut = SHARDS if stage == 3 else 1
        assert {flat.writes for flat in flats} == {cut > RANK}, (stage, frozen)
        if frozen:
            assert not any(flat.trainable for flat in flats)
            assert {flat.layout.shards for flat in flats} == {cut}
            size = sum(flat.shard.nbytes for flat in flats)
            assert size == pytest.approx(2 * numel / cut, rel=0.001)
            continue
        want = POLICIES[stage].bytes_per_parameter(mesh.shard.size, "bfloat16", moments=0)
        gradients = [
            flat.gradient.shard if (sums := flat.gradient.accumulated_grad) is None else sums
            for flat in flats
        ]
        held = {
            "parameters": [flat.full for flat in flats if flat.cast_master is None],
            "gradients": gradients,
            "optimizer": [flat.optimizer_shard.master for flat in flats],
        }
        for kind, tensors in held.items():
            found = sum(each.nbytes for each in tensors)
            assert found / numel == pytest.approx(want[kind], rel=0.01), (stage, kind)
    assert (mesh.shard.size, mesh.replicate.size) == (SHARDS, REPLICAS)
    assert mesh.shard.ranks == list(range(SHARDS))
    assert mesh.replicate.ranks == list(range(RANK, WORLD, SHARDS))
    unit = next(unit for unit in units if unit.name == "model.layers.7")
    [flat] = unit.flats
    shapes = {name: p.shape for name, p in flat.parameters.items()}
    assert flat.full.untyped_storage().nbytes() == 0, "units are cut"
    mesh.stats.bytes.clear()
    unit.launch_gather()
    unit.finish_gather()
    size = flat.layout.padded * 2
    assert unit.state is State.GATHERED and flat.full.untyped_storage().nbytes() == size
    assert mesh.stats.bytes == {"all_gather": size} and unit.nbytes == size
    assert size == pytest.approx(2 * sum(shape.numel() for shape in shapes.values()), rel=0.001)
    unit.release()
    assert unit.state is State.RELEASED and flat.full.untyped_storage().nbytes() == 0
    assert {name: p.shape for name, p in flat.parameters.items()} == shapes
