"""Mixtures of experts by ``deepspeed.moe``, against loops over tokens."""

import itertools
import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.distributed.process_group import get_rank
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.parallel.expert import routing
from hf_zero.parallel.expert.marks import is_expert_parameter, split, split_groups
from hf_zero.parallel.expert.moe_layer import MoE, TopKGate
from hf_zero.parallel.expert.routing import Capacity
from hf_zero.zero.access.consolidate import whole_state_dict
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.whole_names import WholeNames
from tests.helpers import oracle
from tests.helpers.cells import in_one_item
from tests.helpers.engines import OnEngine, config_of, start, train_on_threads
from tests.helpers.models import HIDDEN, features, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Job, Plan, plain_sgd, train
from tests.parallel.expert_cases import LOCAL, OnSpreadExperts

EXPERTS = 4


def expert():
    up, down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
    return nn.Sequential(OrderedDict(up=up, bend=nn.Tanh(), down=down))


class Mixed(nn.Module):
    """Two layers of experts between linear ones; exact gates where ``options`` say nothing else."""

    def __init__(self, **options):
        super().__init__()
        self.enter = nn.Linear(7, HIDDEN)
        exact = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0}
        self.layers = nn.ModuleList(
            MoE(HIDDEN, expert(), EXPERTS, **{**exact, **options}) for _ in range(2)
        )
        self.head = nn.Linear(HIDDEN, 5)
        for layer in self.layers:  # copies of one expert are not told apart
            for parameter in layer.deepspeed_moe.experts.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)

    def forward(self, x):
        x, aux = self.enter(x), torch.zeros(())
        for layer in self.layers:
            out, loss, _ = layer(x)
            x, aux = x + out, aux + loss
        return self.head(x), aux


def by_hand(layer, hidden):
    """The output of ``layer`` token by token, from the dense weights of its gate."""
    tokens = hidden.reshape(-1, HIDDEN)
    weights = layer.deepspeed_moe.gate(tokens)[1].sum(2)
    out = torch.zeros_like(tokens)
    for token, expert_, weight in ((t, e, weights[t, e]) for t, e in weights.nonzero().tolist()):
        module = layer.deepspeed_moe.experts.deepspeed_experts[expert_]
        out[token] += weight * module(tokens[token])
    if layer.use_residual:
        shares = layer.coefficient(tokens).softmax(-1)
        out = out * shares[:, :1] + layer.mlp(tokens) * shares[:, 1:]
    return out.view_as(hidden)


OPTIONS = {
    "top 1": {"k": 1, "capacity_factor": 4.0},
    "top 1, dropping": {"k": 1, "capacity_factor": 0.5},
    "top 2": {"k": 2, "drop_tokens": False},
    "top 2, dropping, residual": {"k": 2, "capacity_factor": 0.5, "use_residual": True},
}


@in_one_item(OPTIONS)
def test_output_is_the_weighted_sum_of_experts(name):
    options = OPTIONS[name]
    model = seeded(lambda: Mixed(**options))
    hidden = torch.randn(3, 5, HIDDEN, requires_grad=True)
    layer = model.layers[0]
    given = torch.autograd.grad(layer(hidden)[0].pow(2).sum(), hidden)[0]
    wanted = by_hand(layer, hidden)
    torch.testing.assert_close(layer(hidden)[0], wanted)
    torch.testing.assert_close(given, torch.autograd.grad(wanted.pow(2).sum(), hidden)[0])
    _, aux, counts = layer(hidden)
    assert aux.ndim == 0 and counts.shape == (EXPERTS,) and int(counts.sum()) == 15 * options["k"]


class MixedJob(Job):
    def __init__(self, name, **more):
        self.name, self.options = f"moe {name}", {**OPTIONS[name], **more}

    def build(self):
        return seeded(lambda: Mixed(**self.options))

    def optimizer(self, model):
        return plain_sgd(model)

    def loss(self, net, at):
        out, aux = net(features(at.step, at.micro, at.rank, 6))
        return out.pow(2).mean() + 0.1 * aux


