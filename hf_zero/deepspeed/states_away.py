"""``engine.offload_states`` and ``reload_states``: temporary offload of training state to host
memory, as between training and generation in reinforcement learning.

Storages are emptied and refilled in place: every view of them, in parameters, segments and buffers,
stays valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hf_zero.deepspeed.zero_config import OffloadDeviceEnum, OffloadStateTypeEnum
from hf_zero.device import kinds
from hf_zero.errors import ConfigError, PartitionError

KINDS = tuple(each.value for each in OffloadStateTypeEnum)


class StatesAway:
    """The offloaded storages with their host copies."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._away)

    def send(self, engine: Any, include: Iterable[str], pin: bool, non_blocking: bool) -> None:
        """Copy the storages that hold only kinds in ``include`` to host memory, and free their
        device memory.
        """
        chosen = set(include)
        held: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
        for kind, tensor in _state_of(engine):
            storage = tensor.untyped_storage()
            held.setdefault(storage._cdata, (storage, set()))[1].add(kind)
        for storage, kinds_in_it in held.values():
            if storage.nbytes() and kinds_in_it <= chosen:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
                host.copy_(_bytes(storage), non_blocking=non_blocking)
                self._away.append((storage, host))
        kinds.synchronize(engine.device)  # complete the copies before their sources are freed
        for storage, _ in self._away:
            storage.resize_(0)

    def bring(self, device: torch.device, non_blocking: bool) -> None:
        """Refill the storages."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=non_blocking)
        if non_blocking:
            kinds.synchronize(device)  # the host copies are freed now
        self._away = []

    def refuse(self, what: str) -> None:
        """Raise PartitionError if any state is offloaded."""
        if self._away:
            raise PartitionError(
                f"{what} while offload_states() keeps this engine's state in host memory; call "
                "engine.reload_states() first"
            )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage)  # type: ignore[call-overload]


def _state_of(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an engine on its device, each with its kind."""
    for flat in engine.flats:
        kept = flat.optimizer_shard
        gradients = [flat.gradient.shard, flat.gradient.accumulated_grad]
        found = {"lp_params": [flat.full, flat.shard], "lp_grads": gradients}
        if kept.has_own_master:
            found["hp_params"] = [kept.master]
        if kept.has_master and engine.bound is not None:
            states = engine.bound.tensors(kept)
            found["optim_states"] = [states[name] for name in states if name != "master"]
        for kind, tensors in found.items():
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.device == engine.device:
                    yield kind, tensor


def checked(include: Any, device: Any) -> tuple[str, ...]:
    """Return the kinds to move, all if ``include`` is None. Raises ConfigError for unknown kinds
    and devices.
    """
    where = getattr(device, "value", device)
    if where not in (OffloadDeviceEnum.cpu.value, OffloadDeviceEnum.none.value):
        raise ConfigError(f"offload_states: device is {where!r}; states go to the host: pass 'cpu'")
    wanted = KINDS if include is None else tuple(getattr(each, "value", each) for each in include)
    if unknown := sorted(set(wanted) - set(KINDS)):
        raise ConfigError(f"offload_states: {unknown} is no state; choose among {list(KINDS)}")
    return () if where == OffloadDeviceEnum.none.value else wanted
