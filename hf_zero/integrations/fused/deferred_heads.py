"""Output embeddings whose logits are deferred (``hf_zero/ops/deferred``), for any model.

[Note: one module, two kinds of calls]
A model calls its head as a module. That forward computes nothing: it returns a deferred tensor with
the input and the parameters. When a loss or a reader needs values, the module is called again with
the same rows, so that hooks on it fire: at stage 3 they gather its weight for exactly this call, in
an order that the script determines and that is equal on all ranks. Inside the second call the
forward runs the body that waits in the attribute ``PENDING``.

Linear layers and norms that a model applies between its body and the head, as the transform of
BERT's, are deferred like the head. A loss then computes them for rows with a label alone.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.ops.deferred import DeferredOutput
from hf_zero.ops.deferred.losses import count_early
from hf_zero.ops.deferred.programs import Autocast
from hf_zero.parallel.tensor.axis import TensorAxis, copy_to, gather
from hf_zero.parallel.tensor.layers import gathered_output_part
from hf_zero.zero.gather.model_patches import hooks_of
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import given_class
from hf_zero.zero.layout.walk import attribute_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
PENDING = "_hf_zero_pending"  # body of the call of a deferred module that is under way
BEFORE = "_hf_zero_forward_before"


class DeferredCall:
    """A call of a linear layer or a layer norm, with its parameters at that time."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.module = module
        self.autocast = Autocast.now(device)
        self.names = tuple(n for n in ("weight", "bias") if module._parameters.get(n) is not None)
        self.tensors: tuple[torch.Tensor, ...] = tuple(getattr(module, n) for n in self.names)
        self.versions = tuple(tensor._version for tensor in self.tensors)

    @property
    def linear(self) -> bool:
        return isinstance(self.module, nn.Linear)

    @property
    def axis(self) -> TensorAxis | None:
        part = gathered_output_part(self.module)
        return None if part is None else part.axis

    @property
    def needs_ranks(self) -> bool:
        return self.axis is not None or any(_is_sharded(tensor) for tensor in self.tensors)

    def check(self) -> None:
        for name, tensor, version in zip(self.names, self.tensors, self.versions):
            if tensor._version != version:
                raise KernelError(
                    f"the {name} of {type(self.module).__name__} has changed since the forward "
                    "that deferred its output, as in a step of the optimizer: its values of then "
                    "are lost; read outputs.logits before, or leave out the kernel loss"
                )

    def renewed(self) -> DeferredCall:
        """Return the call with the values that the parameters have now."""
        call = copy.copy(self)
        call.versions = tuple(tensor._version for tensor in self.tensors)
        return call

    def entering(self, rows: torch.Tensor) -> torch.Tensor:
        part = gathered_output_part(self.module)
        return rows if part is None else copy_to(rows, part.axis, part.name)

    def joined(self, output: torch.Tensor) -> torch.Tensor:
        part = gathered_output_part(self.module)
        return output if part is None else gather(output, part.axis, part.name)

    def compute(self, rows: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return self.joined(self.compute_part(rows, *tensors))

    def compute_part(self, rows: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the output of the parameters ``tensors`` alone, which may be parts."""
        named = dict(zip(self.names, tensors))
        if isinstance(self.module, nn.Linear):
            return F.linear(rows, named["weight"], named.get("bias"))
        module = self.module
        assert isinstance(module, nn.LayerNorm)
        return F.layer_norm(
            rows, module.normalized_shape, named.get("weight"), named.get("bias"), module.eps
        )

    def run(self, rows: torch.Tensor, body: Callable[..., T]) -> T:
        module = self.module
        if any(
            module._parameters.get(name) is not tensor
            for name, tensor in zip(self.names, self.tensors)
        ):  # the parameters of torch.func.functional_call, or of another adapter
            return body(self.entering(rows), *self.tensors)
        module.__dict__[PENDING] = lambda rows, *tensors: body(self.entering(rows), *tensors)
        try:
            return module(rows)
        finally:
            module.__dict__.pop(PENDING, None)


def _is_sharded(parameter: torch.Tensor) -> bool:
    return owner_of(parameter) is not None and hasattr(parameter, "ds_status")


def _forward(module: nn.Module, *args: torch.Tensor, **kwargs: object) -> object:
    """Forward of a deferred module: see the note."""
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    body = module.__dict__.pop(PENDING, None)
    if body is not None:
        parameters = (module._parameters[name] for name in ("weight", "bias"))
        return body(*args, *(parameter for parameter in parameters if parameter is not None))
    if len(args) == 1 and not kwargs and _may_defer(module, args[0]):
        return _deferred(module, args[0])
    args = tuple(arg.materialize() if isinstance(arg, DeferredOutput) else arg for arg in args)
    return type(module).forward(module, *args, **kwargs)


def _deferred(module: nn.Module, rows: torch.Tensor) -> DeferredOutput:
    call = DeferredCall(module, rows.device)
    width = call.tensors[0].shape[0] * (1 if call.axis is None else call.axis.size)
    with torch.no_grad():
        dtype = _dtype(call, rows)
    return DeferredOutput.of_call(call, rows, torch.empty((0, width), dtype=dtype, device="meta"))


def _dtype(call: DeferredCall, rows: torch.Tensor) -> torch.dtype:
    """Return the dtype of the output, from that of a linear layer of one row and column, or of a
    norm of no rows.
    """

    def empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=rows.device)

    if call.linear:
        sample, parts = empty(rows, 1, 1), [empty(t, *(1,) * t.dim()) for t in call.tensors]
    else:
        sample, parts = empty(rows, 0, rows.shape[-1]), [empty(t, *t.shape) for t in call.tensors]
    return call.compute_part(sample, *parts).dtype


def _may_defer(module: nn.Module, rows: object) -> bool:
    """Return whether this call returns a deferred tensor: not under torch.func or a trace, not with
    hooks that read or change the output, not for a single token of a generation.
    """
    if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or not rows.is_floating_point():
        return False
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
        return False
    if not isinstance(rows, DeferredOutput) and type(rows) is not torch.Tensor:
        return False
    if isinstance(rows, DeferredOutput) and not rows.is_live():
        return False
    if rows.shape[-2] == 1 and not torch.is_grad_enabled():
        return False
    if not _is_ours(module) or module._compiled_call_impl is not None or not _is_torchs(module):
        return False  # a wrapper, as a checkpoint, would run again what it has run
    if _watched(module) or "parametrizations" in module._modules:
        return False
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return not rows.is_inference() and all(
        type(parameter) is torch.Tensor or given_class(parameter) is nn.Parameter
        for parameter in parameters
    )


def _watched(module: nn.Module) -> bool:
    """Return whether hooks other than an engine's are on the module, or on all modules."""
    return torch_modules._has_any_global_hook() or bool(hooks_of(module))


def defer_head(model: nn.Module) -> list[Replacement] | str:
    """Make the output embedding of ``model`` return deferred logits; return the reason if it
    cannot.

    ``model`` may be a wrapper such as PEFT's. The linear layers inside an adapted head, those of
    LoRA and of ``modules_to_save``, are deferred alike.
    """
    result = _decoders(model)
    if isinstance(result, str):
        return result
    head, decoders = result
    names = {module: name for name, module in model.named_modules()}
    for decoder in decoders:
        if "forward" in decoder.__dict__:
            return f"{names.get(decoder, 'the head')} has a forward of its own already"
    before = list(_before(model, head, decoders[0].in_features))
    replacements = [
        Replacement(what, names.get(module, ""), _install(module))
        for what, modules in (("masked_rows", before), ("linear_cross_entropy", decoders))
        for module in modules
    ]
    if before:
        hook = model.register_forward_pre_hook(_count_labels, with_kwargs=True)
        replacements.append(Replacement("masked_rows", "", hook.remove))
    return replacements


def deferred_before_head(model: nn.Module) -> set[nn.Module]:
    """Return the row-wise modules before the head of ``model`` that :func:`defer_head` defers with
    it, and the modules that hold them: a kernel in one of these would compute all rows.
    """
    result = _decoders(model)
    if isinstance(result, str):
        return set()
    head, decoders = result
    before = {*_before(model, head, decoders[0].in_features)}
    return {m for m in model.modules() if m is not model and not before.isdisjoint(m.modules())}


def _decoders(model: nn.Module) -> tuple[nn.Module, list[nn.Linear]] | str:
    """Return the output embedding of ``model`` and its linear layers of the most outputs; the
    reason if it has none.
    """
    get = attribute_of(model, "get_output_embeddings")
    if get is None:
        return f"{type(model).__name__} has no get_output_embeddings"
    try:
        head = get()
    except NotImplementedError:
        head = None
    if head is None:
        return f"{type(model).__name__} has no output embedding"
    linear = [module for module in head.modules() if _is_linear(module)]
    words = max((layer.out_features for layer in linear), default=0)
    if not linear:
        name = next((name for name, module in model.named_modules() if module is head), None)
        return (
            f"{'the output embedding' if name is None else name} is a {type(head).__name__} of "
            f"{type(head).__module__}, not a linear layer of torch"
        )
    return head, [layer for layer in linear if layer.out_features == words]


def _count_labels(model: PreTrainedModel, args: object, kwargs: Mapping[str, object]) -> None:
    """Forward pre-hook of a model with row-wise modules before its decoder."""
    labels = kwargs.get("labels")
    if not torch.compiler.is_compiling():
        for module in model.get_output_embeddings().modules():
            if _is_ours(module):
                count_early(module, labels if isinstance(labels, torch.Tensor) else None)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether the forward of ``module`` is that of torch's ``kind``, of whole parameters."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer of torch, or has a part of the outputs of one."""
    return isinstance(module, nn.Linear) and _torchs_forward(module) is nn.Linear.forward


def _torchs_forward(module: nn.Module) -> object:
    """Return the forward of the class of ``module``, below that of a layer with gathered parts."""
    kind: Any = type(module)
    return (kind if gathered_output_part(module) is None else kind.__bases__[1]).forward


def _before(model: torch.nn.Module, head: nn.Module, width: int) -> Iterator[nn.Module]:
    """Yield linear layers and norms of ``width`` outside the model's body and its head, if their
    outputs can only be a row-wise part of the head.
    """
    body = attribute_of(model, "base_model")
    if not isinstance(body, nn.Module) or body is model or _draws(model, body):
        return
    inside = {*body.modules(), *head.modules()}
    for module in model.modules():
        if module in inside or "forward" in module.__dict__:
            continue
        if (
            _is_plain(module, nn.Linear) and module.in_features == module.out_features == width
        ) or (
            _is_plain(module, nn.LayerNorm)
            and module.normalized_shape == (width,)
            and module.weight is not None
        ):
            yield module


def _draws(model: nn.Module, body: nn.Module) -> bool:
    """Return whether modules outside ``body`` draw random numbers, in an order that deferring would
    change.
    """
    inside = {*body.modules()}
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        for module in model.modules()
        if module not in inside
    )


def _install(module: nn.Module) -> Callable[[], None]:
    module.forward = MethodType(_forward, module)
    return functools.partial(_remove, module)


def _remove(module: nn.Module) -> None:
    if _is_ours(module):
        del module.__dict__["forward"]


def _is_torchs(module: nn.Module) -> bool:
    """Return whether the class of ``module`` has torch's forward, which others may replace."""
    return _torchs_forward(module) in (nn.Linear.forward, nn.LayerNorm.forward)


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is _forward
