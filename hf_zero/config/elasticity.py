"""The section ``elasticity``: one train batch size that divides among as many numbers of ranks as
possible, so that a run continues with the same batches on another number of ranks.

Candidates are each micro-batch size, and their least common multiple, times the largest highly
composite number that keeps the product within ``max_train_batch_size``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.logging import JsonObject

ELASTICITY = "elasticity"
HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560),
    *(10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760),
    *(277200, 332640, 498960, 554400, 665280, 720720),
)
ELASTIC_DEFAULTS: JsonObject = {
    "enabled": False, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6],
    "min_gpus": 1, "max_gpus": 10_000, "min_time": 0, "prefer_larger_batch": True,
    "ignore_non_elastic_batch_info": False, "num_gpus_per_node": 1, "model_parallel_size": 1,
    "version": 0.2,
}  # fmt: skip


def read_elasticity(section: Mapping[str, object]) -> JsonObject:
    """Return the section completed with its defaults. Raises ConfigError for unknown keys and
    invalid values, NotBuiltError for model parallelism.
    """
    for name in section:
        if name not in ELASTIC_DEFAULTS:
            raise ConfigError(
                f"unknown key 'elasticity.{name}'{did_you_mean(name, ELASTIC_DEFAULTS)}"
            )
    values = {**ELASTIC_DEFAULTS, **section}
    micros = values["micro_batch_sizes"]
    names = ("max_train_batch_size", "min_gpus", "max_gpus", "num_gpus_per_node")
    numbers = [values[key] for key in names]
    whole = [*numbers, *(micros if isinstance(micros, list) else [None])]
    if not micros or not all(type(number) is int and number > 0 for number in whole):
        raise ConfigError(
            f"elasticity needs {', '.join(names)} and a list of micro_batch_sizes, integers of "
            f"at least 1; it has {dict(section)}"
        )
    version = values["version"]
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise ConfigError(f"elasticity.version = {version!r} is no number; write 0.1 or 0.2")
    if values["model_parallel_size"] != 1:
        raise NotBuiltError(
            "elasticity.model_parallel_size asks for model parallelism, which this version of "
            "hf-zero does not provide; write 1"
        )
    return values


def elastic_batch(section: Mapping[str, object]) -> tuple[int, list[int]]:
    """Return the train batch size and the numbers of ranks that divide it, in ascending order.
    Raises ConfigError if no batch size fits.
    """
    values = read_elasticity(section)
    micros, most = values["micro_batch_sizes"], values["max_train_batch_size"]
    per_node = values["num_gpus_per_node"] if values["version"] >= 0.2 else 1
    least, highest = math.ceil(values["min_gpus"] / per_node), values["max_gpus"] // per_node
    sizes = {_largest_multiple(base, most // per_node) for base in (*micros, math.lcm(*micros))}
    fitting = {size: _fitting_ranks(size, micros, least, highest) for size in sizes if size}
    if not any(fitting.values()):
        raise ConfigError(
            f"elasticity: no batch of at most {most} samples fits {values['min_gpus']} to "
            f"{values['max_gpus']} ranks in micro-batches of {micros}; accept larger batches, or "
            "smaller micro-batches"
        )
    larger = 1 if values["prefer_larger_batch"] else -1
    best = max(fitting, key=lambda size: (len(fitting[size]), larger * size))
    return best * per_node, [ranks * per_node for ranks in fitting[best]]


def elastic_sizes(section: Mapping[str, object], ranks: int) -> tuple[int, int]:
    """Return the train batch size and the micro-batch size for ``ranks`` ranks. Raises ConfigError
    if the batch does not divide among them.
    """
    total, fitting = elastic_batch(section)
    if ranks not in fitting:
        near = sorted(sorted(fitting, key=lambda size: abs(size - ranks))[:6])
        raise ConfigError(
            f"elasticity: the train batch of {total} samples does not fit {ranks} ranks; start "
            f"one of the numbers that it fits, such as {near}"
        )
    micros = read_elasticity(section)["micro_batch_sizes"]
    shares = [micro for micro in micros if total // ranks % micro == 0]
    choose = max if read_elasticity(section)["prefer_larger_batch"] else min
    return total, choose(shares)


def _largest_multiple(base: int, most: int) -> int:
    """Return ``base`` times the largest highly composite number that fits into ``most``, or 0."""
    return base * max((number for number in HIGHLY_COMPOSITE if number * base <= most), default=0)


def _fitting_ranks(size: int, micros: Sequence[int], least: int, most: int) -> list[int]:
    """Return the numbers of ranks from ``least`` to ``most`` that split ``size`` into whole
    micro-batches, ascending.
    """
    fitting = set()
    for micro in micros:
        if size % micro == 0:
            steps = size // micro
            fitting |= {count for count in range(least, min(most, steps) + 1) if steps % count == 0}
    return sorted(fitting)
