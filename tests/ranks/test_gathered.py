"""GatheredParameters: whole values inside, written back from one rank, released after."""

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import PartitionError, ReleasedParameterError
from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_grads, full_weights, start
from tests.helpers.models import ARCHITECTURES, Stack, features, seeded
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2


def whole():
    return {name: p.detach().clone() for name, p in stack().named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_whole_inside_and_released_after(rank, model, stage):
    start(model, adamw(model), config_of(stage))
    named = dict(model.named_parameters())
    with hf_zero.GatheredParameters(named.values()):
        for name, p in named.items():
            assert torch.equal(p, whole()[name]), name
    weight = model.blocks[1].up.weight
    with hf_zero.GatheredParameters(weight):
        assert torch.equal(weight, whole()["blocks.1.up.weight"])
    with hf_zero.GatheredParameters([None, weight, None]):
        assert weight.abs().sum() > 0
    if stage == 3:
        with pytest.raises(ReleasedParameterError, match=r"blocks\.1\.up\.weight"):
            weight.sum()
        assert weight.ds_status == type(weight).ds_status
    else:
        assert torch.equal(weight, whole()["blocks.1.up.weight"])


@pytest.mark.turns
@pytest.mark.parametrize("stage", [*STAGES, "3, in host memory"])
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_one_rank_writes_reaches_all_and_the_master(stage, writer, precision):
    zero = {"stage": stage}
    if stage not in STAGES:
        zero = {"stage": 3, "offload_param": {"device": "cpu"}}

    def change(model):
        with torch.no_grad():
            model.blocks[0].down.weight.mul_(0.5)
            model.head.bias.fill_(0.25)

    def changed():
        model = stack()
        change(model)
        return model

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]], RANKS, build=changed)

    def run(rank, model):
        plan = Plan(precision=precision)
        engine = start(model, plain_sgd(model), config_of(0, plan, zero_optimization=zero))
        with hf_zero.GatheredParameters(
            [model.blocks[0].down.weight, model.head.bias], modifier_rank=writer
        ):
            if rank == writer:
                change(model)
        run_steps(engine, rank, [0])
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors(
            "weights", weights, want, tolerance=1e-5 if precision == "fp32" else 1e-2
        )


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_what_is_not_written_keeps_its_master(rank, model, stage):
    """Not what it was rounded to for the script."""
    config = config_of(stage, Plan(precision="bf16"))
    engine = start(model, plain_sgd(model), config)
    run_steps(engine, rank, [0])
    before = full_weights(engine)
    weight = model.blocks[0].down.weight
    with hf_zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight[0, 0] = 0.5
    after = full_weights(engine)
    before["blocks.0.down.weight"][0, 0] = 0.5
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in after.values())


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_nested_contexts_release_at_the_last_exit(rank, model, stage):
    start(model, adamw(model), config_of(stage))
    weight = model.blocks[0].up.weight
    with hf_zero.GatheredParameters([weight]):
        with hf_zero.GatheredParameters(model.blocks[0].parameters()):
            pass
        assert torch.equal(weight, whole()["blocks.0.up.weight"])
    if stage == 3:
        with pytest.raises(ReleasedParameterError):
            weight.sum()


