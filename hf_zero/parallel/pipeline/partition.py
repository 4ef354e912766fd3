"""Which layers a stage of a pipeline holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from hf_zero.errors import ConfigError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where the parts of ``num_items`` begin, and the end: sizes differ by one at most, the first
    parts are the larger ones.
    """
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Where the parts of a list begin, and its end, so that the heaviest part is as light as it
    can be, and then the lightest as heavy as it can be.
    """
    sums = [0, *accumulate(weights)]
    low, high = max(weights, default=0), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_packed(sums, middle)) - 1 <= num_parts:
            high = middle
        else:
            low = middle + 1
    return _even(sums, num_parts, low)


def _even(sums: Sequence[int], num_parts: int, most: int) -> list[int]:
    """Parts that hold at most ``most``, of which the lightest is as heavy as it can be."""
    ends = range(len(sums))
    # by end: the lightest of the parts so far, and where the last of them begins
    lightest: list[list[tuple[float, int]]] = [[(math.inf if end == 0 else -1, 0) for end in ends]]
    for _ in range(num_parts):
        before = lightest[-1]
        lightest.append(
            [
                max(
                    (min(before[at][0], sums[end] - sums[at]), at)
                    for at in range(end + 1)
                    if sums[end] - sums[at] <= most
                )
                for end in ends
            ]
        )
    bounds = [len(sums) - 1]
    for row in reversed(lightest[1:]):
        bounds.append(row[bounds[-1]][1])
    return bounds[::-1]


def _packed(sums: Sequence[int], most: int) -> list[int]:
    """Parts that hold as much as they may, ``most``, one after another."""
    parts = [0]
    for item in range(1, len(sums)):
        if sums[item] - sums[parts[-1]] > most:
            parts.append(item - 1)
    return [*parts, len(sums) - 1]


def bounds_of(method: str, parts: int, names: Sequence[str], numels: Sequence[int]) -> list[int]:
    """Where the ``parts`` of a list of layers begin, and its end. ``names`` are the classes of the
    layers, ``numels`` the parameters of each that train.

    ``method``: "uniform" divides the layers, "parameters" their parameters, "type:regex" the layers
    whose class matches the expression, upper case or lower. Raises ConfigError for another one, for
    an expression that matches no layer, and for fewer layers than parts.
    """
    if len(names) < parts:
        raise ConfigError(
            f"a pipeline of {parts} stages over {len(names)} layers leaves stages empty; make "
            "num_stages smaller, or the layers finer"
        )
    kind, _, expression = method.partition(":")
    kind = kind.lower()
    if kind == "uniform":
        return partition_uniform(len(names), parts)
    if kind == "parameters":
        weights = list(numels)
    elif kind == "type" and expression:
        weights = [int(bool(re.search(expression, name, re.IGNORECASE))) for name in names]
        if not any(weights):
            raise ConfigError(
                f"partition_method {method!r} matches none of the layers "
                f"({', '.join(dict.fromkeys(names))}); name one of their classes"
            )
    else:
        raise ConfigError(
            f'partition_method is {method!r}; it is "uniform", "parameters" or "type:regex"'
        )
    return _filled(partition_balanced(weights, parts))


def _filled(bounds: list[int]) -> list[int]:
    """``bounds`` with a layer in each part: what weighs nothing leaves some without."""
    for part in range(1, len(bounds) - 1):
        bounds[part] = max(bounds[part], bounds[part - 1] + 1)
    for part in range(len(bounds) - 2, 0, -1):
        bounds[part] = min(bounds[part], bounds[part + 1] - 1)
    return bounds
