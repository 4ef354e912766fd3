"""What the ranks agree on before a step, in one message: the sum of squares of the gradient, and
the parameters that have a gradient on any rank. Codes in it tell whether all ranks have the same
settings and batches.

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

[Note: codes of ranks]
Ranks that a script has given different settings since ``initialize``, options of parameter groups
or requires_grad, train different models; of different hooks after the step, one rank waits for the
others. Ranks that train on the same rows, as those of a loader
that is not divided among them do, do the work of one.

A rank adds a code, and the square of the code, to the message. Over n ranks, the square of the sum
of the codes is n times the sum of the squares if and only if all codes are equal. A sum in host
memory is read in the step itself, or, where the step does not wait for its message (stage 0), in
the next one. From a device it is copied, and read in a later step, once the copy is over: the host
waits for nothing. Only the first steps of an engine have codes of batches in their messages.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter, mul

import torch

from hf_zero.device import graphs, kinds, pinned, streams
from hf_zero.device.pinned import upload
from hf_zero.distributed.collective_log import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.logging import logger
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.training_state import GradState
from hf_zero.zero.layout.tree import tensors_in

_idle = attrgetter("gradient.idle")
EXACT = 1 << 53  # integers up to here are exact in fp64
CODES = 1 << 20  # the sum of the squares of so many is exact in fp64, over 8,192 ranks
STEPS = 2  # equal batches of one step may be a coincidence, such as a constant warm-up batch
SAMPLES = 1 << 16  # elements of a tensor that its code covers
SCALARS = (str, bytes, int, float, bool)


class StepAgreement:
    """What the ranks agree on in one message before a step: the sum of the gradient norm, and which
    parameters got a gradient; it also compares settings, first batches and restarts of windows.
    ``flats``: the trainable ones, in the order of the message.
    """

    def __init__(self, flats: Sequence[FlatBuffer], mesh: Mesh, device: torch.device):
        self._flats = list(flats)
        self._mesh = mesh
        self._device = device
        self._words = CountWords(mesh.pp_stage_ranks)
        # the message of a rank that has used all parameters
        self._all_used = self._words.pack([1 for flat in flats for _ in flat.members], device)
        self.restarts = 0  # of accumulation windows on this rank, the same on all
        self._settings = SettingsCheck(mesh, device)
        self.batches = BatchCodes(mesh)
        self._sent: dict[Unit, tuple[torch.Tensor, Handle]] = {}
        self._received: dict[Unit, torch.Tensor] = {}
        # Stages of a pipeline differ in the words of their parameters. Beside these: squares, and
        # two numbers each for settings and batches.
        for dim in (mesh.sums.counted, mesh.sums.repeats):
            dim.allow_small_sums(self._all_used.numel() + 4 + self.batches.allowance)

    def _used(self, flats: Sequence[FlatBuffer]) -> torch.Tensor:
        """Return [words] fp64: a count for each parameter of ``flats``, 1 if it is used."""
        used = [
            flat.gradient.used >> index & 1 for flat in flats for index in range(len(flat.members))
        ]
        return self._words.pack(used, self._device)

    def agree(self, squares: torch.Tensor, step: int, settings: str = "") -> torch.Tensor:
        """Return the sum of ``squares``, [1] fp64, over the shards, and set the unused parameters
        of the flat buffers (collective). Replicas then hold equal sums. ``settings``: what a script
        has set, in words.

        Raises PartitionError if some ranks only have a gradient of a parameter that all have left
        out, and RankMismatchError if the ranks have different settings.
        """
        settings_numbers = self._settings.numbers(settings)
        complete = _complete(self._flats)
        has_all = complete and not any(map(_idle, self._flats))
        used = self._all_used if has_all else self._used(self._flats)
        # The message: ``squares``, and what each rank counts in. A code of batches is in the first
        # ones alone.
        counts = [used, settings_numbers]
        if self.batches.active and not graphs.capturing():
            counts += self.batches.numbers()
        dims, handle = self._mesh.sums, None
        # The collectives' names reveal a rank that has restarted a window alone.
        restarts = f" after {self.restarts} restarted windows" if self.restarts else ""
        dims.stages.all_reduce(squares, "gradient norm of stages").wait()
        if dims.counted.size > 1:
            message = torch.cat([squares, *counts])
            dims.counted.all_reduce(message, f"gradient norm{restarts}").wait()
            squares, *counts = message.split([1, *map(torch.numel, counts)])
        if dims.repeats.size > 1:
            message = torch.cat(counts)
            # The collective's name reveals a rank that is at another micro-batch.
            issued = dims.repeats.reductions.num_issued
            handle = dims.repeats.verify_same_collective(
                f"step {step} after {issued} reductions{restarts}", message
            )
            counts = list(message.split([*map(torch.numel, counts)]))
            if not complete or len(counts) > 2 or graphs.capturing():
                handle.wait()
        used, settings_sums, *batch_sums = counts
        if self._mesh.pp_stage_ranks > 1:
            self._settings.receive(settings_sums, handle)
        for sums in batch_sums:
            self.batches.end_step(sums)
        if not complete:
            self._read(self._flats, used)
        elif not has_all:
            _mark_idle(self._flats)
        return squares

    def missing(self) -> list[str]:
        """Return the names of parameters without a gradient on one rank or more. Equal on all ranks
        (collective).
        """
        words = self._used(self._flats)
        for dim in (self._mesh.sums.counted, self._mesh.sums.repeats):
            if dim.size > 1:
                dim.all_reduce(words, "parameters that have a gradient").wait()
        names = [
            slot.name
            for flat, counts in zip(self._flats, self.counts(self._flats, words))
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
        words = self._used(unit.trainable_flats)
        self._received.pop(unit, None)
        if unit in self._sent:
            self._sent.pop(unit)[1].wait()
        handle = dim.all_reduce(words, f"used parameters of {unit.label}", ordered=True)
        self._sent[unit] = words, handle

    def receive(self, unit: Unit, flats: Sequence[FlatBuffer]) -> None:
        """Set the unused parameters of ``flats``, flat buffers of ``unit`` that are reduced: what
        was set before that does not remain.
        """
        if unit in self._sent:
            words, handle = self._sent.pop(unit)
            handle.wait()
            dims, key = self._mesh.sums, f"used parameters of {unit.label}"
            if dims.counted.size > 1 and dims.repeats.size > 1:
                dims.repeats.all_reduce(words, key, ordered=True).wait()
            self._received[unit] = words
        if _complete(flats):
            _mark_idle(flats)
        else:
            self._read(unit.trainable_flats, self._received[unit])

    def has_all(self, unit: Unit) -> bool:
        """Return whether :meth:`receive` has found a gradient of each parameter of ``unit`` on each
        rank. Equal on all ranks.
        """
        counts = self.counts(unit.trainable_flats, self._received[unit])
        return min(map(min, counts)) == self._mesh.pp_stage_ranks

    def drop(self) -> None:
        """Wait for messages sent and not received, and drop them."""
        for unit in [*self._sent]:
            self._sent.pop(unit)[1].wait()
        self._received = {}

    def _read(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> None:
        ranks = self._mesh.pp_stage_ranks
        for flat, counts in zip(flats, self.counts(flats, total)):
            gradient = flat.gradient
            if gradient.unused and gradient.all_unused:
                continue  # these counts are stale: ranks that know this send full words
            lacking = sum(1 << index for index, count in enumerate(counts) if count == 0)
            few = sum(1 << index for index, count in enumerate(counts) if count < ranks)
            if refused := _names(flat, few & gradient.used & gradient.idle):
                raise PartitionError(
                    f"{sorted(refused)} got a gradient on some ranks only (from weight "
                    "regularization, for example), while all ranks have dropped their layer: the "
                    "others would not update them; add the penalty to the loss of every rank, or "
                    "of none"
                )
            gradient.set_unused(_names(flat, lacking))

    def counts(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> list[list[int]]:
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
        return upload(torch.tensor(words, dtype=torch.float64), device)

    def unpack(self, words: torch.Tensor) -> Iterator[int]:
        """Yield the counts; waits for the device."""
        for word in map(int, words.tolist()):
            yield from (word // power % self._base for power in self._powers)


class IdleParameters:
    """Parameters that all ranks leave out of every backward of a window, and know it: a bit for
    each member of a flat buffer.
    """

    def __init__(self) -> None:
        self._of_backward: Mapping[FlatBuffer, int] | None = None
        self._of_window: Mapping[FlatBuffer, int] | None = None

    def add_forward(self, idle: Mapping[FlatBuffer, int]) -> None:
        """Record that the backward under way reaches a forward without the parameters ``idle``."""
        self._of_backward = _both(self._of_backward, idle)

    def end_backward(self) -> None:
        """Record the backward: one that reaches no forward uses all parameters."""
        self._of_window = _both(self._of_window, self._of_backward or {})
        self._of_backward = None

    def set_on_flats(self) -> None:
        """Set the flat buffers' idle parameters, once the gradients of the window are reduced."""
        for flat, bits in (self._of_window or {}).items():
            flat.gradient.set_idle(bits)

    def clear(self) -> None:
        """Begin another window."""
        self._of_backward = self._of_window = None


