"""Momenta in one bit: ranks that are threads do what the equations say, bit for bit, those of LAMB
to a tolerance. Dense steps
before the freeze, overflows and other ranks are rows of ``test_capabilities.py``.
"""

import copy

import pytest
import torch

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from hf_zero.zero.access.local import safe_get_local_fp32_param, safe_set_local_fp32_param
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.compressed import Recorder, flat_of, sent_bytes
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import same
from tests.helpers.one_bit import (
    ADAM,
    BLOCK,
    FREEZE,
    LAMB,
    RARE,
    C,
    WholeLamb,
    check,
    config,
    inverses,
    joined,
    nbytes,
    one_bit_steps,
    state_of,
    trained,
)
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan

LR = 1e-3
KINDS = {
    "1-bit Adam": (OneBitAdam, {**ADAM, "freeze_step": FREEZE}),
    "1-bit LAMB": (OneBitLamb, {**LAMB, "freeze_step": 4}),
    "0/1 Adam": (ZeroOneAdam, {**ADAM, "var_freeze_step": 12, "var_update_scaler": 2}),
    "local steps": (ZeroOneAdam, {**ADAM, **RARE}),
}
AT_ONE = {"min_coeff": 1.0, "max_coeff": 1.0}  # LAMB's ratios


def opened(model, kind="1-bit Adam", plan=None, stage=1, **more):
    cls, settings = KINDS[kind]
    return start(model, cls(model.parameters(), **{**settings, **more}), config(plan, stage))


def square():
    return torch.nn.Linear(32, 32, bias=False)


def moved_by(engine, gradients, usual):
    """The move of the one weight in each step of equal ``gradients``, as ``usual`` sees it."""
    weight, moves = engine.module.weight, []
    for gradient in gradients:
        before = weight.detach().clone()
        engine.backward(weight.sum() * gradient)
        engine.step()
        moves.append(float(usual(weight.detach() - before)) / LR)
    return moves


@in_turn(("stage", "ranks", "plan"), [(2, 3, Plan(precision="bf16", accumulation=2))])
def test_steps_are_those_of_the_equations(stage, ranks, plan):
    """Bit for bit: weights, averages and errors, from what autograd has left on each rank."""
    check(on_ranks(ranks, trained, plan, stage), plan)


@in_turn(
    ("kind", "ranks", "precision", "at"),  # the number of steps before the save
    [
        ("1-bit Adam", 2, "fp32", 7),
        ("1-bit LAMB", 2, "bf16", 7),
        ("0/1 Adam", 2, "fp32", 9),  # after a step in one bit
        ("local steps", 2, "bf16", 9),
    ],
)
def test_a_resumed_run_goes_on_as_the_saved_one(kind, ranks, precision, at, tmp_path):
    """Bit for bit on as many ranks: a save brings what ranks have yet to send to the owners. On
    others, and at another stage, a load brings the state of the optimizer as it was saved.
    """
    plan = Plan(precision=precision, clip=0.5)

    def run(rank, model, resumes):
        engine, states = opened(model, kind, plan), []
        # ends between two synchronizations, and in momenta of its own
        run_steps(engine, rank, range((9 if kind == "local steps" else 2) if resumes else at))
        if resumes:
            engine.load_checkpoint(tmp_path, tag="saved")
            loaded = state_of(engine)
            engine.save_checkpoint(tmp_path, tag="again")
            for key, each in state_of(engine).items():
                assert torch.equal(each["average"], loaded[key]["average"])
        else:
            assert kind != "local steps" or one_bit_steps(engine)._local.pending
            assert kind != "0/1 Adam" or not engine.optimizer.is_dense(at)
            states.append(state_of(engine))
            engine.save_checkpoint(tmp_path, tag="saved")
            states.append(state_of(engine))
            states.append(whole_state(model))
        before, variance = full_weights(engine), state_of(engine)
        run_steps(engine, rank, range(at, max(at + 3, 13 if kind == "0/1 Adam" else 0)))
        if kind == "0/1 Adam":  # renewed in step 12
            for key, each in state_of(engine).items():
                assert not torch.equal(each["variance"], variance[key]["variance"])
        return before, full_weights(engine), states

    saved = on_ranks(ranks, run, False)
    for wanted, found in zip(saved, on_ranks(ranks, run, True)):
        same(found[0], wanted[0], exact=True)
        same(found[1], wanted[1], exact=True)
    if kind != "local steps":
        keeps_what_is_wanted([answer[2][:2] for answer in saved])

    def elsewhere(rank, model):
        engine = opened(model, kind, plan, stage=2)
        engine.load_checkpoint(tmp_path, tag="saved")
        return whole_state(model)

    for found in on_ranks(ranks + 1, elsewhere):
        same(found, saved[0][2][2], exact=True)


