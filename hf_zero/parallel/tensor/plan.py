"""Tensor-parallel plan of a model: the styles, and the layers and parameters that they name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor import layers
from hf_zero.parallel.tensor.layers import is_sharded
from hf_zero.parallel.tensor.styles import (
    FAMILIES,
    KEY_VALUE_HEADS,
    WHOLE,
    LayerStyle,
    style_of,
    takes,
)
from hf_zero.zero.layout.sharding import WHOLE as WHOLE_OF_ALL
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.walk import named_modules_of

# attributes of attention modules of transformers: the width of a head
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class PlannedLayer(NamedTuple):
    """A layer that a plan means by the name of a module: the module, or a layer of the adapter
    around it.
    """

    name: str
    layer: nn.Module
    style: LayerStyle
    adapts: bool = False  # it belongs to the adapter


@dataclass
class Target:
    """A layer named by a plan. ``style``: how it runs, and the cut of its own parameters except
    those in ``own``.

    ``place``: the name in the plan: that of the layer, or of the adapter around it. ``adapts``: the
    layer belongs to the adapter. ``heads``: number and width of key or value heads, if they are
    fewer than the ranks.
    """

    name: str
    module: nn.Module
    style: LayerStyle
    place: str
    adapts: bool = False
    own: dict[str, LayerStyle] = field(default_factory=dict)
    heads: tuple[int, int] = (0, 0)

    @property
    def parent(self) -> str:
        """The path of the module that contains :attr:`place`."""
        return self.place.rpartition(".")[0]

    def style_of(self, parameter: str) -> LayerStyle:
        return self.own.get(parameter, self.style)

    def keep_heads(self, attention: nn.Module | None, size: int) -> None:
        """Let the cut fall between heads of ``attention``, the parent module; leave keys and values
        whole if their heads are fewer than the ``size`` ranks.

        Raises ConfigError if heads do not divide.
        """
        if self.style.runs is not layers.Colwise:
            return
        widths = (getattr(attention, name, None) for name in _HEAD_WIDTHS)
        width = next((width for width in widths if isinstance(width, int)), 0)
        module: object = self.module
        outputs = int(getattr(module, "out_features", 0) or getattr(module, "nf", 0))
        outputs //= self.style.packed
        if not width or outputs % width or outputs // width % size == 0:
            return
        heads = outputs // width
        few = self.place.rpartition(".")[2] in ("k_proj", "v_proj") and size % heads == 0
        if not few or not hasattr(attention, "num_key_value_groups"):
            raise ConfigError(
                f"{self.name} has {heads} attention heads, which tensor_parallel.autotp_size = "
                f"{size} does not divide; choose a size that divides {heads}"
            )
        self.style, self.heads = KEY_VALUE_HEADS, (heads, width)


def transformers_model(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the path and the model of transformers inside ``model``, its wrappers or adapters."""
    for name, module in named_modules_of(model):
        # getattr would find the inner model's config through wrappers
        if hasattr(module.__dict__.get("config"), "model_type"):
            return name, module
    return "", model


