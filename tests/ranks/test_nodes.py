"""Weights sharded a second time in each node, for the gathers of a backward (ZeRO++'s hpZ), shard
groups that are a node (MiCS), and gathers in two hops (MiCS, over nodes): what a run comes to, and
the bytes over each axis of a mesh of 2 nodes of 2 ranks.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_turn
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.plans import APART
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd, train
from tests.helpers.ways import WAYS

HPZ: dict[str, Any] = {"zero_hpz_partition_size": 2}
EIGHT: dict[str, Any] = {"zero_quantized_weights": True}
FOUR: dict[str, Any] = {"zero_quantized_gradients": True}
HOPS: dict[str, Any] = {"mics_hierarchical_params_gather": True}


def config(zero, plan=None):
    section = {"stage": 3, **APART, **zero}
    few = {"block_size": 32}
    return config_of(3, plan, compressed_communication=few, zero_optimization=section)


def trained(job, zero):
    plan = Plan(ranks=4, steps=2, accumulation=2)

    def run(rank, model):
        session = OnEngine(start(model, plain_sgd(model), config(zero, plan)), plan)
        trace = train(session, job, plan, rank)
        session.close()
        return trace

    return on_ranks(plan.ranks, run, build=job.build)


FROZEN = "frozen parameters inside blocks, and a block frozen whole"
SKIPPED = "each rank skips another block, by step"


@in_turn(
    "way, zero, more",
    [
        (SKIPPED, {**EIGHT, **FOUR}, HPZ),
        (FROZEN, {}, HOPS),
        ("a block called three times, with others in between", HPZ, HOPS),
    ],
)
def test_a_run_is_bit_for_bit_the_one_without(way, zero, more, monkeypatch):
    """``more`` is the second sharding, or gathers in two hops."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    without, within = trained(WAYS[way], zero), trained(WAYS[way], {**zero, **more})
    for plain, found in zip(without, within):
        assert found.losses == plain.losses
        assert all(torch.equal(found.weights[name], value) for name, value in plain.weights.items())


class Following(nn.Module):
    """A layer times one that follows its weights, which the forward writes (momentum encoders)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.follower = nn.Linear(7, 7), nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.follower.weight.lerp_(self.layer.weight, 0.5)
        return x + self.layer(x) * self.follower(x)


class Followers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Following() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_backward_within_a_node_has_the_weights_that_its_forward_has_written(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def run(rank, model, zero):
        engine = start(model, plain_sgd(model), config(zero))
        run_steps(engine, rank, range(2))
        weights = dict(engine.consolidated())
        engine.destroy()
        return weights

    build = partial(seeded, Followers)
    without, within = (on_ranks(4, run, zero, build=build)[0] for zero in ({}, HPZ))
    assert all(torch.equal(within[name], value) for name, value in without.items())


@in_turn("here, message", [("3", "hosts have 3: choose"), ("4", "")])
def test_hosts_that_do_not_divide_a_copy(here, message, monkeypatch):
    """One host is one hop."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)

    def run(rank, model):
        if message:
            with pytest.raises(ConfigError, match=message):
                start(model, adamw(model), config(HOPS))
        else:
            assert not start(model, adamw(model), config(HOPS)).mesh.uncut.hops

    on_ranks(4, run)


class Traffic:
    """Bytes that each rank gets from ranks of other nodes, and of its own, by operation."""

    PLACES = {  # of the sum of what comes from each rank
        "all_gather_into_tensor": 0,
        "all_gather_single": 0,
        "all_to_all_single": 0,
        "reduce_scatter_tensor": 1,
        "reduce_scatter_single": 1,
    }

    def __init__(self, patch, node):
        self.node = node
        self.apart: dict[int, Counter[str]] = {rank: Counter() for rank in range(4)}
        self.within: dict[int, Counter[str]] = {rank: Counter() for rank in range(4)}
        for name, place in self.PLACES.items():
            if hasattr(dist, name):
                call = partial(self._counted, getattr(dist, name), name[:6], place)
                patch.setattr(dist, name, call)
        patch.setattr(dist, "all_reduce", partial(self._summed, dist.all_reduce))

    def _note(self, group, name, each):
        rank = dist.get_rank()
        for peer in dist.get_process_group_ranks(group):
            near = peer // self.node == rank // self.node
            (self.within if near else self.apart)[rank][name] += int(each) * (peer != rank)

    def _counted(self, call, name, place, *args, **kwargs):
        group = kwargs["group"] if "group" in kwargs else args[-1]
        self._note(group, name, args[place].nbytes / dist.get_world_size(group))
        return call(*args, **kwargs)

    def _summed(self, call, tensor, *args, **kwargs):
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        if tensor.numel() > 64:  # no numbers of a step
            self._note(group, "all_reduce", 2 * tensor.nbytes / dist.get_world_size(group))
        return call(tensor, *args, **kwargs)


