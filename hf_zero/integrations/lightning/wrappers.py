"""Wrappers of Lightning: names and precision of ZeroStrategy, checkpoints, and Lightning's own
DeepSpeedStrategy on hf-zero's engine.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from hf_zero.checkpoint import find
from hf_zero.checkpoint.background_saves import after_commit
from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.checkpoint.memory import checkpoints_of, newest
from hf_zero.checkpoint.retention import remove
from hf_zero.config import ZeroConfig
from hf_zero.config.memory import MemorySection
from hf_zero.distributed.world_group import get_world_group
from hf_zero.engine import Engine
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.checkpoint_folders import (
    engine_checkpoint_error,
    has_engine_checkpoint,
    last_complete,
    numbered_folders,
)
from hf_zero.integrations.engine_protocol import holder_of, is_engine
from hf_zero.integrations.lightning.settings import PrecisionMethods
from hf_zero.integrations.lightning.strategy import (
    StrategyMethods,
    call_after_batches,
    engine_of,
    left_in_place,
    register,
)
from hf_zero.integrations.seams import Original
from hf_zero.integrations.signal_saves import end, listen, stop_listening
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    import torch
    from lightning.fabric.connector import _Connector
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
    from lightning.pytorch.strategies.strategy_registry import _StrategyRegistry
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
    from lightning.pytorch.trainer.states import TrainerFn

LAST = "_hf_zero_last"  # whether a connector was asked for the last checkpoint, not for a named one
DAMAGE = "_hf_zero_damage"  # why no last checkpoint on disk can be loaded; memory is asked first
# saved by a job that is asked to end; a SLURM job resumes from it automatically
HPC = "hpc_ckpt_"


def register_stages(
    original: Original, cls: type[DeepSpeedStrategy], strategy_registry: _StrategyRegistry
) -> None:
    """Wraps ``DeepSpeedStrategy.register_strategies``: adds ``zero_stage_0`` …
    ``zero_stage_3_offload`` to the registry.
    """
    package = original.__module__.partition(".strategies.")[0]  # of the Trainer, or of Fabric
    original(cls, strategy_registry)
    register(strategy_registry, functools.partial(_make, package))


def _make(package: str, **arguments: object) -> Strategy:
    # Imported on use: the names are registered while the library is still being imported.
    home, name = {
        "lightning.fabric": ("lightning", "FabricStrategy"),
        "lightning.pytorch": ("lightning", "ZeroStrategy"),
        "pytorch_lightning": ("pytorch_lightning", "ZeroStrategy"),
    }[package]
    return getattr(importlib.import_module(f"hf_zero.integrations.{home}"), name)(**arguments)


def choose_precision(original: Original, self: _AcceleratorConnector) -> object:
    """Wraps ``_AcceleratorConnector._check_and_init_precision``: a ZeroStrategy gets its own
    precision, fp16 on CPUs too.
    """
    if not isinstance(self.strategy, StrategyMethods):
        return original(self)
    plugin = self._precision_plugin_flag
    if plugin is not None and not isinstance(plugin, PrecisionMethods):
        raise ConfigError(
            f"{type(plugin).__name__} cannot drive a ZeRO engine, which has precision of its "
            "own; write Trainer(precision=...)"
        )
    return plugin or self.strategy.precision_class(self._precision_flag)


def choose_precision_of_fabric(original: Original, self: _Connector) -> object:
    """Wraps Fabric's ``_Connector._check_and_init_precision``: a FabricStrategy gets its own
    precision, fp16 on CPUs too.
    """
    if type(self.strategy).__name__ != "FabricStrategy":
        return original(self)
    plugin = self._precision_instance
    if plugin is not None:
        return plugin  # which the strategy refuses if it is not of its own
    precision = importlib.import_module("hf_zero.integrations.lightning").FabricPrecision
    return precision(self._precision_input)


def zero_grad_by_the_engine(
    original: Original,
    self: _FabricOptimizer,
    optimizer: torch.optim.Optimizer,
    *args: object,
    **kwargs: object,
) -> None:
    """Wraps ``_FabricOptimizer.__init__``: the wrapper's ``zero_grad`` is that of the optimizer's
    class, and would not reach the engine.
    """
    original(self, optimizer, *args, **kwargs)
    if "zero_grad" in vars(optimizer):
        self.zero_grad = optimizer.zero_grad  # type: ignore[attr-defined]


def leave_out_by_identity(
    original: Original, optimizer: torch.optim.Optimizer, params: Iterable[torch.nn.Parameter]
) -> object:
    """Wraps ``BaseFinetuning.filter_on_optimizer``: returns those parameters that the optimizer of
    an engine does not have.
    """
    params = list(params)
    engine = holder_of(params)
    if engine is None or engine.optimizer is not optimizer:
        return original(optimizer, params)
    given_ids = {id(parameter) for group in engine.group_parameters for parameter in group}
    return [parameter for parameter in params if id(parameter) not in given_ids]


def store_names_of_groups(
    original: Original,
    self: BaseFinetuning,
    pl_module: LightningModule,
    opt_idx: int,
    num_param_groups: int,
    current_param_groups: list[dict[str, object]],
) -> None:
    """Wraps ``BaseFinetuning._store``: stores the groups of an engine's optimizer with the model's
    parameters, not with shards.
    """
    engine = engine_of(pl_module)
    if engine is not None:
        current_param_groups = [
            {**group, "params": parameters}
            for group, parameters in zip(current_param_groups, engine.group_parameters)
        ]
    original(self, pl_module, opt_idx, num_param_groups, current_param_groups)


def add_groups_again(
    original: Original, self: BaseFinetuning, trainer: Trainer, pl_module: LightningModule
) -> None:
    """Wraps ``BaseFinetuning.on_fit_start``: gives the optimizer of an engine the groups that the
    run had when it was saved.
    """
    engine = engine_of(pl_module)
    if engine is None or engine.optimizer is None or not self._restarting:
        original(self, trainer, pl_module)
        return
    self._restarting = False
    names, groups = dict(pl_module.named_parameters()), engine.optimizer.param_groups
    saved = self._internal_optimizer_metadata.get(0, [])
    for group, values in zip(groups, saved):
        group.update({name: value for name, value in values.items() if name != "params"})
    for values in saved[len(groups) :]:
        params = [names[name] for name in values["params"]]
        engine.add_param_group({**values, "params": params})


def keep_engines_in_place(original: Original, self: DDPStrategy) -> None:
    """Wraps ``DDPStrategy.teardown``: keeps an engine on its device at the end of a fit."""
    if is_engine(self.model) and self._lightning_module is not None:
        with left_in_place(self):
            original(self)
    else:
        original(self)


def go_on_with_an_engine(original: Original, self: DeepSpeedStrategy) -> None:
    """Wraps ``DeepSpeedStrategy.init_deepspeed``: evaluates with the engine that has trained, and
    trains a model that was evaluated.

    DeepSpeed carries an accumulation window left open by an epoch into the next, while Lightning
    zeroes gradients first; so ``zero_grad`` does nothing here, and the engine clears gradients
    after its steps.
    """
    module = self.lightning_module
    assert module is not None
    engine = engine_of(module)
    if engine is not None and not module.trainer.training:
        self.model = engine  # type: ignore[assignment]
        return
    if engine is not None:
        engine.destroy_and_restore()
    original(self)
    if is_engine(self.model):  # rather than an engine of the real DeepSpeed
        for optimizer in self.optimizers:
            optimizer.zero_grad = _nothing  # type: ignore[method-assign]


def find_complete(original: Original, self: ModelCheckpoint, trainer: Trainer) -> set[str]:
    """Wraps ``ModelCheckpoint._find_last_checkpoints``: ``ckpt_path="last"`` finds a complete
    folder; incomplete ones are skipped with a warning.

    If none named last is complete, the newest complete checkpoint of the callback is used. Raises
    CheckpointError if there is none: the run would otherwise start from scratch, and overwrite what
    is left.
    """
    paths: set[str] = original(self, trainer)
    if not _under_zero(trainer.strategy):
        return paths
    root = Path(trainer.default_root_dir)
    paths |= {str(path) for path in numbered_folders(root, HPC, self.FILE_EXTENSION)}
    complete = {path for path in paths if not (Path(path).is_dir() and _skipped(Path(path)))}
    if complete or not paths:
        return complete
    parent = Path(next(iter(paths))).parent
    complete = {
        str(item)
        for item in _beside(parent, self.FILE_EXTENSION)
        if str(item) not in paths and not _skipped(item)
    }
    if not complete:
        raise CheckpointError(
            f"none of the checkpoints in {parent} is complete "
            f"({', '.join(sorted(Path(path).name for path in paths))} neither); "
            "restore one, or start from scratch without ckpt_path"
        )
    return complete


def refuse_incomplete(
    original: Original,
    self: _CheckpointConnector,
    state_fn: TrainerFn,
    ckpt_path: str | Path | None,
    model_provided: bool,
    model_connected: bool,
) -> str | Path | None:
    """Wraps ``_CheckpointConnector._parse_ckpt_path``: a folder loaded by name, or as the best,
    must be complete.

    Raises CheckpointError that lists the complete ones beside it: a model other than the best must
    not be loaded silently. Of the folders saved when SLURM asked a job to end, the last complete
    one is loaded.
    """
    setattr(self, DAMAGE, None)
    setattr(self, LAST, ckpt_path == "last")
    strategy = self.trainer.strategy
    try:
        path = original(self, state_fn, ckpt_path, model_provided, model_connected)
        hpc = ckpt_path in (None, "hpc") and path is not None and Path(path).name.startswith(HPC)
        setattr(self, LAST, ckpt_path == "last" or hpc)
        if path is None or not _under_zero(strategy) or not Path(path).is_dir():
            return path
        folder = Path(path)
        if hpc:
            numbered = numbered_folders(folder.parent, HPC, folder.suffix)
            return str(last_complete(numbered, engine_checkpoint_error))
    except CheckpointError as error:
        if not (getattr(self, LAST) and state_fn == "fit" and _saves_into_memory(strategy)):
            raise
        setattr(self, DAMAGE, error)
        return None
    # for any other folder the engine's own error is more specific
    problem = engine_checkpoint_error(folder) if has_engine_checkpoint(folder) else ""
    if problem:
        others = [
            str(item)
            for item in _beside(folder.parent, folder.suffix)
            if item != folder and not engine_checkpoint_error(item)
        ]
        remedy = (
            f"complete, the newest first: {', '.join(others)}; pass one of them as ckpt_path"
            if others
            else "no other one there is complete"
        )
        raise CheckpointError(
            f"{folder}{' (the best)' if ckpt_path == 'best' else ''} is not complete: {problem}. "
            f"In {folder.parent}, {remedy}"
        )
    return path


def resume_from_memory(
    original: Original,
    self: _CheckpointConnector,
    checkpoint_path: str | Path | None = None,
    weights_only: bool | None = None,
) -> None:
    """Wraps ``_CheckpointConnector.resume_start``: ``ckpt_path="last"``, and a SLURM job that goes
    on by itself, resume from the newest of memory and disk.
    """
    trainer = self.trainer
    engine = getattr(trainer.strategy, "engine", None)
    checkpoint, damage = None, getattr(self, DAMAGE, None)
    setattr(self, DAMAGE, None)
    if (
        isinstance(engine, Engine)
        and checkpoints_of(engine) is not None
        and trainer.state.fn == "fit"
        and getattr(self, LAST, False)
    ):
        checkpoint = newest(engine, checkpoint_path, run=trainer.default_root_dir)
        if checkpoint is not None and checkpoint.in_memory:
            log_rank0(f"resume from step {checkpoint.step} in the memory of the hosts")
            checkpoint_path = str(checkpoint.directory)
    if checkpoint is None and damage is not None:
        raise damage
    original(self, checkpoint_path, weights_only)


def save_after_a_step(original: Original, self: _SignalConnector) -> None:
    """Wraps ``_SignalConnector.register_signal_handlers``: a fit of an engine saves and ends after
    the same step on all ranks.

    In its handlers Lightning broadcasts, saves and asks SLURM for a requeue, while any collective
    may be under way.
    """
    trainer = self.trainer
    engine = trainer.strategy.model
    if not (
        is_engine(engine) and trainer.state.fn == "fit" and engine.config.checkpoint.save_on_signal
    ):
        original(self)
        return
    package = type(self).__module__.partition(".trainer.")[0]
    callback = importlib.import_module(f"{package}.callbacks").Callback
    exceptions = importlib.import_module(f"{package}.utilities.exceptions")
    slurm = trainer._accelerator_connector.cluster_environment
    # the signal on which Lightning queues a job of SLURM again
    requeues = getattr(slurm, "auto_requeue", False)
    requeue = getattr(slurm, "requeue_signal", None) if requeues else None
    listen(engine, *filter(None, [requeue]))

    def save_if_requested() -> None:
        if not engine.stop_requested:
            return
        if decide_on_rank_0(get_world_group(), lambda: requeue in engine.stop_requests.received):
            self._slurm_sigusr_handler_fn(requeue, None)  # type: ignore[arg-type]
        else:
            path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
            trainer.save_checkpoint(path)
        # The launcher's observer kills all processes once it finds that one has failed.
        getattr(trainer.strategy.launcher, "procs", []).clear()
        end(engine, exceptions.SIGTERMException)

    call_after_batches(trainer, callback, save_if_requested, lambda: stop_listening(engine))


def _under_zero(strategy: object) -> TypeGuard[StrategyMethods | DeepSpeedStrategy]:
    return isinstance(strategy, StrategyMethods) or (
        finder.chosen() and type(strategy).__name__ == "DeepSpeedStrategy"
    )


def _saves_into_memory(strategy: Strategy) -> bool:
    if not isinstance(strategy, StrategyMethods):  # resume_from_memory knows these alone
        return False
    settings = ZeroConfig.coerce(strategy.zero_config or {}, allow_auto=True, foreign=True)
    return bool(settings.section_of(MemorySection).every)


def _beside(parent: Path, extension: str) -> list[Path]:
    """Return the folders in ``parent`` that Lightning may have saved, newest first."""
    siblings = (
        item
        for item in parent.glob(f"*{extension}")
        if item.is_dir() and not item.name.startswith(".")
    )
    order = {
        folder: at
        for at, checkpoint in enumerate(find.checkpoints_below(parent))
        for folder in (checkpoint, *checkpoint.parents)
    }
    return sorted(siblings, key=lambda item: order.get(item, -1), reverse=True)


def _skipped(folder: Path) -> bool:
    problem = engine_checkpoint_error(folder)
    if problem:
        log_rank0(f"{folder} is not complete and is skipped: {problem}", logging.WARNING)
    return bool(problem)


def _nothing(set_to_none: bool = True) -> None:
    """Do nothing: ``zero_grad`` in a window that DeepSpeedStrategy carries over an epoch's end."""


def remove_once_replaced(original: Original, self: Strategy, filepath: str | Path) -> None:
    """Wraps ``Strategy.remove_checkpoint``: removes an old folder once the new one is complete,
    after a rename.
    """
    folder = Path(filepath)
    if not is_engine(self.model) or not folder.is_dir() or folder.is_symlink():
        original(self, filepath)
    elif self.is_global_zero:
        after_commit(folder.parent, lambda: remove([folder]))


def end_with_complete(original: Original, self: Strategy) -> None:
    """Wraps ``Strategy.on_train_end``: waits until the last checkpoint is complete."""
    if is_engine(self.model):
        self.model.wait_for_checkpoint()
    original(self)


def leave_weights_in_shards(
    original: Callable[[Strategy], dict[str, object]], self: Strategy
) -> dict[str, object]:
    """Wraps ``Strategy.lightning_module_state_dict``: returns an empty dict under
    DeepSpeedStrategy, which drops the weights from its checkpoints anyway.
    """
    return {} if is_engine(self.model) else original(self)
