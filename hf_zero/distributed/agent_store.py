"""The key-value store of torchrun's agent, which exists before any process group and outlives the
ranks.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any


def connect_to_agent_store(timeout: timedelta) -> Any:
    """Return a client of the store at MASTER_ADDR and MASTER_PORT, or None if torchrun's agent
    hosts none.

    ``timeout`` limits each call. Raises torch's error if the store does not answer.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
