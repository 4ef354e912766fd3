"""Decision whether ``import deepspeed`` imports hf-zero's facade.

Accelerate, Transformers, TRL, PEFT and Lightning all reach ZeRO through ``import deepspeed``, and
first ask whether a distribution of that name is installed. Nothing named deepspeed is put into
site-packages; a finder in ``sys.meta_path`` answers instead. It is the last one, so an installed
deepspeed takes precedence, unless ``HF_ZERO_BACKEND=hf_zero`` or one of hf-zero's own routes
chooses ours.

Imported in every Python process: only the standard library, and its costly modules late.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hf_zero.deepspeed.facade import NAME, ORIGIN, FacadeFinder, is_ours

BACKENDS = ("hf_zero", NAME)


def chosen() -> bool:
    """Return whether ``import deepspeed`` imports, or has imported, hf-zero's facade in this
    process.
    """
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

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
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
    from hf_zero.integrations import hooks

    ours = (
        next((finder for finder in sys.meta_path if isinstance(finder, FacadeFinder)), None)
        or FacadeFinder()
    )
    if first:
        sys.meta_path[:] = [ours, *(finder for finder in sys.meta_path if finder is not ours)]
    elif ours not in sys.meta_path:
        sys.meta_path.append(ours)
    hooks.install()
