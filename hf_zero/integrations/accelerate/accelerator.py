"""Wrappers of ``Accelerator``: preparation of models and optimizers, whole state dicts, and the
names that TRL uses around generation at stage 3.

TRL removes the engine's hooks inside GatheredParameters and restores them. hf-zero's hooks may
stay: a unit that is gathered already is neither gathered again nor released by them. So the names
exist, without hooks to remove. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.config.reading import AUTO
from hf_zero.config.resolving import ACCUMULATION, BATCH, MICRO, TOTAL
from hf_zero.config.techniques import PHASES
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.loaders import follow_engines, sequence_ranks, tensor_ranks
from hf_zero.integrations.accelerate.memory_saves import engines_of, save_by_loop
from hf_zero.integrations.checkpoint_folders import save_folder
from hf_zero.integrations.engine_protocol import EngineProtocol, is_engine, trains
from hf_zero.integrations.seams import Original
from hf_zero.logging import log_rank0
from hf_zero.measures.figures import tracked
from hf_zero.zero.layout.flat_buffer import owner_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from hf_zero.integrations.accelerate.multiple_models import EngineSteps

CLIPPING = "gradient_clipping"
FILLED_LIMIT = "_hf_zero_filled_limit"  # attribute of a plugin, or of its configuration
FILLED_SIZES = "_hf_zero_filled_sizes"  # also


def keep_the_optimizer(original: Original, optimizer: object) -> object:
    """Wraps ``map_pytorch_optim_to_deepspeed``: the script's own optimizer object is kept, since
    the engine updates with any element-wise optimizer.
    """
    return optimizer if finder.chosen() else original(optimizer)


def prepare_engines(original: Original, self: Accelerator, *args: object) -> tuple[object, ...]:
    """Wraps ``Accelerator._prepare_deepspeed``: gives new engines the attributes that TRL uses, and
    registers them so that several models of one script can train. Returns what this accelerator has
    prepared before as it is.
    """
    if not finder.chosen():
        return original(self, *args)
    _refuse_pipelines(args)
    known = _known(self, args)
    if any(known):
        others = [value for value, before in zip(args, known) if not before]
        rest = iter(prepare_engines(original, self, *others) if others else ())
        return tuple(value if before else next(rest) for value, before in zip(args, known))
    _refuse_optimizer_alone(args)
    _refuse_second_optimizer(args)
    _warn_scheduler_alone(args)
    if sequence_ranks(self.state) > 1:
        _split_layers_first(tensor_ranks(self.state), args)
    from hf_zero.deepspeed.zero_config import GRADIENT_CLIPPING_DEFAULT

    config = self.deepspeed_plugin.deepspeed_config
    with (
        _limit_left_open(self.deepspeed_plugin) as limit_left_open,
        _sizes_left_open(self.deepspeed_plugin, args),
        _batch_size_left_open(config, args),
        _counting_data_parallel_ranks(self, args),
    ):
        if self.deepspeed_plugin.gradient_clipping == 0:
            config.setdefault(CLIPPING, 0.0)  # Accelerate drops a zero
        elif config.get(CLIPPING) is None:  # the script may name another, else it is told of this
            config[CLIPPING] = GRADIENT_CLIPPING_DEFAULT
        result = original(self, *args)
    from hf_zero.integrations.accelerate.multiple_models import register_engines

    # one that this call has replaced, as of a model that was first prepared without its optimizer
    self._models[:] = [m for m in self._models if not (is_engine(m) and m.destroyed)]
    for engine in result:
        if is_engine(engine) and engine.optimizer is not None:
            offer_offload_names(engine)
            _refuse_other_micro_batches(engine)
    engines = [m for m in result if is_engine(m) and trains(m)]
    register_engines(self, engines if limit_left_open else ())
    follow_engines(self)
    if engines:
        if self.project_dir is not None:
            self.project_configuration.project_dir = save_folder(self.project_dir)
        save_by_loop(self)
    return result


def _known(accelerator: Accelerator, args: Sequence[object]) -> list[bool]:
    """Return for each of ``args`` whether it is an engine, optimizer or scheduler that
    ``accelerator`` has prepared: an engine without an optimizer is not if one comes with it.
    """
    from accelerate.utils import DummyOptim

    prepared = {*map(id, (*accelerator._optimizers, *accelerator._schedulers))}
    optimizers = [value for value in args if isinstance(value, (torch.optim.Optimizer, DummyOptim))]
    binds = any(id(optimizer) not in prepared for optimizer in optimizers)
    prepared |= {
        id(model)
        for model in accelerator._models
        if is_engine(model) and not model.destroyed and (model.optimizer is not None or not binds)
    }
    return [id(value) in prepared for value in args]


@contextmanager
def _limit_left_open(plugin: DeepSpeedPlugin) -> Iterator[bool]:
    """Yield whether the configuration of ``plugin`` leaves the clipping norm to the script: "auto",
    0 and a missing key do; also if the key has the value that an earlier ``prepare`` or the Trainer
    has filled in.
    """
    config = plugin.deepspeed_config
    filled = [getattr(holder, FILLED_LIMIT, AUTO) for holder in (plugin, config)]
    left_open = config.get(CLIPPING, AUTO) in (AUTO, None, 0, *filled)
    try:
        yield left_open
    finally:
        if left_open:
            setattr(plugin, FILLED_LIMIT, plugin.deepspeed_config.get(CLIPPING, AUTO))


@contextmanager
def _sizes_left_open(plugin: DeepSpeedPlugin, args: tuple[object, ...]) -> Iterator[None]:
    """Write "auto" again for batch sizes of the configuration that have the value that an earlier
    ``prepare`` filled in: a later engine has those of its loader and of the accelerator then.
    """
    config, filled = plugin.deepspeed_config, vars(plugin).setdefault(FILLED_SIZES, {})
    refilled = {ACCUMULATION}
    if any(isinstance(value, nn.Module) for value in args):
        refilled.add(TOTAL)
        if any(isinstance(value, DataLoader) for value in args):
            refilled.add(MICRO)
    for key in refilled & filled.keys():
        if filled.pop(key) == config.get(key):
            config[key] = AUTO
    left_open = [key for key in BATCH if config.get(key) == AUTO]
    try:
        yield
    finally:
        filled.update({key: config[key] for key in left_open if config.get(key, AUTO) != AUTO})


def _split_layers_first(size: int, args: Sequence[object]) -> None:
    """Shard the layers of models for tensor parallelism before Accelerate makes the
    sequence-parallel groups, which depend on it.
    """
    from hf_zero.parallel.tensor import tensor_parallel

    for model in (value for value in args if isinstance(value, nn.Module)):
        tensor_parallel(model, size)


def _refuse_pipelines(args: Sequence[object]) -> None:
    """Raise ConfigError for a pipeline: loops of Accelerate and the Trainer call a model."""
    from hf_zero.parallel.pipeline.staged import StagedModule

    if any(isinstance(value, StagedModule) for value in args):
        raise ConfigError(
            "Accelerator.prepare() got the stages of a pipeline, and its loops, the Trainer's too, "
            "call a model for its loss; call hf_zero.initialize(model=stages, ...) and train by "
            "engine.train_batch(), or shard the whole model at stage 3"
        )


def add_figures(
    original: Original,
    self: Accelerator,
    values: dict[str, object],
    step: int | None = None,
    log_kwargs: object = None,
) -> None:
    """Wraps ``Accelerator.log``: trackers get the figures of the first engine beside the script's
    values, which keep their names; results of an evaluation join the figures of that engine.
    """
    for engine in engines_of(self)[:1]:
        engine.measures.note_evaluation(engine, values)
    figures = (engine.figures for engine in engines_of(self) if engine.figures)
    figures_now = tracked(next(figures, {}))
    original(self, {**figures_now, **values}, step, {} if log_kwargs is None else log_kwargs)


def keep_measures_in(accelerator: Accelerator, folder: Path) -> None:
    """Have engines of ``accelerator`` write files to ``folder``, further ones to folders in it."""
    for number, engine in enumerate(engines_of(accelerator)):
        engine.measures.keep_in(str(folder / f"model_{number}" if number else folder))


def follow_the_phases(original: Original, self: Accelerator) -> None:
    """Wraps ``Accelerator._do_sync``: windows of ``accumulate`` have the number of micro-batches of
    the engine's current training phase.
    """
    from hf_zero.techniques.training_phases import phases_of

    wrapped = getattr(self, "deepspeed_engine_wrapped", None)
    phases = phases_of(getattr(wrapped, "engine", None))
    if phases is not None and phases.changes_batches:
        steps = self.deepspeed_engine_wrapped.engine.gradient_accumulation_steps()
        if steps != self.gradient_accumulation_steps:
            self.gradient_accumulation_steps, self.step = steps, 0
    original(self)


def _refuse_other_micro_batches(engine: EngineProtocol) -> None:
    """Raise ConfigError for phases whose micro-batch size differs from the loader's."""
    from hf_zero.techniques.training_phases import phases_of

    phases = phases_of(engine)
    if phases is not None and phases.changes_micro_batches:
        engine.destroy()
        raise ConfigError(
            f"{PHASES} changes {MICRO}, and the data loader that was prepared brings batches of "
            "one size; leave the key out of the phases and change train_batch_size: the number of "
            "micro-batches follows"
        )


