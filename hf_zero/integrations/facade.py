"""The package ``deepspeed`` that hf-zero offers: its modules (hf-zero's facade) and its
distribution metadata.

Nothing of that name is put into site-packages; an instance of :class:`FacadeFinder` in
``sys.meta_path`` answers instead (see finder.py for when). Imported in every Python process:
standard library only, and the costly parts of it late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "deepspeed"
VERSION = "0.19.8+hfzero"
"""The release of DeepSpeed whose interface the facade follows; the local part says whose it is."""

FACADE = os.path.join(os.path.dirname(os.path.abspath(__file__)), NAME)


class FacadeFinder:
    """An instance, not a class: ``importlib.invalidate_caches()`` calls a method on every finder
    that has one.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # Submodules need no answer: the ordinary path finder follows the package's __path__.
        return facade_spec() if fullname == NAME else None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        # Asked by name and without a folder, else silent: pip lists the folders it manages and must
        # not find us there.
        name = getattr(context, "name", None)
        if name is None or name.lower() != NAME or "path" in vars(context):
            return ()
        from hf_zero.integrations.distribution import FacadeDistribution

        return (FacadeDistribution(NAME, VERSION, FACADE),)

    def invalidate_caches(self) -> None:
        """Nothing is cached: the facade lies where this file lies."""


def facade_spec() -> ModuleSpec:
    from importlib.util import spec_from_file_location

    spec = spec_from_file_location(
        NAME, os.path.join(FACADE, "__init__.py"), submodule_search_locations=[FACADE]
    )
    assert spec is not None
    return spec


def is_ours(module: ModuleType) -> bool:
    """Whether a module named ``deepspeed`` is hf-zero's facade."""
    return os.path.dirname(os.path.abspath(getattr(module, "__file__", None) or "")) == FACADE
