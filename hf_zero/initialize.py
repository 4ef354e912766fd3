"""``hf_zero.initialize``: make an engine, with its optimizer, data loader and scheduler, from a
model and a configuration.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.checkpoint.resume import Resumed, find_resumed
from hf_zero.config import ZeroConfig
from hf_zero.device.host_limits import release_freed
from hf_zero.distributed import init, parallel_groups, process_group
from hf_zero.engine import Engine
from hf_zero.logging import logger, set_level
from hf_zero.setup.plan import plan
from hf_zero.setup.request import E, SetupRequest, refuse_other_deepspeed
from hf_zero.setup.steps import apply
from hf_zero.zero.feature import early
from hf_zero.zero.transaction import on_rollback, restore_on_rollback, transaction


@overload
def initialize(
    args: nn.Module,
    model: ZeroConfig | Mapping[Any, Any] | str | os.PathLike[Any],
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]: ...


@overload
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: ZeroConfig | Mapping[Any, Any] | str | os.PathLike[Any] | None = None,
    config_params: ZeroConfig | Mapping[Any, Any] | str | os.PathLike[Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]: ...


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: ZeroConfig | Mapping[Any, Any] | str | os.PathLike[Any] | None = None,
    config_params: ZeroConfig | Mapping[Any, Any] | str | os.PathLike[Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """Put ``model`` under ZeRO; return (engine, optimizer, data loader, scheduler). Collective.

    Args:
        args: an object whose ``deepspeed_config`` is the path of the configuration, used if
            ``config`` is not given. You can also call ``initialize(model, config)``.
        model: the whole model. All ranks take the values of rank 0. Parameters on the meta device
            are initialized by the model's own method.
        optimizer: an optimizer over the model's parameters, or a callable that creates one from
            parameters; None uses the optimizer of the configuration. The engine returns the same
            object, and reads later changes of its groups.
        model_parameters: parameters or groups for an optimizer that this call creates; by default
            all that require gradients.
        training_data: a dataset, which the returned loader divides into micro-batches for each
            rank. (An IterableDataset must divide itself, because every rank iterates over all of
            it.) Call ``loader.data_sampler.set_epoch`` before each epoch, as with any
            DistributedSampler. If the configuration chooses samples by their difficulty, an
            iteration continues with the engine's next step. You can also pass a loader with
            ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``), which is
            returned unchanged.
        lr_scheduler: a scheduler, or a callable that creates one from the optimizer; None uses the
            scheduler of the configuration. The engine steps the scheduler.
        distributed_port: the port of the rendezvous if the launcher does not set MASTER_PORT.
        mpu: the result of ``hf_zero.sequence_parallel``, or a Megatron-style model-parallel unit
            that describes data parallelism over all ranks; any other raises.
        dist_init_required: False requires that a process group already exists.
        collate_fn: for the loader.
        config, config_params: a ZeroConfig, a dict, a path, a JSON string or the name of a preset.
        resume: the folder of a run, or a checkpoint. If the run has a complete checkpoint, this
            call loads the one that ``latest`` names, or the newest if that is damaged, with
            counters, random generators and the position in ``training_data``. On another number
            of ranks it changes the number of micro-batches, so that each step trains on the same
            samples. Without a checkpoint there it warns and starts afresh. ``"latest"`` uses
            ``checkpoint.folder`` of the configuration. Continue your loop from
            ``engine.global_steps``, ``loader.epoch`` and ``engine.client_state``.

    Raises:
        LaunchError: the variables of the launcher are incomplete or contradict each other.
        ConfigError: no configuration or two, two optimizers or schedulers, or values that
            contradict each other; a checkpoint with other parallel sizes, or with a batch that the
            ranks cannot divide.
        CheckpointError: all checkpoints in the folder to resume from are damaged.
        NotBuiltError: an ``mpu`` that splits the model.
        UnsupportedOptimizerError: an optimizer that is neither known to update each element by
            itself nor built for shards of whole tensors (``hf_zero/optim/README.md``).
        DoesNotFitError: training needs more memory or disk space than is free; the message says
            what fits.
    """
    request = SetupRequest.read(
        Engine, args=args, model=model, config=config, config_params=config_params,
        model_parameters=model_parameters, optimizer=optimizer, training_data=training_data,
        lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu,
        dist_init_required=dist_init_required, collate_fn=collate_fn, resume=resume,
    )  # fmt: skip
    return start(request)


def start(request: SetupRequest[E]) -> tuple[E, Any, DataLoader[Any] | None, Any]:
    """Make the engine of ``request``, or what :func:`replace_start` has put in its place, on every
    route. Collective.
    """
    return start_engine(request) if _replacement is None else _replacement(request)


def replace_start(replacement: Callable[[SetupRequest[Any]], Any] | None) -> None:
    """Have ``replacement`` answer requests for engines in this process, on every route, with an
    engine, optimizer, loader and scheduler; it may call :func:`start_engine`. None: the default.
    """
    global _replacement
    _replacement = replacement


_replacement: Callable[[SetupRequest[Any]], Any] | None = None


def start_engine(request: SetupRequest[E]) -> tuple[E, Any, DataLoader[Any] | None, Any]:
    """Join the job, plan ``request`` and apply the plan; an exception leaves everything as it was.
    Collective.
    """
    refuse_other_deepspeed()
    groups = [group for group in request.model_parameters or () if isinstance(group, dict)]
    with _without_collections(), transaction():
        restore_on_rollback(*groups)  # an optimizer writes its defaults into them
        setup = apply(plan(request, join(request)))
    if setup.settings.offload_optimizer.on or setup.settings.offload_param.on:
        release_freed()  # the parameters' former memory, which the transaction has kept
    return setup.engine, setup.optimizer, setup.loader, setup.scheduler


@contextmanager
def _without_collections() -> Iterator[None]:
    """Context without Python's cyclic garbage collection: hundreds of objects a parameter are made,
    nearly all of which stay, and collections that find nothing take half of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def join(request: SetupRequest[Any]) -> Resumed | None:
    """Enter the process group of the job, and those of a pipeline; return the checkpoint to resume
    from. The default group of several ranks outlives an exception. Collective.
    """
    config = request.config
    if config.log_level is not None:
        on_rollback(set_level, logger.level)
        set_level(config.log_level.upper())
    init.leave_group_of_one()
    if not process_group.is_initialized():
        before = frozenset(os.environ)
        init.init_from_config(config, request.distributed_port)
        if process_group.get_world_size() == 1:
            for name in os.environ.keys() - before:  # network interfaces
                on_rollback(os.environ.pop, name, None)
            on_rollback(process_group.destroy_process_group)
    on_rollback(parallel_groups.restorer())
    for feature_class in early().values():
        feature_class.join(request.model)
    return None if request.resume is None else find_resumed(request.resume, config)