def whole_state(model):
    """The state of each parameter, gathered from all ranks."""
    return {
        f"{name} {key}": hf_zero.safe_get_full_optimizer_state(p, key).clone()
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


def keeps_what_is_wanted(states):
    """b1 a + E, with a the average and E the mean of the errors, is after a save what it was."""
    beta = ADAM["betas"][0]
    for key in states[0][0]:

        def whole(at, key=key):
            return beta * torch.cat([each[at][key]["average"] for each in states]).double()

        errors = sum(before[key]["error"].double() for before, _ in states) / len(states)
        assert errors.any() and not any(after[key]["error"].any() for _, after in states)
        torch.testing.assert_close(whole(1), whole(0) + errors, rtol=1e-5, atol=1e-6)


@in_turn("kind", ["1-bit Adam", "local steps"])
def test_an_overflow_on_one_rank_leaves_what_is_yet_to_be_sent(kind):
    """Also in a local step."""
    plan = Plan(precision="fp16", scale=16.0)

    def run(rank, model):
        engine = opened(model, kind, plan)
        run_steps(engine, rank, range(9))
        one_bit, before = one_bit_steps(engine), state_of(engine)
        local = list(one_bit._local._of.values()) if kind == "local steps" else []
        moved = [each._displacement.clone() for each in local]
        assert bool(moved) == (kind == "local steps") and (not moved or one_bit._local.pending)
        loss = squared(engine, At(9, 0, rank), plan.dtype)
        engine.backward(loss * (1e9 if rank == 1 else 1.0))
        engine.step()
        assert not engine.was_step_applied()
        assert all(torch.equal(each._displacement, was) for each, was in zip(local, moved))
        for key, state in state_of(engine).items():
            for name, value in state.items():
                if name != "layout" and value is not None:
                    assert torch.equal(value, before[key][name]), (key, name)
        run_steps(engine, rank, range(10, 13))
        assert engine.was_step_applied()
        return full_weights(engine)

    one, other = on_ranks(2, run)
    same(other, one, exact=True)


@in_turn("kind, precision", [("1-bit Adam", "bf16"), ("local steps", "fp32")])
def test_writes_between_steps_count(precision, kind):
    """To whole parameters, to master weights, and to a rank's own part."""
    plan, at = Plan(precision=precision), 9 if kind == "local steps" else 5

    def run(rank, model):
        engine = opened(model, kind, plan, lr=1e-4)
        run_steps(engine, rank, range(at))
        weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        seen = []
        model.blocks[0].register_forward_pre_hook(
            lambda *given: seen.append(weight.detach().float().clone())
        )
        with torch.no_grad():
            weight.fill_(0.5)
        run_steps(engine, rank, [at])
        assert torch.allclose(seen[0], torch.tensor(0.5), atol=0.01)
        hf_zero.safe_set_full_fp32_param(other, torch.full(other.shape, 0.25))
        run_steps(engine, rank, range(at + 1, at + 4))
        found = full_weights(engine)
        if kind != "local steps":
            own = safe_get_local_fp32_param(other)
            safe_set_local_fp32_param(other, torch.full_like(own, 1.0 + rank))
            run_steps(engine, rank, [at + 4])
        return found, full_weights(engine), weight.clone(), other.clone()

    answers = on_ranks(2, run)
    for found, later, weight, other in answers:
        assert torch.allclose(found["blocks.0.up.weight"], torch.tensor(0.5), atol=0.01)
        assert torch.allclose(found["blocks.1.up.weight"], torch.tensor(0.25), atol=0.01)
        if kind != "local steps":
            halves = later["blocks.1.up.weight"].reshape(-1)
            assert {round(float(value)) for value in halves} <= {1, 2}
        assert torch.equal(other, answers[0][3]) and torch.equal(weight, answers[0][2])


@in_turn("kind, stage", [("1-bit Adam", 0), ("1-bit Adam", 1), ("1-bit LAMB", 1), ("0/1 Adam", 0)])
def test_a_hook_after_a_step_that_writes_to_the_groups_acts_at_once(kind, stage):
    """In dense steps and those in one bit, as the same write to the model between two steps."""

    def run(rank, model, hooked):
        engine = opened(model, kind, stage=stage, lr=1e-3)

        def decays(*_):
            with torch.no_grad():
                for parameter in (
                    engine.optimizer.param_groups[0]["params"] if hooked else model.parameters()
                ):
                    parameter.mul_(0.97)

        if hooked:
            engine.optimizer.register_step_post_hook(decays)
        losses = run_steps(engine, rank, range(8), after=lambda _: hooked or decays())
        return [*map(float, losses)], full_weights(engine)

    for wanted, found in zip(on_ranks(2, run, False), on_ranks(2, run, True)):
        assert found[0] == wanted[0]
        same(found[1], wanted[1], exact=True)


def test_a_hook_that_writes_to_the_groups_in_a_local_step_acts_when_ranks_synchronize():
    """Steps 9 to 11 are local; step 12 makes the weights of the ranks equal again."""

    def run(rank, model):
        engine = opened(model, "local steps", lr=1e-4)
        before = run_steps(engine, rank, range(8)) and full_weights(engine)

        def halves(*_):
            with torch.no_grad():
                for parameter in engine.optimizer.param_groups[0]["params"]:
                    parameter.mul_(0.5)

        hook = engine.optimizer.register_step_post_hook(halves)
        run_steps(engine, rank, [8])
        assert one_bit_steps(engine)._local.pending
        hook.remove()
        run_steps(engine, rank, range(9, 13))
        return before, full_weights(engine)

    answers = on_ranks(2, run)
    for before, found in answers:
        same(found, answers[0][1], exact=True)
        for name, weight in found.items():
            torch.testing.assert_close(weight, before[name] * 0.5, rtol=0.05, atol=0.005)


@on_each_rank(2)
def test_unused_and_frozen_parameters_stay(rank, model):
    """An unused one keeps weights, average and errors. Gradients are not averaged yet: refused."""
    model.blocks[1].up.weight.requires_grad_(False)
    engine = opened(model)
    run_steps(engine, rank, range(5))
    frozen, left = model.blocks[1].up.weight.clone(), model.blocks[0].up.weight
    before, state = left.clone(), state_of(engine)
    engine.backward(squared(engine, At(5, 0, rank)))
    assert engine.gradient_norm() > 0.0
    with pytest.raises(PartitionError, match="not averaged over the ranks while"):
        hf_zero.safe_get_full_grad(left)
    left.grad = None
    engine.step()
    assert torch.equal(left, before) and torch.equal(model.blocks[1].up.weight, frozen)
    name = "blocks.0.up.weight"
    (key,) = [key for key, each in state.items() if name in each["layout"].by_name]
    slot, after = state[key]["layout"].by_name[name], state_of(engine)[key]
    own = slice(slot.offset, slot.end)
    for what in ("error", "full"):
        assert torch.equal(after[what][own], state[key][what][own])
    assert not torch.equal(after["full"], state[key]["full"])
    run_steps(engine, rank, range(6, 8))
    assert not torch.equal(left, before)


def without(engine, rank, numbers, unused):
    """Steps in which parameters have no gradient before the step that ``unused`` names."""
    for number in numbers:
        engine.backward(squared(engine, At(number, 0, rank)))
        for name, parameter in engine.module.named_parameters():
            if number < unused.get(name, 0):
                parameter.grad = None
        engine.step()
    return full_weights(engine)


@in_turn("at", [2, FREEZE])
def test_an_engine_goes_back_to_before_a_parameter_was_used(at, tmp_path):
    """Its first state comes in a dense step or in the first in one bit, as it did before."""
    unused = {"blocks.1.down.weight": at}

    def run(rank, model):
        engine = opened(model)
        without(engine, rank, range(at), unused)
        engine.save_checkpoint(tmp_path)
        wanted = without(engine, rank, range(at, 6), unused)
        engine.load_checkpoint(tmp_path)
        return wanted, without(engine, rank, range(at, 6), unused)

    for wanted, found in on_ranks(3, run):  # the second has parts of both matrices of a block
        same(found, wanted, exact=True)


@in_turn(
    ("cls", "more", "least"),
    [(OneBitAdam, {}, 3.9), (OneBitLamb, {**AT_ONE, "bias_correction": False}, 1.5)],
)
def test_gradients_that_outgrow_the_frozen_variance_do_not_make_huge_steps(
    cls, more, least, caplog, tmp_path
):
    """A block moves by 4 learning rates at most (LAMB: times its ratio); rank 0 says so, once."""
    caplog.clear()
    usual = 1.0 if more.get("bias_correction", True) else (1.0 - 0.999**5) ** -0.5
    settings = {"lr": LR / usual, "weight_decay": 0.0, "freeze_step": 5, **more}

    def run(rank, model, growth, first=0, last=25):
        engine = start(model, cls(model.parameters(), **settings), config())
        if first:
            engine.load_checkpoint(tmp_path)
        gradients = [growth if number >= 8 else 1.0 for number in range(first, last)]
        moves = moved_by(
            engine, gradients, lambda change: change.view(-1, BLOCK).square().mean(-1).sqrt().max()
        )
        if last == 20:
            engine.save_checkpoint(tmp_path)
        return moves

    assert max(on_ranks(2, run, 1.5, build=square)[0]) < 1.5
    assert "outgrown" not in caplog.text
    moves = on_ranks(2, run, 1000.0, build=square)[0]
    assert least < max(moves) < 4.001
    assert caplog.text.count("momenta have outgrown the variance that step 5 froze") == 1
    on_ranks(2, run, 1000.0, 0, 20, build=square)
    assert on_ranks(2, run, 1000.0, 20, build=square)[0] == pytest.approx(moves[20:], rel=0.02)


def test_bytes_of_every_message(monkeypatch):
    """At the process group: after the freeze a fifteenth of dense bf16, up and down."""
    sent, plan = sent_bytes(monkeypatch), Plan(precision="bf16")

    def run(rank, model):
        optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=2)
        engine = start(model, optimizer, config_of(1, plan))
        run_steps(engine, rank, range(3))
        sent.pop(rank, None)
        run_steps(engine, rank, range(3, 4))
        return [flat.layout for flat in engine.flats if flat.spec.momentum_blocks], sent[rank]

    for layouts, found in on_ranks(2, run, build=lambda: seeded(lambda: Stack(3, 256))):
        wanted = [2 * nbytes(each, 2048) for each in layouts]
        up = sorted(size for name, size in found if name == "all_to_all_single")
        assert up == sorted(wanted)
        down = {size for name, size in found if name.startswith("all_gather")}
        assert set(up) <= down
        dense = sum(4 * each.padded for each in layouts)
        assert 2 * sum(up) <= dense / 15


