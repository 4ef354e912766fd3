"""Engines over meshes whose ranks share layers, experts and shards at once: layout and messages,
and what an engine offers there, as in one process.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, PartitionError, UnsupportedOptimizerError
from hf_zero.optim.trust_ratio import LARS
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import Sharding, join_parts, sharding_of
from tests.helpers.cells import in_turn
from tests.helpers.engines import full_weights, start
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.split import Split, batches, check, config_of_split, split
from tests.helpers.training import adamw, plain_sgd

TP, EP, BOTH = {"tensor": 2}, {"expert": 2}, {"tensor": 2, "expert": 2}
CLIP = 0.05


def parted(whole, ranks=4):
    """This rank's part of a copy of ``whole``, cut over two tensor-parallel ranks."""
    return split(copy.deepcopy(whole), init_parallel(ParallelDims.over(ranks, tensor=2)))


def test_a_block_is_gathered_in_one_message_and_keys_of_one_mesh_are_refused():
    zero = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True}
    zero["zero_quantized_gradients"] = True

    def run(rank, whole):
        model = parted(whole)
        refused = {key: config_of_split(3, **{key: value}) for key, value in zero.items()}
        refused["replicate_size"] = {**config_of_split(3), "replicate_size": 2}
        for key, config in refused.items():
            with pytest.raises(ConfigError, match=f"{key} does not go with a model that is split"):
                start(model, plain_sgd(model), config)
        engine = start(model, plain_sgd(model), config_of_split(3))
        rows = batches(2, 1, 2)[:, 0, rank // 2]
        engine.backward(engine(rows[0]))
        engine.step()
        engine.mesh.stats.counts.clear()
        engine.backward(engine(rows[1]))
        # The root holds what tensor-parallel ranks share. The last block stays for the backward.
        assert engine.mesh.stats.counts["all_gather"] == 4 + 2
        engine.destroy()

    run_ranks(4, run, seeded(Split))


def test_what_ranks_do_not_have_is_refused():
    def run(rank, whole):
        model = parted(whole, 2)
        with pytest.raises(UnsupportedOptimizerError, match=r"LARS .* of \S*(weight|bias);"):
            start(model, LARS(model.parameters(), lr=0.1), config_of_split(1))
        init_parallel(ParallelDims(2))
        with pytest.raises(PartitionError, match="is cut along the 'tensor' axis"):
            start(model, plain_sgd(model), config_of_split(1))
        part = Sharding(("tensor",), box=Box.even((8,), 0, 0, 4))
        with pytest.raises(PartitionError, match="one of 4 parts along the 'tensor' axis"):
            join_parts(part, torch.zeros(2), "weight")
        with pytest.raises(ConfigError, match="is for 4 ranks, but the job has 2"):
            init_parallel(ParallelDims(4))

    run_ranks(2, run, seeded(Split))


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


def all_of_it(engine):
    send_states_away(engine)
    write_what_was_read(engine)
    load_what_was_saved(engine)


HOST: dict[str, Any] = {
    "offload_optimizer": {"device": "cpu", "update_in_backward": True},
    "offload_param": {"device": "cpu"},
}
STAYING = {"stage3_param_persistence_threshold": 50, "ignore_unused_parameters": False}
ROWS: dict[str, tuple[Any, ...]] = {
    # name: (sizes, stage, accumulation, optimizer, clip, more)
    "all on the host, updated in the backward": (EP, 3, 2, adamw, 0.0, HOST),
    "persistent, and all used": (TP, 3, 2, adamw, CLIP, STAYING),
    "both axes, away, written and loaded": (BOTH, 3, 1, adamw, CLIP, {"after": all_of_it}),
}


@in_turn("name", ROWS)
def test_as_in_one_process(name):
    sizes, stage, accumulation, optimizer, clip, more = ROWS[name]
    data = batches(2, accumulation, ParallelDims.over(4, **sizes).data)
    check(sizes, stage, accumulation, optimizer, clip, **{"data": data, **more})


def state_of(engine):
    """This rank's parts of masters, moments and parameters."""
    found = full_weights(engine)
    for name, p in engine.module.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {moment}"] = hf_zero.safe_get_full_optimizer_state(p, moment).clone()
    with hf_zero.GatheredParameters(list(engine.module.parameters())):
        found |= {f"{n} in fp16": p.detach().clone() for n, p in engine.module.named_parameters()}
    return found


def test_an_overflow_on_one_rank_changes_nothing_on_any():
    """Of the gradient of one part in the third of four steps."""
    dims = ParallelDims.over(4, **TP)
    data = batches(4, 1, dims.data)[:, 0]

    def run(rank, whole):
        model = split(copy.deepcopy(whole), init_parallel(dims))
        half = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        engine = start(model, adamw(model), {**config_of_split(3), "fp16": half})
        model.blocks[1].down.weight.register_hook(
            lambda grad: grad * float("inf") if rank == 1 and len(seen) == 2 else grad
        )
        seen = []
        for rows in data:
            engine.backward(engine(rows[dims.coordinate(rank, "data")].half()))
            engine.step()
            seen.append(state_of(engine))
        assert (engine.skipped_steps, engine.loss_scale()) == (1, 8.0)
        first, before, after, last = seen
        for name, value in before.items():
            assert torch.equal(value, after[name]), name
        for name in ("blocks.0.value.weight", "head.weight in fp16", "embed.weight exp_avg"):
            assert not torch.equal(first[name], before[name]), name
            assert not torch.equal(after[name], last[name]), name
        return engine.get_global_grad_norm()

    assert len(set(run_ranks(4, run, seeded(Split)))) == 1
