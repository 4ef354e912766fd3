"""Weights of a model with PEFT adapters under the names of its base model: merged, as
``merge_adapter`` merges them, or with the active adapters apart, under the names of their files.

A layer is merged in a copy of its modules with whole weights, so the model in training keeps its
own: the weights of adapters are gathered first, and those of the base bucket by bucket.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.integrations.peft.adapter_files import described
from hf_zero.zero.access.weight_stream import WRAPPERS, Names
from hf_zero.zero.layout.whole_names import persistent_buffers

if TYPE_CHECKING:
    from peft import PeftModel

M = TypeVar("M", bound=nn.Module)

# parts of a path that PEFT adds around a module
ADDED = WRAPPERS | {"base_layer", "original_module", "token_adapter"}


class AdaptedLayer(NamedTuple):
    """A layer with adapters. ``base_paths``: the paths inside its base layer of the parameters of
    that, by their names in the model. ``names``: those of all its parameters, by id.
    """

    layer: Any
    base_paths: Mapping[str, str]
    names: Mapping[int, str]


class AdapterNames(Names):
    """The parameters of ``model``, which has adapters. ``merged``: with the active adapters merged
    into them; else the parameters of these adapters are sent beside them.
    """

    def __init__(self, model: PeftModel, merged: bool):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._prefix = next(
            f"{path}." if path else "" for path, module in model.named_modules() if module is base
        )
        self.form = ("hf", merged, *_active(model))
        # tied parameters have several names: the first one stands for all
        first_names = {id(parameter): name for name, parameter in model.named_parameters()}
        layers = _adapted_layers(model, first_names)
        of_base = {name for adapted in layers for name in adapted.base_paths}
        adapters = {
            name
            for adapted in layers
            for name in adapted.names.values()
            if name not in adapted.base_paths
        }
        # those whose adapters are active and not merged
        self._layers = [
            adapted
            for adapted in layers
            if not (adapted.layer.merged or adapted.layer.disable_adapters)
        ]
        unused = tuple(_unused_copies(model, merged))
        used: dict[str, list[str]] = {name: [] for name in first_names.values()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not name.startswith(unused):
                used[first_names[id(parameter)]].append(name)
        # first names of parameters that are not sent under names of the base model
        self._dropped = adapters | {
            name for name, others in used.items() if not others or not name.startswith(self._prefix)
        }
        # tied parameters whose first name is in an unused copy, and another name of each
        self._tied = {
            name: others[0] for name, others in used.items() if others and name.startswith(unused)
        }
        self._apart = {} if merged else _names_in_files(model, of_base)
        if merged:
            self.held = frozenset(adapters)
            self.merged = frozenset(name for adapted in self._layers for name in adapted.base_paths)

    def sent(self, path: str, name: str) -> str | None:
        if path in self._apart:
            return self._apart[path]
        if path in self._dropped:
            return None
        name = self._tied.get(path, name)
        parts = iter(name.removeprefix(self._prefix).split("."))
        kept_parts = []
        for part in parts:
            if part == "modules_to_save":
                next(parts)  # the name of the adapter
            elif part not in ADDED:
                kept_parts.append(part)
        return ".".join(kept_parts)

    def merge(
        self, values: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        result = {name: value.clone() for name, value in values.items()}
        for layer, paths, names in self._layers:
            sent = {name for name in paths if name in result}
            if not sent:
                continue
            # a bias may be in another bucket than its weight, which its merge does not need
            whole = {key: result.get(name, others.get(name)) for key, name in names.items()}
            twin = _twin(layer, whole)
            twin.merged_adapters = []
            twin.merge(safe_merge=False)
            base = dict(twin.get_base_layer().named_parameters())
            result.update((name, base[path].data) for name, path in paths.items() if name in sent)
        return result


def _adapted_layers(model: nn.Module, first_names: Mapping[int, str]) -> list[AdaptedLayer]:
    """Return the layers of ``model`` with adapters; ``first_names``: of its parameters, by id."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = []
    for layer in (m for m in model.modules() if isinstance(m, BaseTunerLayer)):
        in_base = layer.get_base_layer().named_parameters()
        paths = {first_names[id(parameter)]: path for path, parameter in in_base}
        names = {id(parameter): first_names[id(parameter)] for parameter in layer.parameters()}
        layers.append(AdaptedLayer(layer, paths, names))
    return layers


def _names_in_files(model: PeftModel, of_base: Collection[str]) -> dict[str, str]:
    """Return the names in their files of the parameters of active adapters, but for those
    ``of_base``. Raises ConfigError for an adapter whose file PEFT computes.
    """
    active = model.active_adapters
    files = described(model, {*persistent_buffers(model)})
    names: dict[str, str] = {}
    for adapter in active() if callable(active) else active:
        if adapter not in files:
            raise ConfigError(
                f"iter_weights(adapters='apart'): PEFT computes the file of adapter {adapter!r}, "
                "so that its tensors have no names; pass adapters='merged', or names='model'"
            )
        _, in_file = files[adapter]
        names |= {name: sent for sent, name in in_file.items() if name not in of_base}
    return names


def _active(model: nn.Module) -> Iterator[tuple[object, ...]]:
    """Yield the path of each module with adapters, and its active adapters with their scales; no
    module whose adapters are disabled.
    """
    for path, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, (list, tuple)) and not _is_disabled(module):
            scales = getattr(module, "scaling", None)
            factors = scales if isinstance(scales, dict) else {}
            yield path, *((adapter, factors.get(adapter)) for adapter in active)


def _is_disabled(module: object) -> bool:
    return getattr(module, "disable_adapters", False) is True


def _unused_copies(model: nn.Module, merged: bool) -> Iterator[str]:
    """Yield the beginnings of the names of modules saved whole that stand behind another copy: with
    ``merged`` behind that of the active adapter, else all copies beside the base model's own.
    """
    for path, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if not isinstance(copies, nn.ModuleDict):
            continue
        uses_copy = merged and not _is_disabled(module)
        active = [name for name in module.active_adapters if name in copies] if uses_copy else []
        if active:
            yield f"{path}.original_module."
        yield from (f"{path}.modules_to_save.{name}." for name in copies if name not in active)


def _twin(module: M, whole: Mapping[int, torch.Tensor | None]) -> M:
    """Return a copy of ``module`` without hooks whose parameters are those of ``whole`` by id;
    zeros where it has None.
    """
    twin = copy.copy(module)
    parameters = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            value = whole[id(parameter)]
            if value is None:
                value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            parameter = nn.Parameter(value, requires_grad=False)
        parameters[name] = parameter
    twin.__dict__["_parameters"] = parameters
    twin.__dict__["_modules"] = {
        name: child and _twin(child, whole) for name, child in module._modules.items()
    }
    return twin
