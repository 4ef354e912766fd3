"""One rank's view of 64 to 1024: a 7B model on the meta device over the fake process group, its
bytes against the table.
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
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.materialize import materialize
from hf_zero.zero.layout.stage_policy import POLICIES
from hf_zero.zero.layout.unit import State, Unit
from hf_zero.zero.layout.wrap import find_units
from tests.helpers.cells import fast

META = torch.device("meta")
# ranks, replicas, this rank; a group of many takes long to make
VIEWS = fast(
    [(64, 1, 0), (64, 1, 63), (256, 4, 130), (1024, 1, 511), (1024, 16, 1023)],
    lambda world, *_: world < 1024,
)


@pytest.fixture(scope="module")
def seven_billion() -> nn.Module:
    with META:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    for module in model.modules():  # buffers have values; they move to the device of the engine
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.zeros(buffer.shape, dtype=buffer.dtype)
            )
    return model


@pytest.fixture
def group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def join(world: int, rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def cut_up(
    model: nn.Module, stage: int, replicas: int, frozen: bool = False
) -> tuple[list[Unit], Mesh]:
    model = copy.deepcopy(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    settings = ZeroConfig(stage, bf16=True, replicate_size=replicas).resolve(world)
    optimizer = None if frozen else torch.optim.SGD(model.parameters(), 0.1)
    own = plan(model, settings, ParallelDims(world), optimizer, rank=rank, device=META)
    mesh = Mesh(own.shards, META)
    return materialize(own, mesh, Placement(settings, META, mesh.rank, mesh.world)), mesh


@pytest.mark.turns
@pytest.mark.parametrize("world, replicas, rank", VIEWS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_a_rank(
    stage: int, world: int, replicas: int, rank: int, seven_billion: nn.Module, group: None
) -> None:
    join(world, rank)
    units, mesh = cut_up(seven_billion, stage, replicas)
    flats = [flat for unit in units for flat in unit.flats]
    numel = sum(p.numel() for p in seven_billion.parameters())
    want = POLICIES[stage].bytes_per_parameter(mesh.shard.size, "bfloat16", moments=0)
    parameters = [flat.shard if flat.sharded else flat.full for flat in flats]
    gradients = [
        flat.gradient.shard if (sums := flat.gradient.accumulated_grad) is None else sums
        for flat in flats
    ]
    masters = [flat.optimizer_shard.master for flat in flats]
    held = {"parameters": parameters, "gradients": gradients, "optimizer": masters}
    found = {kind: sum(each.nbytes for each in tensors) for kind, tensors in held.items()}
    for kind, size in found.items():
        assert size / numel == pytest.approx(want[kind], rel=0.01), kind
    if stage == 3:
        assert all(flat.full.untyped_storage().nbytes() == 0 for flat in flats), "units are cut"
        stores = {id(flat._storage): flat._storage.nbytes()["device"] for flat in flats}
        assert sum(stores.values()) == found["parameters"], "storage holds the shards alone"


@pytest.mark.parametrize(
    "world, rank", fast([(64, 5), (1024, 1000)], lambda world, rank: world < 1024)
)
def test_gathering_a_unit_moves_its_bytes_and_releasing_gives_them_back(
    world: int, rank: int, seven_billion: nn.Module, group: None
) -> None:
    join(world, rank)
    units, mesh = cut_up(seven_billion, 3, 1)
    unit = next(unit for unit in units if unit.name == "model.layers.7")
    [flat] = unit.flats
    shapes = {name: p.shape for name, p in flat.parameters.items()}
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


@pytest.mark.parametrize("rank", [0, 9])
def test_frozen_parameters_are_sharded_at_stage_3_alone(
    rank: int, seven_billion: nn.Module, group: None
) -> None:
    join(64, rank)
    for stage, shards in ((2, 1), (3, 64)):
        units, _ = cut_up(seven_billion, stage, 1, frozen=True)
        flats: list[FlatBuffer] = [flat for unit in units for flat in unit.flats]
        assert {flat.layout.shards for flat in flats} == {shards}
        writes = {flat.writes for flat in flats}
        assert writes == {stage == 3 or rank == 0}, "what all ranks hold whole, one of them saves"
        for flat in flats:
            assert flat.optimizer_shard.master is None and flat.gradient.shard is None
            assert not flat.trainable
        numel = sum(p.numel() for p in seven_billion.parameters())
        size = sum(flat.shard.nbytes for flat in flats)
        assert size == pytest.approx(2 * numel / shards, rel=0.001)


@pytest.mark.parametrize("world, replicas, rank", VIEWS)
def test_one_replica_of_each_chunk_writes_it(
    world: int, replicas: int, rank: int, seven_billion: nn.Module, group: None
) -> None:
    join(world, rank)
    _, mesh = cut_up(seven_billion, 3, replicas)
    shards = world // replicas
    assert (mesh.shard.size, mesh.replicate.size) == (shards, replicas)
    assert mesh.shard.ranks[mesh.shard.rank] == mesh.replicate.ranks[mesh.replicate.rank] == rank
    first = rank // shards * shards
    assert mesh.shard.ranks == list(range(first, first + shards))
    assert mesh.replicate.ranks == list(range(rank % shards, world, shards))
    units, _ = cut_up(seven_billion, 3, replicas)
    assert {flat.writes for unit in units for flat in unit.flats} == {rank < shards}
    units, _ = cut_up(seven_billion, 0, 1)
    assert {flat.writes for unit in units for flat in unit.flats} == {rank == 0}


@pytest.mark.parametrize("shards", fast([64, 257, 1024], lambda shards: shards == 257))
def test_all_ranks_together_hold_each_element_once(shards: int, seven_billion: nn.Module) -> None:
    """Every parameter of the 7B model, range by range, over all ranks: padding is below a
    thousandth.
    """
    specs, _ = find_units(seven_billion)
    padded = numel = 0
    for spec in specs:
        layout = FlatLayout.build([(name, p.shape) for name, p in spec.parameters], shards)
        ends = dict.fromkeys((name for name, _ in spec.parameters), 0)
        for shard in range(shards):
            for run in layout.pieces(*layout.rank_range(shard)):
                assert run.start == ends[run.name]
                ends[run.name] = run.stop
        assert ends == {name: p.numel() for name, p in spec.parameters}
        padded, numel = padded + layout.padded, numel + layout.numel
    assert 0 <= padded - numel < numel / 1000
