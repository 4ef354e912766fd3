"""``engine.offload_states``: training state that leaves the device for host memory, and returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.deepspeed.zero_sections import OffloadDeviceEnum, OffloadStateTypeEnum
from hf_zero.device import kinds
from hf_zero.errors import ConfigError
from hf_zero.zero.state_bytes import GATHERED, MASTERS, MOMENTS, tensors_on_device

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


AWAY = "while offload_states() keeps state in host memory; call engine.reload_states() first"
KINDS = tuple(kind.value for kind in OffloadStateTypeEnum)
# by the engine's kinds (``zero/state_bytes.py``)
_NAMES = {
    "parameters": "lp_params",
    GATHERED: "lp_params",
    "gradients": "lp_grads",
    MASTERS: "hp_params",
    MOMENTS: "optim_states",
}


class StatesAway:
    """The offloaded storages with their host copies. Storages are emptied and refilled in place:
    every view of them, in parameters, segments and buffers, stays valid.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def send(
        self, engine: TrainingEngine, include: Iterable[str], pin: bool, non_blocking: bool
    ) -> None:
        """Copy the storages that hold only kinds in ``include`` to host memory, and free their
        device memory.
        """
        chosen = set(include)
        storages: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}
        for kind, tensor in tensors_on_device(engine):
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, (storage, set()))[1].add(_NAMES[kind])
        for storage, kinds_in_it in storages.values():
            if storage.nbytes() and kinds_in_it <= chosen:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin)
                host.copy_(_bytes(storage), non_blocking=non_blocking)
                self._away.append((storage, host))
        kinds.synchronize(engine.device)  # complete the copies before their sources are freed
        for storage, _ in self._away:
            storage.resize_(0)
        engine.changes.away = AWAY if self._away else ""
        engine.changes.parameters_away |= "lp_params" in chosen

    def reload(self, engine: TrainingEngine, non_blocking: bool) -> None:
        """Refill the storages."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=non_blocking)
        if non_blocking:
            kinds.synchronize(engine.device)  # the host copies are freed now
        self._away, engine.changes.away, engine.changes.parameters_away = [], "", False


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage)  # type: ignore[call-overload]


def checked(include: Any, device: object) -> tuple[str, ...]:
    """Return the kinds to move, all if ``include`` is None. Raises ConfigError for unknown kinds
    and devices.
    """
    where = getattr(device, "value", device)
    if where not in (OffloadDeviceEnum.cpu.value, OffloadDeviceEnum.none.value):
        raise ConfigError(f"offload_states: device is {where!r}; states go to the host: pass 'cpu'")
    several = isinstance(include, Iterable) and not isinstance(include, str)
    named = KINDS if include is None else include if several else (include,)
    chosen = tuple(getattr(kind, "value", kind) for kind in named)
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise ConfigError(f"offload_states: {unknown} is not a state; choose among {list(KINDS)}")
    return () if where == OffloadDeviceEnum.none.value else chosen
