"""``hf_zero.initialize``: make an engine, with its optimizer, data loader and scheduler, from a
model and a configuration.
"""

from __future__ import annotations

import functools
import importlib
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from hf_zero.activations.compile import to_be_compiled
from hf_zero.activations.policy import ActivationPatches
from hf_zero.checkpoint.resume import LATEST, Resumed, find_resumed
from hf_zero.compression.registry import extensions_of
from hf_zero.config import ZeroConfig, explaining
from hf_zero.config.launched import check_launch
from hf_zero.config.variables import warn_once as warn_of_variables
from hf_zero.device.kinds import device_count
from hf_zero.distributed import init, process_group
from hf_zero.distributed.parallel_dims import check_mpu
from hf_zero.distributed.rendezvous import announce
from hf_zero.distributed.world_group import raise_on_all_ranks
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.loading import give_values
from hf_zero.loading.shard_only import release_holders
from hf_zero.logging import log_rank0, logger, set_level
from hf_zero.ops.dispatch import kind_for_auto
from hf_zero.optim.build import build_optimizer, build_scheduler, refused
from hf_zero.optim.elementwise import adopt
from hf_zero.optim.elementwise import check as check_elementwise
from hf_zero.optim.one_bit import as_sent, one_bit_of
from hf_zero.parallel.expert.model import on_model, spread_experts
from hf_zero.parallel.pipeline.engine import (
    PipelineTraining,
    check_pipeline,
    check_uncut,
    pipelined,
)
from hf_zero.parallel.pipeline.staged import StagedModule, make_parallel_for
from hf_zero.parallel.sequence import sequence_parallel
from hf_zero.parallel.tensor.model import as_configured, ranks_of_a_stage
from hf_zero.planning import check_on_all_ranks
from hf_zero.planning.checking import PreflightReport
from hf_zero.planning.start_summary import summary
from hf_zero.techniques.quantized_linears import quantize_linears
from hf_zero.techniques.registry import TrainingTechniques, follow
from hf_zero.techniques.training_loader import data_loader, tell_of_lost_place
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.shared_memory import Tied, tie_shared_memory, without_tied
from hf_zero.zero.layout.wrap import mark_configured

E = TypeVar("E", bound=Engine)
# wrappers of torch, by name, because FSDP takes time to import
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


if TYPE_CHECKING:

    class PipelineEngine(PipelineTraining, Engine):
        """The engine for a model in pipeline stages: an :class:`Engine` with ``train_batch``."""

