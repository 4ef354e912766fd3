"""State dicts at every stage, of the engine, the bare model and a submodule; safe_get_full_* and
safe_set_full_*, on every rank. ``torch.distributed.checkpoint.state_dict`` on engines, against the
state dicts of a plain process.
"""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import hf_zero
from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError, PartitionError
from hf_zero.zero.access import local
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start, still_gathered
from tests.helpers.models import ARCHITECTURES, Stack, seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.parts import whole
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import expect

RANKS = 2


def plain_state(build=stack):
    return {name: value.clone() for name, value in build().state_dict().items()}


def scaled(factor=0.75):
    model = stack()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def same(state, want, what=""):
    assert list(state) == list(want), f"{what}: names differ: {set(state) ^ set(want)}"
    for name, value in want.items():
        assert torch.equal(state[name], value), f"{what}: {name}"


PARTS = {"bert": "bert.encoder.layer.0", "gpt2": "transformer", "t5": "encoder"}


@in_turn("stage, name", [(0, "stack"), (2, "t5"), (3, "bert"), (3, "gpt2")])
def test_whole_of_the_engine_the_bare_model_and_submodules(stage, name):
    """On every rank, on the first alone, and parameter by parameter."""
    build = stack if name == "stack" else ARCHITECTURES[name].build
    want, sub = plain_state(build), PARTS.get(name, "blocks.1")

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        same(model.state_dict(), want, "model")
        own = {key: value for key, value in want.items() if key.startswith(sub + ".")}
        part = {key.removeprefix(sub + "."): value for key, value in own.items()}
        same(model.get_submodule(sub).state_dict(), part, sub)
        same(engine.state_dict(rank0_only=False), want, "all ranks")
        on_one = engine.state_dict(rank0_only=True), whole_state_dict(engine, everywhere=False)
        for state in on_one:
            same(state or {}, want if rank == 0 else {}, "rank 0")
        pairs = dict(engine.consolidated())
        assert set(pairs) == {name for name, _ in build().named_parameters()}
        for name, value in pairs.items():
            assert value.device.type == "cpu" and torch.equal(value, want[name]), name

    on_ranks(RANKS, run, build=build)


def hooked():
    """A stack with a wrapper whose hook renames, and hooks that change a value and add one."""

    def double(module, state, prefix, metadata):
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    def add_note(module, state, prefix, metadata):
        state[prefix + "note"] = state[prefix + "head.weight"].sum()

    model = stack()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.head.register_state_dict_post_hook(double)
    model.register_state_dict_post_hook(add_note)
    return model


@in_turn("stage, small", [(0, 0), (2, 0), (3, 0), (3, 10**6)])
def test_hooks_for_state_dicts_change_every_state_dict(stage, small, tmp_path):
    """A file of the whole model has its names, too."""
    want, plain = plain_state(hooked), plain_state()
    assert set(want) == {*plain, "note"}
    frozen = {name for name in plain if name.startswith("blocks.1.")}

    def run(rank, model):
        model.blocks[1].requires_grad_(False)
        zero = {"stage": stage, "stage3_param_persistence_threshold": small}
        engine = start(model, adamw(model), config_of(stage, zero_optimization=zero))
        same(engine.state_dict(), want, "state_dict")
        same(whole_state_dict(engine), want, "everywhere")
        state = engine.state_dict(rank0_only=True)
        assert (state is None) == (rank > 0)
        same(state or want, want, "rank 0")
        trained = {name: value for name, value in want.items() if name not in frozen}
        same(whole_state_dict(engine, exclude_frozen=True), trained, "trained")
        engine.save_16bit_model(str(tmp_path / "whole"), "model.safetensors")
        run_steps(engine, rank, [0])

    on_ranks(RANKS, run, build=hooked)
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == plain.keys()


def partnered():
    """A stack with a hook that asks for the state of a module elsewhere."""

    def add_partner(module, state, prefix, metadata):
        state[prefix + "partner"] = model.blocks[1].state_dict()["up.weight"]

    model = stack()
    model.blocks[0].register_state_dict_post_hook(add_partner)
    return model


@in_turn("stage", (0, 3))
def test_a_hook_may_ask_for_the_state_of_another_module(stage):
    want = plain_state(partnered)

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        for _ in range(2):
            same(engine.state_dict(), want, "with its partner")
        run_steps(engine, rank, [0])

    on_ranks(RANKS, run, build=partnered)


