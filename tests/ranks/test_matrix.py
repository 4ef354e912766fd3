"""The oracle matrix: stage x ranks x accumulation x precision x architecture, the ways people call
a model, model types of transformers, and experts that some ranks and steps do not call.

The fast suite runs two steps of a choice in which every stage meets two values of the other axes,
and each way at stage 3; the long suite runs the ways at all stages, on other ranks and in 16 bits.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_zero.zero.layout.leaf_modules import get_z3_leaf_modules, set_z3_leaf_modules
from hf_zero.zero.layout.tree import tensors_in
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import STAGES, engine_opener, train_on_threads
from tests.helpers.models import ARCHITECTURES, HIDDEN, features, floats, seeded, tokens
from tests.helpers.training import ArchitectureJob, Job, Plan, Way, plain_sgd, sgd
from tests.helpers.ways import WAYS
from tests.loading.zoo import GQA, LATENT, MORE, TEXT, ZOO, animal

RANKS, ACCUMULATION, PRECISIONS = (1, 2, 4), (1, 3), ("fp32", "bf16", "fp16")
NAMES = tuple(ARCHITECTURES)
TURNS = [
    (
        stage,
        (1, 2, 3)[(2 * turn + stage) % 3],
        ACCUMULATION[(turn // 2 + stage) % 2],
        PRECISIONS[(turn + stage) % 3],
        NAMES[(turn + stage) % 4],
    )
    for stage, turn in itertools.product(STAGES, range(2))
]


def accept(job, plan, stage):
    oracle.accept(train_on_threads(job, plan, engine_opener(stage)), job, plan, stage)


@in_turn("stage, ranks, accumulation, precision, name", TURNS)
def test_against_the_oracle(stage, ranks, accumulation, precision, name):
    accept(ArchitectureJob(ARCHITECTURES[name]), Plan(ranks, 2, accumulation, precision), stage)


@in_turn("stage", STAGES)
def test_sgd_leaves_the_same_weights(stage):
    """Adam forgives gradients off by a factor. Three ranks: an uneven cut."""
    job, plan = (
        Way("a stack with sgd", make_optimizer=sgd),
        Plan(ranks=3, steps=3, accumulation=2, clip=0.1),
    )
    got, want = train_on_threads(job, plan, engine_opener(stage)), oracle.kept(job, plan)
    oracle.compare(got, want, weight_floor=oracle.ROUNDING)
    assert min(want.norms) > plan.clip


PLAN = Plan(ranks=2, steps=2)  # the second in the order that the first has recorded
# each beside a way that is like it
LONG = {
    "gradient_checkpointing_enable(use_reentrant=False) on t5",
    "gradient_checkpointing_enable(use_reentrant=True) on t5",
    "a part of the model alone: T5's encoder",
    "a part of the model alone: BERT without its head",
    "a block never used",
    "non-reentrant checkpoint around two blocks, another block before and after",
    "no_grad evaluation between micro-batches and before a backward",
    "inference_mode of T5 between micro-batches and before a backward",
    "the raw module of llama instead of the engine",
    "LoRA over frozen blocks",
    "generate between micro-batches",
    "every other one of nine blocks used on rank 1 only",
}
assert WAYS.keys() > LONG


@in_turn("name", [name for name in WAYS if name not in LONG])
def test_way(name):
    accept(WAYS[name], PLAN, 3)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WAYS)
def test_way_on_other_ranks_and_in_16_bits(name, stage):
    accept(WAYS[name], Plan(2, 2, 2), stage)
    for ranks in (1, 3, 4):
        accept(WAYS[name], Plan(ranks, 3, clip=1.0), stage)
    for precision in ("bf16", "fp16"):
        accept(WAYS[name], Plan(2, 3, 2, precision), stage)


def make_exact(config):
    """No dropout, and weights so large that no gradient is a small difference of large numbers."""
    for name, value in vars(config).items():
        if isinstance(value, float) and (
            "drop" in name or name.endswith("pdrop") or name.startswith("mask_")
        ):
            setattr(config, name, 0.0)
        elif name in ("initializer_range", "init_std"):
            setattr(config, name, 0.2)
        elif hasattr(value, "model_type"):
            make_exact(value)


class Typed(Job):
    """``name`` of the zoo; the loss is the mean square of its floating-point outputs."""

    def __init__(self, name):
        self.name = name

    def build(self):
        import transformers

        beast = animal(self.name)
        config = getattr(transformers, beast.config)(**beast.options)
        make_exact(config)
        return seeded(lambda: beast.cls(config))

    def optimizer(self, model):
        return plain_sgd(model)

    def loss(self, net, at):
        outputs = net(**batch(net.module, at))
        found = [
            t.float().pow(2).mean()
            for t in tensors_in(outputs)
            if t.is_floating_point() and t.requires_grad
        ]
        assert found
        return torch.stack(found).sum()


def batch(model, at):
    config, place = model.config, (at.step, at.micro, at.rank)
    image = (
        getattr(config, "image_size", None)
        or getattr(getattr(config, "vision_config", None), "image_size", None)
        or 32
    )
    made: dict[str, torch.Tensor] = {}
    kind = model.main_input_name
    if kind == "pixel_values":
        made["pixel_values"] = floats(*place, 2, 3, image, image)
    elif kind == "input_values":
        made["input_values"] = floats(*place, 2, 800)
    elif kind == "input_features":
        made["input_features"] = floats(
            *place, 2, config.num_mel_bins, 2 * config.max_source_positions
        )
    else:
        made["input_ids"] = tokens(*place)
    if config.model_type in ("clip", "siglip", "blip"):
        made.update(input_ids=tokens(*place), pixel_values=floats(*place, 2, 3, image, image))
    if config.model_type == "llava":
        picture = torch.full(
            (2, (image // config.vision_config.patch_size) ** 2), config.image_token_index
        )
        made = {
            "input_ids": torch.cat([picture, tokens(*place)], 1),
            "pixel_values": floats(*place, 2, 3, image, image),
        }
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = tokens(at.step, at.micro, at.rank + 50)[:, :5].contiguous()
    return made


# causal ones are in tests/matrix/test_random_programs.py
FAST = ["resnet", "wav2vec2", "whisper", "jamba"]


def compare_type(name):
    job, plan = Typed(name), Plan(ranks=2, steps=2)
    got = train_on_threads(job, plan, engine_opener(3))
    oracle.compare(got, oracle.run(job, plan), weight_floor=oracle.ROUNDING)


@in_turn("name", FAST)
def test_steps_of_a_model_type_equal_the_oracle(name):
    compare_type(name)


@pytest.mark.long
@in_turn("name", [name for name in (*ZOO, *MORE) if name not in FAST])
def test_steps_of_other_model_types_equal_the_oracle(name):
    compare_type(name)


ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAYOUT = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**GQA, **ROUTED, "num_local_experts": 6}),
    "qwen2_moe": ("Qwen2Moe", {**GQA, **ROUTED, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "deepseek_v3": ("DeepseekV3", {**TEXT, **LATENT, **LAYOUT, "n_routed_experts": 6, **EXPERTS}),
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


MOE_PLAN = Plan(ranks=2, steps=3)
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
    check(Patterned(model, pattern, leaf), Patterned(model, pattern), MOE_PLAN)
    told = [message for message in heard if OUTSIDE in message]
    assert not leaf or not told
    if (model, pattern, leaf) == (Flat, "in step 2 as never before", False):
        assert any(f"mixture.experts.4 is needed here {OUTSIDE}" in message for message in told)
