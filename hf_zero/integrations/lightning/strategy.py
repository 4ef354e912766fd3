"""ZeroStrategy: Lightning's Trainer on hf-zero's engine, shared by the two packages of Lightning.

Nothing of Lightning is imported at the top: ``lightning_pytorch.py`` and
``hf_zero/integrations/pytorch_lightning.py`` make the classes.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.memory.saving import MemoryCheckpoints, checkpoints_of
from hf_zero.checkpoint.script_state import split
from hf_zero.config import ZeroConfig
from hf_zero.config.techniques import METRICS, PHASES
from hf_zero.deepspeed.zero_init import Init
from hf_zero.distributed import init, process_group
from hf_zero.distributed.parallel_groups import readers
from hf_zero.distributed.world_group import get_world_group
from hf_zero.engine import Engine, release_holders
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.initialize import initialize
from hf_zero.integrations import finder
from hf_zero.integrations.engine_protocol import EngineProtocol
from hf_zero.integrations.lightning.fits import (
    call_after_batches,
    callbacks_of,
    engine_of,
    left_in_place,
)
from hf_zero.integrations.lightning.precision import PrecisionMethods
from hf_zero.integrations.lightning.settings import read, resolve
from hf_zero.integrations.memory_checkpoints import save_if_due
from hf_zero.integrations.save_redirection import load_folder, save_folder
from hf_zero.integrations.transformers.loading import made_under
from hf_zero.loading.shard_only import hold
from hf_zero.logging import listed
from hf_zero.measures.figures import tracked
from hf_zero.parallel.tensor.model import with_tensor_size
from hf_zero.techniques.curriculum_samplers import CurriculumSampler, RankBatches, RankSamples
from hf_zero.techniques.data_sampling import follow, sampled_metrics
from hf_zero.techniques.training_phases import phases_of

if TYPE_CHECKING:
    from types import ModuleType

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.pytorch.strategies import DDPStrategy as _Strategy
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.strategies.strategy_registry import _StrategyRegistry
    from lightning.pytorch.utilities.types import LRSchedulerConfig
else:
    _Strategy = object  # ZeroStrategy adds the DDPStrategy of its package

TAG = "checkpoint"  # the name that Lightning expects in the folder of a sharded checkpoint
STAGES = (0, 1, 2, 3)


class StrategyArguments(TypedDict, total=False):
    """The arguments of all of Lightning's strategies with ranks."""

    accelerator: Accelerator | None
    checkpoint_io: CheckpointIO | None
    cluster_environment: ClusterEnvironment | None
    parallel_devices: list[torch.device] | None
    precision_plugin: Precision | None
    process_group_backend: str | None
    timeout: timedelta | None


ARGUMENTS = StrategyArguments.__optional_keys__


