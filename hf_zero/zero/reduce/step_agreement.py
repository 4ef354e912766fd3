"""What the ranks agree on before a step, in one message: the sum of squares of the gradient, and
the parameters that have a gradient on any rank. Codes in it tell whether all ranks have the same
settings (rank_codes.py) and, in the first steps, the same batches (batch_codes.py).

[Note: terms]
used: a parameter with a gradient on this rank in the accumulation window
(``GradientBuffer.used``). unused: one without a gradient on any rank, once the ranks have agreed
(``GradientBuffer.unused``). left out: a unit, or a flat buffer, that no rank uses in a pass, as all
ranks know beforehand. idle: a parameter whose modules are dropped in every forward that the
window's backwards reach, which all ranks know as well (``GradientBuffer.idle``), also one in a unit
that is not left out as a whole.

[Note: unused parameters]
A parameter without a gradient on any rank in an accumulation window is unchanged by the step,
weight and optimizer state, as plain PyTorch skips one whose ``.grad`` is None. Every rank adds the
parameters it has used to one message, which is sent with the sum of the gradient norm. Parameters
used on this rank are used, and those that all ranks leave out of every backward
(:class:`IdleParameters`) are known to be unused. So the message is read, which on a GPU waits for
the device, only if another parameter has no gradient on this rank. A rank with all gradients reads
nothing. A rank with a gradient of a left-out parameter, from a penalty on the weights, reads
whether all others have it, too.

The message counts ranks: an fp64 number holds the counts of as many parameters as fit exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, mul

import torch

from hf_zero.device import graphs, pinned
from hf_zero.distributed.handle import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.reduce.batch_codes import BatchCodes
from hf_zero.zero.reduce.idle_parameters import mark_idle
from hf_zero.zero.reduce.rank_codes import SettingsCheck

_idle = attrgetter("gradient.idle")
EXACT = 1 << 53  # integers up to here are exact in fp64


class StepAgreement:
    """The message of a step: the sum of the gradient norm, which parameters got a gradient, and the
    codes of settings and first batches. ``flats``: the trainable ones, in the order of the message.

    Where a unit is updated in the backward, its used parameters have a message of their own
    (:meth:`send`, :meth:`receive`).
    """

    def __init__(self, flats: Sequence[FlatBuffer], mesh: Mesh, device: torch.device):
        self._flats, self._mesh, self._device = list(flats), mesh, device
        self._words = CountWords(mesh.pp_stage_ranks)
        # the message of a rank that has used all parameters
        self._all_used = self._words.pack([1 for flat in flats for _ in flat.members], device)
        self._restarts = ""  # of accumulation windows, in the names of messages
        self._settings = SettingsCheck(mesh, device)
        self.batches = BatchCodes(mesh)
        # of units: messages in flight, and words received; the reducer asks whether there are any
        self.sent: dict[Unit, tuple[torch.Tensor, Handle]] = {}
        self.received: dict[Unit, torch.Tensor] = {}
        # Stages of a pipeline differ in the words of their parameters. Beside these: squares, and
        # two numbers each for settings and batches.
        for dim in (mesh.sums.counted, mesh.sums.repeats):
            dim.allow_small_sums(self._all_used.numel() + 4 + 2 * self.batches.active)

    def name_restarts(self, restarts: int) -> None:
        """Put the number of accumulation windows that were restarted on this rank into the names of
        messages: they reveal a rank that has restarted one alone.
        """
        self._restarts = f" after {restarts} restarted windows" if restarts else ""

    def _pack_used(self, flats: Sequence[FlatBuffer]) -> torch.Tensor:
        """Return [words] fp64: a count for each parameter of ``flats``, 1 if it is used."""
        used = [
            flat.gradient.used >> index & 1 for flat in flats for index in range(len(flat.members))
        ]
        return self._words.pack(used, self._device)

    def agree(self, squares: torch.Tensor, step: int, settings: str = "") -> torch.Tensor:
        """Return the sum of ``squares``, [1] fp64, over the shards, and set the unused parameters
        of the flat buffers (collective). Replicas then hold equal sums. ``settings``: what a script
        has set, in words. Takes the sums of the codes, too, of which some are read in later steps.

        Raises PartitionError if some ranks only have a gradient of a parameter that all have left
        out, and RankMismatchError, on all ranks, if they have different settings, now or a few
        steps ago (rank_codes.py, the note).
        """
        are_known = _are_known(self._flats)
        all_used = are_known and not any(map(_idle, self._flats))
        # the message: ``squares``, and what each rank counts in
        used = self._all_used if all_used else self._pack_used(self._flats)
        codes = [self._settings.numbers(settings)]
        if self.batches.active and not graphs.capturing():
            codes += self.batches.numbers()
        counted = [used, *codes]
        dims, handle = self._mesh.sums, None
        dims.stages.all_reduce(squares, "gradient norm of stages").wait()
        if dims.counted.size > 1:
            message = torch.cat([squares, *counted])
            dims.counted.all_reduce(message, f"gradient norm{self._restarts}").wait()
            squares, *counted = message.split([1, *map(torch.numel, counted)])
        if dims.repeats.size > 1:
            message = torch.cat(counted)
            # The collective's name reveals a rank that is at another micro-batch.
            issued = dims.repeats.reductions.num_issued
            handle = dims.repeats.verify_same_collective(
                f"step {step} after {issued} reductions{self._restarts}", message
            )
            counted = list(message.split([*map(torch.numel, counted)]))
            if not are_known or len(codes) > 1 or graphs.capturing():
                handle.wait()
        used, settings_sums, *batch_sums = counted
        if self._mesh.pp_stage_ranks > 1:
            self._settings.receive(settings_sums, handle)
        for sums in batch_sums:
            self.batches.end_step(sums)
        if not are_known:
            self._set_unused(self._flats, used)
        elif not all_used:
            mark_idle(self._flats)
        return squares

    def missing(self) -> list[str]:
        """Return the names of parameters without a gradient on one rank or more. Equal on all ranks
        (collective).
        """
        words = self._pack_used(self._flats)
        for dim in (self._mesh.sums.counted, self._mesh.sums.repeats):
            if dim.size > 1:
                dim.all_reduce(words, "parameters that have a gradient").wait()
        names = [
            slot.name
            for flat, counts in zip(self._flats, self.ranks_with_gradients(self._flats, words))
            for slot, count in zip(flat.layout.slots, counts)
            if count < self._mesh.pp_stage_ranks
        ]
        of_stages = self._mesh.gather_from_stages(names, "parameters without a gradient")
        return list(dict.fromkeys(name for names in of_stages for name in names))

    def send(self, unit: Unit) -> None:
        """Send the used parameters of ``unit``, whose last gradients of the window are on the wire;
        :meth:`receive` completes it (collective).
        """
        dims = self._mesh.sums
        dim = dims.counted if dims.counted.size > 1 else dims.repeats
        words = self._pack_used(unit.trainable_flats)
        self.received.pop(unit, None)
        if unit in self.sent:
            self.sent.pop(unit)[1].wait()
        handle = dim.all_reduce(words, f"used parameters of {unit.label}", ordered=True)
        self.sent[unit] = words, handle

    def receive(self, unit: Unit, flats: Sequence[FlatBuffer]) -> None:
        """Set the unused parameters of ``flats``, flat buffers of ``unit`` that are reduced: what
        was set before that does not remain.
        """
        if unit in self.sent:
            words, handle = self.sent.pop(unit)
            handle.wait()
            dims, key = self._mesh.sums, f"used parameters of {unit.label}"
            if dims.counted.size > 1 and dims.repeats.size > 1:
                dims.repeats.all_reduce(words, key, ordered=True).wait()
            self.received[unit] = words
        if _are_known(flats):
            mark_idle(flats)
        else:
            self._set_unused(unit.trainable_flats, self.received[unit])

    def all_ranks_have(self, unit: Unit) -> bool:
        """Return whether :meth:`receive` has found a gradient of each parameter of ``unit`` on each
        rank. Equal on all ranks.
        """
        counts = self.ranks_with_gradients(unit.trainable_flats, self.received[unit])
        return min(map(min, counts)) == self._mesh.pp_stage_ranks

    def drop(self) -> None:
        """Wait for messages sent and not received, and drop them."""
        for unit in [*self.sent]:
            self.sent.pop(unit)[1].wait()
        self.received = {}

    def _set_unused(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> None:
        """Set the unused parameters of ``flats`` by ``total``, the words of all ranks, which this
        reads: it waits for the device. Raises PartitionError as :meth:`agree`.
        """
        ranks = self._mesh.pp_stage_ranks
        for flat, counts in zip(flats, self.ranks_with_gradients(flats, total)):
            gradient = flat.gradient
            if gradient.unused and gradient.all_unused:
                continue  # these counts are stale: ranks that know this send full words
            lacking = sum(1 << index for index, count in enumerate(counts) if count == 0)
            few = sum(1 << index for index, count in enumerate(counts) if count < ranks)
            if refused := gradient.names_of(few & gradient.used & gradient.idle):
                raise PartitionError(
                    f"{sorted(refused)} got a gradient on some ranks only (from weight "
                    "regularization, for example), while all ranks have dropped their layer: the "
                    "others would not update them; add the penalty to the loss of every rank, or "
                    "of none"
                )
            gradient.set_unused(gradient.names_of(lacking))

    def ranks_with_gradients(
        self, flats: Sequence[FlatBuffer], total: torch.Tensor
    ) -> list[list[int]]:
        """Return the number of ranks with a gradient, for each parameter of each flat buffer."""
        counts = self._words.unpack(total)
        return [[next(counts) for _ in flat.members] for flat in flats]


class CountWords:
    """Counts of ranks in fp64 numbers, each with as many as fit exactly: digits whose base is above
    the number of ``ranks``, so that a sum over the ranks carries nothing over.
    """

    def __init__(self, ranks: int) -> None:
        self._base, self._powers = ranks + 1, [1]
        while self._powers[-1] * self._base**2 <= EXACT:
            self._powers.append(self._powers[-1] * self._base)

    def pack(self, counts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return [words] fp64 on ``device``."""
        length = len(self._powers)
        starts = range(0, len(counts), length)
        words = [sum(map(mul, counts[start : start + length], self._powers)) for start in starts]
        return pinned.upload(torch.tensor(words, dtype=torch.float64), device)

    def unpack(self, words: torch.Tensor) -> Iterator[int]:
        """Yield the counts; waits for the device."""
        for word in map(int, words.tolist()):
            yield from (word // power % self._base for power in self._powers)


def _are_known(flats: Sequence[FlatBuffer]) -> bool:
    """Return whether the unused parameters of ``flats`` are known without reading the message: each
    parameter is either used on this rank or idle.
    """
    for flat in flats:
        gradient = flat.gradient
        # XOR: an idle parameter with a gradient here (of a penalty on the weights) is one that the
        # other ranks may lack, so the message must be read.
        if gradient.used ^ gradient.idle != gradient.all_used and not gradient.all_unused:
            return False
    return True