def test_zero_one_adam_renews_its_variance_ever_more_rarely():
    optimizer = ZeroOneAdam(
        [torch.nn.Parameter(torch.zeros(2))], var_freeze_step=40, var_update_scaler=4
    )
    dense = [step for step in range(1, 80) if optimizer.is_dense(step)]
    assert dense == [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40]


def test_what_is_logged(caplog):
    """The freeze, once; where the rate still rises then; and that nothing travels in one bit."""
    caplog.set_level("INFO", "hf_zero")

    def run(rank, model, cls, **more):
        optimizer = cls(model.parameters(), **ADAM, **more)
        engine = start(model, optimizer, config())
        for number in range(7):
            optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1)
            run_steps(engine, rank, range(number, number + 1))

    on_ranks(2, lambda *args: run(*args, OneBitAdam, freeze_step=3))
    assert caplog.text.count("step 4: momenta travel in 1 bit (blocks of 64): ") == 1
    assert caplog.text.count("while the learning rate still rises") == 1
    caplog.clear()
    on_ranks(2, lambda *args: run(*args, ZeroOneAdam, var_freeze_step=6, var_update_scaler=2))
    assert caplog.text.count("momenta travel in 1 bit") == 1
    assert "still rises" not in caplog.text
    for ranks, why in ((1, "one rank"), (2, "no matrix has a block")):
        on_ranks(
            ranks,
            lambda rank, model: start(model, OneBitAdam(model.parameters()), config_of(1)),
            build=lambda: torch.nn.Linear(4, 4),
        )
        assert caplog.text.count(f"nothing travels in 1 bit ({why}") == 1


