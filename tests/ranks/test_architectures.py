"""Model types of transformers, tiny and random: a step each at stage 3 on two ranks, against the
oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.zero.layout.tree import tensors_in
from tests.helpers import oracle
from tests.helpers.engines import engine_opener, train_on_threads
from tests.helpers.models import floats, seeded, tokens
from tests.helpers.training import At, Driver, Job, Plan, plain_sgd
from tests.loading.zoo import MORE, ZOO, animal

PLAN = Plan(ranks=2, steps=2)


def make_exact(config: Any) -> None:
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

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self) -> nn.Module:
        import transformers

        beast = animal(self.name)
        config = getattr(transformers, beast.config)(**beast.options)
        make_exact(config)
        return seeded(lambda: beast.cls(config))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return plain_sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        outputs = net(**batch(net.module, at))
        found = [
            t.float().pow(2).mean()
            for t in tensors_in(outputs)
            if t.is_floating_point() and t.requires_grad
        ]
        assert found
        return torch.stack(found).sum()


def batch(model: Any, at: At) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("name", [*ZOO, *MORE])
def test_a_step_equals_the_oracle(name):
    job = Typed(name)
    oracle.compare(
        train_on_threads(job, PLAN, engine_opener(3)),
        oracle.run(job, PLAN),
        weight_floor=oracle.ROUNDING,
    )
