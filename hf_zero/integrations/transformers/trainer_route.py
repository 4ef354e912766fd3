"""Routing of a single Trainer to ZeRO, with a check that it succeeded, and its ZeRO config,
completed from the training arguments.

[Note: routing a stock Trainer]
A callback never receives the Trainer, and the Accelerator exists before its first event. So the
wrapper of ``Trainer.__init__`` looks for a :class:`ZeroCallback` among the arguments, and while the
Accelerator is made the training arguments carry a DeepSpeed plugin and the environment has
``ACCELERATE_USE_DEEPSPEED``. Both are reverted immediately, because the environment and the
arguments may serve another, plain Trainer.

[Note: missing keys]
Transformers fills a value from its arguments only if the config says "auto". A config without
``gradient_clipping`` would thus disable ``max_grad_norm``, one without batch sizes would leave the
engine without any, and one without a precision would cast the inputs to a dtype other than the
model's. Here a missing key means "as in the arguments", on every route from a Trainer;
contradictions are reported with both values.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.config import ZeroConfig
from hf_zero.config.files import DICT, SourcedDict, flattened, value_at
from hf_zero.config.reading import AUTO
from hf_zero.config.resolving import BATCH, MICRO, TOTAL
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.seams import Original
from hf_zero.logging import JsonObject, logger

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin, DistributedType
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    from hf_zero.deepspeed.engine import DeepSpeedEngine

SWITCH = "ACCELERATE_USE_DEEPSPEED"
ON_CPU = "ACCELERATE_USE_CPU"
CALLBACK = "_hf_zero_callback"
BORROWED = "_hf_zero_callback_plugin"

ZeroConfigLike = ZeroConfig | Mapping[str, object] | str | os.PathLike[str]

SAVE_WEIGHTS = "stage3_gather_16bit_weights_on_model_save"

CLIPPING = "gradient_clipping"

FROM_ARGUMENTS = (*BATCH, CLIPPING)

# Hyper-parameters filled from the arguments, by optimizer and by schedule; others keep the defaults
# of their class.
ADAM = ("lr", "betas", "eps", "weight_decay")
OPTIMIZER_PARAMS = {"adam": ADAM, "adamw": ADAM}
OTHER_OPTIMIZER = ("lr", "weight_decay")
WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
SCHEDULE_PARAMS = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": (*WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}


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


def agree(config: dict[str, object], plugin: DeepSpeedPlugin) -> None:
    """Raise ConfigError if the callback's config differs from that of the arguments."""
    theirs = plugin.hf_ds_config.config
    differing = [
        f"{path}: {value!r} in ZeroCallback, {other!r} in the arguments"
        for path, value in flattened(config)
        if not isinstance(value, Mapping)
        and (other := value_at(theirs, path)) != value
        and "auto" not in (value, other)
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


def read(value: ZeroConfigLike) -> dict[str, object]:
    """Return the config in DeepSpeed's dialect, with only the written values.

    Raises ConfigError for an invalid config.
    """
    return ZeroConfig.coerce(value, allow_auto=True, foreign=True).to_dict()


def open_left_out(config: JsonObject) -> None:
    """Write "auto", in place, for keys that ``config`` leaves to the training arguments."""

    def open_key(section: dict[str, object], key: str, value: object = AUTO) -> None:
        if section.get(key) is None:
            section[key] = value

    for key in FROM_ARGUMENTS:
        open_key(config, key)
    for precision, other in (("bf16", "fp16"), ("fp16", "bf16")):
        config[precision] = dict(config.get(precision) or {})
        # if the other precision is enabled, this one is off rather than "auto"
        chosen = (config.get(other) or {}).get("enabled") is True
        open_key(config[precision], "enabled", False if chosen else AUTO)
    for name, parameters_of in (("optimizer", _optimizer_params), ("scheduler", _schedule_params)):
        section = config.get(name)
        if section:
            params = section["params"] = dict(section.get("params") or {})
            for key in parameters_of(section.get("type")):
                open_key(params, key)
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        # Checkpoints of a Trainer then hold weights that from_pretrained loads; with false they
        # hold only the shards.
        open_key(zero, SAVE_WEIGHTS, True)


def _optimizer_params(kind: object) -> tuple[str, ...]:
    return OPTIMIZER_PARAMS.get(str(kind).lower(), OTHER_OPTIMIZER)


def _schedule_params(kind: object) -> tuple[str, ...]:
    return SCHEDULE_PARAMS.get(str(kind), ())


def fill_from_arguments(
    original: Original,
    self: HfTrainerDeepSpeedConfig,
    args: TrainingArguments,
    auto_find_batch_size: bool = False,
) -> None:
    """Wraps ``HfTrainerDeepSpeedConfig.trainer_config_process``: fills missing keys from the
    training arguments.
    """
    if not finder.chosen():
        original(self, args, auto_find_batch_size)
        return
    refuse_full_eval(self.config, args)
    self.config = SourcedDict.wrap(self.config, DICT)
    self.config.filler = "the training arguments"
    open_left_out(self.config)
    if auto_find_batch_size:  # the sizes are those of an attempt with a larger batch
        self.config[MICRO] = self.config[TOTAL] = AUTO
    filled = self.config[CLIPPING] == AUTO
    original(self, args, auto_find_batch_size)
    if filled and args.max_grad_norm is not None and not 0.0 < args.max_grad_norm < math.inf:
        self.config[CLIPPING] = 0.0  # limits with which the plain Trainer does not clip
    if filled:  # the Trainer clips by its argument, which a callback may change
        from hf_zero.integrations.accelerate.open_values import FILLED_LIMIT

        setattr(self.config, FILLED_LIMIT, self.config[CLIPPING])
    if not any((args.fp16, args.bf16, args.fp16_full_eval, args.bf16_full_eval)):
        # The flags are off unless given, and --bf16 is refused on a CPU: a precision in the
        # config alone is not a contradiction.
        self.mismatches = [
            line
            for line in self.mismatches
            if not line.startswith(("- ds bf16.enabled=True", "- ds fp16.enabled=True"))
        ]


def refuse_full_eval(config: Mapping[str, object], args: object) -> None:
    """Raise ConfigError for an evaluation in a precision other than that of training, because
    Transformers would train in it too.
    """
    for kind in ("bf16", "fp16"):
        if (
            getattr(args, f"{kind}_full_eval")
            and not getattr(args, kind)
            and value_at(config, f"{kind}.enabled") is not True
        ):
            raise ConfigError(
                f"{kind}_full_eval=True without {kind}=True asks for an evaluation in another "
                "precision than training's, and the parameters "
                f"of a ZeRO engine have one; write {kind}=True (or {kind}.enabled: true in the "
                f"config), or leave {kind}_full_eval out"
            )


def refuse_contradictions(live: HfTrainerDeepSpeedConfig) -> None:
    """Raise ConfigError, before training starts, for contradictions that Transformers found while
    filling ``live``.
    """
    if live.mismatches:
        listed = "\n".join(
            line.replace("- ds ", "  zero_config: ").replace(" vs hf ", ", argument: ")
            for line in live.mismatches
        )
        raise ConfigError(
            f"zero_config contradicts the training arguments:\n{listed}\nchange one of the two, or "
            "leave it out of zero_config"
        )
