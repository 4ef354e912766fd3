"""Collection of all errors of a configuration into one exception, so that a user fixes them in one
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError


class Mistakes(list[HfZeroError]):
    """Errors about a configuration, in the order of their discovery."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager that collects a ConfigError or NotBuiltError raised inside and continues
        after the block.
        """
        try:
            yield
        except (ConfigError, NotBuiltError) as error:
            self.append(error)

    def throw(self) -> None:
        """Raise the collected errors: a single one as it is, several as a list of their
        messages.
        """
        errors = {str(error): error for error in self}  # one mistake may be found twice
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
