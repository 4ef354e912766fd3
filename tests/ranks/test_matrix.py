"""The oracle matrix: stage x ranks x accumulation x precision x architecture, the ways people call
a model, and model types of transformers.

The fast suite runs two steps of a covering choice: every stage meets every other setting, each way
stage 3 and some of them one of the other stages, in turn; the long suite runs the products.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_zero.zero.layout.tree import tensors_in
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, engine_opener, train_on_threads
from tests.helpers.models import ARCHITECTURES, floats, seeded, tokens
from tests.helpers.training import ArchitectureJob, Job, Plan, adamw, plain_sgd, sgd
from tests.helpers.ways import WAYS
from tests.loading.zoo import MORE, ZOO, animal

RANKS, ACCUMULATION, PRECISIONS = (1, 2, 4), (1, 3), ("fp32", "bf16", "fp16")
NAMES = tuple(ARCHITECTURES)
PRODUCT = list(itertools.product(STAGES, RANKS, ACCUMULATION, PRECISIONS, NAMES))


def covering():
    """Per stage: each architecture in fp32 and in one of the 16-bit precisions; these, ranks and
    accumulation take turns.
    """
    cells = []
    for stage in STAGES:
        for index, (precision, name) in enumerate(itertools.product(PRECISIONS, NAMES)):
            turn = (NAMES.index(name) + stage) % 2
            if precision in ("fp32", PRECISIONS[1 + turn]):
                cells.append(
                    (
                        stage,
                        RANKS[(index + stage) % 3],
                        ACCUMULATION[(index // 2 + stage) % 2],
                        precision,
                        name,
                    )
                )
    return cells


def check(steps, stage, ranks, accumulation, precision, name):
    job = ArchitectureJob(ARCHITECTURES[name])
    plan = Plan(ranks=ranks, steps=steps, accumulation=accumulation, precision=precision)
    got = train_on_threads(job, plan, engine_opener(stage))
    oracle.accept(got, job, plan, stage)


@pytest.mark.parametrize("stage, ranks, accumulation, precision, name", covering())
def test_against_the_oracle(stage, ranks, accumulation, precision, name):
    check(2, stage, ranks, accumulation, precision, name)


@pytest.mark.long
@pytest.mark.parametrize("stage, ranks, accumulation, precision, name", PRODUCT)
def test_the_product(stage, ranks, accumulation, precision, name):
    check(5, stage, ranks, accumulation, precision, name)


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name, ranks", [("bert", 3), ("t5", 2)])
def test_sgd_leaves_the_same_weights(stage, name, ranks):
    """Adam forgives a gradient that is off by a factor; SGD does not.

    Three ranks: an uneven cut.
    """
    job = ArchitectureJob(ARCHITECTURES[name], sgd)
    job.name += " with sgd"
    plan = Plan(ranks=ranks, steps=3, accumulation=2, clip=2.0)
    oracle.compare(
        train_on_threads(job, plan, engine_opener(stage)),
        oracle.kept(job, plan),
        weight_floor=oracle.ROUNDING,
    )


def test_the_covering_choice_covers():
    """Each stage meets each rank count, each accumulation and each precision; architectures meet
    each precision, in fp32 at each stage.
    """
    for stage in STAGES:
        cells = [cell for cell in covering() if cell[0] == stage]
        assert {cell[1] for cell in cells} == set(RANKS)
        assert {cell[2] for cell in cells} == set(ACCUMULATION)
        assert {cell[3] for cell in cells} == set(PRECISIONS)
        assert (
            {cell[4] for cell in cells if cell[3] == "fp32"}
            == {cell[4] for cell in cells if cell[3] != "fp32"}
            == set(NAMES)
        )
    for stages in ((0, 1), (2, 3)):
        assert {cell[3:] for cell in covering() if cell[0] in stages} == set(
            itertools.product(PRECISIONS, NAMES)
        )
    assert adamw is ArchitectureJob(ARCHITECTURES["bert"]).make_optimizer


PLAN = Plan(ranks=2, steps=2, accumulation=2)  # the second in the order that the first has recorded
# the stage below 3 that a way meets in the fast suite
TURN = {name: index // 8 % 3 for index, name in enumerate(WAYS) if index % 8 == 0}


@pytest.mark.parametrize(
    "name, stage",
    fast(itertools.product(WAYS, STAGES), lambda name, stage: stage in (TURN.get(name), 3)),
)
def test_way(name, stage):
    way = WAYS[name]
    oracle.compare(train_on_threads(way, PLAN, engine_opener(stage)), oracle.kept(way, PLAN))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_way_on_other_rank_counts(way, stage, ranks):
    plan = Plan(ranks=ranks, steps=3, accumulation=1, clip=1.0)
    oracle.compare(train_on_threads(way, plan, engine_opener(stage)), oracle.kept(way, plan))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_way_in_16_bits(way, stage, precision):
    plan = Plan(ranks=2, steps=3, accumulation=2, precision=precision)
    got = train_on_threads(way, plan, engine_opener(stage))
    oracle.accept(got, way, plan, stage)


TYPE_PLAN = Plan(ranks=2, steps=2)


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
    """``name`` of the zoo.

    The loss is the mean square of whatever floating-point tensors the model returns.
    """

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


# the others have the layers of one of these
OF_OTHER_LAYERS = {
    "albert",
    "gpt_oss",
    "llava",
    "swin",
    "whisper",
    "qwen2_vl",
    "jamba",
    "segformer",
}
OF_OTHER_LAYERS |= {"deberta-v2", "blip", "mamba2", "rwkv", "falcon_h1", "marian", "ernie4_5_moe"}


@pytest.mark.parametrize(
    "name", fast([*ZOO, *MORE], lambda name: name in ZOO or name in OF_OTHER_LAYERS)
)
def test_a_step_equals_the_oracle(name):
    job = Typed(name)
    oracle.compare(
        train_on_threads(job, TYPE_PLAN, engine_opener(3)),
        oracle.run(job, TYPE_PLAN),
        weight_floor=oracle.ROUNDING,
    )
