"""Layers of which each tensor-parallel rank has a part: what their forwards do beside their own
code.

A layer keeps its class and gets one of these before it (``put_on``): its parameters, their names
and ``isinstance`` stay as they were, and what computes with its weights itself sees that it is no
plain layer any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from hf_zero.parallel.cutting import HoldsParts
from hf_zero.parallel.tensor.axis import (
    TensorAxis,
    copy_last_to,
    copy_to,
    gather,
    own_part,
    split,
    sum_over,
)
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers
from hf_zero.parallel.tensor.shared_inputs import SharedInputs
from hf_zero.parallel.tensor.weight_gradients import separable_weight
from hf_zero.zero.access.full import GatheredParameters
from hf_zero.zero.layout import cut_parameters
from hf_zero.zero.layout.parameter import ZeroParamStatus
from hf_zero.zero.layout.sharding import sharding_of

ATTRIBUTE = "_hf_zero_tensor_part"


@dataclass
class Part:
    """What a sharded layer knows of itself.

    ``name`` is its place in the model. ``inputs`` are those it shares with its neighbours, where it
    is number ``member``. ``random`` draws where activations are parts, which those after layers
    of ``between`` are; None: nothing draws. ``start`` and ``width``: which part it is, for
    those that ask.
    """

    axis: TensorAxis
    name: str
    inputs: SharedInputs | None = None
    member: int = 0
    random: OwnRandomNumbers | None = None
    between: str = ""
    start: int = 0
    width: int = 0


class Sharded(HoldsParts):
    """A layer under tensor parallelism."""

    @property
    def _part(self) -> Part:
        return self.__dict__[ATTRIBUTE]  # type: ignore[no-any-return]

    def _copied(self, args: Any, kwargs: Any) -> Any:
        """Whole inputs that parts are computed with, such as the weights of a routing."""
        part = self._part
        return tree_map_only(
            torch.Tensor, lambda x: copy_to(x, part.axis, f"inputs of {part.name}"), (args, kwargs)
        )

    def _begin_parts(self) -> None:
        random = self._part.random
        if random is not None and self.training:
            random.begin(self._part.between)

    def _end_parts(self) -> None:
        random = self._part.random
        if random is not None and self.training:
            random.end()


class ReadsWhole(Sharded):
    """A linear layer whose input is whole, and whose neighbours may read it, too."""

    @property
    def separable_weight(self) -> nn.Parameter | None:
        """Its weight, if the gradient may be computed apart from the layer's backward."""
        return separable_weight(self, type(self).__bases__[1])

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        assert part.inputs is not None
        x, gradients = part.inputs.copy(x, self, part.member, part.axis)
        if gradients is not None and gradients.holds(part.member, self):
            return gradients.product(part.member, self, x)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


class Colwise(ReadsWhole):
    """Parts of the outputs of a linear layer; the input is whole."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(x, *args, **kwargs)
        self._begin_parts()
        return y


class ColwiseGathered(ReadsWhole):
    """The same, with whole outputs."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(x, *args, **kwargs)
        return gather(y, self._part.axis, self._part.name)


class KeyValueHeads(ReadsWhole):
    """Keys or values of heads that are fewer than ranks: the layer is whole, and a rank goes on
    with the head of its queries. Its gradient is a part of a sum over the ranks.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(x, *args, **kwargs)
        self._begin_parts()
        part = self._part
        return own_part(y, part.name, part.start, part.width)


class JoinedWhenRead(Sharded):
    """A linear layer of which each rank has parts of the outputs, and whose weight and bias are
    whole for whoever reads them, its own forward among them.
    """

    @property
    def weight(self) -> Any:
        return self._joined("weight")

    @property
    def bias(self) -> Any:
        return self._joined("bias")

    def _joined(self, name: str) -> torch.Tensor | None:
        parameter, part = self._parameters[name], self._part
        if parameter is None:
            return None
        with GatheredParameters([parameter]):
            joined = gather(parameter.movedim(0, -1), part.axis, f"{part.name}.{name} (whole)")
        whole = joined.movedim(-1, 0)
        whole.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        return whole


class Rowwise(Sharded):
    """Parts of the inputs of a linear layer; outputs are whole. The bias, which is whole, is added
    once.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._end_parts()
        part, bias = self._part, getattr(self, "bias", None)
        if bias is None:
            y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        elif isinstance(self, nn.Linear):
            y = F.linear(x, self.weight)
        else:  # transformers' Conv1D: [inputs, outputs]
            weight: Any = self.weight
            y = x @ weight
        y = sum_over(y, part.axis, part.name)
        return y if bias is None else y + bias