@in_turn("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_a_state_dict_in_one_bit_is_of_one_step(cls):
    """Its variance is that of its step count, as in a checkpoint, and taking it changes nothing."""
    more = {"var_freeze_step": 3} if cls is ZeroOneAdam else {"freeze_step": 3}

    def run(rank, model):
        built = cls(model.parameters(), lr=LR, **more)
        engine = start(model, built, config())
        run_steps(engine, rank, range(8))
        weight = next(p for p in model.parameters() if p.dim() > 1)
        taken = copy.deepcopy(built.state_dict())
        shown = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        sends = [flat for flat in engine.flats if flat.spec.momentum_blocks is not None]
        held = [engine.bound.state.tensors(flat.optimizer_shard)["exp_avg_sq"] for flat in sends]
        before = [variance.clone() for variance in held]
        run_steps(engine, rank, [8])
        assert held and all(map(torch.equal, before, held))
        frozen = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        engine.optimizer_step.complete_state()  # what a save does
        saved = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        correction = (1 - 0.999**8) / (1 - 0.999**9)
        torch.testing.assert_close(frozen, saved)
        torch.testing.assert_close(shown, saved * correction)
        return taken["param_groups"][0]["frozen_at"]

    assert on_ranks(2, run, build=lambda: seeded(lambda: Stack(3, 64))) == [8, 8]


LAMB_FREEZE, LAMB_STEPS = 4, 7


def lamb_state(engine):
    found, held = state_of(engine), engine.bound.state.tensor_state.by_parameter()
    for each in one_bit_steps(engine)._momenta:
        mine, names = found[each.flat.key], each.flat.layout.by_name
        mine["ratios"] = {name: float(held[name]["ratio"]) for name in names if name in held}
        mine["factors"] = each._scales[1].tolist()
        fresh = engine.bound.state.tensors(each.flat.optimizer_shard).get("exp_avg_sq_fresh")
        mine["fresh"] = None if fresh is None else fresh.clone()
    return found


@in_turn(("ranks", "plan", "decay"), [(3, Plan(precision="bf16"), 0.1)])
def test_steps_of_lamb_are_those_of_its_equations(ranks, plan, decay):
    settings = {**LAMB, "weight_decay": decay}

    def run(rank, model):
        optimizer = OneBitLamb(model.parameters(), **settings, freeze_step=LAMB_FREEZE)
        engine = start(model, optimizer, config(plan))
        record, seen = Recorder(model), []
        for number in range(LAMB_STEPS):
            record.micro.clear()
            record.begin()
            run_steps(engine, rank, [number])
            norm = engine.get_global_grad_norm()
            seen.append((dict(record.micro[0]), lamb_state(engine), norm))
        return seen

    answers = on_ranks(ranks, run)
    moved, at = 0, LAMB_FREEZE - 1
    for key, first in answers[0][0][1].items():
        layout, average = first["layout"], joined(answers, at, key, "average")
        # as the freeze has raised it
        variance = joined(answers, LAMB_FREEZE, key, "variance")
        assert bool((variance >= joined(answers, at, key, "variance")).all())
        whole = WholeLamb(
            layout,
            joined(answers, at, key, "master"),
            average,
            # LAMB's denominators are not corrected for their start at zero
            inverses(joined(answers, at, key, "variance"), layout, 0.0, LAMB["eps"], 1),
            C(average, layout),
            [torch.zeros(layout.padded) for _ in range(ranks)],
            LAMB["lr"],
            decay,
            LAMB["betas"][0],
            variance,
            variance.clone(),
            {k: v for answer in answers for k, v in answer[at][1][key]["ratios"].items()},
            dict.fromkeys(layout.by_name, 1.0),
            LAMB["betas"][1],
            LAMB["eps"],
            LAMB_FREEZE,
        )
        for number in range(LAMB_FREEZE, LAMB_STEPS):
            full = answers[0][number][1][key]["full"]
            grads = [flat_of(layout, answer[number][0], full.dtype).float() for answer in answers]
            norm = answers[0][number][2]
            whole.step(grads, number + 1, max(1.0, (norm + 1e-6) / plan.clip) if plan.clip else 1.0)
            for name, wanted in (
                ("average", whole.average),
                ("fresh", whole.fresh),
                ("variance", variance),
                ("master", whole.weights),
            ):
                got = joined(answers, number, key, name)[: layout.end]
                torch.testing.assert_close(got, wanted[: layout.end], rtol=1e-3, atol=1e-5)
            for answer in answers:
                mine = answer[number][1][key]
                assert mine["factors"] == pytest.approx(list(whole.factors.values()), rel=1e-3)
                assert torch.equal(mine["full"], full)
                moved += sum(factor != 1.0 for factor in mine["factors"])
    assert moved


@in_one_item(
    [
        ({"freeze_step": 0}, "freeze_step"),
        ({"betas": (0.0, 0.9)}, "needs a first one in"),
        ({"coeff_beta": 1.0}, "coeff_beta"),
        ({"factor_min": 5.0}, "factor_min"),
        ({"factor_threshold": 0.0}, "factor_threshold"),
        ({"max_coeff": 0.1, "min_coeff": 0.2}, "min_coeff"),
    ]
)
def test_settings_outside_their_range(case):
    settings, message = case
    with pytest.raises(ValueError, match=message):
        OneBitLamb([torch.nn.Parameter(torch.zeros(2))], **settings)
