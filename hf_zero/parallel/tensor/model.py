"""``hf_zero.tensor_parallel``: each rank of a group keeps a part of every matrix of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hf_zero.config.tensor_parallel import TENSOR_SIZE
from hf_zero.distributed import init, process_group
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError
from hf_zero.loading import make_pending
from hf_zero.parallel.cutting import cut
from hf_zero.parallel.tensor import layers
from hf_zero.parallel.tensor.agreement import Agreement
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.cutting import spread
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers
from hf_zero.parallel.tensor.dtensors import unwrap
from hf_zero.parallel.tensor.families import COUNTS
from hf_zero.parallel.tensor.layers import Part, is_sharded, put_on
from hf_zero.parallel.tensor.plan import (
    Target,
    is_of_family,
    plan_of,
    planned_model,
    targets,
)
from hf_zero.parallel.tensor.shared_inputs import SharedInputs
from hf_zero.parallel.tensor.styles import dimension, is_conv1d
from hf_zero.parameters.sharding import Sharding, set_sharding, sharding_of

RECORD = "_hf_zero_tensor_parallel"


@dataclass
class TensorParallel:
    """What a model was cut into: an attribute of it."""

    axis: TensorAxis
    random: OwnRandomNumbers | None
    plan: Mapping[str, str | None] | None
    agreement: Agreement
    rotary_width: int  # of multi-head latent attention
    inputs: dict[str, SharedInputs] = field(default_factory=dict)  # by the module they are of
    counted: set[str] = field(default_factory=set)  # modules whose numbers of heads are divided

    @property
    def size(self) -> int:
        return self.axis.size


def tensor_parallel(
    model: nn.Module, size: int, plan: Mapping[str, str | None] | None = None
) -> nn.Module:
    """Let each of ``size`` neighbouring ranks keep its part of the matrices of ``model``, in place
    (collective over all ranks).

    The ranks of such a group must read the same batches; data is parallel over the groups. Values
    that are here are rank 0's; those of a model that is loaded in shards are read by each rank in
    its own part. Adapters (LoRA) are cut with their layers, before or after: called again, this
    takes what was added since.

    Args:
        model: a model of transformers with a tensor-parallel plan of its own, or of a family
            that hf-zero has one for; also inside PEFT's adapters, also one that transformers has
            split already (``DistributedConfig(tp_size=...)``).
        size: ranks of a group; it divides the number of ranks, heads and widths.
        plan: changes to the model's plan: styles by names of modules, ``*`` for each number, or
            None for those that stay whole.

    Returns:
        ``model``.

    Raises:
        ConfigError: a size that does not divide, a model without a plan, a layer that its style
            cannot run.
        NotBuiltError: a style that is not built.
    """
    if not isinstance(model, nn.Module):
        what = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(
            f"tensor_parallel() got {what}, which is not a module; pass the model itself, as "
            "AutoModelForCausalLM.from_pretrained(path)"
        )
    check_size(size, TENSOR_SIZE)
    world = process_group.get_world_size()
    if world % size:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size} does not divide the {world} ranks of the job; "
            "choose a size that does"
        )
    record: TensorParallel | None = model_record(model)
    if record is not None and record.size != size:
        raise ConfigError(
            f"the model is cut among {record.size} tensor-parallel ranks already, and "
            f"tensor_parallel.autotp_size is {size}; keep one size"
        )
    if size == 1:
        return model
    init.init_distributed()
    make_pending(model)  # what is read later is cut unread
    path, inner = planned_model(model)
    dims = _dims(size)
    rank = dims.coordinate(process_group.get_rank(), "tensor")
    plan = plan if record is None else record.plan
    unwrap(inner, rank, size)
    found = targets(path, inner, plan_of(inner, plan), is_of_family(inner))
    if _multiplies_itself(inner):
        found = _without_the_head(inner, found)
    modules = dict(model.named_modules(remove_duplicate=False))
    for target in found:
        if not is_sharded(target.module):
            _check_forward(target)
    cuts = _cuts(modules, found, rank, size)
    # All is known to be right: what is refused leaves the job as it was.
    groups = init_parallel(dims)  # for a model that was cut before another one, too
    if record is None:
        axis = TensorAxis(groups.along("tensor"))
        draws = _draws(model)
        random = OwnRandomNumbers(axis, process_group.default_device()) if draws else None
        record = TensorParallel(axis, random, plan, Agreement(axis, random), _rotary_width(inner))
    _cut_all(modules, found, cuts, record)
    if RECORD not in inner.__dict__:
        inner.__dict__[RECORD] = record
        record.agreement.watch(inner)
    return model


def model_record(model: nn.Module) -> TensorParallel | None:
    """What :func:`tensor_parallel` has made of ``model``; None: nothing."""
    return planned_model(model)[1].__dict__.get(RECORD)


def _dims(size: int) -> ParallelDims:
    """The axes of the job with tensor-parallel groups of ``size``."""
    world, held = process_group.get_world_size(), get_parallel()
    if held is None:
        return ParallelDims.over(world, tensor=size)
    if held.dims.expert > 1 and held.dims.tensor != size:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size} in a job whose experts are spread over "
            f"{held.dims.expert} ranks already, which would become other ranks; call "
            "hf_zero.tensor_parallel before hf_zero.expert_parallel, or write both sections into "
            "the configuration"
        )
    others = {axis: held.dims.size(axis) for axis in ("sequence", "expert", "pipeline")}
    return ParallelDims.over(world, tensor=size, **others)


def _multiplies_itself(model: nn.Module) -> bool:
    """Whether TRL has replaced the forward of ``model`` by one that multiplies with the weight of
    the head itself, where it would take a part of the vocabulary for all of it.
    """
    code = getattr(getattr(model.__dict__.get("forward"), "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def _without_the_head(model: Any, found: list[Target]) -> list[Target]:
    """The head, and embeddings that share its weight, stay whole; a head that was cut before, as
    that of a model loaded in shards, joins its parts where it is read.
    """
    head = model.get_output_embeddings()
    weight = head._parameters["weight"]
    if is_sharded(head) and not isinstance(head, layers.JoinedWhenRead):
        _, part = layers.take_off(head)
        put_on(head, layers.JoinedWhenRead, part)
    return [each for each in found if each.module._parameters.get("weight") is not weight]


def _rotary_width(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "qk_rope_head_dim", 0) or 0)


def _draws(model: nn.Module) -> bool:
    """Whether a forward of ``model`` may draw random numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            return True
        if any(
            isinstance(value, float) and value and "drop" in name
            for name, value in module.__dict__.items()
        ):
            return True
    return False


