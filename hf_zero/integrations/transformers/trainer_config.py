"""ZeRO config of a Trainer: its reading, and its completion from the training arguments.

Transformers fills a value from its arguments only if the config says "auto". A config without
``gradient_clipping`` would thus disable ``max_grad_norm``, one without batch sizes would leave the
engine without any, and one without a precision would cast the inputs to a dtype other than the
model's. Here a missing key means "as in the arguments", on every route from a Trainer;
contradictions are reported with both values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.provenance import DICT, SourcedDict, value_at
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.logging import log_rank0

ZeroConfigLike = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str]

AUTO = "auto"
SAVE_WEIGHTS = "stage3_gather_16bit_weights_on_model_save"

FROM_ARGUMENTS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

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


def read(value: ZeroConfigLike) -> dict[str, Any]:
    """Return the config in DeepSpeed's dialect, with only the written values.

    Raises ConfigError for an invalid config.
    """
    return ZeroConfig.coerce(value, allow_auto=True, foreign=True).to_dict()


def open_left_out(config: dict[str, Any]) -> list[str]:
    """Write "auto", in place, for keys that ``config`` leaves to the training arguments; return
    their paths.
    """
    opened = []

    def open_key(section: dict[str, Any], path: str, value: Any = AUTO) -> None:
        key = path.rpartition(".")[2]
        if section.get(key) is None:
            section[key] = value
            opened.append(path)

    for key in FROM_ARGUMENTS:
        open_key(config, key)
    for precision, other in (("bf16", "fp16"), ("fp16", "bf16")):
        config[precision] = dict(config.get(precision) or {})
        # if the other precision is enabled, this one is off rather than "auto"
        chosen = (config.get(other) or {}).get("enabled") is True
        open_key(config[precision], f"{precision}.enabled", False if chosen else AUTO)
    for name, known in (("optimizer", _optimizer_params), ("scheduler", _schedule_params)):
        section = config.get(name)
        if section:
            params = section["params"] = dict(section.get("params") or {})
            for key in known(section.get("type")):
                open_key(params, f"{name}.params.{key}")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") == 3:
        # Checkpoints of a Trainer then hold weights that from_pretrained loads; with false they
        # hold only the shards.
        open_key(zero, f"zero_optimization.{SAVE_WEIGHTS}", True)
    return opened


def _optimizer_params(kind: Any) -> tuple[str, ...]:
    return OPTIMIZER_PARAMS.get(str(kind).lower(), OTHER_OPTIMIZER)


def _schedule_params(kind: Any) -> tuple[str, ...]:
    return SCHEDULE_PARAMS.get(str(kind), ())


def fill_from_arguments(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``HfTrainerDeepSpeedConfig.trainer_config_process``: fills missing keys from the
    training arguments.
    """

    def trainer_config_process(self: Any, args: Any, auto_find_batch_size: bool = False) -> None:
        if not finder.chosen():
            original(self, args, auto_find_batch_size)
            return
        refuse_full_eval(self.config, args)
        self.config = SourcedDict.of(self.config, DICT)
        self.config.filler = "the training arguments"
        opened = open_left_out(self.config)
        original(self, args, auto_find_batch_size)
        if not any((args.fp16, args.bf16, args.fp16_full_eval, args.bf16_full_eval)):
            # The flags are off unless given, and --bf16 is refused on a CPU: a precision in the
            # config alone is not a contradiction.
            self.mismatches = [
                line
                for line in self.mismatches
                if not line.startswith(("- ds bf16.enabled=True", "- ds fp16.enabled=True"))
            ]
        filled = ", ".join(
            f"{path} = {value}" for path in opened if (value := value_at(self.config, path)) != AUTO
        )
        if filled:
            log_rank0(f"from the training arguments, as the ZeRO config leaves it out: {filled}")

    return trainer_config_process


def refuse_full_eval(config: Mapping[str, Any], args: Any) -> None:
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


def refuse_contradictions(live: Any) -> None:
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
