"""Cut a model: keep a tensor-parallel rank's part of each parameter; layers run as parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import layers
from hf_zero.parallel.tensor.agreement import Agreement
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers
from hf_zero.parallel.tensor.layers import Part, is_sharded, put_on
from hf_zero.parallel.tensor.plan import Target
from hf_zero.parallel.tensor.shared_inputs import SharedInputs, is_conv1d
from hf_zero.parallel.tensor.styles import COLWISE, COUNTS, LayerStyle, dimension, packed
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of


@dataclass
class TensorParallel:
    """Record of a model's tensor parallelism, stored as an attribute of the model."""

    axis: TensorAxis
    random: OwnRandomNumbers | None
    plan: Mapping[str, str | None] | None
    rotary_width: int  # rotary part of a key in multi-head latent attention; 0: none
    inputs: dict[str, SharedInputs] = field(default_factory=dict)  # by path of their module
    counted: set[str] = field(default_factory=set)  # modules whose numbers of heads are divided
    verifies: bool = False  # its first forward and backward are compared with the whole model's
    agreement: Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.axis, self.random)

    @property
    def size(self) -> int:
        return self.axis.size


def cut_layers(
    modules: Mapping[str, nn.Module],
    targets: list[Target],
    cuts: Mapping[nn.Parameter, Sharding],
    record: TensorParallel,
    counts: bool,
    keep: Callable[[nn.Parameter, Sharding], None],
) -> None:
    """Make the layers ``targets``, among ``modules``, run as parts. ``keep`` reduces a parameter to
    its part. ``counts``: divide the attributes that count heads.
    """
    new = [target for target in targets if not is_sharded(target.module)]
    for parameter, sharding in cuts.items():
        if "tensor" in sharding.axes:
            keep(parameter, sharding)
        else:  # whole, with a partial gradient
            set_sharding(parameter, sharding)
    for target in new:
        _run(target, record, modules)
    if counts:
        for path in {target.parent for target in new} - record.counted:
            record.counted.add(path)
            parent = modules[path].__dict__
            for name in COUNTS:
                count = parent.get(name)
                if isinstance(count, int) and count % record.size == 0:
                    parent[name] = count // record.size


def cuts_for(
    modules: Mapping[str, nn.Module], targets: list[Target], rank: int, size: int
) -> dict[nn.Parameter, Sharding]:
    """Return the sharding of each parameter of ``targets`` that is still whole."""
    cuts: dict[nn.Parameter, _Cut] = {}
    named: set[tuple[nn.Module, str]] = set()
    for target in targets:
        target.keep_heads(modules.get(target.parent), size)
        for name, parameter in target.module._parameters.items():
            named.add((target.module, name))
            if parameter is None:
                continue
            sharding = sharding_of(parameter)
            if sharding.partial or "tensor" in sharding.axes:
                continue
            style = _stacked(target, name, parameter)
            dim = dimension(style, target.module, name, parameter.dim())
            cut = _Cut(f"{target.name}.{name}", dim, style.packed, style.partial)
            cuts.setdefault(parameter, cut).agree(cut)
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter in cuts and (module, name) not in named:
                cuts[parameter].agree(_Cut(f"{path}.{name}", None))
    found_cuts = {}
    for parameter, cut in cuts.items():
        if cut.dim is not None:
            found_cuts[parameter] = _spread(cut.name, parameter, cut.dim, cut.packed, rank, size)
        elif cut.partial:
            found_cuts[parameter] = replace(sharding_of(parameter), partial=True)
    return found_cuts


def _stacked(target: Target, name: str, parameter: nn.Parameter) -> LayerStyle:
    """Return the style of a parameter of ``target``. A stack of expert matrices with twice as many
    outputs as the next matrices have inputs holds two matrices side by side, gates and the gated,
    whatever the plan says, except in classes that declare them interleaved.
    """
    style = target.style_of(name)
    if style != COLWISE or parameter.dim() != 3:
        return style
    after = {
        other.shape[-1]
        for key, other in target.module.named_parameters(recurse=False)
        if target.style_of(key).cuts == "inputs" and other.dim() == 3
    }
    together = getattr(target.module, "is_concatenated", True)
    return packed(style, 2) if together and after == {parameter.shape[-2] // 2} else style


@dataclass(frozen=True)
class _Cut:
    """The plan's treatment of a parameter, under one of its names."""

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


def _run(target: Target, record: TensorParallel, modules: Mapping[str, nn.Module]) -> None:
    """Make the layer of ``target`` run as its part."""
    module: Any = target.module
    kind, axis = target.style.runs, record.axis
    if kind is None:
        return
    part = Part(axis, target.name, random=record.random, between=target.parent)
    if issubclass(kind, (layers.Colwise, layers.ColwiseGathered, layers.KeyValueHeads)):
        owner = target.name if target.adapts else target.parent
        part.inputs = record.inputs.setdefault(owner, SharedInputs(owner or target.name))
        part.member = part.inputs.join(module)
        if is_conv1d(module) and target.style.cuts:
            module.nf //= axis.size  # output width in the forward of Conv1D
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


def _spread(
    name: str, parameter: torch.Tensor, dim: int, packed: int, rank: int, size: int
) -> Sharding:
    """Return the sharding of ``parameter`` with the part of ``rank``. Raises ConfigError if the
    dimension does not divide, and for a quantized parameter, whose elements are not laid out like
    those of its layer.
    """
    shape = tuple(parameter.shape)
    if not parameter.is_floating_point():
        raise ConfigError(
            f"{name} is {parameter.dtype}: tensor_parallel.autotp_size = {size} cannot cut a "
            "quantized layer; load the model in bf16, or remove the key"
        )
    try:
        return sharding_of(parameter).further(shape, "tensor", dim, rank, size, packed)
    except ValueError:
        length = shape[dim] // packed
        remedy = (
            f"model.resize_token_embeddings(pad_to_multiple_of={size}) makes a vocabulary divide, "
            if "embed" in name or "lm_head" in name or "wte" in name or "decoder" in name
            else ""
        )
        raise ConfigError(
            f"{name} of shape {shape} is cut along dimension {dim}, whose {length} "
            f"{'elements' if packed == 1 else f'elements of each of {packed} matrices'} "
            f"tensor_parallel.autotp_size = {size} does not divide; {remedy}"
            f"or choose a size that divides {length}"
        ) from None
