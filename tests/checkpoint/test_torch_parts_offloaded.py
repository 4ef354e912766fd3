"""``torch.distributed.checkpoint.state_dict`` on engines that keep parameters and optimizer state
in host memory or files, against a plain process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from tests.helpers.engines import full_weights
from tests.helpers.offloads import DEVICE, WAYS, offload, opened, same, stages_of
from tests.helpers.parts import whole
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.helpers.training import adamw

RANKS, SAVED_AFTER, STEPS = 2, 2, 4
MOMENTS = ("exp_avg", "exp_avg_sq")
CASES = [
    pytest.param(way, stage, marks=[] if stage == 3 else pytest.mark.long)
    for way in WAYS
    for stage in stages_of(way)
]
OTHERS = dict.fromkeys(WAYS, DEVICE) | {"optimizer on cpu": "all in files"}


def plain() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], Any]:
    """Weights and states of a plain process after SAVED_AFTER steps, and its weights at the end."""
    kept: list[Any] = []

    def after(step, model, optimizer):
        if step == SAVED_AFTER - 1:
            named = dict(model.named_parameters())
            kept.append({name: p.detach().clone() for name, p in named.items()})
            kept.append(
                {
                    name: {key: value.clone() for key, value in optimizer.state[p].items()}
                    for name, p in named.items()
                }
            )

    ended, _ = by_hand(adamw, [[(1.0, 0)]] * STEPS, RANKS, after_step=after)
    return kept[0], kept[1], ended


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("way", "stage"), CASES)
def test_states_are_those_of_a_plain_process(way, stage, precision, tmp_path):
    keys = {} if precision == "fp32" else {"bf16": {"enabled": True}}

    def saved(rank, model):
        engine = opened(model, offload(way, stage, tmp_path), **keys)
        run_steps(engine, rank, range(SAVED_AFTER))
        weights, states = get_state_dict(engine.module, engine.optimizer)
        gathered = {
            name: [hf_zero.safe_get_full_fp32_param(p)]
            + [hf_zero.safe_get_full_optimizer_state(p, key) for key in MOMENTS]
            for name, p in engine.module.named_parameters()
        }
        run_steps(engine, rank, range(SAVED_AFTER, STEPS))
        ended = full_weights(engine)
        engine.destroy()
        return weights, states, gathered, ended

    found = on_ranks(RANKS, saved)
    joined = {name: whole([each[0][name] for each in found]) for name in found[0][0]}
    moments = {
        name: {key: whole([each[1]["state"][name][key] for each in found]) for key in MOMENTS}
        for name in joined
    }
    steps = {float(values["step"]) for each in found for values in each[1]["state"].values()}
    assert steps == {float(SAVED_AFTER)}
    for name, values in found[0][2].items():
        for got, want in zip([joined[name], *moments[name].values()], values):
            assert torch.equal(got, want.to(got.device)), name
    if precision == "fp32":
        weights, states, ended = plain()
        same(joined, weights)
        for key in MOMENTS:
            same({name: moments[name][key] for name in joined}, {n: states[n][key] for n in joined})
        same(found[0][3], ended)

    def resumed(rank, model, section, weights, states):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        engine = opened(model, section, **keys)
        names = {"model_state_dict": weights, "optim_state_dict": states}
        set_state_dict(engine.module, engine.optimizer, **names)
        run_steps(engine, rank, range(SAVED_AFTER, STEPS))
        ended = full_weights(engine)
        engine.destroy()
        return ended

    def from_parts(rank, model):
        weights, states = found[rank][:2]
        return resumed(rank, model, offload(way, stage, tmp_path), weights, states)

    same(on_ranks(RANKS, from_parts)[0], found[0][3], exact=True)

    def from_wholes(rank, model):
        section = offload(OTHERS[way], 3, tmp_path)
        states = {"state": {}, "param_groups": found[0][1]["param_groups"]}
        for name, values in moments.items():
            states["state"][name] = {"step": torch.tensor(float(SAVED_AFTER)), **values}
        return resumed(rank, model, section, dict(joined), states)

    same(on_ranks(RANKS, from_wholes)[0], found[0][3])