@in_turn("stage, precision", [(0, "bf16"), (1, "fp32"), (3, "bf16")])
def test_loading_into_the_bare_model_is_trained_on(stage, precision):
    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(precision=precision)))
        answer = model.load_state_dict(plain_state(scaled))
        assert not answer.missing_keys and not answer.unexpected_keys
        run_steps(engine, rank, range(2))
        return full_weights(engine)

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS, build=scaled)
    expect(want, run, tolerance=1e-5 if precision == "fp32" else 1e-2)


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_states_of_a_part_bad_ones_and_those_without_what_is_frozen(rank, model, stage):
    """What does not fit is refused by its name and leaves the engine sound."""
    model.blocks[0].requires_grad_(False)
    engine, want = start(model, adamw(model), config_of(stage)), plain_state()
    trained = {k: v for k, v in want.items() if not k.startswith("blocks.0.")}
    state = whole_state_dict(engine, everywhere=False, exclude_frozen=True)
    same(state or {}, trained if rank == 0 else {})
    half = {name: torch.full_like(p, 0.5) for name, p in stack().blocks[2].named_parameters()}
    model.blocks[2].load_state_dict(half)
    want |= {f"blocks.2.{name}": value for name, value in half.items()}
    same(full_weights(engine), want)
    lacking = {name: value for name, value in want.items() if name != "head.bias"}
    for state, said in (
        (lacking, r"head\.bias"),
        (want | {"blocks.0.up.weight": torch.zeros(3, 3)}, r"mismatch for blocks\.0\.up\.weight"),
        (want | {"surplus": torch.zeros(1)}, "surplus"),
    ):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(state)
    answer = model.load_state_dict({"head.bias": torch.ones(5)}, strict=False)
    assert "head.weight" in answer.missing_keys
    want |= {"head.bias": torch.ones(5)}
    state = {
        name: value if stage == 3 else value.clone() for name, value in model.state_dict().items()
    }
    run_steps(engine, rank, [0])
    same(state, want, "a copy survives the training")
    assert not torch.equal(model.state_dict()["head.weight"], state["head.weight"])


class Broken(Exception):
    """Raised by a part of the model."""


def break_off(model, loads):
    """Break a call at one part of the model, twice."""

    def raises(*_):
        raise Broken

    part = model.blocks[1].up
    method = "_load_from_state_dict" if loads else "_save_to_state_dict"
    setattr(part, method, raises)
    for _ in range(2):
        with pytest.raises(Broken):
            model.load_state_dict(plain_state(scaled)) if loads else model.state_dict()
    delattr(part, method)


@in_turn("stage, loads", [(1, True), (3, True), (3, False)])
def test_a_call_that_an_exception_breaks_leaves_no_unit_gathered(stage, loads):
    """What it has loaded before stays, as in a plain model."""

    def partly():
        model = stack()
        break_off(model, loads)
        return model

    def run(rank, model):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = start(model, plain_sgd(model), config_of(stage, zero_optimization=zero))
        break_off(model, loads)
        run_steps(engine, rank, [0])
        assert not still_gathered(engine)
        run_steps(engine, rank, [1])
        break_off(model, loads=False)
        same(model.state_dict(), full_weights(engine))
        assert not still_gathered(engine)
        return full_weights(engine)

    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS, build=partly)
    expect(want, run)


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_weights_of_a_model_in_16_bits(rank, model, stage):
    """Consolidated in 16 bits they are the rounded masters, which are read in fp32."""
    plain = plain_state()
    engine = start(model, adamw(model), config_of(stage, Plan(precision="bf16")))
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        value = hf_zero.safe_get_full_fp32_param(p)
        assert value.dtype == torch.float32 and torch.equal(value, plain[name]), name
    run_steps(engine, rank, [0])
    masters = full_weights(engine)
    state = whole_state_dict(engine, everywhere=False)
    if rank == 0:
        same(state, {name: value.bfloat16() for name, value in masters.items()})
    for name, value in engine.consolidated(dtype=torch.float32):
        assert torch.equal(value, masters[name]), name


