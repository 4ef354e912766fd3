"""Learning-rate schedules by name: DeepSpeed's five, and those of torch.optim.lr_scheduler that
take only numbers.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler as torch_schedules

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.optim.cycles import LRRangeTest, OneCycle
from hf_zero.optim.schedule_base import LRSchedule
from hf_zero.optim.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

if TYPE_CHECKING:
    from hf_zero.config import SchedulerConfig

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "LRSchedule",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]

_OURS: dict[str, type[LRSchedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
VALID_LR_SCHEDULES = list(_OURS)

_TORCH = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
_OBJECTS_ONLY = {
    "LambdaLR": "takes a function",
    "MultiplicativeLR": "takes a function",
    "SequentialLR": "takes schedules",
    "ChainedScheduler": "takes schedules",
    "ReduceLROnPlateau": "takes a metric at each step",
    "WarmupLayerTokenDecayLR": "belongs to random layer-token drop",
}


def build_scheduler(cfg: SchedulerConfig, optimizer: Any) -> torch_schedules.LRScheduler:
    """Build the schedule that ``cfg`` names, over ``optimizer``. Names are case-insensitive.

    Args:
        cfg: ``type`` and ``params`` of the configuration's ``scheduler`` section.
        optimizer: a torch optimizer, or an object that holds one as ``.optimizer``.

    Raises:
        ConfigError: a type or parameter that does not exist or is missing, an ``"auto"`` left over,
            a value of the wrong type or range.
        NotBuiltError: a schedule that cannot be described by numbers alone.
    """
    name = _canonical(str(cfg.type))
    cls: Any = _OURS.get(name) or getattr(torch_schedules, name)
    params = dict(cfg.params)
    known = {
        key: p
        for key, p in inspect.signature(cls.__init__).parameters.items()
        if key not in ("self", "optimizer")
    }
    for key, value in params.items():
        if key not in known:
            raise ConfigError(
                f"unknown scheduler.params key {key!r} for {name}{did_you_mean(key, known)}"
            )
        if isinstance(value, str) and value == "auto":
            raise ConfigError(
                f'scheduler.params.{key} of {name} is "auto" and nothing has filled it in; write a '
                "value, or set it in the trainer's arguments"
            )
    missing = [
        key
        for key, p in known.items()
        if p.default is inspect.Parameter.empty and key not in params
    ]
    if missing:
        raise ConfigError(
            f"scheduler {name} needs {', '.join(missing)}; write them in scheduler.params"
        )
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"scheduler {name} with {params}: {error}. Correct scheduler.params."
        ) from error


def _canonical(kind: str) -> str:
    key = kind.lower()
    by_key = {name.lower(): name for name in (*_OURS, *_TORCH)}
    if key in by_key:
        return by_key[key]
    objects_only = {name.lower(): name for name in _OBJECTS_ONLY}
    if key in objects_only:
        name = objects_only[key]
        raise NotBuiltError(
            f"scheduler type {name!r} is not built from a configuration: it {_OBJECTS_ONLY[name]}; "
            "pass lr_scheduler= to hf_zero.initialize"
        )
    raise ConfigError(f"unknown scheduler type {kind!r}{did_you_mean(kind, (*_OURS, *_TORCH))}")
