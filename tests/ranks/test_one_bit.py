"""Momenta in one bit: ranks that are threads do what the equations say, bit for bit, and before the
freeze what AdamW does.
"""

import copy

import pytest
import torch

import hf_zero
from hf_zero.optim import Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from hf_zero.optim.adam_lion import Adam
from hf_zero.zero.access.local import safe_get_local_fp32_param, safe_set_local_fp32_param
from tests.helpers.cells import fast
from tests.helpers.compressed import Recorder, flat_of
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import same
from tests.helpers.one_bit import (
    ADAM,
    BLOCK,
    FREEZE,
    LAMB,
    RARE,
    check,
    config,
    nbytes,
    one_bit_steps,
    state_of,
    trained,
)
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan

# (class, settings, what it is before its first step in one bit)
KINDS = {
    "1-bit Adam": (OneBitAdam, {**ADAM, "freeze_step": FREEZE}, torch.optim.AdamW),
    "1-bit LAMB": (OneBitLamb, {**LAMB, "freeze_step": 4}, Lamb),
    "0/1 Adam": (
        ZeroOneAdam,
        {**ADAM, "var_freeze_step": 12, "var_update_scaler": 2},
        torch.optim.AdamW,
    ),
    "local steps": (ZeroOneAdam, {**ADAM, **RARE}, torch.optim.AdamW),
}


def opened(model, kind="1-bit Adam", plan=None, **more):
    cls, settings, _ = KINDS[kind]
    return start(model, cls(model.parameters(), **{**settings, **more}), config(plan))


@pytest.mark.parametrize(
    ("kind", "ranks", "precision"),
    [
        ("1-bit Adam", 1, "fp32"),
        ("1-bit Adam", 2, "bf16"),
        ("1-bit Adam", 3, "fp32"),
        ("1-bit LAMB", 2, "fp32"),
        *(
            pytest.param("1-bit Adam", ranks, precision, marks=pytest.mark.long)
            for ranks, precision in ((1, "bf16"), (2, "fp32"), (3, "bf16"))
        ),
        pytest.param("1-bit LAMB", 1, "fp32", marks=pytest.mark.long),
    ],
)
def test_before_the_freeze_it_is_the_dense_optimizer(kind, ranks, precision):
    plan = Plan(precision=precision, accumulation=2, clip=0.3)
    cls, settings, dense = KINDS[kind]
    shared = {name: value for name, value in settings.items() if name != "freeze_step"}

    def run(rank, model, kind, **more):
        engine = start(model, kind(model.parameters(), **shared, **more), config(plan))
        run_steps(engine, rank, range(4), 2)
        return full_weights(engine)

    want = on_ranks(ranks, run, dense)[0]
    got = on_ranks(ranks, lambda *args: run(*args, freeze_step=1000), cls)[0]
    same(got, want, exact=True)


