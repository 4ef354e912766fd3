"""Cut parameters in place to the part of this rank, whether their values are loaded or still in
checkpoint files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from hf_zero.distributed import world_group
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_rank
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.loading.lazy import LazyTensor
from hf_zero.parallel.expert.marks import ALONE, expert_group
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.initial_values import source_of
from hf_zero.zero.layout.parameter import OwnedParameter
from hf_zero.zero.layout.sharding import (
    Sharding,
    join_parts,
    of_ranks,
    set_sharding,
    sharding_of,
    take_own_part,
)

# what is known of a part beside its values: of which whole it is, and for which ranks
_MARKS = ("_hf_zero_sharding", "allreduce", "group_name")
_COPIED = "_hf_zero_copied"


def check_module(model: object, function: str) -> None:
    """Raise ConfigError, which names the caller, ``function``, unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        what = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(
            f"{function}() got {what}, which is not a module; pass the model itself, as "
            "AutoModelForCausalLM.from_pretrained(path)"
        )


@torch.no_grad()
def cut(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Keep only the elements of ``parameter`` inside the box of ``sharding``; it may have been cut
    to a larger part before. Collective over all ranks of the job if the values are loaded and
    whole: all ranks take rank 0's, or those of the first rank that holds this expert.

    Raises PartitionError for a parameter that belongs to an engine.
    """
    owner = owner_of(parameter)
    if owner is not None and not owner.retired:
        raise PartitionError(
            "a parameter that is to be cut among ranks belongs to an engine; cut the model before "
            "hf_zero.initialize"
        )
    present, source = sharding_of(parameter), source_of(parameter)
    cuts_made = present.box.cuts if present.box is not None else ()
    assert sharding.box is not None
    cuts = tuple(c for c in sharding.box.cuts if c not in cuts_made)
    box = Box(tuple(parameter.shape), cuts)
    if source is None:
        whole = parameter.data
        if not cuts_made and expert_group(parameter) in (None, ALONE):
            # not into the parameter's memory, which a refused call of initialize gives back
            whole = whole if get_rank() == 0 else torch.empty_like(whole)
            world_group.broadcast(whole, 0)
        elif not cuts_made:  # ranks hold different experts under this name
            whole = _of_first(whole, sharding)
        parameter.data = box.take(whole).clone(memory_format=torch.contiguous_format)
    else:
        part = box.take(LazyTensor(source)).expression  # type: ignore[arg-type]
        parameter.data = torch.zeros((), dtype=source.dtype).expand(box.shape)
        parameter.__dict__["_hf_zero_source"] = part
    set_sharding(parameter, sharding)


def _of_first(whole: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Return ``whole`` of the first rank along the axis of ``sharding`` (collective over it)."""
    groups = get_parallel()
    assert groups is not None
    return of_ranks(groups, sharding.axes[-1], whole, "an expert that is cut")[0]


class HoldsParts(nn.Module):
    """Mixin before the class of a module whose parameters :func:`cut` has cut: its state dicts hold
    whole tensors before an engine takes the model and after the engine is destroyed (collective
    over the ranks of the parts). In between, the engine's own state-dict hooks do that. A parameter
    of a part's shape that takes the place of a part is marked as that part.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        before = self._parameters.get(name)
        super().register_parameter(name, param)
        _mark_in_place(before, param)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, parameter in before.items():  # new ones if torch overwrites them in conversions
            _mark_in_place(parameter, self._parameters.get(name))
        return self

    def _save_to_state_dict(
        self, destination: dict[str, object], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            key = prefix + name
            if parameter is None or isinstance(parameter, OwnedParameter):
                continue
            saved = destination.get(key)
            if isinstance(saved, torch.Tensor):
                destination[key] = join_parts(sharding_of(parameter), saved, key)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        metadata: object,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        before = dict(self._parameters)
        refused = [
            prefix + name
            for name, parameter in before.items()
            if parameter is not None
            and not isinstance(parameter, OwnedParameter)
            and not take_own_part(sharding_of(parameter), state_dict, prefix + name, errors)
        ]
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )
        for name in refused:  # torch counts them as missing, too
            if name in missing:
                missing.remove(name)
        for name, parameter in before.items():
            _mark_like(parameter, self._parameters.get(name))  # new with assign=True

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _new, (_Copied(self),), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        marked = self.__dict__.pop(_COPIED, {})
        super().__setstate__(state)
        for name, parameter in marked.items():
            _mark_like(parameter, self._parameters[name], (*_MARKS, "_hf_zero_source"))


class _Copied:
    """The module that ``copy`` copies. (A ``__deepcopy__`` of the module would be called for
    wrappers that forward attributes to it, as those of PEFT.)
    """

    def __init__(self, module: HoldsParts):
        self.module = module

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise PartitionError(
            f"{type(self.module).__bases__[-1].__name__} is cut among ranks, with which it "
            "communicates, and cannot be pickled or saved by torch.save(model); save "
            "model.state_dict(), which holds whole tensors"
        )


def _new(copied: _Copied) -> nn.Module:
    """Return an empty module of the class of the one that is ``copied``."""
    kind = type(copied.module)
    module = kind.__new__(kind)
    module.__dict__[_COPIED] = copied.module._parameters
    return module


def _mark_in_place(before: nn.Parameter | None, after: nn.Parameter | None) -> None:
    """Mark ``after`` as the part that ``before`` is, whose place it takes, if it has its shape."""
    if before is not None and after is not None and before.shape == after.shape:
        _mark_like(before, after)


def _mark_like(
    parameter: nn.Parameter | None, other: nn.Parameter | None, marks: Sequence[str] = _MARKS
) -> None:
    """Mark ``other`` as the part that ``parameter`` is."""
    if parameter is not None and other is not None and other is not parameter:
        for name in marks:
            if name in parameter.__dict__:
                other.__dict__.setdefault(name, parameter.__dict__[name])
