"""Import hooks that apply the seams of a module in ``seams/`` after it has run.

The finder is the first in ``sys.meta_path`` and lets the others find the module; it only replaces
``exec_module`` on that loader instance, for that execution, so the loader, ``__spec__``,
``inspect`` and ``pickle`` see nothing unusual. Imported in every Python process: only the standard
library, nothing of Hugging Face.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hf_zero.deepspeed.facade import NAME, FacadeFinder, facade_spec

WATCHED = ("accelerate", "lightning", "peft", "pytorch_lightning", "transformers")
"""Top-level packages that have seams: the table itself is read when one of them is first
imported.
"""


class SeamFinder:
    """Finder that finds a module through the other finders and applies its seams after its
    execution.
    """

    def __init__(self) -> None:
        self.late: set[str] = set()  # modules that were running when the hooks were installed

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == NAME:
            return self._instead_of_namespace(path, target)
        if fullname.partition(".")[0] not in WATCHED:
            return None
        self.apply_late()
        from hf_zero.integrations import seams

        if fullname not in seams.modules():
            return None
        spec = self._find_elsewhere(fullname, path, target)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            seams.apply(module)

        loader.exec_module = exec_module
        return spec

    def _find_elsewhere(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        for other in sys.meta_path:
            if other is not self and hasattr(other, "find_spec"):
                spec = other.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def _instead_of_namespace(self, path: Any, target: Any) -> ModuleSpec | None:
        # A folder named deepspeed (of config files beside the script, say) is a namespace package
        # to Python, and would be found before the facade, whose finder is last.
        spec = self._find_elsewhere(NAME, path, target)
        offered = any(isinstance(other, FacadeFinder) for other in sys.meta_path)
        return facade_spec() if offered and spec is not None and spec.origin is None else None

    def invalidate_caches(self) -> None:
        """No-op: nothing is cached."""

    def apply_late(self) -> None:
        """Apply the seams of modules that were half imported when the hooks were installed and are
        complete now.
        """
        for name in sorted(self.late):
            module = sys.modules.get(name)
            if module is not None and not _running(module):
                from hf_zero.integrations import seams

                self.late.discard(name)
                seams.apply(module)


def install() -> None:
    """Install the hooks, once, and apply the seams of modules that are imported already."""
    if any(isinstance(finder, SeamFinder) for finder in sys.meta_path):
        return
    hook = SeamFinder()
    sys.meta_path.insert(0, hook)
    if any(name in sys.modules for name in WATCHED):
        from hf_zero.integrations import seams

        hook.late = {name for name in seams.modules() if name in sys.modules}
        hook.apply_late()


def apply_late() -> None:
    """Apply the seams of modules that were half imported when the hooks were installed, for code
    that relies on them.
    """
    for finder in sys.meta_path:
        if isinstance(finder, SeamFinder):
            finder.apply_late()


def _running(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