def _cut_all(
    modules: Mapping[str, nn.Module],
    found: list[Target],
    cuts: Mapping[nn.Parameter, Sharding],
    record: TensorParallel,
) -> None:
    new = [target for target in found if not is_sharded(target.module)]
    for parameter, sharding in cuts.items():
        if "tensor" in sharding.axes:
            cut(parameter, sharding)
        else:
            set_sharding(parameter, sharding)
    for target in new:
        _run(target, record, modules)
    if is_of_family(planned_model(modules[""])[1]):
        for path in {target.parent for target in new} - record.counted:
            record.counted.add(path)
            parent = modules[path].__dict__
            for name in COUNTS:
                if isinstance(count := parent.get(name), int):
                    parent[name] = count // record.size


def cuts_of(model: nn.Module, size: int) -> dict[nn.Parameter, Sharding]:
    """How the parameters of ``model``, which stays as it is, would be spread over ``size``
    tensor-parallel ranks, of which this is the first; of those that all have alike, nothing.

    Raises as :func:`tensor_parallel`.
    """
    if size == 1 or model_record(model) is not None:
        return {}
    path, inner = planned_model(model)
    found = targets(path, inner, plan_of(inner, None), is_of_family(inner))
    return _cuts(dict(model.named_modules(remove_duplicate=False)), found, 0, size)