else:
    PipelineEngine = pipelined(Engine)


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
            call loads the newest one, with counters, random generators and the position in
            ``training_data``. On another number of ranks it changes the number of micro-batches,
            so that each step trains on the same samples. ``"latest"`` uses ``checkpoint.folder``
            of the configuration. Continue your loop from ``engine.global_steps``,
            ``loader.epoch`` and ``engine.client_state``.

    Raises:
        LaunchError: the variables of the launcher are incomplete or contradict each other.
        ConfigError: no configuration or two, two optimizers or schedulers, or values that
            contradict each other; a checkpoint with other parallel sizes, or with a batch that the
            ranks cannot divide.
        CheckpointError: the folder to resume from has no complete checkpoint.
        NotBuiltError: an ``mpu`` that splits the model.
        UnsupportedOptimizerError: an optimizer that needs whole tensors.
        DoesNotFitError: training needs more memory or disk space than is free; the message says
            what fits.
    """
    return initialize_as(
        Engine,
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        distributed_port,
        mpu,
        dist_init_required,
        collate_fn,
        config,
        config_params,
        resume,
    )


def initialize_as(
    engine_class: type[E],
    args: Any,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    distributed_port: int | None,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[[Any], Any] | None,
    config: Any,
    config_params: Any,
    resume: str | os.PathLike[str] | None,
) -> tuple[E, Any, DataLoader[Any] | None, Any]:
    """Run :func:`initialize` with an engine of ``engine_class``."""
    _refuse_other_deepspeed()
    if isinstance(args, nn.Module):  # initialize(model, "zero3")
        args, model, config = None, args, _second(model, config)
    if not isinstance(model, nn.Module):
        raise _no_model(args if isinstance(args, str) else model)
    _refuse_wrapped(model)
    settings = configuration(args, config, config_params)
    _check_call(settings, lr_scheduler, dist_init_required)
    if not (optimizer is None and model_parameters is None and settings.optimizer is None):
        check_launch(settings)
    init.init_from_config(settings, distributed_port)
    settings, sequence, tied = _prepare(model, settings, mpu)
    made = _optimizer(settings, model, optimizer, model_parameters)
    if made is not None:
        without_tied(made, tied)
        adopt(made)
    resumed = None if resume is None else find_resumed(resume, settings)
    settings = _resolve(settings, made, training_data, resumed)
    loader: Any = data_loader(training_data, collate_fn, settings)
    if loader is not None and sequence is not None:
        loader = sequence.batches(loader)
    tell_of_lost_place(loader)
    techniques = TrainingTechniques(
        settings, {**sequence_parallel.on_model(sequence), **on_model(model)}
    )
    follow(techniques, getattr(loader, "data_sampler", None))
    engine, report = _build(engine_class, model, settings, made, techniques)
    try:
        engine.training_dataloader = loader
        if engine.global_rank == 0:
            logger.info("%s\n%s", summary(report), _shown(settings))
            _tell_of_idle_offload(report.plan)
        engine.lr_scheduler = scheduler = _scheduler(lr_scheduler, settings, made)
        if resume is not None and resume != LATEST and (resumed is None or resumed.in_memory):
            engine.measures.keep_in(os.fspath(resume))
        if resumed is not None:
            engine.resumed_from, engine.client_state = engine.load_checkpoint(
                resumed.directory, resumed.tag, load_rng=True, load_loader=True
            )
    except BaseException:
        engine.destroy()
        raise
    return engine, made, loader, scheduler


def _check_call(
    settings: ZeroConfig,
    lr_scheduler: Any,
    dist_init_required: bool | None,
) -> None:
    """Raise ConfigError for arguments that contradict ``settings``, before ranks meet."""
    if settings.log_level is not None:
        set_level(settings.log_level.upper())
    warn_of_variables()
    _tell_of_other_devices()
    if dist_init_required is False and not process_group.is_initialized():
        raise ConfigError(
            "dist_init_required=False but no process group exists; call hf_zero.init_distributed() "
            "first or drop the argument"
        )
    if lr_scheduler is not None and settings.scheduler is not None:
        raise ConfigError(
            f"both lr_scheduler ({type(lr_scheduler).__name__}) and config scheduler "
            f"{settings.scheduler.type!r} are given; keep one"
        )


def _prepare(model: nn.Module, settings: ZeroConfig, mpu: Any) -> tuple[ZeroConfig, Any, Tied]:
    """Give ``model`` its values, its parts among ranks and its kernels, as ``settings`` say, before
    an optimizer is made of its parameters. Return the settings with the sizes in effect, the ranks
    that share a sequence, and the parameters that were tied. Collective.
    """
    make_parallel_for(model)
    if isinstance(model, StagedModule):
        with raise_on_all_ranks("take its stages of the pipeline"):
            check_uncut(settings, model)
    if {parameter.is_meta for parameter in model.parameters()} == {True}:
        give_values(model)
    tied = tie_shared_memory(model)
    settings = as_configured(model, settings)
    spread_experts(model, settings)
    # after as_configured and spread_experts, which may regroup the ranks that share a sequence
    settings, sequence = sequence_parallel.sequence_of(settings, mpu)
    if mpu is not None and sequence is None and not isinstance(model, StagedModule):
        check_mpu(mpu, process_group.get_world_size())
    sequence_parallel.check_model(model, sequence)
    choose = settings.kernels == "auto"
    if choose:
        settings = settings.on_device(kind_for_auto(process_group.default_device()))
    mark_configured(model, settings.zero.leaf_module)
    quantize_linears(model, settings)
    _fuse(model, settings, to_be_compiled(model) if choose and settings.compile.blocks else ())
    return settings, sequence, tied


def _resolve(
    settings: ZeroConfig,
    made: torch.optim.Optimizer | None,
    training_data: Any,
    resumed: Resumed | None,
) -> ZeroConfig:
    """Return ``settings`` for the optimizer ``made`` and the ranks that read different batches; a
    step has as many samples as in the checkpoint ``resumed``.
    """
    if made is not None:
        warning = check_elementwise(
            made, settings.elementwise_optimizers, settings.allow_untested_optimizer
        )
        if warning:
            log_rank0(warning, WARNING)
    settings = as_sent(settings, one_bit_of(settings, made))
    ranks = ranks_of_a_stage()
    if resumed is not None:
        resumed.check_sizes(settings)
        shared = settings.tensor_parallel.size * settings.sequence_parallel_size
        settings = resumed.keep_batch(settings, max(1, ranks // shared))
    return settings.resolve(
        ranks,
        require_batch_size=training_data is not None,
        training=made is not None,
    )


def _build(
    engine_class: type[E],
    model: nn.Module,
    settings: ZeroConfig,
    made: torch.optim.Optimizer | None,
    techniques: TrainingTechniques,
) -> tuple[E, PreflightReport]:
    """Plan an engine of ``engine_class``, or of its pipelined subclass, check that it fits, and
    build it; return it with the report of the check (collective).
    """
    if isinstance(model, StagedModule):
        one_bit = one_bit_of(settings, made)
        check_pipeline(settings, model, techniques.by_key, one_bit is not None)
        engine_class = pipelined(engine_class)
    plan = engine_class.plan(model, settings, made, extensions_of)
    report = check_on_all_ranks(plan)
    release_holders(model)
    return engine_class(plan, ActivationPatches(settings), techniques), report


def _no_model(given: Any) -> ConfigError:
    what = (
        ""
        if given is None
        else f"Module, not {given!r}"
        if isinstance(given, str)
        else f"Module, not a {type(given).__name__}"
    )
    load = f", such as AutoModel.from_pretrained({given!r})" if isinstance(given, str) else ""
    return ConfigError(f"initialize needs model={what}; pass the torch.nn.Module to train{load}")


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a wrapper of torch in ``model``, which reduces gradients (DDP), shards
    parameters (FSDP) or copies the model to devices (DataParallel) besides the engine.
    """
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise ConfigError(
                    f"{name or 'the model'} is wrapped in {cls.__name__}, and hf-zero reduces "
                    "gradients and shards by itself; pass the module without that wrapper"
                )


