"""``hf_zero.expert_parallel``: each rank keeps its part of the experts of a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.expert_parallel import AUTOEP_SIZE
from hf_zero.distributed import process_group
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.cutting import HoldsParts, cut
from hf_zero.parallel.expert.axis import AXIS, expert_axis, expert_dims
from hf_zero.parallel.expert.dispatch import run_experts
from hf_zero.parallel.expert.marks import mark
from hf_zero.parallel.expert.moe_layer import MOELayer
from hf_zero.parallel.expert.recomputed import KEPT, RoutesOfForwards
from hf_zero.parallel.tensor.layers import is_sharded, put_on, take_off
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of

# what plans of transformers say of the parameters that hold one expert after another
STACKED = "grouped_gemm"
RECORD = "_hf_zero_experts"
_WRAPPED = ".base_layer"  # in the path of what PEFT has put adapters around


@dataclass(frozen=True)
class _Experts:
    """How the experts of one module are spread: an attribute of it."""

    axis: MeshDim
    count: int  # on all ranks
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Experts:
        return self


class Dispatches(HoldsParts):
    """What comes before the class of a module of experts, on the classes of which each rank has
    its part: their tokens are sent to them.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """States [S, hidden], numbers of experts and weights [S, k] to [S, hidden]."""
        held: _Experts = self.__dict__[RECORD]
        output = run_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            held.count,
            self._run,
            held.axis,
            held.name,
            self.__dict__.get(KEPT),
        )
        return output.to(hidden_states.dtype)

    def _run(self, rows: torch.Tensor, numbers: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        forward = super().forward
        if len(rows):
            return forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        # A row of nothing, so that the gradients of this rank's experts are zero and not missing,
        # and the backward has its exchanges.
        none = rows.sum(0, keepdim=True)
        return forward(none, numbers.new_zeros(1, 1), rows.new_ones(1, 1))[:0]


def expert_parallel(model: nn.Module, size: int) -> nn.Module:
    """Let each of ``size`` neighbouring ranks keep its part of the experts of ``model``, in place
    (collective over all ranks).

    Ranks read different batches; each sends its tokens to the ranks of their experts and has the
    results back. Values that are here are rank 0's; those of a model that is loaded in shards are
    read by each rank in its own part.

    Args:
        model: a mixture of experts of transformers, which names the parameters that hold
            experts (``ep_plan``).
        size: ranks that hold one set of experts together; it divides the experts, and the ranks
            that read different batches.

    Returns:
        ``model``.

    Raises:
        ConfigError: a size that does not divide, a model without such a plan, a second size,
            adapters of experts.
    """
    dims = expert_dims(size, AUTOEP_SIZE)
    for path, module, _ in _stacked(model):
        if _WRAPPED in f".{path}" and (dims is not None or RECORD in module.__dict__):
            raise ConfigError(
                f"{path} has adapters (PEFT's target_parameters), which each rank would hold for "
                "all experts, or for its own alone; leave the experts out of target_parameters, or "
                "remove the section expert_parallel"
            )
    if dims is None:
        return model
    rank = dims.coordinate(process_group.get_rank(), AXIS)
    cuts = cuts_of_experts(model, rank, size)
    # All is known to be right: what is refused leaves the job as it was.
    axis = init_parallel(dims).along(AXIS)
    for parameter, sharding in cuts.items():
        cut(parameter, sharding)
        mark(parameter, f"ep_size_{size}")
    for path, module, _ in _stacked(model):
        if RECORD not in module.__dict__:
            _dispatch(module, _Experts(axis, module.num_experts, path))  # type: ignore[arg-type]
    return model


def _dispatch(module: Any, held: _Experts) -> None:
    """Have ``module`` send its tokens to the ranks of their experts: within what tensor
    parallelism sums up, so that it sums one row for each token.
    """
    around = take_off(module) if is_sharded(module) else None
    module.__dict__[RECORD] = held
    module.num_experts //= held.axis.size
    kind = type(module)
    name = f"ExpertParallel{kind.__name__}"
    module.__class__ = type(name, (Dispatches, kind), {"__module__": kind.__module__})
    if around is not None:
        put_on(module, *around)


def spread_experts(model: nn.Module, config: ZeroConfig) -> None:
    """Spread the experts of ``model`` over ranks as ``config`` says, and give its layers of class
    MoE the ranks of their experts (collective over all ranks of the job where any are spread).
    """
    expert_parallel(model, config.expert_parallel.size)
    for path, module in _spread_layers(model):
        module.axis = axis = expert_axis(module.ep_size, f"ep_size of {path}")
        assert axis is not None
        for at, expert in enumerate(module.experts.deepspeed_experts):
            numbers = range(at, axis.size * module.num_local_experts, module.num_local_experts)
            before = f"{path}.experts" if path else "experts"
            names = tuple(f"{before}.deepspeed_experts.{number}" for number in numbers)
            for tensor in itertools.chain(expert.parameters(), expert.buffers()):
                held = sharding_of(tensor)
                axes = tuple(sorted({*held.axes, AXIS}))
                set_sharding(tensor, replace(held, axes=axes, names=names))


def on_model(model: nn.Module) -> dict[str, RoutesOfForwards]:
    """What an engine puts on ``model`` for its experts, among its techniques."""
    spread = [module for module in model.modules() if RECORD in module.__dict__]
    spread += [module for _, module in _spread_layers(model)]
    return {AUTOEP_SIZE: RoutesOfForwards(spread)} if spread else {}


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer]]:
    """Layers of class MoE of which ranks hold different experts, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, MOELayer) and module.ep_size > 1:
            yield path, module


def experts_of_layers(model: nn.Module) -> dict[nn.Parameter, int]:
    """Parameters of experts in layers of class MoE, and how many ranks hold others under their
    names.
    """
    return {
        parameter: module.ep_size
        for _, module in _spread_layers(model)
        for parameter in module.experts.parameters()
    }


def cuts_of_experts(
    model: nn.Module, rank: int, size: int, others: Mapping[nn.Parameter, Sharding] | None = None
) -> dict[nn.Parameter, Sharding]:
    """How the parameters of ``model`` that hold experts, of which each rank has all, are cut for
    ``rank`` of ``size``. ``others``: how some are going to be spread otherwise before.

    Raises ConfigError for a model that names none, and for experts that do not divide.
    """
    found: dict[nn.Parameter, Sharding] = {}
    named = False
    for path, module, names in _stacked(model):
        for name in names:
            parameter, named = module._parameters[name], True
            assert parameter is not None
            held = (others or {}).get(parameter, sharding_of(parameter))
            if AXIS in held.axes:
                continue
            experts = parameter.shape[0]
            if experts % size:
                raise ConfigError(
                    f"{path}.{name} holds {experts} experts, which {AUTOEP_SIZE} = {size} does not "
                    f"divide; choose a size that divides {experts}"
                )
            found[parameter] = held.further(tuple(parameter.shape), AXIS, 0, rank, size)
    if not named:
        raise ConfigError(
            f"{type(model).__name__} names no experts (ep_plan), and {AUTOEP_SIZE} is {size}; "
            "remove the section expert_parallel, or build the model with "
            "deepspeed.moe.layer.MoE(ep_size=...)"
        )
    return found


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Modules of experts with their paths, and their parameters that hold one after another."""
    for at, inner in model.named_modules():
        plan = getattr(inner, "ep_plan", None)
        if not plan:
            continue
        patterns = [
            re.compile(rf"(?:.*\.)?{re.escape(name).replace(re.escape('*'), '[^.]+')}")
            for name, style in plan.items()
            if style == STACKED
        ]
        for path, module in inner.named_modules(prefix=at):
            plain = path.replace(_WRAPPED, "")
            names = [
                name
                for name, parameter in module._parameters.items()
                if parameter is not None and any(p.fullmatch(f"{plain}.{name}") for p in patterns)
            ]
            if names:
                yield path, module, names
        return
