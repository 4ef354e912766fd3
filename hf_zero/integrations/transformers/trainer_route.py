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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hf_zero.config.provenance import flattened, value_at
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers.trainer_config import refuse_contradictions
from hf_zero.logging import logger

SWITCH = "ACCELERATE_USE_DEEPSPEED"
ON_CPU = "ACCELERATE_USE_CPU"
CALLBACK = "_hf_zero_callback"
BORROWED = "_hf_zero_callback_plugin"


def under_zero(trainer: Any) -> bool:
    """Return whether this Trainer trains through hf-zero."""
    return bool(getattr(trainer, "is_deepspeed_enabled", False)) and finder.chosen()


def find_callback(
    constructor: Callable[..., None], trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
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
    found = [
        callback
        for callback in callbacks
        if ours is not None and isinstance(callback, ours.ZeroCallback)
    ]
    if len(found) > 1:
        raise ConfigError(f"{len(found)} ZeroCallbacks in the callbacks of one Trainer; keep one")
    return found[0] if found else None


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


def engine_environment(args: Any) -> dict[str, str]:
    """Return the variables that make the engine compute on the device of Accelerate's batches: on
    the CPU, even if a GPU is visible.
    """
    return {ON_CPU: "true"} if args.device.type == "cpu" else {}


@contextmanager
def route(trainer: Any) -> Iterator[bool]:
    """Add the plugin and variables that make the Trainer's Accelerator use ZeRO, inside the
    context. Yields whether ZeRO was requested.
    """
    args, callback = trainer.args, getattr(trainer, CALLBACK, None)
    config = callback.config if callback is not None else None
    if config is None or args.deepspeed_plugin is not None:
        if config is not None:
            agree(config, args)
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


def agree(config: dict[str, Any], args: Any) -> None:
    """Raise ConfigError if the callback's config differs from that of the arguments."""
    theirs = args.deepspeed_plugin.hf_ds_config.config
    differing = [
        f"{path}: {given!r} in ZeroCallback, {other!r} in the arguments"
        for path, given in flattened(config)
        if not isinstance(given, Mapping)
        and (other := value_at(theirs, path)) != given
        and "auto" not in (given, other)
    ]
    if differing:
        raise ConfigError(
            "ZeroCallback and the training arguments disagree ("
            + "; ".join(differing)
            + "); give the ZeRO config in one place"
        )


def _left_by_callback() -> bool:
    from accelerate.state import AcceleratorState

    return getattr(AcceleratorState._shared_state.get("deepspeed_plugins"), BORROWED, False)


def renew_devices(args: Any) -> None:
    """Make the arguments read ranks and devices again: their cached values are of another Trainer's
    state.
    """
    args.__dict__.pop("_setup_devices", None)
    _ = args._setup_devices


def verify(trainer: Any) -> None:
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


def state_kind(trainer: Any) -> Any:
    """Return the current distributed type of Accelerate's shared state; None if there is no
    state.
    """
    return getattr(trainer.accelerator.state, "distributed_type", None)


def verify_state(trainer: Any) -> None:
    """Raise ConfigError if another Trainer has replaced the shared state since this one was
    made.
    """
    from accelerate.utils import DistributedType

    if trainer.is_deepspeed_enabled != (state_kind(trainer) == DistributedType.DEEPSPEED):
        raise ConfigError(
            f"the Accelerate state of this process is {state_kind(trainer)} by now, which is not "
            "that of this Trainer: training arguments, a Trainer or an "
            "Accelerator made after it replaced the state. Use one Trainer to its end, then make "
            "the arguments of the next"
        )


def _one_device(args: Any) -> None:
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