RESUMED = [  # and the number of steps before the save
    ("1-bit Adam", 1, "fp32", 6),
    ("1-bit Adam", 2, "bf16", 6),
    ("1-bit Adam", 3, "fp32", 6),
    ("1-bit LAMB", 2, "bf16", 7),
    ("0/1 Adam", 2, "bf16", 8),  # after a dense step
    ("0/1 Adam", 2, "bf16", 9),  # after one in one bit
    ("local steps", 2, "fp32", 7),
    ("local steps", 3, "bf16", 9),
]
SELDOM = [
    *(("1-bit Adam", ranks, p, 6) for ranks, p in ((1, "bf16"), (2, "fp32"), (3, "bf16"))),
    *(("local steps", *each, at) for each in ((2, "bf16"), (3, "fp32")) for at in (4, 6, 7, 9)),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "precision", "at"),
    fast(RESUMED + SELDOM, lambda *cell: cell in RESUMED),
)
def test_a_resumed_run_goes_on_as_the_saved_one(kind, ranks, precision, at, tmp_path):
    """Bit for bit on as many ranks, momenta in one bit and all: a save synchronises, and brings
    what ranks have yet to send to the owners. One after the load is what was loaded.
    """
    plan = Plan(precision=precision, clip=0.5)

    def run(rank, model, resumes):
        engine = opened(model, kind, plan)
        # ends between two synchronisations, and in momenta of its own
        run_steps(engine, rank, range((9 if kind == "local steps" else 2) if resumes else at))
        if resumes:
            engine.load_checkpoint(tmp_path, tag="saved")
            loaded = state_of(engine)
            engine.save_checkpoint(tmp_path, tag="again")
            for key, each in state_of(engine).items():
                assert torch.equal(each["average"], loaded[key]["average"])
        else:
            if kind == "local steps":
                assert one_bit_steps(engine)._local.pending == (at in (7, 9))
            if kind == "0/1 Adam":
                assert engine.optimizer.is_dense(at) == (at == 8)
                assert any(each["error"].any() for each in state_of(engine).values())
            engine.save_checkpoint(tmp_path, tag="saved")
        before, variance = full_weights(engine), state_of(engine)
        run_steps(engine, rank, range(at, max(at + 3, 13 if kind == "0/1 Adam" else 0)))
        if kind == "0/1 Adam":  # renewed in step 12
            for key, each in state_of(engine).items():
                assert not torch.equal(each["variance"], variance[key]["variance"])
        return before, full_weights(engine)

    for wanted, found in zip(on_ranks(ranks, run, False), on_ranks(ranks, run, True)):
        for one, other in zip(wanted, found):
            same(other, one, exact=True)


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        *(("1-bit Adam", other) for other in ("more", "fewer", "dense", "stage 3")),
        ("local steps", "more"),
        ("local steps", "stage 3"),
    ],
)
def test_its_checkpoints_go_on_anywhere(kind, other, tmp_path):
    """On other ranks, without compression, at another stage: close to the run that goes on, as what
    was yet to be sent is in what was saved.
    """
    lr, at = (1e-3, 9) if kind == "local steps" else (ADAM["lr"], 6)

    def save(rank, model):
        engine = opened(model, kind, lr=lr)
        run_steps(engine, rank, range(at))
        before = full_weights(engine)
        engine.save_checkpoint(tmp_path)
        return full_weights(engine) if kind == "local steps" else before

    def resume(rank, model):
        if other in ("more", "fewer"):
            engine = opened(model, kind, lr=lr)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **{**ADAM, "lr": lr})
            engine = start(model, optimizer, config_of(3 if other == "stage 3" else 1))
        engine.load_checkpoint(tmp_path)
        before = full_weights(engine)
        run_steps(engine, rank, range(at, at + (4 if kind == "local steps" else 2)))
        return before, full_weights(engine)

    want = on_ranks(3, save)[0]
    for before, after in on_ranks({"more": 4, "fewer": 2}.get(other, 3), resume):
        same(before, want, exact=True)
        for name, value in want.items():
            moved = float((after[name] - value).abs().max())
            assert 0.0 < moved < (60 if kind == "local steps" else 30) * lr, name


@pytest.mark.parametrize("kind", ["1-bit Adam", "local steps"])
def test_an_overflow_on_one_rank_leaves_all_state_as_it_is(kind):
    """All ranks skip it, also in a local step, and have the same loss scale."""
    plan = Plan(precision="fp16", scale=16.0)

    def run(rank, model):
        engine = opened(model, kind, plan)
        run_steps(engine, rank, range(9))
        one_bit, before = one_bit_steps(engine), state_of(engine)
        local = list(one_bit._local._of.values()) if kind == "local steps" else []
        moved = [each._moved.clone() for each in local]
        assert bool(moved) == (kind == "local steps") and (not moved or one_bit._local.pending)
        loss = squared(engine, At(9, 0, rank), plan.dtype)
        engine.backward(loss * (1e9 if rank == 1 else 1.0))
        engine.step()
        assert not engine.was_step_applied()
        assert all(torch.equal(each._moved, was) for each, was in zip(local, moved))
        for key, state in state_of(engine).items():
            for name, value in state.items():
                if name != "layout" and value is not None:
                    assert torch.equal(value, before[key][name]), (key, name)
        run_steps(engine, rank, range(10, 13))
        assert engine.was_step_applied()
        return engine.loss_scale(), full_weights(engine)

    (one, weights), (other, found) = on_ranks(2, run)
    assert one == other
    same(found, weights, exact=True)


