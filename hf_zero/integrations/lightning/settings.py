"""Configuration of ZeroStrategy, combined with the overlapping arguments of a Lightning Trainer.

Nothing of Lightning is imported here: ``lightning_pytorch.py`` and
``hf_zero/integrations/pytorch_lightning.py`` make the classes for its two packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import ACCUMULATION, MICRO, NO_BATCH_SIZE, TOTAL
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KINDS = {
    "32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
    "16-true": "fp16",
}  # fmt: skip


def read(config: object, stage: int | None, strategy: str) -> ZeroConfig:
    """Return the configuration of ``strategy(config=…, stage=…)``; stage 3 if neither is given.
    Raises ConfigError if they name different stages.
    """
    if config is None:
        return ZeroConfig(3 if stage is None else stage)
    settings = ZeroConfig.coerce(config, allow_auto=True)
    if stage not in (None, settings.stage):
        raise ConfigError(
            f"{strategy}(stage={stage!r}) contradicts its config, which says stage "
            f"{settings.stage}; give one of them"
        )
    return settings


def resolve(config: ZeroConfig, trainer: Trainer, ranks: int) -> ZeroConfig:
    """Return ``config`` completed from the Trainer's arguments. Raises ConfigError if they
    contradict.

    Accumulation is left to the Trainer, which divides the loss and marks the last backward of a
    window.
    """
    values = {
        **precision_values(config, trainer.precision, "Trainer"),
        **_clipping(config, trainer),
    }
    if trainer.gradient_clip_val and config.zero.update_in_backward:
        # an update waits for the norm by which Lightning clips after the backward
        values["zero_optimization"] = {"update_in_backward": False}
    micro = _micro_batch(config, trainer, ranks)
    accumulates = "default: Lightning's Trainer accumulates"
    rows, source = (1, NO_BATCH_SIZE) if micro is None else (micro, accumulates)
    return (
        config.override(values, "Lightning's Trainer")
        .override({ACCUMULATION: 1}, accumulates)
        .override({MICRO: rows, TOTAL: rows * ranks}, source)
    )


def precision_values(config: ZeroConfig, precision: str, caller: str) -> dict[str, object]:
    """Return the keys that ``caller(precision=…)`` sets. Raises ConfigError if ``config`` has
    another precision.
    """
    kind = KINDS[precision]
    if config.precision not in ("fp32", kind):
        raise ConfigError(
            f"the ZeRO config enables {config.precision} and the {caller} has "
            f"precision={precision!r}; write "
            f"{caller}(precision={'16-mixed' if config.precision == 'fp16' else 'bf16-mixed'!r}), "
            "or take it out of the config"
        )
    autos = {section for section in ("bf16", "fp16") if f"{section}.enabled" in config.autos}
    return {
        section: {"enabled": section == kind}
        for section in ("bf16", "fp16")
        if section == kind or section in autos
    }


def _clipping(config: ZeroConfig, trainer: Trainer) -> dict[str, object]:
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


def _micro_batch(config: ZeroConfig, trainer: Trainer, ranks: int) -> int | None:
    """Return the configured samples of a micro-batch; None: the DataLoader has them."""
    steps = trainer.accumulate_grad_batches
    if config.gradient_accumulation_steps not in (None, steps):
        raise ConfigError(
            f"{ACCUMULATION} = {config.gradient_accumulation_steps} in the ZeRO config contradicts "
            f"Trainer(accumulate_grad_batches={steps}); leave it out of the config"
        )
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total is None:
        return micro
    if micro is None:
        micro = total // (steps * ranks)
    if total != micro * steps * ranks:
        raise ConfigError(
            f"{TOTAL} = {total} in the ZeRO config is not {MICRO} × accumulate_grad_batches × "
            f"ranks = {micro} × {steps} × {ranks}; leave batch sizes to the DataLoader"
        )
    return micro
