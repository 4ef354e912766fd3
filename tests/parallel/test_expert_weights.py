"""Weights and optimizer state of models whose experts are on several ranks, in parts and whole."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.helpers import oracle
from tests.helpers.engines import config_of, start
from tests.helpers.parts import whole
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, Plan, adamw
from tests.parallel.expert_cases import OnSpreadExperts, keys
from tests.ranks.test_moe import Routed

RANKS, SAVED_AFTER, STEPS = 4, 2, 4
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamRouted(Routed):
    def optimizer(self, model):
        return adamw(model)


def run(job, stage, spread, given=None):
    """Per rank: its state dicts after SAVED_AFTER steps, the weights that it is sent then, and the
    whole ones after STEPS. ``given(rank)``: the state dicts to begin with, in place of these steps.
    """
    models, plan = [job.build() for _ in range(RANKS)], Plan(ranks=RANKS)

    def train(session, rank, steps):
        for step in steps:
            job.micro(session, At(step, 0, rank))
            session.step()

    def on_rank(rank):
        model, more = models[rank], keys(2) if spread else {}
        engine = start(model, adamw(model), config_of(stage, plan, **more))
        session, of = OnSpreadExperts(engine, plan), (engine.module, engine.optimizer)
        if given is None:
            train(session, rank, range(SAVED_AFTER))
        else:
            weights, states = given(rank)
            set_state_dict(*of, model_state_dict=weights, optim_state_dict=states)
        parts = get_state_dict(*of)
        buckets = engine.iter_weights("4KiB", "fp32")
        sent = {name: value.clone() for bucket in buckets for name, value in bucket}
        train(session, rank, range(SAVED_AFTER, STEPS))
        ended = session.weights()
        session.close()
        return parts, sent, ended

    return run_ranks(RANKS, on_rank)


def near(got, want):
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


def test_parts_are_those_of_the_whole_model():
    job, stage = AdamRouted("mixtral"), 3
    job.name += ", AdamW"
    found = run(job, stage, True)
    saved, ended = (
        oracle.kept(job, Plan(ranks=RANKS, steps=steps)).weights for steps in (SAVED_AFTER, STEPS)
    )
    weights, moments = {}, {}
    for key in saved:
        holders = [parts for parts, _, _ in found if key in parts[0]]
        weights[key] = whole([model[key] for model, _ in holders])
        moments[key] = {
            each: whole([states["state"][key][each] for _, states in holders]) for each in MOMENTS
        }
    for (model, _), sent, _ in found:
        assert model.keys() <= sent.keys() == weights.keys()
        assert all(torch.equal(sent[key], value) for key, value in weights.items())
    near(weights, saved)
    near(found[0][2], ended)
    again = run(job, stage, True, lambda rank: found[rank][0])
    assert all(torch.equal(value, found[0][2][key]) for key, value in again[0][2].items())

    count = torch.tensor(float(SAVED_AFTER))
    state = {key: {"step": count, **values} for key, values in moments.items()}
    (group,) = found[0][0][1]["param_groups"]
    states = {"state": state, "param_groups": [{**group, "params": [*state]}]}
    near(run(job, 3 - stage, False, lambda rank: (weights, states))[0][2], ended)