@pytest.mark.parametrize("kind", ["1-bit Adam", "local steps"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_between_steps_count(precision, kind):
    """By a script to whole parameters, alone, then to master weights, too, and to a rank's own
    part: at once, and between two synchronisations.
    """
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


@pytest.mark.parametrize(
    ("stage", "ranks", "plan"),
    [
        (1, 2, Plan()),
        (1, 3, Plan(accumulation=2)),
        (2, 2, Plan(precision="bf16", accumulation=2)),
        (0, 4, Plan(precision="bf16")),
        (1, 2, Plan(precision="fp16", scale=16.0, clip=0.05)),
        (1, 3, Plan(clip=0.1)),
    ],
    ids=str,
)
def test_steps_are_those_of_the_equations(stage, ranks, plan):
    """Bit for bit: weights, averages and errors, from what autograd has left on each rank."""
    check(on_ranks(ranks, trained, plan, stage), plan)


def test_what_is_wanted_is_sent_sooner_or_later(tmp_path):
    """The telescoping sum, with a the average, E the mean of the errors, m the momentum that was
    applied: b1 a + E + (1 - b1) sum m = the same before + (1 - b1) sum g, to rounding, over skipped
    steps, saves and other numbers of ranks.
    """
    plan = Plan(precision="fp16", scale=16.0)
    beta = ADAM["betas"][0]

    def run(rank, model, steps, resume):
        engine = opened(model, plan=plan)
        record, gradients, applied = Recorder(model), [], []
        if resume:
            engine.load_checkpoint(tmp_path)
        for number in steps:
            record.micro.clear()
            record.begin()
            loss = squared(engine, At(number, 0, rank), plan.dtype)
            engine.backward(loss * (1e9 if number == 5 and rank == 1 else 1.0))
            scale = engine.loss_scale()
            engine.step()
            assert engine.was_step_applied() == (number != 5)
            if number != 5:
                gradients.append((dict(record.micro[0]), scale))
                applied.append(sent(engine))
        before = state_of(engine)
        engine.save_checkpoint(tmp_path)
        return gradients, applied, before, state_of(engine)

    def sent(engine):
        momenta = one_bit_steps(engine)._momenta
        if momenta[0].momentum is None:
            return {}
        return {each.flat.key: each.values() for each in momenta}

    on_ranks(2, run, range(FREEZE), False)
    left = {}
    for ranks, steps in ((2, range(FREEZE, 7)), (3, range(7, 9)), (2, range(9, 12))):
        answers = on_ranks(ranks, run, steps, True)
        for key, state in answers[0][2].items():
            numel = state["layout"].numel

            def whole(which, key=key, numel=numel, answers=answers):
                own = [each[which][key]["average"] for each in answers]
                return torch.cat(own)[:numel].double()

            error = sum(each[2][key]["error"][:numel].double() for each in answers) / ranks
            total = beta * whole(2) + error
            # what a save brings to the owners, and that nothing else does
            torch.testing.assert_close(beta * whole(3), total, rtol=1e-5, atol=1e-6)
            grads = sum(
                flat_of(state["layout"], grad, torch.float16)[:numel].double() / scale / ranks
                for each in answers
                for grad, scale in each[0]
            )
            momenta = sum(each[key][:numel].double() for each in answers[0][1])
            if key in left:
                want = left[key] + (1 - beta) * (grads - momenta)
                torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)
            assert not any(each[3][key]["error"].any() for each in answers)
            left[key] = beta * whole(3)


@on_each_rank(2)
def test_unused_and_frozen_parameters_stay(rank, model):
    """A parameter that no rank has used keeps weights, average and errors; a frozen one is
    untouched.
    """
    model.blocks[1].up.weight.requires_grad_(False)
    engine = opened(model)
    run_steps(engine, rank, range(5))
    frozen, left = model.blocks[1].up.weight.clone(), model.blocks[0].up.weight
    before, state = left.clone(), state_of(engine)
    engine.backward(squared(engine, At(5, 0, rank)))
    left.grad = None
    engine.step()
    assert torch.equal(left, before) and torch.equal(model.blocks[1].up.weight, frozen)
    name = "blocks.0.up.weight"
    (key,) = [key for key, each in state.items() if name in each["layout"].by_name]
    slot, after = state[key]["layout"].by_name[name], state_of(engine)[key]
    for what in ("error", "full"):
        assert torch.equal(
            after[what][slot.offset : slot.end], state[key][what][slot.offset : slot.end]
        )
    assert not torch.equal(after["full"], state[key]["full"])
    run_steps(engine, rank, range(6, 8))
    assert not torch.equal(left, before)


@pytest.mark.parametrize("others", [2, 3])
def test_parameters_that_come_late(others, tmp_path):
    """One is not used in the first dense steps, one before the freeze at all: ranks count the same
    steps after a load, corrections are each parameter's own, and what had no variance moves no
    more than others do.
    """
    late, later = "blocks.0.up.weight", "blocks.1.up.weight"

    def steps(engine, rank, numbers):
        for number in numbers:
            engine.backward(squared(engine, At(number, 0, rank)))
            for name, parameter in engine.module.named_parameters():
                if (name == late and number < 2) or (name == later and number < 5):
                    parameter.grad = None
            engine.step()

    def run(rank, model, resume):
        engine = opened(model)
        if resume:
            engine.load_checkpoint(tmp_path)
        else:
            steps(engine, rank, range(6))
            engine.save_checkpoint(tmp_path)
        before = full_weights(engine)
        steps(engine, rank, range(6, 8))
        one_bit = one_bit_steps(engine)
        return before, full_weights(engine), one_bit._made

    saved = on_ranks(2, run, False)
    for answers in (saved, on_ranks(others, run, True)):
        for before, after, made in answers:
            assert made == 8
            for name in (late, later, "blocks.2.up.weight"):
                moved = float((after[name] - before[name]).abs().max())
                assert 0.0 < moved < 40 * ADAM["lr"], (name, moved)
    if others == 2:
        for name, value in saved[0][1].items():
            assert torch.equal(answers[0][1][name], value), name


@pytest.mark.parametrize("at", [2, FREEZE])
def test_an_engine_goes_back_to_before_a_parameter_was_used(at, tmp_path):
    """Its first state comes in a dense step or in the first in one bit, as it did the first time,
    where other state lies as it has lain.
    """

    def steps(engine, rank, numbers):
        for number in numbers:
            engine.backward(squared(engine, At(number, 0, rank)))
            if number < at:
                engine.module.blocks[1].down.weight.grad = None
            engine.step()
        return full_weights(engine)

    def run(rank, model):
        engine = opened(model)
        steps(engine, rank, range(at))
        engine.save_checkpoint(tmp_path)
        wanted = steps(engine, rank, range(at, 6))
        engine.load_checkpoint(tmp_path)
        return wanted, steps(engine, rank, range(at, 6))

    for wanted, found in on_ranks(3, run):  # the second has parts of both matrices of a block
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


class Rows(torch.nn.Module):
    """An embedding of which few rows are used, and a head."""

    def __init__(self, rows=64, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(rows, width)
        self.head = torch.nn.Linear(width, rows, bias=False)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), (ids + 1) % 12)


