"""Steps of the user's optimizer over segments by its own code, with torch's fused kernels where a
group runs them, and workarounds for errors of these kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hf_zero.offload.storage import MASTER
from hf_zero.optim.adam import Adam
from hf_zero.optim.device_state import DeviceState
from hf_zero.optim.probing import bare_step
from hf_zero.optim.segment_entries import without_none
from hf_zero.optim.segments import ParamState, Segment, StateArrays, step_dtype

# Classes whose fused step reads ``optimizer.grad_scale``, with its op.
_OPS: dict[type | None, str] = {
    Adam: "aten::_fused_adam_",
    torch.optim.Adam: "aten::_fused_adam_",
    torch.optim.AdamW: "aten::_fused_adamw_",
    torch.optim.SGD: "aten::_fused_sgd_",
    torch.optim.Adagrad: "aten::_fused_adagrad_",
}


def is_own(step: object, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step`` is the class's method, at most wrapped by a scheduler's counter."""
    function = getattr(
        step, "__wrapped__" if getattr(step, "_wrapped_by_lr_sched", False) else "__func__", None
    )
    return function is type(optimizer).step


def choose_fused(base: type | None, group: dict[str, Any], tensors: Iterable[Tensor]) -> None:
    """Switch ``fused`` on in a group of an optimizer of class ``base`` that leaves it open, if
    there is a kernel for its ``tensors``.
    """
    op = _OPS.get(base)
    if op is None or group["differentiable"] or {group["fused"], group["foreach"]} != {None}:
        return
    stored = {(tensor.dtype, tensor.device.type) for tensor in tensors}
    stepped = {(step_dtype(dtype), device) for dtype, device in stored}
    if all(dtype == torch.float32 and _is_fused(base, op, device) for dtype, device in stepped):
        group["fused"] = True


