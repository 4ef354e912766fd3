"""``torch.distributed.checkpoint.state_dict`` on an engine's model, for hf-zero and FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER
from tests.gloo.fsdp import (
    BEFORE,
    FLAT,
    LATER,
    engine_at,
    load_dcp,
    mean,
    save_dcp,
    step_engine,
    step_fsdp2,
    under_fsdp2,
)
from tests.helpers.processes import run_processes

OFFLOADED = "3, offloaded"
CPU = {"device": "cpu"}
SECTIONS = {
    0: {"stage": 0},
    2: {"stage": 2},
    OFFLOADED: {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
OTHERS = {0: OFFLOADED, 2: 0, OFFLOADED: 2}


def from_hf_zero(rank, folder):
    """At each stage: train, save through torch's functions, and train on; the losses by stage."""
    found = {}
    for stage, section in SECTIONS.items():
        engine = engine_at(section)
        losses = step_engine(engine, BEFORE, rank)
        before = dict(engine.mesh.stats.bytes)
        weights, _ = save_dcp(engine.module, engine.optimizer, f"{folder}/{stage}")
        assert engine.mesh.stats.bytes == before, "a state dict in parts gathers nothing"
        for name, _ in engine.module.named_parameters():
            assert isinstance(weights[name], TensorPart)
        found[stage] = losses + step_engine(engine, LATER, rank)
        engine.destroy()
    return found


def on_with_others(rank, folder, fsdp2):
    """From the checkpoint of each stage: FSDP2, and hf-zero at other stages; from FSDP2's: each."""
    found = {}

    def on(origin, stage):
        engine = engine_at(SECTIONS[stage])
        load_dcp(engine.module, engine.optimizer, origin)
        found[f"{origin} to {stage}"] = step_engine(engine, LATER, rank)
        engine.destroy()

    for stage in SECTIONS:
        model, optimizer = under_fsdp2()
        load_dcp(model, optimizer, f"{folder}/{stage}")
        found[f"{stage} to FSDP2"] = step_fsdp2(model, optimizer, LATER, rank)
        on(f"{folder}/{stage}", stage)
        on(f"{folder}/{stage}", OTHERS[stage])
        on(fsdp2, stage)
    return found


def test_a_training_goes_on_under_either(written, tmp_path):
    fsdp2, want = written
    saved = run_processes(2, from_hf_zero, str(tmp_path))
    found = run_processes(3, on_with_others, str(tmp_path), str(fsdp2 / "one"))
    for stage in SECTIONS:
        assert mean([each[stage] for each in saved]) == pytest.approx(want, rel=2e-6)
    for way in found[0]:
        losses = mean([each[way] for each in found])
        assert losses == pytest.approx(want[SAVED_AFTER:], rel=2e-6), way


def in_16_bits(rank, folder):
    """bf16: parts are master weights, so that the run continues to the bit. Other options."""
    keys = {"bf16": {"enabled": True}}
    engine = engine_at(3, **keys)
    step_engine(engine, BEFORE, rank)
    weights, states = get_state_dict(engine.module, engine.optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/bf16")
    want = step_engine(engine, LATER, rank)
    whole = get_model_state_dict(engine.module, options=StateDictOptions(full_state_dict=True))
    assert whole.keys() == weights.keys()
    assert not any(isinstance(value, TensorPart) for value in whole.values())
    # a file of safetensors has one box of a tensor, and a rank's part may be several
    for more in ({}, {"enable_consolidation": True}):
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True, **more)
        with pytest.raises(CheckpointException, match="has room for one of each tensor"):
            dcp.save(get_model_state_dict(engine.module), storage_writer=writer)
    engine.destroy()
    again = engine_at(3, **keys)
    names = ("model", "optimizer")
    asked = dict(zip(names, get_state_dict(again.module, again.optimizer, options=FLAT)))
    dcp.load(asked, checkpoint_id=f"{folder}/bf16")

    def give(weights):
        given = {"model_state_dict": weights, "optim_state_dict": asked["optimizer"]}
        set_state_dict(again.module, again.optimizer, **given, options=FLAT)

    give(asked["model"])
    assert step_engine(again, LATER, rank) == want
    lacking = dict(list(asked["model"].items())[1:])
    for wrong in (lacking, {**asked["model"], next(iter(lacking)): torch.zeros(1)}):
        with pytest.raises(CheckpointError, match="state dict"):
            give(wrong)


def test_master_weights_options_and_files_of_safetensors(tmp_path):
    run_processes(2, in_16_bits, str(tmp_path))
