"""How much memory this process may still take, in each place where training state may live."""

from hf_zero.memory.free import DiskFree, Free, free_bytes, measure

__all__ = ["DiskFree", "Free", "free_bytes", "measure"]