def _tell_of_idle_offload(plan: EnginePlan) -> None:
    """Warn if all parameters stay on the device although the configuration offloads them."""
    if plan.settings.offload_param.on and plan.all_persistent:
        logger.warning(
            "offload_param moves nothing: each parameter has at most %s elements "
            "(zero_optimization.stage3_param_persistence_threshold) and so stays whole on the "
            "device; set it to 0 to move them, or take offload_param out",
            f"{plan.persistence:,}",
        )


def _second(second: Any, config: Any) -> Any:
    """Return the configuration of ``initialize(model, second, config=config)``."""
    if second is not None and config is not None:
        if isinstance(second, torch.optim.Optimizer):
            raise ConfigError(
                "the second argument of initialize(model, config) is the configuration, not an "
                f"optimizer ({type(second).__name__}); pass it as optimizer="
            )
        raise ConfigError(
            f"initialize(model, {second!r}, config=…) was given more than one config; pass one"
        )
    return config if second is None else second


@functools.cache
def _tell_of_other_devices() -> None:
    """Warn once that this process trains alone although it sees accelerators that it does
    not use.
    """
    devices = device_count()
    if devices > 1 and not process_group.is_initialized() and announce() is None:
        logger.warning(
            "one process trains on one of %d devices that it sees, as no launcher has started it: "
            "`hf-zero launch %s` or torchrun starts a "
            "rank on each; CUDA_VISIBLE_DEVICES=0 says that one is meant",
            devices,
            Path(sys.argv[0]).name or "train.py",
        )


def _refuse_other_deepspeed() -> None:
    """Raise ConfigError for another deepspeed: two engines would each own half of a training."""
    module = sys.modules.get("deepspeed")
    where = getattr(module, "__file__", None)
    if where and not Path(where).resolve().is_relative_to(Path(__file__).resolve().parent):
        raise ConfigError(
            f"another deepspeed is imported in this process ({where}), and Accelerate and "
            "Transformers would train with it; "
            "set HF_ZERO_BACKEND=hf_zero before the start, or uninstall it"
        )


