"""1-bit LAMB: what ranks that are threads compute is what its equations give."""

import pytest
import torch

from hf_zero.optim import OneBitLamb
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.compressed import Recorder, flat_of
from tests.helpers.engines import start
from tests.helpers.one_bit import LAMB, C, WholeLamb, config, inverses, one_bit_steps
from tests.helpers.stacks import on_ranks, run_steps
from tests.helpers.training import Plan

FREEZE, STEPS = 4, 9


def state_of(engine):
    found = {}
    for each in one_bit_steps(engine)._momenta:
        flat = each.flat
        tensors = {n: t.clone() for n, t in engine.bound.tensors(flat.optimizer_shard).items()}
        tensors["master"] = flat.optimizer_shard.master.clone()
        held = engine.bound.factors.held()
        ratios = {name: float(held[name]["ratio"]) for name in flat.layout.by_name if name in held}
        scales = each._scales.clone()
        found[flat.key] = (flat.layout, tensors, ratios, scales, flat.full.clone())
    return found


@in_turn(("ranks", "plan", "decay"), [(3, Plan(precision="bf16"), 0.1), (2, Plan(clip=0.1), 0.0)])
def test_steps_are_those_of_the_equations(ranks, plan, decay):
    settings = {**LAMB, "weight_decay": decay}

    def run(rank, model):
        optimizer = OneBitLamb(model.parameters(), **settings, freeze_step=FREEZE)
        engine = start(model, optimizer, config(plan))
        record, seen = Recorder(model), []
        for number in range(STEPS):
            record.micro.clear()
            record.begin()
            run_steps(engine, rank, range(number, number + 1))
            norm = engine.get_global_grad_norm()
            seen.append((dict(record.micro[0]), state_of(engine), norm))
        return seen

    answers = on_ranks(ranks, run)
    moved = 0
    for key, (layout, *_) in answers[0][0][1].items():

        def joined(number, name, key=key):
            return torch.cat([answer[number][1][key][1][name] for answer in answers])

        at = FREEZE - 1
        average = joined(at, "exp_avg")
        # as the freeze has raised it
        variance = joined(FREEZE, "exp_avg_sq")
        assert bool((variance >= joined(at, "exp_avg_sq")).all())
        ratios = {k: v for answer in answers for k, v in answer[at][1][key][2].items()}
        whole = WholeLamb(
            layout,
            joined(at, "master"),
            average,
            # LAMB's denominators are not corrected for their start at zero
            inverses(joined(at, "exp_avg_sq"), layout, 0.0, LAMB["eps"], 1),
            C(average, layout),
            [torch.zeros(layout.padded) for _ in range(ranks)],
            LAMB["lr"],
            decay,
            LAMB["betas"][0],
            variance,
            variance.clone(),
            ratios,
            dict.fromkeys(layout.by_name, 1.0),
            LAMB["betas"][1],
            LAMB["eps"],
            FREEZE,
        )
        for number in range(FREEZE, STEPS):
            dtype = answers[0][number][1][key][4].dtype
            grads = [flat_of(layout, answer[number][0], dtype).float() for answer in answers]
            norm = answers[0][number][2]
            divisor = max(1.0, (norm + 1e-6) / plan.clip) if plan.clip else 1.0
            whole.step(grads, number + 1, divisor)
            for name, wanted in (
                ("exp_avg", whole.average),
                ("exp_avg_sq_fresh", whole.fresh),
                ("exp_avg_sq", variance),
                ("master", whole.weights),
            ):
                tolerance = {"rtol": 1e-3, "atol": 1e-5}
                torch.testing.assert_close(
                    joined(number, name)[: layout.numel], wanted[: layout.numel], **tolerance
                )
            for answer in answers:
                factors = answer[number][1][key][3][1].tolist()
                assert factors == pytest.approx(list(whole.factors.values()), rel=1e-3)
                assert torch.equal(answer[number][1][key][4], answers[0][number][1][key][4])
            moved += sum(factor != 1.0 for factor in factors)
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
