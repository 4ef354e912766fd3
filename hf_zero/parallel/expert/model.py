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
from hf_zero.config.sections import AUTOEP_SIZE
from hf_zero.distributed import process_group
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError
from hf_zero.parallel.cutting import HoldsParts, check_module, cut
from hf_zero.parallel.expert.dispatch import KEPT, RoutesOfForwards, run_experts
from hf_zero.parallel.expert.marks import AXIS, expert_dims, expert_mesh_dim, mark
from hf_zero.parallel.expert.moe_layer import MOELayer
from hf_zero.parallel.tensor.layers import is_sharded, put_on, take_off
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of
from hf_zero.zero.layout.walk import attribute_of, named_modules_of

# style of stacked expert parameters in plans of transformers
STACKED = "grouped_gemm"
RECORD = "_hf_zero_experts"
# path components of what PEFT has wrapped: in adapters, or for modules_to_save
_ADAPTED, _COPIED = ".base_layer", re.compile(r"\.original_module|\.modules_to_save\.[^.]+")


@dataclass(frozen=True)
class _Experts:
    """Distribution of one module's experts over ranks, stored as an attribute of the module."""

    mesh_dim: MeshDim
    count: int  # on all ranks
    name: str

    def __deepcopy__(self, memo: dict[int, object]) -> _Experts:
        return self


class Dispatches(HoldsParts):
    """Mixin before the class of a module of experts of which each rank holds a part: it sends
    tokens to the ranks of their experts.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute [S, hidden] from states [S, hidden], expert indices [S, k] and weights [S, k]."""
        experts: _Experts = self.__dict__[RECORD]
        output = run_experts(
            hidden_states, top_k_index, top_k_weights, experts.count,
            self._run, experts.mesh_dim, experts.name, self.__dict__.get(KEPT),
        )  # fmt: skip
        return output.to(hidden_states.dtype)

    def _run(self, rows: torch.Tensor, numbers: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        forward = super().forward
        if len(rows):
            return forward(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        # Without tokens, run one dummy row: the gradients of this rank's experts are then zero
        # rather than missing, and the backward runs its all-to-alls.
        none = rows.sum(0, keepdim=True)
        return forward(none, numbers.new_zeros(1, 1), rows.new_ones(1, 1))[:0]


def expert_parallel(model: nn.Module, size: int) -> nn.Module:
    """Distribute the experts of ``model`` in place over groups of ``size`` neighboring ranks.
    Collective over all ranks.

    Ranks read different batches. Each rank sends its tokens to the ranks that hold their experts,
    and receives the results. All ranks take the values of rank 0, or read their own parts if the
    model is loaded in shards.

    Args:
        model: a mixture of experts of transformers that names its expert parameters (``ep_plan``).
        size: number of ranks that hold one set of experts together; it divides the experts, and
            the ranks that read different batches.

    Returns:
        ``model``.

    Raises:
        ConfigError: a size that does not divide, a model without such a plan, a second size,
            adapters of experts.
    """
    check_module(model, "expert_parallel")
    dims = expert_dims(size, AUTOEP_SIZE)
    if dims is None:
        refuse_adapters(model, spreads=False)
        return model
    rank = dims.coordinate(process_group.get_rank(), AXIS)
    cuts = cuts_of_experts(model, rank, size)
    # All checks have passed: a refused call leaves the job unchanged.
    mesh_dim = init_parallel(dims).along(AXIS)
    for parameter, sharding in cuts.items():
        cut(parameter, sharding)
        mark(parameter, f"ep_size_{size}")
    for path, module, _ in _stacked(model):
        if RECORD not in module.__dict__:
            _dispatch(module, _Experts(mesh_dim, module.num_experts, path))  # type: ignore[arg-type]
    return model


def refuse_adapters(model: nn.Module, spreads: bool) -> None:
    """Raise ConfigError for adapters of PEFT on experts of ``model`` that are spread over ranks, or
    will be (``spreads``).
    """
    for path, module, _ in _stacked(model):
        if _ADAPTED in f".{path}" and (spreads or RECORD in module.__dict__):
            raise ConfigError(
                f"{path} has adapters (PEFT's target_parameters), which each rank would hold for "
                "all experts, or only for its own; leave the experts out of target_parameters, or "
                "remove the section expert_parallel"
            )


def _dispatch(module: Any, experts: _Experts) -> None:
    """Make ``module`` send its tokens to the ranks of their experts, inside the sum of tensor
    parallelism, so that the sum has one row per token.
    """
    around = take_off(module) if is_sharded(module) else None
    module.__dict__[RECORD] = experts
    module.num_experts //= experts.mesh_dim.size
    kind = type(module)
    name = f"ExpertParallel{kind.__name__}"
    module.__class__ = type(name, (Dispatches, kind), {"__module__": kind.__module__})
    if around is not None:
        put_on(module, *around)


def dims_with_experts(model: nn.Module, config: ZeroConfig, dims: ParallelDims) -> ParallelDims:
    """Return ``dims``, those of the job, with the ranks over which ``config`` and the MoE layers of
    ``model`` spread experts. Raises as :func:`hf_zero.parallel.expert.marks.expert_dims`.
    """
    sizes = [(config.expert_parallel.size, AUTOEP_SIZE)]
    sizes += [(module.ep_size, f"ep_size of {path}") for path, module in _spread_layers(model)]
    for size, key in sizes:
        dims = expert_dims(size, key, dims) or dims
    return dims


def spread_experts(model: nn.Module, config: ZeroConfig) -> None:
    """Spread the experts of ``model`` over ranks by ``config``, and give its MoE layers their
    expert axis (collective over all ranks of the job if any are spread).
    """
    expert_parallel(model, config.expert_parallel.size)
    for path, module in _spread_layers(model):
        module.mesh_dim = mesh_dim = expert_mesh_dim(module.ep_size, f"ep_size of {path}")
        assert mesh_dim is not None
        for at, expert in enumerate(module.experts.deepspeed_experts):
            numbers = range(at, mesh_dim.size * module.num_local_experts, module.num_local_experts)
            before = f"{path}.experts" if path else "experts"
            names = tuple(f"{before}.deepspeed_experts.{number}" for number in numbers)
            for tensor in itertools.chain(expert.parameters(), expert.buffers()):
                sharding = sharding_of(tensor)
                axes = tuple(sorted({*sharding.axes, AXIS}))
                set_sharding(tensor, replace(sharding, axes=axes, names=names))


def features_of(model: nn.Module) -> dict[str, RoutesOfForwards]:
    """Return the features that an engine applies to ``model`` for its experts."""
    spread = [module for module in model.modules() if RECORD in module.__dict__]
    spread += [module for _, module in _spread_layers(model)]
    return {AUTOEP_SIZE: RoutesOfForwards(spread)} if spread else {}


def _spread_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer]]:
    """Yield the MoE layers whose experts differ between ranks, with their paths."""
    for path, module in named_modules_of(model):
        if isinstance(module, MOELayer) and module.ep_size > 1:
            yield path, module


