"""The numbers that ranks agree on before a step, in one message: the gradient norm, summed in fp64,
and the parameters that have a gradient on any rank.

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

A code of what a script has set on this rank is in the same message (rank_codes.py).

The message counts ranks: an fp64 number holds the counts of as many parameters as fit exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from operator import attrgetter, mul

import torch

from hf_zero.device import graphs
from hf_zero.device.pinned import upload
from hf_zero.distributed.collective_log import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.errors import PartitionError
from hf_zero.ops import dispatch, native
from hf_zero.ops.flat_tiles import RUNS, squared_norms
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.training_state import GradientBuffer, GradState
from hf_zero.zero.reduce.rank_codes import BatchCodes, SettingsCheck

RUN = 1 << 14  # elements summed in fp32 before fp64 takes over


def squared_norm(
    gradients: Sequence[GradientBuffer],
    device: torch.device,
    kernels: str | tuple[str, ...] = "off",
) -> torch.Tensor:
    """Return the sum of squares of this rank's part of ``gradients`` (0-dim, float64); not finite
    on overflow.

    ``kernels`` is the configuration's: whether one kernel may read all gradients of a device.
    """
    gradients = [gradient for gradient in gradients if gradient.shard is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # One by one: the sum has the same bits wherever some of them are.
    sums: dict[GradientBuffer, torch.Tensor] = {}
    unknown, shards = list[GradientBuffer](), list[torch.Tensor]()
    for gradient in gradients:
        if gradient.grad_sq_norm is not None:
            sums[gradient] = gradient.grad_sq_norm
        elif gradient.shard is not None:
            unknown.append(gradient)
            shards.append(gradient.shard)
    sums.update(zip(unknown, sums_of_squares(shards, kernels)))
    # those in host memory are uploaded together, without a wait on the host
    elsewhere = list[GradientBuffer]()
    for gradient in unknown:
        if sums[gradient].device != device:
            elsewhere.append(gradient)
    if elsewhere:
        crossed = upload(torch.stack([sums[gradient] for gradient in elsewhere]), device)
        sums.update(zip(elsewhere, crossed.unbind()))
    return torch.stack(list(map(sums.__getitem__, gradients))).sum()


def sums_of_squares(
    grads: Sequence[torch.Tensor], kernels: str | tuple[str, ...] = "off"
) -> list[torch.Tensor]:
    """Return the sum of squares of each of ``grads`` (0-dim, float64, on its device); not finite if
    an element is not.
    """
    sums: dict[int, torch.Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    by_kernel: dict[torch.device, bool] = {}
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        device = grad.device
        if device not in by_kernel:
            by_kernel[device] = (
                kernels != "off"
                and dispatch.wanted("optimizer", kernels, device)
                and RUNS.name not in dispatch.broken()
            )
        if by_kernel[device] and grad.dtype != torch.float64:
            by_device.setdefault(device, []).append(index)
        elif device.type == "cpu" and grad.dtype != torch.float64:
            sums[index] = torch.tensor(native.squared_norm(grad), dtype=torch.float64)
        else:
            by_kind.setdefault((device, grad.dtype), []).append(index)
    for indices in by_device.values():
        sums.update(zip(indices, squared_norms([grads[index] for index in indices]).unbind()))
    for indices in by_kind.values():
        sums.update(zip(indices, _sums_over_runs([grads[index] for index in indices])))
    return list(map(sums.__getitem__, range(len(grads))))


def _sums_over_runs(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of squares of ``grads``, of one device and dtype."""
    # A single long fp32 sum is wrong in the third digit, many short ones are not.
    counts = [-(-grad.numel() // RUN) for grad in grads]
    # each begins at 32 bytes, so that it is summed in the same order beside any others
    starts = [0, *itertools.accumulate(-(-count // 4) * 4 for count in counts)]
    kind = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    norms = grads[0].new_empty(starts[-1], dtype=kind)
    for grad, start in zip(grads, starts):
        even = grad.numel() // RUN
        for piece, at in ((grad[: even * RUN], start), (grad[even * RUN :], start + even)):
            if piece.numel():
                rows = piece.view(-1, min(RUN, piece.numel()))
                out = norms[at : at + len(rows)]
                torch.linalg.vector_norm(rows, dim=1, dtype=kind, out=out)
    squares = norms.double().square()
    return [squares[start : start + count].sum() for start, count in zip(starts, counts)]


# ---- parameters that have a gradient ----

_idle = attrgetter("gradient.idle")
EXACT = 1 << 53  # integers up to here are exact in fp64


class UsedParameters:
    """Agrees across ranks which parameters got a gradient. ``flats``: the trainable ones,
    in the order of the message.
    """

    def __init__(self, flats: Sequence[FlatBuffer], mesh: Mesh, device: torch.device):
        self._flats = list(flats)
        self._mesh = mesh
        self._device = device
        self._base = mesh.pp_stage_ranks + 1
        self._powers = [1]
        while self._powers[-1] * self._base**2 <= EXACT:
            self._powers.append(self._powers[-1] * self._base)
        # the message of a rank that has used all parameters
        self._all = self._message(self._flats, [flat.gradient.all_used for flat in self._flats])
        self.restarts = 0  # of accumulation windows on this rank, the same on all
        self._settings = SettingsCheck(mesh, device)
        self._codes = self._settings.upload()
        self.batches = BatchCodes(mesh)
        self._units: dict[Unit, tuple[torch.Tensor, Handle]] = {}
        self._received: dict[Unit, torch.Tensor] = {}
        for dim in mesh.sums[:2]:  # stages of a pipeline differ in the words of their parameters
            numbers = 2 + self._codes.numel() + self.batches.allowance
            dim.allow_small_sums(self._all.numel() + numbers)

    def _message(self, flats: Sequence[FlatBuffer], used: Sequence[int]) -> torch.Tensor:
        """Return [words] fp64: a digit for each parameter, 1 if its bit in ``used`` is set."""
        digits = [
            bits >> index & 1
            for flat, bits in zip(flats, used)
            for index in range(len(flat.members))
        ]
        length = len(self._powers)
        words = [
            sum(map(mul, digits[at : at + length], self._powers))
            for at in range(0, len(digits), length)
        ]
        return upload(torch.tensor(words, dtype=torch.float64), self._device)

    def agree(self, numbers: torch.Tensor, step: int, settings: str = "") -> torch.Tensor:
        """Return the sum of ``numbers`` (a few, fp64) over the shards, and set the unused
        parameters of the flat buffers (collective). Replicas then hold equal sums. ``settings``:
        what a script has set, in words.

        Raises PartitionError if some ranks only have a gradient of a parameter that all have left
        out, and RankMismatchError if the ranks have different settings.
        """
        self._settings.look()
        if self._settings.change(settings):
            self._codes = self._settings.upload()
        sums, repeats, stages = self._mesh.sums
        # The collectives' names reveal a rank that has restarted a window alone.
        restarts = f" after {self.restarts} restarted windows" if self.restarts else ""
        stages.all_reduce(numbers, "gradient norm of stages").wait()
        complete = _complete(self._flats)
        words = (
            self._all
            if complete and not any(map(_idle, self._flats))
            else self._message(self._flats, [flat.gradient.used for flat in self._flats])
        )
        batches = self.batches if self.batches.active and not graphs.capturing() else None
        batch = None if batches is None else batches.numbers()
        codes = self._codes if batch is None else torch.cat([batch, self._codes])
        if sums.size > 1:
            both = torch.cat([numbers, words, codes])
            sums.all_reduce(both, f"gradient norm{restarts}").wait()
            numbers, words = both[: numbers.numel()], both[numbers.numel() :]
        if repeats.size > 1:
            words = words.clone() if sums.size > 1 else torch.cat([words, codes])
            # The collective's name reveals a rank that is at another micro-batch.
            handle = repeats.verify_same_collective(
                f"step {step} after {repeats.reductions.num_issued} reductions{restarts}", words
            )
            self._settings.receive(words[-2:], handle)
            if not complete or batch is not None or graphs.capturing():
                handle.wait()
        elif sums.size > 1:
            self._settings.receive(words[-2:])
        if batch is not None:
            self.batches.end_step(words[-4:-2])
        if complete:
            _mark_idle(self._flats)
        else:
            self._read(self._flats, words)
        return numbers

    def missing(self) -> list[str]:
        """Return the names of parameters without a gradient on one rank or more. Equal on all ranks
        (collective).
        """
        words = self._message(self._flats, [flat.gradient.used for flat in self._flats])
        for dim in self._mesh.sums[:2]:
            if dim.size > 1:
                dim.all_reduce(words, "parameters that have a gradient").wait()
        return [
            slot.name
            for flat, counts in zip(self._flats, self.counts(self._flats, words))
            for slot, count in zip(flat.layout.slots, counts)
            if count < self._mesh.pp_stage_ranks
        ]

    def send(self, unit: Unit) -> None:
        """Begin :meth:`agree` for one unit, whose last gradients of the window are on the wire;
        :meth:`receive` completes it (collective).
        """
        shards, repeats, _ = self._mesh.sums
        dim = shards if shards.size > 1 else repeats
        words = self._message(
            unit.trainable_flats, [flat.gradient.used for flat in unit.trainable_flats]
        )
        self._received.pop(unit, None)
        if unit in self._units:
            self._units.pop(unit)[1].wait()
        self._units[unit] = (
            words,
            dim.all_reduce(words, f"used parameters of {unit.label}", ordered=True),
        )

    def receive(self, unit: Unit, flats: Sequence[FlatBuffer]) -> None:
        """Set the unused parameters of ``flats``, flat buffers of ``unit`` that are reduced: what
        was set before that does not remain.
        """
        if unit in self._units:
            words, handle = self._units.pop(unit)
            handle.wait()
            shards, repeats, _ = self._mesh.sums
            if shards.size > 1 and repeats.size > 1:
                repeats.all_reduce(words, f"used parameters of {unit.label}", ordered=True).wait()
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
        for unit in [*self._units]:
            self._units.pop(unit)[1].wait()
        self._received = {}

    def _read(self, flats: Sequence[FlatBuffer], total: torch.Tensor) -> None:
        for flat, counts in zip(flats, self.counts(flats, total)):
            gradient = flat.gradient
            if gradient.unused and gradient.all_unused:
                continue  # these counts are stale: ranks that know this send full words
            lacking = sum(1 << index for index, count in enumerate(counts) if count == 0)
            few = sum(
                1 << index
                for index, count in enumerate(counts)
                if count < self._mesh.pp_stage_ranks
            )
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

    def add_forward(self, idle: Mapping[FlatBuffer, int]) -> None:
        """Record that the backward under way reaches a forward without the parameters ``idle``."""
        self._of_backward = _both(self._of_backward, idle)

    def end_backward(self) -> None:
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
            flat.optimizer_shard.wait_for_update()
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