def reopen_fused(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that undoes :func:`choose_fused` in groups that leave ``fused`` open."""
    groups = optimizer.param_groups
    left_open = [at for at, group in enumerate(groups) if group.get("fused", False) is None]

    def reopen() -> None:
        # by index: load_state_dict replaces the groups, and a script may have removed some
        for at, group in enumerate(optimizer.param_groups):
            if at in left_open:
                group["fused"] = None

    return reopen


@cache
def _is_fused(base: type, op: str, device_type: str) -> bool:
    key = torch._C._dispatch_key_for_device(device_type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op, key):
        return False
    if base is torch.optim.Adagrad:  # up to torch 2.12 it refuses its own kernel for CUDA
        probe = torch.nn.Parameter(torch.zeros(1, device=device_type))
        probe.grad = torch.zeros_like(probe)
        try:
            base([probe], fused=True).step()
        except RuntimeError:
            return False
    return True


PRE_HOOKS, POST_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


@contextmanager
def taken_hooks(optimizer: torch.optim.Optimizer, name: str) -> Iterator[list[Callable[..., Any]]]:
    """Yield the hooks ``name`` of ``optimizer``, which torch does not call meanwhile."""
    hooks = vars(optimizer).setdefault(name, OrderedDict())
    setattr(optimizer, name, OrderedDict())
    try:
        yield [*hooks.values()]
    finally:
        setattr(optimizer, name, hooks)


_has_begun = attrgetter("begun")
RunHooks = Callable[
    [Callable[[], None], Sequence[Segment], list[Tensor]], tuple[list[Segment], list[Tensor]]
]
"""Run hooks before a step of segments with their gradients; return those that are stepped."""


class OptimizerPhase:
    """Whether a step of the optimizer is under way, in which its groups have the segments and its
    hooks may set gradients (:class:`OwnStep` sets that), and whether one of its hooks runs, which
    may be after a step.
    """

    def __init__(self) -> None:
        self.in_step = self.in_hook = False

    @contextmanager
    def running_hook(self) -> Iterator[None]:
        """Context in which a hook of the optimizer runs."""
        self.in_hook = True
        try:
            yield
        finally:
            self.in_hook = False


class OwnStep:
    """Steps of the optimizer whose segments have their state in ``device``, noted in ``phase``.
    ``base``: its class among the classes with a known update.
    """

    def __init__(
        self,
        base: type[torch.optim.Optimizer] | None,
        device: DeviceState,
        phase: OptimizerPhase,
        run_hooks: RunHooks,
    ) -> None:
        self._device, self._states, self._bf16 = device, device.entries.states, device.entries.bf16
        self._base, self._phase, self._run_hooks = base, phase, run_hooks
        self._optimizer = device.entries.optimizer
        self.step = self._optimizer.step  # with the wrappers LR schedulers have put on the object

    def update_rounded(
        self,
        segments: Sequence[Segment],
        grad_scale: Tensor | None,
        steps_before: int,
        run_pre_hooks: Callable[[], None] | None,
    ) -> None:
        """Make :meth:`update` in batches of segments, whose state is kept in bf16. ``steps_before``
        seeds the rounding. ``run_pre_hooks``: None: without any hooks of the optimizer.
        """
        assert self._bf16 is not None
        bf16, optimizer = self._bf16, self._optimizer
        batches, step = bf16.batches(segments), self.step_without_hooks
        reads_all = not is_own(self.step, optimizer) or optimizer._optimizer_step_pre_hooks
        # a step of the user's, and hooks that read gradients, need all segments at once
        hooks = run_pre_hooks is not None
        if hooks and reads_all:
            batches, step = [list(segments)], self.step
        created_by_step = self._device.create_for_first_step(segments)

        def run(optimizer: torch.optim.Optimizer) -> None:
            for batch in batches:
                with bf16.widened(batch, self._states, steps_before) as run_hooks:
                    run_pre = run_pre_hooks and partial(run_hooks, run_pre_hooks)
                    self.update(batch, grad_scale, step, run_pre)

        if hooks and step == self.step_without_hooks:
            torch.optim.Optimizer.profile_hook_step(run)(optimizer)
        else:
            run(optimizer)
        if created_by_step:
            self._move_created(created_by_step)

    def update(
        self,
        segments: Sequence[Segment],
        grad_scale: Tensor | None,
        step: Callable[[], object] | None = None,
        run_pre_hooks: Callable[[], None] | None = None,
    ) -> None:
        """Step ``segments`` from the gradients of their flat buffers, divided by ``grad_scale``, by
        ``step``, the user's by default. ``run_pre_hooks`` runs the optimizer's own hooks before a
        step.
        """
        groups = self._optimizer.param_groups
        unfused = self._groups_to_unfuse(segments) if self._base is torch.optim.SGD else ()
        for index in unfused:
            groups[index]["fused"] = False
        try:
            hooked = bool(self._optimizer._optimizer_step_pre_hooks)
            is_first = not all(map(_has_begun, segments))
            created_by_step = self._device.create_for_first_step(segments) if is_first else []
            gradients = [*map(Segment.gradient, segments)]
            if grad_scale is not None:
                grad_scale = self._divide(gradients, grad_scale, hooked)
            hooks = run_pre_hooks if hooked else None
            self._run_step(step or self.step, segments, gradients, grad_scale, hooks)
            if created_by_step:
                self._move_created(created_by_step)
        finally:
            for index in unfused:
                self._optimizer.param_groups[index]["fused"] = True

    def _move_created(self, begun: Sequence[Segment]) -> None:
        """Move the state of ``begun``, which the step has created, into arrays on the device."""
        current = [piece for segment in begun for piece in segment.region.within(segment)]
        self._device.move_into_arrays(current, created_by_step=True)

    def step_stand_ins(self, segments: Sequence[Segment]) -> None:
        """Step ``segments``, which own nothing, with zero gradients."""
        self._device.create_for_first_step(segments)
        widened: AbstractContextManager[object] = nullcontext()
        if self._bf16 is not None:
            widened = self._bf16.widened(segments, self._states, 0)
        with widened:
            zeros = [torch.zeros_like(segment.tensor) for segment in segments]
            self._run_step(self.step_without_hooks, segments, zeros)

    def update_sub_group(
        self,
        segment: Segment,
        arrays: StateArrays,
        grad: Tensor,
        divisor: float,
        is_first_step: bool,
    ) -> None:
        """Make one update of ``segment``, a sub-group of offloaded state, whose master weights and
        moments are in ``arrays``, from ``grad`` divided by ``divisor``.
        """
        entries: ParamState = self._states[segment.tensor]
        placeholder = segment.tensor.data
        placeholders = {name: entries[name] for name in arrays if name in entries}
        segment.tensor.data = arrays[MASTER]
        if is_first_step and self._device.step_creates_state:
            entries.clear()
        else:
            entries.update({name: arrays[name] for name in placeholders})
        gradients = [grad.to(segment.tensor.dtype)]
        scale = None
        if divisor != 1.0:
            scale = self._divide(gradients, torch.tensor(divisor, dtype=torch.float32))
        self._run_step(self.step_without_hooks, [segment], gradients, scale)
        for name, entry in placeholders.items():
            new = entries.get(name)
            if new is not None and new.data_ptr() != arrays[name].data_ptr():
                arrays[name].copy_(new)
            entries[name] = entry
        segment.tensor.data = placeholder

    def _divide(
        self, gradients: list[Tensor], grad_scale: Tensor, hooked: bool = False
    ) -> Tensor | None:
        """Divide ``gradients`` by ``grad_scale``, and return None; or return the scale for the
        fused kernels, if all groups run these and no hook (``hooked``) reads the gradients before.
        """
        # one group without a fused kernel, even one without parameters, and torch refuses the scale
        fused = self._base in _OPS and all(g.get("fused") for g in self._optimizer.param_groups)
        if fused and not hooked:
            return grad_scale
        if gradients:
            first = gradients[0]
            torch._foreach_div_(gradients, grad_scale.to(dtype=first.dtype, device=first.device))
        return None

    def _run_step(
        self,
        step: Callable[[], object],
        segments: Sequence[Segment],
        gradients: list[Tensor],
        kernel_scale: Tensor | None = None,
        run_pre_hooks: Callable[[], None] | None = None,
    ) -> None:
        """Run ``step`` with ``gradients`` of ``segments``, which its fused kernels divide by
        ``kernel_scale``. The groups have the segments as their members meanwhile, and
        ``optimizer.state`` is by segment.
        """
        optimizer: Any = self._optimizer
        members, shown = list[Any](), optimizer.state
        stepped, grads = [*segments], gradients
        self._phase.in_step = True
        try:
            if kernel_scale is not None:
                optimizer.grad_scale = kernel_scale.detach().to(torch.float32).reshape(())
            if run_pre_hooks is not None:
                stepped, grads = self._run_hooks(run_pre_hooks, segments, gradients)
            groups = optimizer.param_groups  # a hook that loads a state dict has replaced them
            members = [group["params"] for group in groups]
            optimizer.state = self._states
            for group in groups:
                group["params"] = []
            for segment, gradient in zip(stepped, grads):
                segment.tensor.grad = gradient
                groups[segment.group]["params"].append(segment.tensor)
            with nullcontext() if run_pre_hooks is None else taken_hooks(optimizer, PRE_HOOKS):
                step()
        finally:
            for segment in stepped:
                segment.tensor.grad = None
            optimizer.state = shown
            for group, params in zip(optimizer.param_groups, members):
                group["params"] = params
            self._phase.in_step = False
            if kernel_scale is not None:
                vars(optimizer).pop("grad_scale", None)

    def step_without_hooks(self) -> None:
        """Run the class's own step without hooks, which run once for the whole step."""
        bare_step(self._optimizer)

    def _groups_to_unfuse(self, segments: Sequence[Segment]) -> list[int]:
        """Return the indices of groups that must run unfused because some of their tensors make
        their first step and others do not; without dampening, begin those with zeros instead.

        torch's fused SGD raises then: it initializes the momentum of all tensors of a group or of
        none.
        """
        unfused = []
        for index, group in enumerate(self._optimizer.param_groups):
            if not (group["fused"] and group["momentum"]):
                continue
            tensors = [segment.tensor for segment in segments if segment.group == index]
            unstepped = [t for t in tensors if not without_none(self._states.get(t, {}))]
            if not 0 < len(unstepped) < len(tensors):
                continue
            if group["dampening"]:
                unfused.append(index)
                continue
            for t in unstepped:
                self._states[t]["momentum_buffer"] = torch.zeros_like(t, dtype=step_dtype(t.dtype))
        return unfused
