"""Throw-away twins of an optimizer, and a probe of one that is not on the list of
``elementwise.py``: the same steps over whole tensors, and over shards that are cut inside rows. It
can only refute: equal results of a few steps prove nothing about other sizes, steps and gradients.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.device import kinds
from hf_zero.optim.segments import ParamGroup, current_settings

# what a twin has anew
_REPLACED = ("state", "param_groups", "step")
# Above 128 rows and columns and 4,096 elements libraries factor or quantize what they keep.
SHAPES = ((160, 130), (130,))
SHARDS = 3
STEPS = 5
MAX_GROUPS = 8
# of the largest update: what vectorized loops of other lengths round differently stays below
TOLERANCE = 1e-4


def bare_twin(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer with the class and the attributes of ``optimizer``, over ``groups``, but
    without its state, its hooks and its wrapper of ``step`` (a scheduler's, an engine's).
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state, twin.param_groups = defaultdict(dict), groups
    if switches_weights(optimizer):
        methods: Any = twin
        methods.train()
    return twin


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of the class of ``optimizer`` without hooks, torch's global ones included."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def switches_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has weights for training and others for evaluation, between
    which its own ``train`` and ``eval`` switch; it steps the former alone (schedule-free ones,
    arXiv 2405.15682).
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def difference(optimizer: torch.optim.Optimizer) -> str:
    """Return why the update of ``optimizer`` cannot be made over shards: the end of a sentence that
    begins with its name, or "" if :data:`STEPS` steps show no difference. The optimizer, its
    parameters and the random generators keep their state.
    """
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _REPLACED}
    if names := [name for name, value in attributes.items() if _holds_tensors(value)]:
        return f"keeps tensors or an optimizer of its own ({', '.join(sorted(names))})"
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    device = torch.device("cpu") if device is None or device.type == "meta" else device
    draw = torch.Generator().manual_seed(0)
    options = _distinct(optimizer.param_groups)
    wholes = [[_drawn(shape, draw).to(device) for shape in SHAPES] for _ in options]
    gradients = [
        [[_drawn(shape, draw).to(device) for shape in SHAPES] for _ in options]
        for _ in range(STEPS)
    ]
    try:
        after = _stepped(optimizer, options, wholes, gradients)
        shards = [
            _stepped(
                optimizer,
                options,
                [[_shard(t, rank) for t in group] for group in wholes],
                [[[_shard(t, rank) for t in group] for group in step] for step in gradients],
            )
            for rank in range(SHARDS)
        ]
    except Exception as error:  # an update may refuse anything
        return f"raised {type(error).__name__} in a probe ({error})"
    worst = 0.0
    for before, whole, *parts in zip(wholes, after, *shards, strict=True):
        for index, (old, new) in enumerate(zip(before, whole, strict=True)):
            joined = torch.cat([part[index] for part in parts]).view_as(new)
            update = (new - old).abs().max().item()
            if not update > 0:
                return "changed nothing in a probe"
            relative = (joined - new).abs().max().item() / update
            worst = max(worst, relative if relative == relative else float("inf"))
    if worst > TOLERANCE:
        return (
            f"updates shards differently from whole tensors, by {worst:.2g} of the largest update "
            f"in {STEPS} steps"
        )
    return ""


def _holds_tensors(value: object, depth: int = 2) -> bool:
    if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer)):
        return True
    if depth and isinstance(value, dict):
        return any(_holds_tensors(item, depth - 1) for item in (*value.keys(), *value.values()))
    if depth and isinstance(value, (list, tuple, set)):
        return any(_holds_tensors(item, depth - 1) for item in value)
    return False


def _distinct(groups: Iterable[ParamGroup]) -> list[dict[str, object]]:
    """Return the different options of ``groups``, with a learning rate that moves something."""
    distinct: dict[str, dict[str, object]] = {}
    for group in groups:
        options = current_settings(group)
        options.pop("param_names", None)
        if isinstance(options.get("lr"), (int, float)) and not options["lr"]:
            options["lr"] = 1e-3  # the first step of a warmup
        distinct.setdefault(repr(sorted(options.items())), options)
    return list(distinct.values())[:MAX_GROUPS]


def _drawn(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Draw a tensor whose rows have different norms."""
    rows = torch.logspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=draw) * rows


def _shard(whole: Tensor, rank: int) -> Tensor:
    count, flat = whole.numel(), whole.reshape(-1)
    return flat[rank * count // SHARDS : (rank + 1) * count // SHARDS]


def _stepped(
    optimizer: torch.optim.Optimizer,
    options: list[dict[str, object]],
    starts: list[list[Tensor]],
    gradients: list[list[list[Tensor]]],
) -> list[list[Tensor]]:
    """Return parameters ``starts``, one list a group, after a step over each ``gradients``."""
    groups = [[nn.Parameter(start.clone()) for start in group] for group in starts]
    settings = [
        {**copy.deepcopy(option), "params": group}
        for option, group in zip(options, groups, strict=True)
    ]
    twin = bare_twin(optimizer, settings)
    vars(twin).update({name: copy.copy(value) for name, value in vars(twin).items()})
    devices = {t.device for group in starts for t in group if not kinds.is_synchronous(t.device)}
    with torch.random.fork_rng(devices=list(devices)), torch.enable_grad():
        torch.manual_seed(0)
        for step in gradients:
            for group, grads_of_group in zip(groups, step, strict=True):
                for parameter, gradient in zip(group, grads_of_group, strict=True):
                    parameter.grad = gradient.clone()
            twin.step()
    return [[parameter.detach() for parameter in group] for group in groups]
