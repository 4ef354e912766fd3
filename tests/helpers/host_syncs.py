"""Host synchronizations: operations for which the host waits until the device has caught up,
counted by where they are called.

On a CPU nothing waits, but the same operations run: a mode of the dispatcher sees them in the
thread that trains. The threads of an engine that work in the background are outside of it, as what
they wait for keeps nobody else waiting. On another device two kinds more are counted: copies to it
from memory that is not pinned, or that are not asked to be asynchronous; and waits for events,
streams and the whole device that were not over when they began.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Their result, or its shape, is known to the host when they return.
READ_BACK = frozenset(
    f"aten.{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero",
        "_unique2", "unique_dim",
        "unique_consecutive", "bincount", "repeat_interleave.Tensor", "item", "allclose",
    )
)  # fmt: skip
INDEXED = frozenset(("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"))
# of a tensor on a CPU these reach no dispatcher
TO_HOST = frozenset(("cpu", "tolist", "numpy", "__array__"))
# made on the host, and then copied in an operation that reaches no dispatcher
MADE = frozenset(("tensor", "as_tensor", "asarray", "new_tensor"))


class HostSyncs(TorchDispatchMode):
    """Counts ``(package, file, operation)`` of every synchronization while it is entered; of
    tensors of ``device`` alone.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.kind = torch.device(device).type
        self.found: Counter[tuple[str, str, str]] = Counter()
        self._calls = _Calls(self)
        self._waits_seen = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> HostSyncs:
        self._thread = threading.get_ident()
        if self.kind != "cpu":
            module = torch.get_device_module(self.kind)
            for owner in (module.Event, module.Stream, module):
                seen = self._noting(owner.synchronize, "" if owner is module else "query")
                self._waits_seen.enter_context(mock.patch.object(owner, "synchronize", seen))
        self._calls.__enter__()
        super().__enter__()
        return self

    def _noting(self, wait: Any, query: str) -> Any:
        """``wait``, a function or method, noted where it is not over by what ``query`` says."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            over = query and getattr(args[0], query)()
            if threading.get_ident() == self._thread and not over:
                self.note("synchronize")
            return wait(*args, **kwargs)

        return noting

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._calls.__exit__(kind, error, trace)
        self._waits_seen.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            self.note(func._schema.name.replace("aten::", ""))
        return func(*args, **kwargs)

    def of(self, package: str) -> Counter[str]:
        """Count the operations that ``package`` has called, by the file of the call and the
        name.
        """
        return Counter(
            {
                f"{file}: {name}": count
                for (owner, file, name), count in self.found.items()
                if owner == package
            }
        )

    def note(self, name: str) -> None:
        self.found[(*_caller(), name)] += 1

    def on_device(self, values: Any) -> bool:
        return any(
            isinstance(value, torch.Tensor) and value.device.type == self.kind for value in values
        )

    def _waits(self, func: Any, args: Any, kwargs: Any) -> bool:
        name, overload = str(func.overloadpacket), func._overloadname
        if name in READ_BACK or f"{name}.{overload}" in READ_BACK:
            return self.on_device(args) and kwargs.get("output_size") is None
        if name in INDEXED:
            return any(
                i is not None
                and i.dtype in (torch.bool, torch.uint8)
                and i.device.type == self.kind
                for i in args[1]
            )
        if self.kind == "cpu":
            return False
        if name == "aten.copy_":
            to, source, *more = args
            return _blocks(source, to.device, more[0] if more else kwargs.get("non_blocking"))
        if name == "aten._to_copy":
            to = kwargs.get("device")
            return to is not None and _blocks(args[0], torch.device(to), kwargs.get("non_blocking"))
        return False


def _blocks(source: torch.Tensor, to: torch.device, non_blocking: Any) -> bool:
    """Whether the host waits for a copy of ``source``."""
    here = source.device.type
    if here == to.type or not source.numel():
        return False
    if here == "cpu":
        return not (non_blocking and source.is_pinned())
    return to.type == "cpu" and not non_blocking


class _Calls(TorchFunctionMode):
    """Methods that hand a CPU tensor's values over without an operation."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            self.syncs.kind == "cpu"
            and getattr(func, "__name__", "") in TO_HOST
            and self.syncs.on_device(args[:1])
        ):
            self.syncs.note(func.__name__)
        result = func(*args, **(kwargs or {}))
        if (
            self.syncs.kind != "cpu"
            and getattr(func, "__name__", "") in MADE
            and self.syncs.on_device([result])
            and not any(isinstance(each, torch.Tensor) for each in args[-1:])
        ):
            self.syncs.note("tensor of numbers")
        return result


def _caller() -> tuple[str, str]:
    """Package and file of the innermost frame that is neither torch's nor this one."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__) and not path.name.startswith("<"):
            inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            if SITE in path.parts:
                inside = Path(*path.parts[path.parts.index(SITE) + 1 :])
            parts = [part for part in inside.parts if part in OWNERS]
            return parts[0] if parts else path.stem, path.name
        frame = frame.f_back  # type: ignore[assignment]
    return "", ""


ROOT = Path(__file__).parents[2]
SITE = "site-packages"
OWNERS = ("hf_zero", "transformers", "accelerate", "trl", "peft", "lightning", "tests")