def experts_of_layers(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the expert parameters of MoE layers, each with the number of ranks that hold other
    experts under its name.
    """
    return {
        parameter: module.ep_size
        for _, module in _spread_layers(model)
        for parameter in module.experts.parameters()
    }


def cuts_of_experts(
    model: nn.Module, rank: int, size: int, others: Mapping[nn.Parameter, Sharding] | None = None
) -> dict[nn.Parameter, Sharding]:
    """Return the sharding of the expert parameters of ``model`` that are whole so far, for ``rank``
    of ``size``. ``others``: shardings planned for some of them along other axes, applied before.

    Raises ConfigError for a model that names no experts, for experts that do not divide, and for
    adapters of experts.
    """
    cuts: dict[nn.Parameter, Sharding] = {}
    named = False
    refuse_adapters(model, spreads=True)
    for path, module, names in _stacked(model):
        for name in names:
            parameter, named = module._parameters[name], True
            assert parameter is not None
            sharding = (others or {}).get(parameter, sharding_of(parameter))
            if AXIS in sharding.axes:
                continue
            experts = parameter.shape[0]
            if experts % size:
                raise ConfigError(
                    f"{path}.{name} holds {experts} experts, which {AUTOEP_SIZE} = {size} does not "
                    f"divide; choose a size that divides {experts}"
                )
            cuts[parameter] = sharding.further(tuple(parameter.shape), AXIS, 0, rank, size)
    if not named:
        raise ConfigError(
            f"{type(model).__name__} names no experts (ep_plan), and {AUTOEP_SIZE} is {size}; "
            "remove the section expert_parallel, or build the model with "
            "deepspeed.moe.layer.MoE(ep_size=...)"
        )
    return cuts


def _stacked(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield the modules of experts with their paths and the names of their stacked parameters."""
    for at, inner in named_modules_of(model):
        config = attribute_of(inner, "config")
        # older releases of transformers leave the plan in the configuration
        plan = attribute_of(inner, "ep_plan") or getattr(config, "base_model_ep_plan", None)
        if not plan:
            continue
        patterns = [
            re.compile(rf"(?:.*\.)?{re.escape(name).replace(re.escape('*'), '[^.]+')}")
            for name, style in plan.items()
            if style == STACKED
        ]
        for path, module in inner.named_modules(prefix=at):
            plain = _COPIED.sub("", path.replace(_ADAPTED, ""))
            names = [
                name
                for name, parameter in module._parameters.items()
                if parameter is not None and any(p.fullmatch(f"{plain}.{name}") for p in patterns)
            ]
            if names:
                yield path, module, names
        return
