"""``torch.distributed.checkpoint.state_dict`` on an engine's model: DCP saves and loads a training
under hf-zero, and FSDP2 continues it, on other numbers of ranks and at other stages.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

import hf_zero
from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, batch, build, optimizer_of
from tests.gloo.test_to_dcp import load_fsdp2, mean, step_fsdp2, under_fsdp2
from tests.helpers.processes import run_processes

OFFLOADED = "3, offloaded"
STAGES = {stage: {"stage": stage} for stage in (0, 1, 2, 3)} | {
    OFFLOADED: {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}
OTHERS = {0: 3, 1: OFFLOADED, 2: 1, 3: 0, OFFLOADED: 2}


def engine_at(stage, **keys):
    model = build(True)
    config = {
        "train_micro_batch_size_per_gpu": 6 // dist.get_world_size(),
        "zero_optimization": STAGES[stage],
        "gradient_clipping": 1.0,
        **keys,
    }
    return hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]


def step(engine, steps, rank):
    losses = []
    for number in steps:
        loss = engine(*batch(number, rank, dist.get_world_size()))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def from_hf_zero(rank, folder):
    """At each stage: train, save through torch's functions, and train on; the losses by stage."""
    found = {}
    for stage in STAGES:
        engine = engine_at(stage)
        losses = step(engine, range(SAVED_AFTER), rank)
        before = dict(engine.mesh.stats.bytes)
        weights, states = get_state_dict(engine.module, engine.optimizer)
        assert engine.mesh.stats.bytes == before, "a state dict in parts gathers nothing"
        assert all(
            isinstance(weights[name], TensorPart) for name, _ in engine.module.named_parameters()
        )
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{stage}")
        found[stage] = losses + step(engine, range(SAVED_AFTER, STEPS), rank)
        engine.destroy()
    return found


def on_with_others(rank, folder):
    """From the checkpoint of each stage: FSDP2, and hf-zero at other stages."""
    later, found = range(SAVED_AFTER, STEPS), {}
    for stage in STAGES:
        model, optimizer = under_fsdp2()
        load_fsdp2(model, optimizer, f"{folder}/{stage}", "recipe")
        found[f"{stage} to FSDP2"] = step_fsdp2(model, optimizer, later, rank)
        for other in (stage, OTHERS[stage]):
            engine = engine_at(other)
            load_fsdp2(engine.module, engine.optimizer, f"{folder}/{stage}", "recipe")
            found[f"{stage} to {other}"] = step(engine, later, rank)
            engine.destroy()
    model, optimizer = under_fsdp2()
    losses = step_fsdp2(model, optimizer, range(SAVED_AFTER), rank)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/fsdp2")
    found["whole"] = losses + step_fsdp2(model, optimizer, later, rank)
    for stage in STAGES:
        engine = engine_at(stage)
        load_fsdp2(engine.module, engine.optimizer, f"{folder}/fsdp2", "recipe")
        found[f"FSDP2 to {stage}"] = step(engine, later, rank)
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return folder, run_processes(2, from_hf_zero, str(folder))


@pytest.mark.turns
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_training_goes_on_under_either(written, ranks):
    folder, saved = written
    found = run_processes(ranks, on_with_others, str(folder))
    want = mean([each["whole"] for each in found])
    for stage in STAGES:
        assert mean([each[stage] for each in saved]) == pytest.approx(want, rel=2e-6)
    for way in found[0].keys() - {"whole"}:
        losses = mean([each[way] for each in found])
        assert losses == pytest.approx(want[SAVED_AFTER:], rel=2e-6), way


def in_16_bits(rank, folder):
    """bf16: parts are master weights, so that the run continues to the bit. Other options."""
    keys = {"bf16": {"enabled": True}}
    engine = engine_at(3, **keys)
    step(engine, range(SAVED_AFTER), rank)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, states = get_state_dict(engine.module, engine.optimizer, options=options)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    want = step(engine, range(SAVED_AFTER, STEPS), rank)
    whole = get_model_state_dict(engine.module, options=StateDictOptions(full_state_dict=True))
    assert whole.keys() == weights.keys() and not any(
        isinstance(v, TensorPart) for v in whole.values()
    )
    engine.destroy()
    again = engine_at(3, **keys)
    asked = dict(
        zip(("model", "optimizer"), get_state_dict(again.module, again.optimizer, options=options))
    )
    dcp.load(asked, checkpoint_id=folder)
    given = {"model_state_dict": asked["model"], "optim_state_dict": asked["optimizer"]}
    set_state_dict(again.module, again.optimizer, **given, options=options)
    assert step(again, range(SAVED_AFTER, STEPS), rank) == want
    lacking = dict(list(asked["model"].items())[1:])
    with pytest.raises(CheckpointError, match="the state dict lacks"):
        set_state_dict(
            again.module, again.optimizer, **{**given, "model_state_dict": lacking}, options=options
        )
    other = {**asked["model"], next(iter(lacking)): torch.zeros(1)}
    with pytest.raises(CheckpointError, match="take the state dict of this engine"):
        set_state_dict(
            again.module, again.optimizer, **{**given, "model_state_dict": other}, options=options
        )


def test_master_weights_and_options(tmp_path):
    run_processes(2, in_16_bits, str(tmp_path / "bf16"))


def in_files_of_hugging_face(rank, folder):
    """A file of safetensors has one box of a tensor, and a rank's part may be several."""
    engine = engine_at(3)
    step(engine, range(1), rank)
    parts = get_model_state_dict(engine.module)
    for keys in ({}, {"enable_consolidation": True}):
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True, **keys)
        with pytest.raises(CheckpointException, match="has room for one of each tensor"):
            dcp.save(parts, storage_writer=writer)


def test_files_of_safetensors_are_not_written_from_parts(tmp_path):
    run_processes(2, in_files_of_hugging_face, str(tmp_path))
