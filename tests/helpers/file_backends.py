"""The backends of file transfers that this machine has."""

from __future__ import annotations

from hf_zero.errors import ConfigError
from hf_zero.ops.files import BACKENDS as KNOWN
from hf_zero.ops.files import FileQueue


def _works(backend: str) -> bool:
    try:
        FileQueue(backend=backend).close()
    except ConfigError:
        return False
    return True


BACKENDS = [backend for backend in KNOWN if _works(backend)]
