"""The steps of engines in scripts for Accelerate: backwards, clipping, steps and zero_grad.

[Note: who steps]
Accelerate passes every loss to the first engine that an Accelerator has prepared, which steps
immediately; ``step()`` and ``zero_grad()`` of its optimizers do nothing. So whatever a script does
between the backward and ``optimizer.step()`` would act a step late: a clipping norm, settings of
the optimizer, writes to gradients and weights. Here a backward leaves its gradients in each engine
that it passes through, and the optimizers' methods take effect: ``optimizer.step()`` steps its own
engine, ``optimizer.zero_grad()`` drops its gradients.

DeepSpeed allows scripts that never call ``optimizer.step()``. Until a single engine has seen the
first call, it makes a step that is due before the next forward with gradients, which all ranks
run, or before any forward if the backward has updated a part of the model; then in each backward,
or, if the script had clipped that one, in ``clip_grad_norm_``. The
first ``optimizer.step()`` ends that.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING

import torch

from hf_zero.config.resolving import ACCUMULATION
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.loaders import refuse_uneven
from hf_zero.integrations.engine_protocol import EngineProtocol, holder_of, is_engine, trains
from hf_zero.integrations.seams import Original
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from torch import nn
    from torch.utils.hooks import RemovableHandle

_warned: weakref.WeakSet[EngineProtocol] = weakref.WeakSet()
_limited_by_script: weakref.WeakSet[EngineProtocol] = weakref.WeakSet()
_dropped: weakref.WeakSet[EngineProtocol] = (
    weakref.WeakSet()
)  # until their next step: gradients, by a load
SMALLEST_LIMIT = 1e-30  # max_norm = 0 means no clipping to an engine


class AccumulationOfScript:
    """The ``gradient_accumulation_steps`` of an Accelerator, settable after ``prepare``."""

    def __init__(self, state: GradientState):
        self._state, self._last = state, state.num_steps
        self._checked: weakref.ref[object] | None = None  # the loader checked for these steps

    def pass_on(self, engines: Iterable[EngineProtocol]) -> None:
        """Set the number of micro-batches per step of ``engines`` if the script has changed its
        own. Raises ConfigError inside a window, whose earlier micro-batches have another weight,
        and for a loader that the ranks do not train on alike.
        """
        loader = self._state.active_dataloader
        if loader is not None and (self._checked is None or self._checked() is not loader):
            for engine in engines:
                refuse_uneven(loader, engine.config.stage, engine.gradient_accumulation_steps())
            self._checked = weakref.ref(loader)
        steps = self._state.num_steps
        if steps == self._last:
            return
        for engine in engines:
            before = engine.gradient_accumulation_steps()
            if steps == before:
                continue
            if engine.window_is_open:
                raise ConfigError(
                    f"accelerator.{ACCUMULATION} = {steps} is set inside an accumulation window of "
                    f"{before} micro-batches; set it after the optimizer.step() that ends the "
                    "window"
                )
            engine.set_batches(engine.train_micro_batch_size_per_gpu(), steps)
        self._last, self._checked = steps, None


class StepCaller(Enum):
    """Who makes the steps of a single engine, as far as its script has shown."""

    UNKNOWN = "nobody yet"
    OPTIMIZER = "optimizer.step()"
    CLIPPING = "clip_grad_norm_, in a script that never calls optimizer.step()"
    BACKWARD = "accelerator.backward(), in a script that calls neither"


class EngineSteps:
    """The backwards, clipping and steps of the trained engines of one Accelerator, in place of its
    ``DeepSpeedEngineWrapper`` (the note).
    """

    def __init__(self, engines: list[EngineProtocol], accumulation: AccumulationOfScript):
        self.engines = engines
        self._accumulation = accumulation
        self._single = engines[0] if len(engines) == 1 else None
        self.claim = StepCaller.OPTIMIZER if self._single is None else StepCaller.UNKNOWN
        self.due = False  # a backward has ended a window, and no step has used its gradients
        # the step was made before a forward with gradients, as its script had called no step yet
        self._stepped_early = False
        self._emptied = False  # zero_grad() has dropped the gradients of a window that had ended
        self._clipped: set[EngineProtocol] = set()  # by the script, since their last step
        self._named_limit: set[EngineProtocol] = set()  # whose script has called clip_grad_norm_
        self._told_limit: set[EngineProtocol] = set()  # whose script was told of none
        self._backwards = 0  # of ``accelerator.backward`` since the last ``optimizer.step()``
        self._held = 0  # micro-batches after the last ``optimizer.step()``
        self._trained = False  # whether the model was in training mode at the last backward
        self._hook: RemovableHandle | None = None
        if self._single is not None:
            self._hook = self._single.register_forward_pre_hook(self._before_forward)

    @property
    def engine(self) -> EngineProtocol | EngineSteps:
        """The object that ``accelerator.free_memory`` destroys."""
        return self if self._single is None else self._single

    def get_global_grad_norm(self) -> float:
        """Return the norm of the last gradient of the first engine."""
        return self.engines[0].get_global_grad_norm()

    def destroy(self) -> None:
        with ExitStack() as all_engines:  # the others, too, if one raises
            for engine in reversed(self.engines):
                all_engines.callback(engine.destroy)

    def close(self) -> None:
        """Leave the engines to another object."""
        if self._hook is not None:
            self._hook.remove()

    # ---- backwards ----

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Accumulate gradients of ``loss`` in the engines it passes through. Inside
        ``accelerator.no_sync`` it does not end a window.
        """
        if self.claim is StepCaller.CLIPPING:
            self._make_overdue_step()
        self._stepped_early = self._emptied = False
        self._trained = self.engines[0].training
        self._accumulation.pass_on(self.engines)
        for engine in self.engines:
            ends = bool(sync_gradients) and not engine.in_no_sync
            engine.set_gradient_accumulation_boundary(ends)
        self.engines[0].backward(loss, **kwargs)
        self._backwards += 1
        self.due |= bool(sync_gradients) and not self.engines[0].in_no_sync
        if self.claim is StepCaller.BACKWARD:
            self._make_step()

    def _before_forward(self, *_: object) -> None:
        engine = self.engines[0]
        if not self.due or engine.pass_is_under_way:
            return
        # a metric in evaluation mode changes nothing
        evaluates = not torch.is_grad_enabled() or (self._trained and not engine.training)
        if self.claim is not StepCaller.OPTIMIZER and not evaluates:
            self._make_overdue_step()

    def _make_overdue_step(self) -> None:
        """Make the step, if one is due, of a script that has shown that it will not."""
        if self.due:
            is_first = self.claim is StepCaller.UNKNOWN
            self._stepped_early = is_first
            self.claim = StepCaller.CLIPPING if is_first and self._clipped else StepCaller.BACKWARD
            self._make_step()

    def make_unclaimed_step(self) -> None:
        """Make a step that is due in a script that has made steps without ``optimizer.step()``,
        before all ranks read its state. Collective.
        """
        if (
            self.claim in (StepCaller.CLIPPING, StepCaller.BACKWARD)
            and not self.engines[0].destroyed
        ):
            self._make_overdue_step()

    # ---- clipping ----

    def clip(self, engine: EngineProtocol, limit: float, syncs: bool) -> torch.Tensor | None:
        """Clip the gradient of ``engine`` to ``limit`` if its configuration leaves the limit to the
        script, or has the same. Return the norm before, on the device; where no step is due that of
        the last one, with several engines None inside a window.
        """
        if self._stepped_early:
            self._refuse_early_step("clip_grad_norm_")
        is_open = engine in _limited_by_script
        if is_open:
            self._named_limit.add(engine)
            set_limit(engine, limit)
        if self._single is None and not syncs:
            return None
        if (self._single is not None and not self.due) or not engine.holds_gradients():
            return engine.grad_norm_tensor()
        if not is_open and limit != engine.max_norm:
            return engine.measure_gradient()
        self._clipped.add(engine)
        norm = engine.clip_gradient(max(limit, SMALLEST_LIMIT))
        if self.claim is StepCaller.CLIPPING:
            self._make_step()
        return norm

    def _refuse_early_step(self, what: str) -> None:
        """Raise PartitionError: a step was made before a forward."""
        self._stepped_early = False
        raise PartitionError(
            f"{what} comes after a forward with gradients that followed accelerator.backward(), "
            "before this script has first called optimizer.step(): the step was made before that "
            "forward, as for scripts that never call it. Run forwards between the backward and "
            "optimizer.step() inside `with torch.no_grad():`, and add up several losses of one "
            "step before the backward"
        )

    # ---- steps ----

    def step(self, wrapped: AcceleratedOptimizer, *closure: object, **kwargs: object) -> None:
        """Make the step of the engine of ``wrapped``: its ``step`` method. Raises PartitionError
        for an optimizer of none of the engines, for a gradient of ``loss.backward()``, and for a
        step that was made before a forward.
        """
        optimizer, single = wrapped.optimizer, self._single
        engine = next((engine for engine in self.engines if engine.optimizer is optimizer), None)
        if engine is None:
            raise PartitionError(
                f"{type(optimizer).__name__}.step(): no engine that this Accelerator trains has "
                "this optimizer, as after destroy() of its engine; call step() of the optimizer "
                "that accelerator.prepare has returned with the model that trains"
            )
        if closure or kwargs:
            optimizer.step(*closure, **kwargs)  # the engine's, which takes no closure
        if single is None:
            if wrapped.gradient_state.sync_gradients and not _were_dropped(optimizer):
                self._step_engine(engine)
            return
        earlier, self.claim = self.claim, StepCaller.OPTIMIZER
        if earlier in (StepCaller.CLIPPING, StepCaller.BACKWARD):
            self._refuse_early_step("optimizer.step()")
        backwards, self._backwards = self._backwards, 0
        before, self._held = self._held, single.held_micro_batches
        if not backwards and self._held > before:
            raise PartitionError(
                "loss.backward() came before this optimizer.step(), which Accelerate leaves to "
                "accelerator.backward(loss) under ZeRO: nothing would be trained; call "
                "accelerator.backward(loss) in place of loss.backward()"
            )
        self._make_step()
        if self._emptied:
            single.run_step_hooks()
            self._emptied = False
        self._held = single.held_micro_batches

    def _make_step(self) -> None:
        """Make the step of the single engine, if it is due."""
        engine = self.engines[0]
        if self.due:
            if engine.holds_gradients():  # else the script has called engine.step() itself
                self._step_engine(engine)
            self.due = False

    def _step_engine(self, engine: EngineProtocol) -> None:
        if engine in _limited_by_script and engine not in self._clipped:
            if engine not in self._named_limit:
                self._warn_of_limit(engine)
            elif (
                self.claim is StepCaller.OPTIMIZER and engine.max_norm and engine.holds_gradients()
            ):
                engine.clip_gradient(math.inf)  # the script clips others
        engine.step()
        self._clipped.discard(engine)

    def _warn_of_limit(self, engine: EngineProtocol) -> None:
        """Warn once of the limit that Accelerate fills in for a script that names none."""
        if engine.max_norm and engine not in self._told_limit:
            log_rank0(
                f"gradients are clipped to a norm of {engine.max_norm:g}: Accelerate fills that in "
                "where neither the configuration nor the script names a limit; write "
                "gradient_clipping: 0.0 in the configuration for no clipping, or your limit "
                "(hf-zero launch --set gradient_clipping=0.0)",
                logging.WARNING,
            )
        self._told_limit.add(engine)

    def zero_grad(self, wrapped: AcceleratedOptimizer) -> None:
        """Drop the gradients of the engine of ``wrapped`` at the end of a window: its ``zero_grad``
        method.
        """
        for engine in self.engines if wrapped.gradient_state.sync_gradients else ():
            if engine.optimizer is wrapped.optimizer:
                engine.zero_grad()
                self._clipped.discard(engine)
                if self._single is not None:
                    self._emptied |= self.due
                    self.due, self._backwards, self._held = False, 0, 0

    def forget_window(self) -> None:
        """Forget what has come since the last ``optimizer.step()``, as a load of state has dropped
        its gradients; with several engines the next step of each does nothing, unless a backward
        brings new ones.
        """
        self.due = self._stepped_early = self._emptied = False
        self._backwards = self._held = 0
        self._clipped.clear()
        if self._single is None:
            _dropped.update(self.engines)