def part_of(whole, size, rank=None, **options):
    """A model with the values of ``whole``, of which each of ``size`` ranks has its experts."""
    rank = get_rank() if rank is None else rank
    model = Mixed(ep_size=size, **options)
    values, held = whole.state_dict(), {}
    for name in model.state_dict():
        before, found, after = name.partition(LOCAL)
        number, _, rest = after.partition(".")
        first = rank % size * (EXPERTS // size)
        own = f"{before}{LOCAL}{first + int(number)}.{rest}" if found else name
        held[name] = values[own]
    model.load_state_dict(held)
    return model


def on_ranks(stage, size, options, **more):
    """Sessions whose models have the values of the whole one, each rank its part of the experts."""

    def opened(whole, _, plan):
        model = part_of(whole, size, **options)
        config = config_of(stage, plan, **more)
        return OnSpreadExperts(start(model, plain_sgd(model), config), plan)

    return opened


# name, stage, ranks, ranks that the experts are spread over
CELLS = [("top 1", 3, 2, 1), ("top 2", 0, 4, 4), ("top 2, dropping, residual", 3, 4, 2)]


@in_one_item(CELLS)
def test_experts_on_one_and_on_several_ranks(cell):
    name, stage, ranks, size = cell
    plan = Plan(ranks=ranks, steps=2, accumulation=2)
    oracle.compare(
        train_on_threads(MixedJob(name), plan, on_ranks(stage, size, OPTIONS[name])),
        oracle.kept(MixedJob(name), plan),
    )


EXPERT = "layers.*.deepspeed_moe.experts.deepspeed_experts.*"
SHARED = {
    "enter": "colwise_gather_output", f"{EXPERT}.up": "colwise", f"{EXPERT}.down": "rowwise"
}  # fmt: skip


def test_experts_that_two_ranks_share_each(tmp_path):
    """Two tensor-parallel ranks of two that hold other experts; the checkpoint has whole ones."""
    job, plan = MixedJob("top 2"), Plan(ranks=2, steps=2, accumulation=2)
    want, whole = oracle.kept(job, plan), job.build()

    def run(rank):
        model = part_of(whole, 2, rank // 2, **job.options)
        hf_zero.tensor_parallel(model, 2, plan=SHARED)
        engine = start(model, plain_sgd(model), config_of(3, plan))
        names = WholeNames(model)
        parts = {
            name: (names.own(name), sharding_of(p).box) for name, p in model.named_parameters()
        }
        trace = train(OnEngine(engine, plan), job, plan, rank // 2)
        engine.save_checkpoint(tmp_path, tag="t")
        state = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy()
        return trace, parts, state

    answers = run_ranks(4, run)
    for trace, parts, state in answers:
        assert trace.norms == pytest.approx(want.norms, rel=1e-5)
        for own, all_ in zip(trace.grads, want.grads):
            for name, value in own.items():
                number, box = parts[name]
                part = all_[number] if box is None else box.take(all_[number])
                torch.testing.assert_close(value, part, rtol=1e-5, atol=1e-6)
        for name, value in want.weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "t", dtype="float32"))
    assert converted.keys() == whole.state_dict().keys()
    assert all(value.equal(converted[name]) for name, value in answers[0][2].items())


def test_whole_files_have_the_buffers_of_all_experts(tmp_path):
    options = OPTIONS["top 2"]
    whole = MixedJob("top 2").build()

    def run(rank):
        model = part_of(whole, 2, **options)
        for layer in model.layers:
            for number, local in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                local.register_buffer("number", torch.tensor(rank * EXPERTS // 2 + number))
        engine = start(model, plain_sgd(model), config_of(3, Plan(ranks=2)))
        for name in ("model.safetensors", "pytorch_model.bin"):
            engine.save_16bit_model(tmp_path, name)
        engine.destroy()

    run_ranks(2, run)
    pickled = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for state in (load_file(tmp_path / "model.safetensors"), pickled):
        found = {name: int(value) for name, value in state.items() if name.endswith(".number")}
        assert sorted(found.values()) == sorted([*range(EXPERTS)] * 2), found
        assert all(name.endswith(f".{number}.number") for name, number in found.items())


@in_one_item(("Jitter", "RSample"))
def test_gates_compute_in_fp32_and_draw_in_training_alone(policy):
    gate = TopKGate(HIDDEN, EXPERTS, 1, 100.0, 100.0, 0, policy, use_rts=False)
    tokens = torch.randn(32, HIDDEN).to(torch.bfloat16)

    def drawn():
        return {tuple(gate.route(tokens).weights.flatten().tolist()) for _ in range(4)}

    assert len(drawn()) == 4
    gate.eval()
    best = (tokens.float() @ gate.wg.weight.T).argmax(1)
    assert len(drawn()) == 1 and torch.equal(gate.route(tokens).experts[:, 0], best)
    few = TopKGate(HIDDEN, EXPERTS, 1, 1.0, 4.0, 0).to(torch.bfloat16)
    for training, capacity in ((True, 2), (False, 8)):
        aux, weights, mask, counts = few.train(training)(tokens[:8])
        assert aux.dtype == weights.dtype == torch.float32 and mask.dtype == torch.bool
        assert weights.shape == mask.shape == (8, EXPERTS, capacity)
        assert counts.shape == (EXPERTS,)


def test_groups_of_an_optimizer():
    model = Mixed()
    shared, own = split(model.parameters())
    assert len(own) == 2 * EXPERTS * 4 and all(map(is_expert_parameter, own))
    first, second = split_groups({"params": model.parameters(), "lr": 0.5, "name": "all"})
    assert (first["params"], first["name"]) == (shared, "all")
    assert (second["params"], second["name"], second["moe"]) == (own, "ep_size_1", True)
    assert first["lr"] == second["lr"] == 0.5 and "moe" not in first
    cut = split_groups([{"params": own}], 3000)
    numel = [sum(p.numel() for p in each["params"]) for each in cut]
    assert numel[0] == 0 and max(numel) <= 3000
    assert [p for each in cut for p in each["params"]] == own


LAYER = nn.Linear(8, 8)
REFUSED = {
    "num_experts": (ConfigError, lambda: MoE(8, LAYER, 3, 2)),
    "ep_size": (ConfigError, lambda: MoE(8, LAYER, 2, 2.0)),
    "a number of experts": (ConfigError, lambda: MoE(8, LAYER, 4.0, 2)),
    "k=1 or k=2": (NotBuiltError, lambda: MoE(8, LAYER, 2, k=3)),
    "tutel": (NotBuiltError, lambda: MoE(8, LAYER, 2, use_tutel=True)),
    "use_tutel": (NotBuiltError, lambda: TopKGate(8, 2)(torch.ones(2, 8), None, True)),
    **{
        rf"{name}={value}\)": (ConfigError, partial(MoE, 8, LAYER, 2, **{name: value}))
        for name, value in (
            ("capacity_factor", math.nan),
            ("capacity_factor", math.inf),
            ("eval_capacity_factor", None),
            ("eval_capacity_factor", -1.0),
            ("min_capacity", 1.5),
        )
    },
    "jitter": (ConfigError, lambda: TopKGate(8, 2, noisy_gate_policy="jitter")),
    r"used_token has the shape \[2, 3\], for 4": (
        ConfigError,
        lambda: MoE(8, LAYER, 2, k=2)(torch.ones(2, 2, 8), torch.ones(2, 3)),
    ),
    r"expert=<class .*Linear'>\) is no module": (ConfigError, lambda: MoE(8, nn.Linear)),
    r"hidden_size=...\) = '8' is not a number of features": (ConfigError, lambda: MoE("8", LAYER)),
    "call initialize": (ConfigError, lambda: MoE(8, LAYER, 2, 2)(torch.ones(1, 8))),
}


def test_a_gate_without_capacity_drops_every_token():
    gate = TopKGate(8, 2, capacity_factor=0, min_capacity=0)
    _, weights, mask, counts = gate(torch.ones(3, 8))
    assert weights.shape == mask.shape == (3, 2, 0) and counts.sum() == 3


@in_one_item(REFUSED)
def test_what_is_refused(words):
    error, call = REFUSED[words]
    with pytest.raises(error, match=words):
        call()


TOKENS, GATED = 13, 4


def logits(seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(TOKENS, GATED, generator=generator, dtype=torch.float64)


def defined(scores, k, most):
    """Weights [S, E], tokens by expert [E] and the auxiliary loss, in loops."""
    gates = scores.softmax(1)
    choices = [row.argsort(descending=True)[:k].tolist() for row in gates]
    counts, weights = [0] * GATED, torch.zeros_like(gates)
    for choice in range(k):
        for token in range(TOKENS):
            expert = choices[token][choice]
            if counts[expert] < most:
                weights[token, expert] = gates[token, expert]
            counts[expert] += 1
    if k == 2:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-12)
    share = [sum(c[0] == e for c in choices) / TOKENS for e in range(GATED)]
    aux = GATED * sum(share[e] * float(gates[:, e].mean()) for e in range(GATED))
    return weights, torch.tensor(counts), aux


CAPACITIES = (Capacity(1.0, 0), Capacity(0.5, 3), Capacity(1, 0, False))


@in_one_item([*itertools.product((1, 2), CAPACITIES)])
def test_weights_counts_and_loss(case):
    k, capacity = case
    scores = logits(spread=2.0)
    most = capacity.limit(TOKENS, GATED, k)
    found = (
        routing.top1(scores, capacity, selects_at_random=False)
        if k == 1
        else routing.top2(scores, capacity, samples=False)
    )
    weights, counts, aux = defined(scores, k, TOKENS if most is None else most)
    dense = found.dense()
    torch.testing.assert_close(dense.sum(2), weights)
    assert torch.equal(found.counts, counts) and float(found.aux_loss) == pytest.approx(aux)
    assert dense.shape[2] == (int(counts.max()) if most is None else most)
    # a place of an expert has one token at most
    assert int((dense > 0).sum(0).max()) <= 1
    if most is not None:
        assert most == max(math.ceil(TOKENS * k * capacity.factor / GATED), capacity.least)
        assert int((weights > 0).sum(0).max()) == most < int(counts.max())


def test_gradients_reach_the_logits():
    scores = logits(1, 2.0).requires_grad_()
    factor = torch.randn(TOKENS, GATED, dtype=torch.float64)
    capacity = Capacity(1.0, 0)

    def loss(found):
        return (found.dense().sum(2) * factor).sum() + found.aux_loss

    for route in (
        lambda s: routing.top1(s, capacity, selects_at_random=False),
        lambda s: routing.top2(s, capacity, samples=False),
    ):
        assert torch.autograd.gradcheck(lambda s, route=route: loss(route(s)), scores)


def test_chance_decides_which_tokens_an_expert_takes():
    scores = torch.zeros(TOKENS, GATED)
    scores[:, 2] = 5.0
    first = routing.top1(scores, Capacity(1.0, 0), selects_at_random=False)
    most = first.capacity
    assert first.experts[:, 0].tolist() == [2] * most + [GATED] * (TOKENS - most)
    taken = torch.stack(
        [routing.top1(scores, Capacity(1.0, 0)).experts[:, 0] == 2 for _ in range(200)]
    )
    assert taken.sum(1).tolist() == [most] * 200
    share = taken.double().mean(0)
    assert (share - most / TOKENS).abs().max() < 0.15
    places = routing.top1(scores, Capacity(1.0, 0)).dense().nonzero()[:, 2]
    assert places.tolist() == list(range(most))  # in the order of the tokens


@in_one_item([1, 2])
def test_unused_tokens_go_nowhere(k):
    scores, used = logits(2), torch.ones(TOKENS)
    used[[0, 5]] = 0
    route = {1: routing.top1, 2: lambda *given: routing.top2(*given, samples=False)}[k]
    found = route(scores, Capacity(4.0, 0), used)
    assert found.experts[[0, 5]].tolist() == [[GATED] * k] * 2
    assert int(found.counts.sum()) == k * (TOKENS - 2) and not found.weights[[0, 5]].any()
    # the others are routed as if the unused ones were not there
    alone = route(scores[used.bool()], Capacity(4.0, 0))
    assert torch.equal(found.experts[used.bool()], alone.experts)
    assert torch.equal(found.weights[used.bool()], alone.weights)
    assert torch.equal(found.places[used.bool()], alone.places)
    counted = torch.bincount(found.experts[used.bool(), 0], minlength=GATED) / TOKENS
    aux = GATED * (counted * scores.softmax(1).mean(0)).sum()
    assert float(found.aux_loss) == pytest.approx(float(aux))


@in_one_item([1, 2])
def test_a_batch_without_tokens_adds_nothing(k):
    layer = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, k=k)
    output, aux, counts = layer(torch.ones(0, HIDDEN))
    (output.sum() + aux).backward()
    assert output.shape == (0, HIDDEN) and float(aux.detach()) == 0.0 and not counts.any()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters())


@in_one_item([1, 2])
def test_a_mask_of_used_tokens_has_the_shape_of_the_batch(k):
    exact = {"k": k, "use_rts": False, "top2_2nd_expert_sampling": False}
    layer = seeded(lambda: MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, **exact))
    hidden, used = torch.randn(2, 3, HIDDEN), torch.tensor([[1, 1, 0], [0, 1, 1]])
    output = layer(hidden, used)[0]
    assert torch.equal(output, layer(hidden, used.reshape(-1))[0])
    assert not output[used == 0].any() and output[used == 1].any(-1).all()