def on_rows(engine, rank, steps, used=12):
    """The largest move of a weight in each step."""
    moves, before = [], full_weights(engine)
    for number in steps:
        generator = torch.Generator().manual_seed(100 * number + rank)
        engine.backward(engine(torch.randint(used, (16,), generator=generator)))
        engine.step()
        after = full_weights(engine)
        moves.append(max(float((after[n] - before[n]).abs().max()) for n in after))
        before = after
    return moves


LR = 1e-3


@pytest.mark.parametrize("then", ["same", "a later freeze", "AdamW", "one rank"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dense_steps_after_those_in_one_bit_are_of_the_usual_size(then, precision, tmp_path):
    """Also of rows that have no gradient, whose averages are what scales of others make of them."""
    plan = Plan(precision=precision)

    def made(model, cls, **more):
        return start(model, cls(model.parameters(), lr=LR, **more), config(plan))

    def save(rank, model):
        engine = made(model, OneBitAdam, freeze_step=10)
        on_rows(engine, rank, range(25))
        engine.save_checkpoint(tmp_path)

    def resume(rank, model):
        if then == "AdamW":
            engine = made(model, torch.optim.AdamW)
        else:
            engine = made(model, OneBitAdam, freeze_step=60 if then == "a later freeze" else 10)
        engine.load_checkpoint(tmp_path)
        return max(on_rows(engine, rank, range(25, 33)))

    on_ranks(2, save, build=lambda: seeded(Rows))
    ranks = 1 if then == "one rank" else 2
    for moved in on_ranks(ranks, resume, build=lambda: seeded(Rows)):
        assert 0.0 < moved < 30 * LR


def test_zero_one_adam_moves_as_far_in_each_step():
    """By its defaults, over rows without gradients; the variance is corrected for the steps that
    have renewed it.
    """

    def run(rank, model):
        engine = start(model, ZeroOneAdam(model.parameters(), lr=LR), config())
        return on_rows(engine, rank, range(40))

    for moves in on_ranks(2, run, build=lambda: seeded(Rows)):
        assert max(moves) < 50 * LR


def test_the_variance_of_constant_gradients_is_corrected():
    """Each step moves by the learning rate, dense or not, however rarely the variance is renewed,
    and when it is renewed again after a long time.
    """

    def run(rank, model, cls, more, steps):
        engine = start(model, cls(model.parameters(), lr=LR, weight_decay=0.0, **more), config())
        weight, moves = model.weight, []
        for _ in range(steps):
            before = weight.detach().clone()
            engine.backward(weight.sum())
            engine.step()
            moves.append(float((weight.detach() - before).abs().max()) / LR)
        return moves

    def build():
        return torch.nn.Linear(32, 32, bias=False)

    rare = {"var_freeze_step": 60, "var_update_scaler": 2}
    for cls, more in ((ZeroOneAdam, rare), (OneBitAdam, {"freeze_step": 5})):
        for moves in on_ranks(2, run, cls, more, 80, build=build):
            # denominators have three significant bits
            assert min(moves) > 0.87, cls
            assert max(moves) < 1.13, cls


def test_without_bias_correction_the_moments_stay_small():
    """Under constant gradients the momentum is 1 - b1^t of one, and the root of the variance that
    of 1 - b2^t, where t does not go on after the freeze. DeepSpeed never corrects. Under much
    larger ones a block moves by four learning rates at most.
    """

    def run(rank, model, cls, more):
        settings = {"lr": LR, "betas": (0.9, 0.99), "bias_correction": False}
        engine = start(model, cls(model.parameters(), **settings, **more), config())
        moves = []
        for number in range(40):
            before = model.weight.detach().clone()
            engine.backward(model.weight.sum() * (1000.0 if number >= 30 else 1.0))
            engine.step()
            moves.append(float((model.weight.detach() - before).abs().mean()) / LR)
        return moves

    def build():
        return torch.nn.Linear(32, 32, bias=False)

    freeze = 20
    frozen = [*range(1, freeze + 1), *[freeze] * 10]
    wanted = [(1 - 0.9**t) / (1 - 0.99**of) ** 0.5 for t, of in enumerate(frozen, 1)]
    settings = {"var_freeze_step": freeze, "var_update_scaler": freeze, "local_step_clipper": 1}
    for cls, more in ((OneBitAdam, {"freeze_step": freeze}), (ZeroOneAdam, settings)):
        for moves in on_ranks(2, run, cls, more, build=build):
            for made, (move, want) in enumerate(zip(moves, wanted), 1):
                # denominators have three significant bits in one bit
                assert abs(move / want - 1) < (1e-3 if made <= freeze else 0.13), (cls, made)
            assert 3.5 < max(moves) < 4.001, cls


def test_dense_steps_without_bias_correction_are_those_of_adam():
    def run(rank, model, cls, more):
        optimizer = cls(model.parameters(), lr=LR, weight_decay=0.1, bias_correction=False, **more)
        engine = start(model, optimizer, config_of(1))
        for number in range(3):
            engine.backward((model.weight * (number + 1.0)).square().sum())
            engine.step()
        return full_weights(engine)["weight"]

    def build():
        return seeded(lambda: torch.nn.Linear(32, 32, bias=False))

    ours = on_ranks(2, run, OneBitAdam, {"freeze_step": 9}, build=build)[0]
    assert torch.equal(
        ours, on_ranks(2, run, Adam, {"decoupled_weight_decay": True}, build=build)[0]
    )


@pytest.mark.parametrize(
    ("cls", "more", "least"),
    [
        (OneBitAdam, {}, 3.9),
        (OneBitLamb, {"min_coeff": 1.0, "max_coeff": 1.0}, 2.0),  # its factor is from 0.5 to 1
        (OneBitLamb, {"min_coeff": 1.0, "max_coeff": 1.0, "bias_correction": False}, 1.5),
    ],
    ids=["Adam", "LAMB", "LAMB, not corrected"],
)
def test_gradients_that_outgrow_the_frozen_variance_do_not_make_huge_steps(
    cls, more, least, caplog
):
    """A block moves by four learning rates at most, root mean square (of LAMB times its trust
    ratio and the correction that it leaves out); rank 0 says why, once.
    """
    usual = 1.0 if more.get("bias_correction", True) else (1.0 - 0.999**5) ** -0.5

    def run(rank, model, growth):
        settings = {"lr": LR / usual, "weight_decay": 0.0, "freeze_step": 5, **more}
        optimizer = cls(model.parameters(), **settings)
        engine, moves = start(model, optimizer, config()), []
        for number in range(25):
            before = model.weight.detach().clone()
            engine.backward(model.weight.sum() * (growth if number >= 8 else 1.0))
            engine.step()
            moves.append((model.weight.detach() - before).view(-1, BLOCK))
            if number == 6:
                engine.optimizer_step.complete_state()  # what a save does
        return float(torch.stack(moves).square().mean(-1).sqrt().max()) / LR

    def build():
        return torch.nn.Linear(32, 32, bias=False)

    assert max(on_ranks(2, run, 1.5, build=build)) < 1.5
    assert "outgrown" not in caplog.text
    assert least < max(on_ranks(2, run, 1000.0, build=build)) < 4.001
    assert caplog.text.count("step 10: momenta have outgrown the variance that step 5 froze") == 1
    assert caplog.text.count("set a larger freeze_step") == 1


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb], ids=lambda cls: cls.__name__)
def test_a_save_leaves_the_bound_on_outgrown_momenta(cls, corrects, tmp_path):
    """Blocks at the bound move as far after save and load as without."""
    more = {"min_coeff": 1.0, "max_coeff": 1.0} if cls is OneBitLamb else {}
    settings = {"lr": LR, "weight_decay": 0.0, "freeze_step": 5, "bias_correction": corrects}

    def run(rank, model, first, last):
        engine = start(model, cls(model.parameters(), **settings, **more), config())
        if first:
            engine.load_checkpoint(tmp_path)
        moves = []
        for number in range(first, last):
            before = model.weight.detach().clone()
            engine.backward(model.weight.sum() * (1000.0 if number >= 8 else 1.0))
            engine.step()
            moves.append(float((model.weight.detach() - before).square().mean().sqrt()))
            if (last, number) == (20, 19):
                engine.save_checkpoint(tmp_path)
        return moves

    def build():
        return torch.nn.Linear(32, 32, bias=False)

    whole = on_ranks(2, run, 0, 25, build=build)[0]
    on_ranks(2, run, 0, 20, build=build)
    assert on_ranks(2, run, 20, 25, build=build)[0] == pytest.approx(whole[20:], rel=0.02)


