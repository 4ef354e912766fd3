"""One model trained under FSDP2 and under hf-zero, and its checkpoints through torch's DCP."""

from __future__ import annotations

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
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, batch, build, optimizer_of
from tests.helpers.ranks import run_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
BEFORE, LATER = range(SAVED_AFTER), range(SAVED_AFTER, STEPS)


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


def save_dcp(model, optimizer, folder):
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(folder))
    return weights, states


def load_dcp(model, optimizer, folder, form="recipe"):
    """Load as a script does under either."""
    options = FLAT if form == "torchtitan" else None
    weights, states = get_state_dict(model, optimizer, options=options)
    if form == "torchtitan":  # the model's names at the top
        asked = {**weights, "optimizer": states}
        dcp.load(asked, checkpoint_id=str(folder))
        weights = {name: asked[name] for name in weights}
    else:
        asked = {"model": weights, "optimizer": states}
        dcp.load(asked, checkpoint_id=str(folder))
        weights = asked["model"]
    given = {"model_state_dict": weights, "optim_state_dict": asked["optimizer"]}
    set_state_dict(model, optimizer, **given, options=options)


def engine_at(stage, model=None, ranks=None, lr_scheduler=None, resume=None, **keys):
    """``stage``: a number, or the section of the configuration."""
    model = build(True) if model is None else model
    optimizer = optimizer_of(model)
    config = {
        "train_micro_batch_size_per_gpu": 6 // (ranks or dist.get_world_size()),
        "zero_optimization": {"stage": stage} if isinstance(stage, int) else stage,
        "gradient_clipping": 1.0,
        **keys,
    }
    more = {} if lr_scheduler is None else {"lr_scheduler": lr_scheduler(optimizer)}
    if resume is not None:
        more["resume"] = resume
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config, **more)[0]


def step_engine(engine, steps, rank):
    losses = []
    for step in steps:
        loss = engine(*batch(step, rank, engine.world_size))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def of_hf_zero(rank, models, stage, load, save, steps, resumes):
    engine = engine_at(stage, models[rank], len(models), resume=load if resumes else None)
    client_state = engine.client_state
    if not resumes:
        client_state = engine.load_checkpoint(load.parent, tag=load.name)[1]
    else:
        assert engine.resumed_from == str(load)
    losses = step_engine(engine, steps, rank)
    if save is not None:
        engine.save_checkpoint(save)
    return losses, dict(client_state)


def hf_zero_on(ranks, stage, load, save=None, steps=LATER, resumes=False):
    """The mean losses of ranks that are threads, which load and save, and the client state."""
    models = [build(True) for _ in range(ranks)]
    found = run_ranks(ranks, of_hf_zero, models, stage, load, save, steps, resumes)
    return mean([losses for losses, _ in found]), found[0][1]


def mean(losses):
    return torch.tensor(losses).mean(0).tolist()


EXTRA = {"extra": {"epoch": 3}}
BESIDE = {"runs": {"a": {"step": 1}, "b": {"step": 2}}, "seen": [torch.ones(2), 5]}


class Application:
    """The single object that torch's checkpoint recipe saves, with the model and the optimizer."""

    def __init__(self, weights, states):
        self.held = {"model": weights, "optim": states}

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        raise NotImplementedError


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)


def write(rank, folder):
    """Train under FSDP2, save on the way in torch's forms, and go on: the losses."""
    model, optimizer = under_fsdp2()
    losses = step_fsdp2(model, optimizer, BEFORE, rank)
    # its rates are constant, so that the losses of all forms are comparable
    schedule = step_lr(optimizer)
    for _ in BEFORE:
        schedule.step()
    weights, states = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": states}
    flat = get_state_dict(model, optimizer, options=FLAT)[1]
    dcp.async_save(
        {"model": weights, "optimizer": flat}, checkpoint_id=f"{folder}/flattened"
    ).result()
    for name, content in {
        "one": both | EXTRA,
        "scheduled": both | {"lr_scheduler": schedule.state_dict()},
        # as Accelerate lays them
        "two/pytorch_model_fsdp_0": {"model": weights},
        "two/optimizer_0": {"optimizer": states},
        "stateful": {"app": Application(weights, states)},
        "unnamed": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "bare": weights,
        "beside": {"model": weights, **BESIDE},
    }.items():
        dcp.save(content, checkpoint_id=f"{folder}/{name}")
    return losses + step_fsdp2(model, optimizer, LATER, rank)
