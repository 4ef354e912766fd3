"""The tensors that an optimizer's groups have between steps under an engine: this rank's part of
each parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_zero.errors import PartitionError
from hf_zero.optim.own_step import OptimizerPhase

if TYPE_CHECKING:
    from hf_zero.zero.layout.optimizer_shard import OptimizerShard

# torch's own attributes, which the properties of a member hide
_data: Any = Tensor.data
_grad: Any = Tensor.grad


class GroupMember(torch.nn.Parameter):
    """This rank's part of ``parameter``, over memory of the engine; without elements if the rank
    has none of it. Its count of changes has writes through ``.data``, too.

    :class:`GroupMembers` sets its attributes. ``shard``: the flat buffer whose gradient the engine
    holds between a backward and the step; None for a part of one that was frozen when the engine
    was built. ``phase``: that of the optimizer; of such a part one that never changes.
    """

    parameter: Tensor | None = None
    shard: OptimizerShard | None = None
    phase = OptimizerPhase()

    @property
    def requires_grad(self) -> bool:
        """As of the parameter that it is a part of; autograd sees none."""
        return self.parameter is not None and self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> GroupMember:
        """Freeze the parameter, or let it train."""
        if self.parameter is not None:
            self.parameter.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """None; in hooks before the step the gradient of its elements. Raises PartitionError while
        the engine holds gradients.
        """
        self._refuse_gradient(None)
        gradient: Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._refuse_gradient(value)
        _grad.__set__(self, value)

    def _refuse_gradient(self, value: Tensor | None) -> None:
        """Raise PartitionError, outside of a step, for a gradient ``value`` to be set, and while
        the engine holds one that the member does not have.
        """
        if self.shard is None or self.phase.in_step:
            return
        if value is not None or self.shard.gradient.holds_gradient:
            raise PartitionError(
                "the members of optimizer.param_groups are this rank's parts of the master "
                "weights, and their gradients are in the engine; use config gradient_clipping "
                "(accelerator.clip_grad_norm_ under Accelerate) instead of clip_grad_norm_, config "
                "fp16 instead of torch.amp.GradScaler, "
                "hf_zero.safe_get_full_grad(parameter) or hf_zero.safe_set_full_grad(parameter, "
                "value) with a parameter of the model, or engine.zero_grad()"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach()
        return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        """The values, whose writes are counted."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy ``value`` over the values: the member stays in the memory of its flat buffer."""
        if value.shape != self.shape:
            raise PartitionError(
                f"a member of optimizer.param_groups was given data of shape {tuple(value.shape)} "
                f"and has {tuple(self.shape)}: it is this rank's part of the master weights; write "
                "to the parameters of the model"
            )
        with torch.no_grad():
            self.copy_(value)

    def move(self, memory: Tensor) -> Tensor:
        """Continue in ``memory``; return the former one, which keeps its values."""
        former: Tensor = _data.__get__(self)
        _data.__set__(self, memory)
        return former

    def lend(self, gradient: Tensor | None) -> None:
        """Set the gradient that hooks before a step see."""
        _grad.__set__(self, gradient)


class FileMember(GroupMember):
    """A member whose elements are in files, with a stand-in of one element as its memory; or a view
    of one.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``. Raises PartitionError where it writes to the stand-in."""
        first, failure = args[0] if args else None, None
        with torch._C.DisableTorchFunctionSubclass():
            given = first if isinstance(first, (list, tuple)) else [first]
            own = [tensor for tensor in given if isinstance(tensor, cls)]
            versions = [tensor._version for tensor in own]
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                # torch 2.10 to 2.13 say so of a write to elements that share memory
                if "more than one element of the written-to tensor" not in str(error):
                    raise
                failure = error
            if failure is None and versions == [tensor._version for tensor in own]:
                memory = {tensor.untyped_storage()._cdata for tensor in own}
                return _map_views(result, memory)
        raise PartitionError(
            'a script writes to a member of group["params"], and its values are in files, where '
            "it cannot; write to the model's parameters, or set "
            "zero_optimization.offload_optimizer.device (offload_param.device for frozen "
            "parameters) to cpu"
        ) from failure


def _map_views(result: Any, memory: Collection[int]) -> Any:
    """Return ``result`` of an operation with tensors in ``memory``, addresses of storages, as
    members.
    """
    if isinstance(result, (list, tuple)):
        return type(result)([_map_views(item, memory) for item in result])
    if type(result) is not Tensor or result.untyped_storage()._cdata not in memory:
        return result
    return result.as_subclass(FileMember)


def member_class(bytes_by_tier: Mapping[str, int]) -> type[GroupMember]:
    """Return the class of members over the memory of a storage with ``bytes_by_tier``: one in files
    has a stand-in.
    """
    return FileMember if bytes_by_tier["disk"] else GroupMember
