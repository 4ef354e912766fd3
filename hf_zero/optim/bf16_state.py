"""Training state in bf16 between steps: master weights, moments.

[Note: widened steps]
A step widens the bf16 state of its segments to fp32, runs the update of the optimizer on it, and
rounds the results stochastically. The random bits of an element come from the seed, the names of
its parameter and of the state, the number of steps before, and its index in the parameter. So
ranks, stages, buckets and tiers, which cut parameters anywhere, do not change them, and neither
does a resume. On the device, segments are widened in batches of at most :data:`WIDENED` elements,
and the fp32 values of one batch exist at a time.

[Note: Kahan sums]
With ``kahan``, master weights are rounded to nearest, and their rounding error is kept in bf16, too
(Kahan 1965): the sum of both has about 16 bits more than the weights alone. An error that is not
smaller than half a place of its weight belongs to a value that a script or a load has replaced, and
counts as zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, PartitionError, UnsupportedOptimizerError
from hf_zero.offload.storage import COMPENSATION, MASTER
from hf_zero.ops.stochastic_rounding import round_stochastically
from hf_zero.optim.adoption import adopted_class
from hf_zero.optim.elementwise import update_base
from hf_zero.optim.segment_entries import is_elementwise
from hf_zero.optim.segments import ParamState, Segment, StateArrays
from hf_zero.optim.whole_tensor import WholeTensorOptimizer

WIDENED = 1 << 24  # elements; a multiple of the blocks of 8-bit moments
_LOW64 = (1 << 64) - 1


@dataclass(frozen=True)
class Bf16State:
    """State in bf16: the master weights of parameters that compute in bf16 (``masters``), the
    optimizer's per-element states (``moments``); ``seed`` of the rounding. ``kahan``: the rounding
    errors of master weights are kept, as the state :data:`COMPENSATION`.
    """

    masters: bool
    moments: bool
    seed: int = 0
    kahan: bool = False

    @classmethod
    def of(cls, settings: ZeroConfig, optimizer: object) -> Bf16State | None:
        """Return the state to keep in bf16 by section ``bf16`` of ``settings`` or by torchao's
        ``bf16_stochastic_round``; None: no state is in bf16.
        """
        if settings.precision != "bf16":
            return None
        section = settings.bf16
        masters = section.bf16_master_weights_and_grads
        masters = masters or bool(getattr(optimizer, "bf16_stochastic_round", False))
        if not masters and not section.bf16_optimizer_states:
            return None
        moments, seed = section.bf16_optimizer_states, section.stochastic_rounding_seed
        return cls(masters, moments, seed, masters and section.kahan_summation)

    def widen(self, arrays: StateArrays) -> ParamState:
        """Return ``arrays``, master weights and states by name, with bf16 ones copied to fp32."""
        wide = {
            name: value.float() if self._is_narrow(name, value) else value
            for name, value in arrays.items()
        }
        error = arrays.get(COMPENSATION)
        if self.kahan and error is not None:
            exact = wide[MASTER] + error
            wide[MASTER] = torch.where(exact.bfloat16() == arrays[MASTER], exact, wide[MASTER])
        return wide

    def cast_initial(self, state: ParamState, like: Tensor) -> ParamState:
        """Return the initial ``state`` of a parameter of one element in the dtypes in which it is
        kept beside master weights like ``like``.
        """
        cast = {
            name: value.bfloat16() if self._narrows(name, value, (1,)) else value
            for name, value in state.items()
        }
        if self.kahan and like.dtype == torch.bfloat16:
            cast[COMPENSATION] = like.new_zeros(1)
        return cast

    def _narrows(self, name: str, value: Any, shape: Sequence[int]) -> bool:
        """Return whether state ``name`` of a segment of ``shape`` is kept in bf16."""
        elementwise = self.moments and is_elementwise(name, value, shape)
        return elementwise and value.dtype == torch.float32

    def _is_narrow(self, name: str, value: object) -> bool:
        chosen = self.masters if name == MASTER else self.moments and name != COMPENSATION
        return chosen and isinstance(value, Tensor) and value.dtype == torch.bfloat16

    def narrow(
        self, segment: Segment, arrays: StateArrays, wide: StateArrays, steps_before: int
    ) -> None:
        """Round the arrays of ``segment`` in ``wide`` into the bf16 ones of ``arrays``. The random
        bits differ with ``steps_before``.
        """
        for name, value in arrays.items():
            if name == MASTER and COMPENSATION in arrays:
                _split(wide[MASTER], value, arrays[COMPENSATION])
            elif self._is_narrow(name, value):
                self._round(segment, name, value, wide[name], steps_before)

    def _round(
        self, segment: Segment, name: str, out: Tensor, values: Tensor, steps_before: int
    ) -> None:
        """Round ``values`` of ``segment`` into ``out``; padding stays."""
        for part in segment.parts:
            for parameter, start, stop, at in part.pieces():
                own = slice(at, at + stop - start)
                slot, stages = part.flat.layout.by_name[parameter], part.flat.tied_pp_stages
                whole = parameter if slot.box is None else f"{parameter} {slot.box.to_json()}"
                if stages:  # each has a name of its own for it, and its copies must stay equal
                    whole = f"of stages {stages}, {slot.whole}"
                key = key_of(self.seed, whole, name, steps_before)
                round_stochastically(out[own], values[own], key, start)

    @property
    def most_widened(self) -> int:
        """The most elements that are in fp32 together."""
        return WIDENED

    def batches(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Return ``segments`` in batches to be widened together; at least one."""
        batches: list[list[Segment]] = [[]]
        numel = 0
        for segment in segments:
            if batches[-1] and numel + segment.tensor.numel() > WIDENED:
                batches.append([])
                numel = 0
            batches[-1].append(segment)
            numel += segment.tensor.numel()
        return batches

    @contextmanager
    def widened(
        self,
        segments: Sequence[Segment],
        states: MutableMapping[Tensor, ParamState],
        steps_before: int,
    ) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Context in which ``segments`` have their master weights, and ``states`` their states, in
        fp32. Afterwards these are in bf16 again, in the same memory, as are states created in it.

        Yields a function that runs hooks, which may write to the weights in bf16.
        """
        narrow: dict[Segment, ParamState] = {}
        for segment in segments:
            entries = states.get(segment.tensor, {})
            arrays = narrow[segment] = {MASTER: segment.tensor.data, **entries}
            entries.pop(COMPENSATION, None)  # before the first step there must be no state
            for name, value in self.widen(arrays).items():
                if name == MASTER:
                    segment.tensor.data = value
                elif name != COMPENSATION:
                    entries[name] = value
            if self.kahan and self._is_narrow(MASTER, arrays[MASTER]) and segment.parts:
                arrays.setdefault(COMPENSATION, torch.zeros_like(arrays[MASTER]))

        def run(hooks: Callable[[], None]) -> None:
            before = [arrays[MASTER].clone() for arrays in narrow.values()]
            hooks()
            current = {each for segment in narrow for each in segment.region.segments}
            if not narrow.keys() <= current:
                raise PartitionError(
                    "a hook before the step has loaded a state dict of the optimizer, whose state "
                    "in bf16 is stepped in fp32 meanwhile; load it before the backward, or in a "
                    "hook after the step (optimizer.register_step_post_hook)"
                )
            for (segment, arrays), weights in zip(narrow.items(), before):
                if not torch.equal(arrays[MASTER], weights):
                    segment.tensor.data.copy_(arrays[MASTER])

        try:
            yield run
            for segment, arrays in narrow.items():
                entries = states.get(segment.tensor, {})
                wide = {MASTER: segment.tensor.data, **entries}
                for name, value in entries.items():
                    if name not in arrays and self._narrows(name, value, segment.tensor.shape):
                        arrays[name] = torch.zeros_like(value, dtype=torch.bfloat16)
                self.narrow(segment, arrays, wide, steps_before)
        finally:
            for segment, arrays in narrow.items():
                segment.tensor.data = arrays[MASTER]
                for name, value in arrays.items():
                    if name == COMPENSATION or (name != MASTER and self._is_narrow(name, value)):
                        states[segment.tensor][name] = value


def _split(values: Tensor, weights: Tensor, errors: Tensor) -> None:
    """Write ``values`` (fp32) into ``weights`` (bf16, to nearest) and the rounding errors into
    ``errors`` (bf16), such that ``weights + errors`` rounds to ``weights``.
    """
    weights.copy_(values)
    exact = weights.float() + (values - weights.float()).bfloat16()
    weights.copy_(exact)
    errors.copy_((exact - weights.float()).nan_to_num(0.0))


def key_of(seed: int, parameter: str, state: str, steps_before: int) -> int:
    """Return the key of the random bits with which the step after ``steps_before`` steps rounds
    ``state`` of ``parameter``.
    """
    return (_hash(f"{seed} {parameter} {state}") + steps_before * 0xD1342543DE82EF95) & _LOW64


@cache
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def check_bf16(
    optimizer: torch.optim.Optimizer, settings: ZeroConfig, in_8_bits: bool, few_bits: bool
) -> None:
    """Raise if ``settings`` ask for state in bf16 that the update of ``optimizer`` cannot have.

    Args:
        in_8_bits: some of its moments are in 8 bits.
        few_bits: steps send momenta or changes in few bits.

    Raises:
        UnsupportedOptimizerError: it needs whole tensors, or keeps moments in 8 bits.
        ConfigError: its steps send few bits.
    """
    if Bf16State.of(settings, optimizer) is None:
        return
    kind, masters = type(optimizer), "bf16.bf16_master_weights_and_grads"
    states = "bf16.bf16_optimizer_states"
    if in_8_bits and settings.bf16.bf16_optimizer_states:
        raise UnsupportedOptimizerError(
            f"{kind.__name__} keeps moments in 8 bits, and {states} asks for bf16; remove that "
            f"key, which {masters} does not need, or use AdamW with it"
        )
    base = update_base(adopted_class(kind) or kind)
    if base is not None and issubclass(base, WholeTensorOptimizer):
        raise UnsupportedOptimizerError(
            f"{kind.__name__} needs whole tensors in fp32, which {masters} and {states} do not "
            "keep; remove these keys, or use an optimizer that updates each element independently "
            "(AdamW, Lion, SGD)"
        )
    if few_bits:
        raise ConfigError(
            f"{masters} and {states} do not go with steps that send changes in few bits "
            "(compressed_communication.bits, one-bit optimizers), which need fp32; remove one of "
            "them"
        )


def narrow_state(
    config: ZeroConfig, optimizer: torch.optim.Optimizer | None
) -> dict[str, Bf16State | None]:
    """Return what a plan reads of state in bf16."""
    return {"narrow": Bf16State.of(config, optimizer)}
