"""Layers of which each tensor-parallel rank has a part: the collectives around their own
forwards.

A layer gets a subclass of its class, with one of these mixins first (``put_on``): its parameters,
their names and ``isinstance`` are unchanged, and code that computes with its weights directly can
see that it is not a plain layer any more.
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
from hf_zero.parallel.tensor.shared_inputs import SharedInputs, separable_weight
from hf_zero.zero.access.gathered_parameters import GatheredParameters
from hf_zero.zero.layout import sharding
from hf_zero.zero.layout.parameter import ZeroParamStatus
from hf_zero.zero.layout.sharding import sharding_of

ATTRIBUTE = "_hf_zero_tensor_part"


@dataclass
class Part:
    """State of a sharded layer.

    ``name``: its path in the model. ``inputs``: those shared with its neighbors, among which it
    has the number ``member``. ``random`` draws for activations that are parts, those after layers
    of the module ``between``; None: nothing draws. ``start`` and ``width``: range of the part, for
    the layers that need it.
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
    """Base of layers under tensor parallelism."""

    @property
    def _part(self) -> Part:
        return self.__dict__[ATTRIBUTE]  # type: ignore[no-any-return]

    def _copied(self, args: object, kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
        """Apply ``copy_to`` to whole inputs that parts are computed with, as routing weights."""
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
    """A linear layer with a whole input, which its neighbors may share."""

    @property
    def separable_weight(self) -> nn.Parameter | None:
        """The weight, if its gradient may be computed apart from the layer's backward."""
        return separable_weight(self, type(self).__bases__[1])

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        part = self._part
        assert part.inputs is not None
        x, gradients = part.inputs.copy(x, self, part.member, part.axis)
        if gradients is not None and gradients.holds(part.member, self):
            return gradients.product(part.member, self, x)
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]


class Colwise(ReadsWhole):
    """A linear layer with a whole input and parts of the outputs."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        y = super().forward(x, *args, **kwargs)
        self._begin_parts()
        return y


class ColwiseGathered(ReadsWhole):
    """A linear layer with a whole input and parts of the outputs, which are gathered."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        y = super().forward(x, *args, **kwargs)
        return gather(y, self._part.axis, self._part.name)


class KeyValueHeads(ReadsWhole):
    """Key or value projection with fewer heads than ranks: the layer is whole, and a rank keeps the
    head that its queries read. Its gradient is partial (to be summed over the ranks).
    """

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        y = super().forward(x, *args, **kwargs)
        self._begin_parts()
        part = self._part
        return own_part(y, part.name, part.start, part.width)


MAKE_PARTS = (Colwise, KeyValueHeads)  # whole inputs, parts as outputs


class JoinedWhenRead(Sharded):
    """A linear layer with parts of the outputs on each rank, whose attributes ``weight`` and
    ``bias`` return whole tensors to every reader, including its own forward.
    """

    @property
    def weight(self) -> torch.Tensor | None:
        return self._joined("weight")

    @property
    def bias(self) -> torch.Tensor | None:
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
    """A linear layer with parts of the inputs and whole outputs, which adds its bias once."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
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
        return y if bias is None else y + bias.to(y.dtype)


class RowwiseSplit(Rowwise):
    """A row-wise layer with a whole input, which it splits."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        x = split(x, self._part.axis, self._part.name)
        return super().forward(x, *args, **kwargs)


class EmbeddingRowwise(Sharded):
    """An embedding with a part of the vocabulary: tokens of other parts add zeros to the sum. Those
    of no part reach the lookup, which refuses them.
    """

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        part = self._part
        local_ids = ids - part.start
        others = (local_ids < 0) | (local_ids >= part.width)
        others &= (ids >= 0) & (ids < part.width * part.axis.size)
        y = super().forward(local_ids.masked_fill(others, 0), *args, **kwargs)  # type: ignore[misc]
        return sum_over(y.masked_fill(others.unsqueeze(-1), 0), part.axis, part.name)


class EmbeddingColwise(Sharded):
    """An embedding with a part of each vector."""

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        y = super().forward(ids, *args, **kwargs)  # type: ignore[misc]
        return gather(y, self._part.axis, self._part.name)


class ExpertParts(Sharded):
    """A mixture of parts of experts; tokens, routing weights and outputs are whole."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        part = self._part
        x = copy_to(x, part.axis, part.name)
        copied, named = self._copied(args, kwargs)
        y = super().forward(x, *copied, **named)  # type: ignore[misc]
        return sum_over(y, part.axis, part.name)


class Scaled(Sharded):
    """A whole module inside a sum over the ranks: each rank adds its fraction of the output."""

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        return super().forward(x / self._part.axis.size, *args, **kwargs)  # type: ignore[misc]


class Summed(Sharded):
    """A module whose outputs are partial sums. Its inputs are whole: cut parameters of its own read
    them through ``copy_to``; cut layers inside it handle their inputs themselves.
    """

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        if any(
            "tensor" in sharding_of(parameter).axes for parameter in self.parameters(recurse=False)
        ):
            args, kwargs = self._copied(args, kwargs)
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        return sum_over(y, self._part.axis, self._part.name)


class LatentKeyValue(Sharded):
    """The compressed keys and values of multi-head latent attention: the last ``width`` outputs,
    the rotary ones, bypass the next layer and are read by this rank's heads.
    """

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        part = self._part
        y = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return copy_last_to(y, part.axis, part.name, part.width)


class PartDropout(Sharded):
    """Dropout of parts, outside the layers between which activations are known as parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._begin_parts()
        y = super().forward(x)  # type: ignore[misc]
        self._end_parts()
        return y  # type: ignore[no-any-return]


class AdapterOfPart(Sharded):
    """PEFT's LoRA around an embedding that is cut; the adapter is whole, and a merge adds the rows
    of the part. (Adapters of linear layers are cut with them, and merge unchanged.)
    """

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        delta = super().get_delta_weight(adapter)  # type: ignore[misc]
        weight = self.get_base_layer().weight  # type: ignore[operator]
        return sharding.own_part(sharding_of(weight), delta)


_made: dict[tuple[type, type], type[nn.Module]] = {}


def _with(kind: type[Sharded], layer: type[nn.Module]) -> type[nn.Module]:
    name, module = f"{kind.__name__}{layer.__name__}", {"__module__": layer.__module__}
    return _made.setdefault((kind, layer), type(name, (kind, layer), module))


def put_on(module: nn.Module, kind: type[Sharded], part: Part) -> None:
    """Make ``module`` run as its ``part``."""
    module.__class__ = _with(kind, type(module))
    module.__dict__[ATTRIBUTE] = part


def is_sharded(module: nn.Module) -> bool:
    return ATTRIBUTE in module.__dict__


def gathered_output_part(module: nn.Module) -> Part | None:
    """Return the state of a layer whose parts of outputs are gathered, None for other layers."""
    return module.__dict__[ATTRIBUTE] if isinstance(module, ColwiseGathered) else None


def take_off(module: nn.Module) -> tuple[type[Sharded], Part]:
    """Undo :func:`put_on`; return the arguments to call it with again."""
    kind, module.__class__ = type(module).__bases__
    return kind, module.__dict__.pop(ATTRIBUTE)
