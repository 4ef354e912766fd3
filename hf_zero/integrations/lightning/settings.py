"""Configuration of ZeroStrategy, combined with the overlapping arguments of a Lightning Trainer.

Nothing of Lightning is imported here: ``lightning_pytorch.py`` and
``hf_zero/integrations/pytorch_lightning.py`` make the classes for its two packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import ACCUMULATION, MICRO, STAGE, TOTAL
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KINDS = {
    "32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16",
    "16-true": "fp16",
}  # fmt: skip


def read(config: object, stage: int | None, strategy: str) -> ZeroConfig:
    """Return the configuration of ``strategy(config=…, stage=…)``; stage 3 if neither is given.
    Raises ConfigError if ``config`` names another stage.
    """
    if config is None:
        return ZeroConfig(3 if stage is None else stage)
    settings = ZeroConfig.coerce(config, allow_auto=True)
    if stage is not None and STAGE not in settings.written:
        return settings.override({STAGE: stage}, f"{strategy}(stage=...)")
    if stage not in (None, settings.stage):
        raise ConfigError(
            f"{strategy}(stage={stage!r}) contradicts its config, which has {STAGE} = "
            f"{settings.stage} ({settings.sources[STAGE]}); give one of them"
        )
    return settings


def resolve(config: ZeroConfig, trainer: Trainer, ranks: int) -> ZeroConfig:
    """Return ``config`` completed from the arguments of a Trainer on ``ranks`` ranks. Raises
    ConfigError if they contradict.
    """
    values = {
        **precision_values(config, trainer.precision, "Trainer"),
        **_clipping(config, trainer),
    }
    if trainer.gradient_clip_val and config.zero.update_in_backward:
        # an update waits for the norm by which Lightning clips after the backward
        values["zero_optimization"] = {"update_in_backward": False}
    return _with_batch_sizes(config.override(values, "Lightning's Trainer"), trainer, ranks)


def precision_values(config: ZeroConfig, precision: str, caller: str) -> dict[str, object]:
    """Return the keys that ``caller(precision=…)`` sets. Raises ConfigError if ``config`` has
    another precision, or switches this one off.
    """
    kind = KINDS[precision]
    if config.precision not in ("fp32", kind):
        raise ConfigError(
            f"the ZeRO config enables {config.precision} and the {caller} has "
            f"precision={precision!r}; write "
            f"{caller}(precision={'16-mixed' if config.precision == 'fp16' else 'bf16-mixed'!r}), "
            "or take it out of the config"
        )
    switch = f"{kind}.enabled"
    if config.written.get(switch) is False:
        raise ConfigError(
            f"{switch} = False in the ZeRO config ({config.sources[switch]}) contradicts "
            f"{caller}(precision={precision!r}); remove one of them"
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


def _with_batch_sizes(config: ZeroConfig, trainer: Trainer, ranks: int) -> ZeroConfig:
    """Return ``config`` with the sizes of one backward: its micro-batch, if it has one, and no
    accumulation, which the Trainer does: it divides the loss and marks the last backward of a
    window. Raises ConfigError for sizes that the Trainer's accumulation contradicts.
    """
    steps = trainer.accumulate_grad_batches
    if config.gradient_accumulation_steps not in (None, steps):
        raise ConfigError(
            f"{ACCUMULATION} = {config.gradient_accumulation_steps} in the ZeRO config contradicts "
            f"Trainer(accumulate_grad_batches={steps}); leave it out of the config"
        )
    config = config.override({ACCUMULATION: steps}, "Lightning's Trainer").with_counted_total(ranks)
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    config = config.override({ACCUMULATION: 1}, "default: Lightning's Trainer accumulates")
    # `resolve` computes the total of one backward
    config = (config if micro else config.without(MICRO)).without(TOTAL)
    if total is None:
        return config
    # the ranks of a tensor-parallel group, or of a sequence, share their batches
    readers = ranks // (config.tensor_parallel.size * config.ranks_of_a_sequence)
    share, remainder = divmod(total, steps * readers)
    if remainder or micro not in (None, share):
        raise ConfigError(
            f"{TOTAL} = {total} in the ZeRO config is not {MICRO} × accumulate_grad_batches × "
            f"data-parallel ranks = {micro or 'a whole number'} × {steps} × {readers}; leave batch "
            "sizes to the DataLoader"
        )
    return config.override({MICRO: share}, f"computed: {TOTAL}") if micro is None else config
