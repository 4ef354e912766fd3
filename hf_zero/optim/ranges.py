"""Ranges of hyperparameters, and the base class of the optimizers that check those of each group,
also of groups that give values of their own or are added later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_zero.errors import ConfigError
from hf_zero.optim.segments import ParamGroup


class Range(NamedTuple):
    """The values that a hyperparameter may have: ``contains`` tells them from others of any type,
    ``words`` describe them in an error.
    """

    contains: Callable[[Any], bool]
    words: str

    def or_none(self) -> Range:
        """Return the range with None."""
        return Range(lambda value: value is None or self.contains(value), f"{self.words}, or None")


def is_number(value: object) -> bool:
    """Return whether ``value`` is a number, or a tensor of one element, which torch.optim takes
    as a learning rate or a coefficient.
    """
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def number(fits: Callable[[float], bool], words: str) -> Range:
    """Return the range of the numbers that ``fits`` accepts."""
    return Range(lambda value: is_number(value) and fits(float(value)), words)


def numbers(count: int, each: Range, words: str) -> Range:
    """Return the range of tuples and lists of ``count`` numbers in the range ``each``."""

    def contains(given: Any) -> bool:
        listed = isinstance(given, (tuple, list)) and len(given) == count
        return listed and all(map(each.contains, given))

    return Range(contains, words)


def choice(*values: object) -> Range:
    """Return the range of these ``values``."""
    return Range(values.__contains__, " or ".join(map(repr, values)))


NUMBER = Range(is_number, "a number")
NOT_NEGATIVE = number(lambda value: value >= 0.0, "a number of at least 0")
NOT_POSITIVE = number(lambda value: value <= 0.0, "a number of at most 0")
POSITIVE = number(lambda value: value > 0.0, "a number above 0")
COEFFICIENT = number(lambda value: 0.0 <= value < 1.0, "a number in [0, 1)")
BETAS = numbers(2, COEFFICIENT, "two numbers in [0, 1)")


def not_negative(*names: str) -> dict[str, Range]:
    """Return the range of numbers of at least 0 for each of ``names``."""
    return dict.fromkeys(names, NOT_NEGATIVE)


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that checks the hyperparameters of each group as it is added."""

    # of hyperparameters that the groups of another library may lack
    RANGES: ClassVar[Mapping[str, Range]] = {}

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group, with lists of numbers as tuples. Raises ConfigError, and adds none, if
        :meth:`check_group` refuses it.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
        except ConfigError:
            self.param_groups.pop()
            raise
        group.update(
            {name: tuple(group[name]) for name in self.RANGES if isinstance(group.get(name), list)}
        )

    def check_group(self, group: ParamGroup) -> None:
        """Raise ConfigError for a hyperparameter of ``group`` that is out of its range."""
        for name, allowed in self.RANGES.items():
            if name in group and not allowed.contains(group[name]):
                raise ConfigError(
                    f"{type(self).__name__}: {name} is {group[name]!r}; give {allowed.words}"
                )
