"""The order in which ``scaled_dot_product_attention`` tries its kernels.

torch tries its backends in one order for the whole process and takes the first that supports the
call; a compiled graph keeps the one chosen when it was traced, and a backward uses the choice of
its forward. The order is changed but no backend is disabled, so a call that the preferred backend
does not support (flash attention with a mask, say) uses the next.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from hf_zero.device import kinds

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

MEASURED: dict[tuple[int, int], str] = {}
"""The faster of flash and cuDNN in a training step, by the GPU's compute capability: what the row
"attention: cuDNN over flash" of scripts/gpu has shown. A GPU that is not here has not been
measured, and keeps torch's own order.
"""


def chosen(backend: str, device: torch.device) -> str:
    """Return ``backend``; for "auto" the backend measured on GPUs such as ``device``, or "auto" if
    none was measured.
    """
    if backend != "auto" or not MEASURED or not kinds.is_nvidia(device):
        return backend
    properties = kinds.properties(device)
    return MEASURED.get((properties.major, properties.minor), backend)


class AttentionOrder:
    """A backend put first in the order, until :meth:`restore`. "auto" is the measured one, else
    torch's own order.
    """

    def __init__(self, backend: str, device: torch.device):
        self._before: list[int] = []
        backend = chosen(backend, device)
        if backend == "auto":
            return
        if not kinds.is_host(device):
            # torch sets its own order for the GPU in the first call, overwriting an earlier one.
            nothing = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device)
            F.scaled_dot_product_attention(nothing, nothing, nothing)
        first = _BACKENDS[backend].value
        self._before = list(torch._C._get_sdp_priority_order())
        self._set = [first, *(each for each in self._before if each != first)]
        torch._C._set_sdp_priority_order(self._set)

    def restore(self) -> None:
        """Restore the former order, unless it was changed since."""
        if self._before and list(torch._C._get_sdp_priority_order()) == self._set:
            torch._C._set_sdp_priority_order(self._before)
        self._before = []
