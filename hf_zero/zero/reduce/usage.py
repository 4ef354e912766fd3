"""Which parameters have a gradient: on this rank, and on any.

[Note: unused parameters]
A parameter for which no rank has a gradient in an accumulation window is left as it is by the step,
weight and optimizer state, as plain PyTorch leaves one whose ``.grad`` is None. Every rank adds
what it has used to one message, which travels with the sum of the gradient norm. What this rank has
used itself is used, and what all ranks have left out of every backward (:class:`IdleParameters`) is
known to be unused: so the message is read, which on a GPU waits for the device, only where another
parameter lacks a gradient here. A rank that has all of them reads nothing. One that has a gradient
of what all have left out, of a penalty on the weights, reads whether all others have it, too.

The message counts ranks: the counts of as many parameters share an fp64 number as it holds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul

import torch

from hf_zero.device.pinned import upload
from hf_zero.distributed.collective_handle import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradient_buffer import GradState
from hf_zero.zero.layout.unit import Unit

EXACT = 1 << 53  # integers up to here are exact in fp64


class Usage:
    """The parameters of ``flats``, which train, by their places in the message."""

    def __init__(self, flats: Sequence[FlatBuffer], mesh: Mesh, device: torch.device):
        self._flats = list(flats)
        self._mesh = mesh
        self._device = device
        self._base = mesh.world + 1
        self._powers = [1]
        while self._powers[-1] * self._base**2 <= EXACT:
            self._powers.append(self._powers[-1] * self._base)
        # of a rank that has used everything
        self._all = self._message(self._flats, [flat.gradient.all_used for flat in self._flats])
        self._units: dict[Unit, tuple[torch.Tensor, Handle]] = {}
        for axis in mesh.sums:
            axis.allow_small_sums(2 + self._all.numel())

    def _message(self, flats: Sequence[FlatBuffer], used: Sequence[int]) -> torch.Tensor:
        """[words] fp64: a digit for each parameter, 1 where the bit of it in ``used`` is set."""
        digits = [
            bits >> place & 1
            for flat, bits in zip(flats, used)
            for place in range(len(flat.members))
        ]
        length = len(self._powers)
        words = [
            sum(map(mul, digits[at : at + length], self._powers))
            for at in range(0, len(digits), length)
        ]
        return upload(torch.tensor(words, dtype=torch.float64), self._device)

    def agree(self, numbers: torch.Tensor, step: int) -> torch.Tensor:
        """The sum over all ranks of ``numbers`` (a few, fp64), of which each replica has all; flats
        learn which of their parameters are unused (collective).
        """
        sums, repeats, stages = self._mesh.sums
        stages.all_reduce(numbers, "gradient norm of stages").wait()
        complete = _complete(self._flats)
        idle = [flat for flat in self._flats if flat.gradient.idle]
        words = (
            self._all
            if complete and not idle
            else self._message(self._flats, [flat.gradient.used for flat in self._flats])
        )
        if sums.size > 1:
            both = torch.cat([numbers, words])
            sums.all_reduce(both, "gradient norm").wait()
            numbers, words = both[: numbers.numel()], both[numbers.numel() :]
        if repeats.size > 1:
            words = words.clone()
            # Its name shows a rank that is at another micro-batch.
            handle = repeats.verify_same_collective(
                f"step {step} after {repeats.reductions.sequence_number} reductions", words
            )
            if not complete:
                handle.wait()
        if complete:
            _mark_idle(self._flats)
        else:
            self._read(self._flats, words)
        return numbers

    def missing(self) -> list[str]:
        """Names of parameters that have no gradient on one rank or more, alike on all ranks
        (collective).
        """
        words = self._message(self._flats, [flat.gradient.used for flat in self._flats])
        for axis in self._mesh.sums[:2]:
            if axis.size > 1:
                axis.all_reduce(words, "parameters that have a gradient").wait()
        return [
            slot.name
            for flat, counts in zip(self._flats, self._counts(self._flats, words))
            for slot, count in zip(flat.layout.slots, counts)
            if count < self._mesh.world
        ]

    def send(self, unit: Unit) -> None:
        """As :meth:`agree` for one unit, whose last gradients of the window are on the wire;
        :meth:`receive` follows (collective).
        """
        each, repeats, _ = self._mesh.sums
        axis = each if each.size > 1 else repeats
        words = self._message(unit.trainable, [flat.gradient.used for flat in unit.trainable])
        if unit in self._units:
            self._units[unit][1].wait()
        self._units[unit] = (
            words,
            axis.all_reduce(words, f"used parameters of {unit.label}", ordered=True),
        )

    def receive(self, unit: Unit) -> None:
        words, handle = self._units.pop(unit)
        handle.wait()
        each, repeats, _ = self._mesh.sums
        if each.size > 1 and repeats.size > 1:
            repeats.all_reduce(words, f"used parameters of {unit.label}", ordered=True).wait()
        if _complete(unit.trainable):
            _mark_idle(unit.trainable)
        else:
            self._read(unit.trainable, words)

    def drop(self) -> None:
        """Wait for what was sent and not received: nothing needs it."""
        for _, handle in self._units.values():
            handle.wait()
        self._units.clear()

    def _read(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> None:
        for flat, counts in zip(flats, self._counts(flats, total)):
            gradient = flat.gradient
            if gradient.unused and gradient.all_unused:
                continue  # as all ranks know; those that lack nothing else send that they have all
            lacking = sum(1 << place for place, count in enumerate(counts) if count == 0)
            few = sum(1 << place for place, count in enumerate(counts) if count < self._mesh.world)
            if refused := _names(flat, few & gradient.used & gradient.idle):
                raise PartitionError(
                    f"{sorted(refused)} got a gradient on some ranks alone, of a penalty on the "
                    "weights, say, while all ranks have left out their block "
                    "(progressive_layer_drop): the others would not update them; have the penalty "
                    "in the loss of every rank, or of none"
                )
            gradient.set_unused(_names(flat, lacking))

    def _counts(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> list[list[int]]:
        """How many ranks have a gradient, for each parameter of each flat."""
        words = [int(word) for word in total.tolist()]
        digits = iter([word // power % self._base for word in words for power in self._powers])
        return [[next(digits) for _ in flat.members] for flat in flats]


class IdleParameters:
    """Parameters that all ranks leave out of every backward of a window, and know it: a bit for
    each member of a flat buffer.
    """

    def __init__(self) -> None:
        self._of_backward: Mapping[FlatBuffer, int] | None = None
        self._of_window: Mapping[FlatBuffer, int] | None = None

    def reach(self, idle: Mapping[FlatBuffer, int]) -> None:
        """The backward under way comes to a forward that has used none of ``idle``."""
        self._of_backward = _both(self._of_backward, idle)

    def end_backward(self) -> None:
        self._of_window = _both(self._of_window, self._of_backward or {})
        self._of_backward = None

    def settle(self) -> None:
        """The gradients of the window are reduced."""
        for flat, bits in (self._of_window or {}).items():
            flat.gradient.set_idle(bits)

    def clear(self) -> None:
        """Another window begins."""
        self._of_backward = self._of_window = None


def _both(
    one: Mapping[FlatBuffer, int] | None, other: Mapping[FlatBuffer, int]
) -> Mapping[FlatBuffer, int]:
    if one is None or one is other:
        return other
    return {flat: bits & other[flat] for flat, bits in one.items() if flat in other}


def _mark_idle(flats: Sequence[FlatBuffer]) -> None:
    """What is idle in ``flats`` is unused."""
    for flat in flats:
        if flat.gradient.idle and not flat.gradient.all_unused:
            flat.gradient.set_unused(_names(flat, flat.gradient.idle))


def _names(flat: FlatBuffer, bits: int) -> frozenset[str]:
    """The names of the parameters of ``flat`` whose bits are set."""
    return frozenset(slot.name for at, slot in enumerate(flat.layout.slots) if bits >> at & 1)


def settle_left_out(units: Sequence[Unit]) -> None:
    """The gradients of a window are reduced: zero is that of what all ranks have left out of every
    backward.
    """
    flats = [flat for unit in units for flat in unit.trainable]
    empty = [flat for flat in flats if flat.gradient.state is GradState.EMPTY]
    if empty and any(flat.gradient.holds_gradient for flat in flats):
        for flat in empty:
            flat.optimizer_shard.wait_for_update()
            flat.gradient.leave_out()


def _complete(flats: Sequence[FlatBuffer]) -> bool:
    """Whether nothing has to be read to know which parameters of ``flats`` are unused: each is
    either used here or idle.
    """
    for flat in flats:
        gradient = flat.gradient
        if gradient.used ^ gradient.idle != gradient.all_used and not gradient.all_unused:
            return False
    return True
