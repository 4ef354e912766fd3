"""``deepspeed.elasticity``: one train batch size for many numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.elasticity import ELASTICITY, elastic_batch, elastic_sizes
from hf_zero.errors import ConfigError


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
