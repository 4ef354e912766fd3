"""Run a cut copy of a model without memory: on the meta device, with its collectives left out.

The graph that autograd records in this run, a rehearsal, tells
:mod:`hf_zero.parallel.tensor.partial_gradients` which gradients are partial.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.layers import is_sharded, put_on, take_off
from hf_zero.zero.gather.model_patches import HOOKS
from hf_zero.zero.layout import meta_run
from hf_zero.zero.layout.sharding import Sharding, set_sharding, sharding_of
from hf_zero.zero.layout.tree import tensors_in

M = TypeVar("M", bound=nn.Module)

TOKENS = 8  # length of the sequence that runs


class RehearsedAxis(TensorAxis):
    """Rank ``rank`` of ``size`` without a process group (``dim``): its collectives return tensors
    of the right shapes.
    """

    is_rehearsed = True

    def __init__(self, rank: int, size: int):
        self._register(rank, size)

    def sum(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def join(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], self.size * x.shape[-1])


def copy_to_rehearse(
    model: nn.Module, present: TensorAxis | None, axis: RehearsedAxis
) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
    """Return a copy of ``model`` on the meta device, in fp32, in which all floating-point
    parameters train and ``axis`` has the place of ``present``; and a map from its parameters to
    those of ``model``.
    """
    memo: dict[int, Any] = {} if present is None else {id(present): axis}
    tensors = (*model.named_parameters(), *model.named_buffers())
    dtypes = {name: torch.float32 for name, tensor in tensors if tensor.is_floating_point()}
    twin = _bare_copy(model, dtypes, memo).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    originals = {memo[id(parameter)]: parameter for parameter in model.parameters()}
    return twin, originals


def copy_to_fill(model: M) -> M:
    """Return a copy of ``model`` without hooks and without forwards set on its modules. Its buffers
    have their values; its parameters are on the meta device until the caller replaces them.
    """
    return _bare_copy(model, {}, {id(buffer): buffer.clone() for buffer in model.buffers()})


def _bare_copy(model: M, dtypes: Mapping[str, torch.dtype], memo: dict[int, Any]) -> M:
    for module in model.modules():
        for name in HOOKS:
            memo[id(module.__dict__[name])] = OrderedDict()
    twin = meta_run.copy_on_meta(model, dtypes, memo)
    for parameter in model.parameters():
        set_sharding(memo[id(parameter)], sharding_of(parameter))
    for module in twin.modules():  # a forward set on a module may be bound to the original module
        module.__dict__.pop("forward", None)
    return twin


def shrink(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Give ``parameter``, which has no memory, the shape of the box of ``sharding``; mark it so."""
    if sharding.box is None:
        raise PartitionError("a parameter is cut to the box of its Sharding; give it a box")
    parameter.data = parameter.data.new_empty(sharding.box.shape)
    set_sharding(parameter, sharding)


def run_on_zeros(twin: nn.Module) -> tuple[list[torch.Tensor], set[str]]:
    """Run ``twin``, a copy to rehearse, on a sequence of zeros, or on one image; return the
    differentiable tensors of its first output, and the names of the modules that ran.

    ``twin`` keeps the hooks that note these names; its experts get another forward.
    """
    ran: set[str] = set()
    for name, module in twin.named_modules():
        _leave_out_experts(module)
        module.register_forward_pre_hook(partial(_note, ran, name))
    inputs = meta_run.inputs_on_meta(twin, 1, TOKENS)
    with torch.enable_grad(), meta_run.META, meta_run.MetaAnswers(_ANSWERS):
        outputs = twin(**inputs)
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return [tensor for tensor in tensors_in(first) if tensor.requires_grad], ran


def _note(ran: set[str], name: str, *_: object) -> None:
    ran.add(name)


def _all_elements(
    func: Callable[..., object], args: tuple[torch.Tensor, ...], kwargs: Mapping[str, object]
) -> object:
    if not args[0].is_meta:
        return func(*args, **kwargs)
    return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=meta_run.META)


# Experts choose the rows that they compute: here all.
_ANSWERS = {**meta_run.NUMBERS, **meta_run.GROUPED, torch.ops.aten.nonzero.default: _all_elements}


def _leave_out_experts(module: nn.Module) -> None:
    """Replace experts spread over ranks, to which tokens would be sent, by a function of the
    tokens, their routing weights and the parameters.
    """
    parameters = module.parameters(recurse=False)
    if not any("expert" in sharding_of(parameter).axes for parameter in parameters):
        return
    # The class of a layer that runs as a part is made of its mixin and the class of the experts:
    # the mixin, which has the collectives, stays, and the class behind it is replaced.
    around = take_off(module) if is_sharded(module) else None
    module.__class__ = _AbsentExperts
    if around is not None:
        put_on(module, *around)


class _AbsentExperts(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        read = [*tensors_in((args, kwargs)), *self.parameters()]
        return hidden_states * sum(x.sum() for x in read if x.is_floating_point())
