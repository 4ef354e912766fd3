"""The division of a list of layers into pipeline stages, by number, parameters or class."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate

from hf_zero.errors import ConfigError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the first index of each part of ``num_items``, and the end. Sizes differ by at most
    one; the first parts are the larger ones.
    """
    size, remainder = divmod(num_items, num_parts)
    return [part * size + min(part, remainder) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Return the first index of each part of a list, and its end, such that the heaviest part is as
    light as possible, and then the lightest part as heavy as possible.
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
    """Return the bounds of parts of at most ``most`` whose lightest is as heavy as possible."""
    ends = range(len(sums))
    # by end: the weight of the lightest part so far, and the first index of the last part
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
    """Return the bounds of parts filled greedily, each up to ``most``."""
    parts = [0]
    for item in range(1, len(sums)):
        if sums[item] - sums[parts[-1]] > most:
            parts.append(item - 1)
    return [*parts, len(sums) - 1]


def bounds_of(method: str, parts: int, names: Sequence[str], numels: Sequence[int]) -> list[int]:
    """Return the first index of each of the ``parts`` of a list of layers, and its end. ``names``:
    classes of the layers. ``numels``: trainable parameter elements of each layer.

    ``method``: "uniform" balances the number of layers, "parameters" that of their parameters,
    "type:regex" that of the layers whose class matches the expression, ignoring case. Raises
    ConfigError for another method, an expression without a match, and fewer layers than parts.
    """
    if len(names) < parts:
        raise ConfigError(
            f"a pipeline of {parts} stages over {len(names)} layers leaves stages empty; make "
            "num_stages smaller, or the layers finer"
        )
    whole = str(method).lower()
    kind, _, expression = str(method).partition(":")
    if whole == "uniform":
        return partition_uniform(len(names), parts)
    if whole == "parameters":
        weights = list(numels)
    elif kind.lower() == "type" and expression:
        try:
            weights = [int(bool(re.search(expression, name, re.IGNORECASE))) for name in names]
        except re.error as error:
            raise ConfigError(
                f"partition_method {method!r} has no regular expression after type: ({error}); "
                "write the class of the layers to balance, as type:linear"
            ) from error
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
    """Return ``bounds`` with at least one layer a part; weightless layers may leave some empty."""
    for part in range(1, len(bounds) - 1):
        bounds[part] = max(bounds[part], bounds[part - 1] + 1)
    for part in range(len(bounds) - 2, 0, -1):
        bounds[part] = min(bounds[part], bounds[part + 1] - 1)
    return bounds