def _fuse(model: nn.Module, config: ZeroConfig, compiled: Sequence[nn.Module]) -> None:
    """Replace forwards of ``model`` according to the configuration; in blocks that are
    ``compiled``, only those that inductor leaves.

    The replaced code belongs to Hugging Face, which this layer does not know, so this imports from
    a layer above it, by name.
    """
    section = dict(config.sparse_attention or {"enabled": False})
    sparse = (
        section
        if section.pop("enabled", True) and section.get("mode", "fixed") != "dense"
        else None
    )
    if config.kernels != "off" or sparse is not None or config.pre_layer_norm:
        fused = importlib.import_module("hf_zero.integrations.fused")
        fused.prepare(model, config.kernels, sparse, config.pre_layer_norm, compiled)


def _shown(config: ZeroConfig) -> str:
    """Return the written values by source, and the keys without effect by reason."""
    rows = [row for row in explaining.written(config.explain()) if row.key != "$schema"]
    lines = [f"    {line}" for line in explaining.as_summary(rows)]
    head = "  resolved configuration (`hf-zero explain FILE` shows the defaults, too):"
    return "\n".join([head, *lines])


def configuration(args: Any, config: Any, config_params: Any, foreign: bool = False) -> ZeroConfig:
    """Return the configuration that one of these arguments of :func:`initialize` holds; ``foreign``
    as for :meth:`ZeroConfig.from_dict`. Raises ConfigError for none, and for several that differ.
    """
    given = [
        (name, value)
        for name, value in (
            ("config", config),
            ("config_params", config_params),
            ("args.deepspeed_config", getattr(args, "deepspeed_config", None)),
            ("args.deepscale_config", getattr(args, "deepscale_config", None)),  # old name
        )
        if value is not None
    ]
    if not given:
        raise ConfigError(
            "initialize needs a config: pass config= (a ZeroConfig, dict, path or preset name), or "
            "args with deepspeed_config"
        )
    if len(given) > 1 and any(value != given[0][1] for _, value in given[1:]):
        raise ConfigError(
            "initialize was given more than one config: "
            f"{', '.join(name for name, _ in given)}; pass one"
        )
    # of a script for DeepSpeed, what nothing fills in takes its default
    autos: Any = True if foreign else "alone"
    return ZeroConfig.coerce(given[0][1], allow_auto=autos, foreign=foreign, check=refused)


def _optimizer(
    config: ZeroConfig, model: nn.Module, optimizer: Any, parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    wanted = (
        list(parameters)
        if parameters is not None
        else [p for p in model.parameters() if p.requires_grad]
    )
    if not wanted and isinstance(
        model, StagedModule
    ):  # a stage that is frozen steps with the others
        wanted = list(model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        if config.optimizer is not None:
            raise ConfigError(
                f"both an optimizer object ({type(optimizer).__name__}) and config optimizer "
                f"{config.optimizer.type!r} are given; keep one"
            )
        return optimizer
    if optimizer is not None:
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer is {reprlib.repr(optimizer)} ({type(optimizer).__name__}); pass a "
                "torch.optim.Optimizer, or a callable that makes one from parameters"
            )
        if config.optimizer is not None:
            raise ConfigError(
                "both a callable optimizer and config optimizer "
                f"{config.optimizer.type!r} are given; keep one"
            )
        made = optimizer(wanted)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"the callable optimizer returned a {type(made).__name__}; it must return a "
                "torch.optim.Optimizer"
            )
        return made
    if config.optimizer is None:
        return None
    if not wanted:
        raise ConfigError(
            "the config names an optimizer but no parameter of the model requires grad; unfreeze "
            "some, or remove the optimizer"
        )
    return build_optimizer(config.optimizer, wanted, model)


def _scheduler(given: Any, config: ZeroConfig, optimizer: torch.optim.Optimizer | None) -> Any:
    if isinstance(given, type) and hasattr(given, "step"):
        raise ConfigError(
            f"lr_scheduler is the class {given.__name__}; pass a scheduler, or a callable that "
            f"makes one: lambda optimizer: {given.__name__}(optimizer, …)"
        )
    if callable(given) and not hasattr(given, "step"):
        given = given(optimizer)
    if isinstance(given, ReduceLROnPlateau):
        log_rank0(
            "lr_scheduler ReduceLROnPlateau takes a metric, which the engine does not have: call "
            "its step(metric) where the script knows one; checkpoints hold its state"
        )
    if given is None and config.scheduler is not None and optimizer is not None:
        return build_scheduler(config.scheduler, optimizer)
    return given
