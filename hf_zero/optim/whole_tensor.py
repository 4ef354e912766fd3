"""Optimizers whose update needs sums over a whole tensor (norms, sums of rows and columns), or the
whole matrix.

A step is made in rounds. In each, every part of a tensor prepares an input (in the first round it
also updates its moments), and the ranks that hold parts of the tensor combine the inputs. Given the
results, the update is element-wise, so it runs over any part of a tensor, also over one read from
storage. If nothing is sharded the parts are the tensors, and :meth:`WholeTensorOptimizer.step` is
the optimizer of the paper.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.updates import divided
from hf_zero.optim.segments import ParamGroup, ParamState

T = TypeVar("T")


class TensorPlace(NamedTuple):
    """Elements ``[start, stop)`` of a tensor of ``shape``; the rest of a part is padding."""

    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(eq=False)
class Parts:
    """Parts of tensors, all of one group, that are stepped together.

    weights, grads: 1-D if tensors are sharded; the gradients in any float type, to be divided by
        ``divisor``.
    moments: a list for each of the optimizer's ``MOMENTS``.
    steps: the number of each part's step, from 1 on.
    tensor_state: the entries of each part, with the state of its whole tensor from the first step
        on.
    places: the place of each part in its tensor.
    kernels: the configuration's ``kernels``.
    results: the combined result of each round, for each part.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    moments: Sequence[list[Tensor]]
    steps: list[int]
    tensor_state: Sequence[dict[str, Tensor]] = ()
    places: Sequence[TensorPlace] = ()
    divisor: float = 1.0
    kernels: str | tuple[str, ...] = "auto"

    def __post_init__(self) -> None:
        self.results: list[Any] = []

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors that the parts belong to."""
        return [place.shape for place in self.places]

    @property
    def norms(self) -> Tensor:
        """The roots of the sums of the first round, [parts, SUMS], if it has combined sums."""
        norms: Tensor = self.results[0]
        return norms

    def gradients(self) -> list[Tensor]:
        """Return the gradients divided by the divisor, in the dtypes of the weights."""
        return divided(self.grads, self.weights, self.divisor)


class Tensors:
    """The interface of an optimizer to the tensors whose parts it steps; in this class each part is
    whole.

    kernels: the configuration's ``kernels``.
    """

    kernels: str | tuple[str, ...] = "auto"

    def places(self, parts: Sequence[Sequence[Tensor]]) -> list[list[TensorPlace]]:
        """Return the places of the parts of each group in their tensors."""
        return [[TensorPlace(tuple(part.shape), 0, part.numel()) for part in of] for of in parts]

    def totals(
        self, parts: Sequence[Sequence[Tensor]], sums: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Add ``sums`` [parts, k], a row for each of ``parts`` in the order of the groups, over all
        parts of each tensor. Return the totals by part, [parts, k], and by tensor for each group.
        Collective if parts are on several ranks.
        """
        return sums, list(sums.split([len(of) for of in parts]))

    def summed(
        self,
        parts: Sequence[Tensor],
        sums: Sequence[Tensor],
        length: Callable[[tuple[int, ...]], int],
    ) -> list[Tensor]:
        """Add up as :meth:`totals`, for ``sums`` [k] in 64 bits, where k is ``length`` of the shape
        of the part's tensor.
        """
        return list(sums)

    def transformed(
        self,
        parts: Sequence[Tensor],
        values: Sequence[Tensor],
        transform: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Apply ``transform`` to whole matrices assembled from ``values``, bf16, one for each
        element of ``parts``; return the parts of the results, zeros for parts of no matrix.
        Collective if parts are on several ranks.
        """
        return [
            transform(value) if value.ndim == 2 else torch.zeros_like(value) for value in values
        ]


class ShardRanks:
    """The ranks that share the flat buffers, a shard each; by itself, one rank that owns all."""

    rank, size = 0, 1

    def add_up(self, sums: Tensor) -> Tensor:
        """Return ``sums`` added up over the ranks (collective)."""
        return sums

    def exchange(
        self, sent: Tensor, sizes: Sequence[int], counts: Sequence[int]
    ) -> Sequence[Tensor]:
        """Send ``sizes[rank]`` elements of ``sent`` to each rank, and return ``counts[rank]``
        elements from each (collective).
        """
        return [sent]

    def gather_objects(self, value: T) -> list[T]:
        """Return ``value`` of each rank (collective over all ranks)."""
        return [value]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """An optimizer whose update needs whole tensors; ``tensors`` maps its parameters to the tensors
    that they are parts of.
    """

    MOMENTS: tuple[str, ...]
    """Names of the state of an element; each begins with zero."""
    ROUNDS = 1
    """Number of times that parts prepare something that is combined."""
    TENSOR_STATE_NAMES: tuple[str, ...] = ()
    """Names of the state that a parameter may have for its whole tensor."""
    ADOPTED_SETTINGS: Mapping[str, object] = {}
    """Settings of groups that a class of the same update elsewhere does not have."""

    tensors = Tensors()
    norms: Sequence[Tensor] = ()
    """Roots of the sums of the last step, [tensors, SUMS] for each group; empty without sums."""

    @classmethod
    def moments_of(cls, group: ParamGroup) -> tuple[str, ...]:
        """Return the names in :attr:`MOMENTS` that ``group`` has."""
        return cls.MOMENTS

    @classmethod
    def adopt_groups(cls, optimizer: torch.optim.Optimizer) -> None:
        """Give the groups of ``optimizer`` the settings that its original class does not have."""
        for group in optimizer.param_groups:
            for name, value in cls.ADOPTED_SETTINGS.items():
                group.setdefault(name, value)

    @classmethod
    def adopt_state(cls, state: ParamState) -> None:
        """Convert the ``state`` of a parameter in place from the format of the original class
        (torch's, transformers') to the format of this class.
        """

    @classmethod
    def prepares(cls, group: ParamGroup) -> bool:
        """Return whether parts of ``group`` take part in rounds."""
        return True

    @classmethod
    @abstractmethod
    def prepare(cls, group: ParamGroup, parts: Parts, at: int) -> Sequence[Tensor]:
        """Return the input of round ``at`` for each part, given the results of earlier rounds."""

    @abstractmethod
    def combine(
        self,
        at: int,
        groups: Sequence[ParamGroup],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Sequence[Tensor]]:
        """Combine the inputs ``prepared`` for round ``at`` by the parts of each of ``groups`` over
        the parts of each tensor; empty for groups that take no part. Collective if parts are on
        several ranks.
        """

    @staticmethod
    @abstractmethod
    def apply(group: ParamGroup, parts: Parts) -> None:
        """Update the parts, given the results of all rounds."""

    def update(self, groups: Sequence[Parts]) -> None:
        """Make one update of the parts of each group: they have gradients and counted steps."""
        weights = [parts.weights for parts in groups]
        for parts, places in zip(groups, self.tensors.places(weights)):
            parts.places = places
        for at in range(self.ROUNDS):
            prepared = [
                self.prepare(group, parts, at) if parts.weights and self.prepares(group) else []
                for group, parts in zip(self.param_groups, groups)
            ]
            combined = self.combine(at, self.param_groups, weights, prepared)
            for parts, results in zip(groups, combined):
                parts.results.append(results)
        for group, parts in zip(self.param_groups, groups):
            if parts.weights:
                self.apply(group, parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, if there is a
        closure. Collective if parameters are parts of tensors on several ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([self._with_gradients(group) for group in self.param_groups])
        return loss

    def __setstate__(self, state: ParamState) -> None:
        super().__setstate__(state)
        self.adopt_groups(self)  # groups that the original class has saved lack settings
        for entries in self.state.values():
            entries.update(entries.pop("factors", {}))  # up to release 0.2

    def _with_gradients(self, group: ParamGroup) -> Parts:
        names = self.moments_of(group)
        parts = Parts([], [], [[] for _ in names], [], kernels=self.tensors.kernels)
        tensor_state = list[dict[str, Tensor]]()
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
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                for name in names:
                    state[name] = torch.zeros_like(part, memory_format=torch.preserve_format)
            elif missing := set(names) - set(state):
                raise ConfigError(
                    f"{type(self).__name__}: the state of a parameter of shape "
                    f"{tuple(part.shape)} has no {', '.join(sorted(missing))}, as its group was "
                    "of another kind when it was made; put the setting back (use_muon of Muon)"
                )
            state["step"] += 1
            parts.weights.append(part)
            parts.grads.append(part.grad)
            parts.steps.append(int(state["step"]))
            for name, moment in zip(names, parts.moments):
                moment.append(state[name])
            if self.TENSOR_STATE_NAMES:
                tensor_state.append(state)
        parts.tensor_state = tensor_state
        return parts


def tensor_state_names(optimizer: object) -> tuple[str, ...]:
    """Return the names of the state of whole tensors that ``optimizer`` may keep."""
    return optimizer.TENSOR_STATE_NAMES if isinstance(optimizer, WholeTensorOptimizer) else ()


def moments_by_group(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, ...]]:
    """Return the moments that the parameters of each group have; [] if ``optimizer`` is no
    WholeTensorOptimizer.
    """
    if not isinstance(optimizer, WholeTensorOptimizer):
        return []
    return [optimizer.moments_of(group) for group in optimizer.param_groups]


def whole_tensor_base(cls: type) -> type[WholeTensorOptimizer] | None:
    """Return the class of this package whose update ``cls`` runs unchanged, or None."""
    expected = (WholeTensorOptimizer.step, WholeTensorOptimizer._with_gradients)
    if not issubclass(cls, WholeTensorOptimizer):
        return None
    actual: tuple[object, ...] = (inspect.unwrap(cls.step), cls._with_gradients)
    return cls if actual == (inspect.unwrap(expected[0]), expected[1]) else None