@in_turn("stage", (0, 1, 3))
@on_each_rank(RANKS)
def test_values_and_gradients_that_are_set_are_stepped_with(rank, model, stage):
    """A gradient set before the backward would be lost."""
    engine, want = start(model, plain_sgd(model), config_of(stage)), plain_state()
    weight = model.blocks[1].up.weight
    want["blocks.1.up.weight"] *= 0.5
    hf_zero.safe_set_full_fp32_param(weight, hf_zero.safe_get_full_fp32_param(weight) * 0.5)
    assert torch.equal(hf_zero.safe_get_full_fp32_param(weight), want["blocks.1.up.weight"])
    for _ in range(2):
        with pytest.raises(PartitionError, match=r"head\.weight has no gradient yet"):
            hf_zero.safe_set_full_grad(model.head.weight, torch.ones(5, 32))
        engine.backward(squared(engine, At(0, 0, rank)))
        for p in model.parameters():
            hf_zero.safe_set_full_grad(p, torch.full(p.shape, 0.5))
            assert torch.equal(hf_zero.safe_get_full_grad(p), torch.full(p.shape, 0.5))
        engine.step()
        want = {name: value - 0.05 * 0.5 for name, value in want.items()}
        oracle.compare_tensors("weights", full_weights(engine), want)


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_gradients_in_fp16_are_set_under_a_loss_scale(rank, model, stage):
    """Of which the product with one overflows in fp16."""
    engine = start(model, plain_sgd(model), config_of(stage, Plan(precision="fp16")))
    before = full_weights(engine)
    engine.backward(squared(engine, At(0, 0, rank), torch.float16))
    for p in model.parameters():
        hf_zero.safe_set_full_grad(p, torch.full(p.shape, 2.0, dtype=torch.float16))
    part = local.safe_get_local_grad(model.head.weight)
    assert part is not None
    local.safe_set_local_grad(model.head.weight, torch.full_like(part, 2, dtype=torch.float16))
    engine.step()
    assert not engine.skipped_steps
    want = {name: value - 0.05 * 2 for name, value in before.items()}
    oracle.compare_tensors("weights", full_weights(engine), want)


