"""Everything that is wrong with a configuration, in one error: the next run must not find the
next mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError


class Mistakes(list[HfZeroError]):
    """Errors about a configuration, in the order in which they were found."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What is raised inside about the configuration is noted, and the reading goes on behind
        it.
        """
        try:
            yield
        except (ConfigError, NotBuiltError) as error:
            self.append(error)

    def throw(self) -> None:
        """Raise what was noted: one error as it is, of several a list of their messages."""
        errors = {str(error): error for error in self}  # the same mistake may be met on two ways
        if len(errors) == 1:
            raise next(iter(errors.values()))
        if errors:
            kind = (
                NotBuiltError
                if all(isinstance(error, NotBuiltError) for error in self)
                else ConfigError
            )
            raise kind(
                f"{len(errors)} mistakes in the configuration:"
                + "".join(f"\n- {said}" for said in errors)
            )
