"""The request of one call of ``hf_zero.initialize``: its arguments, read and compared with each
other before ranks meet.
"""

from __future__ import annotations

import functools
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.config.variables import warn_once as warn_of_variables
from hf_zero.device.kinds import device_count
from hf_zero.distributed import process_group
from hf_zero.distributed.rendezvous import announce
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.optim.build import build_optimizer, refused
from hf_zero.zero.feature import early
from hf_zero.zero.layout.walk import StagedModel, named_modules_of

E = TypeVar("E", bound=Engine)
# wrappers of torch, by name, because FSDP takes time to import
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


@dataclass(frozen=True, eq=False)
class SetupRequest(Generic[E]):
    """The arguments of one call of :func:`hf_zero.initialize`, which explains them, with the
    configuration read, and the class of the engine. ``takes_over``: a function of the model that
    ends engines of it before this one begins.
    """

    engine_class: type[E]
    model: nn.Module
    config: ZeroConfig
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None
    model_parameters: tuple[object, ...] | None = None
    training_data: object = None
    lr_scheduler: object = None
    distributed_port: int | None = None
    mpu: object = None
    dist_init_required: bool | None = None
    collate_fn: Callable[[object], object] | None = None
    resume: str | os.PathLike[str] | None = None
    takes_over: Callable[[nn.Module], None] | None = None

    @classmethod
    def read(
        cls,
        engine_class: type[E],
        *,
        args: object,
        model: Any,
        config: object,
        config_params: object,
        model_parameters: Iterable[Any] | None,
        **others: Any,
    ) -> SetupRequest[E]:
        """Return the request of a call with these arguments. Raises ConfigError for those that
        contradict each other, LaunchError for variables of the launcher.
        """
        if isinstance(args, nn.Module):  # initialize(model, "zero3")
            args, model, config = None, args, _second(model, config)
        if not isinstance(model, nn.Module):
            raise _no_model(args if isinstance(args, str) else model)
        _refuse_wrapped(model)
        settings = configuration(args, config, config_params)
        groups = None if model_parameters is None else _groups(model_parameters)
        request = cls(engine_class, model, settings, model_parameters=groups, **others)
        request._check()
        trains = not (request.optimizer is None and groups is None and settings.optimizer is None)
        for feature_class in early().values():
            feature_class.check_request(settings, trains)
        return request

    @property
    def user_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer object of the script; None if this call makes the optimizer, or none."""
        return self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None

    def _check(self) -> None:
        """Raise ConfigError for arguments that contradict the configuration."""
        config, optimizer, scheduler = self.config, self.optimizer, self.lr_scheduler
        warn_of_variables()
        _warn_other_devices()
        if self.dist_init_required is False and not process_group.is_initialized():
            raise ConfigError(
                "dist_init_required=False but no process group exists; call "
                "hf_zero.init_distributed() first or drop the argument"
            )
        if optimizer is not None and self.user_optimizer is None and not callable(optimizer):
            raise ConfigError(
                f"optimizer is {reprlib.repr(optimizer)} ({type(optimizer).__name__}); pass a "
                "torch.optim.Optimizer, or a callable that makes one from parameters"
            )
        if optimizer is not None and config.optimizer is not None:
            passed = "a callable optimizer"
            if self.user_optimizer is not None:
                passed = f"an optimizer object ({type(optimizer).__name__})"
            raise ConfigError(
                f"both {passed} and config optimizer {config.optimizer.type!r} are given; keep one"
            )
        if scheduler is not None and config.scheduler is not None:
            raise ConfigError(
                f"both lr_scheduler ({type(scheduler).__name__}) and config scheduler "
                f"{config.scheduler.type!r} are given; keep one"
            )
        if isinstance(scheduler, type) and hasattr(scheduler, "step"):
            raise ConfigError(
                f"lr_scheduler is the class {scheduler.__name__}; pass a scheduler, or a callable "
                f"that makes one: lambda optimizer: {scheduler.__name__}(optimizer, …)"
            )
        if optimizer is not None or config.optimizer is not None:
            self._check_scheduled()

    def _check_scheduled(self) -> None:
        """Raise ConfigError for a scheduler of another optimizer over the model, whose learning
        rates the engine's updates would not use.
        """
        scheduled = getattr(self.lr_scheduler, "optimizer", None)
        groups = getattr(scheduled, "param_groups", ())
        # a wrapper of the optimizer shares its groups
        used = {id(group) for group in getattr(self.user_optimizer, "param_groups", ())}
        if any(id(group) in used for group in groups):
            return
        trained = {id(parameter) for parameter in self.model.parameters()}
        if any(id(parameter) in trained for group in groups for parameter in group["params"]):
            name = type(self.lr_scheduler).__name__
            raise ConfigError(
                f"lr_scheduler ({name}) schedules another optimizer ({type(scheduled).__name__}) "
                "than the engine's, whose learning rate it would not change; pass a scheduler of "
                "the optimizer that is passed, or a callable: "
                f"lambda optimizer: {name}(optimizer, …)"
            )

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer over the present parameters of the model: the script's object, or a
        new one of its callable or of the configuration; None without any of them.
        """
        if self.user_optimizer is not None:
            return self.user_optimizer
        config, model = self.config.optimizer, self.model
        parameters = list(self.model_parameters or ())
        if self.model_parameters is None:
            parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters and isinstance(model, StagedModel):
            parameters = list(model.parameters())  # a stage that is frozen steps with the others
        if self.optimizer is not None:
            make: Any = self.optimizer
            optimizer: Any = make(parameters)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"the callable optimizer returned a {type(optimizer).__name__}; it must return "
                    "a torch.optim.Optimizer"
                )
            return optimizer
        if config is None:
            return None
        if not parameters:
            frozen = "no parameter of the model requires grad; unfreeze some"
            why = "model_parameters is empty; pass some" if self.model_parameters == () else frozen
            raise ConfigError(f"the config names an optimizer but {why}, or remove the optimizer")
        return build_optimizer(config, parameters, model)

    def make_scheduler(self, settings: ZeroConfig, optimizer: Any) -> Any:
        """Return the script's scheduler, or a new one over ``optimizer`` of its callable or of
        ``settings``; None without any of them.
        """
        scheduler = self.lr_scheduler
        if scheduler is None:
            if settings.scheduler is None or optimizer is None:
                return None
            return provided("build_scheduler")(settings.scheduler, optimizer)
        if callable(scheduler) and not hasattr(scheduler, "step"):
            if optimizer is None:
                raise ConfigError(
                    "lr_scheduler is a callable, and no optimizer is given or configured that it "
                    "could schedule; pass optimizer=, or leave lr_scheduler out"
                )
            scheduler = scheduler(optimizer)
        if not hasattr(scheduler, "step"):
            raise ConfigError(
                f"lr_scheduler gives {reprlib.repr(scheduler)}, which has no step(); pass a "
                "scheduler, or a callable that makes one from the optimizer"
            )
        return scheduler


