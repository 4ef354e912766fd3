"""``FabricStrategy``: the loop of ``lightning.fabric.Fabric`` on hf-zero's engine;
``Fabric(strategy="zero_stage_3")`` needs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from hf_zero.config.resolving import ACCUMULATION, MICRO, NO_BATCH_SIZE, TOTAL
from hf_zero.deepspeed.zero_init import Init
from hf_zero.distributed import process_group
from hf_zero.distributed.parallel_groups import readers
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.initialize import initialize
from hf_zero.integrations import finder
from hf_zero.integrations.engine_protocol import EngineProtocol, is_engine
from hf_zero.integrations.lightning.precision import PrecisionMethods, step_if_due
from hf_zero.integrations.lightning.settings import KINDS, precision_values, read
from hf_zero.integrations.lightning.strategy import TAG
from hf_zero.integrations.transformers.loading import made_under
from hf_zero.zero.layout.tree import map_tensors

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.utilities.types import _PATH
    from torch.optim.lr_scheduler import LRScheduler

FABRIC = "Lightning's Fabric"  # a source of values of the configuration


class FabricPrecision(PrecisionMethods, Precision):  # type: ignore[misc]
    """Implementation of ``Fabric(precision=…)`` for engines, as :class:`PrecisionMethods` is of the
    Trainer's.
    """

    package = "lightning.fabric"
    caller, strategy = "Fabric", "FabricStrategy"

    def convert_output(self, data: object) -> object:
        """Return ``data`` with floating-point tensors in the default dtype, as Fabric's own mixed
        precision does.
        """
        dtype = torch.get_default_dtype()
        return map_tensors(data, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def forward_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return no context: an engine's weights have the dtype of the forward."""
        return nullcontext()

    def backward(
        self, tensor: torch.Tensor, model: object, *args: object, **kwargs: object
    ) -> None:
        raise NotImplementedError("FabricStrategy.backward gives the loss to an engine")


