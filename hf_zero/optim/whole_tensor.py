"""Optimizers whose update needs sums over whole tensors (norms), in two halves between which the
ranks that hold parts of a tensor add those sums up.

A half treats each element alone but for these sums, so that it runs over any part of a tensor: the
first updates the moments and adds up what the second needs. Where nothing is sharded the parts are
the tensors, and :meth:`WholeTensorOptimizer.step` is the optimizer as its paper has it.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import ConfigError, UnsupportedOptimizerError
from hf_zero.ops.tensor_lists import divided


@dataclass(eq=False)
class Parts:
    """Parts of tensors, all of one group, that are stepped together.

    weights, grads: 1-D where tensors are sharded; the gradients in any float type, to be divided by
        ``divisor``.
    moments: a list for each of the optimizer's ``MOMENTS``.
    steps: the number of each part's step, from 1 on.
    shapes: of the tensors that they are parts of.
    norms: [parts, SUMS], the roots of the sums over those tensors; the second half has them.
    kernels: the configuration's.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    moments: Sequence[list[Tensor]]
    steps: list[int]
    shapes: Sequence[tuple[int, ...]] = ()
    norms: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    divisor: float = 1.0
    kernels: Any = "auto"

    def gradients(self) -> list[Tensor]:
        """The gradients divided, in the types of the weights."""
        return divided(self.grads, self.weights, self.divisor)


class Tensors:
    """What an optimizer asks of the tensors whose parts it steps: here each part is whole.

    kernels: the configuration's.
    """

    kernels: Any = "auto"

    def shapes(self, parts: Sequence[Sequence[Tensor]]) -> list[list[tuple[int, ...]]]:
        """The shapes of the tensors that the parts of each group are of."""
        return [[tuple(part.shape) for part in of] for of in parts]

    def totals(
        self, parts: Sequence[Sequence[Tensor]], sums: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """``sums`` [parts, k], a row for each of ``parts`` in the order of the groups, added up
        over all parts of each tensor: [parts, k], and the same for each tensor of each group
        (collective where parts are on several ranks).
        """
        return sums, list(sums.split([len(of) for of in parts]))

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

    tensors = Tensors()
    norms: Sequence[Tensor] = ()
    """Of the last step, where there are sums: their roots, [tensors, SUMS] for each group."""

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of :attr:`MOMENTS` that ``group`` has."""
        return self.MOMENTS

    @abstractmethod
    def update(self, found: Sequence[Parts]) -> None:
        """One update of the parts of each group that have a gradient, whose steps are counted."""

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

    @staticmethod
    @abstractmethod
    def apply(group: Mapping[str, Any], parts: Parts) -> None:
        """The second half, with the norms."""

    def update(self, found: Sequence[Parts]) -> None:
        measured = [
            self.measure(group, parts)
            for group, parts in zip(self.param_groups, found)
            if parts.weights
        ]
        sums = (
            torch.cat([each.to(measured[0].device) for each in measured])
            if measured
            else torch.zeros(0, self.SUMS, dtype=torch.float64)
        )
        weights = [parts.weights for parts in found]
        totals, by_group = self.tensors.totals(weights, sums)
        self.norms = [each.sqrt() for each in by_group]
        norms = totals.sqrt().split([len(of) for of in weights])
        shapes = self.tensors.shapes(weights)
        for group, parts, own, theirs in zip(self.param_groups, found, norms, shapes):
            if parts.weights:
                parts.norms, parts.shapes = own.to(parts.weights[0].device), theirs
                self.apply(group, parts)


def whole_tensor_base(cls: type) -> type[WholeTensorOptimizer] | None:
    """The class here whose update ``cls`` runs unchanged, or None."""
    own = (WholeTensorOptimizer.step, WholeTensorOptimizer._with_gradients)
    if not issubclass(cls, WholeTensorOptimizer):
        return None
    found: tuple[Any, ...] = (inspect.unwrap(cls.step), cls._with_gradients)
    return cls if found == (inspect.unwrap(own[0]), own[1]) else None