def refuse_several_models(
    original: Original, self: Accelerator, *args: object, **kwargs: object
) -> object:
    """Wraps ``Accelerator.prepare``: raises ConfigError under ZeRO for several models in a call."""
    models = [type(value).__name__ for value in args if isinstance(value, nn.Module)]
    if len(models) > 1 and self.distributed_type == "DEEPSPEED" and finder.chosen():
        raise ConfigError(
            f"accelerator.prepare() got {len(models)} models ({', '.join(models)}), and one call "
            "makes one engine: prepare each model with its optimizer in a call of its own. The "
            "weights of a loss belong into the groups of the model's optimizer, and the loss stays "
            "out of prepare()"
        )
    return original(self, *args, **kwargs)


def refuse_optimizer_apart(
    original: Original, self: Accelerator, optimizer: object, device_placement: object = None
) -> object:
    """Wraps ``Accelerator.prepare_optimizer``: raises PartitionError on several ranks under ZeRO,
    where each rank would train an unsharded model with unaveraged gradients.
    """
    if finder.chosen() and self.distributed_type == "DEEPSPEED" and self.num_processes > 1:
        raise PartitionError(
            f"accelerator.prepare_optimizer({type(optimizer).__name__}) under ZeRO: the model "
            "stays whole and its gradients are not averaged over the ranks; prepare both in one "
            "call, model, optimizer = accelerator.prepare(model, optimizer)"
        )
    return original(self, optimizer, device_placement)


