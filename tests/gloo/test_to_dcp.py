"""Checkpoints written for torch.distributed.checkpoint: FSDP2 continues as hf-zero did, and as
itself after a way through hf-zero, on other numbers of ranks.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, batch, build, optimizer_of
from tests.helpers.processes import run_processes
from tests.helpers.ranks import run_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def under_fsdp2():
    model, ranks = build(True), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def step_fsdp2(model, optimizer, steps, rank):
    losses = []
    for step in steps:
        loss = model(*batch(step, rank, dist.get_world_size()))
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def load_fsdp2(model, optimizer, folder, form):
    options = FLAT if form == "torchtitan" else None
    weights, states = get_state_dict(model, optimizer, options=options)
    if form == "torchtitan":  # the model's names at the top
        asked = {**weights, "optimizer": states}
        dcp.load(asked, checkpoint_id=folder)
        weights = {name: asked[name] for name in weights}
    else:
        asked = {"model": weights, "optimizer": states}
        dcp.load(asked, checkpoint_id=folder)
        weights = asked["model"]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=asked["optimizer"],
        options=options,
    )


def of_fsdp2(rank, work):
    """FSDP2 from the start, saved on the way, and on from what hf-zero made of it."""
    model, optimizer = under_fsdp2()
    losses = step_fsdp2(model, optimizer, range(SAVED_AFTER), rank)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{work}/fsdp2")
    return losses + step_fsdp2(model, optimizer, range(SAVED_AFTER, STEPS), rank)


def on_with_fsdp2(rank, folder, form, first):
    model, optimizer = under_fsdp2()
    load_fsdp2(model, optimizer, folder, form)
    return step_fsdp2(model, optimizer, range(first, STEPS), rank)


def of_hf_zero(rank, models, stage, load, save, steps):
    config = {
        "train_micro_batch_size_per_gpu": 6 // len(models),
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    model = models[rank]
    engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    if load is not None:
        engine.load_checkpoint(load.parent, tag=load.name)
    losses = []
    for step in steps:
        loss = engine(*batch(step, rank, len(models)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    if save is not None:
        engine.save_checkpoint(save)
    return losses


def hf_zero_on(ranks, *args):
    return run_ranks(ranks, of_hf_zero, [build(True) for _ in range(ranks)], *args)


def mean(losses):
    return torch.tensor(losses).mean(0).tolist()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """An FSDP2 run on two ranks, its checkpoint through one step of hf-zero on three, and that
    one converted back.
    """
    folder = tmp_path_factory.mktemp("dcp")
    want = mean(run_processes(2, of_fsdp2, str(folder)))
    steps = range(SAVED_AFTER, SAVED_AFTER + 1)
    between = mean(hf_zero_on(3, 3, folder / "fsdp2", folder / "run", steps))
    done = hf_zero.convert_checkpoint(folder / "run", folder / "back", to="dcp")
    return SimpleNamespace(folder=folder, want=want, between=between, done=done)


@pytest.mark.turns
@pytest.mark.parametrize("form, ranks", [("recipe", 2), ("recipe", 1), ("torchtitan", 3)])
def test_fsdp2_goes_on_after_hf_zero(written, form, ranks):
    assert written.between == pytest.approx(written.want[SAVED_AFTER : SAVED_AFTER + 1], rel=2e-6)
    losses = run_processes(
        ranks, on_with_fsdp2, str(written.folder / "back"), form, SAVED_AFTER + 1
    )
    assert mean(losses) == pytest.approx(written.want[SAVED_AFTER + 1 :], rel=2e-6)


@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 2)])
def test_hf_zero_reads_it_again(written, ranks, stage):
    steps = range(SAVED_AFTER + 1, STEPS)
    losses = mean(hf_zero_on(ranks, stage, written.folder / "back", None, steps))
    assert losses == pytest.approx(written.want[SAVED_AFTER + 1 :], rel=2e-6)


def test_safetensors_are_in_the_layout_that_torch_reads(written, tmp_path):
    done = hf_zero.convert_checkpoint(
        written.folder / "run", tmp_path / "model", max_shard_size=400, to="safetensors"
    )
    assert len(done.files) > 1
    asked = {name: torch.empty_like(value) for name, value in build(True).state_dict().items()}
    want = {"model": {name: torch.empty_like(value) for name, value in asked.items()}}
    dcp.load(want, checkpoint_id=str(written.folder / "back"), no_dist=True)
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "model"))
    held = reader.read_metadata().state_dict_metadata
    asked = {name: value for name, value in asked.items() if name in held}
    dcp.load(asked, storage_reader=reader, no_dist=True)
    assert len(asked) == done.tensors
    for name, value in asked.items():
        assert torch.equal(value, want["model"][name]), name


def test_what_it_refuses(written, tmp_path):
    run = written.folder / "run"
    with pytest.raises(ConfigError, match=r"to='onnx' is no format"):
        hf_zero.convert_checkpoint(run, tmp_path / "out", to="onnx")
    for options in ({"only": "*.weight"}, {"adapters": True}, {"workers": 3}):
        with pytest.raises(
            ConfigError, match=f"does not take {next(iter(options))} .*leave it out"
        ):
            hf_zero.convert_checkpoint(run, tmp_path / "out", to="dcp", **options)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(CheckpointError, match="taken exists; remove it"):
        hf_zero.convert_checkpoint(run, tmp_path / "taken", to="dcp")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
