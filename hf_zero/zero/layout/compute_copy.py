"""Values for computation that differ from those of the flat buffer by a function (weights in fewer
bits, say).

[Note: changed values]
Shards, master weights and reads of a script between forward and backward have the unchanged values;
a forward, the backward over its graph, and recomputation there read changed ones. Gradients are
taken with respect to the changed values and applied to the unchanged parameters: a straight-through
estimator. Sharded values are changed in place after their gather, which adds no memory and no
messages. Parameters that stay whole between passes point at a second buffer during a pass; it keeps
its storage, as ``FlatBuffer.full`` does. Values that a script has gathered (GatheredParameters) are
changed for the pass and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from hf_zero.zero.layout.parameter_views import ParameterGuard, ParameterViews, UserWrites

# Changes the parameters of one flat buffer, by name, in place. Must be deterministic: the same
# result for the same values, on all ranks, from a forward to the end of its backward.
Change = Callable[[Mapping[str, torch.Tensor]], None]


class ChangedBuffer(Protocol):
    """A flat buffer, as what changes its values calls it."""

    sharded: bool
    full: torch.Tensor
    views: dict[str, torch.Tensor]
    parameter_views: ParameterViews
    guard: ParameterGuard
    transform: WeightTransform | None

    def take_user_writes(self) -> None: ...

    def refuse_changed(self, name: str) -> None: ...

    def set_transform(self, change: Change | None, values: str) -> None: ...


class WeightTransform:
    """Changed values of ``flat`` that modules compute with; ``values`` names them in messages.

    A pass calls :meth:`use` before a module reads, and :meth:`end` once it is over
    (:class:`ChangedValues`). Each gather of a sharded flat buffer calls :meth:`expect` before and
    :meth:`gathered` after it; changed values then stay in ``full`` until the next gather.
    """

    def __init__(self, flat: ChangedBuffer, change: Change, values: str):
        self._flat, self._change, self.values = flat, change, values
        self.under_way = False  # modules compute with changed values, which must not be written to
        self._for_script = False  # the gather under way is for a script
        # of a sharded flat buffer that a script has gathered: its values, during a pass
        self._unchanged: torch.Tensor | None = None
        with torch.inference_mode(False):  # of parameters that stay whole
            self._second = None if flat.sharded else torch.empty_like(flat.full)
            self._views = {}
            if self._second is not None:
                self._views = flat.parameter_views.views_of(self._second)
        self._writes = UserWrites(self._views)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """The buffers beside ``full``."""
        return [buffer for buffer in (self._second, self._unchanged) if buffer is not None]

    def data_of(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, the memory of parameter ``name``, as a tensor whose writes are
        counted, if they are in the second buffer.
        """
        view = self._views.get(name)
        if view is None or values.data_ptr() != view.data_ptr():
            return values
        return self._writes.alias(name, view)

    def expect(self, for_script: bool) -> None:
        """Prepare for a gather into ``full``; ``for_script``: a script reads it, unchanged."""
        self.under_way, self._for_script = False, for_script

    def gathered(self) -> None:
        """Change the values after a gather into ``full``, unless a script asked for it."""
        if not self._for_script:
            with torch.inference_mode(False), torch.no_grad():
                self._change(self._flat.views)
            self.under_way = True

    def use(self, renew: bool) -> None:
        """Switch to the changed values; ``renew``: recompute them, for a forward."""
        if self.under_way:
            return
        flat = self._flat
        flat.take_user_writes()
        with torch.inference_mode(False), torch.no_grad():
            if self._second is None:
                if flat.guard.pins:
                    self._unchanged = flat.full.clone()
                self._change(flat.views)
            else:
                if renew:
                    self._second.copy_(flat.full)
                    self._change(self._views)
                    self._writes.accept()
                flat.parameter_views.point_at(self._views)
        self.under_way = True

    def end(self) -> None:
        """End the pass: parameters that are whole between passes have their unchanged values again.
        Raises PartitionError if a module has written to them.
        """
        flat = self._flat
        if not self.under_way or (self._second is None and self._unchanged is None):
            return
        try:
            flat.take_user_writes()
            for name in self._writes.names():
                self._writes.accept()
                flat.refuse_changed(name)
        finally:
            with torch.inference_mode(False), torch.no_grad():
                if self._unchanged is not None:
                    flat.full.copy_(self._unchanged)
                    self._unchanged = None
                else:
                    flat.parameter_views.point_at(flat.views)
            self.under_way = False


class ChangedValues:
    """The flat buffers of an engine whose modules compute with changed values, pass by pass."""

    def __init__(self) -> None:
        self.used: list[WeightTransform] = []  # in the pass under way
        self._changed: set[ChangedBuffer] = set()
        self.on = False  # some flat buffer has changed values

    def change(
        self, flats: Sequence[ChangedBuffer], change: Change | None, values: str = "changed weights"
    ) -> None:
        """Call ``set_transform`` on each of ``flats``. Called between passes."""
        for flat in flats:
            flat.set_transform(change, values)
        self._changed = self._changed - {*flats} if change is None else self._changed | {*flats}
        self.on = bool(self._changed)

    def use(self, flats: Iterable[ChangedBuffer], renew: bool) -> None:
        """Switch gathered flat buffers to their changed values before a module reads them;
        ``renew``: in a forward.
        """
        for transform in (flat.transform for flat in flats):
            if transform is not None and not transform.under_way:
                transform.use(renew)
                self.used.append(transform)

    def end(self) -> None:
        """End the pass, also after an exception."""
        used, self.used = self.used, []
        with ExitStack() as ending:  # the others, too, if one raises
            for transform in reversed(used):
                ending.callback(transform.end)
