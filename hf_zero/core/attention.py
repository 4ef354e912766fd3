"""Which kernels ``scaled_dot_product_attention`` tries first.

torch asks its backends in one order for the whole process and takes the first that can do the call; a compiled graph keeps the one
found when it was traced, and a backward uses what its forward chose. The order is changed, and nothing is switched off, so that a
call which the wished backend cannot do (flash attention with a mask, say) goes to the next.
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


class AttentionOrder:
    """A backend put first, until :meth:`give_back`; "auto" leaves torch's own order."""

    def __init__(self, backend: str, device: torch.device):
        self._before: list[int] = []
        if backend == "auto":
            return
        if not kinds.is_host(device):
            # torch sets its own order for the GPU in the first call, over whatever was set before.
            nothing = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device)
            F.scaled_dot_product_attention(nothing, nothing, nothing)
        first = _BACKENDS[backend].value
        self._before = list(torch._C._get_sdp_priority_order())
        self._set = [first, *(each for each in self._before if each != first)]
        torch._C._set_sdp_priority_order(self._set)

    def give_back(self) -> None:
        """Bring the order back that was there before, unless somebody has changed it since."""
        if self._before and list(torch._C._get_sdp_priority_order()) == self._set:
            torch._C._set_sdp_priority_order(self._before)
        self._before = []
