"""Random layerwise token dropping on ranks, against a plain loop whose blocks are given the same
tokens by hand, one sequence at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import TokenDropSection, ZeroConfig
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.techniques.token_drop import sample, tokens_read
from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, engine_opener, start, train_on_threads
from tests.helpers.layer_drop import DEPTH, FAMILIES, LayerDropJob
from tests.helpers.models import LENGTH, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, Driver, Plan, plain_sgd

SEED = 1234  # DeepSpeed's default
LOW, HIGH, STEPS, EVERY = 3, 20, 10, 2
TOLERANCE = 1e-4


def section(ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    schedule = {
        "min_value": LOW,
        "max_value": HIGH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": STEPS, "seq_per_step": EVERY},
    }
    ltd = {"enabled": True, "random_ltd_schedule": schedule, **more}
    if ids is not None:
        ltd |= {"random_ltd_layer_id": ids, "random_ltd_layer_num": len(ids)}
    routing = {"enabled": True, "random_ltd": ltd}
    return {"data_efficiency": {"enabled": True, "data_routing": routing}}


@pytest.mark.parametrize(
    ("low", "high", "steps", "every", "expected"),
    [
        # DeepSpeed's scheduler at steps 0, 1, 5, 9, 10, 11 and 100
        (128, 512, 10, 16, (128, 160, 320, 464, 512, 512, 512)),
        (3, 20, 10, 2, (4, 4, 10, 18, 20, 20, 20)),
        (100, 256, 7, 64, (128, 128, 192, 256, 256, 256, 256)),
        (10, 15, 10, 8, (15, 15, 15, 15, 15, 15, 15)),
    ],
)
def test_the_schedule(low: int, high: int, steps: int, every: int, expected: Any) -> None:
    made = TokenDropSection(min_value=low, max_value=high, require_steps=steps, seq_per_step=every)
    assert tuple(tokens_read(step, made) for step in (0, 1, 5, 9, 10, 11, 100)) == expected


def test_samples_are_rising_and_differ() -> None:
    cpu = torch.device("cpu")
    one = sample(7, (3, 0, 1), 2, 40, 30, 11, cpu)
    assert one.shape == (40, 11) and bool((one[:, 1:] > one[:, :-1]).all()) and int(one.max()) < 30
    others = [((4, 0, 1), 2), ((3, 1, 1), 2), ((3, 0, 2), 2), ((3, 0, 1), 3)]
    assert all(not torch.equal(sample(7, at, block, 40, 30, 11, cpu), one) for at, block in others)
    counts = sample(7, (0, 0, 0), 0, 4000, 30, 11, cpu).flatten().bincount(minlength=30)
    assert (counts / 4000).sub(11 / 30).abs().max() < 0.04, "each place is as likely"


@dataclass
class TokenDropJob(LayerDropJob):
    """The plain model gives chosen blocks their tokens row by row."""

    chosen: tuple[int, ...] = (1, 2, 3)
    padded: bool = False
    eager: bool = False
    dropped: int = 0

    def build(self) -> nn.Module:
        model: Any = super().build()
        if self.eager:
            model.set_attn_implementation("eager")
        return model

    def loss_of(self, net: Driver, at: At) -> torch.Tensor:
        batch = FAMILIES[self.family][1](at.step, at.micro, at.rank)
        if self.padded:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, -3:] = 0
        loss: torch.Tensor = net(**batch).loss
        return loss

    def by_hand(self, model: nn.Module, at: At) -> None:
        blocks = [block for stack in self.blocks(model) for block in stack]
        made = TokenDropSection(
            min_value=LOW, max_value=HIGH, require_steps=STEPS, seq_per_step=EVERY
        )
        read = tokens_read(at.step, made)
        for number in self.chosen:
            place = (at.step, at.micro, at.rank)
            blocks[number].forward = self.narrowed(blocks[number], number, place, read)  # type: ignore

    def narrowed(self, block: nn.Module, number: int, at: Any, read: int) -> Callable[..., Any]:
        plain = type(block).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(plain).bind(block, *args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            del given["self"]
            x = given.pop("hidden_states")
            size = x.shape[1]
            if read >= size:
                return plain(block, *args, **kwargs)
            kept = sample(SEED, at, number, len(x), size, read, x.device)
            self.dropped += size - read
            new = x.clone()
            for row, own in enumerate(kept):
                named = {name: one_row(name, each, row, own, size) for name, each in given.items()}
                out = plain(block, hidden_states=x[row : row + 1, own], **named)
                new[row, own] = (out[0] if isinstance(out, tuple) else out)[0]
            if isinstance(out, tuple):
                return new, given["position_bias"], given["encoder_decoder_position_bias"]
            return new

        return forward


def one_row(name: str, value: Any, row: int, own: torch.Tensor, size: int) -> Any:
    """An argument of a block for one sequence and the tokens ``own`` of ``size``."""
    if isinstance(value, tuple):
        return tuple(one_row(name, each, row, own, size) for each in value)
    if name == "past_key_values" or not isinstance(value, torch.Tensor):
        return None if name == "past_key_values" else value
    value = value[row : row + 1] if value.shape[0] > 1 else value
    if name.startswith("encoder"):  # queries alone are of this sequence
        return value[:, :, own] if value.dim() == 4 and value.shape[2] == size else value
    if value.dim() == 4:
        value = value[..., own] if value.shape[-1] == size else value
        return value[:, :, own] if value.shape[-2] == size else value
    return value[:, own]


def check(job: TokenDropJob, plan: Plan, stage: int, **more: Any) -> None:
    keys = section(list(job.chosen), **more.pop("ltd", {}))
    got = train_on_threads(job, plan, engine_opener(stage, **keys, **more))
    want = oracle.run(job, plan)
    assert job.dropped, "the plain model has read everything"
    oracle.compare(got, want, TOLERANCE, oracle.ADAM_ROUNDING)


CASES: dict[str, dict[str, Any]] = {
    "bert": {"padded": True},
    "roberta": {"padded": True, "eager": True},
    "gpt2": {},
    "llama": {"eager": True, "padded": True},
    "t5": {"chosen": (1, 3, 6, 8), "padded": True},
}


@pytest.mark.parametrize(
    "family, stage, ranks, accumulation",
    fast(
        [(f, s, r, a) for f in CASES for s in STAGES for r in (1, 2) for a in (1, 2)],
        lambda family, stage, ranks, accumulation: (
            (stage, ranks, accumulation) == ((3, 2, 2) if family in ("bert", "t5") else (2, 1, 1))
        ),
    ),
)
def test_families(family: str, stage: int, ranks: int, accumulation: int) -> None:
    check(TokenDropJob(family, **CASES[family]), Plan(ranks, 3, accumulation), stage)


def test_images() -> None:
    """Four patches and the token of the class, of which a step or two leave one out."""
    job = TokenDropJob("vit")
    check(job, Plan(1, 3), 3)


@pytest.mark.parametrize("more", [
    {"activation_checkpointing": {"blocks": True}},
    pytest.param({"compile": {"blocks": True, "backend": "aot_eager"}}, marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_with_what_else_is_on_blocks(more: Any) -> None:
    check(TokenDropJob("llama", eager=True, padded=True), Plan(2, 2), 3, **more)


def test_evaluation_reads_everything_and_classes_come_back() -> None:
    job = TokenDropJob("gpt2")
    model: Any = job.build()
    kinds = [type(block) for block in job.blocks(model)[0]]
    plain: Any = job.build()
    engine = start(model, plain_sgd(model), config_of(1, **section()))
    ids = tokens(0, 0, 0)
    with torch.no_grad():
        assert torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert not torch.equal(engine(input_ids=ids).logits, plain(input_ids=ids).logits)
    engine.destroy()
    assert [type(block) for block in job.blocks(model)[0]] == kinds


def test_beside_layers_that_are_left_out() -> None:
    job = TokenDropJob("gpt2")
    model: Any = job.build()
    keys = {**section(), **LayerDropJob("gpt2").keys}
    engine = start(model, plain_sgd(model), config_of(3, **keys))
    losses = []
    for _ in range(8):
        loss = engine(**FAMILIES["gpt2"][1](0, 0, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    engine.destroy()


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("gpt2", {"total_layer_num": 7}, f"total_layer_num = 7 .* has {DEPTH} blocks"),
        ("gpt2", {"random_ltd_layer_num": 2}, r"random_ltd_layer_num = 2"),
        ("gpt2", {"random_ltd_layer_id": [1, 9]}, r"random_ltd_layer_id names \[9\]"),
        ("t5", {"random_ltd_layer_id": [0]}, r"names \[0\].* reads all tokens"),
    ],
)
def test_mistakes_that_the_model_shows(family: str, more: Any, said: str) -> None:
    def run(rank: int) -> None:
        model = LayerDropJob(family).build()
        with pytest.raises(ConfigError, match=said):
            start(model, plain_sgd(model), config_of(0, **section(**more)))

    run_ranks(1, run)


@pytest.mark.parametrize(
    ("ltd", "said"),
    [
        ({"random_ltd_schedule": {"min_value": 3}}, r"needs .*random_ltd_schedule\.max_value"),
        ({"random_ltd_layer_id": 3}, "random_ltd_layer_id"),
        ({"random_ltd_layer_id": [1, 1]}, "names a block twice"),
        (
            {
                "random_ltd_schedule": {
                    "min_value": 9,
                    "max_value": 4,
                    "schedule_config": {"require_steps": 2, "seq_per_step": 1},
                }
            },
            "min_value = 9 is above max_value = 4",
        ),
        ({"layer_token_lr_schedule": {"enabled": True}}, "layer_token_lr_schedule"),
        ({"random_ltd_schedule": {"schedule_type": "fixed_root"}}, "schedule_type"),
    ],
)
def test_mistakes_in_the_section(ltd: Any, said: str) -> None:
    def run(rank: int) -> None:
        model = LayerDropJob("gpt2").build()
        config = section()
        config["data_efficiency"]["data_routing"]["random_ltd"] |= ltd
        with pytest.raises((ConfigError, NotBuiltError), match=said):
            start(model, plain_sgd(model), config_of(0, **config))

    run_ranks(1, run)


def test_arguments_that_cannot_be_narrowed() -> None:
    model: Any = LayerDropJob("gpt2").build()
    engine = start(model, plain_sgd(model), config_of(0, **section()))
    block = model.transformer.h[1]

    def call(**given: Any) -> Any:
        def inside(module: nn.Module, args: Any, output: Any) -> None:
            block(torch.zeros(2, LENGTH, 32), **given)

        hook = model.transformer.wte.register_forward_hook(inside)
        try:
            return engine(input_ids=tokens(0, 0, 0))
        finally:
            hook.remove()

    with pytest.raises(ConfigError, match="cu_seq_lens_q is of packed sequences"):
        call(cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(ConfigError, match=r"argument other is a tensor of shape \[9, 3\]"):
        call(other=torch.zeros(LENGTH, 3))
    block.attn.sliding_window = 4
    with pytest.raises(ConfigError, match="counts a window over what it gets"):
        call(attention_mask=None)
    engine.destroy()


def test_a_section_that_is_off() -> None:
    keys = section()
    keys["data_efficiency"]["data_routing"]["enabled"] = False
    engine = start(LayerDropJob("gpt2").build(), None, config_of(0, **keys))
    assert not engine.backward_pass.hooks.draws
    engine.destroy()
    assert ZeroConfig.from_dict(section()).random_ltd.min_value == LOW
