"""Combination of a ZeRO configuration with the arguments of a Lightning Trainer, which overlap."""

from __future__ import annotations

from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.integrations.lightning.precision import KINDS

TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def read(config: Any, stage: int | None) -> ZeroConfig:
    """Return the configuration of ``ZeroStrategy(config=…, stage=…)``; stage 3 if neither is given.
    Raises ConfigError if they name different stages.
    """
    if config is None:
        return ZeroConfig(3 if stage is None else stage)
    settings = ZeroConfig.coerce(config, allow_auto=True)
    if stage not in (None, settings.stage):
        raise ConfigError(
            f"ZeroStrategy(stage={stage}) contradicts its config, which says stage "
            f"{settings.stage}; give one of them"
        )
    return settings


def resolve(config: ZeroConfig, trainer: Any, ranks: int) -> ZeroConfig:
    """Return ``config`` completed from the Trainer's arguments. Raises ConfigError if they
    contradict.

    Accumulation is left to the Trainer, which divides the loss and marks the last backward of a
    window.
    """
    values = {**_precision(config, trainer.precision), **_clipping(config, trainer)}
    micro = _micro_batch(config, trainer, ranks)
    counted = {ACCUMULATION: 1, MICRO: micro, TOTAL: micro * ranks}
    return config.override(values, "Lightning's Trainer").override(
        counted, "default: Lightning's Trainer accumulates"
    )


def _precision(config: ZeroConfig, precision: str) -> dict[str, Any]:
    kind = KINDS[precision]
    if config.precision not in ("fp32", kind):
        raise ConfigError(
            f"the ZeRO config enables {config.precision} and the Trainer has "
            f"precision={precision!r}; "
            f"write Trainer(precision="
            f"{'16-mixed' if config.precision == 'fp16' else 'bf16-mixed'!r}), or take it out of "
            f"the config"
        )
    autos = {section for section in ("bf16", "fp16") if f"{section}.enabled" in config.autos}
    return {
        section: {"enabled": section == kind}
        for section in ("bf16", "fp16")
        if section == kind or section in autos
    }


def _clipping(config: ZeroConfig, trainer: Any) -> dict[str, Any]:
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if value and getattr(algorithm, "value", algorithm) == "value":
        raise ConfigError(
            "Trainer(gradient_clip_algorithm='value') is not built; a sharded gradient is clipped "
            "by its norm: use 'norm'"
        )
    written = float(config.gradient_clipping or 0.0)
    if value and written and float(value) != written:
        raise ConfigError(
            f"gradient_clipping = {written} in the ZeRO config contradicts "
            f"Trainer(gradient_clip_val={value}); write one of them"
        )
    return {"gradient_clipping": float(value or 0.0)} if "gradient_clipping" in config.autos else {}


def _micro_batch(config: ZeroConfig, trainer: Any, ranks: int) -> int:
    steps = trainer.accumulate_grad_batches
    if config.gradient_accumulation_steps not in (None, steps):
        raise ConfigError(
            f"{ACCUMULATION} = {config.gradient_accumulation_steps} in the ZeRO config contradicts "
            f"Trainer(accumulate_grad_batches={steps}); "
            "leave it out of the config"
        )
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if micro is None:
        micro = 1 if total is None else total // (steps * ranks)
    if total not in (None, micro * steps * ranks):
        raise ConfigError(
            f"{TOTAL} = {total} in the ZeRO config is not {MICRO} × accumulate_grad_batches × "
            f"ranks = {micro} × {steps} × {ranks}; "
            "leave batch sizes to the DataLoader"
        )
    return micro