def register_engines(
    accelerator: Accelerator, limited_by_script: Iterable[EngineProtocol] = ()
) -> None:
    """Let an :class:`EngineSteps` make the steps of the engines that ``accelerator`` has prepared,
    and its optimizers call it.

    ``limited_by_script``: engines whose configuration leaves the clipping norm open.
    """
    _limited_by_script.update(limited_by_script)
    # an engine without an optimizer, such as a teacher's, cannot step
    engines = [m for m in accelerator._models if is_engine(m) and trains(m)]
    steps: object = accelerator.deepspeed_engine_wrapped
    if not engines:
        return
    if not (isinstance(steps, EngineSteps) and steps.engines == engines):
        if isinstance(steps, EngineSteps):
            steps.close()
        steps = EngineSteps(engines, AccumulationOfScript(accelerator.gradient_state))
        accelerator.deepspeed_engine_wrapped = steps
    for optimizer in accelerator._optimizers:
        optimizer.step = _method(optimizer, steps.step)
        optimizer.zero_grad = _method(
            optimizer, lambda wrapped, *_, steps=steps, **__: steps.zero_grad(wrapped)
        )


def _method(wrapped: AcceleratedOptimizer, call: Callable[..., None]) -> MethodType:
    """Return ``call`` as a method of ``wrapped`` with a function: torch's schedulers access its
    ``__func__``.
    """

    def method(self: AcceleratedOptimizer, *args: object, **kwargs: object) -> None:
        call(self, *args, **kwargs)

    return MethodType(method, wrapped)


