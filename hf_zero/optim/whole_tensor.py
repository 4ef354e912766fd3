"""Optimizers whose update needs more of a tensor than one element: sums over the whole tensor
(norms, sums of rows and columns), or the whole matrix.

A step is made in rounds. In each, every part of a tensor prepares something (the first one updates
its moments as well), and the ranks that hold parts of the tensor combine it; the update of a part
then treats each element alone but for what was combined, so that it runs over any part of a tensor,
also over one that is read from elsewhere. Where nothing is sharded the parts are the tensors, and
:meth:`WholeTensorOptimizer.step` is the optimizer as its paper has it.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.tensor_lists import divided

FACTORS = "factors"
"""The state of a parameter that is of the whole tensor, and neither a number for each element nor
one number: tensors by name, kept by each part."""


class TensorPlace(NamedTuple):
    """Elements ``[start, stop)`` of a tensor of ``shape``; what a part has beyond is padding."""

    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(eq=False)
class Parts:
    """Parts of tensors, all of one group, that are stepped together.

    weights, grads: 1-D where tensors are sharded; the gradients in any float type, to be divided by
        ``divisor``.
    moments: a list for each of the optimizer's ``MOMENTS``.
    steps: the number of each part's step, from 1 on.
    factors: what each part keeps of its whole tensor, by name; empty before the first step.
    places: where each part lies in its tensor.
    kernels: the configuration's.
    results: what each round has combined, for each part.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    moments: Sequence[list[Tensor]]
    steps: list[int]
    factors: Sequence[dict[str, Tensor]] = ()
    places: Sequence[TensorPlace] = ()
    divisor: float = 1.0
    kernels: Any = "auto"

    def __post_init__(self) -> None:
        self.results: list[Any] = []

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors that they are parts of."""
        return [place.shape for place in self.places]

    @property
    def norms(self) -> Tensor:
        """[parts, SUMS], where the first round has combined sums: their roots."""
        found: Tensor = self.results[0]
        return found

    def gradients(self) -> list[Tensor]:
        """The gradients divided, in the types of the weights."""
        return divided(self.grads, self.weights, self.divisor)


class Tensors:
    """What an optimizer asks of the tensors whose parts it steps: here each part is whole.

    kernels: the configuration's.
    """

    kernels: Any = "auto"

    def places(self, parts: Sequence[Sequence[Tensor]]) -> list[list[TensorPlace]]:
        """Where the parts of each group lie in their tensors."""
        return [[TensorPlace(tuple(part.shape), 0, part.numel()) for part in of] for of in parts]

    def totals(
        self, parts: Sequence[Sequence[Tensor]], sums: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """``sums`` [parts, k], a row for each of ``parts`` in the order of the groups, added up
        over all parts of each tensor: [parts, k], and the same for each tensor of each group
        (collective where parts are on several ranks).
        """
        return sums, list(sums.split([len(of) for of in parts]))

    def summed(
        self,
        parts: Sequence[Tensor],
        sums: Sequence[Tensor],
        length: Callable[[tuple[int, ...]], int],
    ) -> list[Tensor]:
        """As :meth:`totals`, for ``sums`` [k] in 64 bits, where k is ``length`` of the shape of
        the tensor that a part is of.
        """
        return list(sums)

    def transformed(
        self,
        parts: Sequence[Tensor],
        values: Sequence[Tensor],
        transform: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """For ``values``, bf16, one for each element of ``parts``: those parts of ``transform`` of
        the whole matrices of them (collective where parts are on several ranks). Zeros for what is
        of no matrix.
        """
        return [
            transform(value) if value.ndim == 2 else torch.zeros_like(value) for value in values
        ]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """An optimizer whose update needs more of a tensor than one element; ``tensors`` says of which
    tensors its parameters are parts.
    """

    MOMENTS: tuple[str, ...]
    """Names of the state of an element; each begins with zero."""
    ROUNDS = 1
    """How often parts prepare something that is combined."""
    FACTOR_NAMES: tuple[str, ...] = ()
    """Names of what a parameter may have in :data:`FACTORS`."""
    ADOPTED_SETTINGS: Mapping[str, Any] = {}
    """Settings of groups that a class of the same update elsewhere does not have."""

    tensors = Tensors()
    norms: Sequence[Tensor] = ()
    """Of the last step, where there are sums: their roots, [tensors, SUMS] for each group."""

    @classmethod
    def moments_of(cls, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of :attr:`MOMENTS` that ``group`` has."""
        return cls.MOMENTS

    @classmethod
    def adopt_state(cls, state: dict[str, Any]) -> None:
        """Make the ``state`` of a parameter, as a class of the same update elsewhere keeps it, one
        of this class.
        """

    @classmethod
    def prepares(cls, group: Mapping[str, Any]) -> bool:
        """Whether parts of ``group`` take part in rounds."""
        return True

    @classmethod
    @abstractmethod
    def prepare(cls, group: Mapping[str, Any], parts: Parts, at: int) -> Sequence[Tensor]:
        """Round ``at``, with the results of those before: what is to be combined, for each part."""

    @abstractmethod
    def combine(
        self,
        at: int,
        groups: Sequence[Mapping[str, Any]],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Sequence[Tensor]]:
        """What round ``at`` has ``prepared`` for the parts of each of ``groups``, combined over the
        parts of each tensor (collective where they are on several ranks). Nothing for groups that
        do not take part.
        """

    @staticmethod
    @abstractmethod
    def apply(group: Mapping[str, Any], parts: Parts) -> None:
        """The update, with the results of all rounds."""

    def update(self, found: Sequence[Parts]) -> None:
        """One update of the parts of each group that have a gradient, whose steps are counted."""
        weights = [parts.weights for parts in found]
        for parts, places in zip(found, self.tensors.places(weights)):
            parts.places = places
        for at in range(self.ROUNDS):
            prepared = [
                self.prepare(group, parts, at) if parts.weights and self.prepares(group) else []
                for group, parts in zip(self.param_groups, found)
            ]
            combined = self.combine(at, self.param_groups, weights, prepared)
            for parts, results in zip(found, combined):
                parts.results.append(results)
        for group, parts in zip(self.param_groups, found):
            if parts.weights:
                self.apply(group, parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; returns the closure's loss, if there
        is a closure. Collective where parameters are parts of tensors on several ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([self._with_gradients(group) for group in self.param_groups])
        return loss

    def _with_gradients(self, group: dict[str, Any]) -> Parts:
        names = self.moments_of(group)
        found = Parts([], [], [[] for _ in names], [], kernels=self.tensors.kernels)
        factors = list[dict[str, Tensor]]()
        for part in group["params"]:
            if part.grad is None:
                continue
            if part.grad.is_sparse:
                raise UnsupportedOptimizerError(
                    f"{type(self).__name__}: the gradient of a parameter of shape "
                    f"{tuple(part.shape)} is sparse; make it dense"
                )
            state = self.state[part]
            if not state:
                state["step"] = torch.tensor(0.0)
                for name in names:
                    state[name] = torch.zeros_like(part, memory_format=torch.preserve_format)
            elif missing := set(names) - set(state):
                raise ConfigError(
                    f"{type(self).__name__}: the state of a parameter of shape "
                    f"{tuple(part.shape)} has no {', '.join(sorted(missing))}, as its group was "
                    "of another kind when it was made; put the setting back (use_muon of Muon)"
                )
            state["step"] += 1
            found.weights.append(part)
            found.grads.append(part.grad)
            found.steps.append(int(state["step"]))
            for name, moment in zip(names, found.moments):
                moment.append(state[name])
            if self.FACTOR_NAMES:
                factors.append(state.setdefault(FACTORS, {}))
        found.factors = factors
        return found


class TensorSumOptimizer(WholeTensorOptimizer):
    """An optimizer of two halves, between which sums over whole tensors are made."""

    SUMS: int
    """How many numbers the first half adds up for each tensor."""

    @staticmethod
    @abstractmethod
    def measure(group: Mapping[str, Any], parts: Parts) -> Tensor:
        """The first half of a step of ``group``: updates what it does of the moments and returns
        the sums [parts, SUMS], in 64 bits, that are added up over whole tensors.
        """

    @classmethod
    def prepare(cls, group: Mapping[str, Any], parts: Parts, at: int) -> Sequence[Tensor]:
        return list(cls.measure(group, parts))

    def combine(
        self,
        at: int,
        groups: Sequence[Mapping[str, Any]],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Any]:
        rows = [row for of in prepared for row in of]
        sums = (
            torch.stack([row.to(rows[0].device) for row in rows])
            if rows
            else torch.zeros(0, self.SUMS, dtype=torch.float64)
        )
        totals, by_group = self.tensors.totals(parts, sums)
        self.norms = [each.sqrt() for each in by_group]
        norms = totals.sqrt().split([len(of) for of in parts])
        return [own.to(of[0].device) if of else own for own, of in zip(norms, parts)]


def moments_by_group(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, ...]]:
    """The moments that the parameters of each group have; none where that is not the class's to
    say.
    """
    if not isinstance(optimizer, WholeTensorOptimizer):
        return []
    return [optimizer.moments_of(group) for group in optimizer.param_groups]


def whole_tensor_base(cls: type) -> type[WholeTensorOptimizer] | None:
    """The class here whose update ``cls`` runs unchanged, or None."""
    own = (WholeTensorOptimizer.step, WholeTensorOptimizer._with_gradients)
    if not issubclass(cls, WholeTensorOptimizer):
        return None
    found: tuple[Any, ...] = (inspect.unwrap(cls.step), cls._with_gradients)
    return cls if found == (inspect.unwrap(own[0]), own[1]) else None
