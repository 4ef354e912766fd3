"""When ``import deepspeed`` means hf-zero's facade.

Accelerate, Transformers, TRL, PEFT and Lightning all reach ZeRO through ``import deepspeed`` and
ask first whether a distribution of that name is installed. Nothing named deepspeed is put into
site-packages; a finder in ``sys.meta_path`` answers instead. It stands last, so a deepspeed that is
really installed wins, unless ``HF_ZERO_BACKEND=hf_zero`` or one of hf-zero's own routes chooses
ours.

Imported in every Python process: standard library only, and the costly parts of it late.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hf_zero.deepspeed.facade import NAME, ORIGIN, FacadeFinder, is_ours

BACKENDS = ("hf_zero", NAME)


def chosen() -> bool:
    """Whether ``import deepspeed`` gives, or gave, hf-zero's facade in this process."""
    module = sys.modules.get(NAME)
    if module is not None:
        return is_ours(module)
    from importlib.util import find_spec

    spec = find_spec(NAME)
    return spec is not None and spec.origin == ORIGIN


def install() -> None:
    """Put the finder and the import hooks into ``sys.meta_path``, once.

    Does nothing while a foreign ``deepspeed`` is in ``sys.modules`` (perhaps in the middle of its
    own import), or where ``HF_ZERO_BACKEND=deepspeed`` asks for the real one.
    """
    backend = os.environ.get("HF_ZERO_BACKEND", "")
    if backend and backend not in BACKENDS:
        sys.meta_path.insert(0, UnknownBackend(backend))
        raise unknown(backend)
    if backend == NAME or (NAME in sys.modules and not is_ours(sys.modules[NAME])):
        return
    _install_finder(first=backend == "hf_zero")


class UnknownBackend:
    """Answers where ``deepspeed`` is looked for while ``HF_ZERO_BACKEND`` names nothing: neither
    library is taken in silence.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == NAME:
            raise unknown(self.backend)

    def invalidate_caches(self) -> None:
        """Nothing is cached."""


def unknown(backend: str) -> Exception:
    from hf_zero.errors import ConfigError

    return ConfigError(
        f"HF_ZERO_BACKEND={backend!r} is not known; write one of "
        f"{', '.join(BACKENDS)}, or leave it unset"
    )


def choose() -> None:
    """Make ``deepspeed`` hf-zero's for this process. hf-zero's own routes call it before they touch
    Accelerate.

    Raises ConfigError when another ``deepspeed`` is already imported, or when the environment asks
    for it.
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
