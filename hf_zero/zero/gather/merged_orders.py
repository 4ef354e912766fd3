"""One order from the orders of several ranks or passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def merged(orders: Sequence[Sequence[T]], place: Callable[[T], int]) -> list[T]:
    """Return the first of ``orders`` with the items that only a later one holds: each between its
    neighbors in that order, and there before the first item of a greater ``place``.
    """
    result = list(orders[0])
    members = set(result)
    for order in orders[1:]:
        at = 0  # after the item before it
        for number, item in enumerate(order):
            if item in members:
                at = len(result) - result[::-1].index(item)
                continue
            after = members.intersection(order[number:])
            while at < len(result) and result[at] not in after and place(result[at]) < place(item):
                at += 1
            result.insert(at, item)
            members.add(item)
            at += 1
    return result
