"""``deepspeed.runtime.sequence_parallel.ulysses_sp``."""

from hf_zero.integrations.not_built import type_of

_INSTEAD = "set sp_size to 1"
_HOME = "deepspeed.runtime.sequence_parallel.ulysses_sp"

UlyssesSPAttentionHF = type_of(f"{_HOME}.UlyssesSPAttentionHF", _INSTEAD)
UlyssesSPDataLoaderAdapter = type_of(f"{_HOME}.UlyssesSPDataLoaderAdapter", _INSTEAD)

__all__ = ["UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"]
