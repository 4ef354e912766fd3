"""The ZeRO config of a Trainer, completed from the training arguments.

[Note: missing keys]
Transformers fills a value from its arguments only if the config says "auto". A config without
``gradient_clipping`` would thus disable ``max_grad_norm``, one without batch sizes would leave the
engine without any, and one without a precision would cast the inputs to a dtype other than the
model's. Here a missing key means "as in the arguments", on every route from a Trainer;
contradictions are reported with both values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_zero.config import ZeroConfig
from hf_zero.config.reading import AUTO
from hf_zero.config.resolving import BATCH, MICRO, TOTAL
from hf_zero.config.sourced import DICT, SourcedDict, flattened, value_at
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.seams import Original
from hf_zero.logging import JsonObject

if TYPE_CHECKING:
    from accelerate.utils import DeepSpeedPlugin
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig


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