def plan_of(model: nn.Module, overrides: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return styles by names of modules and parameters, ``*`` for each number: the model's own
    plan, or that of its family, changed by ``overrides``, in which None removes a name.

    Raises ConfigError if there is no plan, and for a name in ``overrides`` that the model does not
    have.
    """
    _check_names(model, overrides or {})
    plan = dict(getattr(model, "tp_plan", None) or {}) or dict(FAMILIES.get(_type_of(model), {}))
    for name, style in (overrides or {}).items():
        if style is None:
            plan.pop(name, None)
        else:
            plan[name] = style
    if not plan:
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan, neither its own (tp_plan) nor "
            f"one of hf-zero's ({', '.join(FAMILIES)}); give one by hf_zero.tensor_parallel(model, "
            "size, plan={'layers.*.mlp.up_proj': 'colwise', ...}), or remove "
            "tensor_parallel.autotp_size"
        )
    return plan


def _check_names(model: nn.Module, overrides: Mapping[str, str | None]) -> None:
    named = [*model.named_modules(remove_duplicate=False), *model.named_parameters()]
    names = {_NUMBER.sub("*", name) for name, _ in named}
    ends = is_of_family(model)
    for name in overrides:
        if name not in names and not (ends and any(n.endswith(f".{name}") for n in names)):
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"the plan given to hf_zero.tensor_parallel names {name!r}, which no module or "
                f"parameter of {type(model).__name__} is called (with * for each number); "
                + (f"did you mean {near[0]!r}?" if near else "print model.named_modules()")
            )


def _type_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", ""))


def has_own_plan(model: nn.Module) -> bool:
    """Return whether the class of ``model`` declares a plan, and so computes with parts of heads
    without a change of its attributes.
    """
    return bool(getattr(model, "tp_plan", None))


def is_of_family(model: nn.Module) -> bool:
    """Return whether the plan of ``model`` is one of hf-zero's."""
    return not has_own_plan(model) and _type_of(model) in FAMILIES


def targets(path: str, model: nn.Module, plan: Mapping[str, str], suffixes: bool) -> list[Target]:
    """Return the layers of ``model``, whose path is ``path``, that ``plan`` names; ``suffixes``:
    match the ends of names.

    Raises ConfigError for a named layer that its style cannot run, and NotBuiltError for an unknown
    style.
    """
    by_layer: dict[nn.Module, Target] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        styles = {
            parameter: style_of(style, f"{name}.{parameter}")
            for parameter in module._parameters
            if (style := _style_in(plan, f"{name}.{parameter}", suffixes)) is not None
        }
        style = _style_in(plan, name, suffixes) if name else None
        if style is None and not styles:
            continue
        place = f"{path}.{name}" if path else name
        layer_style = style_of(style, name) if style is not None else WHOLE
        for planned in _layers(place, module, layer_style):
            target = Target(planned.name, planned.layer, planned.style, place, planned.adapts)
            target = by_layer.setdefault(planned.layer, target)
            if planned.layer is module:
                target.own.update(styles)
    return list(by_layer.values())


def _style_in(plan: Mapping[str, str], name: str, suffixes: bool) -> str | None:
    """Return the style of ``name`` in ``plan``; ``suffixes``: or that of its longest end."""
    generic = _NUMBER.sub("*", name)
    if not suffixes:
        return plan.get(generic)
    parts = generic.split(".")
    return next(
        (plan[end] for at in range(len(parts)) if (end := ".".join(parts[at:])) in plan), None
    )


def _layers(name: str, module: nn.Module, style: LayerStyle) -> Iterator[PlannedLayer]:
    """Yield the layers that the plan means by ``module``: itself, or what adapters hold of it and
    beside it.
    """
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module):
        yield from _low_rank_layers(name, module, base, style)
        return
    original = getattr(module, "original_module", None)
    if isinstance(original, nn.Module):  # PEFT's modules_to_save
        if _own_parts(module) - {"original_module", "modules_to_save"}:
            raise _unbuilt_adapter(name, module)
        yield from _layers(f"{name}.original_module", original, style)
        for key, copy in getattr(module, "modules_to_save", {}).items():
            yield from _layers(f"{name}.modules_to_save.{key}", copy, style)
        return
    if not is_sharded(module) and not takes(style, module):
        raise ConfigError(
            f"the tensor-parallel plan names {name}, {type(module).__name__}"
            f"({module.extra_repr()}), which is not a layer that its style can run; take it out by "
            f"hf_zero.tensor_parallel(model, size, plan={{{_NUMBER.sub('*', name)!r}: None}}), or "
            "remove tensor_parallel.autotp_size"
        )
    yield PlannedLayer(name, module, style)


def _own_parts(module: nn.Module) -> set[str]:
    """Return the attributes of ``module`` that contain its parameters."""
    return {name.split(".")[0] for name, _ in module.named_parameters()}


def _unbuilt_adapter(name: str, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{name} has an adapter ({type(module).__name__}) that is not built under tensor "
        "parallelism; use LoRA without DoRA, leave the layer out of target_modules, "
        "target_parameters and trainable_token_indices, or remove tensor_parallel.autotp_size"
    )


_LOW_RANK = ("lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B")


def _low_rank_layers(
    name: str, module: nn.Module, base: nn.Module, style: LayerStyle
) -> Iterator[PlannedLayer]:
    """Yield the layers of LoRA around a layer (arXiv 2106.09685): the base layer, and of A and B
    the one that has the dimension that is cut; the outer dimensions of their product are the
    layer's own.
    """
    yield from _layers(f"{name}.base_layer", base, style)
    adapters = {kind: getattr(module, kind, {}) for kind in _LOW_RANK}
    uses_dora = any(getattr(module, "use_dora", {}).values())
    plain = not (uses_dora or getattr(module, "lora_magnitude_vector", {}))
    others = _own_parts(module) - {*_LOW_RANK, "base_layer"}
    weight = getattr(base, "weight", None)  # None: experts, whose other parameters LoRA may adapt
    if others or not plain or weight is None:
        raise _unbuilt_adapter(name, module)
    cut = sharding_of(weight).box if isinstance(weight, nn.Parameter) else None
    sizes = {
        layer.weight.shape[dim]
        for kind, dim in (("lora_A", 1), ("lora_B", 0))
        for layer in adapters[kind].values()
        if sharding_of(layer.weight) is WHOLE_OF_ALL
    }
    if cut is not None and not sizes <= set(cut.whole):
        raise ConfigError(
            f"the adapter of {name} was made for this rank's part of it; add adapters before "
            "hf_zero.tensor_parallel"
        )
    if adapters["lora_embedding_A"] and style.cuts:
        yield PlannedLayer(name, module, LayerStyle(layers.AdapterOfPart, takes="any"), adapts=True)
    inputs = style.cuts == "inputs"
    for kind, is_cut in (("lora_A", inputs), ("lora_B", not inputs)):
        for key, layer in adapters[kind].items():
            if is_cut:
                yield PlannedLayer(f"{name}.{kind}.{key}", layer, style, adapts=True)
    if style.runs is not None and issubclass(style.runs, layers.Rowwise):
        for key, layer in adapters["lora_dropout"].items():
            if isinstance(layer, nn.Dropout):
                dropout = LayerStyle(layers.PartDropout, takes="any")
                yield PlannedLayer(f"{name}.lora_dropout.{key}", layer, dropout, adapts=True)
