"""Import hooks: the decision whether ``import deepspeed`` imports hf-zero's facade, and the
application of the seams of a module in ``seams.toml`` after it has run.

Accelerate, Transformers, TRL, PEFT and Lightning all reach ZeRO through ``import deepspeed``, and
first ask whether a distribution of that name is installed. Nothing named deepspeed is put into
site-packages; a finder in ``sys.meta_path`` answers instead. It is the last one, so an installed
deepspeed takes precedence, unless ``HF_ZERO_BACKEND=hf_zero`` or one of hf-zero's own routes
chooses ours.

:class:`SeamFinder` is the first in ``sys.meta_path`` and lets the others find the module; it only
replaces ``exec_module`` on that loader instance, for that execution, so the loader, ``__spec__``,
``inspect`` and ``pickle`` see nothing unusual.

Imported in every Python process: only the standard library, nothing of Hugging Face, and its costly
modules late.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from hf_zero.deepspeed.facade import NAME, ORIGIN, FacadeFinder, facade_spec, is_ours

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time to import typing
if TYPE_CHECKING:
    from collections.abc import Sequence

BACKENDS = ("hf_zero", NAME)
WATCHED = ("accelerate", "lightning", "peft", "pytorch_lightning", "transformers", "trl")
"""Top-level packages whose seams every process applies: the table itself is read when one of them
is first imported. Those of torch begin with the first engine (:func:`watch`).
"""


def chosen() -> bool:
    """Return whether ``import deepspeed`` imports, or has imported, hf-zero's facade here."""
    module = sys.modules.get(NAME)
    if module is not None:
        return is_ours(module)
    from importlib.util import find_spec

    spec = find_spec(NAME)
    return spec is not None and spec.origin == ORIGIN


def install() -> None:
    """Insert the finder and the import hooks into ``sys.meta_path``, once.

    Does nothing while a foreign ``deepspeed`` is in ``sys.modules`` (perhaps during its own
    import), or if ``HF_ZERO_BACKEND=deepspeed`` selects the real one.
    """
    backend = os.environ.get("HF_ZERO_BACKEND", "")
    if backend and backend not in BACKENDS:
        sys.meta_path.insert(0, UnknownBackend(backend))
        raise unknown(backend)
    if backend == NAME or (NAME in sys.modules and not is_ours(sys.modules[NAME])):
        return
    _install_finder(first=backend == "hf_zero")


class UnknownBackend:
    """Finder that raises ConfigError on an import of ``deepspeed`` while ``HF_ZERO_BACKEND`` has an
    unknown value: neither library is used silently.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if fullname == NAME:
            raise unknown(self.backend)

    def invalidate_caches(self) -> None:
        """No-op: nothing is cached."""


def unknown(backend: str) -> Exception:
    from hf_zero.errors import ConfigError

    return ConfigError(
        f"HF_ZERO_BACKEND={backend!r} is not known; write one of "
        f"{', '.join(BACKENDS)}, or leave it unset"
    )


def choose() -> None:
    """Make ``deepspeed`` hf-zero's facade in this process. hf-zero's own routes call it before they
    touch Accelerate.

    Raises ConfigError if another ``deepspeed`` is already imported, or if the environment selects
    it.
    """
    from hf_zero.errors import ConfigError

    module = sys.modules.get(NAME)
    if module is not None and not is_ours(module):
        raise ConfigError(
            "this process has already imported another deepspeed, from "
            f"{getattr(module, '__file__', None)!r}, and Accelerate would "
            "train with that one; set HF_ZERO_BACKEND=hf_zero, or uninstall it"
        )
    backend = os.environ.get("HF_ZERO_BACKEND", "")
    if backend and backend not in BACKENDS:
        raise unknown(backend)
    if backend == NAME:
        raise ConfigError(
            "HF_ZERO_BACKEND=deepspeed asks for DeepSpeed, and this call is hf-zero's own "
            "route; unset the variable"
        )
    _install_finder(first=True)


def _install_finder(first: bool) -> None:
    ours = (
        next((finder for finder in sys.meta_path if isinstance(finder, FacadeFinder)), None)
        or FacadeFinder()
    )
    if first:
        sys.meta_path[:] = [ours, *(finder for finder in sys.meta_path if finder is not ours)]
    elif ours not in sys.meta_path:
        sys.meta_path.append(ours)
    install_hooks()


class SeamFinder:
    """Finder of modules through the other finders; applies their seams after execution."""

    def __init__(self) -> None:
        self.watched: set[str] = set()  # top-level packages
        self.late: set[str] = set()  # modules that were running when the hooks were installed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == NAME:
            return self._instead_of_namespace(path, target)
        if fullname.partition(".")[0] not in self.watched:
            return None
        self.apply_late()
        from hf_zero.integrations import seams

        if fullname not in seams.modules():
            return None
        spec = self._find_elsewhere(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            seams.apply(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for other in sys.meta_path:
            if other is not self and hasattr(other, "find_spec"):
                spec = other.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None

    def _instead_of_namespace(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
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


def install_hooks() -> None:
    """Apply the seams of the packages in :data:`WATCHED` from now on."""
    watch(*WATCHED)


def watch(*packages: str) -> None:
    """Apply the seams of top-level ``packages``: of modules that are imported already, and of
    others once they have run. Again for the same packages, it does nothing.
    """
    hook = next((finder for finder in sys.meta_path if isinstance(finder, SeamFinder)), None)
    if hook is None:
        hook = SeamFinder()
        sys.meta_path.insert(0, hook)
    added = {*packages} - hook.watched
    hook.watched |= added
    if any(name in sys.modules for name in added):
        from hf_zero.integrations import seams

        hook.late |= {
            name
            for name in seams.modules()
            if name in sys.modules and name.partition(".")[0] in added
        }
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
