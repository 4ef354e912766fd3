"""Routing of a single Trainer to ZeRO, with a check that it succeeded.

[Note: routing a stock Trainer]
A callback never receives the Trainer, and the Accelerator exists before its first event. So the
wrapper of ``Trainer.__init__`` looks for a :class:`ZeroCallback` among the arguments, and while the
Accelerator is made the training arguments carry a DeepSpeed plugin and the environment has
``ACCELERATE_USE_DEEPSPEED``. Both are reverted immediately, because the environment and the
arguments may serve another, plain Trainer.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers.trainer_config import agree, refuse_contradictions
from hf_zero.logging import logger

if TYPE_CHECKING:
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_zero.deepspeed.engine import DeepSpeedEngine

SWITCH = "ACCELERATE_USE_DEEPSPEED"
ON_CPU = "ACCELERATE_USE_CPU"
CALLBACK = "_hf_zero_callback"
BORROWED = "_hf_zero_callback_plugin"


def under_zero(trainer: object) -> bool:
    """Return whether this Trainer trains through hf-zero."""
    return bool(getattr(trainer, "is_deepspeed_enabled", False)) and finder.chosen()


def process_under_zero() -> bool:
    """Return whether the Accelerator of this process trains through hf-zero."""
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state.get("distributed_type") == "DEEPSPEED" and finder.chosen()


def engine_of(trainer: Trainer) -> DeepSpeedEngine | None:
    """Return the engine that trains ``trainer``; None without ZeRO, and before it is made."""
    return trainer.deepspeed if under_zero(trainer) else None


def output_folder(args: TrainingArguments) -> Path:
    """Return ``output_dir``, for which the arguments have a default."""
    assert args.output_dir is not None
    return Path(args.output_dir)


def find_callback(
    constructor: Callable[..., None],
    trainer: Trainer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> TrainerCallback | None:
    """Return the :class:`ZeroCallback` among the arguments of ``Trainer.__init__``, or None. Raises
    ConfigError for several.
    """
    try:
        callbacks = (
            inspect.signature(constructor).bind(trainer, *args, **kwargs).arguments.get("callbacks")
            or ()
        )
    except TypeError:
        return None  # the constructor itself raises a more specific error
    # if the module is not imported, there is no ZeroCallback
    ours = sys.modules.get("hf_zero.integrations.transformers.zero_callback")
    zero_callbacks = [c for c in callbacks if ours is not None and isinstance(c, ours.ZeroCallback)]
    if len(zero_callbacks) > 1:
        raise ConfigError(
            f"{len(zero_callbacks)} ZeroCallbacks in the callbacks of one Trainer; keep one"
        )
    return zero_callbacks[0] if zero_callbacks else None


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """Set environment variables inside the context.

    Changes made inside do not leak: Accelerate leaves its switch on, and a later, plain Trainer
    would obey it.
    """
    before = {name: os.environ.get(name) for name in (SWITCH, ON_CPU)}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_environment(args: TrainingArguments) -> dict[str, str]:
    """Return the variables that make the engine compute on the device of Accelerate's batches: on
    the CPU, even if a GPU is visible.
    """
    return {ON_CPU: "true"} if args.device.type == "cpu" else {}


@contextmanager
def route(trainer: Trainer) -> Iterator[bool]:
    """Add the plugin and variables that make the Trainer's Accelerator use ZeRO, inside the
    context. Yields whether ZeRO was requested.
    """
    args, callback = trainer.args, getattr(trainer, CALLBACK, None)
    config = callback.config if callback is not None else None
    if config is None or args.deepspeed_plugin is not None:
        if config is not None:
            agree(config, args.deepspeed_plugin)
        elif args.deepspeed_plugin is None and _left_by_callback():
            renew_devices(args)
        yield args.deepspeed_plugin is not None or callback is not None
        return
    finder.choose()
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import (
        HfTrainerDeepSpeedConfig,
        unset_hf_deepspeed_config,
    )

    os.environ[SWITCH] = "true"
    renew_devices(args)
    live = HfTrainerDeepSpeedConfig(config)
    live.trainer_config_process(args)
    refuse_contradictions(live)
    plugin = DeepSpeedPlugin(hf_ds_config=live)
    setattr(plugin, BORROWED, True)
    args.deepspeed_plugin, args.hf_deepspeed_config = plugin, live
    try:
        yield True
    finally:
        args.deepspeed_plugin = None
        del args.hf_deepspeed_config
        # from_pretrained must load whole models again: another model in this process may be for a
        # plain Trainer.
        unset_hf_deepspeed_config()


def _left_by_callback() -> bool:
    from accelerate.state import AcceleratorState

    return getattr(AcceleratorState._shared_state.get("deepspeed_plugins"), BORROWED, False)


def renew_devices(args: TrainingArguments) -> None:
    """Make the arguments read ranks and devices again: another Trainer's were cached."""
    args.__dict__.pop("_setup_devices", None)
    _ = args._setup_devices


def verify(trainer: Trainer) -> None:
    """Raise ConfigError unless this Trainer's Accelerator is a ZeRO one: nothing may train
    unsharded silently. Accelerate's state checks the number of ranks.
    """
    finder.choose()
    if not trainer.is_deepspeed_enabled:
        raise ConfigError(
            "a ZeRO config was given, but the Accelerate state of this process is "
            f"{state_kind(trainer)} and the Trainer would train unsharded; "
            "make the training arguments and the Trainer before any other Accelerator"
        )
    verify_state(trainer)
    _one_device(trainer.args)


def state_kind(trainer: Trainer) -> DistributedType | None:
    """Return the distributed type of Accelerate's shared state; None if there is no state."""
    return getattr(trainer.accelerator.state, "distributed_type", None)


def verify_state(trainer: Trainer) -> None:
    """Raise ConfigError if another Trainer has replaced the shared state since this was made."""
    from accelerate.utils import DistributedType

    if trainer.is_deepspeed_enabled != (state_kind(trainer) == DistributedType.DEEPSPEED):
        raise ConfigError(
            f"the Accelerate state of this process is {state_kind(trainer)} by now, which is not "
            "that of this Trainer: training arguments, a Trainer or an Accelerator made after it "
            "replaced the state. Use one Trainer to its end, then make the arguments of the next"
        )


def _one_device(args: TrainingArguments) -> None:
    # nn.DataParallel would use all visible GPUs, unsharded.
    if args.n_gpu > 1:
        logger.warning(
            "%d GPUs are visible to one process; under ZeRO it uses %s. For all of them: "
            "accelerate launch --num_processes %d",
            args.n_gpu,
            args.device,
            args.n_gpu,
        )
        args._n_gpu = 1