@on_each_rank(2, build=lambda: seeded(Rows))
def test_rows_without_gradients_hardly_move(rank, model):
    """They share blocks with rows that have some, and 1 bit has no zero."""
    engine = start(model, OneBitAdam(model.parameters(), lr=LR, freeze_step=10), config())
    on_rows(engine, rank, range(10))
    before = full_weights(engine)["embed.weight"]
    on_rows(engine, rank, range(10, 40))
    moved = (full_weights(engine)["embed.weight"] - before).abs()
    assert float(moved[12:].max()) < 5 * LR < float(moved[:12].max())


class Scaled(torch.nn.Module):
    """Matrices of ``shapes`` that meet inside blocks, whose gradients are ``scales`` times a
    distance and a noise of each rank.
    """

    def __init__(self, shapes, scales):
        super().__init__()
        self.scales = scales
        for name, shape in shapes.items():
            generator = torch.Generator().manual_seed(len(name))
            weight = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, rank, step):
        total = torch.zeros(())
        for name, weight in self.named_parameters():
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(name))
            noise = torch.randn(weight.shape, generator=generator)
            distance = (weight - 3.0).square() + noise * weight
            total = total + self.scales[name] * distance.sum()
        return total


SHAPES = {"big": (37, 45), "little": (17, 11), "another": (23, 21)}
LOCAL = {"var_freeze_step": 10, "local_step_scaler": 4, "local_step_clipper": 2}


