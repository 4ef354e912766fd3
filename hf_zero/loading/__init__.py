"""Loading into shards: lazy tensors that are expressions over files, of which each rank reads its
own elements.
"""

from hf_zero.loading.building import Building, give_values, record_in, recorded
from hf_zero.loading.lazy import LazyTensor
from hf_zero.loading.pending import Opened, make_pending, make_real, read_pending

__all__ = [
    "Building",
    "LazyTensor",
    "Opened",
    "give_values",
    "make_pending",
    "make_real",
    "read_pending",
    "record_in",
    "recorded",
]
