"""The interface of features, and the features of one engine.

A feature is a class outside of the core: a training technique, quantized layers, recomputation.
Its row in ``hf_zero/config/features.toml`` has its keys, its place in the order, and what it does
not go with; its class does the rest. The core calls the methods of :class:`Feature`, and knows no
feature by name. ``bind`` and ``apply`` may also set these extension points of the engine:

- ``OptimizerStep.offload_to``: the update of
  state that is not on the device, in ``bind``
- ``OptimizerStep.scale_rates``, ``engine.set_batches``: phases of a training
- ``engine.schedule.changed_values``: values of units other than the shards
- ``module_hooks.left_out.sources``: blocks that a forward skips
- ``pass_runner.step_runner``: what runs a step
- ``engine.measures``
- ``engine_class``: a subclass of the engine
- modules: forward hooks, ``__class__`` of blocks

The core has a default for each; :meth:`Feature.remove` takes a feature's own away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.features import check_combination, switched_on
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.sharding import Sharding
from hf_zero.zero.step.step_interfaces import StepHooks

if TYPE_CHECKING:
    from hf_zero.zero.step.optimizer_step import OptimizerStep
    from hf_zero.zero.training_engine import TrainingEngine

E = TypeVar("E", bound="TrainingEngine")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EngineInputs:
    """The arguments of one call of ``initialize``, resolved, before the plan of its engine.
    ``data`` is the training data, ``mpu`` the script's statement of its axes; they and
    ``optimizer`` may be None.
    """

    model: nn.Module
    settings: ZeroConfig
    dims: ParallelDims
    optimizer: torch.optim.Optimizer | None
    data: object
    mpu: object = None


class Feature:
    """One feature of one engine. A method does nothing unless a feature overrides it.

    ``initialize`` calls those up to ``apply`` in this order. ``check`` is called twice: of the plan
    that a call of ``initialize`` makes, and, before ``bind``, of the plan of which an engine is
    built; ``check``, ``bind`` and ``apply`` again for an engine that is built anew.
    """

    name = ""  # of its row

    # Called before it is known which features are on, on classes that a row names as ``early``:

    @classmethod
    def check_request(cls, settings: ZeroConfig, trains: bool) -> None:
        """Raise ConfigError for ``settings`` that this process does not fit, before ranks meet.
        ``trains``: with an optimizer.
        """

    @classmethod
    def join(cls, model: nn.Module) -> None:
        """Set up the groups of ranks that ``model`` needs beside the job's (collective)."""

    @classmethod
    def begin(cls, model: nn.Module, settings: ZeroConfig) -> None:
        """Raise ConfigError for a model that ``settings`` do not fit, before its optimizer."""

    @classmethod
    def resolve(
        cls, model: nn.Module, settings: ZeroConfig, dims: ParallelDims, mpu: object
    ) -> tuple[ZeroConfig, ParallelDims]:
        """Return ``settings`` and ``dims`` with the sizes that they, ``model`` and ``mpu``, the
        script's statement of its axes, ask for. Raises ConfigError for sizes that contradict each
        other.
        """
        return settings, dims

    @classmethod
    def adapt(cls, settings: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> ZeroConfig:
        """Return ``settings`` with the values that ``optimizer`` requires."""
        return settings

    @classmethod
    def is_called(
        cls, model: nn.Module, settings: ZeroConfig, optimizer: torch.optim.Optimizer | None
    ) -> bool:
        """Return whether ``model`` or ``optimizer`` switch the feature on, without a key."""
        return False

    # Called before there is an engine:

    def check_inputs(self, inputs: EngineInputs) -> None:
        """Raise ConfigError for a model, an optimizer or data that the feature does not support.
        Change nothing but marks of parameters, which :meth:`mark` sets.
        """

    def mark(self, model: nn.Module) -> None:
        """Set the properties of parameters that a plan of ``model`` reads, such as their codecs."""

    def cuts(
        self, model: nn.Module, dims: ParallelDims, rank: int
    ) -> Mapping[nn.Parameter, Sharding]:
        """Return the sharding on ``rank`` of each parameter that :meth:`cut` is going to cut."""
        return {}

    @classmethod
    def engine_class(cls, model: nn.Module, base: type[E]) -> type[E]:
        """Return the class of the engine of ``model``, ``base`` or a subclass of it. Called on
        the classes that rows name as ``early``, whatever features are on.
        """
        return base

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for what the engine of ``plan`` does not support. It may store what it
        reads of ``plan`` for :meth:`apply`; it changes nothing else.
        """

    def admit(self, plan: EnginePlan, freed: tuple[int, int]) -> bool:
        """Raise, on all ranks alike, for a checked plan whose engine has no room. Return whether
        the values that the model has now have room beside it, on all ranks. ``freed``: bytes on the
        device and in RAM that engines give back which end before this one begins. Collective.
        """
        return True

    def cut(self, model: nn.Module, verify: bool) -> None:
        """Cut parameters of ``model`` along axes besides ZeRO (collective). ``verify``: the model
        has its values, so that a cut may be compared with the whole.
        """

    def prepare(self, model: nn.Module) -> None:
        """Replace modules of ``model``, or their forwards, before its units are formed."""

    def follow_loader(self, loader: object) -> object:
        """Return ``loader``, of the training data, or one that follows the training."""
        return loader

    def further(self, model: nn.Module) -> Mapping[str, Feature]:
        """Return features for ``model`` that are applied after all others, by name."""
        return {}

    # Called on the engine:

    def bind(self, step: OptimizerStep) -> None:
        """Prepare the feature's part of the steps that ``step`` makes, of an engine under way."""

    def apply(self, engine: TrainingEngine) -> None:
        """Install the feature on ``engine``, after the engine's own hooks. What depends on the step
        reads ``engine.global_steps``, which a load restores.
        """

    # Called in a step; ``StepHooks`` has those that a feature overrides. All but the first two may
    # be collective; ``engine.gradient_norm()`` may call before_reduction and squares in between:

    def prepare_batch(self, batch: object) -> object:
        """Return ``batch`` as the model's forward would change it. Called by
        ``engine.prepare_batch`` alone, for scripts that read a batch before its forward.
        """
        return batch

    def abort_forward(self) -> None:
        """End a forward that KeyboardInterrupt or SystemExit has left, which bypass forward hooks.
        Idempotent.
        """

    def begin_backward(self) -> None:
        """Prepare a backward, before it takes gradients in."""

    def before_reduction(self, scale: float) -> None:
        """Prepare the reduction at the end of an accumulation window; a local gradient
        (:meth:`GradientBuffer.keep_local`) times ``scale`` is this rank's term of the mean.
        """

    def begin_step(self, must_agree: bool) -> bool:
        """Begin a step, whose gradients are reduced. Return True if the ranks need not agree in it
        (a local step); with ``must_agree`` return False.
        """
        return False

    def squares(self, local: bool) -> torch.Tensor | None:
        """Return what the gradients that stay on their rank add to this rank's part of the squared
        gradient norm: fp64, 0-dim. ``local``: all of it, estimated from this rank's gradients.
        """
        return None

    def before_update(self) -> None:
        """Prepare the optimizer's update; flat buffers that :meth:`update` changes may be excluded
        from it.
        """

    def update(self, divisor: torch.Tensor | None) -> Sequence[FlatBuffer]:
        """Update flat buffers after the optimizer, from gradients to be divided by ``divisor``.
        Return those whose whole parameters are up to date on all ranks.
        """
        return ()

    def weights_differ(self) -> bool:
        """Return whether ranks compute with weights of their own, until :meth:`synchronize` or a
        later step makes them equal, with a script's writes to masters. Equal on all ranks.
        """
        return False

    def end_step(self, number: int, overflow: bool, scale: float) -> None:
        """Act after ``engine.step`` has ended accumulation window ``number``, counted from 1, and
        updated the counters. ``overflow``: it was skipped; ``scale``: the loss scale of the next.
        """

    # Called between steps: collected in the same way, and collective, but for state_bytes:

    def synchronize(self) -> None:
        """Make the weights of all ranks equal, before whole weights are read."""

    def complete_state(self) -> None:
        """Complete the optimizer's state on the ranks that own it, before it is saved."""

    @contextmanager
    def counted_state(self) -> Iterator[bool]:
        """Context in which the counters and tensors of the optimizer's state belong to one step.
        Yields whether they change again at its exit.
        """
        yield False

    def forget(self, scale: float) -> None:
        """Reset residuals and other state of the former weights: all weights were replaced.
        ``scale``: the loss scale.
        """

    def state_bytes(self) -> Mapping[str, int]:
        """Return the bytes that this rank keeps on the device, by kind: gradients, optimizer."""
        return {}

    # Called by scripts and checkpoints:

    def compile(self, backend: str, **options: object) -> None:
        """Compile what the feature compiles, because a script has called ``engine.compile``."""

    def state_dict(self) -> dict[str, object]:
        """Return the state for checkpoints besides the counters: JSON, equal on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the result of :meth:`state_dict`; the counters are restored already."""

    def remove(self) -> None:
        """Remove everything that is installed. Idempotent."""


class FeatureSet:
    """The features of one engine by name, in the order in which they are applied."""

    def __init__(self, by_name: Mapping[str, Feature] | None = None):
        self.by_name: dict[str, Feature] = dict(by_name or {})
        for name, feature in self.by_name.items():
            feature.name = name
        self.hooks = StepHooks(
            **{each.name: tuple(self._overriding(each.name)) for each in fields(StepHooks)}
        )

    def _overriding(self, name: str) -> Iterator[Callable[..., Any]]:
        """Yield the method ``name`` of each feature that overrides it."""
        plain = getattr(Feature, name)
        for feature in self:
            if getattr(type(feature), name) is not plain:
                yield getattr(feature, name)

    @classmethod
    def of(
        cls,
        settings: ZeroConfig,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        group: str = "",
    ) -> FeatureSet:
        """Return the features that ``settings`` switch on, and those without a key that ``model``
        and ``optimizer`` call for; with ``group`` those of rows of that ``kind`` alone. Raises
        ConfigError for features of ``model`` that do not go together, before one is made, and for
        settings of one that contradict each other.
        """
        written = settings.written
        on = switched_on(written)
        if model is not None:
            classes = early().items()
            on += [each for each, of in classes if of.is_called(model, settings, optimizer)]
        if optimizer is None:
            on = [name for name in on if not FEATURES[name].trains]
        if model is not None:
            check_combination(on, written)
        made: dict[str, Feature | None] = {
            name: row.load(row.make)(settings)
            for name, row in FEATURES.items()
            if row.make and group in ("", row.kind) and (row.always or name in on)
        }
        return cls({name: feature for name, feature in made.items() if feature is not None})

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def get(self, name: str, of: type[T]) -> T | None:
        """Return the feature ``name``, of the class ``of``; None if it is off."""
        feature = self.by_name.get(name)
        return feature if isinstance(feature, of) else None

    def with_further(self, model: nn.Module) -> FeatureSet:
        """Return these features, and the further ones of each for ``model``."""
        by_name = dict(self.by_name)
        for feature in self:
            by_name |= feature.further(model)
        return FeatureSet(by_name)

    def check_inputs(self, inputs: EngineInputs) -> None:
        for feature in self:
            feature.check_inputs(inputs)

    def mark(self, model: nn.Module) -> None:
        for feature in self:
            feature.mark(model)

    def check(self, plan: EnginePlan) -> None:
        for feature in self:
            feature.check(plan)

    def admit(self, plan: EnginePlan, freed: tuple[int, int]) -> bool:
        answers = [feature.admit(plan, freed) for feature in self]
        return all(answers)

    def cuts(self, model: nn.Module, dims: ParallelDims, rank: int) -> dict[nn.Parameter, Sharding]:
        found: dict[nn.Parameter, Sharding] = {}
        for feature in self:
            found |= feature.cuts(model, dims, rank)
        return found

    def cut(self, model: nn.Module, verify: bool = True) -> None:
        for feature in self:
            feature.cut(model, verify)

    def prepare(self, model: nn.Module) -> None:
        for feature in self:
            feature.prepare(model)

    def follow_loader(self, loader: object) -> object:
        for feature in self:
            loader = feature.follow_loader(loader)
        return loader

    def bind(self, step: OptimizerStep) -> None:
        for feature in self:
            feature.bind(step)

    def apply(self, engine: TrainingEngine) -> None:
        for feature in self:
            feature.apply(engine)

    def compile(self, backend: str, **options: object) -> None:
        for feature in self:
            feature.compile(backend, **options)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return the states of those that have one, by name."""
        states = {name: feature.state_dict() for name, feature in self.by_name.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None:
        for name, feature in self.by_name.items():
            feature.load_state_dict(state.get(name, {}))

    def remove(self) -> None:
        for feature in reversed(self.by_name.values()):
            feature.remove()


@cache
def early() -> Mapping[str, type[Feature]]:
    """Return the classes that rows name as ``early``, in the order of the rows."""
    return {name: row.load(row.early) for name, row in FEATURES.items() if row.early}