class RowwiseSplit(Rowwise):
    """The same where the input is whole."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x = split(x, self._part.axis, self._part.name)
        return super().forward(x, *args, **kwargs)


class EmbeddingRowwise(Sharded):
    """Part of the vocabulary: rows of others are zero in the sum."""

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        own = ids - part.start
        others = (own < 0) | (own >= part.width)
        y = super().forward(own.masked_fill(others, 0), *args, **kwargs)  # type: ignore[misc]
        return sum_over(y.masked_fill(others.unsqueeze(-1), 0), part.axis, part.name)


class EmbeddingColwise(Sharded):
    """Part of each vector."""

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(ids, *args, **kwargs)  # type: ignore[misc]
        return gather(y, self._part.axis, self._part.name)


class ExpertParts(Sharded):
    """Part of each expert of a mixture: tokens and their routing weights are whole, outputs too."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        x = copy_to(x, part.axis, part.name)
        given, named = self._copied(args, kwargs)
        y = super().forward(x, *given, **named)  # type: ignore[misc]
        return sum_over(y, part.axis, part.name)


class Scaled(Sharded):
    """Added to what the ranks sum up, and whole: each adds its fraction."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x / self._part.axis.size, *args, **kwargs)  # type: ignore[misc]


class Summed(Sharded):
    """A module whose outputs are parts of a sum. Its inputs are whole: parameters of its own that
    are cut read them; layers in it that are cut look after their inputs themselves.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if any("tensor" in sharding_of(each).axes for each in self.parameters(recurse=False)):
            args, kwargs = self._copied(args, kwargs)
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        return sum_over(y, self._part.axis, self._part.name)


class LatentKeyValue(Sharded):
    """The compressed keys and values of multi-head latent attention: its last ``width`` outputs,
    the rotary ones, go to this rank's heads past the next layer.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return copy_last_to(y, part.axis, part.name, part.width)


class PartDropout(Sharded):
    """Dropout of parts, outside of where they are known to be ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._begin_parts()
        y = super().forward(x)  # type: ignore[misc]
        self._end_parts()
        return y  # type: ignore[no-any-return]


class AdapterOfPart(Sharded):
    """PEFT's LoRA around an embedding that is cut, which is whole itself: a merge adds the rows of
    the part. (Those of linear layers are cut with them, and merge as they are.)
    """

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        delta = super().get_delta_weight(adapter)  # type: ignore[misc]
        weight = self.get_base_layer().weight  # type: ignore[operator]
        return cut_parameters.own_part(sharding_of(weight), delta)


_made: dict[tuple[type, type], type[nn.Module]] = {}


def _with(kind: type[Sharded], layer: type[nn.Module]) -> type[nn.Module]:
    name, module = f"{kind.__name__}{layer.__name__}", {"__module__": layer.__module__}
    return _made.setdefault((kind, layer), type(name, (kind, layer), module))


def put_on(module: nn.Module, kind: type[Sharded], part: Part) -> None:
    """Have ``module`` run as its ``part``."""
    module.__class__ = _with(kind, type(module))
    module.__dict__[ATTRIBUTE] = part


def is_sharded(module: nn.Module) -> bool:
    return ATTRIBUTE in module.__dict__


def take_off(module: nn.Module) -> tuple[type[Sharded], Part]:
    """Undo :func:`put_on`: what to call it with again."""
    kind, module.__class__ = type(module).__bases__
    return kind, module.__dict__.pop(ATTRIBUTE)