def _cuts(
    modules: Mapping[str, nn.Module], found: list[Target], rank: int, size: int
) -> dict[nn.Parameter, Sharding]:
    """How the parameters of ``found`` that are still whole are to be spread."""
    cuts: dict[nn.Parameter, _Cut] = {}
    named: set[tuple[nn.Module, str]] = set()
    for target in found:
        target.keep_heads(modules.get(target.parent), size)
        for name, parameter in target.module._parameters.items():
            named.add((target.module, name))
            if parameter is None or sharding_of(parameter).partial or _is_cut(parameter):
                continue
            style = target.style_of(name)
            dim = dimension(style, target.module, name, parameter.dim())
            wanted = _Cut(f"{target.name}.{name}", dim, style.packed, style.partial)
            cuts.setdefault(parameter, wanted).agree(wanted)
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter in cuts and (module, name) not in named:
                cuts[parameter].agree(_Cut(f"{path}.{name}", None))
    found_cuts = {}
    for parameter, wanted in cuts.items():
        if wanted.dim is not None:
            found_cuts[parameter] = spread(
                wanted.name, parameter, wanted.dim, wanted.packed, rank, size
            )
        elif wanted.partial:
            found_cuts[parameter] = replace(sharding_of(parameter), partial=True)
    return found_cuts


def _is_cut(parameter: nn.Parameter) -> bool:
    return "tensor" in sharding_of(parameter).axes


@dataclass(frozen=True)
class _Cut:
    """What the plan does to a parameter, by one of its names."""

    name: str
    dim: int | None
    packed: int = 1
    partial: bool = False

    def agree(self, other: _Cut) -> None:
        if (self.dim, self.packed) != (other.dim, other.packed):
            whole = "leaves whole there" if None in (self.dim, other.dim) else "cuts in two ways"
            raise ConfigError(
                f"{self.name} and {other.name} are one parameter, which the tensor-parallel plan "
                f"{whole}; give both layers a style that cuts it alike, by "
                "hf_zero.tensor_parallel(model, size, plan=...), or untie them"
            )


def _check_forward(target: Target) -> None:
    if target.style.runs is not None and "forward" in target.module.__dict__:
        raise ConfigError(
            f"something has replaced the forward of {target.name}, which tensor parallelism "
            "changes; undo that first (hf_zero.restore(model) for fused kernels)"
        )


def _run(target: Target, record: TensorParallel, modules: Mapping[str, nn.Module]) -> None:
    """Have the layer of ``target`` run as its part."""
    module: Any = target.module
    kind, axis = target.style.runs, record.axis
    if kind is None:
        return
    part = Part(axis, target.name, random=record.random, between=target.parent)
    if issubclass(kind, (layers.Colwise, layers.ColwiseGathered, layers.KeyValueHeads)):
        own = target.name if target.adapts else target.parent
        part.inputs = record.inputs.setdefault(own, SharedInputs(own or target.name))
        part.member = part.inputs.join()
        if is_conv1d(module) and target.style.cuts:
            module.nf //= axis.size  # to which its forward shapes outputs
    if kind is layers.KeyValueHeads:
        heads, part.width = target.heads
        part.start = axis.rank * heads // axis.size * part.width
        parent: Any = modules[target.parent]
        if target.place.endswith("k_proj") and not target.adapts:
            parent.num_key_value_groups = parent.num_key_value_groups * heads // axis.size
    if kind is layers.EmbeddingRowwise:
        part.width = module.weight.shape[0]
        part.start = axis.rank * part.width
        if module.padding_idx is not None:
            own_index = module.padding_idx - part.start
            module.padding_idx = own_index if 0 <= own_index < part.width else None
    if kind is layers.LatentKeyValue:
        part.width = record.rotary_width
    put_on(module, kind, part)