@pytest.mark.parametrize("stage", STAGES)
def test_forwards_and_training_inside(stage):
    """TRL generates inside; the parameters stay whole until the exit, and the training after it
    is right.
    """
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        with hf_zero.GatheredParameters(list(model.parameters())):
            with torch.no_grad():
                squared(model, At(5, 0, rank))
            assert torch.equal(model.head.weight, whole()["head.weight"])
            run_steps(engine, rank, [0])
        run_steps(engine, rank, [1])
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_an_error_inside_leaves_it_released(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    with (
        pytest.raises(KeyError),
        hf_zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
    ):
        raise KeyError("user's own")
    if stage == 3:
        with pytest.raises(ReleasedParameterError):
            model.head.weight.sum()
    run_steps(engine, rank, [0])


@on_each_rank(RANKS)
def test_plain_parameters_are_broadcast(rank, model):
    """transformers gathers lists in which some parameters belong to no engine."""
    plain = nn.Parameter(torch.full((3,), float(rank)))
    with hf_zero.GatheredParameters([plain], modifier_rank=1):
        if rank == 1:
            plain.data.fill_(7.0)
    assert plain.tolist() == [7.0] * 3
    with hf_zero.GatheredParameters([plain]):
        assert plain.tolist() == [7.0] * 3


@on_each_rank(RANKS)
def test_disabled_does_nothing(rank, model):
    start(model, adamw(model), config_of(3))
    with (
        hf_zero.GatheredParameters(list(model.parameters()), enabled=False),
        pytest.raises(ReleasedParameterError),
    ):
        model.head.weight.sum()


def test_stage_3_parameters_answer_as_deepspeeds_do():
    def run(rank, model):
        start(model, adamw(model), config_of(3))
        ids = [p.ds_id for p in model.parameters()]
        assert len(set(ids)) == len(ids)
        own = 0
        for name, p in model.named_parameters():
            assert p.ds_shape == whole()[name].shape and p.ds_numel == whole()[name].numel()
            assert p.ds_status.name == "NOT_AVAILABLE"
            assert p.partition_numel() == p.ds_tensor.numel()
            own += p.ds_tensor.numel()
        with hf_zero.GatheredParameters(list(model.parameters())):
            assert {p.ds_status.name for p in model.parameters()} == {"AVAILABLE"}
        return own

    assert sum(on_ranks(RANKS, run)) == sum(p.numel() for p in stack().parameters())


def test_generation_inside_a_context():
    prompt = torch.tensor([[5, 6, 7]])
    want = (
        ARCHITECTURES["gpt2"]
        .build()
        .eval()
        .generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    )

    def run(rank, model):
        engine = start(model, adamw(model), config_of(3))
        with hf_zero.GatheredParameters(list(model.parameters())):
            model.eval()
            made = engine.module.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
            )
        assert torch.equal(made, want)

    on_ranks(RANKS, run, build=ARCHITECTURES["gpt2"].build)


class Foreign(Stack):
    """The last layer multiplies by a weight of the block before it, which is still here then,
    and by one of the first block.
    """

    def body(self, x):
        x = super().body(x)
        return (x @ self.blocks[2].up.weight.t()) @ self.blocks[0].up.weight * 0.1


class Box:
    __slots__ = ("inside",)

    def __init__(self, inside):
        self.inside = inside


class Boxed(Foreign):
    """Gives its output in an object that nobody can look into."""

    def forward(self, x):
        return Box(super().forward(x))


@pytest.mark.turns
@pytest.mark.parametrize("build", [Foreign, Boxed])
@pytest.mark.parametrize(
    "way",
    [
        "one",
        "twice over one graph",
        "two losses",
        "two forwards, first in, first out",
        "two forwards, last in, first out",
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_read_by_other_modules_are_there_for_every_backward(stage, way, build):
    def backwards(net, rank):
        def loss(step):
            out = net(features(step, 0, rank))
            return (out.inside if isinstance(out, Box) else out).pow(2).mean()

        if way.startswith("t") and "graph" in way:
            one = loss(0)
            return [lambda: one.backward(retain_graph=True), lambda: one.backward()]
        if way == "two losses":
            out = net(features(0, 0, rank))
            out = out.inside if isinstance(out, Box) else out
            one, two = out.pow(2).mean(), out.abs().mean()
            return [lambda: one.backward(retain_graph=True), lambda: two.backward()]
        losses = [loss(0)] if way == "one" else [loss(0), loss(1)]
        return [each.backward for each in (reversed(losses) if "last in" in way else losses)]

    plain = seeded(build)
    for rank in range(RANKS):
        for backward in backwards(plain, rank):
            backward()
    want = {name: p.grad / RANKS for name, p in plain.named_parameters()}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        for warm in range(2):
            out = engine(features(warm, 5, rank))
            engine.backward((out.inside if isinstance(out, Box) else out).pow(2).mean())
            engine.zero_grad()
        for backward in backwards(engine, rank):
            backward()
        return full_grads(engine)

    for grads in on_ranks(RANKS, run, build=lambda: seeded(build)):
        oracle.compare_tensors("gradients", grads, want)


def test_ranks_may_run_forwards_apart_while_everything_is_gathered():
    """One rank samples, or samples longer than another: nothing is to be gathered, so nobody
    waits.
    """
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(3))
        for step in range(2):
            with hf_zero.GatheredParameters(model.parameters()), torch.no_grad():
                before = dict(engine.mesh.stats.counts)
                answers = [squared(engine, At(step, 0, rank)) for _ in range(3 * rank)]
                assert dict(engine.mesh.stats.counts) == before
            assert all(torch.equal(answer, answers[0]) for answer in answers)
            run_steps(engine, rank, [step])
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)


