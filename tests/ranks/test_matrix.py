"""The oracle matrix: stage x ranks x accumulation x precision x architecture, the ways people call
a model, and model types of transformers.

The fast suite runs two steps of a choice in which every stage meets two values of the other axes,
and each way at stage 3; the long suite runs the products.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_zero.zero.layout.tree import tensors_in
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import STAGES, engine_opener, train_on_threads
from tests.helpers.models import ARCHITECTURES, floats, seeded, tokens
from tests.helpers.training import ArchitectureJob, Job, Plan, Way, plain_sgd, sgd
from tests.helpers.ways import WAYS
from tests.loading.zoo import animal

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
    kind, encodes = model.main_input_name, getattr(config, "is_encoder_decoder", False)
    shape = {
        "pixel_values": lambda: (2, 3, 32, 32),
        "input_values": lambda: (2, 800),
        "input_features": lambda: (2, config.num_mel_bins, 2 * config.max_source_positions),
    }.get(kind)
    made = {kind: floats(*place, *shape()) if shape else tokens(*place)}
    if encodes:
        made["decoder_input_ids"] = tokens(at.step, at.micro, at.rank + 50)[:, :5].contiguous()
    return made


# causal ones are in tests/matrix/test_random_programs.py
@in_turn("name", ["resnet", "wav2vec2", "whisper", "jamba"])
def test_steps_of_a_model_type_equal_the_oracle(name):
    job, plan = Typed(name), Plan(ranks=2, steps=2)
    got = train_on_threads(job, plan, engine_opener(3))
    oracle.compare(got, oracle.run(job, plan), weight_floor=oracle.ROUNDING)