def set_limit(engine: EngineProtocol, limit: float) -> None:
    """Clip gradients of the next steps of ``engine`` to norm ``limit``; infinity: no clipping."""
    engine.max_norm = 0.0 if math.isinf(limit) else max(limit, SMALLEST_LIMIT)


@contextmanager
def add_up_in_no_sync(original: Original, self: Accelerator, model: nn.Module) -> Iterator[None]:
    """Wraps ``Accelerator.no_sync``: backwards inside accumulate at every stage; Accelerate's
    version ignores engines of stages 2 and 3.
    """
    with model.no_sync() if is_engine(model) and self.sync_gradients else original(self, model):
        yield


def _were_dropped(optimizer: torch.optim.Optimizer) -> bool:
    """Return, once after a load of state, whether the engine of ``optimizer`` has got no gradients
    since (collective).
    """
    engine = next((engine for engine in _dropped if engine.optimizer is optimizer), None)
    if engine is None:
        return False
    _dropped.discard(engine)
    return not engine.holds_gradients()


def clip_by_the_engine(
    original: Original,
    self: Accelerator,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> torch.Tensor | None:
    """Wraps ``Accelerator.clip_grad_norm_``: returns the gradient norm, a tensor on the device, of
    the engine that owns ``parameters``. Its step clips to ``max_norm`` if the configuration leaves
    the norm open; warns once if it has a different one.
    """
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    engine = holder_of(tensors) if finder.chosen() else None
    if engine is None:
        return original(self, tensors, max_norm, norm_type)
    if float(norm_type) != 2.0:
        raise PartitionError(
            f"clip_grad_norm_(norm_type={norm_type}): the engine clips in its step, by the L2 norm "
            "of the whole gradient, and keeps no other; leave norm_type at 2"
        )
    if engine in _limited_by_script:
        _refuse_part(engine, tensors)
    else:
        _warn_limit(engine, float(max_norm))
    wrapped = self.deepspeed_engine_wrapped
    if not isinstance(wrapped, EngineSteps) or engine not in wrapped.engines:
        return None if wrapped is None else engine.grad_norm_tensor()
    return wrapped.clip(engine, float(max_norm), self.sync_gradients)


def _refuse_part(engine: EngineProtocol, parameters: Iterable[object]) -> None:
    """Raise PartitionError if ``parameters`` lacks a parameter that ``engine`` trains."""
    named = {id(parameter) for parameter in parameters}
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    missing = sum(id(parameter) not in named for parameter in trained)
    if missing:
        raise PartitionError(
            f"clip_grad_norm_ got parameters without {missing} of the {len(trained)} that the "
            "engine trains: the engine clips by the norm of the whole gradient. Pass "
            "model.parameters(), or write gradient_clipping in the configuration"
        )


def _warn_limit(engine: EngineProtocol, max_norm: float) -> None:
    limit = float(engine.config.gradient_clipping or 0.0)
    if limit != max_norm != math.inf and engine not in _warned:  # infinity only reads the norm
        _warned.add(engine)
        log_rank0(
            f"clip_grad_norm_(max_norm={max_norm:g}) only reads the norm under ZeRO; the "
            "engine clips in its step, "
            + (
                f"at gradient_clipping = {limit:g} of the configuration"
                if limit
                else "and its configuration has no gradient_clipping"
            )
            + f"; write gradient_clipping: {max_norm:g} there",
            logging.WARNING,
        )
