"""0/1 Adam's local steps: ranks that are threads do what the equations say, send nothing between
synchronizations, and have the same weights after each.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.sign_blocks_reference import powers
from hf_zero.optim import ZeroOneAdam
from tests.helpers.compressed import Recorder, flat_of, sent_bytes, window
from tests.helpers.engines import full_weights, start
from tests.helpers.one_bit import ADAM, RARE, C, WholeLocal, config, local_state, one_bit_steps
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan

BEGIN, STEPS = 4, 12  # steps before the first local one, and in all
SYNCHRONIZED = (6, 8, 12)
NAME = "blocks.0.up.weight"


def started(model, plan=None, **more):
    return start(model, ZeroOneAdam(model.parameters(), **{**ADAM, **RARE, **more}), config(plan))


def recorded(rank, model, plan):
    """Of each step: gradients, state, loss scale, norm, and the weights that modules used."""
    engine = started(model, plan)
    record, seen, computed = Recorder(model), [], dict[str, Any]()

    def look(module, given):
        computed.update({name: p.detach().clone() for name, p in engine.module.named_parameters()})

    engine.module.register_forward_pre_hook(look)
    model.blocks[0].register_forward_pre_hook(look)
    for number in range(STEPS):
        window(engine, rank, number, plan, record)
        used = computed[NAME].clone()
        scale = engine.loss_scale()
        engine.step()
        assert engine.was_step_applied()
        norm = engine.get_global_grad_norm()
        seen.append((list(record.micro), local_state(engine), scale, norm, used))
    return seen


def whole_of(answers, key):
    """The oracle, before the first local step."""
    first, later = answers[0][BEGIN - 1][1][key], answers[0][BEGIN][1][key]
    layout = first["layout"]

    def joined(name):
        return torch.cat([answer[BEGIN - 1][1][key][name] for answer in answers])

    average, bits = joined("average"), first["bits"]
    variance = torch.cat([answer[BEGIN][1][key]["variance"] for answer in answers])
    exact = 1.0 / (variance / (1.0 - ADAM["betas"][1] ** BEGIN)).sqrt().add(1e-8)
    found = powers(later["exponents"])
    inside = slice(0, layout.end)
    torch.testing.assert_close(found[inside], exact[inside], rtol=0.13, atol=0.0)
    errors = [answer[BEGIN - 1][1][key]["error"] for answer in answers]
    errors = [torch.zeros(layout.padded) if each is None else each.clone() for each in errors]
    sent = C(average, layout) if bits else average
    numbers = ADAM["lr"], ADAM["weight_decay"], ADAM["betas"][0]
    whole = WholeLocal(layout, joined("master"), average, found, sent, errors, *numbers, bits)
    whole.begin()
    return whole


def test_steps_are_those_of_the_equations():
    plan = Plan(clip=0.1, accumulation=2)
    answers = on_ranks(2, recorded, plan)
    near = partial(torch.testing.assert_close, rtol=1e-4, atol=2e-6)
    for key in answers[0][0][1]:
        whole = whole_of(answers, key)
        layout = whole.layout
        for number in range(BEGIN, STEPS):
            grads, divisors = [], []
            for answer in answers:
                micros, _, scale, norm, _ = answer[number]
                dtype = answer[number][1][key]["full"].dtype
                flats = [flat_of(layout, each, dtype).float() for each in micros]
                grads.append(sum(flats) / plan.accumulation)
                # each rank clips by what it knows of the norm
                divisors.append(scale * max(1.0, (norm + 1e-6) / plan.clip))
            if NAME in layout.by_name:
                for rank, answer in enumerate(answers):
                    slot, used = layout.by_name[NAME], answer[number][4].reshape(-1)
                    near(used, whole.computed(rank)[slot.offset : slot.end])
            whole.local(grads, number + 1, divisors)
            if number + 1 in SYNCHRONIZED:
                whole.synchronize(number + 1)
                for rank, answer in enumerate(answers):
                    near(answer[number][1][key]["error"], whole.errors[rank])
            for name, wanted in (("master", whole.weights), ("average", whole.average)):
                found = torch.cat([answer[number][1][key][name] for answer in answers])
                near(found[: layout.end], wanted[: layout.end])
            fulls = [answer[number][1][key]["full"] for answer in answers]
            assert all(torch.equal(full, fulls[0]) for full in fulls)
    used = [[answer[number][4] for answer in answers] for number in range(BEGIN, STEPS)]
    for number, (one, other, *_) in enumerate(used, BEGIN):
        assert torch.equal(one, other) == (number in (BEGIN, *SYNCHRONIZED)), number


def test_bytes_of_a_step(monkeypatch):
    """At the process group, nothing leaves a rank in a local step."""
    sent = sent_bytes(monkeypatch)

    def run(rank, model):
        engine = started(model)
        stats = engine.mesh.stats
        stats.keep_log = True
        for number in range(STEPS):
            sent[rank] = []
            stats.log.clear()
            run_steps(engine, rank, [number])
            if number < BEGIN + 1:  # which gathers what all ranks need once
                continue
            if number + 1 not in SYNCHRONIZED:
                assert not sent[rank] and not stats.log, number
                continue
            one_bit = one_bit_steps(engine)
            size = sum(3 * each.blocks.nbytes for each in one_bit._chosen)
            size += sum(4 * each.flat.layout.padded for each in one_bit._local.uncoded)
            moved = Counter()
            for name, nbytes in sent[rank]:
                moved["all_to_all" if "all_to_all" in name else name[:10]] += nbytes
            assert moved == {"all_to_all": size, "all_gather": size}
            # the norm, what was used in the step, and since the last synchronization
            assert 0 < sum(nbytes for name, _, nbytes in stats.log if name == "all_reduce") < 300

    on_ranks(3, run)


def test_an_engine_that_made_local_steps_goes_back(tmp_path):
    """To before them; tiny variances of what is under a block are raised anew."""

    def run(rank, model, fresh):
        tiny = torch.ones(model.enter.bias.shape).index_fill(0, torch.tensor([1]), 1e-4)
        model.enter.bias.register_hook(lambda gradient: gradient * tiny)
        engine = started(model)
        if not fresh:
            run_steps(engine, rank, range(3))
            engine.save_checkpoint(tmp_path)
            run_steps(engine, rank, range(3, 10))
        engine.load_checkpoint(tmp_path)
        run_steps(engine, rank, range(3, 4))
        assert not one_bit_steps(engine)._local.pending
        run_steps(engine, rank, range(4, 7))
        return full_weights(engine)

    again = on_ranks(2, run, False)
    for found, wanted in zip(again, on_ranks(2, run, True)):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_read_of_counted_state_leaves_the_notes_of_groups():
    def run(rank, model):
        engine = started(model)
        run_steps(engine, rank, range(10))
        before = [
            {k: v for k, v in group.items() if "frozen" in k} for group in engine.bound.groups
        ]
        with one_bit_steps(engine).counted_state() as rescaled:
            assert rescaled and engine.bound.groups[0]["all_frozen_at"] == 10
        after = [{k: v for k, v in group.items() if "frozen" in k} for group in engine.bound.groups]
        assert after == before and before[0]["all_frozen_at"] < 10

    on_ranks(2, run)


def test_unused_parameters_stay():
    """Since the last synchronization on any rank; one that any rank has used moves."""

    def run(rank, model):
        engine = started(model)
        run_steps(engine, rank, range(8))
        left, some = model.blocks[0].up.weight, model.blocks[1].up.weight
        before, moved = left.clone(), some.clone()
        for number in range(8, 12):
            engine.backward(squared(engine, At(number, 0, rank)))
            left.grad = None
            if rank or number != 9:
                some.grad = None
            engine.step()
        assert torch.equal(left, before) and not torch.equal(some, moved)
        run_steps(engine, rank, range(12, 17))
        assert not torch.equal(left, before)
        local = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = dict(engine.consolidated())  # a read of the whole model synchronizes
        assert not one_bit_steps(engine)._local.pending
        assert not torch.equal(state[NAME], local[NAME])
        assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
        return {**state, "some": some.clone()}

    one, other = on_ranks(2, run)
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_parameter_without_elements_goes_along():
    """In a group of its own, of which there are no sums."""

    def run(rank, model, more):
        groups = [{"params": list(model.parameters())}]
        if more:
            model.none = torch.nn.Embedding(0, 8)
            groups += [{"params": [model.none.weight], "lr": 1.0}]
        engine = start(model, ZeroOneAdam(groups, **{**ADAM, **RARE}), config())
        run_steps(engine, rank, range(8))
        return full_weights(engine)

    found, wanted = on_ranks(2, run, True)[0], on_ranks(2, run, False)[0]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_interval_doubles_up_to_the_clipper():
    weight = [torch.nn.Parameter(torch.zeros(4))]
    adam = ZeroOneAdam(weight, var_freeze_step=10, local_step_scaler=3, local_step_clipper=6)
    assert [adam.interval(step) for step in range(9, 24)] == [1] * 5 + [2] * 3 + [4] * 3 + [6] * 4
    assert ZeroOneAdam(weight, local_step_clipper=1).interval(10**9) == 1
    assert ZeroOneAdam(weight).interval(10**12) == 16


@on_each_rank(2)
def test_what_does_not_go_with_it_is_named(rank, model):
    more = {"quantize_training": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"quantize_training: .*local_step_clipper: 1"):
        start(model, ZeroOneAdam(model.parameters(), **ADAM), {**config(), **more})
    model.blocks[0].double()
    with pytest.raises(UnsupportedOptimizerError, match=r"float64, of which ZeroOneAdam makes"):
        started(model)