@pytest.mark.parametrize(
    ("cls", "more", "dense"),
    [
        (OneBitAdam, {"freeze_step": 10}, torch.optim.AdamW),
        (OneBitLamb, {"freeze_step": 10}, Lamb),
        (ZeroOneAdam, LOCAL, torch.optim.AdamW),
        pytest.param(
            ZeroOneAdam,
            {"var_freeze_step": 10, "local_step_clipper": 1},
            torch.optim.AdamW,
            marks=pytest.mark.long,
        ),
        pytest.param(torch.optim.AdamW, {}, torch.optim.AdamW, marks=pytest.mark.long),
    ],
    ids=["1-bit Adam", "1-bit LAMB", "0/1 Adam, local steps", "0/1 Adam", "AdamW, bits: 1"],
)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_tensor_moves_as_if_it_were_alone(cls, more, dense, stage):
    """A scale is never that of two tensors: whatever the gradients of those beside it, each follows
    the dense run as well as alone, and bit for bit as beside others of another size.
    """
    sections = config(stage=stage, **({} if more else {"bits": 1, "freeze_step": 10}))

    def run(rank, model, built, section, **more):
        optimizer = built(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-12, **more)
        engine, seen = start(model, optimizer, section), []
        for step in range(26):
            engine.backward(engine(rank, step))
            engine.step()
            seen.append(full_weights(engine))
        return seen

    def trained_with(names, scales, *how, **more):
        shapes = {name: SHAPES[name] for name in names}
        return on_ranks(
            2, lambda *args: run(*args, **more), *how, build=lambda: Scaled(shapes, scales)
        )[0]

    scales = {"big": 1.0, "little": 1e-4, "another": 100.0}
    wanted = trained_with(SHAPES, scales, dense, config_of(stage))
    found = trained_with(SHAPES, scales, cls, sections, **more)
    others = trained_with(SHAPES, {**scales, "big": 1e4, "another": 1e-3}, cls, sections, **more)
    assert torch.equal(found[-1]["little"], others[-1]["little"])
    for name in SHAPES:
        alone = trained_with([name], scales, cls, sections, **more)
        moved = (wanted[-1][name] - wanted[9][name]).norm()
        beside, itself = (
            float((each[-1][name] - wanted[-1][name]).norm() / moved) for each in (found, alone)
        )
        assert 0.0 < beside < 1.3 * itself + 0.02, (name, beside, itself)