class FabricStrategy(DDPStrategy):  # type: ignore[misc]
    """Train with sharded parameters, gradients and optimizer state in the loop of Fabric, on CPU
    ranks (gloo) or GPUs (nccl).

    ``fabric.setup(model, optimizer)`` makes an engine, as :func:`hf_zero.initialize` does. Each
    ``optimizer.step()`` ends a window: it uses the gradients of all backwards since the last one.

    Args:
        config: a :class:`hf_zero.ZeroConfig`, dict, path, JSON text or preset ("zero0" … "zero3").
            Precision comes from Fabric; a different value in the configuration is an error.
        stage: the ZeRO stage if ``config`` names none; default: 3 without ``config``.
        exclude_frozen_parameters: leave frozen parameters out of checkpoints.
        accelerator, checkpoint_io, cluster_environment, parallel_devices, precision,
        process_group_backend, timeout: those of all of Fabric's strategies with ranks.

    Raises ConfigError for an unsupported call: a model with several optimizers, an optimizer that
    is set up without its model, clipping by value.
    """

    def __init__(
        self,
        config: object = None,
        stage: int | None = None,
        *,
        exclude_frozen_parameters: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        parallel_devices: list[torch.device] | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        finder.choose()
        self.zero_config = read(config, stage, "FabricStrategy")
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self.engines: list[EngineProtocol] = []
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io,
            cluster_environment=cluster_environment, parallel_devices=parallel_devices,
            precision=precision, process_group_backend=process_group_backend,
            timeout=timeout or timedelta(seconds=self.zero_config.timeout),
        )  # fmt: skip
        self._backward_sync_control = WindowControl()

    @property
    def precision(self) -> FabricPrecision:
        if self._precision is None:
            self._precision = FabricPrecision("32-true")
        assert isinstance(self._precision, FabricPrecision)
        return self._precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if not (precision is None or isinstance(precision, FabricPrecision)):
            raise ConfigError(
                f"{type(precision).__name__} cannot drive a ZeRO engine, which has precision of "
                f"its own; write Fabric(precision=...), one of {', '.join(KINDS)}"
            )
        self._precision = precision

    def setup_environment(self) -> None:
        process_group.choose_device(self.root_device)
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments for a DistributedSampler: tensor-parallel ranks read the same samples."""
        ranks, rank = readers()
        return {"num_replicas": ranks, "rank": rank}

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context of ``fabric.init_module``: at stage 3 models are read or built in shards, which
        have their initial values whatever ``empty_init`` says.
        """
        with ExitStack() as stack:
            if self.zero_config.stage < 3:
                stack.enter_context(super().module_init_context(empty_init))
            else:
                stack.enter_context(self.precision.module_init_context())
                stack.enter_context(made_under(self.zero_config))
                stack.enter_context(Init(config=self.zero_config))
            yield

    def setup_module_and_optimizers(  # type: ignore[override]
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: LRScheduler | None = None
    ) -> tuple[EngineProtocol, list[Optimizer], LRScheduler | None]:
        """Return the engine of ``module``, its optimizer in a list, and the scheduler, which the
        loop steps.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"fabric.setup got {len(optimizers)} optimizers for a model, and a ZeRO engine has "
                "one; give one optimizer parameter groups, or set up the parts as models of their "
                "own"
            )
        engine = self._engine(module, optimizers[0])
        assert engine.optimizer is not None
        return engine, [engine.optimizer], scheduler

    def setup_module(self, module: nn.Module) -> EngineProtocol:  # type: ignore[override]
        """Return an engine that evaluates ``module``; ``setup`` with an optimizer trains it."""
        return self._engine(module, None)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise ConfigError(
            "a ZeRO engine shards the optimizer with its model; write model, optimizer = "
            "fabric.setup(model, optimizer)"
        )

    def _engine(self, module: nn.Module, optimizer: Optimizer | None) -> EngineProtocol:
        config = self.zero_config
        if config.gradient_accumulation_steps not in (None, 1):
            raise ConfigError(
                f"{ACCUMULATION} = {config.gradient_accumulation_steps} in the ZeRO config, and a "
                "loop of Fabric accumulates itself: leave it out, and divide the loss"
            )
        values = precision_values(config, self.precision.precision, "Fabric")
        if "gradient_clipping" in config.autos:
            values["gradient_clipping"] = 0.0
        micro = config.train_micro_batch_size_per_gpu or 1
        settings = config.override(values, FABRIC).without(TOTAL)
        settings = settings.override({ACCUMULATION: 1, MICRO: micro}, NO_BATCH_SIZE)
        engine, _, _, _ = initialize(model=module, optimizer=optimizer, config=settings)
        engine.lr_scheduler = None  # the loop steps the scheduler
        engine.set_gradient_accumulation_boundary(True)
        self.engines.append(engine)
        return engine

    def _engine_of(self, part: nn.Module | Optimizer) -> EngineProtocol:
        """Return the engine that ``part`` is, or whose optimizer it is. Raises ConfigError."""
        for engine in self.engines:
            if part is engine or part is engine.optimizer:
                return engine
        raise ConfigError(
            f"a {type(part).__name__} was not set up under ZeRO; pass what fabric.setup(model, "
            "optimizer) has returned"
        )

    def module_to_device(self, module: nn.Module) -> None:
        """No-op: the engine moves its module, and at stage 3 no rank holds all of it."""

    def backward(
        self, tensor: torch.Tensor, module: nn.Module | None, *args: object, **kwargs: object
    ) -> None:
        """Give the loss to the engine ``module``; without one, to the only engine."""
        if args or kwargs.keys() - {"retain_graph"}:
            raise ConfigError(
                "fabric.backward gives a scalar loss to a ZeRO engine, and takes retain_graph alone"
            )
        engine: object = module
        if engine is None and len(self.engines) == 1:
            engine = self.engines[0]
        if not is_engine(engine):
            raise ConfigError(
                f"{len(self.engines)} models are set up, and each has an engine; write "
                "fabric.backward(loss, model=model) with the one that the loss trains"
            )
        engine.backward(tensor, bool(kwargs.get("retain_graph")), scale_wrt_gas=False)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, **kwargs: object
    ) -> object:
        """Step the engine of ``optimizer``, if a backward has left gradients; with ``closure``,
        after it. Returns the value of the closure.
        """
        engine = self._engine_of(optimizer)
        closure = kwargs.get("closure")
        result = closure() if callable(closure) else None
        step_if_due(engine)
        return result

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradient to ``max_norm``; return its norm before (collective). Raises
        ConfigError for another ``norm_type`` and a module that is no engine, RuntimeError for a
        norm that is not finite.
        """
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"clip_gradients(norm_type={norm_type}): a sharded gradient is clipped by its L2 "
                "norm; leave norm_type at 2"
            )
        engine = self._engine_of(module)
        if not engine.holds_gradients():
            return torch.zeros((), device=self.root_device)
        norm = engine.measure_gradient()
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradient is {norm.item()}; pass error_if_nonfinite=False to step "
                "nevertheless"
            )
        return engine.clip_gradient(float(max_norm))

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        raise ConfigError(
            f"clip_gradients(clip_val={clip_val}) is not built: a sharded gradient is clipped by "
            "its norm; pass max_norm"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, object]:
        return module.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, object], strict: bool = True
    ) -> None:
        module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, object],
        storage_options: object = None,
        filter: dict[str, Callable[[str, object], bool]] | None = None,
    ) -> None:
        """Write a folder with the shards of the engine in ``state`` and the rest of it
        (collective); without an engine in ``state``, a file.
        """
        engine = _engine_in(state, "fabric.save")
        if engine is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        for name, given in (("storage_options", storage_options), ("filter", filter)):
            if given is not None:
                raise ConfigError(
                    f"fabric.save({name}=...) is not used for a sharded checkpoint, which all "
                    "ranks write; leave it out"
                )
        parts = (engine, engine.optimizer)
        rest = {key: value for key, value in state.items() if not _is_one_of(value, parts)}
        client = self._convert_stateful_objects_in_state(rest, filter={})
        engine.save_checkpoint(
            str(self.broadcast(path)),
            TAG,
            client,
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        path: _PATH,
        state: nn.Module | Optimizer | dict[str, object] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, object]:
        """Load what ``save_checkpoint`` has written into ``state``, on any number of ranks and at
        any stage, and return what ``state`` does not name (collective).
        """
        engine = _engine_in(state, "fabric.load") if isinstance(state, dict) else None
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        if engine is None or not isinstance(state, dict):
            raise CheckpointError(
                f"{path} is the folder of a sharded checkpoint, and only a state with a model that "
                'was set up loads it: fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        parts = (engine, engine.optimizer)
        _, saved = engine.load_checkpoint(
            str(self.broadcast(path)),
            TAG,
            load_module_strict=strict,
            load_optimizer_states=any(value is engine.optimizer for value in state.values()),
            load_lr_scheduler_states=False,
        )
        names = [key for key, value in state.items() if not _is_one_of(value, parts)]
        _validate_keys_for_strict_loading(names, saved.keys(), strict=strict)
        for name in names:
            held = state[name]
            if name in saved and isinstance(held, _Stateful):
                held.load_state_dict(saved.pop(name))
            elif name in saved:
                state[name] = saved.pop(name)
        return saved


class WindowControl(_BackwardSyncControl):  # type: ignore[misc]
    """``fabric.no_backward_sync``: backwards inside do not end an accumulation window."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        if not is_engine(module):
            raise ConfigError(
                f"no_backward_sync got a {type(module).__name__}; pass the model that fabric.setup "
                "returned"
            )
        if enabled:
            module.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            module.set_gradient_accumulation_boundary(True)


def _engine_in(state: Mapping[str, object], call: str) -> EngineProtocol | None:
    """Return the engine among the values of ``state``, or None. Raises ConfigError for several."""
    engines = [value for value in state.values() if is_engine(value)]
    if len(engines) > 1:
        raise ConfigError(
            f"{call} got {len(engines)} models, and a sharded checkpoint has one; call it for "
            "each, with a path of its own"
        )
    return engines[0] if engines else None


def _is_one_of(value: object, parts: tuple[object, ...]) -> bool:
    return any(value is part for part in parts)
