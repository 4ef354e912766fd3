"""The largest eigenvalue of each layer's Hessian, by power iteration (Shen et al. 2020, Q-BERT).

[Note: products with the Hessian]
H v is the difference of two gradients, at w + εv and w - εv, divided by 2ε: no graph of a gradient
is kept, so parameters may be sharded and offloaded, and v is sharded like them. With ε =
sqrt(machine epsilon of the weights) (1 + |w|) and |v| = 1, neither rounding nor truncation is
visible in fp32. The loss is that of each rank's last micro-batch, averaged, in evaluation mode, so
that dropout is off and no buffer changes. Eigenvalues are only compared with each other: a constant
factor of the gradients cancels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.config.low_bits import EIGENVALUE, EigenvalueSection
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.techniques.blocks import layers_at
from hf_zero.techniques.schedules import BitSchedule, Precision
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_buffer import FlatBuffer, owner_of
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.sharded_model import MeshRanks

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

Vector = list[torch.Tensor]  # this rank's shard of the parameters of a layer, in fp64


def layers_of(model: nn.Module, section: EigenvalueSection) -> list[nn.Module]:
    """Return the layers that ``section`` selects; raises ConfigError if ``model`` has fewer."""
    layers = layers_at(model, section.layer_name, f"{EIGENVALUE}.layer_name")
    if len(layers) < section.layer_num:
        raise ConfigError(
            f"{EIGENVALUE}.layer_num = {section.layer_num} is more than the {len(layers)} layers "
            f"of {type(model).__name__}; write their number, or 0"
        )
    return layers[: section.layer_num or None]


def _scalar_loss(output: object) -> torch.Tensor:
    """Return the loss in a model's output: the output itself, its first item, or its key "loss".
    Raises ConfigError if there is none.
    """
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, torch.Tensor) or output.numel() != 1 or not output.requires_grad:
        raise ConfigError(
            f'{EIGENVALUE} needs a model that returns its loss (alone, first, or as "loss"), to '
            "compute it again; pass labels to the model, or switch eigenvalue off"
        )
    return output


def direction_of(name: str, numel: int) -> torch.Tensor:
    """Return the start vector of the power iteration for parameter ``name``: normally distributed,
    [numel], fp32, seeded by the name.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class HessianEigenvalues:
    """Measure the layers of ``engine``'s model between steps (collective)."""

    def __init__(
        self, engine: TrainingEngine, section: EigenvalueSection, layers: Sequence[nn.Module]
    ):
        self._engine = engine
        self._section = section
        # by layer, for each parameter: name, flat buffer, and the range of this rank's shard in it
        self._places: list[list[tuple[str, FlatBuffer, int, int]]] = [
            [
                (name_of(p), flat, start, stop)
                for p in layer.parameters()
                if p.requires_grad and (flat := owner_of(p)) is not None
                for _, start, stop in [flat.spec.own_range(name_of(p))]
            ]
            for layer in layers
        ]
        self._call: tuple[Any, Any] | None = None  # arguments of the last micro-batch
        self._watching = engine.module.register_forward_pre_hook(
            Attached(self._watch), with_kwargs=True
        )

    def _watch(self, module: nn.Module, args: object, kwargs: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._call = args, kwargs

    def remove(self) -> None:
        self._watching.remove()
        self._call = None

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Return the magnitude of each layer's eigenvalue divided by the largest of all, from 0 to
        1; 1 where the curvature is 0 or not finite.

        Raises:
            ConfigError: this rank has had no forward of the model in training mode; another rank
                raises RankMismatchError.
        """
        with raise_on_all_ranks("measure eigenvalues"):
            if self._call is None:
                raise ConfigError(
                    f"{EIGENVALUE} computes the last loss again, and the engine has had no "
                    "forward in training mode: call engine.train() and engine(...), not a part "
                    "of its model, or switch eigenvalue off"
                )
        with self._evaluating():
            eigenvalues = [self._of_layer(number) for number in range(len(self._places))]
        largest = max((abs(value) for value in eigenvalues), default=0.0)
        return [abs(value) / largest if value else 1.0 for value in eigenvalues]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = {module: module.training for module in self._engine.module.modules()}
        self._engine.module.eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training

    def _of_layer(self, number: int) -> float:
        section, places = self._section, self._places[number]
        flats = list(dict.fromkeys(flat for _, flat, _, _ in places))
        masters = [flat.optimizer_shard.master for flat in flats]
        saved = {flat: master.clone() for flat, master in zip(flats, masters) if master is not None}
        weights = [saved[flat][start:stop].double() for _, flat, start, stop in places]
        epsilon = min((torch.finfo(flat.dtype).eps for flat in flats), default=1.0)
        length = epsilon**0.5 * (1 + self._dot(weights, weights) ** 0.5)
        vector = self._normalized(self._start(number))
        value, before, iteration = 1.0, 0.0, 0
        try:
            while iteration < section.max_iter and abs(value - before) >= section.tol * abs(value):
                before = value
                ahead = self._gradient(number, saved, length, vector)
                behind = self._gradient(number, saved, -length, vector)
                product = [
                    torch.nan_to_num((a - b) / (2 * length), 0.0, 0.0, 0.0)
                    for a, b in zip(ahead, behind)
                ]
                value = self._dot(product, vector)
                if value == 0.0:
                    break
                vector = self._normalized(product)
                iteration += 1
        finally:
            self._put(saved)
        if section.verbose and self._engine.global_rank == 0:
            logger.info("layer %d: eigenvalue %g after %d iterations", number, value, iteration)
        return value

    def _start(self, number: int) -> Vector:
        """Return the start vector, independent of the number of ranks."""
        vector = []
        for name, flat, start, stop in self._places[number]:
            drawn = direction_of(name, flat.layout.by_name[name].numel)
            first, _, _ = flat.spec.own_range(name)
            vector.append(drawn[first : first + stop - start].double())
        return vector

    def _gradient(
        self, number: int, masters: Mapping[FlatBuffer, torch.Tensor], length: float, vector: Vector
    ) -> Vector:
        """Return this rank's shard of the averaged gradient at the weights ``masters`` + ``length``
        × ``vector``, up to a constant factor.
        """
        moved = {flat: values.clone() for flat, values in masters.items()}
        for (_, flat, start, stop), part in zip(self._places[number], vector):
            moved[flat][start:stop] += (length * part).to(moved[flat])
        self._put(moved)
        assert self._call is not None
        args, kwargs = self._call
        engine = self._engine
        with torch.enable_grad(), engine.no_sync():  # no update may start in the backward
            engine.backward(_scalar_loss(engine(*args, **kwargs)))
        engine.reduce_gradients()
        shards = [
            flat.gradient.shard[start:stop].double().cpu()
            if flat.gradient.has_reduced and flat.gradient.shard is not None
            else torch.zeros(stop - start, dtype=torch.float64)
            for _, flat, start, stop in self._places[number]
        ]
        engine.zero_grad()
        return shards

    def _put(self, values: Mapping[FlatBuffer, torch.Tensor]) -> None:
        with self._engine.schedule.shards.writing():
            for flat, master in values.items():
                flat.optimizer_shard.store_master(master)
        self._engine.refresh_params(list(values))

    def _dot(self, left: Vector, right: Vector) -> float:
        """Return the inner product over all ranks (collective)."""
        total = sum(
            ((a.cpu() * b.cpu()).sum() for a, b in zip(left, right)), torch.zeros(()).double()
        )
        return float(MeshRanks(self._engine.mesh).add_up(total.view(1)))

    def _normalized(self, vector: Vector) -> Vector:
        norm = self._dot(vector, vector) ** 0.5 + self._section.stability
        return [part / norm for part in vector]


class StretchedPeriods:
    """Bit schedules of layers, slower for larger eigenvalues: after a bit is dropped at step s, the
    next is dropped at step 2 (1 + floor(4 λ)) s, with λ from 0 to 1.
    """

    def __init__(self, section: EigenvalueSection, bits: BitSchedule):
        self._section, self._bits = section, bits
        self._engine: TrainingEngine  # set by install
        self._eigenvalues: HessianEigenvalues | None = None
        self._layer_of: dict[str, int] = {}  # by parameter
        self._precisions: list[Precision] = []  # by layer
        self._measured: list[float] = []
        self.measuring = False  # if True, modules compute with unrounded weights

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for layers that the model lacks, and for compressed gradients."""
        layers_of(plan.model, self._section)
        if plan.dims.sequence_context > 1 or plan.settings.ranks_of_a_sequence > 1:
            raise ConfigError(
                f"{EIGENVALUE} runs whole batches of its own, and under sequence_parallel_size or "
                "context_parallel_size each rank has only a part of each sequence; leave one of "
                "them out"
            )
        specs = [flat.spec for flat in plan.flats]
        if any(spec.reduce_codec is not None or spec.momentum_blocks for spec in specs):
            raise ConfigError(
                f"{EIGENVALUE} takes differences of gradients, which gradients in few bits are too "
                "coarse for; remove it, or what compresses them"
            )

    def install(self, engine: TrainingEngine) -> None:
        self._engine = engine
        layers = layers_of(engine.module, self._section)
        self._layer_of = {
            name_of(p): number for number, layer in enumerate(layers) for p in layer.parameters()
        }
        self._precisions = [self._bits.begin()] * len(layers)
        self._eigenvalues = HessianEigenvalues(engine, self._section, layers)

    def precision(self, name: str) -> Precision | None:
        """Return the precision of parameter ``name``; None for one outside the layers."""
        number = self._layer_of.get(name)
        return None if number is None else self._precisions[number]

    def end_step(self, step: int) -> None:
        """Drop the bits that are due at ``step``; if any is, measure the eigenvalues first, when
        this step is a multiple of ``gas_boundary_resolution`` or none were measured yet
        (collective).
        """
        due = any(
            precision.bits > self._bits.target and step >= precision.until
            for precision in self._precisions
        )
        if not due or self._eigenvalues is None:
            return
        looks = self._engine.global_steps % self._section.gas_boundary_resolution == 0
        if looks or not self._measured:
            self.measuring = True
            try:
                self._measured = self._eigenvalues.measure()
            finally:
                self.measuring = False
        self._precisions = [
            self._bits.after(bits, step, 1 + int(4 * value))
            for bits, value in zip(self._precisions, self._measured)
        ]

    def state_dict(self) -> dict[str, object]:
        """Return the precision of each layer, and the last measured eigenvalues."""
        return {
            "layers": [
                [precision.bits, precision.until, precision.since] for precision in self._precisions
            ],
            "eigenvalues": list(self._measured),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved state, or the initial one if ``state`` is from a run without
        eigenvalues or with another number of layers.
        """
        layers, measured = state.get("layers", ()), state.get("eigenvalues", ())
        if len(layers) != len(self._precisions):
            begin = self._bits.begin()
            layers, measured = [(begin.bits, begin.until, begin.since)] * len(self._precisions), ()
        self._precisions = [Precision(*layer) for layer in layers]
        self._measured = list(measured)

    def remove(self) -> None:
        if self._eigenvalues is not None:
            self._eigenvalues.remove()
