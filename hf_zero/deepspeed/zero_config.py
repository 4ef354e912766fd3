"""``deepspeed.runtime.config`` and ``deepspeed.runtime.zero.config``: configurations under
DeepSpeed's names, read by :class:`hf_zero.ZeroConfig`; names of keys and defaults that scripts
import.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from hf_zero.config import ZeroConfig
from hf_zero.config.files import FILES, shown
from hf_zero.config.keys import KEYS
from hf_zero.config.resolving import ELASTICITY, elastic_batch, elastic_sizes
from hf_zero.config.value_types import Status
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject, log_rank0
from hf_zero.measures.monitors import DeepSpeedMonitorConfig

if TYPE_CHECKING:
    from hf_zero.config.sections import OptimizerConfig, SchedulerConfig

ZERO = "zero_optimization"
WITHOUT_DEFAULT = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer.", "scheduler.",
)  # fmt: skip
PRECISIONS = ("bf16.enabled", "fp16.enabled")
TRUE_BY_DEFAULT = (
    "allgather_partitions", "contiguous_gradients", "load_from_fp32_weights",
    "memory_efficient_linear", "override_module_apply", "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
)  # fmt: skip
FALSE_BY_DEFAULT = (
    "elastic_checkpoint", "legacy_stage1", "log_trace_cache_warnings",
    "pipeline_loading_checkpoint", "round_robin_gradients", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "zero_quantized_weights",
)  # fmt: skip
DEFAULTS: dict[str, object] = {
    **dict.fromkeys(TRUE_BY_DEFAULT, True),
    **dict.fromkeys(FALSE_BY_DEFAULT, False),
    **dict.fromkeys(("allgather_bucket_size", "reduce_bucket_size"), 500_000_000),
    **dict.fromkeys(("sub_group_size", "stage3_max_reuse_distance"), 1_000_000_000),
    "ignore_unused_parameters": True,
    "mics_shard_size": -1,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "zero_hpz_partition_size": 1,
}
"""Values that DeepSpeed documents for keys of the section that are not written."""

ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"


class OffloadDeviceEnum(str, Enum):  # noqa: UP042  as DeepSpeed's own
    """The devices to offload to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042  as DeepSpeed's own
    """The kinds of state that ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(IntEnum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class _Section:
    """A section with its keys as attributes: those that were written, and defaults for others."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for spelled in (name, f"stage3_{name}", f"zero_{name}"):
            if spelled in self._values:
                return self._values[spelled]
        raise AttributeError(f"the section has no key {name!r}; it has {sorted(self._values)}")

    def model_dump(self) -> dict[str, object]:
        return dict(self._values)

    dict = model_dump


class _LeafModules(_Section):
    """The section ``leaf_module``: lists, even if a single name was written."""

    def __init__(self, values: Mapping[str, object]) -> None:
        options = {key: [item] if isinstance(item, str) else item for key, item in values.items()}
        defaults = {
            "classes": list(DEFAULT_LEAF_MODULE_CLASSES),
            "names": list(DEFAULT_LEAF_MODULE_NAMES),
            "name_suffixes": list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES),
        }
        super().__init__({**defaults, **options})


class DeepSpeedZeroConfig(_Section):
    """The section ``zero_optimization``: its keys are keyword arguments and attributes.

    Raises ConfigError for invalid keys and values.
    """

    def __init__(self, **values: Any) -> None:
        config = ZeroConfig.from_dict(
            {ZERO: {"stage": 0, **_plain(values)}}, allow_auto=True, foreign=True
        )
        section = config.to_dict()[ZERO]
        offload: dict[str, object] = {"offload_param": None, "offload_optimizer": None}
        if "offload_param" in section or values.get("offload_param") is not None:
            options = section.pop("offload_param", {})
            offload["offload_param"] = DeepSpeedZeroOffloadParamConfig(**options)
        if "offload_optimizer" in section or values.get("offload_optimizer") is not None:
            options = section.pop("offload_optimizer", {})
            offload["offload_optimizer"] = DeepSpeedZeroOffloadOptimizerConfig(**options)
        leaves = {"leaf_module": _LeafModules(values.get("leaf_module") or {})}
        whole = {**DEFAULTS, "overlap_comm": config.stage == 3, **section, **offload, **leaves}
        super().__init__({**whole, "stage": ZeroStageEnum(config.stage)})


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    def __init__(self, **values: object) -> None:
        super().__init__(_offload("offload_param", values))


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    def __init__(self, **values: object) -> None:
        section = _offload("offload_optimizer", values)
        pipelined = bool(values.get("pipeline_read") or values.get("pipeline_write"))
        super().__init__({**section, "pipeline": pipelined})


def _offload(name: str, values: Mapping[str, object]) -> dict[str, object]:
    document = {ZERO: {"stage": 3, name: _plain(values)}}
    config = ZeroConfig.from_dict(document, allow_auto=True, foreign=True).to_dict("default")
    section: dict[str, object] = config[ZERO].get(name, {})
    return {**section, "device": OffloadDeviceEnum(section.get("device") or "none")}


def _plain(value: object) -> Any:
    """Return ``value`` with sections as dicts and enums as their values."""
    if isinstance(value, _Section):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value


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
    """Return the norm to which this configuration clips gradients; 0.0: never."""
    return float(param_dict.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT) or 0.0)


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
ROUTE_EVAL = "eval"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
PARTITIONED_SHAPE = [0]
"""The shape that DeepSpeed gives a parameter without memory; hf-zero's keep their own."""
MIN_SWAPPABLE_BYTES = 1024**2
"""Largest tensor that DeepSpeed leaves in memory under offload to files; hf-zero writes all."""


LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the section ``elasticity`` of ``ds_config`` is switched on."""
    return bool((ds_config.get(ELASTICITY) or {}).get("enabled"))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """Return the train batch size of the section ``elasticity`` and the numbers of ranks that
    divide it; with ``world_size`` also the micro-batch size on that many ranks.

    Args:
        ds_config: a configuration that has the section
        target_deepspeed_version: ignored: all versions have one formula
        world_size: number of ranks; 0 stands for an unknown one
        return_microbatch: return the micro-batch size in any case, None without ``world_size``

    Raises:
        ConfigError: the section is missing, off or wrong, or the batch does not divide among
            ``world_size`` ranks.
    """
    if not elasticity_enabled(ds_config):
        raise ConfigError(
            "the configuration has no section elasticity that is switched on; write elasticity: "
            "{enabled: true, max_train_batch_size: …, micro_batch_sizes: […]}"
        )
    section = ds_config[ELASTICITY]
    total, ranks = elastic_batch(section)
    if not world_size and not return_microbatch:
        return total, ranks
    return total, ranks, elastic_sizes(section, world_size)[1] if world_size else None
