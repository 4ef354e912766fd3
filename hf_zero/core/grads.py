"""Gradients: taken from the parameters into flat buffers, reduced unit by unit, normed, clipped.

[Note: who divides]
A backward leaves the gradient of the loss it was given, times the fp16 loss scale. The engine
multiplies by the weight of the micro-batch (1 / accumulation steps) and averages over ranks when it
takes a gradient in; nobody else divides. So ``engine.backward(loss)`` and plain ``loss.backward()``
give the same gradient. These factors are applied after the reduction, in the precision of the
accumulator, to this rank's chunk (:class:`Scaling` has the exceptions).

[Note: order of reductions]
All ranks launch the reductions of all trainable units, in one fixed order (``order.py``), in every
backward that reduces. A unit waits for its predecessors; one for which nothing can come any more on
this rank (``outstanding.py``) is launched at once, with zeros where nothing came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.core.flat import Flat
from hf_zero.core.homeward import Homeward
from hf_zero.core.norm import sums_of_squares
from hf_zero.core.order import Gathers, ReductionOrder, Shown
from hf_zero.core.outstanding import Outstanding
from hf_zero.core.parameter import any_raw_grad, drop_raw_grads, raw_grads
from hf_zero.core.policy import Policy
from hf_zero.core.precision import Scaling
from hf_zero.core.sparse import dense
from hf_zero.core.unit import Unit
from hf_zero.core.usage import Usage
from hf_zero.distributed.collectives import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.spans import span

IN_FLIGHT = 2  # borrowed buffers that may be on the wire at once


@dataclass(eq=False)
class _Reduction:
    """The reduction of one flat: its result goes to ``flat.grad`` times ``scale``."""

    flat: Flat
    wire: torch.Tensor  # [padded], what is summed
    scale: float
    borrowed: torch.Tensor | None  # ``wire``, where it is to be given back


@dataclass(eq=False)
class _Flight:
    """A message under way, with the reductions of one flat or of several small ones."""

    reductions: Sequence[_Reduction]
    handles: Sequence[Handle]  # of each
    number: int  # of the message in its backward
    # where a sum over the shard axis goes that is yet to be summed over the replicas
    part: torch.Tensor | None = None


class GradientReducer:
    """Takes gradients in as units become ready and reduces them in order."""

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        policy: Policy,
        scaling: Scaling,
        usage: Usage,
        wire_dtype: torch.dtype | None = None,
        homeward: Homeward | None = None,
        kernels: Any = "off",
        packed: int = 0,
    ):
        """``wire_dtype`` is what travels; None: the dtype of the parameters. ``homeward`` takes
        offloaded gradients off a GPU.

        ``kernels`` is the configuration's. Consecutive units of at most ``packed`` elements
        together are reduced in one message.
        """
        self._sizes = Counter(flat.layout.padded for unit in units for flat in unit.trainable)
        self._order = ReductionOrder(units)
        self._units = list(units)
        self._mesh = mesh
        self._policy = policy
        self._scaling = scaling
        self._usage = usage
        self._wire_dtype = wire_dtype
        self._homeward = homeward
        self._kernels = kernels
        self._ready: set[Unit] = set()
        self._landed: set[Flat] = set()  # in this backward
        self._shown = Shown(False)
        # gradients on the parameters when units became complete, where that is learned
        self._as_complete: dict[Unit, list[Any]] = {}
        self._known: set[Hashable] = set()
        self._key: Hashable = None
        self._next = 0
        # gathers that any rank may wait for before it launches the last reduction launched here
        self._depth = 0
        self._open = False
        # no reduction is waited for before the backward is over, but those that all ranks have
        # launched
        self._holds = False
        self._sent = 0  # reductions launched in this backward
        self._gathers: Gathers | None = None
        self._outstanding: Outstanding | None = None
        self._flights: list[_Flight] = []
        self._waiting: list[_Reduction] = []  # for others, to be sent in one message
        self._waiting_elements = 0
        # a sum over two axes is two messages a flat
        both = mesh.shard.size > 1 and mesh.replicate.size > 1
        self._packed = 0 if both or mesh.world == 1 else packed
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.spoiled = False  # a backward broke after part of its gradients was taken in
        self.weight = 1.0  # of the micro-batch whose backward is under way, the same on all ranks
        self.unscale = 1.0  # this rank's own factor: it is multiplied in before the reduction
        self.reduces = True  # whether this backward ends an accumulation window
        # told of each unit whose last gradient of the window is here
        self.on_landed: Callable[[Unit], None] | None = None

    def connect(self, gathers: Gathers, outstanding: Outstanding) -> None:
        """Make known what tells of gathers, and what may still come."""
        self._gathers, self._outstanding = gathers, outstanding

    def begin(self, key: Hashable) -> None:
        """A backward starts; ``key`` tells the kinds of backward apart, alike on all ranks."""
        if self._homeward is not None:
            self._homeward.arrive()
        self._mesh.passes.begin("backward", key)
        self._ready.clear()
        self._landed.clear()
        self._shown = Shown(False)
        self._as_complete.clear()
        self._next, self._depth, self._sent, self._key, self._open = 0, 0, 0, key, True
        # A rank must not wait for a reduction that others launch only after a gather it has yet to
        # join.
        self._holds = self.learns and self._gathers is not None and self._gathers.gathers
        # others are going to be added; as long as nothing is in the windows, widening copies
        # nothing
        if not self._reduces_now:
            for unit in self._order.units:
                for flat in unit.trainable:
                    self._widen(flat)

    def wait_for_older(self) -> None:
        """An older forward still waits for its backward, and this one may go through it: nothing
        is complete before the end.
        """
        self._shown.waits = True
        self._holds = self._gathers is not None and self._gathers.gathers

    @property
    def _reduces_now(self) -> bool:
        return self.reduces or self._policy.reduces_every_backward

    @property
    def learns(self) -> bool:
        """Whether this backward is the first of its kind, or shows anew in which order gathers
        come.
        """
        return self._key not in self._known or (
            self._gathers is not None and self._gathers.recording
        )

    def ready(self, unit: Unit) -> None:
        """The gradients of ``unit`` are complete on this rank, as far as hooks tell."""
        if not unit.trainable or unit in self._ready or not self._open:
            return
        self._ready.add(unit)
        self._shown.complete.append(unit.index)
        if self.learns:
            self._as_complete[unit] = _raw_state(unit)
        if self._gathers is not None and self._gathers.recording:
            self._shown.depths[unit.index] = self._gathers.recorded
        if not self._reduces_now:
            self._take_in_window(unit)

    def advance(self) -> None:
        """Launch the reductions whose turn it is and for which nothing can come any more on this
        rank.
        """
        if not self._open or not self._reduces_now or self._outstanding is None:
            return
        while self._next < len(self._order.units):
            unit = self._order.units[self._next]
            if unit in self._order.deferred:
                return
            awaits = (
                self._outstanding.awaits_reruns if unit in self._ready else self._outstanding.awaits
            )
            if awaits(unit, self.learns):
                return
            self._launch_next()

    @property
    def depth(self) -> int:
        """How many gathers of the plan any rank may have waited for before it launches what this
        rank has launched.
        """
        return self._depth

    @property
    def launched(self) -> int:
        """How many reductions this rank has launched in the backward under way."""
        return self._sent if self._open else 0

    def land_launched(self, number: int) -> None:
        """Wait for reductions beyond those that may be under way, among the first ``number``,
        which all ranks have launched.
        """
        # so that all ranks wait for the same ones
        while self._flights and self._flights[0].number < number - IN_FLIGHT:
            self._land()

    def note_unfinished(self) -> None:
        """The backward is over: remember for which units gradients could have come until now."""
        if self._open and self._outstanding is not None and self.learns:
            left = (unit for unit in self._order.units[self._next :] if unit not in self._ready)
            self._shown.unfinished = [
                unit.index for unit in left if self._outstanding.awaits(unit, False)
            ]

    def finish(self, learns: bool = False) -> None:
        """The backward is over, and all its gathers are issued: reduce what is left, in order, and
        wait for all of it.

        ``learns``: the order of gathers was recorded in it.
        """
        if not self._open:
            return
        learns = learns or self.learns
        self._open = self._holds = False
        if self._reduces_now:
            launched = self._order.units[: self._next]
            waited = self._order.units[self._next :]
            self._shown.parts = [
                unit.index
                for unit in waited
                if unit in self._as_complete and self._as_complete[unit] != _raw_state(unit)
            ]
            while self._next < len(self._order.units):
                self._launch_next()
            self._reduce_late(launched, learns)
            while self._flights:
                self._land()
            self._usage.drop()
        else:
            for unit in self._order.units:
                self._take_in_window(unit)
        for unit in self._units:
            for flat in unit.flats:
                if not flat.trainable:
                    # it requires grad but is in no optimizer group: nobody would ever clear it
                    _drop_raw(flat)

    def _launch_next(self) -> None:
        unit = self._order.units[self._next]
        self._next += 1
        self._depth = max(self._depth, self._order.depth(self._key, unit))
        self._launch(unit)
        if self._waiting and not self._next_fits():
            self._flush()

    def _next_fits(self) -> bool:
        """Whether the next unit in the order may travel with the reductions that wait."""
        units = self._order.units
        if self._next >= len(units) or units[self._next] in self._order.deferred:
            return False
        elements = self._waiting_elements
        for flat in units[self._next].trainable:
            elements += flat.layout.padded
        return elements <= self._packed

    def _reduce_late(self, launched: Sequence[Unit], learns: bool) -> None:
        late = [
            unit for unit in launched if any(any_raw_grad(flat.members) for flat in unit.trainable)
        ]
        if late and self._key in self._known:
            raise PartitionError(
                f"gradients of {[unit.label for unit in late]} came after their reduction had "
                "started, which the first backward of this kind "
                "did not show; compute what uses these parameters outside their module after the "
                "forward, or from the first backward on (times 0)"
            )
        if not learns:
            return
        self._shown.late = [unit.index for unit in late]
        told = self._mesh.all_gather_object(self._shown, "what a backward has shown")
        again = {index for each in told for index in each.late}
        while again and self._flights:
            self._land()  # what is on the wire must not change
        for unit in self._order.units:
            if unit.index in again:
                self._launch(unit)
        self._flush()
        # While an older forward waits, units are not complete before the end, which shows nothing.
        if not any(each.waits for each in told):
            self._known.add(self._key)
            gathers = self._gathers
            places, plan = (gathers.places, gathers.plan) if gathers is not None else ((0,), ())
            self._order.learn(self._key, told, places, [unit.index for unit in plan])

    def reduce_windows(self) -> None:
        """Reduce what backwards before the end of the window left, where none of them was told
        that it is the last.
        """
        if any(flat.filled for unit in self._order.units for flat in unit.trainable):
            for unit in self._order.units:
                for flat in unit.trainable:
                    self._send_window(flat)
            self._flush()
            while self._flights:
                self._land()
        if self._homeward is not None:
            self._homeward.add_up()

    @property
    def unreduced(self) -> float:
        """What a gradient in the window is a multiple of that is the same on all ranks: its
        average is yet to be taken.
        """
        return 1.0 / (self._mesh.world * self._scaling.post)

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
        """Forget the backward under way, which an exception has broken, and the gradients it
        left on the parameters.
        """
        self.spoiled = bool(self._open and self._ready)
        self._open = self._holds = False
        self._drop()

    def clear(self) -> None:
        """Forget all gradients: after a step, and for ``zero_grad``."""
        self.spoiled = False
        self._drop()
        for unit in self._order.units:
            for flat in unit.trainable:
                flat.filled = flat.reduced = False
                flat.held = None
                flat.used, flat.unused = 0, frozenset()

    def _drop(self) -> None:
        """Let go of gradients on parameters and of reductions on the wire."""
        for flight in self._flights:
            for reduction, handle in zip(flight.reductions, flight.handles):
                handle.drop()
                self._give_back(reduction.borrowed)
        for waiting in self._waiting:
            self._give_back(waiting.borrowed)
        self._flights, self._waiting, self._waiting_elements = [], [], 0
        self._usage.drop()
        for unit in self._units:
            for flat in unit.flats:
                _drop_raw(flat)

    def _take_in_window(self, unit: Unit) -> None:
        """Add this backward's gradients to the whole gradient that is kept for the window."""
        unit.await_gradients()
        for flat in unit.trainable:
            if flat.filled or flat.reduced:
                self._widen(flat)
            assert flat.window is not None and flat.grad is not None
            if flat.reduced and flat.states is None:
                # A second reduction before the step: what is averaged already must not be averaged
                # again.
                flat.held = flat.grad.clone()
                flat.filled = flat.reduced = False
            factor = self._scaling.before(self.weight) * self.unscale
            if flat.filled and flat.window.dtype != flat.dtype:
                # A list of another dtype would be added one parameter after the other.
                taken = self._borrow(flat.layout.padded, flat.dtype, flat.full.device)
                _take_in(flat, taken, False, 1.0)
                flat.window.add_(taken, alpha=factor)
                self._give_back(taken)
            else:
                _take_in(flat, flat.window, flat.filled, factor)
            flat.filled = True

    def _launch(self, unit: Unit) -> None:
        unit.await_gradients()
        if not self._policy.reduces_every_backward:
            self._take_in_window(unit)
        # the update of the unit may begin as soon as its gradients are here
        if self.on_landed is not None:
            for flat in unit.trainable:
                flat.used |= sum(
                    1 << place
                    for place, grad in enumerate(raw_grads(flat.members))
                    if grad is not None
                )
            self._usage.send(unit)
        for flat in unit.trainable:
            if flat.window is not None:
                self._send_window(flat)
                continue
            wire = self._borrow(
                flat.layout.padded, self._wire_dtype or flat.dtype, flat.full.device
            )
            _take_in(
                flat,
                wire,
                False,
                self._scaling.before(self.weight, on_the_wire=True) * self.unscale,
            )
            self._send(flat, wire, wire, self._scaling.after(self.weight, on_the_wire=True))

    def _send_window(self, flat: Flat) -> None:
        assert flat.window is not None
        dtype = self._wire_dtype or flat.dtype
        if dtype != flat.window.dtype and self._mesh.world > 1:
            wire = self._borrow(flat.layout.padded, dtype, flat.full.device)
            wire.copy_(flat.window)
            self._send(flat, wire, wire, self._scaling.after(self.weight))
        else:
            self._send(flat, flat.window, None, self._scaling.after(self.weight))

    def _send(
        self, flat: Flat, wire: torch.Tensor, borrowed: torch.Tensor | None, scale: float
    ) -> None:
        elements = flat.layout.padded
        waiting = self._waiting
        if waiting and (
            waiting[0].wire.dtype != wire.dtype or self._waiting_elements + elements > self._packed
        ):
            self._flush()
        self._waiting.append(_Reduction(flat, wire, scale, borrowed))
        self._waiting_elements += elements
        if self._waiting_elements > self._packed:
            self._flush()

    def _flush(self) -> None:
        """Send what waits, in one message."""
        reductions, self._waiting, self._waiting_elements = self._waiting, [], 0
        if not reductions:
            return
        shard, replicate, part = self._mesh.shard, self._mesh.replicate, None
        wires, flat = [each.wire for each in reductions], reductions[0].flat
        key = flat.key if len(reductions) == 1 else f"{flat.key}..{reductions[-1].flat.key}"
        if len(reductions) > 1 and flat.layout.shards > 1:
            handles = shard.reduce_packed(wires, key)
        elif len(reductions) > 1:
            packed = replicate.all_reduce(torch.cat(wires), key, ordered=True)
            handles = packed.split([wire.numel() for wire in wires])
        elif flat.layout.shards > 1:
            handles = [shard.reduce_scatter(wires[0], key)]
            if replicate.size > 1:
                part = wires[0].new_empty(flat.layout.chunk)
        else:
            handles = [replicate.all_reduce(wires[0], key, ordered=True)]
        self._flights.append(_Flight(reductions, handles, self._sent, part))
        self._sent += 1
        if self._holds or not self._exceeds():
            return
        if self._open and self._gathers is not None:
            self._gathers.issue_through(self._depth)
        while self._exceeds():
            self._land()

    def _exceeds(self) -> bool:
        # Alone, nothing is on the wire, and what has to go to the host should leave at once.
        most = IN_FLIGHT if self._mesh.world > 1 else 0
        return sum(map(self._takes_memory, self._flights)) > most

    def _widen(self, flat: Flat) -> None:
        """Something is added to the gradient of ``flat``, which nobody has announced."""
        if flat.widens:
            if self._homeward is not None:
                self._homeward.arrive()
            flat.widen_gradient()

    def _takes_memory(self, flight: _Flight) -> bool:
        if len(flight.reductions) > 1:
            return True
        (alone,) = flight.reductions
        return alone.borrowed is not None or (
            self._homeward is not None and alone.flat.states is not None
        )

    def _land(self) -> None:
        flight = self._flights.pop(0)
        for reduction, handle in zip(flight.reductions, flight.handles):
            self._land_one(reduction, handle, flight.part)

    def _land_one(self, reduction: _Reduction, handle: Handle, part: torch.Tensor | None) -> None:
        flat = reduction.flat
        assert flat.grad is not None
        flat.wait_for_update()
        accumulate = flat.reduced and (flat.window is None or flat.states is not None)
        if accumulate:
            self._widen(flat)
        if part is not None:
            with span("wait_reduction", flat.key):
                handle.reduce_into(part, False, 1.0)
            handle = self._mesh.replicate.all_reduce(part, flat.key, ordered=True)
        if self._homeward is not None and flat.states is not None:
            wire = reduction.borrowed if reduction.borrowed is not None else flat.window
            assert wire is not None
            values = torch.empty(flat.grad.numel(), dtype=wire.dtype, device=wire.device)
            # What the host adds or casts, it multiplies as well.
            later = reduction.scale if accumulate or flat.grad.dtype != wire.dtype else 1.0
            with span("wait_reduction", flat.key):
                handle.reduce_into(values, False, reduction.scale / later)
            flat.squares = (
                None if accumulate else sums_of_squares([values], self._kernels)[0] * later**2
            )
            self._homeward.send(flat, values, accumulate, later)
        else:
            flat.squares = None
            with span("wait_reduction", flat.key):
                handle.reduce_into(flat.grad, accumulate, reduction.scale)
        if flat.held is not None:
            flat.grad.add_(flat.held)
            flat.held = None
        flat.filled, flat.reduced = False, True
        self._give_back(reduction.borrowed)
        self._landed.add(flat)
        # In the first backward of its kind more may come.
        complete = (
            self.reduces
            and self._key in self._known
            and self._landed.issuperset(flat.unit.trainable)
        )
        if (
            complete
            and self.on_landed is not None
            and (self._homeward is None or not self._homeward.is_adding)
        ):
            self._usage.receive(flat.unit)
            self.on_landed(flat.unit)

    def _give_back(self, wire: torch.Tensor | None) -> None:
        # Kept for the next unit of this size; the size of an embedding or a head comes once a
        # backward and is not held.
        if wire is not None and self._sizes[wire.numel()] > 1:
            spare = self._spare.setdefault((wire.numel(), wire.dtype), [])
            if len(spare) < IN_FLIGHT:
                spare.append(wire)

    def _borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        spare = self._spare.get((numel, dtype))
        return spare.pop() if spare else torch.empty(numel, dtype=dtype, device=device)


def _raw_state(unit: Unit) -> list[Any]:
    """What changes when autograd adds to a gradient of ``unit``."""
    grads = (grad for flat in unit.trainable for grad in raw_grads(flat.members))
    return [
        None if grad is None else (grad._version, id(grad) if grad.is_sparse else grad.data_ptr())
        for grad in grads
    ]


def _drop_raw(flat: Flat) -> None:
    if any_raw_grad(flat.members):
        drop_raw_grads(flat.members)


@torch.no_grad()
def _take_in(flat: Flat, target: torch.Tensor, accumulate: bool, factor: float) -> None:
    """``target = factor * grad`` (or ``+=``) for every parameter; one without gradient counts as
    zero. Empties ``.grad``.
    """
    grads, views = [], []
    # Parameters lie end to end: one call gives the views of all, and one takes all gradients in.
    given = raw_grads(flat.members)
    lacking = 0
    for place, (grad, view) in enumerate(
        zip(given, torch._C._nn.unflatten_dense_tensors(target, list(flat.views.values())))
    ):
        if grad is None:
            lacking |= 1 << place
            if not accumulate:
                view.zero_()
        elif view.numel():
            grads.append(dense(flat, place, grad) if grad.is_sparse else grad)
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