def test_state_that_a_script_writes_counts():
    """A larger variance means smaller steps at once."""
    import hf_zero

    def run(rank, model, writes):
        engine = opened(model)
        run_steps(engine, rank, range(5))
        weight = model.blocks[0].up.weight
        if writes:
            held = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
            hf_zero.safe_set_full_optimizer_state(weight, held * 2.0**20, "exp_avg_sq")
        before = weight.detach().clone()
        run_steps(engine, rank, range(5, 6))
        return float((weight.detach() - before * (1 - ADAM["lr"] * 0.1)).abs().max())

    plain, written = on_ranks(2, run, False)[0], on_ranks(2, run, True)[0]
    assert 0.0 < written < plain / 500


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_sends_nothing_in_one_bit_says_so(ranks, caplog):
    def run(rank, model):
        start(model, OneBitAdam(model.parameters()), config_of(1))

    on_ranks(ranks, run, build=lambda: torch.nn.Linear(4, 4))
    said = "one rank" if ranks == 1 else "no matrix has a block"
    assert caplog.text.count(f"nothing travels in 1 bit ({said}") == 1


@on_each_rank(2)
def test_gradients_cannot_be_read_while_they_are_not_averaged(rank, model):
    import hf_zero
    from hf_zero.errors import PartitionError

    engine = opened(model)
    run_steps(engine, rank, range(FREEZE))
    engine.backward(squared(engine, At(FREEZE, 0, rank)))
    assert engine.gradient_norm() > 0.0
    with pytest.raises(PartitionError, match="not averaged over the ranks while"):
        hf_zero.safe_get_full_grad(model.blocks[0].up.weight)
    engine.step()


