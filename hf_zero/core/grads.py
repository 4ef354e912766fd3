"""Gradients: taken from the parameters into flat buffers, reduced unit by unit, normed, clipped.

[Note: who divides]
A backward leaves the gradient of the loss it was given, times the fp16 loss scale. The engine multiplies by the weight of
the micro-batch (1 / accumulation steps) and averages over ranks when it takes a gradient in; nobody else divides. So
``engine.backward(loss)`` and plain ``loss.backward()`` give the same gradient. In fp16 these factors are applied after the
reduction, in the precision of the accumulator, because small gradients would vanish before it.

[Note: order of reductions]
All ranks launch the reductions of all trainable units, in one fixed order, in every backward that reduces: a unit waits
for its predecessors, one without gradient on this rank contributes zeros. The order is the definition order backwards
until the first backward has shown rank 0 a better one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.core.axis import Handle
from hf_zero.core.comm import Comm
from hf_zero.core.flat import Flat
from hf_zero.core.homeward import Homeward
from hf_zero.core.norm import sums_of_squares
from hf_zero.core.parameter import drop_raw_grads, raw_grads
from hf_zero.core.policy import Policy
from hf_zero.core.precision import Scaling
from hf_zero.core.unit import Unit
from hf_zero.core.usage import Usage
from hf_zero.errors import PartitionError

IN_FLIGHT = 2  # borrowed buffers that may be on the wire at once


@dataclass(eq=False)
class _Flight:
    """A reduction under way: its result goes to ``flat.grad`` times ``scale``."""

    flat: Flat
    handle: Handle
    scale: float
    borrowed: torch.Tensor | None
    part: torch.Tensor | None = None  # where a sum over the shard axis goes that is yet to be summed over the replicas


class GradientReducer:
    """Takes gradients in as units become ready and reduces them in order."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        policy: Policy,
        scaling: Scaling,
        usage: Usage,
        wire_dtype: torch.dtype | None = None,
        homeward: Homeward | None = None,
        kernels: Any = "off",
    ):
        """``wire_dtype`` is what travels; None: the dtype of the parameters. ``homeward`` takes offloaded gradients off a GPU.

        ``kernels`` is the configuration's.
        """
        self._sizes = Counter(flat.layout.padded for unit in units for flat in unit.trainable)
        self._order = [unit for unit in [*reversed(units[1:]), units[0]] if unit.trainable]
        self._units = list(units)
        self._comm = comm
        self._policy = policy
        self._scaling = scaling
        self._usage = usage
        self._wire_dtype = wire_dtype
        self._homeward = homeward
        self._kernels = kernels
        self._ready: set[Unit] = set()
        self._landed: set[Flat] = set()  # in this backward
        self._seen: list[Unit] = []
        self._deferred: set[Unit] = set()  # units whose gradients come in parts: reduced last
        self._known: set[Hashable] = set()
        self._key: Hashable = None
        self._next = 0
        self._open = False
        self._holds = False
        self._ordered = False
        self._flights: list[_Flight] = []
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._broke = False  # a backward broke after some of its reductions were launched
        self.spoiled = False  # a backward broke after part of its gradients was taken in
        self.weight = 1.0  # of the micro-batch whose backward is under way
        self.reduces = True  # whether this backward ends an accumulation window
        self.on_landed: Callable[[Unit], None] | None = None  # told of each unit whose last gradient of the window is here

    def begin(self, key: Hashable, recording: bool = False) -> None:
        """A backward starts; ``key`` tells the kinds of backward apart, alike on all ranks.

        While the order of gathers is recorded, a rank must not wait for a reduction that others launch only after a
        gather it has yet to join.
        """
        if self._homeward is not None:
            self._homeward.arrive()
        self._holds = recording and self._comm.blocks
        if self._broke:
            self._broke = False
            self._comm.meet_after_break()
        self._ready.clear()
        self._landed.clear()
        self._seen, self._next, self._key, self._open = [], 0, key, True

    @property
    def _reduces_now(self) -> bool:
        return self.reduces or self._policy.reduces_every_backward

    def ready(self, unit: Unit) -> None:
        """The gradients of ``unit`` are complete on this rank."""
        if not unit.trainable or unit in self._ready or not self._open:
            return
        self._ready.add(unit)
        self._seen.append(unit)
        if not self._reduces_now:
            self._take_in_window(unit)
            return
        while self._next < len(self._order) and self._order[self._next] in self._ready - self._deferred:
            self._launch(self._order[self._next])
            self._next += 1

    def finish(self) -> None:
        """The backward is over: reduce what is left, in order, and wait for all of it."""
        if not self._open:
            return
        self._open = self._holds = False
        if self._reduces_now:
            launched = self._order[: self._next]
            for unit in self._order[self._next :]:
                self._launch(unit)
            self._reduce_late(launched)
            while self._flights:
                self._land()
            self._usage.drop()
            self._settle_order()
        else:
            for unit in self._order:
                self._take_in_window(unit)
        for unit in self._units:
            for flat in unit.flats:
                if not flat.trainable:
                    _drop_raw(flat)  # it requires grad but is in no optimizer group: nobody would ever clear it

    def _reduce_late(self, launched: Sequence[Unit]) -> None:
        late = [unit for unit in launched if any(_has_raw(flat) for flat in unit.trainable)]
        if self._key in self._known:
            if late:
                raise PartitionError(
                    f"gradients of {[unit.label for unit in late]} came after their reduction had started, which the first backward of this kind "
                    "did not show; compute what uses these parameters outside their module after the forward, or from the first backward on (times 0)"
                )
            return
        # While another forward waits for its backward, units are not ready before the end, and nothing can be late.
        waits = any(unit.pending for unit in self._units)
        told = self._comm.all_gather_object((waits, [unit.index for unit in late]), "late gradients")
        if not any(waits for waits, _ in told):
            self._known.add(self._key)
        everybody: set[int] = set().union(*(indices for _, indices in told))
        while everybody and self._flights:
            self._land()  # what is on the wire must not change
        for unit in launched:
            if unit.index in everybody:
                self._deferred.add(unit)
                self._launch(unit)

    def _settle_order(self) -> None:
        """After the first backward that reduces, follow the order in which units became ready on rank 0."""
        if self._ordered and not self._deferred.intersection(self._order[: -len(self._deferred) or None]):
            return
        if not self._ordered:
            seen = {unit.index: place for place, unit in enumerate(self._seen)}
            wished = sorted(self._order, key=lambda unit: seen.get(unit.index, len(seen)))
            by_index = {unit.index: unit for unit in self._order}
            self._order = [by_index[index] for index in self._comm.broadcast_object([unit.index for unit in wished])]
            self._ordered = True
        self._order.sort(key=lambda unit: unit in self._deferred)

    def reduce_windows(self) -> None:
        """Reduce what backwards before the end of the window left, where none of them was told that it is the last."""
        if any(flat.filled for unit in self._order for flat in unit.trainable):
            for unit in self._order:
                for flat in unit.trainable:
                    self._send_window(flat)
            while self._flights:
                self._land()
        if self._homeward is not None:
            self._homeward.add_up()

    def arrive(self) -> None:
        """Return when every gradient that was reduced can be read."""
        if self._homeward is not None:
            self._homeward.arrive()

    def close(self) -> None:
        """Let go of everything: the engine is destroyed."""
        self.clear()
        self._spare.clear()
        if self._homeward is not None:
            self._homeward.close()

    def abandon(self) -> None:
        """Forget the backward under way, which an exception has broken, and the gradients it left on the parameters."""
        self.spoiled = bool(self._open and self._ready)
        self._broke = self._broke or bool(self._open and self._next)
        self._open = self._holds = False
        self._drop()

    def clear(self) -> None:
        """Forget all gradients: after a step, and for ``zero_grad``."""
        self.spoiled = False
        self._drop()
        for unit in self._order:
            for flat in unit.trainable:
                flat.filled = flat.reduced = False
                flat.held = None
                flat.used, flat.unused = 0, frozenset()

    def _drop(self) -> None:
        """Let go of gradients on parameters and of reductions on the wire."""
        for flight in self._flights:
            flight.handle.drop()
            self._give_back(flight.borrowed)
        self._flights = []
        self._usage.drop()
        for unit in self._units:
            for flat in unit.flats:
                _drop_raw(flat)

    def _take_in_window(self, unit: Unit) -> None:
        """Add this backward's gradients to the whole gradient that is kept for the window."""
        for flat in unit.trainable:
            if flat.filled or flat.reduced:
                self._widen(flat)
            assert flat.window is not None and flat.grad is not None
            if flat.reduced and flat.states is None:
                # A second reduction before the step: what is averaged already must not be averaged again.
                flat.held = flat.grad.clone()
                flat.filled = flat.reduced = False
            _take_in(flat, flat.window, flat.filled, self._scaling.before(self.weight))
            flat.filled = True

    def _launch(self, unit: Unit) -> None:
        if not self._policy.reduces_every_backward:
            self._take_in_window(unit)
        if self.on_landed is not None:  # the update of the unit may begin as soon as its gradients are here
            for flat in unit.trainable:
                flat.used |= sum(1 << place for place, grad in enumerate(raw_grads(flat.members)) if grad is not None)
            self._usage.send(unit)
        for flat in unit.trainable:
            if flat.window is not None:
                self._send_window(flat)
                continue
            wire = self._borrow(flat.layout.padded, self._wire_dtype or flat.dtype, flat.full.device)
            _take_in(flat, wire, False, self._scaling.before(self.weight, on_the_wire=True))
            self._send(flat, wire, wire, self._scaling.after(self.weight, on_the_wire=True))

    def _send_window(self, flat: Flat) -> None:
        assert flat.window is not None
        dtype = self._wire_dtype or flat.dtype
        if dtype != flat.window.dtype and self._comm.world > 1:
            wire = self._borrow(flat.layout.padded, dtype, flat.full.device)
            wire.copy_(flat.window)
            self._send(flat, wire, wire, self._scaling.after(self.weight))
        else:
            self._send(flat, flat.window, None, self._scaling.after(self.weight))

    def _send(self, flat: Flat, wire: torch.Tensor, borrowed: torch.Tensor | None, scale: float) -> None:
        shard, replicate, part = self._comm.shard, self._comm.replicate, None
        if flat.layout.shards > 1:
            handle = shard.reduce_scatter(wire, flat.key)
            if replicate.size > 1:
                part = torch.empty(flat.layout.chunk, dtype=wire.dtype, device=wire.device)
        else:
            handle = replicate.all_reduce(wire, flat.key, ordered=True)
        self._flights.append(_Flight(flat, handle, scale, borrowed, part))
        # Alone, nothing is on the wire, and what has to go to the host should leave at once.
        most = IN_FLIGHT if self._comm.world > 1 else 0
        while not self._holds and sum(map(self._takes_memory, self._flights)) > most:
            self._land()

    def _widen(self, flat: Flat) -> None:
        """Something is added to the gradient of ``flat``, which nobody has announced."""
        if flat.widens:
            if self._homeward is not None:
                self._homeward.arrive()
            flat.widen_gradient()

    def _takes_memory(self, flight: _Flight) -> bool:
        return flight.borrowed is not None or (self._homeward is not None and flight.flat.states is not None)

    def _land(self) -> None:
        flight = self._flights.pop(0)
        flat = flight.flat
        assert flat.grad is not None
        flat.settle()
        accumulate = flat.reduced and (flat.window is None or flat.states is not None)
        if accumulate:
            self._widen(flat)
        if flight.part is not None:
            flight.handle.reduce_into(flight.part, False, 1.0)
            flight.handle = self._comm.replicate.all_reduce(flight.part, flat.key, ordered=True)
        if self._homeward is not None and flat.states is not None:
            wire = flight.borrowed if flight.borrowed is not None else flat.window
            assert wire is not None
            values = torch.empty(flat.grad.numel(), dtype=wire.dtype if flight.scale == 1.0 else torch.float32, device=wire.device)
            flight.handle.reduce_into(values, False, flight.scale)
            flat.squares = None if accumulate else sums_of_squares([values], self._kernels)[0]
            self._homeward.send(flat, values, accumulate)
        else:
            flat.squares = None
            flight.handle.reduce_into(flat.grad, accumulate, flight.scale)
        if flat.held is not None:
            flat.grad.add_(flat.held)
            flat.held = None
        flat.filled, flat.reduced = False, True
        self._give_back(flight.borrowed)
        self._landed.add(flat)
        # In the first backward of its kind more may come.
        complete = self.reduces and self._key in self._known and self._landed.issuperset(flat.unit.trainable)
        if complete and self.on_landed is not None and (self._homeward is None or not self._homeward.is_adding):
            self._usage.receive(flat.unit)
            self.on_landed(flat.unit)

    def _give_back(self, wire: torch.Tensor | None) -> None:
        # Kept for the next unit of this size; the size of an embedding or a head comes once a backward and is not held.
        if wire is not None and self._sizes[wire.numel()] > 1:
            spare = self._spare.setdefault((wire.numel(), wire.dtype), [])
            if len(spare) < IN_FLIGHT:
                spare.append(wire)

    def _borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        spare = self._spare.get((numel, dtype))
        return spare.pop() if spare else torch.empty(numel, dtype=dtype, device=device)


