"""1-bit LAMB: what ranks that are threads compute is what its equations give."""

import pytest
import torch

from hf_zero.optim import OneBitLamb
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.compressed import Recorder, flat_of
from tests.helpers.engines import start
from tests.helpers.one_bit import (
    LAMB,
    C,
    WholeLamb,
    config,
    inverses,
    joined,
    one_bit_steps,
    state_of,
)
from tests.helpers.stacks import on_ranks, run_steps
from tests.helpers.training import Plan

FREEZE, STEPS = 4, 7


def lamb_state(engine):
    found, held = state_of(engine), engine.bound.factors.held()
    for each in one_bit_steps(engine)._momenta:
        mine, names = found[each.flat.key], each.flat.layout.by_name
        mine["ratios"] = {name: float(held[name]["ratio"]) for name in names if name in held}
        mine["factors"] = each._scales[1].tolist()
        fresh = engine.bound.tensors(each.flat.optimizer_shard).get("exp_avg_sq_fresh")
        mine["fresh"] = None if fresh is None else fresh.clone()
    return found


@in_turn(("ranks", "plan", "decay"), [(3, Plan(precision="bf16"), 0.1)])
def test_steps_are_those_of_the_equations(ranks, plan, decay):
    settings = {**LAMB, "weight_decay": decay}

    def run(rank, model):
        optimizer = OneBitLamb(model.parameters(), **settings, freeze_step=FREEZE)
        engine = start(model, optimizer, config(plan))
        record, seen = Recorder(model), []
        for number in range(STEPS):
            record.micro.clear()
            record.begin()
            run_steps(engine, rank, [number])
            norm = engine.get_global_grad_norm()
            seen.append((dict(record.micro[0]), lamb_state(engine), norm))
        return seen

    answers = on_ranks(ranks, run)
    moved, at = 0, FREEZE - 1
    for key, first in answers[0][0][1].items():
        layout, average = first["layout"], joined(answers, at, key, "average")
        # as the freeze has raised it
        variance = joined(answers, FREEZE, key, "variance")
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
            FREEZE,
        )
        for number in range(FREEZE, STEPS):
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