MICRO = 2


def traffic(zero):
    """The traffic of the last of two steps, and the layouts of the flat buffers."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Traffic(patch, 2)

        def run(rank, model):
            plan = Plan(precision="bf16", accumulation=MICRO)
            engine = start(model, adamw(model), config(zero, plan))
            for step in range(2):
                seen.apart[rank].clear()
                seen.within[rank].clear()
                run_steps(engine, rank, [step], MICRO)
            return [flat.spec for flat in engine.flats]

        specs = on_ranks(4, run, build=lambda: seeded(lambda: Stack(4, 64)))[0]
    assert len({frozenset(seen.apart[rank].items()) for rank in range(4)}) == 1
    return seen.apart[0], seen.within[0], specs


def sent(specs, codec):
    """Bytes from the two ranks of another node, in one gather or reduction of all flats."""
    chunks = [(each.layout.shard_numel, getattr(each, codec)) for each in specs]
    return sum(2 * (n * 2 if how is None else how.nbytes(n)) for n, how in chunks)


def test_bytes_between_nodes_and_within(monkeypatch):
    """Of P bytes of weights: dense 3 P / 2 between two nodes, with hpZ P; in two hops half."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dense, within, specs = traffic({})
    less, more, _ = traffic(HOPS)
    assert dense["all_ga"] == 2 * less["all_ga"] > 0
    assert more["all_ga"] == 2 * within["all_ga"]
    assert (less["reduce"], more["reduce"]) == (dense["reduce"], within["reduce"])
    whole = MICRO * sum(each.layout.padded for each in specs)  # bf16, half of it from afar
    backward = dense["all_ga"] - whole  # without units that stay from the forward on
    assert 0.4 * whole < backward < whole
    assert dense["reduce"] == whole
    for zero in (HPZ, {**HPZ, **EIGHT, **FOUR}):
        apart, within, specs = traffic(zero)
        assert apart["all_ga"] == MICRO * sent(specs, "gather_codec"), zero
        assert apart["reduce"] + apart["all_to"] == MICRO * sent(specs, "reduce_codec"), zero
        # the backward's gathers, as they are, from the one other rank of the node
        assert within["all_ga"] == pytest.approx(apart["all_ga"] // 2 + backward, rel=0.05), zero
    assert sent(specs, "gather_codec") < 0.65 * whole / MICRO
    assert sent(specs, "reduce_codec") < 0.45 * whole / MICRO


@on_each_rank(4)
def test_memory_is_that_of_the_engine(rank, model):
    """2 / G bytes a parameter more in bf16: counted, and foreseen."""
    plan = Plan(precision="bf16")
    engine = start(model, adamw(model), config(HPZ, plan))
    before = engine.state_bytes()["parameters"]
    engine.backward(squared(engine, At(0, 0, rank), plan.dtype))
    more = engine.state_bytes()["parameters"] - before
    assert more == sum(flat.layout.padded // 2 * 2 for flat in engine.flats)
    row = hf_zero.estimate(engine.module, 4, config=config(HPZ, plan)).at(3)
    assert row.parameters == engine.state_bytes()["parameters"]
    dense = hf_zero.estimate(engine.module, 4, config=config({}, plan)).at(3)
    assert row.tiers.device - dense.tiers.device == more
