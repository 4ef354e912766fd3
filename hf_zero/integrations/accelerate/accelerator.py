"""Wrappers of ``Accelerator``: preparation of models and optimizers, windows of training phases,
steps that no call claims, and whole state dicts. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.difficulty_loaders import follow_engines
from hf_zero.integrations.accelerate.engine_steps import (
    EngineSteps,
    SingleEngineSteps,
    register_engines,
)
from hf_zero.integrations.accelerate.memory_saves import save_by_loop
from hf_zero.integrations.accelerate.open_values import open_values
from hf_zero.integrations.accelerate.parallel_sizes import sequence_ranks, tensor_ranks
from hf_zero.integrations.accelerate.refusals import (
    refuse_optimizer_alone,
    refuse_other_micro_batches,
    refuse_pipelines,
    refuse_second_optimizer,
    warn_of_scheduler_alone,
)
from hf_zero.integrations.accelerate.trl_names import add_trl_names
from hf_zero.integrations.engine_protocol import holder_of, is_engine, trains
from hf_zero.integrations.save_redirection import save_folder
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    refuse_pipelines(args)
    known = _known(self, args)
    if any(known):
        others = [value for value, before in zip(args, known) if not before]
        rest = iter(prepare_engines(original, self, *others) if others else ())
        return tuple(value if before else next(rest) for value, before in zip(args, known))
    refuse_optimizer_alone(args)
    refuse_second_optimizer(args)
    warn_of_scheduler_alone(args)
    if sequence_ranks(self.state) > 1:
        _split_layers_first(tensor_ranks(self.state), args)
    with open_values(self, args) as clipping_is_open:
        result = original(self, *args)
    # one that this call has replaced, as of a model that was first prepared without its optimizer
    self._models[:] = [m for m in self._models if not (is_engine(m) and m.destroyed)]
    for engine in result:
        if is_engine(engine) and engine.optimizer is not None:
            add_trl_names(engine)
            refuse_other_micro_batches(engine)
    engines = [m for m in result if is_engine(m) and trains(m)]
    register_engines(self, engines if clipping_is_open else ())
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


def _split_layers_first(size: int, args: Sequence[object]) -> None:
    """Shard the layers of models for tensor parallelism before Accelerate makes the
    sequence-parallel groups, which depend on it.
    """
    from hf_zero.parallel.tensor import tensor_parallel

    for model in (value for value in args if isinstance(value, nn.Module)):
        tensor_parallel(model, size)


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


def make_unclaimed_step(accelerator: Accelerator, model: object = None) -> None:
    """Have a single engine of ``accelerator`` make a step that no ``optimizer.step()`` will claim
    (collective). A ``model`` that is read by itself must be that engine, at stage 3: at others
    rank 0 may read it alone.
    """
    steps: object = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if isinstance(steps, SingleEngineSteps) and (
        model is None or (model is steps.engine and steps.engine.config.stage == 3)
    ):
        steps.make_unclaimed_step()


def forget_window(accelerator: Accelerator) -> None:
    """Have the engines of ``accelerator`` forget backwards whose gradients a load has dropped."""
    steps: object = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if isinstance(steps, EngineSteps):
        steps.forget_window()


def empty_state_dict_elsewhere(
    original: Original, self: Accelerator, model: nn.Module, unwrap: bool = True
) -> object:
    """Wraps ``Accelerator.get_state_dict``: ranks other than 0 get an empty state dict instead of
    None, as under FSDP. At stage 3, where all ranks call it, a step of ``model`` that is still
    deferred is made before. An unwrapped model stands for its engine.
    """
    engine = holder_of(model.parameters()) if finder.chosen() else None
    model = model if engine is None or engine.module is not model else cast(nn.Module, engine)
    make_unclaimed_step(self, model)
    state = original(self, model, unwrap)
    return {} if state is None and finder.chosen() else state
