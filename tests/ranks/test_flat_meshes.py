"""Engines over meshes whose ranks share layers, experts and shards at once: layout and messages,
and what an engine offers there, as in one process.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, PartitionError, UnsupportedOptimizerError
from hf_zero.optim.trust_ratio import LARS
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, join_parts, sharding_of
from tests.helpers import split as helpers
from tests.helpers.engines import full_weights, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import HIDDEN, Split, batches, check, config_of_split, split
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
        said = r"LARS needs whole tensors, .* of \S*(weight|bias);"
        with pytest.raises(UnsupportedOptimizerError, match=said):
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


AXES = {"tp2": {"tensor": 2}, "ep2": {"expert": 2}, "tp2 ep2": {"tensor": 2, "expert": 2}}
FEATURE_CLIP, WORDS = 0.05, 7


class Turned(Split):
    """Its blocks run in the other order where the first number is negative, as it is for all rows
    of a step or for none.
    """

    def forward(self, x):
        y = self.embed(x)
        for block in reversed(self.blocks) if float(x[0, 0]) < 0 else self.blocks:
            y = block(y)
        return self.head(y).square().mean()


class Words(Split):
    """With an embedding, whose gradient is sparse where the model is split."""

    def __init__(self, experts=False):
        super().__init__(experts)
        self.words = nn.Parameter(torch.randn(WORDS, HIDDEN))

    def forward(self, x):
        numbers = (x[:, 0].abs() * 3).long() % WORDS
        is_split = any(getattr(each, "axis", None) is not None for each in self.modules())
        return super().forward(x + F.embedding(numbers, self.words, sparse=is_split))


# ---- what is called between steps ----


def send_states_away(engine):
    engine.offload_states()
    engine.reload_states()


def write_what_was_read(engine):
    """Doubled, and as it was: each rank writes its part."""
    for name, p in engine.module.named_parameters():
        value = hf_zero.safe_get_full_fp32_param(p).clone()
        assert value.shape == (box.shape if (box := sharding_of(p).box) else value.shape), name
        hf_zero.safe_set_full_fp32_param(p, value * 2)
        assert torch.equal(hf_zero.safe_get_full_fp32_param(p), value * 2), name
        hf_zero.safe_set_full_fp32_param(p, value)
        state = hf_zero.safe_get_full_optimizer_state(p, "exp_avg").clone()
        hf_zero.safe_set_full_optimizer_state(p, state + 1, "exp_avg")
        hf_zero.safe_set_full_optimizer_state(p, state, "exp_avg")
    with hf_zero.GatheredParameters(list(engine.module.parameters())):
        for name, p in engine.module.named_parameters():
            assert torch.equal(p, hf_zero.safe_get_full_fp32_param(p).to(p.dtype)), name


def load_what_was_saved(engine):
    """The whole state dict of all ranks, after the weights have been lost."""
    whole = {name: value.clone() for name, value in whole_state_dict(engine).items()}
    for p in engine.module.parameters():
        hf_zero.safe_set_full_fp32_param(p, torch.zeros_like(hf_zero.safe_get_full_fp32_param(p)))
    engine.load_state_dict(whole)


BETWEEN = {
    "states away": send_states_away,
    "written": write_what_was_read,
    "loaded": load_what_was_saved,
}
OFFLOAD: dict[str, dict[str, Any]] = {
    "optimizer in files": {"offload_optimizer": {"device": "nvme"}},
    "both in files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "both on the cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "updates in the backward": {"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
}


def turned(sizes, stage):
    dims = ParallelDims.over(4, **sizes)
    data = batches(3, 1, dims.data)
    data[..., 0, 0] = data[..., 0, 0].abs() * torch.tensor([1.0, -1.0, 1.0])[:, None, None]
    check(sizes, stage, 1, adamw, model=Turned, data=data)


def sparse(sizes, stage):
    check(sizes, stage, 2, plain_sgd, FEATURE_CLIP, model=Words)


def between(name, sizes, stage):
    check(sizes, stage, 1, adamw, after=BETWEEN[name])


def offloaded(name, folder, sizes, stage):
    sections = copy.deepcopy(OFFLOAD[name])
    for key, section in list(sections.items()):
        if section["device"] == "nvme":
            section["nvme_path"] = str(folder)
        if key == "offload_param" and stage < 3:
            del sections[key]
    check(sizes, stage, 2, adamw, 0.0 if "backward" in name else FEATURE_CLIP, **sections)


FAST = [
    ("loaded", "tp2 ep2", 1),
    ("both in files", "tp2", 3),
    ("turned", "ep2", 3),
    ("sparse", "tp2", 2),
]
NAMES = [*BETWEEN, *OFFLOAD, "turned", "sparse"]


def run(name, sizes, stage, folder):
    cells: dict[str, Any] = {"turned": turned, "sparse": sparse}
    cells |= {each: partial(between, each) for each in BETWEEN}
    cells |= {each: partial(offloaded, each, folder) for each in OFFLOAD}
    cells[name](AXES[sizes], stage)


@pytest.mark.parametrize(("name", "sizes", "stage"), FAST)
def test_as_in_one_process(name, sizes, stage, tmp_path):
    run(name, sizes, stage, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", AXES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_cell(name, sizes, stage, tmp_path):
    run(name, sizes, stage, tmp_path)


# ---- an overflow ----

HALF = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}


def state_of(engine):
    """This rank's parts of masters, moments and parameters."""
    found = full_weights(engine)
    for name, p in engine.module.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {moment}"] = hf_zero.safe_get_full_optimizer_state(p, moment).clone()
    with hf_zero.GatheredParameters(list(engine.module.parameters())):
        found |= {f"{n} in fp16": p.detach().clone() for n, p in engine.module.named_parameters()}
    return found


