"""Options of ``accelerate launch`` and ``hf-zero launch``, which a rank finds in its environment,
compared with the configuration that trains.
"""

from __future__ import annotations

import json
import os

from hf_zero.config.refusals import STAGE
from hf_zero.config.sourced import flattened, merge
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, logger

LAUNCH_FILE = "HF_ZERO_LAUNCH_FILE"  # the configuration file given to accelerate launch
LAUNCHED_BY = "HF_ZERO_LAUNCHED_BY"  # `hf-zero launch`, with its options that name a configuration
# keys of the launch that Accelerate does not pass on to the ranks, as JSON
WRITTEN = "HF_ZERO_WRITTEN_KEYS"
OWN = "hf-zero launch"
PRECISION = "precision"
OFFLOAD = ("offload_optimizer", "offload_param")
FILE, VARIABLES = "ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_"


def launch_command() -> str | None:
    """Return the launch that named a ZeRO configuration, None if none did."""
    file, stage = os.environ.get(LAUNCH_FILE), os.environ.get(f"{VARIABLES}ZERO_STAGE")
    if not (file or stage or os.environ.get(FILE)):
        return None
    return os.environ.get(LAUNCHED_BY) or (
        f"accelerate launch --config_file {file}" if file else "accelerate launch"
    )


def names_no_stage() -> bool:
    """Return whether ``hf-zero launch`` started this process, without options that name a stage."""
    return os.environ.get(LAUNCHED_BY) == OWN


def launched_values() -> dict[str, object]:
    """Return stage, precision and offload as the launcher's variables name them, by key."""
    named = os.environ.get(FILE, "none")
    if named != "none":
        config = ZeroConfig.coerce(named, allow_auto=True, foreign=True)
        values: JsonObject = {STAGE: config.stage}
        values |= {name: getattr(config, name).device for name in OFFLOAD}
        precision: str | None = config.precision if config.precision != "fp32" else None
    else:
        stage = os.environ.get(f"{VARIABLES}ZERO_STAGE")
        values = {STAGE: int(stage)} if stage else {}
        values |= {
            name: device
            for name in OFFLOAD
            if (device := os.environ.get(f"{VARIABLES}{name.upper()}_DEVICE"))
        }
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
        if precision == "no":  # what accelerate launch writes, too, if nobody names a precision
            was_chosen = "--precision" in os.environ.get(LAUNCHED_BY, "")
            precision = "fp32" if was_chosen else None
    return values | ({PRECISION: precision} if precision else {}) | _passed_on(values.get(STAGE, 0))


def _passed_on(stage: int) -> dict[str, object]:
    """Return the values of the keys that the launch passes on to the ranks in ``WRITTEN``."""
    written = json.loads(os.environ.get(WRITTEN, "{}"))
    if not written:
        return {}
    named = {path for path, _ in flattened(written)}
    whole = merge({"zero_optimization": {"stage": stage}}, written)
    config = ZeroConfig.from_dict(whole, allow_auto=True, foreign=True)
    values = {name: value for name, value in _values(config).items() if name in named}
    values |= {
        name: getattr(config, name).device
        for name in OFFLOAD
        if f"zero_optimization.{name}.device" in named
    }
    return {path: value for path, value in values.items() if value != "auto"}


def _values(config: ZeroConfig) -> dict[str, object]:
    return {row.key: row.value for row in config.explain()}


def check_launch(config: ZeroConfig) -> None:
    """Compare ``config``, with which a training begins, with the options of the launch.

    Raises ConfigError where ``hf-zero launch`` named another stage, precision or offload, or
    another value of a key of --set or of a YAML, which would be ignored. For ``accelerate launch``,
    whose options scripts written for DeepSpeed replace by a file of their own, a warning says so.
    """
    command = launch_command()
    if command is None:
        return
    own_values: dict[str, object] = {STAGE: config.stage, PRECISION: config.precision}
    own_values |= {name: getattr(config, name).device for name in OFFLOAD}
    launched = launched_values()
    if launched.keys() - own_values.keys():
        own_values = dict.fromkeys(launched) | _values(config) | own_values
    differing = [
        f"{name} {value} (the script: {own_values[name]}{_source(config, name)})"
        for name, value in launched.items()
        if own_values[name] != value
    ]
    if not differing:
        return
    text = (
        f"`{command}` asks for {', '.join(differing)}, and the script's own configuration is the "
        "one that trains; name it in one place: "
    )
    options = "--preset, --precision and --set" if "--preset" in command else "the configuration"
    text += f"leave {options} out of the command, or write the same values in the script"
    if command.startswith(OWN):
        raise ConfigError(text)
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text)


def _source(config: ZeroConfig, name: str) -> str:
    sources = config.sources
    key = {
        PRECISION: f"{config.precision}.enabled",
        **{section: f"{section}.device" for section in OFFLOAD},
    }.get(name, name)
    source = sources.get(key, "default")
    return "" if source == "default" else f", {source}"