def gradients_of_a_step():
    model = stack()
    for rank in range(RANKS):
        (squared(model, At(0, 0, rank)) / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_optimizer_state_is_read_and_set(rank, model, stage):
    gradients = gradients_of_a_step()
    read = hf_zero.safe_get_full_optimizer_state
    engine, named = start(model, adamw(model), config_of(stage)), dict(model.named_parameters())
    run_steps(engine, rank, [0])
    first = {name: read(p, "exp_avg") for name, p in named.items()}
    second = {name: read(p, "exp_avg_sq") for name, p in named.items()}
    oracle.compare_tensors("first", first, {name: 0.1 * g for name, g in gradients.items()})
    squares = {name: 0.001 * g.square() for name, g in gradients.items()}
    oracle.compare_tensors("second", second, squares)
    p, half = named["blocks.2.down.weight"], torch.full((32, 64), 0.5)
    hf_zero.safe_set_full_optimizer_state(p, half, "exp_avg")
    assert torch.equal(read(p, "exp_avg"), half)
    assert torch.equal(read(named["head.weight"], "exp_avg"), first["head.weight"])


def test_parameters_that_no_engine_owns():
    p = nn.Parameter(torch.arange(3.0))
    assert hf_zero.safe_get_full_fp32_param(p).tolist() == [0, 1, 2]
    assert hf_zero.safe_get_full_grad(p) is None
    p.grad = torch.ones(3)
    assert hf_zero.safe_get_full_grad(p).tolist() == [1, 1, 1]
    hf_zero.safe_set_full_fp32_param(p, torch.zeros(3))
    assert p.tolist() == [0, 0, 0]


SAVED_AFTER, STEPS = 2, 4


def small():
    return seeded(lambda: Stack(1))


def split(kind, first, second):
    """An optimizer with a group of matrices and one of vectors."""

    def make(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        return kind([{"params": matrices, **first}, {"params": vectors, **second}])

    return make


DECAYS: Any = {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.1}, {"lr": 1e-3, "eps": 1e-6}
OPTIMIZERS: dict[str, Any] = {
    "two groups": split(torch.optim.AdamW, *DECAYS),
    "AMSGrad in one": split(torch.optim.AdamW, DECAYS[0], {**DECAYS[1], "amsgrad": True}),
    "momentum in one": split(torch.optim.SGD, {"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}),
    "no state": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "numbers that begin at 1": lambda model: torch.optim.NAdam(model.parameters(), eps=1e-6),
    "states that begin at 1": lambda model: torch.optim.Adagrad(
        model.parameters(), initial_accumulator_value=1.0
    ),
}
WHOLE = {"full_state_dict": True}
OF_RANK0 = {**WHOLE, "cpu_offload": True, "broadcast_from_rank0": True}


def plain(kind):
    """The optimizer's state dict of a plain process after SAVED_AFTER steps; weights at the end."""
    kept: list[Any] = []

    def after(step, model, optimizer):
        if step == SAVED_AFTER - 1:
            state = get_optimizer_state_dict(model, optimizer)["state"]
            kept.append({n: {k: v.clone() for k, v in s.items()} for n, s in state.items()})

    windows = [[(1.0, 0)]] * STEPS
    ended, _ = by_hand(OPTIMIZERS[kind], windows, RANKS, after_step=after, build=small)
    return kept[0], ended


def resumed(rank, kind, stage, steps, given, options=None):
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = start(model, OPTIMIZERS[kind](model), config_of(stage))
    set_optimizer_state_dict(model, engine.optimizer, given[1], options=options)
    set_model_state_dict(model, given[0], options=options)
    run_steps(engine, rank, range(steps, STEPS))
    return full_weights(engine)


@in_turn(
    "kind, stage, after, given",
    [
        *((kind, (0, 3)[turn % 2], SAVED_AFTER, {}) for turn, kind in enumerate(OPTIMIZERS)),
        ("momentum in one", 3, 0, {}),
        ("two groups", 3, SAVED_AFTER, {"flatten_optimizer_state_dict": True}),
        ("two groups", 0, SAVED_AFTER, WHOLE),
        ("two groups", 3, SAVED_AFTER, OF_RANK0),
    ],
)
def test_states_are_those_of_torch_and_training_goes_on(kind, stage, after, given):
    want, ended = plain(kind)
    options = StateDictOptions(**given)

    def run(rank, model):
        engine = start(model, OPTIMIZERS[kind](model), config_of(stage))
        run_steps(engine, rank, range(after))
        state = get_state_dict(model, engine.optimizer, options=options)
        if options.broadcast_from_rank0 and rank:
            assert not state[1]
            state = {}, {}
        else:
            first = next(iter(state[0].values()))
            assert isinstance(first, TensorPart) is not options.full_state_dict
        return state[1].get("state"), resumed(rank, kind, stage, after, state, options)

    found = on_ranks(RANKS, run, build=small)
    compare_tensors("weights", found[0][1], ended)
    for name, states in want.items() if after and not given else ():
        every = [each[0][name] for each in found]
        assert every[0].keys() == states.keys(), name
        joined = {
            key: whole([each[key] for each in every]) if value.dim() else every[0][key]
            for key, value in states.items()
        }
        compare_tensors(name, joined, states)


@in_turn("stage, parts", [(0, "weights"), (3, "both"), (3, "states")])
@on_each_rank(RANKS)
def test_other_ranks_give_nothing(rank, stage, parts):
    """``set_state_dict`` with what rank 0 has, and empty state dicts on the other."""
    options = StateDictOptions(**OF_RANK0)

    def opened(steps):
        model = small()
        engine = start(model, adamw(model), config_of(stage))
        run_steps(engine, rank, range(steps))
        state = get_state_dict(model, engine.optimizer, options=options)
        return model, engine.optimizer, state

    _, _, (weights, states) = opened(SAVED_AFTER)
    model, optimizer, before = opened(0)
    given = {
        "model_state_dict": weights if rank == 0 and parts != "states" else {},
        "optim_state_dict": states if rank == 0 and parts != "weights" else {},
    }
    set_state_dict(model, optimizer, **given, options=options)
    found = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        compare_tensors("weights", found[0], before[0] if parts == "states" else weights)
        want = before[1] if parts == "weights" else states
        for name, state in want["state"].items():
            compare_tensors(name, found[1]["state"][name], state)


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, small)
def test_groups_are_found_by_their_parameters(rank, model, stage):
    engine = start(model, split(torch.optim.AdamW, *DECAYS)(model), config_of(stage))
    options = StateDictOptions(**WHOLE)
    given = get_optimizer_state_dict(model, engine.optimizer, options=options)
    given["param_groups"].reverse()
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    set_optimizer_state_dict(model, engine.optimizer, given)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [2e-3, 1e-3]
    given["param_groups"] = [{**group, "lr": 1.0} for group in given["param_groups"]]
    given["param_groups"][0]["params"] += given["param_groups"][1]["params"][:1]
    given["param_groups"][1]["params"][:1] = []
    with pytest.raises(CheckpointError, match=r"are in groups 0, 1 .* whose settings differ"):
        set_optimizer_state_dict(model, engine.optimizer, given)
    given["param_groups"] = []
    with pytest.raises(CheckpointError, match="no group with"):
        set_optimizer_state_dict(model, engine.optimizer, given)


WRONG: list[Any] = [
    (lambda s: s.update({"head.weight": torch.zeros(32, 5)}), r"head\.weight.*shape \(32, 5\)"),
    (lambda s: s.update({"head.weight": torch.zeros(160)}), r"head\.weight.*shape \(160,\)"),
    (lambda s: s.update({"head.bias": torch.ones(1)}), r"head\.bias.*shape \(1,\)"),
    (lambda s: s.update({"head.bias": None}), r"head\.bias: None"),
    (lambda s: s.update({"head.bias": torch.ones(5, device="meta")}), "without data"),
    (lambda s: s.update({"count": torch.ones(2)}), r"count.*buffer of shape \(1,\)"),
    (lambda s: s.pop("head.bias"), r"lacks head\.bias and has nothing"),
    (lambda s: s.update({"other": torch.ones(1)}), "lacks nothing and has other"),
]
# whether they are taken, and the step counts of head.bias then, where strict is False
WRONG_STATE: list[Any] = [
    (lambda s: s["state"].pop("head.bias"), r"lacks head\.bias\.exp_avg", 2),
    (lambda s: s["state"]["head.bias"].pop("exp_avg"), r"lacks head\.bias\.exp_avg and", 1),
    (lambda s: s["state"]["head.bias"].pop("step"), r"lacks head\.bias\.step", 2),
    (lambda s: s["state"]["head.bias"].update(other=torch.ones(5)), r"has head\.bias\.other", 1),
    (lambda s: s["state"]["head.bias"].update(exp_avg=torch.ones(1)), r"bias\.exp_avg: .*\(1,", 0),
    (lambda s: s.pop("param_groups"), "lacks param_groups", 0),
]


def counting():
    model = small()
    model.register_buffer("count", torch.zeros(1))
    return model


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, counting)
def test_weights_that_do_not_fit_are_refused_before_a_write(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    want = full_weights(engine)
    for change, message in WRONG:
        given = {name: value * 2 for name, value in want.items()} | {"count": torch.ones(1)}
        change(given)
        with pytest.raises(CheckpointError, match=message):
            set_model_state_dict(model, given)
        compare_tensors(message, full_weights(engine), want, 0.0, 0.0)
    run_steps(engine, rank, [0])


@on_each_rank(RANKS)
def test_states_that_do_not_fit_are_refused(rank):
    for change, message, count in WRONG_STATE:
        model = small()
        engine = start(model, adamw(model), config_of(3))
        run_steps(engine, rank, [0])
        options = StateDictOptions(**WHOLE)
        given = get_optimizer_state_dict(model, engine.optimizer, options=options)
        change(given)
        with pytest.raises(CheckpointError, match=message):
            set_optimizer_state_dict(model, engine.optimizer, given)
        if count:
            run_steps(engine, rank, [1])
            lax = StateDictOptions(strict=False)
            set_optimizer_state_dict(model, engine.optimizer, given, options=lax)
            states = get_optimizer_state_dict(model, engine.optimizer)["state"]
            assert states["head.weight"]["step"] == 1 and states["head.bias"]["step"] == count
        run_steps(engine, rank, [2])


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, small)
def test_parts_of_models(rank, model, stage):
    want = {n: p.detach().clone() for n, p in model.blocks[0].named_parameters()}
    engine = start(model, adamw(model), config_of(stage))
    compare_tensors("part", get_model_state_dict(model.blocks[0]), want, 0.0, 0.0)
    around = nn.ModuleDict({"inner": model, "extra": nn.Linear(2, 2)})
    names = {name for name, _ in around.named_parameters()}
    assert get_model_state_dict(around).keys() == names
    with pytest.raises(CheckpointError, match=r"pass engine\.module"):
        get_optimizer_state_dict(model.blocks[0], engine.optimizer)
    with pytest.raises(CheckpointError, match=r"pass engine\.optimizer"):
        get_optimizer_state_dict(model, torch.optim.SGD(model.parameters(), 0.1))


class Noted(nn.Module):
    """Tied weights, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


@in_turn("stage", [0, 3])
@on_each_rank(RANKS, lambda: seeded(Noted))
def test_tied_names_and_extra_state(rank, model, stage):
    engine = start(model, adamw(model), config_of(stage))
    assert get_model_state_dict(model).keys() == Noted().state_dict().keys()
    given = {**full_weights(engine), "_extra_state": "saved"}
    given["second.weight"] = given.pop("first.weight") * 2  # under one of its names
    set_model_state_dict(model, given)
    assert model.note == "saved"
    assert torch.equal(full_weights(engine)["first.weight"], given["second.weight"])
