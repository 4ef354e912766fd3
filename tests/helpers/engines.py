"""The engine as a :class:`Session`, and runs of it on threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.zero.access import full as gathered
from hf_zero.zero.access import gathered_parameters
from hf_zero.zero.gather.unit import GatherState, unit_of
from hf_zero.zero.layout.flat_buffer import FlatBuffer, owner_of
from hf_zero.zero.layout.parameter import name_of
from tests.helpers.models import ROWS
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Job, Plan, Session, Trace, merge, train

STAGES = (0, 1, 2, 3)


def config_of(stage: int, plan: Plan | None = None, **more: Any) -> dict[str, Any]:
    """DeepSpeed's dialect for ``plan``; ``more`` replaces or adds top-level keys."""
    plan = plan or Plan()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": {"stage": stage},
    }
    if plan.clip:
        config["gradient_clipping"] = plan.clip
    if plan.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if plan.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": plan.scale}
    config.update(more)
    return config


class OnEngine(Session):
    """Drives an engine the way a script does."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.engine, self.module, self.dtype, self.memory = engine, engine.module, plan.dtype, {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def grads(self) -> dict[str, torch.Tensor]:
        return full_grads(self.engine)

    def norm(self) -> float:
        return self.engine.get_global_grad_norm()

    def weights(self) -> dict[str, torch.Tensor]:
        return full_weights(self.engine)

    def close(self) -> None:
        self.engine.destroy()


def start(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any], **more: Any
) -> Any:
    """``hf_zero.initialize``'s engine alone."""
    import hf_zero

    return hf_zero.initialize(model=model, optimizer=optimizer, config=config, **more)[0]


def still_gathered(engine: Any) -> list[str]:
    """Labels of the sharded units that are not released."""
    units = (unit for unit in engine.units if unit.sharded_flats)
    return [unit.label for unit in units if unit.state is not GatherState.RELEASED]


def bytes_along(engine: Any, axis: str) -> Counter[str]:
    """Return the bytes of collectives along a parallel axis, by operation."""
    found = Counter[str]()
    for row in engine.measures.counts.rows.values():
        if row.group.startswith(axis):
            found[row.operation] += row.nbytes
    return found


def full_grads(engine: Any) -> dict[str, torch.Tensor]:
    """Whole gradients of the trainable parameters, averaged and unscaled. Collective."""

    def own(flat: FlatBuffer) -> torch.Tensor:
        engine, own = gathered.reduced_gradient(flat)
        assert own is not None
        return own.float() / engine.scaler.scale

    trainable = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return _wholes(trainable, own)


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Whole weights: the fp32 master of what is trained, the parameter itself where it is frozen or
    its engine has given it back.

    Collective.
    """
    named = dict(engine.module.named_parameters())
    owned = {name: p for name, p in named.items() if p.requires_grad and owner_of(p) is not None}
    trained = _wholes(owned, _masters)
    weights = {}
    for name, p in named.items():
        if name in trained:
            weights[name] = trained[name]
        else:
            with gathered_parameters.GatheredParameters([p]):
                weights[name] = p.detach().float().clone()
    return weights


def _masters(flat: FlatBuffer) -> torch.Tensor:
    unit_of(flat).take_user_writes()
    master = flat.optimizer_shard.master
    assert master is not None
    return master.float()


@torch.no_grad()
def _wholes(
    parameters: dict[str, nn.Parameter], own_of: Callable[[FlatBuffer], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the full values of ``parameters``, like ``hf_zero.safe_get_full_*``, with one
    all-reduce per flat buffer: collectives dominate the time of most tests on threads. Collective.
    """
    members: dict[FlatBuffer, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        flat = owner_of(parameter)
        assert flat is not None, f"{name} belongs to no engine"
        members.setdefault(flat, {})[name] = parameter
    found: dict[str, torch.Tensor] = {}
    for flat, named in members.items():
        own, sizes = own_of(flat), [p.numel() for p in named.values()]
        joined = torch.zeros(sum(sizes), device=flat.full.device)
        for (name, parameter), whole in zip(named.items(), joined.split(sizes)):
            first, start, stop = flat.spec.own_range(name_of(parameter))
            whole[first : first + stop - start] = own[start:stop]
            found[name] = whole.view(parameter.shape)
        if flat.layout.num_shards > 1:
            flat.mesh.shard.all_reduce(joined, f"whole {flat.key}").wait()
    return {name: found[name] for name in parameters}


Opener = Callable[[nn.Module, torch.optim.Optimizer, Plan], Session]


def train_on_rank(
    rank: int, models: list[nn.Module], job: Job, plan: Plan, opener: Opener
) -> Trace:
    model = models[rank]
    session = opener(model, job.optimizer(model), plan)
    trace = train(session, job, plan, rank)
    session.close()
    return trace


def train_on_threads(job: Job, plan: Plan, opener: Opener, timeout: float = 240.0) -> Trace:
    """Train on ``plan.ranks`` threads and merge what they record."""
    models = [job.build() for _ in range(plan.ranks)]
    return merge(run_ranks(plan.ranks, train_on_rank, models, job, plan, opener, timeout=timeout))


def engine_opener(stage: int, **more: Any) -> Opener:
    return lambda model, optimizer, plan: OnEngine(
        start(model, optimizer, config_of(stage, plan, **more)), plan
    )
