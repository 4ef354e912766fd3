"""Ways for ranks that share one GPU to exchange messages over NCCL, and gloo on the CPU in its
place, as variables of the environment of each rank.

NCCL refuses two ranks of one host on one device ("Duplicate GPU detected"). By ``hosts`` each rank
names a host of its own, because NCCL compares hosts before devices, and messages take its socket
transport over loopback. By ``shared`` NCCL 2.30 and newer allow it, over shared memory. In both
ways ranks take turns on the GPU: values, orders, waits and memory are those of several GPUs, times
are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "ONE_CARD_WAY"  # the way of a process, which sitecustomize.py applies
GLOO, LATE = "gloo", "late"
ON_CARD = ("hosts", "shared")
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
# a kernel that occupies many SMs while it waits may keep the other ranks from running
ONE_CTA = {"NCCL_MAX_CTAS": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def variables(way: str, rank: int) -> Mapping[str, str]:
    """Return what the environment of ``rank`` needs for ``way``."""
    if way == "hosts":
        return {**SOCKETS, "NCCL_HOSTID": f"rank-{rank}"}
    if way == "shared":
        return SHARED
    return NO_GPU if way == GLOO else {}


def apply() -> None:
    """Apply the way that the environment names, in a process that a launcher has given its rank."""
    way = os.environ.get(VARIABLE)
    rank = next((os.environ[name] for name in PLACES if name in os.environ), None)
    if way is not None and rank is not None:
        os.environ.update(variables(way, int(rank)))


# Lightning's own launcher sets no RANK; of nodes with one device each it sets NODE_RANK
PLACES = ("RANK", "NODE_RANK", "LOCAL_RANK")