def overflown(rank, whole, data, sizes, stage, at):
    """Two steps, one in which the gradient of one part on rank ``at`` alone is infinite, and one
    more: the state after each.
    """
    dims = ParallelDims.over(4, **sizes)
    model = split(copy.deepcopy(whole), init_parallel(dims))
    made = {**config_of_split(stage), "fp16": HALF}
    engine = start(model, adamw(model), made)
    part = model.blocks[1].experts.up if dims.expert > 1 else model.blocks[1].down.weight
    own, seen = dims.coordinate(rank, "data"), []
    for step, micro in enumerate(data[:, 0]):
        hook = part.register_hook(lambda g: g * float("inf")) if (step, rank) == (2, at) else None
        engine.backward(engine(micro[own].half()))
        engine.step()
        if hook is not None:
            hook.remove()
        seen.append(state_of(engine))
    told = engine.skipped_steps, engine.loss_scale(), engine.get_global_grad_norm()
    engine.destroy()
    return seen, told


def check_overflow(sizes, stage, at):
    dims = ParallelDims.over(4, **AXES[sizes])
    whole = seeded(lambda: Split(experts=dims.expert > 1))
    data = batches(4, 1, dims.data)
    found = run_ranks(4, overflown, whole, data, AXES[sizes], stage, at)
    for seen, told in found:
        assert told == found[0][1] and told[:2] == (1, 8.0)
        first, before, after, last = seen
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        for name in ("blocks.0.value.weight", "head.weight in fp16", "embed.weight exp_avg"):
            assert not torch.equal(first[name], before[name]), name
            assert not torch.equal(after[name], last[name]), name


@pytest.mark.parametrize(("sizes", "stage", "at"), [("tp2", 3, 1)])
def test_an_overflow_on_one_rank_changes_nothing_on_any(sizes, stage, at):
    check_overflow(sizes, stage, at)


@pytest.mark.long
@pytest.mark.parametrize("sizes", AXES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_overflows_of_every_rank(sizes, stage, at):
    check_overflow(sizes, stage, at)
