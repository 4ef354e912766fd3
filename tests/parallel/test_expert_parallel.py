"""Mixtures of experts of transformers with experts on several ranks, against one process."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.deepspeed import groups
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel.expert import model as expert_model
from hf_zero.parallel.expert.dispatch import Routes, _Kept, run_experts
from hf_zero.parallel.expert.marks import expert_axis, is_expert_parameter
from hf_zero.parallel.expert.moe_layer import MoE
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers import oracle
from tests.helpers.engines import bytes_along, config_of, start, train_on_threads
from tests.helpers.models import tokens
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.training import Plan, plain_sgd
from tests.parallel.expert_cases import keys, spread
from tests.ranks import test_moe
from tests.ranks.test_moe import Routed


@pytest.mark.turns
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("name", test_moe.MODELS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_of_transformers(stage, name, ranks, size, accumulation):
    plan = Plan(ranks=ranks, steps=2, accumulation=accumulation)
    oracle.compare(
        train_on_threads(Routed(name), plan, spread(stage, size)),
        oracle.kept(Routed(name), plan),
        weight_floor=oracle.ROUNDING,
    )


class Unlike(Routed):
    """A mixture of eight experts of which routers choose the first two alone, or that trains its
    experts alone, or all but them.
    """

    def __init__(self, kind):
        super().__init__("gpt_oss")
        self.kind, self.name = kind, f"gpt_oss, {kind}"
        self.options = {**self.options, "num_local_experts": 8}

    def build(self):
        model = super().build()
        for name, parameter in model.named_parameters():
            if self.kind == "first" and name.endswith("router.bias"):
                parameter.data[:2] += 50.0
            elif self.kind == "frozen":
                parameter.requires_grad_(".experts." not in name)
            elif self.kind == "alone":
                parameter.requires_grad_(".experts." in name)
        return model


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["first", "frozen", "alone"])
@pytest.mark.parametrize(("ranks", "size"), [(4, 4), (2, 2)])
@pytest.mark.parametrize(
    "stage",
    [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3],
)
def test_ranks_without_tokens_and_frozen_experts(stage, ranks, size, kind):
    plan = Plan(ranks=ranks, steps=2, accumulation=2)
    oracle.compare(
        train_on_threads(Unlike(kind), plan, spread(stage, size)),
        oracle.kept(Unlike(kind), plan),
        weight_floor=oracle.ROUNDING,
    )


def test_a_rank_that_has_no_tokens():
    """It sends none, and its experts compute those of others."""
    weights = torch.randn(4, 3, 3)

    def run(rank):
        axis = expert_axis(2, "the test")
        assert axis is not None
        own = weights[2 * rank : 2 * rank + 2].clone().requires_grad_()
        tokens_ = torch.arange(15.0 * rank).view(-1, 3)
        experts = torch.arange(len(tokens_))[:, None] % 4

        def compute(rows, numbers, sizes):
            return torch.einsum("nd,ndh->nh", rows, own[numbers])

        shares = torch.ones(len(tokens_), 1)
        out = run_experts(tokens_, experts, shares, 4, compute, axis)
        out.sum().backward()
        assert own.grad is not None
        return out.detach(), own.grad

    (nothing, first), (out, second) = run_ranks(2, run)
    tokens_ = torch.arange(15.0).view(5, 3)
    whole = weights.clone().requires_grad_()
    want = torch.einsum("nd,ndh->nh", tokens_, whole[torch.arange(5) % 4])
    want.sum().backward()
    assert whole.grad is not None and nothing.shape == (0, 3)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(torch.cat([first, second]), whole.grad)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
OTHERS: dict[str, dict[str, Any]] = {
    "clipping": {"gradient_clipping": 0.05},
    "all offloaded": {"zero_optimization": {"stage": 3, **OFFLOADED}},
    "optimizer offloaded": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    },
    "checkpointing": {"activation_checkpointing": {"number_checkpoints": 2}},
    "compiled": {"compile": "blocks"},
    "small ones whole": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000}
    },
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_with_other_keys(more):
    plan = Plan(ranks=4, steps=2, accumulation=2, clip=more.get("gradient_clipping", 0.0))
    oracle.compare(
        train_on_threads(Routed("mixtral"), plan, spread(3, 2, **more)),
        oracle.kept(Routed("mixtral"), plan),
        weight_floor=oracle.ROUNDING,
    )


def rank_0_for_all(monkeypatch):
    cuts = expert_model.cuts_of_experts
    monkeypatch.setattr(
        expert_model, "cuts_of_experts", lambda model, rank, size: cuts(model, 0, size)
    )


def on_meshes(change):
    """A fault in what the engine knows of the ranks of experts."""

    def put_in(monkeypatch):
        of = Mesh.of
        monkeypatch.setattr(
            Mesh,
            "of",
            lambda mesh, axes, *more: (
                change(of(mesh, axes, *more)) if axes else of(mesh, axes, *more)
            ),
        )

    return put_in


FAULTS = {
    "an average over the ranks that hold an expert": on_meshes(lambda m: replace(m, gain=2.0)),
    "squares of experts counted on each rank": on_meshes(lambda m: replace(m, weight=1.0)),
    "the experts of rank 0 everywhere": rank_0_for_all,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault, monkeypatch):
    plan = Plan(ranks=4, steps=1)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"gradient|norm|loss"):
        oracle.compare(
            train_on_threads(Routed("mixtral"), plan, spread(0, 2)),
            oracle.kept(Routed("mixtral"), plan),
            weight_floor=oracle.ROUNDING,
        )


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2)])
def test_bytes_on_the_wire(ranks, size):
    job = Routed("mixtral")
    models = [job.build() for _ in range(ranks)]
    config = models[0].config
    shapes = {name: p.numel() for name, p in models[0].named_parameters()}
    expert = {name: numel // size for name, numel in shapes.items() if ".experts." in name}
    if ranks == size:  # nobody else holds them: they are neither gathered nor reduced
        expert = dict.fromkeys(expert, 0)
    held = 4 * sum((shapes | expert).values())
    blocks = [
        4 * sum(numel for name, numel in (shapes | expert).items() if f"layers.{at}." in name)
        for at in range(config.num_hidden_layers)
    ]
    root = held - sum(blocks)

    def run(rank):
        model = models[rank]
        keyed = {
            **keys(size),
            "zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 0},
            "metrics": {"enabled": True},
        }
        engine = start(model, plain_sgd(model), config_of(3, **keyed))
        parallel = get_parallel()
        assert parallel is not None
        observed = parallel.along("expert").stats
        total = Counter[str]()
        for step in range(3):
            own, along = engine.mesh.stats, parallel.stats["expert"]
            own.bytes.clear(), along.bytes.clear()
            ids = tokens(step, 0, rank)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            total.update(along.bytes)
        assert bytes_along(engine, "expert") == total
        names = [log.name for log in (parallel.along("expert").reductions,)]
        found = dict(own.bytes), dict(along.bytes), names
        engine.destroy()
        assert parallel.along("expert").stats is not observed
        return found

    answers = run_ranks(ranks, run)
    for own, _, names in answers:
        assert own["all_gather"] == 2 * held - root - blocks[-1]
        assert own["reduce_scatter"] == held
        assert "expert parallelism" in names[0]
    rows = ranks * tokens(0, 0, 0).numel() * config.num_experts_per_tok
    counts = 8 * ranks * config.num_local_experts
    assert sum(along["all_to_all"] for _, along, _ in answers) == config.num_hidden_layers * (
        4 * rows * config.hidden_size * 4 + counts
    )


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(2, {}), (4, {"tensor_parallel": {"autotp_size": 2}})],
    ids=["", "and layers"],
)
@pytest.mark.usefixtures("loads_at_once")
def test_loaded_in_shards(ranks, more, tmp_path):
    """Each rank reads the part of the experts that it keeps, and nothing is whole."""
    job = Routed("mixtral")
    job.options = {**job.options, "vocab_size": 68}
    whole = job.build()
    whole.save_pretrained(tmp_path)

    def run(rank):
        config = config_of(3, **keys(2), **more)
        model = hf_zero.from_pretrained(transformers.MixtralForCausalLM, tmp_path, config)
        engine = start(model, plain_sgd(model), config)
        with hf_zero.GatheredParameters(list(model.parameters())):
            found = {
                name: (p.detach().clone(), sharding_of(p).box)
                for name, p in model.named_parameters()
            }
        engine.destroy()
        return found

    size = 4 if more else 2  # parts of the experts
    for rank, found in enumerate(run_ranks(ranks, run)):
        for name, p in whole.named_parameters():
            part, box = found[name]
            assert (".experts." in name) <= (part.numel() * size == p.numel()), name
            wanted = p if box is None else box.take(p)
            torch.testing.assert_close(part, wanted, rtol=0, atol=0)
            if not more and box is not None:
                torch.testing.assert_close(part, p.chunk(2)[rank], rtol=0, atol=0)


def refused(call, ranks=2):
    def run(rank):
        call()

    with pytest.raises(RankFailed) as failed:
        run_ranks(ranks, run)
    assert isinstance(failed.value.__cause__, ConfigError)
    return str(failed.value.__cause__)


def test_what_is_refused():
    model = Routed("mixtral").build()
    assert "does not divide the 2 ranks" in refused(lambda: hf_zero.expert_parallel(model, 3))
    linear = torch.nn.Linear(2, 2)
    assert "names no experts" in refused(lambda: hf_zero.expert_parallel(linear, 2))
    moe = MoE(4, torch.nn.Linear(4, 4), 3, 3)
    assert "the size stays for the life of the processes" in refused(
        lambda: (hf_zero.expert_parallel(model, 2), start(moe, None, config_of(0)))
    )
    small = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**test_moe.MODELS["mixtral"][2], "num_local_experts": 3})
    )
    assert "choose a size that divides 3" in refused(lambda: hf_zero.expert_parallel(small, 2))
    owned = [Routed("mixtral").build() for _ in range(2)]

    def late(rank):
        engine = start(owned[rank], None, config_of(3))
        with pytest.raises(PartitionError, match=r"before hf_zero\.initialize"):
            hf_zero.expert_parallel(owned[rank], 2)
        engine.destroy()

    run_ranks(2, late)


def test_names_of_groups():
    models = [Routed("mixtral").build() for _ in range(4)]

    def run(rank):
        hf_zero.expert_parallel(models[rank], 2)
        groups.initialize(ep_size=2)
        with pytest.raises(ConfigError, match="name ep_size_2"):
            groups.get_expert_parallel_rank("ep_size_4")
        name = groups.get_max_expert_size_name()
        assert groups.get_expert_parallel_group("ep_size_1") is None
        return (
            groups.get_expert_parallel_rank(name),
            groups.get_expert_data_parallel_rank(name),
            groups.get_expert_data_parallel_world_size(name),
            torch.distributed.get_world_size(groups.get_expert_parallel_group(name)),
            groups.get_expert_data_parallel_rank("ep_size_1"),
        )

    assert run_ranks(4, run) == [(0, 0, 2, 2, 0), (1, 0, 2, 2, 1), (0, 1, 2, 2, 2), (1, 1, 2, 2, 3)]
    assert all(is_expert_parameter(p) for n, p in models[0].named_parameters() if ".experts." in n)


def test_estimate():
    config = Routed("mixtral").build().config
    alone = hf_zero.estimate(config, 4, "fp32", stage=3)
    both = hf_zero.estimate(config, 4, "fp32", stage=3, expert_parallel=2)
    assert alone.total_parameters == both.total_parameters
    # at stage 3 experts are cut over all ranks either way; what is gathered is half of them
    assert both.at(3).largest_unit < alone.at(3).largest_unit
    assert both.at(3).parameters == pytest.approx(alone.at(3).parameters, rel=0.01)
    none = hf_zero.estimate(config, 4, "fp32", stage=0)
    keyed = {"zero_optimization": {"stage": 0}, **keys(2)}
    spread_out = hf_zero.estimate(config, 4, config=keyed).at(0)
    experts = sum(
        p.numel() for n, p in Routed("mixtral").build().named_parameters() if ".experts." in n
    )
    assert none.at(0).parameters - spread_out.parameters == pytest.approx(2 * experts, rel=0.01)


def test_routes_are_those_of_the_forward_that_runs_again():
    """There are two forwards, in any order; a module that one of them calls twice finds its routes
    anew.
    """
    one, other = (SimpleNamespace(drawn={}) for _ in range(2))
    hooks = SimpleNamespace(forward_at_work=one)
    kept, found = _Kept(hooks), list[Routes]()

    def find():
        found.append(Routes([], [], [], torch.empty(0), torch.empty(0)))
        return found[-1]

    class AsksInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            asked.append(kept(find))
            return grad

    asked: list[Routes] = []

    def backward(forward):
        hooks.forward_at_work = forward
        AsksInBackward.apply(torch.ones(1, requires_grad=True)).backward()
        return asked[-1]

    first = kept(find)
    hooks.forward_at_work = other
    second = kept(find)
    assert backward(one) is first and backward(other) is second and len(found) == 2
    hooks.forward_at_work = other
    kept(find)
    assert backward(other) is found[-1] and len(found) == 4 and backward(one) is first
    assert copy.deepcopy(kept)(find) is found[-1]