def _both(
    one: Mapping[FlatBuffer, int] | None, other: Mapping[FlatBuffer, int]
) -> Mapping[FlatBuffer, int]:
    if one is None or one is other:
        return other
    return {flat: bits & other[flat] for flat, bits in one.items() if flat in other}


def _mark_idle(flats: Sequence[FlatBuffer]) -> None:
    """Mark the idle parameters of ``flats`` as unused."""
    for flat in flats:
        if flat.gradient.idle and not flat.gradient.all_unused:
            flat.gradient.set_unused(_names(flat, flat.gradient.idle))


def _names(flat: FlatBuffer, bits: int) -> frozenset[str]:
    """Return the names of the parameters of ``flat`` in ``bits``."""
    return frozenset(slot.name for at, slot in enumerate(flat.layout.slots) if bits >> at & 1)


def zero_left_out(units: Sequence[Unit]) -> None:
    """Set the gradient to zero, once the window is reduced, for flat buffers that all ranks have
    left out of every backward.
    """
    flats = [flat for unit in units for flat in unit.trainable_flats]
    empty = [flat for flat in flats if flat.gradient.state is GradState.EMPTY]
    if empty and any(flat.gradient.holds_gradient for flat in flats):
        for flat in empty:
            flat.gradient.leave_out()