RECORDED = {
    "the weight": lambda w, x: (w * w).sum() + (w * x).sum(),
    "a view of it": lambda w, x: (w.t() @ x).pow(2).sum(),
    "a detached copy of its reference": lambda w, x: (w.detach() * x).sum() + w.sum(),
    "its data": lambda w, x: (w.data * x).pow(2).sum(),
}


@pytest.mark.turns
@pytest.mark.parametrize("what", RECORDED)
@pytest.mark.parametrize(
    "how", ["inside", "nested", "enabled inside no_grad", "another of the unit gathered", "twice"]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_recorded_inside_may_go_backward_outside(what, how, frozen):
    def build():
        model = stack()
        model.blocks[1].requires_grad_(not frozen)
        return model

    plain = build().blocks[1].up.weight
    inputs = torch.linspace(-1, 1, plain.numel()).view(plain.shape).requires_grad_()
    times = 2 if how == "twice" else 1
    (RECORDED[what](plain, inputs) * times).backward()

    def run(rank, model):
        engine = start(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05),
            config_of(3),
        )
        weight = model.blocks[1].up.weight
        mine = inputs.detach().clone().requires_grad_()
        asked = [model.blocks[1].down.bias] if how.startswith("another") else [weight]
        with torch.set_grad_enabled("no_grad" not in how), hf_zero.GatheredParameters(asked):
            if how == "nested":
                with hf_zero.GatheredParameters(weight):
                    pass
            with torch.enable_grad():
                loss = RECORDED[what](weight, mine)
        # something else is gathered and released in between
        squared(model, At(0, 0, rank)).detach()
        for number in range(times):
            loss.backward(retain_graph=number + 1 < times)
        assert torch.allclose(mine.grad, inputs.grad, rtol=1e-6)
        if not frozen and plain.grad is not None:
            oracle.compare_tensors(
                "gradient", {"w": hf_zero.safe_get_full_grad(weight)}, {"w": plain.grad}
            )
        del loss
        engine.zero_grad()
        run_steps(engine, rank, [1])
        assert weight.ds_status.name == "NOT_AVAILABLE", "held although nothing reads it"

    on_ranks(RANKS, run, build=build)


@pytest.mark.parametrize("stage", STAGES)
def test_a_penalty_with_a_backward_of_its_own_is_trained_on(stage):
    """No hook of a module sees that backward."""
    model = stack()
    for rank in range(RANKS):
        (squared(model, At(0, 0, rank)) / RANKS).backward()
    model.head.weight.pow(2).sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        engine.backward(squared(engine, At(0, 0, rank)))
        with hf_zero.GatheredParameters(model.head.weight):
            penalty = model.head.weight.pow(2).sum()
        engine.backward(penalty)
        oracle.compare_tensors("gradients", full_grads(engine), want)
        engine.step()

    on_ranks(RANKS, run)


def test_the_engine_of_released_parameters_is_gone():
    def run(rank, model):
        start(model, adamw(model), config_of(3)).destroy()
        with (
            pytest.raises(
                PartitionError,
                match=r"the engine of .* was destroyed and left its parameters sharded; call "
                r"hf_zero\.initialize again",
            ),
            hf_zero.GatheredParameters(model.parameters()),
        ):
            pass

    on_ranks(RANKS, run)