def refuse_unprepared_model(
    original: Original, self: Accelerator, loss: torch.Tensor, **kwargs: object
) -> object:
    """Wraps ``Accelerator.backward``: raises PartitionError under ZeRO if no model was prepared."""
    wrapped = getattr(self, "deepspeed_engine_wrapped", None)
    if wrapped is None and self.distributed_type == "DEEPSPEED" and finder.chosen():
        raise PartitionError(
            "accelerator.backward(loss) under ZeRO, and this Accelerator has prepared no model: no "
            "engine has computed this loss; prepare before the loop, "
            "model, optimizer, loader = accelerator.prepare(model, optimizer, loader), and train "
            "the model that it returns"
        )
    return original(self, loss, **kwargs)


def make_unclaimed_step(accelerator: Accelerator, model: object = None) -> None:
    """Have a single engine of ``accelerator`` make a step that no ``optimizer.step()`` will claim
    (collective). A ``model`` that is read by itself must be that engine, at stage 3: at others
    rank 0 may read it alone.
    """
    steps = _steps_of(accelerator)
    if steps is not None and (
        model is None or (model is steps.engine and steps.engines[0].config.stage == 3)
    ):
        steps.make_unclaimed_step()


def forget_window(accelerator: Accelerator) -> None:
    """Have the engines of ``accelerator`` forget backwards whose gradients a load has dropped."""
    steps = _steps_of(accelerator)
    if steps is not None:
        steps.forget_window()


def _steps_of(accelerator: Accelerator) -> EngineSteps | None:
    from hf_zero.integrations.accelerate.multiple_models import EngineSteps

    steps: object = getattr(accelerator, "deepspeed_engine_wrapped", None)
    return steps if isinstance(steps, EngineSteps) else None


def empty_elsewhere(
    original: Original, self: Accelerator, model: object, unwrap: bool = True
) -> object:
    """Wraps ``Accelerator.get_state_dict``: ranks other than 0 get an empty state dict instead of
    None, as under FSDP. At stage 3, where all ranks call it, a step of ``model`` that is still
    deferred is made before.
    """
    make_unclaimed_step(self, model)
    state = original(self, model, unwrap)
    return {} if state is None and finder.chosen() else state


@contextmanager
def _batch_size_left_open(config: dict[str, object], args: tuple[object, ...]) -> Iterator[None]:
    """Remove "auto" batch sizes from ``config`` while an engine is prepared without a data loader
    that has a batch size: Accelerate raises for them, and the engine does not need the number.
    """
    loaders = [value for value in args if isinstance(value, DataLoader)]
    taken = {}
    if config.get(MICRO) == AUTO and (
        not loaders or any(loader.batch_size is None for loader in loaders)
    ):
        taken = {key: config.pop(key) for key in (TOTAL, MICRO) if config.get(key) == AUTO}
    try:
        yield
    finally:
        # without a model in this call, one may follow with a data loader
        if not any(isinstance(value, nn.Module) for value in args):
            config.update(taken)


