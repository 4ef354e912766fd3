"""Training with low-bit weights: MoQ (``quantize_training``; eigenvalues: Shen et al. 2020) and
``compression_training.weight_quantization``.

Values that modules compute with are rounded where a unit is whole
(:mod:`hf_zero.zero.layout.compute_copy`): in training, evaluation and recomputation alike. Master
weights, gradients, messages and checkpoints are those of training without it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.low_bits import (
    COMPRESSION,
    QUANTIZE,
    EigenvalueSection,
    QuantizeTraining,
    WeightQuantization,
)
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.ops.level_rounding import round_to_levels
from hf_zero.techniques.eigenvalue import StretchedPeriods
from hf_zero.techniques.schedules import BitSchedule, Precision
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.engine_plan import EnginePlan, FlatPlan
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.wrap import names_in_blocks

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


def noise_for(values: torch.Tensor, name: str, seed: int, step: int) -> torch.Tensor:
    """Return numbers in [0, 1) for the stochastic rounding of parameter ``name`` in ``step``: fp32,
    on the device of ``values``, equal on all ranks with the same kind of device.
    """
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator(values.device).manual_seed(int.from_bytes(digest, "big"))
    return torch.rand(values.shape, generator=generator, device=values.device)


class WeightsInBits(Feature):
    """Round the weights selected by ``bit_schedules_of``, from step ``offset`` on."""

    def __init__(
        self,
        section: QuantizeTraining | WeightQuantization,
        bit_schedules_of: Callable[[nn.Module], Mapping[str, BitSchedule]],
        nothing_found: str,
        seed: int,
        stretched: StretchedPeriods | None = None,
    ):
        """``bit_schedules_of(model)`` maps names of the parameters to round to their bit schedules;
        ``nothing_found`` is the error if none of them trains. ``stretched`` holds the precision of
        layers paced by their eigenvalues.
        """
        self._section = section
        self._bit_schedules_of, self._nothing_found = bit_schedules_of, nothing_found
        self._seed = seed
        self._stochastic = section.rounding == "stochastic"
        self._bit_schedules: dict[str, BitSchedule] = {}  # by parameter
        self._flats: list[FlatBuffer] = []
        self._began = False
        self._logged_bits: dict[str, set[int]] = {}
        self._stretched = stretched
        self._engine: TrainingEngine | None = None

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError if no weight of ``plan`` is to be rounded, or one cannot be."""
        if plan.shard_only:  # an engine that only holds parameters
            return
        bit_schedules_of, has_schedules = self._bit_schedules_of(plan.model), False
        for flat in plan.trainable:
            bit_schedules = _rounded(flat, bit_schedules_of)
            self._check_groups(flat.spec, bit_schedules)
            has_schedules |= bool(bit_schedules)
        if not has_schedules:
            raise ConfigError(self._nothing_found)
        if self._stretched is not None:
            self._stretched.check(plan)

    def apply(self, engine: TrainingEngine) -> None:
        if engine.shard_only:
            return
        self._engine = engine
        bit_schedules_of = self._bit_schedules_of(engine.module)
        for unit in engine.units:
            for flat in unit.trainable_flats:
                if bit_schedules := _rounded(flat, bit_schedules_of):
                    self._bit_schedules.update(bit_schedules)
                    self._flats.append(flat)
        if self._stretched is not None:
            self._stretched.install(engine)
        self._begin()

    def _check_groups(self, spec: FlatSpec, bit_schedules: Mapping[str, BitSchedule]) -> None:
        for name, schedule in bit_schedules.items():
            slot = spec.layout.by_name[name]
            if slot.box is not None:
                axes = " and ".join(spec.sharding.axes)
                raise ConfigError(
                    f"{schedule.name}: the scales of rounded weights are those of whole tensors, "
                    f"and {name} is cut over ranks by {axes} parallelism, where they would depend "
                    "on the number of ranks; leave one of the two out"
                )
            numel = slot.numel
            if numel % self._section.groups:
                raise ConfigError(
                    f"{schedule.name}: quantize_groups = {self._section.groups} does not divide "
                    f"the {numel} elements of {name}; write a divisor of the elements of each "
                    "weight"
                )

    @property
    def step(self) -> int:
        """The number of updates since rounding started; negative before."""
        engine = self._engine
        assert engine is not None
        return engine.global_steps - engine.skipped_steps - self._section.offset

    def bits(self) -> dict[str, int]:
        """Return the current bits of each weight, by parameter; empty before the offset."""
        if self.step < 0:
            return {}
        return {name: self.precision(name).bits for name in self._bit_schedules}

    def precision(self, name: str) -> Precision:
        """Return the current precision of parameter ``name``."""
        stretched = self._stretched.precision(name) if self._stretched is not None else None
        schedule = self._bit_schedules[name]
        return stretched or schedule.at(self.step)

    def _begin(self) -> None:
        """Switch rounding on at the offset, off before it: a load may restore an earlier step."""
        if self._engine is None or self._began == (self.step >= 0):
            return
        self._began = not self._began
        self._engine.schedule.changed_values.change(
            self._flats,
            self._round if self._began else None,
            "weights in fewer bits (quantize_training, compression_training)",
        )

    def _round(self, values: Mapping[str, torch.Tensor]) -> None:
        if self._stretched is not None and self._stretched.measuring:
            return
        section, step = self._section, self.step
        for name, value in values.items():
            if name in self._bit_schedules:
                precision = self.precision(name)
                noise = noise_for(value, name, self._seed, step) if self._stochastic else None
                since = step - precision.since  # the last dropped bit
                share = max(0.0, 1.0 - section.change_ratio * since) if section.mixed else 0.0
                symmetric = section.type == "symmetric"
                round_to_levels(value, precision.bits, section.groups, symmetric, noise, share)

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        if self._engine is None:
            return
        self._begin()
        if self._began and self._stretched is not None:
            self._stretched.end_step(self.step)
        if self._began and self._section.verbose and self._engine.global_rank == 0:
            self._log_bits()

    def _log_bits(self) -> None:
        bits: dict[str, set[int]] = {}
        for name, now in self.bits().items():
            bits.setdefault(self._bit_schedules[name].name, set()).add(now)
        if bits != self._logged_bits:
            self._logged_bits = bits
            for where, several in bits.items():
                numbers = " and ".join(map(str, sorted(several, reverse=True)))
                logger.info("%s: weights in %s bits", where, numbers)

    def state_dict(self) -> dict[str, object]:
        return self._stretched.state_dict() if self._stretched is not None else {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self._stretched is not None:
            self._stretched.load_state_dict(state)
        self._begin()

    def remove(self) -> None:
        if self._began and self._engine is not None:
            self._engine.schedule.changed_values.change(self._flats, None)
        if self._stretched is not None:
            self._stretched.remove()
        self._bit_schedules, self._flats, self._began = {}, [], False


def _rounded(
    flat: FlatPlan | FlatBuffer, wanted: Mapping[str, BitSchedule]
) -> dict[str, BitSchedule]:
    """Return the schedules in ``wanted`` of the matrices of ``flat``."""
    return {
        name: wanted[name]
        for name, parameter in flat.parameters.items()
        if name in wanted and parameter.dim() > 1 and parameter.is_floating_point()
    }


def from_quantize_training(config: ZeroConfig) -> WeightsInBits:
    """Return MoQ for the weights of blocks as ``config`` has it."""
    section = config.section_of(QuantizeTraining)
    schedule = BitSchedule(QUANTIZE, section.start_bits, section.target_bits, section.period)
    _check(schedule)
    stretched = None
    if config.section_of(EigenvalueSection).enabled:
        stretched = StretchedPeriods(config.section_of(EigenvalueSection), schedule)
    nothing = (
        f"{QUANTIZE} quantizes the weights of blocks, and this model has no block with a weight "
        "that trains; write compression_training.weight_quantization, which names modules"
    )
    return WeightsInBits(
        section,
        lambda model: dict.fromkeys(names_in_blocks(model), schedule),
        nothing,
        int(config.seed or 0),
        stretched,
    )


def from_weight_quantization(config: ZeroConfig) -> WeightsInBits:
    """Return the quantization of groups of weights as ``config`` has it. Raises ConfigError if it
    has no group.
    """
    section = config.section_of(WeightQuantization)
    path = f"{COMPRESSION}.weight_quantization.different_groups"
    if not section.different_groups:
        raise ConfigError(
            f'{path} is empty; write for each group {{"params": {{"start_bits": 16, '
            '"target_bits": 8, "quantization_period": 50}, "modules": ["*"]}'
        )
    groups = [
        _group(f"{path}.{name}", group, section.in_forward)
        for name, group in section.different_groups.items()
    ]
    nothing = f"no weight that trains is in a module that {path} names; look at their patterns"
    return WeightsInBits(section, partial(_first, groups), nothing, int(config.seed or 0))


def _first(
    groups: Sequence[tuple[BitSchedule, Sequence[re.Pattern[str]]]], model: nn.Module
) -> dict[str, BitSchedule]:
    """Map each parameter to the first of ``groups`` with a pattern for its module; a tied parameter
    has several modules.
    """
    names = {parameter: [name] for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {
        every[0]: next(schedule for schedule, patterns in groups if _any_named(every, patterns))
        for every in names.values()
        if any(_any_named(every, patterns) for _, patterns in groups)
    }


def _any_named(parameters: Sequence[str], patterns: Sequence[re.Pattern[str]]) -> bool:
    return any(_named(name, patterns) for name in parameters)


def _named(parameter: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    module = parameter.rpartition(".")[0]
    return any(pattern.search(module) for pattern in patterns)


def _group(path: str, group: Any, in_forward: bool) -> tuple[BitSchedule, list[re.Pattern[str]]]:
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, dict) or not {"start_bits", "target_bits"} <= set(params):
        raise ConfigError(f"{path}.params lacks start_bits or target_bits; write both")
    unknown = {*group} - {"params", "modules", "related_modules"} | {*params} - {
        "start_bits",
        "target_bits",
        "quantization_period",
    }
    if unknown or group.get("related_modules"):
        name = min(unknown, default="related_modules")
        raise ConfigError(
            f"{path}: {name} is not a key of weight quantization; remove it (params: start_bits, "
            "target_bits, quantization_period; modules)"
        )
    start, target = params["start_bits"], params["target_bits"]
    schedule = BitSchedule(
        path, target if in_forward else start, target, params.get("quantization_period", 1)
    )
    _check(schedule)
    patterns = group.get("modules", ["*"])
    try:
        return schedule, [
            re.compile("" if pattern == "*" else pattern)
            for pattern in ([patterns] if isinstance(patterns, str) else patterns)
        ]
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{path}.modules = {patterns!r} are no patterns of names of modules ({error}); write "
            'a list of regular expressions, or ["*"]'
        ) from None


def _check(schedule: BitSchedule) -> None:
    numbers = (schedule.start, schedule.target, schedule.period)
    if not all(isinstance(number, int) and number > 0 for number in numbers) or schedule.start > 16:
        raise ConfigError(
            f"{schedule.name}: start_bits {schedule.start!r}, target_bits {schedule.target!r} and "
            f"period {schedule.period!r} must be integers, bits of 2 to 16"
        )
    if schedule.target > schedule.start:
        raise ConfigError(
            f"{schedule.name}: target_bits = {schedule.target} is more than start_bits = "
            f"{schedule.start}, but bits fall; exchange them"
        )
    if schedule.target < 2:
        raise ConfigError(
            f"{schedule.name}: target_bits = 1 leaves a sign, which is binarization and not built; "
            "write 2 or more"
        )
