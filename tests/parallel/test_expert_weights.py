"""Weights and optimizer state of models whose experts are on several ranks: ``iter_weights``, and
``torch.distributed.checkpoint.state_dict`` from and to engines with and without expert parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.helpers import oracle
from tests.helpers.engines import config_of, start
from tests.helpers.parts import whole
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, Plan, adamw
from tests.parallel.expert_cases import OnSpreadExperts, keys
from tests.parallel.test_moe_layer import MixedJob, part_of
from tests.ranks.test_moe import Routed

RANKS, SAVED_AFTER, STEPS = 4, 2, 4
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYERS = "layers of hf-zero"  # their experts are modules, with numbers in their names
Weights = dict[str, torch.Tensor]


class AdamRouted(Routed):
    def optimizer(self, model):
        return adamw(model)


class AdamMixed(MixedJob):
    def optimizer(self, model):
        return adamw(model)


def job_of(name: str) -> Any:
    job = AdamMixed("top 1") if name == LAYERS else AdamRouted(name)
    job.name += ", AdamW"
    return job


def session_of(name: str, job: Any, model: Any, stage: int, size: int) -> OnSpreadExperts:
    """An engine of the model in which each of ``size`` ranks has a part of the experts."""
    plan = Plan(ranks=RANKS)
    spread = {} if size == 1 or name == LAYERS else keys(size)
    if size > 1 and name == LAYERS:
        model = part_of(model, size, **job.options)
    return OnSpreadExperts(start(model, adamw(model), config_of(stage, plan, **spread)), plan)


def run(name: str, stage: int, size: int, given: Any = None) -> list[Any]:
    """Per rank: its state dicts after SAVED_AFTER steps, the weights that it is sent then, and the
    whole ones after STEPS. ``given(rank)``: the state dicts to begin with, in place of these steps.
    """
    job = job_of(name)
    models = [job.build() for _ in range(RANKS)]

    def train(session: Any, rank: int, steps: range) -> None:
        for step in steps:
            job.micro(session, At(step, 0, rank))
            session.step()

    def on_rank(rank: int) -> Any:
        session = session_of(name, job, models[rank], stage, size)
        of = (session.engine.module, session.engine.optimizer)
        if given is None:
            train(session, rank, range(SAVED_AFTER))
        else:
            weights, states = given(rank)
            set_state_dict(*of, model_state_dict=weights, optim_state_dict=states)
        parts = get_state_dict(*of)
        buckets = session.engine.iter_weights("4KiB", "fp32")
        sent = {name: value.clone() for bucket in buckets for name, value in bucket}
        train(session, rank, range(SAVED_AFTER, STEPS))
        ended = session.weights()
        session.close()
        return parts, sent, ended

    return run_ranks(RANKS, on_rank)


def near(got: Weights, want: Weights) -> None:
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


@pytest.mark.parametrize(("name", "stage"), [("mixtral", 3), (LAYERS, 0)])
def test_parts_are_those_of_the_whole_model(name, stage):
    size = 2
    found = run(name, stage, size)
    saved, ended = (
        oracle.kept(job_of(name), Plan(ranks=RANKS, steps=steps)).weights
        for steps in (SAVED_AFTER, STEPS)
    )
    weights, moments = Weights(), dict[str, Weights]()
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
    again = run(name, stage, size, lambda rank: found[rank][0])
    assert all(torch.equal(value, found[0][2][key]) for key, value in again[0][2].items())

    count = torch.tensor(float(SAVED_AFTER))
    state = {key: {"step": count, **values} for key, values in moments.items()}
    (group,) = found[0][0][1]["param_groups"]
    states = {"state": state, "param_groups": [{**group, "params": [*state]}]}
    near(run(name, 3 - stage, 1, lambda rank: (weights, states))[0][2], ended)