@contextmanager
def _counting_data_parallel_ranks(
    accelerator: Accelerator, args: tuple[object, ...]
) -> Iterator[None]:
    """Divide by data-parallel ranks, instead of processes, for the configuration: the batches that
    ``split_batches`` splits, and otherwise the steps of a DummyScheduler.
    """
    from accelerate.utils import DummyScheduler

    state, plugin = accelerator.state, accelerator.deepspeed_plugin
    config, size = plugin.deepspeed_config, tensor_ranks(state) * sequence_ranks(state)
    scaled: list[DummyScheduler] = []
    if not accelerator.split_batches:
        dummies = (value for value in args if isinstance(value, DummyScheduler))
        scaled = [scheduler for scheduler in dummies if scheduler.total_num_steps]
    elif size > 1 and config.get(MICRO) == AUTO:
        loaders = [value for value in args if isinstance(value, DataLoader)]
        sizes = [loader.batch_size for loader in loaders if loader.batch_size]
        if sizes and len(sizes) == len(loaders):
            chosen = min(sizes) if plugin.is_train_batch_min else max(sizes)
            config[MICRO] = chosen // (state.num_processes // size)
    for scheduler in scaled:
        scheduler.total_num_steps *= size
    try:
        yield
    finally:
        for scheduler in scaled:
            scheduler.total_num_steps //= size


def _refuse_optimizer_alone(args: tuple[object, ...]) -> None:
    """Raise PartitionError for an optimizer whose model was prepared without it."""
    if any(isinstance(value, nn.Module) for value in args):
        return
    for optimizer in (value for value in args if isinstance(value, torch.optim.Optimizer)):
        owners = (owner_of(p) for group in optimizer.param_groups for p in group["params"])
        engines = [flat.live_engine for flat in owners if flat is not None]
        if any(getattr(engine, "optimizer", None) is not optimizer for engine in engines):
            raise PartitionError(
                f"accelerator.prepare() is given {type(optimizer).__name__} after its model: under "
                "ZeRO the model is laid out for its optimizer; "
                "prepare both in one call, model, optimizer = accelerator.prepare(model, optimizer)"
            )


def _warn_scheduler_alone(args: tuple[object, ...]) -> None:
    """Warn of a scheduler without its model, which Accelerate returns as it is under ZeRO."""
    if any(isinstance(value, nn.Module) for value in args):
        return
    for value in args:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            name = type(value).__name__
            log_rank0(
                f"accelerator.prepare() is given {name} without its model: under ZeRO Accelerate "
                "returns it unwrapped, so each of its calls is a step, also inside "
                "accelerator.accumulate, and save_state leaves it out; prepare all in one call, "
                "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
                logging.WARNING,
            )


def _refuse_second_optimizer(args: Sequence[object]) -> None:
    """Raise ConfigError for several optimizers: Accelerate gives the last one to the engine, and
    says nothing of the others.
    """
    from accelerate.utils import DummyOptim

    optimizers = [value for value in args if isinstance(value, (torch.optim.Optimizer, DummyOptim))]
    if len(optimizers) > 1:
        raise ConfigError(
            f"accelerator.prepare() got {len(optimizers)} optimizers "
            f"({', '.join(type(optimizer).__name__ for optimizer in optimizers)}), and a model "
            "under ZeRO has one; pass one optimizer with several parameter groups, or prepare each "
            "model with its own optimizer in a call of its own"
        )


class ParameterCoordinator:
    """Coordinator without a trace of a forward pass that generation could make stale: a changed
    order is recorded anew.
    """

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """No-op: there is no trace."""


class ParameterOffload:
    """The object at ``engine.optimizer.parameter_offload``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[object] = []
        self.backward_hooks: list[object] = []
        self.param_coordinator = ParameterCoordinator()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """No-op: the hooks were never removed."""


def no_external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """Replacement of ``module.ds_external_parameters()``, always empty: a unit gathers what its
    modules use, whichever module owns it.
    """
    return iter(())


def offer_offload_names(engine: EngineProtocol) -> None:
    """Add the names that TRL uses to ``engine``."""
    engine.optimizer.parameter_offload = ParameterOffload(engine.module)
    vars(engine.module)["ds_external_parameters"] = no_external_parameters