def test_the_norm_is_close_to_that_of_the_average():
    """No rank has that norm: each estimates it by its own, with the ratio of the two before the
    freeze.
    """

    def run(rank, model, cls, **more):
        adam = cls(model.parameters(), lr=1e-5, weight_decay=0.0, **more)
        engine = start(model, adam, config())
        norms = []
        for number in range(24):
            run_steps(engine, rank, range(number, number + 1))
            norms.append(engine.get_global_grad_norm())
        return norms

    dense = on_ranks(3, run, torch.optim.AdamW)[0]
    sent = on_ranks(3, lambda *args: run(*args, freeze_step=18), OneBitAdam)
    assert sent[0] == sent[1] == sent[2]
    for number, (one, other) in enumerate(zip(sent[0], dense)):
        assert one == pytest.approx(other, rel=1e-4 if number < 18 else 0.35), number


def test_bytes_of_every_message(monkeypatch):
    """At the process group: after the freeze a fifteenth of dense bf16, up and down."""
    from tests.ranks.test_compressed import sent_bytes

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


def test_the_freeze_is_logged_once_and_warned_of_where_the_rate_rises(caplog):
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


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam], ids=lambda cls: cls.__name__)
def test_a_state_dict_in_one_bit_is_of_one_step(cls):
    """Its variance is that of its step count, as in a checkpoint, and taking it changes nothing."""
    more = {"var_freeze_step": 3} if cls is ZeroOneAdam else {"freeze_step": 3}

    def run(rank, model):
        built = cls(model.parameters(), lr=LR, **more)
        engine = start(model, built, config())

        def step(number):
            run_steps(engine, rank, [number])

        for number in range(8):
            step(number)
        weight = next(p for p in model.parameters() if p.dim() > 1)
        taken = copy.deepcopy(built.state_dict())
        shown = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        sends = [flat for flat in engine.flats if flat.spec.momentum_blocks is not None]
        held = [engine.bound.tensors(flat.optimizer_shard)["exp_avg_sq"] for flat in sends]
        before = [variance.clone() for variance in held]
        step(8)
        assert held and all(map(torch.equal, before, held))
        frozen = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        engine.optimizer_step.complete_state()  # what a save does
        saved = hf_zero.safe_get_full_optimizer_state(weight, "exp_avg_sq")
        correction = (1 - 0.999**8) / (1 - 0.999**9)
        torch.testing.assert_close(frozen, saved)
        torch.testing.assert_close(shown, saved * correction)
        return taken["param_groups"][0]["frozen_at"]

    assert on_ranks(2, run, build=lambda: seeded(lambda: Stack(3, 64))) == [8, 8]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_object_goes_on_under_another_engine(stage):
    """``destroy`` gives its groups their parameters back; what it has learnt is gone."""

    def run(rank, model):
        built = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = start(model, built, config_of(stage))
        run_steps(engine, rank, [0])
        engine.destroy(gather=True)
        assert [id(p) for p in built.param_groups[0]["params"]] == list(map(id, model.parameters()))
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine = start(model, built, config_of(stage))
        run_steps(engine, rank, [1])
        after = full_weights(engine)
        return max(float((after[name] - weights[name]).abs().max()) for name in weights)

    for moved in on_ranks(2, run, build=lambda: seeded(Stack)):
        assert moved == pytest.approx(1e-2, rel=0.05)  # Adam's first step
