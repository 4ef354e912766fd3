"""Mixtures of experts: ranks and steps that use different experts, or none of some, at every
stage.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from hf_zero.zero.layout.wrap import get_z3_leaf_modules, set_z3_leaf_modules
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import engine_opener, train_on_threads
from tests.helpers.models import HIDDEN, features, seeded, tokens
from tests.helpers.training import Job, Plan, plain_sgd
from tests.loading.zoo import GQA, LATENT, TEXT
from tests.ranks.test_matrix import make_exact

ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAYOUT = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**GQA, **ROUTED, "num_local_experts": 6}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**GQA, **ROUTED, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**TEXT, **LATENT, **LAYOUT, "n_routed_experts": 6, **EXPERTS},
    ),
    "gpt_oss": (
        "GptOss",
        {**GQA, **ROUTED, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}


class Routed(Job):
    """Its router sends the tokens of each rank and step elsewhere; with a loss of its own."""

    def __init__(self, name):
        self.name = name
        self.prefix, self.options = MODELS[name]

    def build(self):
        config = getattr(transformers, f"{self.prefix}Config")(**self.options)
        make_exact(config)
        return seeded(lambda: getattr(transformers, f"{self.prefix}ForCausalLM")(config))

    def optimizer(self, model):
        return plain_sgd(model)

    def loss(self, net, at):
        ids = tokens(at.step, at.micro, at.rank)
        output = net(input_ids=ids, labels=ids)
        if "router_aux_loss_coef" in self.options:
            assert (
                output.aux_loss > 0.0
                and len(output.router_logits) == self.options["num_hidden_layers"]
            )
        return output.loss


def check(job, want, plan, stage=3, **limits):
    got = train_on_threads(job, plan, engine_opener(stage))
    oracle.compare(got, oracle.kept(want, plan), **limits)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Experts called with their own rows, or not at all; ``chosen``: [rows] of numbers."""

    def __init__(self, count=5):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, count)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x, chosen):
        weight = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, weight[mine, number, None] * expert(x[mine]))
        return x + out


class Layered(nn.Module):
    """Layers that hold experts: a layer is a unit."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, HIDDEN)
        self.layers = nn.ModuleList(Mixture() for _ in range(3))
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x, chosen):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


class Flat(nn.Module):
    """One mixture in the model itself: each expert is a unit, and ranks call different ones."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(7, HIDDEN)
        self.mixture = Mixture()
        self.head = nn.Linear(HIDDEN, 5)

    def forward(self, x, chosen):
        return self.head(self.mixture(self.enter(x), chosen))


# Per step and rank, the experts that get rows.
PATTERNS = {
    "others on other ranks": lambda step, rank: [0, 1] if rank == 0 else [2, 3],
    "others in other steps": lambda step, rank: [step % 5, (step + rank + 1) % 5],
    "one nobody ever calls": lambda step, rank: [0, 1, 2, 3],
    "none at all in one step": lambda step, rank: [] if step == 1 else [0, 2, 4],
    "none on one rank in one step": lambda step, rank: [] if step == 1 and rank == 1 else [1, 3],
    "first one, then all": lambda step, rank: [0] if step == 0 else [0, 1, 2, 3, 4],
    "in step 2 as never before": lambda step, rank: [4] if step == 2 and rank == 1 else [0, 1],
}


class Patterned(Job):
    def __init__(self, model, pattern, leaf=False):
        self.model, self.pattern, self.leaf = model, PATTERNS[pattern], leaf
        self.name = f"{model.__name__}: {pattern}"

    def build(self):
        model = seeded(self.model)
        if self.leaf:
            marked = set_z3_leaf_modules(model, [Mixture])
            assert marked and get_z3_leaf_modules(model) == marked
        return model

    def loss(self, net, at):
        called = self.pattern(at.step, at.rank)
        chosen = torch.tensor([called[row % len(called)] if called else -1 for row in range(6)])
        return net(features(at.step, at.micro, at.rank, 6), chosen).pow(2).mean()


PLAN = Plan(ranks=2, steps=3)
OUTSIDE = "outside the recorded order"
CELLS = [
    *((Flat, pattern, False) for pattern in PATTERNS),
    (Layered, "none at all in one step", False),
    (Flat, "in step 2 as never before", True),
]


@in_turn("model, pattern, leaf", CELLS)
def test_experts_without_tokens(model, pattern, leaf, heard):
    """A rank that calls an expert as never before says so; in a leaf none is asked for alone."""
    heard.clear()
    check(Patterned(model, pattern, leaf), Patterned(model, pattern), PLAN)
    told = [message for message in heard if OUTSIDE in message]
    assert not leaf or not told
    if (model, pattern, leaf) == (Flat, "in step 2 as never before", False):
        assert any(f"mixture.experts.4 is needed here {OUTSIDE}" in message for message in told)