class StrategyMethods(_Strategy):
    """Train with sharded parameters, gradients and optimizer state, on CPU ranks (gloo) or GPUs
    (nccl).

    Args:
        config: a :class:`hf_zero.ZeroConfig`, dict, path, JSON text or preset ("zero0" … "zero3").
            Precision, clipping and accumulation come from the Trainer; different values in the
            configuration are an error.
        stage: the ZeRO stage if ``config`` names none; default: 3 without ``config``.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        arguments: those in ARGUMENTS, common to all of Lightning's strategies with ranks.

    Raises ConfigError for unsupported training: more than one optimizer, clipping by value,
    averaged weights, a compiled LightningModule, a configuration that contradicts the Trainer.
    """

    package: str
    precision_class: type[PrecisionMethods]

    def __init__(
        self,
        config: object = None,
        stage: int | None = None,
        *,
        exclude_frozen_parameters: bool = False,
        **arguments: Unpack[StrategyArguments],
    ) -> None:
        finder.choose()
        if unknown := sorted(arguments.keys() - ARGUMENTS):
            raise ConfigError(
                f"ZeroStrategy takes no {', '.join(unknown)}; it takes config, stage, "
                f"exclude_frozen_parameters, {', '.join(sorted(ARGUMENTS))}"
            )
        self.zero_config = read(config, stage, "ZeroStrategy")
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.engine: EngineProtocol | None = None
        if arguments.get("timeout") is None:
            arguments["timeout"] = timedelta(seconds=self.zero_config.timeout)
        super().__init__(**arguments)

    @property
    def _module(self) -> LightningModule:
        """The LightningModule, once the Trainer has connected it."""
        module = self.lightning_module
        assert module is not None
        return module

    def _library(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{module}")

    def setup_distributed(self) -> None:
        self._library("strategies.ddp").reset_seed()
        self.set_world_ranks()
        process_group.choose_device(self.root_device)
        if process_group.is_initialized() and process_group.get_world_size() != self.world_size:
            raise ConfigError(
                f"a process group of {process_group.get_world_size()} rank(s) exists and the "
                f"Trainer wants {self.world_size}; something made it before the Trainer started "
                "its ranks: load models in configure_model, or start the script with torchrun"
            )
        assert self.cluster_environment is not None
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        if not process_group.is_initialized():
            atexit.register(process_group.destroy_process_group)
        init.init_distributed(
            self._process_group_backend, self._timeout, "env://", self.global_rank, self.world_size
        )

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        if self.zero_config.stage < 3:
            with super().tensor_init_context(empty_init):
                yield
            return
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context of configure_model: at stage 3 models are read or built in shards."""
        with made_under(self.zero_config), Init(config=self.zero_config):
            yield

    def setup(self, trainer: Trainer) -> None:
        module = self._module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._refuse(trainer, module)
        self.precision_plugin.convert_module(module)
        engine: EngineProtocol | None = engine_of(module)
        if trainer.state.fn == "fit":
            if self._layer_sync:
                self._layer_sync.apply(module)
            if engine is not None and not engine.shard_only:
                engine.destroy_and_restore()
            engine = self._start_training(trainer, module)
        elif engine is None:
            release_holders(module)
            engine = hold(module, self.zero_config, self.zero_config.stage)
        self.engine = engine
        self.precision_plugin.engine = engine  # type: ignore[attr-defined]
        self.model = engine  # type: ignore[assignment]
        module.to(self.root_device)
        self.barrier()

    def _refuse(self, trainer: Trainer, module: torch.nn.Module) -> None:
        callbacks = self._library("callbacks")
        for callback in callbacks_of(trainer):
            if isinstance(
                callback, (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging)
            ):
                raise ConfigError(
                    f"{type(callback).__name__} keeps a copy of the whole model and is not built "
                    "for ZeroStrategy; remove the callback"
                )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ConfigError(
                "a LightningModule compiled as a whole cannot gather its parameters; compile "
                "modules inside it with torch.compile"
            )

        # checked now rather than at the first checkpoint
        if trainer.state.fn == "fit" and trainer.checkpoint_callbacks:
            for part in filter(None, (module, getattr(trainer, "datamodule", None))):
                split(
                    f"what save_hyperparameters(ignore=...) keeps of {type(part).__name__}",
                    dict(part.hparams),
                )

    def _start_training(self, trainer: Trainer, module: torch.nn.Module) -> EngineProtocol:
        core, types = self._library("core.optimizer"), self._library("utilities.types")
        settings = resolve(with_tensor_size(module, self.zero_config), trainer, self.world_size)
        optimizer, schedulers = self._script_optimizer(module, settings)
        engine, chosen, _, scheduler = initialize(
            model=module, optimizer=optimizer, config=settings
        )
        _refuse_changing_batches(engine)
        engine.measures.keep_in(trainer.default_root_dir)
        if trainer.progress_bar_callback is not None:
            engine.measures.shown_elsewhere()
        if (checkpoints := checkpoints_of(engine)) is not None:
            self._save_into_memory(engine, checkpoints, trainer)
        engine.lr_scheduler = None  # Lightning steps the scheduler
        engine.set_gradient_accumulation_boundary(True)
        self.optimizers = [core._MockOptimizer() if chosen is None else chosen]
        # the wrapper's zero_grad is that of the optimizer's class and would not reach the engine
        for wrapped in self._lightning_optimizers:
            wrapped.zero_grad = wrapped.optimizer.zero_grad  # type: ignore[attr-defined]
        self.lr_scheduler_configs = (
            schedulers
            if scheduler is None
            else [types.LRSchedulerConfig(scheduler, interval="step")]
        )
        return engine

    def _script_optimizer(
        self, module: torch.nn.Module, settings: ZeroConfig
    ) -> tuple[torch.optim.Optimizer | None, list[LRSchedulerConfig]]:
        """Return the optimizer and the schedulers of ``configure_optimizers``; none if ``settings``
        name the optimizer, and the module does not define it. Raises ConfigError for several
        optimizers, and for schedulers beside that of ``settings``.
        """
        core = self._library("core.optimizer")
        overridden = self._library("utilities.model_helpers").is_overridden
        if settings.optimizer is not None and not overridden("configure_optimizers", module):
            return None, []
        optimizers, schedulers = core._init_optimizers_and_lr_schedulers(module)
        if len(optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers returned {len(optimizers)} optimizers, and a ZeRO "
                "engine has one; give one optimizer parameter groups, "
                "or train the parts in LightningModules of their own"
            )
        if schedulers and settings.scheduler is not None:
            raise ConfigError(
                "configure_optimizers returned a scheduler, and the config names "
                f"{settings.scheduler.type!r}; keep one"
            )
        optimizer = None if isinstance(optimizers[0], core._MockOptimizer) else optimizers[0]
        return optimizer, schedulers

    def on_train_start(self) -> None:
        """Record the number of steps of the run, where Lightning knows it: for as many steps in
        each epoch, which end with batches.
        """
        super().on_train_start()
        module, changes = self._module, self._library("callbacks")
        trainer, steps = module.trainer, module.trainer.estimated_stepping_batches
        varies = any(
            isinstance(c, changes.GradientAccumulationScheduler) for c in callbacks_of(trainer)
        )
        if module.automatic_optimization and not varies and 0 < steps < math.inf:
            assert self.engine is not None
            self.engine.measures.plan_steps(int(steps))

    def on_validation_end(self) -> None:
        """Record the results of a validation among the figures of the run."""
        super().on_validation_end()
        trainer = self._module.trainer
        in_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        if self.engine is not None and in_training:
            self.engine.measures.note_evaluation(self.engine, trainer.callback_metrics)

    def _save_into_memory(
        self, engine: EngineProtocol, checkpoints: MemoryCheckpoints, trainer: Trainer
    ) -> None:
        """Have ``trainer`` save into the memory of the hosts, after the callbacks of a batch, what
        it saves on disk.
        """

        def write(folder: Path) -> Path:
            trainer.save_checkpoint(folder / TAG, weights_only=False)
            return folder

        checkpoints.leave_saves_to_trainer()
        checkpoints.note_run(trainer.default_root_dir)
        callback = self._library("callbacks").Callback
        call_after_batches(trainer, callback, lambda: save_if_due(engine, write))

    def teardown(self) -> None:
        with left_in_place(self):
            super().teardown()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments for a DistributedSampler: tensor-parallel ranks read the same samples."""
        ranks, rank = readers()
        return {"num_replicas": ranks, "rank": rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Let a shuffling training loader draw by difficulty if so configured. Raises ConfigError
        for a callback that changes the accumulation, and at stage 3 for a loader to predict from
        that has different numbers of batches on ranks.
        """
        engine, trainer = self.engine, self._module.trainer
        if engine is not None and engine.stage == 3 and trainer.predicting:
            _refuse_uneven(dataloader, trainer.limit_predict_batches)  # type: ignore[attr-defined]
        if engine is None or not (trainer.training and sampled_metrics(engine.config)):
            return super().process_dataloader(dataloader)
        scheduler = self._library("callbacks").GradientAccumulationScheduler
        if any(isinstance(callback, scheduler) for callback in callbacks_of(trainer)):
            raise ConfigError(
                f"{scheduler.__name__} changes how many samples a step has, and {METRICS} draws "
                "equally many for each step; leave one of them out"
            )
        if not isinstance(dataloader, DataLoader):
            return super().process_dataloader(dataloader)
        batches = dataloader.batch_sampler
        shuffles = getattr(dataloader.sampler, "shuffle", False)  # a DistributedSampler
        if type(batches) is BatchSampler and (
            shuffles or isinstance(dataloader.sampler, RandomSampler)
        ):
            micro, (ranks, rank) = batches.batch_size, readers()
            samples = micro * ranks * trainer.accumulate_grad_batches
            sampler = CurriculumSampler(dataloader.dataset, samples, batches.drop_last)
            follow(engine.feature_set, sampler)
            shares = RankSamples(RankBatches(sampler, micro, ranks, rank))
            dataloader = self._library("utilities.data")._update_dataloader(dataloader, shares)
        return super().process_dataloader(dataloader)

    def training_step(
        self, *args: object, **kwargs: object
    ) -> torch.Tensor | Mapping[str, object] | None:
        if self._module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        # Backwards and steps happen inside: the engine's forward must not wrap it, only the calls
        # of modules inside are forwards. So the engine notices unfrozen layers here.
        assert self.engine is not None
        self.engine.rebuild_if_unfrozen()
        with self.precision_plugin.train_step_context():
            return self._module.training_step(*args, **kwargs)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], object],
        model: torch.nn.Module | None = None,
        **kwargs: object,
    ) -> object:
        """Step, and give the engine's figures to the loggers every ``log_every_n_steps`` steps."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.engine is not None
        trainer, number = self._module.trainer, self.engine.global_steps
        figures = tracked(self.engine.figures)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if figures and every and number % every == 0 and self.engine.was_step_applied():
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=number)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep backwards inside from ending an accumulation window."""
        assert self.engine is not None
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Return {}: checkpoints are written from the shards, and no rank holds all weights."""
        return {}

    def optimizer_state(self, optimizer: object) -> dict[str, torch.Tensor]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Write a folder with ``checkpoint/`` and ``latest``, or with ``weights_only=True`` a file
        for ``load_from_checkpoint``. Collective.
        """
        assert self.engine is not None
        filepath = save_folder(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            self._save_weights(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError(
                "save_checkpoint(storage_options=...) is not used for a sharded checkpoint, which "
                "all ranks write; leave it out"
            )
        state = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        self.engine.save_checkpoint(
            str(filepath), TAG, state, exclude_frozen_parameters=self.exclude_frozen_parameters
        )

    def _save_weights(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object
    ) -> None:
        assert self.engine is not None
        checkpoint["state_dict"] = self.engine.state_dict(rank0_only=True, dtype=torch.float32)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Resume on any number of ranks and at any stage; return the Trainer's state. Collective.

        Raises CheckpointError for a file of whole weights in a fit: it can only be evaluated.
        """
        assert self.engine is not None
        checkpoint_path = load_folder(checkpoint_path)
        fitting = self._module.trainer.state.fn == "fit"
        if Path(checkpoint_path).is_file():
            if fitting:
                raise CheckpointError(
                    f"{checkpoint_path} is a file of whole weights, which training under ZeRO does "
                    "not resume from; pass the folder that ZeroStrategy "
                    "saved, or read the weights with load_from_checkpoint and train from them"
                )
            return super().load_checkpoint(checkpoint_path, weights_only)
        if fitting:
            self._add_saved_groups(Path(checkpoint_path))
        _, state = self.engine.load_checkpoint(
            str(checkpoint_path),
            load_module_strict=self._module.strict_loading,
            load_optimizer_states=fitting,
            load_lr_scheduler_states=False,
            load_module_only=not fitting,
        )
        return state

    def _add_saved_groups(self, folder: Path) -> None:
        """Unfreeze the groups of parameters that a callback for finetuning had added to the
        optimizer by the save in ``folder``, and add them again. Lightning restores its callbacks
        later.
        """
        engine, trainer = self.engine, self._module.trainer
        base = self._library("callbacks").BaseFinetuning
        if engine is None or not any(
            isinstance(callback, base) for callback in callbacks_of(trainer)
        ):
            return
        saved = read_manifest(folder / TAG / MANIFEST_NAME).optimizer
        names = dict(engine.module.named_parameters())
        for group in saved.groups[len(engine.optimizer.param_groups) :] if saved else ():
            params = [names[name] for name in group.parameters if name in names]
            for parameter in params:
                parameter.requires_grad_(True)
            engine.add_param_group({**group.hyperparameters, "params": params})

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        if "state_dict" in checkpoint:  # from a file; a folder was read into the shards already
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """No-op: ``load_checkpoint`` has read the state into the shards."""


def _refuse_changing_batches(engine: Engine) -> None:
    """End ``engine`` and raise ConfigError if training phases change its batches."""
    phases = phases_of(engine)
    if phases is not None and (phases.changes_batches or phases.changes_micro_batches):
        engine.destroy()
        raise ConfigError(
            f"{PHASES} changes the batch, and Lightning's loop has windows of one size; keep "
            "sequence_length and the learning rate in it, and let a "
            "GradientAccumulationScheduler change accumulate_grad_batches"
        )


def _refuse_uneven(loader: object, limit: float) -> None:
    """Raise ConfigError if ranks have different numbers of batches of ``loader``, of which a
    prediction uses ``limit``, a number or a share. Collective.
    """
    batches = None
    if isinstance(loader, Sized):
        with suppress(TypeError, NotImplementedError):  # a DataLoader over a stream
            batches = len(loader)
            batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    found = get_world_group().all_gather_object(batches, "the batches of a prediction")
    if len(set(found)) > 1:
        raise ConfigError(
            f"predict: ranks have {listed(map(str, found))} batches, and at stage 3 no rank runs a "
            "forward without the others; change the batch size, or the number of rows to a "
            f"multiple of {readers()[0]}, or predict at stage 2 (strategy='zero_stage_2', with "
            "ckpt_path for a saved model)"
        )


def register(registry: _StrategyRegistry, strategy: Callable[..., Strategy]) -> None:
    """Register ``zero_stage_0`` … ``zero_stage_3`` with Lightning's registry of strategies, and
    ``…_offload`` of each.

    These keep the optimizer in host memory, and at stage 3 the parameters too.
    """
    for stage in STAGES:
        label, name = f"hf-zero, ZeRO stage {stage}", f"zero_stage_{stage}"
        registry.register(name, strategy, description=label, override=True, stage=stage)
        away = {
            "offload_optimizer": {"device": "cpu"},
            **({"offload_param": {"device": "cpu"}} if stage == 3 else {}),
        }
        config = {"zero_optimization": {"stage": stage, **away}}
        registry.register(
            f"{name}_offload",
            strategy,
            description=f"{label}, offloaded to the CPU",
            override=True,
            config=config,
        )
