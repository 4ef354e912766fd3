"""Several engines in one process: teacher and student, a generator and its critic, actor, critic
and reference.

Each has its own stage and precision. A loss goes over the outputs of several, and the output of one
is the input of another. The oracle is the same loop over plain models.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError
from tests.helpers import oracle
from tests.helpers.engines import config_of, full_grads, full_weights, start
from tests.helpers.models import Stack, floats, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.training import Plan, plain_sgd

RANKS, STEPS = 2, 3
FAST = ((3, 3), (2, 3), (3, 2))
PAIRS = [
    pytest.param(pair, marks=[pytest.mark.long] * (pair not in FAST))
    for pair in itertools.product((0, 1, 2, 3), repeat=2)
]

Nets = Sequence[Callable[..., torch.Tensor]]


class Wide(Stack):
    """[rows, 7] -> [rows, 7], so that one can feed another."""

    def __init__(self):
        super().__init__(depth=2)
        self.head = nn.Linear(self.enter.out_features, 7)


def wides(count):
    models = [seeded(Wide) for _ in range(count)]
    for number, model in enumerate(models):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + 0.1 * number)
    return models


def data(step, micro, rank):
    return floats(step, micro, rank, 3, 7)


def fed(nets, x):
    """The second is fed by the first."""
    first = nets[0](x)
    return nets[1](first).float().pow(2).mean() + 0.1 * first.float().sum()


def fed_only(nets, x):
    return nets[1](nets[0](x)).float().pow(2).mean()


def beside(nets, x):
    return (nets[0](x).float() - nets[1](x).float()).pow(2).mean()


def back_and_forth(nets, x):
    """The first twice, the second in between."""
    return nets[0](nets[1](nets[0](x))).float().pow(2).mean()


def in_a_ring(nets, x):
    one, two, three = nets
    return (one(two(x)).float() - three(two(x)).float()).pow(2).mean() + two(three(x)).float().pow(
        2
    ).mean()


def opened(models, configs):
    """Engines, and what calls each in the dtype of its parameters."""
    engines = [start(model, plain_sgd(model), config) for model, config in zip(models, configs)]
    return engines, [
        lambda x, e=engine: e(x.to(next(e.module.parameters()).dtype)) for engine in engines
    ]


@dataclass
class Outcome:
    losses: list[float]
    norms: list[list[float]]  # per step, of each model
    weights: list[dict[str, torch.Tensor]]


def plainly(loss_of, count, accumulation=1):
    models = wides(count)
    optimizers = [plain_sgd(model) for model in models]
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            for micro in range(accumulation):
                loss = loss_of(models, data(step, micro, rank)) / (RANKS * accumulation)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        norms.append(
            [
                oracle.total_norm({n: p.grad for n, p in model.named_parameters()})
                for model in models
            ]
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return Outcome(
        losses,
        norms,
        [{n: p.detach().clone() for n, p in model.named_parameters()} for model in models],
    )


def on_engines(
    loss_of, configs, accumulation=1, backward=lambda engines, loss: engines[0].backward(loss)
):
    def run(rank, models):
        engines, nets = opened(models, configs)
        losses, norms = [], []
        for step in range(STEPS):
            total = 0.0
            for micro in range(accumulation):
                loss = loss_of(nets, data(step, micro, rank))
                backward(engines, loss)
                total += float(loss.detach()) / accumulation
                for engine in engines:
                    engine.step()
            losses.append(total)
            norms.append([engine.get_global_grad_norm() for engine in engines])
        outcome = Outcome(losses, norms, [full_weights(engine) for engine in engines])
        for engine in engines:
            engine.destroy()
        return outcome

    outcomes = on_ranks(RANKS, run, build=lambda: wides(len(configs)))
    assert all(other.norms == outcomes[0].norms for other in outcomes)
    return Outcome(
        [sum(each) / RANKS for each in zip(*(o.losses for o in outcomes))],
        outcomes[0].norms,
        outcomes[0].weights,
    )


def compare(found, want, tolerance=1e-5):
    assert found.losses == pytest.approx(want.losses, rel=tolerance)
    for got, expected in zip(found.norms, want.norms, strict=True):
        assert got == pytest.approx(expected, rel=tolerance)
    for number, (got, expected) in enumerate(zip(found.weights, want.weights, strict=True)):
        oracle.compare_tensors(
            f"weights of model {number}", got, expected, tolerance, weight_floor(tolerance)
        )


def weight_floor(tolerance):
    return max(oracle.ROUNDING, tolerance / 10)


LOSSES = {loss.__name__: loss for loss in (fed, beside, back_and_forth)}


@pytest.mark.turns
@pytest.mark.parametrize("stages", PAIRS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_over_two_engines(loss, stages):
    found = on_engines(
        LOSSES[loss], [config_of(stage, Plan(accumulation=2)) for stage in stages], accumulation=2
    )
    compare(found, plainly(LOSSES[loss], 2, accumulation=2))


@pytest.mark.parametrize("stages", [(3, 3, 3), (3, 2, 0), (1, 3, 2)], ids=str)
def test_a_loss_over_three_engines(stages):
    compare(on_engines(in_a_ring, [config_of(stage) for stage in stages]), plainly(in_a_ring, 3))


def lastly(engines, loss):
    engines[-1].backward(loss)


def by_itself(engines, loss):
    loss.backward()


def divided_already(engines, loss):
    engines[0].backward(loss / 2, scale_wrt_gas=False)


@pytest.mark.turns
@pytest.mark.parametrize(
    "backward", [lastly, by_itself, divided_already], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("stages", [(3, 2), (0, 3)], ids=str)
def test_whoever_is_given_the_loss(stages, backward):
    found = on_engines(
        fed, [config_of(stage, Plan(accumulation=2)) for stage in stages], 2, backward
    )
    compare(found, plainly(fed, 2, 2))


PRECISIONS = [
    ("fp16", "fp16"),
    ("fp16", "fp32"),
    ("fp32", "fp16"),
    ("bf16", "fp16"),
    ("fp16", "bf16"),
    ("bf16", "fp32"),
]


@pytest.mark.turns
@pytest.mark.parametrize(
    "backward", [lambda engines, loss: engines[0].backward(loss), lastly], ids=["first", "last"]
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("precisions", PRECISIONS, ids=str)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_precisions_side_by_side(stage, precisions, loss, backward):
    """A gradient contains a loss scale once, whichever engines it passes through."""
    configs = [
        config_of(stage, Plan(precision=precision, scale=scale))
        for precision, scale in zip(precisions, (256.0, 4096.0))
    ]
    compare(on_engines(LOSSES[loss], configs, backward=backward), plainly(LOSSES[loss], 2), 3e-2)


def in_fp16(*scales, stage=3):
    return [config_of(stage, fp16={"enabled": True, **scale}) for scale in scales]


@pytest.mark.turns
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "precisions", [("fp16", "fp16"), ("fp32", "fp16"), ("fp16", "fp32")], ids=str
)
def test_a_plain_backward_through_two_engines_cannot_be_scaled(precisions, loss):
    """In the second step the same loss is given to an engine; what the refusal has left is
    forgotten.
    """
    want = plainly(LOSSES[loss], 2)
    configs = [config_of(3, Plan(precision=precision)) for precision in precisions]

    def run(rank, models):
        engines, nets = opened(models, configs)
        with pytest.raises(
            PartitionError, match=r"several fp16 forwards or engines.*call engine\.backward"
        ):
            LOSSES[loss](nets, data(9, 0, rank)).backward()
        for engine in engines:
            engine.zero_grad()
        for step in range(STEPS):
            engines[0].backward(LOSSES[loss](nets, data(step, 0, rank)))
            for engine in engines:
                engine.step()
        return [full_weights(engine) for engine in engines]

    for number, weights in enumerate(on_ranks(RANKS, run, build=lambda: wides(2))[0]):
        oracle.compare_tensors(f"model {number}", weights, want.weights[number], 3e-2, 3e-3)


def test_engines_whose_losses_do_not_meet_are_scaled_by_themselves():
    def run(rank, models):
        engines, _ = opened(models, in_fp16({"loss_scale": 64.0}, {"loss_scale": 512.0}))
        for engine in engines:
            engine(data(0, 0, rank).half()).float().pow(2).mean().backward()
        for engine in reversed(engines):
            engine.step()
        return [full_weights(engine) for engine in engines]

    models = wides(2)
    for model in models:
        for rank in range(RANKS):
            (model(data(0, 0, rank)).pow(2).mean() / RANKS).backward()
        plain_sgd(model).step()
    for weights, model in zip(on_ranks(RANKS, run, build=lambda: wides(2))[0], models):
        oracle.compare_tensors(
            "weights", weights, {n: p.detach() for n, p in model.named_parameters()}, 3e-2, 3e-3
        )


@pytest.mark.turns
@pytest.mark.parametrize("given_to", [0, 1])
@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16"])
def test_a_scale_that_is_too_large_falls_whoever_overflows(first, given_to):
    """The second engine has a scale; what it sends back into the first overflows, and no weight
    is spoiled by it.
    """
    first_config = config_of(2, Plan(precision=first))
    if first == "fp16":
        first_config["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    configs = [
        first_config,
        config_of(3, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1}),
    ]

    def run(rank, models):
        engines, nets = opened(models, configs)
        for step in range(30):
            engines[given_to].backward(fed_only(nets, data(0, 0, rank)))
            for engine in engines if step % 2 else reversed(engines):
                engine.step()
        finite = [
            all(bool(value.isfinite().all()) for value in full_weights(engine).values())
            for engine in engines
        ]
        return (
            [engine.counters.skipped_steps for engine in engines],
            [engine.scaler.scale for engine in engines],
            finite,
        )

    for skipped, scales, finite in on_ranks(RANKS, run, build=lambda: wides(2)):
        assert finite == [True, True]
        if first == "fp16" and given_to == 0:
            assert skipped == [0, 0] and scales == [16.0, 2.0**24]
        else:
            assert min(skipped) > 0 and max(skipped) < 20
            assert scales[1] == 2.0 ** (24 - max(skipped))


def test_a_scale_that_fell_in_the_middle_of_a_window_counts_from_the_next():
    """The first engine steps, overflows and so lowers the second's scale while the second still
    holds gradients.
    """
    configs = [
        config_of(3),
        config_of(3, fp16={"enabled": True, "initial_scale_power": 10, "hysteresis": 1}),
    ]

    def run(rank, models):
        engines, _ = opened(models, configs)
        x = data(0, 0, rank)
        huge = engines[0](x).sum() * 1e38
        engines[1].backward(engines[1](x.half()).float().pow(2).mean() + huge)
        engines[0].step()
        assert engines[0].counters.skipped_steps == 1 and engines[1].scaler.scale == 2.0**10
        found = full_grads(engines[1])
        engines[1].step()
        assert engines[1].counters.skipped_steps == 0 and engines[1].scaler.scale == 2.0**9
        engines[1].backward(engines[1](x.half()).float().pow(2).mean() + engines[0](x).sum() * 1e38)
        engines[1].zero_grad()
        assert engines[1].scaler.scale == 2.0**9
        engines[0].step()
        assert engines[1].scaler.scale == 2.0**8, (
            "it holds no gradients, so its scale falls at once"
        )
        return found

    model = wides(2)[1]
    for rank in range(RANKS):
        (model(data(0, 0, rank)).pow(2).mean() / RANKS).backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    oracle.compare_tensors(
        "gradients", on_ranks(RANKS, run, build=lambda: wides(2))[0], want, 3e-2, 3e-3
    )


def one_against_the_other(models, backward, step, x):
    """A generator (first) and its critic, in turn, as such scripts are written; returns both
    losses.
    """
    generator, critic = models
    made = generator(x)
    loss_of_critic = (critic(x) - 1).pow(2).mean() + critic(made.detach()).pow(2).mean()
    backward(1, loss_of_critic)
    step(1)
    loss_of_generator = (critic(made) - 1).pow(2).mean()
    backward(0, loss_of_generator)
    step(0)
    critic.zero_grad()
    return float(loss_of_critic.detach()) + float(loss_of_generator.detach())


@pytest.mark.parametrize(
    "stages", [(0, 0), (1, 1), (2, 2), (3, 3), (3, 2), (2, 3), (0, 3)], ids=str
)
def test_a_generator_and_its_critic_in_turn(stages):
    """The generator's forward waits while the critic is stepped; the critic's gradients of its
    loss are thrown away.
    """

    def run(rank, models):
        engines, _ = opened(models, [config_of(stage) for stage in stages])
        losses = [
            one_against_the_other(
                engines,
                lambda i, loss: engines[i].backward(loss),
                lambda i: engines[i].step(),
                data(step, 0, rank),
            )
            for step in range(STEPS)
        ]
        return losses, [full_weights(engine) for engine in engines]

    models = wides(2)
    optimizers = [plain_sgd(model) for model in models]
    wanted = []
    for step in range(STEPS):
        made = [models[0](data(step, 0, rank)) for rank in range(RANKS)]
        total = 0.0
        for rank in range(RANKS):
            x = data(step, 0, rank)
            loss = (models[1](x) - 1).pow(2).mean() + models[1](made[rank].detach()).pow(2).mean()
            (loss / RANKS).backward()
            total += float(loss.detach())
        optimizers[1].step()
        for rank in range(RANKS):
            loss = (models[1](made[rank]) - 1).pow(2).mean()
            (loss / RANKS).backward()
            total += float(loss.detach())
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted.append(total / RANKS)
    results = on_ranks(RANKS, run, build=lambda: wides(2))
    assert [sum(each) / RANKS for each in zip(*(losses for losses, _ in results))] == pytest.approx(
        wanted, rel=1e-5
    )
    for found, model in zip(results[0][1], models):
        oracle.compare_tensors(
            "weights", found, {name: p.detach() for name, p in model.named_parameters()}
        )


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stages", [(3, 2), (2, 3), (3, 3), (0, 3)], ids=str)
def test_a_teacher_that_never_learns(stages, precision):
    """It has no optimizer, another precision, and is asked between the student's forward and its
    backward, too.
    """

    def distil(student, teacher, x):
        with torch.no_grad():
            goal = teacher(x).float()
        answer = student(x)
        with torch.no_grad():
            again = teacher(x).float()
        assert torch.equal(goal, again)
        return (answer - goal).pow(2).mean()

    def run(rank, model):
        student, teacher = model
        asked = start(
            teacher.requires_grad_(False).eval(),
            None,
            config_of(stages[1], Plan(precision=precision)),
        )
        learning = start(student, plain_sgd(student), config_of(stages[0]))
        dtype = next(teacher.parameters()).dtype
        for step in range(STEPS):
            learning.backward(distil(learning, lambda x: asked(x.to(dtype)), data(step, 0, rank)))
            learning.step()
        for name, p in wides(2)[1].named_parameters():
            assert torch.equal(full_weights(asked)[name], p.to(dtype).float()), name
        return full_weights(learning)

    student, teacher = wides(2)
    teacher.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    dtype = next(teacher.parameters()).dtype
    for step in range(STEPS):
        for rank in range(RANKS):
            (
                distil(student, lambda x: teacher(x.to(dtype)), data(step, 0, rank)) / RANKS
            ).backward()
        torch.optim.SGD(student.parameters(), lr=0.05).step()
        student.zero_grad()
    for found in on_ranks(RANKS, run, build=lambda: wides(2)):
        oracle.compare_tensors(
            "student", found, {name: p.detach() for name, p in student.named_parameters()}
        )


def _after_another(rank, left, models, stage, keeper):
    first, left[rank] = left[rank], nn.Identity()
    other = start(first, plain_sgd(first), config_of(stage, Plan(precision="fp16")))
    kept = other if rank == keeper else None
    del first, other
    gc.collect()
    engine = start(models[rank], plain_sgd(models[rank]), config_of(stage, Plan()))
    engine.backward(beside([engine, lambda x: 0.5 * x], data(0, 0, rank)))
    grads = full_grads(engine)
    engine.destroy()
    if kept is not None:
        kept.destroy()
    return grads


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_that_one_rank_still_holds_lends_its_scale_there_alone(stage):
    """It was dropped without ``destroy``, and ranks collect garbage at different times."""
    models, plain = [seeded(Wide) for _ in range(RANKS)], seeded(Wide)
    got = run_ranks(RANKS, _after_another, [seeded(Wide) for _ in range(RANKS)], models, stage, 0)
    (
        sum(beside([plain, lambda x: 0.5 * x], data(0, 0, rank)) for rank in range(RANKS)) / RANKS
    ).backward()
    want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for grads in got:
        oracle.compare_tensors("gradient", {name: grads[name] for name in want}, want)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_at_rest_lends_no_scale(stage):
    """While an fp16 engine has no backward to run, gradients of another that are not finite are
    used, as in a plain loop, and no step of either is skipped.
    """

    def run(rank, models):
        half = start(models[0], plain_sgd(models[0]), config_of(stage, fp16={"enabled": True}))
        half.backward(half(data(0, 0, rank).half()).float().square().mean())
        half.step()
        scale, skipped = half.loss_scale(), half.skipped_steps
        engine = start(models[1], plain_sgd(models[1]), config_of(stage))
        engine.backward(engine(data(1, 0, rank)).square().mean() * float("inf"))
        engine.step()
        weights = full_weights(engine).values()
        finite = all(bool(weight.isfinite().all()) for weight in weights)
        return (
            engine.skipped_steps,
            half.skipped_steps - skipped,
            half.loss_scale() - scale,
            finite,
        )

    models = [[seeded(Wide).half(), seeded(Wide)] for _ in range(RANKS)]
    assert run_ranks(RANKS, lambda rank: run(rank, models[rank])) == [(0, 0, 0.0, False)] * RANKS