def _complete(flats: Sequence[FlatBuffer]) -> bool:
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


def numbers_of(code: int, device: torch.device) -> torch.Tensor:
    """Return what a rank with ``code`` adds to a message: [2] fp64, on ``device``."""
    return upload(torch.tensor([code, code * code], dtype=torch.float64), device)


def are_equal(sums: torch.Tensor, ranks: int) -> bool:
    """Return whether the codes of ``ranks`` are equal, by the ``sums`` of their numbers: [2] fp64
    in host memory, contiguous. No operation of torch, which could wait for a device.
    """
    total, squares = map(int, (ctypes.c_double * 2).from_address(sums.data_ptr()))
    return total * total == ranks * squares


class SettingsCheck:
    """The comparison among the ranks of ``mesh`` of one pipeline stage."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._on_host = kinds.is_synchronous(device)
        self._device = device
        self._settings, self._numbers = "", numbers_of(0, device)
        # sums that no wait has completed
        self._unread: tuple[torch.Tensor, Handle] | None = None
        self._copy: torch.Tensor | None = None  # [2] in pinned memory
        self._copied: streams.Event | None = None

    def numbers(self, settings: str) -> torch.Tensor:
        """Return what this rank adds to the message of a step with ``settings``, in words: [2] fp64
        on the device. Before, compare the sums of earlier steps that have come: raises as
        :meth:`receive`.
        """
        if not self._on_host and graphs.capturing():
            return self._numbers
        if self._copied is not None and self._copied.query():
            assert self._copy is not None
            self._copied = None
            if not are_equal(self._copy, self._mesh.pp_stage_ranks):
                self._refuse()
        if self._unread is not None:
            (sums, handle), self._unread = self._unread, None
            handle.wait()
            self.receive(sums)
        if settings != self._settings:
            self._settings = settings
            self._numbers = numbers_of(zlib.crc32(settings.encode()) % CODES, self._device)
        return self._numbers

    def receive(self, sums: torch.Tensor, handle: Handle | None = None) -> None:
        """Take the ``sums`` [2] of the numbers over all ranks, which are complete once ``handle``
        has been waited for. Raises RankMismatchError, on all ranks, for different settings.
        """
        if sums.is_meta or (not self._on_host and graphs.capturing()):
            return
        if handle is not None:
            self._unread = sums, handle
        elif self._on_host:
            if not are_equal(sums, self._mesh.pp_stage_ranks):
                self._refuse()
        elif self._settings and self._copied is None:
            if self._copy is None:
                self._copy = pinned.empty(2, torch.float64)
            self._copy.copy_(sums, non_blocking=True)
            self._copied = streams.record_here(self._device)

    def _refuse(self) -> None:
        """Raise RankMismatchError with the settings of the ranks, which differ."""
        ranks, texts = [self._mesh.rank], [self._settings]
        if self._on_host:  # all ranks are here
            ranks = list(self._mesh.ranks)
            texts = self._mesh.all_gather_object(self._settings, "settings")
        firsts = dict(zip(reversed(texts), reversed(ranks)))  # the first rank with each text
        settings = "; ".join(
            f"rank {rank} has {text or 'changed nothing'}"
            for text, rank in sorted(firsts.items(), key=itemgetter(1))
        )
        raise RankMismatchError(
            f"ranks train with different settings, as changed since initialize: {settings}. Make "
            "such a change (an option of a parameter group, requires_grad, a hook) on every rank, "
            "or on none"
        )


class BatchCodes:
    """Codes of this rank's batches in the first steps. Ranks that share a batch by a tensor-,
    sequence- or context-parallel axis, or by a pipeline, are not compared.
    """

    def __init__(self, mesh: Mesh):
        self._ranks, self._rank, self._device = mesh.dims.world, mesh.rank, mesh.device
        data_parallel = mesh.dims.data == mesh.dims.world
        self._left = STEPS if data_parallel and self._ranks > 1 else 0  # messages with a code
        self.active = self._left > 0  # until the first steps have been compared
        self._batches_left = self._left  # to compute codes of
        self._code: int | None = None  # of the first batch of the step
        self._sums: list[torch.Tensor] = []  # of the messages that were sent
        self._copied: streams.Event | None = None  # recorded after their copy to the host

    @property
    def awaits_batch(self) -> bool:
        """Return whether :meth:`record` has something to do."""
        return (self._batches_left > 0 and self._code is None) or bool(self._sums)

    @property
    def allowance(self) -> int:
        """Numbers that the codes add to a message."""
        return 2 if self._left else 0

    def trust_loader(self) -> None:
        """Compare no further batches: a loader divides them, whose rows may be equal."""
        self._batches_left, self._code = 0, None

    def record(self, batch: object) -> None:
        """Compute the code of ``batch``, the arguments of a forward that trains: all values, of
        large tensors a regular sample; waits for the device. After the first steps compare them,
        once the device has their sums.
        """
        if torch._C._are_functorch_transforms_active():  # tensors without values
            return
        if not self._left:
            self._compare()
        if not self._batches_left or self._code is not None:
            return
        self._batches_left -= 1
        digest, has_tensors = 0, False
        for value in _values_of(batch):
            if isinstance(value, torch.Tensor):
                has_tensors = True
                flat = value.detach().flatten()
                flat = flat[:: max(1, flat.numel() // SAMPLES)].cpu().resolve_conj().contiguous()
                value = flat.view(torch.uint8).numpy().tobytes()
            else:
                value = repr(value).encode()
            digest = zlib.crc32(value, digest)
        # a batch without tensors says nothing of rows: the codes of ranks differ then
        self._code = digest % CODES if has_tensors else self._rank

    def numbers(self) -> list[torch.Tensor]:
        """Return [code and its square] for the message of a step; [] after the first steps."""
        if not self._left:
            return []
        return [numbers_of(self._rank if self._code is None else self._code, self._device)]

    def end_step(self, sums: torch.Tensor) -> None:
        """Keep ``sums``, over all ranks, of the :meth:`numbers` of a step, on the rank that warns:
        after the last one on its host, without waiting for the device.
        """
        self._left -= 1
        self._code = None
        if not (sums.is_meta or self._rank):  # of a simulation
            self._sums.append(sums)
        self.active = bool(self._left or self._sums)
        if not self._sums:
            return
        if not self._left and not kinds.is_synchronous(self._device):
            on_host = pinned.empty(STEPS * 2, torch.float64).view(STEPS, 2)
            on_host.copy_(torch.stack(self._sums), non_blocking=True)
            self._sums, self._copied = list(on_host.unbind()), streams.record_here(self._device)

    def _compare(self) -> None:
        """Warn if the batches of each of the first steps were equal on all ranks."""
        if not self._sums or (self._copied is not None and not self._copied.query()):
            return
        equal = all(are_equal(sums, self._ranks) for sums in self._sums)
        self._sums, self._copied, self.active = [], None, False
        if equal:
            logger.warning(
                "all %d ranks have trained on the same batches in the first %d steps, so that "
                "together they do the work of one; unless the rows themselves are equal, pass the "
                "data loader to accelerator.prepare() or the data set to "
                "hf_zero.initialize(training_data=...), or give the loader a "
                "torch.utils.data.DistributedSampler",
                self._ranks,
                STEPS,
            )


def _values_of(batch: object) -> Iterator[object]:
    """Yield the tensors with values in host or device memory, then the scalars, of ``batch``."""
    for tensor in tensors_in(batch):
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and not tensor.is_meta and tensor.numel():
            yield tensor
    yield from _scalars_in(batch)


def _scalars_in(value: object) -> Iterator[object]:
    if isinstance(value, SCALARS):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _scalars_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _scalars_in(item)