def _has_raw(flat: Flat) -> bool:
    return any(grad is not None for grad in raw_grads(flat.members))


def _drop_raw(flat: Flat) -> None:
    if _has_raw(flat):
        drop_raw_grads(flat.members)


@torch.no_grad()
def _take_in(flat: Flat, target: torch.Tensor, accumulate: bool, factor: float) -> None:
    """``target = factor * grad`` (or ``+=``) for every parameter; one without gradient counts as zero. Empties ``.grad``."""
    grads, views = [], []
    # Parameters lie end to end: one call gives the views of all, and one takes all gradients in.
    given = raw_grads(flat.members)
    lacking = 0
    for place, (grad, view) in enumerate(zip(given, torch._C._nn.unflatten_dense_tensors(target, list(flat.views.values())))):
        if grad is None:
            lacking |= 1 << place
            if not accumulate:
                view.zero_()
        elif view.numel():
            grads.append(grad.to_dense() if grad.is_sparse else grad)
            views.append(view)
    del given
    flat.used |= flat.every & ~lacking
    drop_raw_grads(flat.members)
    if grads and accumulate:
        torch._foreach_add_(views, grads, alpha=factor)
    elif grads:
        torch._foreach_copy_(views, grads)
        if factor != 1.0:
            target[: flat.layout.numel].mul_(factor)
    if not accumulate:
        target[flat.layout.numel :].zero_()
