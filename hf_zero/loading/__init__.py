"""Loading into shards: tensors that are expressions over files, of which each rank reads its own elements."""

from hf_zero.loading.initialised import make_fillable, recorded
from hf_zero.loading.lazy import LazyTensor, NotRecorded
from hf_zero.loading.opened import Opened, make_pending, make_real

__all__ = ["LazyTensor", "NotRecorded", "Opened", "make_fillable", "make_pending", "make_real", "recorded"]