def configuration(
    args: object, config: object, config_params: object, foreign: bool = False
) -> ZeroConfig:
    """Return the configuration that one of these arguments of :func:`initialize` holds; ``foreign``
    as for :meth:`ZeroConfig.from_dict`. Raises ConfigError for none, and for several that differ.
    """
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),  # old name
    }
    sources = [(name, value) for name, value in given.items() if value is not None]
    if not sources:
        raise ConfigError(
            "initialize needs a config: pass config= (a ZeroConfig, dict, path or preset name), or "
            "args with deepspeed_config"
        )
    if len(sources) > 1 and any(value != sources[0][1] for _, value in sources[1:]):
        raise ConfigError(
            "initialize was given more than one config: "
            f"{', '.join(name for name, _ in sources)}; pass one"
        )
    # of a script for DeepSpeed, what nothing fills in takes its default
    autos: Any = True if foreign else "alone"
    return ZeroConfig.coerce(sources[0][1], allow_auto=autos, foreign=foreign, check=refused)


def _groups(given: Any) -> tuple[object, ...]:
    """Return the items of ``model_parameters``, those of a group in a list: each attempt to build
    an optimizer reads them. Raises ConfigError for what no optimizer takes.
    """
    alone = isinstance(given, (torch.Tensor, nn.Module, dict)) or not isinstance(given, Iterable)
    items = (given,) if alone else tuple(given)
    for item in items:
        group = isinstance(item, dict) and "params" in item
        if alone or not (group or isinstance(item, (torch.Tensor, tuple))):
            raise ConfigError(
                f"model_parameters of type {type(item).__name__} make no optimizer; pass "
                'model.parameters(), or a list of groups such as {"params": model.parameters()}'
            )
        if group and isinstance(item["params"], Iterator):
            item["params"] = list(item["params"])
    return items


def _no_model(value: object) -> ConfigError:
    what = "" if value is None else f"Module, not a {type(value).__name__}"
    load = ""
    if isinstance(value, str):
        what = f"Module, not {value!r}"
        load = f", such as AutoModel.from_pretrained({value!r})"
    return ConfigError(f"initialize needs model={what}; pass the torch.nn.Module to train{load}")


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a wrapper of torch in ``model``, which reduces gradients (DDP), shards
    parameters (FSDP), copies the model to devices (DataParallel) or holds tensors outside Python
    (TorchScript) besides the engine.
    """
    for name, module in named_modules_of(model):
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is compiled by torch.jit, which holds parameters and "
                "buffers outside Python, where hf-zero cannot replace them; pass the module as it "
                "was before torch.jit.script or torch.jit.trace"
            )
        for cls in type(module).__mro__:
            if cls.__name__ in WRAPPERS and cls.__module__.startswith("torch."):
                raise ConfigError(
                    f"{name or 'the model'} is wrapped in {cls.__name__}, and hf-zero reduces "
                    "gradients and shards by itself; pass the module without that wrapper"
                )


def _second(second: object, config: object) -> object:
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
def _warn_other_devices() -> None:
    """Warn once that this process trains alone although it sees accelerators that are not used."""
    devices = device_count()
    if devices > 1 and not process_group.is_initialized() and announce() is None:
        logger.warning(
            "one process trains on one of %d devices that it sees, as no launcher has started it: "
            "`hf-zero launch %s` or torchrun starts a rank on each; CUDA_VISIBLE_DEVICES=0 says "
            "that one is meant",
            devices,
            Path(sys.argv[0]).name or "train.py",
        )


def refuse_other_deepspeed() -> None:
    """Raise ConfigError for another deepspeed: two engines would each own half of a training."""
    module = sys.modules.get("deepspeed")
    where = getattr(module, "__file__", None)
    if where and not Path(where).resolve().is_relative_to(Path(hf_zero.__file__).resolve().parent):
        raise ConfigError(
            f"another deepspeed is imported in this process ({where}), and Accelerate and "
            "Transformers would train with it; "
            "set HF_ZERO_BACKEND=hf_zero before the start, or uninstall it"
        )
