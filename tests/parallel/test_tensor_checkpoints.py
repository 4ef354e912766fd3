"""State of ranks that share layers or experts: state dicts, conversions, buckets and parts."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle
from tests.helpers.engines import config_of, start
from tests.helpers.parts import whole
from tests.helpers.parts import whole as joined
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS, TensorJob, train_tensor_parallel
from tests.helpers.training import At, Plan, adamw, sgd
from tests.parallel.expert_cases import OnSpreadExperts, keys
from tests.ranks.test_moe import Routed


def _compare(got, wanted):
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


# how a model is cut, and the keys of an engine that takes it
CUT = {
    "llama-tied": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "gpt2": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "mixtral": (hf_zero.expert_parallel, keys(2)),
}


@pytest.mark.parametrize("name", CUT)
def test_state_dicts_and_files_are_whole(name, tmp_path):
    """Before an engine, under it, in a conversion of its checkpoint, and after it is destroyed."""
    whole, (cut, section) = MODELS[name].build(), CUT[name]
    given = {key: value.clone() for key, value in whole.state_dict().items()}
    more = {key: value + 1 for key, value in given.items()}
    models = [copy.deepcopy(whole) for _ in range(2)]

    def run(rank):
        model = cut(models[rank], 2)
        _compare(model.state_dict(), given)
        model.load_state_dict(more)
        _compare(model.state_dict(), more)
        engine = start(model, sgd(model), config_of(3, **section))
        _compare(whole_state_dict(engine), more)
        model.load_state_dict(given)
        _compare(model.state_dict(), given)
        engine.backward(engine(**MODELS[name].batch(0, 0, 0)).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        _compare(model.state_dict(), trained)
        assert any(not trained[key].equal(value) for key, value in given.items())
        return trained

    trained = run_ranks(2, run)[0]
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "saved", dtype="float32"))
    _compare(trained, converted)
    if name == "mixtral":  # whose experts save_pretrained writes one by one
        return
    whole.load_state_dict(trained)
    whole.save_pretrained(tmp_path / "plain")
    hf_zero.convert_checkpoint(tmp_path / "saved", tmp_path / "model")
    folders = (tmp_path / "model", tmp_path / "plain")
    files, wanted = (load_file(folder / "model.safetensors") for folder in folders)
    assert files.keys() == wanted.keys()
    _compare(files, wanted)


@pytest.mark.parametrize("name, stage", [("llama", 3), ("phi3", 1)])
def test_weights_in_buckets_and_in_parts(name, stage):
    """``iter_weights``, and what ``torch.distributed.checkpoint.state_dict`` gives on each rank."""
    sent, parts = [], []

    def observe(engine):
        sent.append({n: v.clone() for b in engine.iter_weights("4KiB", "fp32") for n, v in b})
        parts.append(get_state_dict(engine.module, engine.optimizer))

    job, plan = TensorJob(name), Plan(ranks=2, steps=1)
    want = train_tensor_parallel(job, plan, 2, stage, observe=observe).weights
    assert len(sent) == len(parts) == 4
    for each in sent:
        assert each.keys() == want.keys()
        _compare(each, want)
    for key, value in want.items():
        assert joined([weights[key] for weights, _ in parts]).equal(value), key
        joined([states["state"][key]["exp_avg"] for _, states in parts])


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
