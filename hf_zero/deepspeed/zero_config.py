"""``deepspeed.runtime.config``: configurations under DeepSpeed's names, read by
:class:`hf_zero.ZeroConfig`, and what DeepSpeed reads in keys that are "auto" or not written.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import KEYS
from hf_zero.config.reading import AUTO
from hf_zero.config.sourced import FILES, shown
from hf_zero.config.value_types import Status, argument, number
from hf_zero.deepspeed.zero_sections import ZERO, DeepSpeedZeroConfig
from hf_zero.distributed import process_group
from hf_zero.logging import JsonObject, log_rank0
from hf_zero.measures.monitors import DeepSpeedMonitorConfig

if TYPE_CHECKING:
    from hf_zero.config.sections import OptimizerConfig, SchedulerConfig

WITHOUT_DEFAULT = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer.", "scheduler.",
)  # fmt: skip
PRECISIONS = ("bf16.enabled", "fp16.enabled")


class DeepSpeedConfig:
    """A configuration (dict, path or JSON text) resolved for the current number of ranks: batch
    sizes agree, and keys are attributes, also under DeepSpeed's names.

    Raises ConfigError for invalid keys and values.
    """

    def __init__(self, config: object, mpu: object = None, mesh_device: object = None) -> None:
        ranks = process_group.get_world_size()
        read = ZeroConfig.coerce(config, allow_auto=True, foreign=True)
        resolvable = without_autos(read)
        if takes_default_clipping(read, native=isinstance(config, ZeroConfig)):
            resolvable = clipped_by_default(resolvable)
        self.zero_config_native = resolved = resolvable.resolve(ranks)
        values = resolved.to_dict("default")
        self.world_size = ranks
        self._values: dict[str, object] = dict(values)
        self._named = {
            "monitor_config": DeepSpeedMonitorConfig.from_config(resolved),
            "zero_config": DeepSpeedZeroConfig(**values.get(ZERO, {})),
            "zero_enabled": resolved.stage > 0,
            "zero_optimization_stage": resolved.stage,
            "float16_enabled": resolved.precision == "fp16",
            "fp16_enabled": resolved.precision == "fp16",
            "bfloat16_enabled": resolved.precision == "bf16",
            "loss_scale": resolved.fp16.loss_scale,
            "optimizer_name": _type(resolved.optimizer),
            "optimizer_params": _params(resolved.optimizer),
            "scheduler_name": getattr(resolved.scheduler, "type", None),
            "scheduler_params": _params(resolved.scheduler),
            "train_batch_size": resolved.train_batch_size,
            "train_micro_batch_size_per_gpu": resolved.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": resolved.gradient_accumulation_steps,
            "gradient_clipping": resolved.gradient_clipping,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for values in (self._named, self._values):
            if name in values:
                return values[name]
        raise AttributeError(f"the configuration has no key {name!r}")

    def print(self, name: str = "DeepSpeedConfig") -> None:
        print(f"{name}:\n{self.zero_config_native.describe()}")


def _type(section: OptimizerConfig | None) -> str | None:
    return None if section is None else str(section.type).lower()


def _params(section: OptimizerConfig | SchedulerConfig | None) -> dict[str, object] | None:
    return None if section is None else dict(section.params)


def get_gradient_clipping(param_dict: JsonObject) -> float:
    """Return the norm to which this configuration clips gradients; 0.0: never. Raises ConfigError
    for what is no norm.
    """
    written = param_dict.get(GRADIENT_CLIPPING, AUTO)
    norm = GRADIENT_CLIPPING_DEFAULT if written == AUTO else written or 0.0
    return float(argument("get_gradient_clipping", GRADIENT_CLIPPING, number(0), norm))


def takes_default_clipping(config: ZeroConfig, native: bool) -> bool:
    """Return whether gradient_clipping takes DeepSpeed's default if ``config`` has no value for it.
    A ``native`` one, a ZeroConfig of the script, does not clip without the key, as in hf-zero.
    """
    return not native or GRADIENT_CLIPPING in config.autos


def clipped_by_default(config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` with DeepSpeed's default of gradient_clipping, if it sets none."""
    if config.sources.get(GRADIENT_CLIPPING, "default") != "default":
        return config
    values = {GRADIENT_CLIPPING: GRADIENT_CLIPPING_DEFAULT}
    return config.override(values, "default of DeepSpeed 0.19.8")


def without_autos(config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` with the default of each key that is "auto", as DeepSpeed reads it if no
    library has filled the key in. Batch sizes and the parameters of optimizers and schedulers stay
    "auto": they have no default in DeepSpeed either.
    """
    unset = [path for path in sorted(config.autos) if not path.startswith(WITHOUT_DEFAULT)]
    for path in unset:
        config = config.without(path)
    switches = [path for path in unset if path in PRECISIONS]
    if config.precision == "fp32" and switches:
        log_rank0(
            f'"auto" for {" and ".join(switches)}, which only the Trainer and Accelerate fill in, '
            "is read as false: an fp32 model trains in fp32; for mixed precision write "
            '"bf16": {"enabled": true}, or fp16',
            logging.WARNING,
        )
        unset = [path for path in unset if path not in PRECISIONS]
    # gradient_clipping has DeepSpeed's own default, of which its reader tells
    keys = {path: KEYS.get(path) or KEYS[path.rpartition(".")[0]] for path in unset}
    inert = [path for path, key in keys.items() if key.status is Status.INERT]
    taken = [
        f"{path} = {shown(KEYS[path].default, FILES[0])}" if path in KEYS else path
        for path in unset
        if path not in (*inert, GRADIENT_CLIPPING)
    ]
    if inert:
        taken.append(f"{', '.join(inert)} (no effect)")
    if taken:
        log_rank0(f'keys that are "auto" take their defaults: {", ".join(taken)}')
    return config


def get_log_level(param_dict: JsonObject) -> str | None:
    """Return the log level that this configuration names; None: unchanged."""
    return param_dict.get(LOG_LEVEL, LOG_LEVEL_DEFAULT)


GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = 1.0
LOG_LEVEL = "log_level"
LOG_LEVEL_DEFAULT: str | None = None
