"""``deepspeed.runtime.zero.config``: the section ``zero_optimization`` and its parts as objects,
read by :class:`hf_zero.ZeroConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

from hf_zero.config import ZeroConfig

ZERO = "zero_optimization"
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
        offload: dict[str, object] = {}
        for name, kind in (
            ("offload_param", DeepSpeedZeroOffloadParamConfig),
            ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ):
            written = name in section or values.get(name) is not None
            offload[name] = kind(**section.pop(name, {})) if written else None
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


DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
