"""State of ranks that share layers or experts: state dicts, conversions, buckets and parts."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import hf_zero
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers.engines import config_of, start
from tests.helpers.parts import whole as joined
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS, TensorJob, train_tensor_parallel
from tests.helpers.training import Plan, sgd
from tests.parallel.expert_cases import keys


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
