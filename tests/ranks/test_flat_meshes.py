"""Models that are split over ranks by hand, tensor and expert parallel: losses, norms, gradients
and weights of one process, at every stage.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, PartitionError, UnsupportedOptimizerError
from hf_zero.optim.trust_ratio import LARS
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.cut_parameters import join_parts
from hf_zero.zero.layout.sharding import Sharding
from tests.helpers import split as helpers
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Split, batches, check, config_of_split, split
from tests.helpers.training import adamw, plain_sgd

TP2 = {"tensor": 2}
EP2 = {"expert": 2}
BOTH = {"tensor": 2, "expert": 2}
CLIP = 0.05


def without(change):
    of = Mesh.of
    return lambda mesh, axes, *more: replace(of(mesh, axes, *more), **change)


@pytest.mark.parametrize(
    ("stage", "name", "fault", "message"),
    [
        # at other stages each element has one owner
        (0, "of", without({"weight": 1.0}), "norm"),
        (1, "of", without({"gain": 1.0}), "norm"),
        (3, "of", without({"gain": 1.0}), "norm"),
        (0, "broadcast", lambda mesh, t, within=None: mesh.peers.broadcast(t, 0), "norm"),
        (3, "broadcast", lambda mesh, t, within=None: mesh.peers.broadcast(t, 0), "norm"),
    ],
    ids=["replicated twice", "1/world 1", "1/world 3", "rank 0's parts 0", "parts 3"],
)
def test_faults_are_caught(stage, name, fault, message, monkeypatch):
    monkeypatch.setattr(Mesh, name, fault)
    with pytest.raises(AssertionError, match=message):
        check(TP2, stage, 1, plain_sgd)


def test_a_partial_gradient_that_is_left_partial_is_caught(monkeypatch):
    marked = helpers.set_sharding
    monkeypatch.setattr(helpers, "set_sharding", lambda p, s: s.partial or marked(p, s))
    with pytest.raises(AssertionError, match=r"norm|gradient"):
        check(TP2, 1, 1, plain_sgd)


def test_a_block_is_gathered_in_one_message():
    def run(rank, whole):
        model = split(copy.deepcopy(whole), init_parallel(ParallelDims.over(4, tensor=2)))
        engine = start(model, plain_sgd(model), config_of_split(3))
        rows = batches(2, 1, 2)[:, 0, rank // 2]
        engine.backward(engine(rows[0]))
        engine.step()
        engine.mesh.stats.counts.clear()
        engine.backward(engine(rows[1]))
        counts = dict(engine.mesh.stats.counts)
        engine.destroy()
        return counts

    # The root holds what tensor-parallel ranks share. The last block stays for the backward.
    for counts in run_ranks(4, run, seeded(Split)):
        assert counts["all_gather"] == 4 + 2


@pytest.mark.turns
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {"ignore_unused_parameters": False},
        {"stage3_param_persistence_threshold": 50},
        {"stage3_module_granularity_threshold": 100000},
    ],
    ids=["offload", "offload both", "all used", "persistent", "packed"],
)
def test_what_else_works_on_parts(stage, zero):
    if stage != 3:
        zero = {key: value for key, value in zero.items() if key != "offload_param"}
    check(TP2, stage, 2, adamw, CLIP, **zero)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"replicate_size": 2}, "replicate_size"),
    ],
)
def test_keys_that_need_one_mesh_are_refused(section, key):
    def run(rank, whole):
        model = split(copy.deepcopy(whole), init_parallel(ParallelDims.over(4, tensor=2)))
        made = config_of_split(3)
        made["zero_optimization"].update(section.get("zero_optimization", {}))
        made |= {name: value for name, value in section.items() if name != "zero_optimization"}
        with pytest.raises(ConfigError, match=f"{key} does not go with a model that is split"):
            start(model, plain_sgd(model), made)

    run_ranks(4, run, seeded(Split))


def test_what_ranks_do_not_have_is_refused():
    def run(rank, whole):
        model = split(copy.deepcopy(whole), init_parallel(ParallelDims.over(2, tensor=2)))
        with pytest.raises(UnsupportedOptimizerError, match=r"LARS .* of \S*(weight|bias) a"):
            start(model, LARS(model.parameters(), lr=0.1), config_of_split(1))
        init_parallel(ParallelDims(2))
        with pytest.raises(PartitionError, match="is cut along the 'tensor' axis, which this job"):
            start(model, plain_sgd(model), config_of_split(1))
        part = Sharding(("tensor",), box=Box.even((8,), 0, 0, 4))
        with pytest.raises(PartitionError, match=r"one of 4 parts along the 'tensor' axis, over"):
            join_parts(part, torch.zeros(2), "weight")
        with pytest.raises(ConfigError, match="is for 4 ranks, but the job has 2"):
            init_parallel(ParallelDims(4))

    run_ranks(2, run, seeded(Split))


@pytest.mark.turns
@pytest.mark.parametrize("sizes", [TP2, EP2, BOTH], ids=["tp2", "ep2", "tp2 ep2"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", [plain_sgd, adamw])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_split_model_trains_as_one_process(stage, optimizer, accumulation, sizes):
    check(sizes, stage, accumulation, optimizer, CLIP)
