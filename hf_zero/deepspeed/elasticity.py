"""``deepspeed.elasticity``: one train batch size for many numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.elasticity import ELASTICITY, elastic_batch, elastic_sizes
from hf_zero.config.value_types import argument, integer
from hf_zero.errors import ConfigError


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the section ``elasticity`` of ``ds_config`` is switched on. Raises ConfigError
    for other objects than sections of keys and values.
    """
    section = ds_config.get(ELASTICITY) if isinstance(ds_config, Mapping) else ds_config
    if not isinstance(section, Mapping | None):
        raise ConfigError(
            f"ds_config, or its section elasticity, is {section!r:.60}; pass the configuration as "
            "a dict, and write elasticity: {enabled: true, …}"
        )
    return bool(section and section.get("enabled"))


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
    size = argument("compute_elastic_config", "world_size", integer(0), world_size or 0)
    total, ranks = elastic_batch(section)
    if not size and not return_microbatch:
        return total, ranks
    return total, ranks, elastic_sizes(section, size)[1] if size else None
