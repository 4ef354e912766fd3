"""The steps of engines in scripts for Accelerate: backwards, clipping, steps and zero_grad.

[Note: who steps]
Accelerate passes every loss to the first engine that an Accelerator has prepared, which steps
immediately; ``step()`` and ``zero_grad()`` of its optimizers do nothing. So whatever a script does
between the backward and ``optimizer.step()`` would act a step late: a clipping norm, settings of
the optimizer, writes to gradients and weights. Here a backward leaves its gradients in each engine
that it passes through, and the optimizers' methods take effect: ``optimizer.step()`` steps its own
engine, ``optimizer.zero_grad()`` drops its gradients. An Accelerator has one :class:`EngineSteps`
for all its engines, in place of its ``DeepSpeedEngineWrapper``:

=======================================  ===================================================
call of a script                         here
=======================================  ===================================================
``accelerator.prepare(model, ...)``      :func:`register_engines`
``engine(batch)``                        :meth:`SingleEngineSteps._before_forward`, a hook
``accelerator.backward(loss)``           :meth:`EngineSteps.backward`
``accelerator.clip_grad_norm_``          :func:`clip_by_the_engine`, :meth:`EngineSteps.clip`
``optimizer.step()``                     :meth:`EngineSteps.step`
``optimizer.zero_grad()``                :meth:`EngineSteps.zero_grad`
``save_state``, ``get_state_dict``       :meth:`SingleEngineSteps.make_unclaimed_step`
``load_state``                           :meth:`EngineSteps.forget_window`
``accelerator.free_memory()``            ``EngineSteps.engine.destroy()``
=======================================  ===================================================

[Note: scripts without optimizer.step()]
DeepSpeed allows them with a single engine, so :class:`SingleEngineSteps` makes their steps. Until
it has seen the first call of ``optimizer.step()``, it makes a step that is due before the next
forward with gradients, which all ranks run; then, as the script goes on, in each backward, or, if
the script had clipped that first step, in ``clip_grad_norm_``. The first ``optimizer.step()`` ends
that. :class:`StepCaller` is what the script has shown, :class:`WindowState` whether a step is due.
"""

from __future__ import annotations

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
from hf_zero.integrations.accelerate.clipping import clipping_of
from hf_zero.integrations.accelerate.loaders import refuse_uneven
from hf_zero.integrations.engine_protocol import EngineProtocol, holder_of, is_engine, trains
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from torch import nn

# Engines of several whose gradients a load of state has dropped, until their next step.
_dropped_by_load: weakref.WeakSet[EngineProtocol] = weakref.WeakSet()


class AccumulationOfScript:
    """The ``gradient_accumulation_steps`` of an Accelerator, settable after ``prepare``."""

    def __init__(self, state: GradientState):
        self._state, self._passed_on = state, state.num_steps
        self._checked: weakref.ref[object] | None = None  # the loader checked for these steps

    def pass_on(self, engines: Iterable[EngineProtocol]) -> None:
        """Set the number of micro-batches per step of ``engines`` if the script has changed its
        own; called before each backward. Raises ConfigError inside a window, whose earlier
        micro-batches have another weight, and for a loader that the ranks do not train on alike.
        """
        loader = self._state.active_dataloader
        if loader is not None and (self._checked is None or self._checked() is not loader):
            for engine in engines:
                refuse_uneven(loader, engine.config.stage, engine.gradient_accumulation_steps())
            self._checked = weakref.ref(loader)
        steps = self._state.num_steps
        if steps == self._passed_on:
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
        self._passed_on, self._checked = steps, None


class EngineSteps:
    """The backwards, clipping and steps of the engines that train in one Accelerator: of several,
    each of which ``optimizer.step()`` of its optimizer steps.
    """

    def __init__(self, engines: list[EngineProtocol], accumulation: AccumulationOfScript):
        self.engines = engines
        self._accumulation = accumulation
        # who divides losses by the accumulation, as engine.backward takes it
        self._divides: dict[str, bool] = {}

    def follow_trainer(self) -> None:
        """Divide no loss: the Trainer divides its own by the accumulation, and Accelerate none."""
        self._divides = {"scale_wrt_gas": False}

    @property
    def engine(self) -> EngineProtocol | EngineSteps:
        """The object that ``accelerator.free_memory`` destroys."""
        return self

    def destroy(self) -> None:
        with ExitStack() as all_engines:  # the others, too, if one raises
            for engine in reversed(self.engines):
                all_engines.callback(engine.destroy)

    def close(self) -> None:
        """Leave the engines to another object, once the Accelerator has prepared a further one."""

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Accumulate gradients of ``loss`` in the engines it passes through. Inside
        ``accelerator.no_sync`` it does not end a window.
        """
        self._accumulation.pass_on(self.engines)
        for engine in self.engines:
            ends = bool(sync_gradients) and not engine.in_no_sync
            engine.set_gradient_accumulation_boundary(ends)
        self.engines[0].backward(loss, **(self._divides | kwargs))

    def clip(self, engine: EngineProtocol, limit: float, syncs: bool) -> torch.Tensor | None:
        """Clip the gradient of ``engine`` to ``limit`` if its configuration leaves the limit to the
        script, or has the same. Return the norm before, on the device: 0 without gradients, None
        inside a window (not ``syncs``).
        """
        clipping = clipping_of(engine)
        norm = clipping.clip(limit) if syncs else None
        clipping.name_limit(limit)  # of a clipping that was not refused
        return norm

    def step(self, wrapped: AcceleratedOptimizer, *closure: object, **kwargs: object) -> None:
        """Make the step of the engine of ``wrapped``: its ``step`` method. Raises PartitionError
        for an optimizer of none of the engines.
        """
        optimizer = wrapped.optimizer
        engine = next((engine for engine in self.engines if engine.optimizer is optimizer), None)
        if engine is None:
            raise PartitionError(
                f"{type(optimizer).__name__}.step(): no engine that this Accelerator trains has "
                "this optimizer, as after destroy() of its engine; call step() of the optimizer "
                "that accelerator.prepare has returned with the model that trains"
            )
        if any(value is not None for value in (*closure, *kwargs.values())):
            optimizer.step(*closure, **kwargs)  # the engine's, which refuses them
        self._claim_step(engine, wrapped.gradient_state.sync_gradients)

    def _claim_step(self, engine: EngineProtocol, syncs: bool) -> None:
        """Make the step of ``engine`` that ``optimizer.step()`` asks for, at the end of a window
        (``syncs``), unless a load of state has dropped its gradients and no backward has followed.
        """
        if not syncs:
            return
        loaded = engine in _dropped_by_load
        _dropped_by_load.discard(engine)
        if not loaded or engine.holds_gradients():
            self._step_engine(engine)

    def _step_engine(self, engine: EngineProtocol, script_steps: bool = True) -> None:
        clipping = clipping_of(engine)
        clipping.before_step(script_steps)
        engine.step()
        clipping.forget()

    def zero_grad(self, wrapped: AcceleratedOptimizer, set_to_none: bool | None = None) -> None:
        """Drop the gradients of the engine of ``wrapped`` at the end of a window: its ``zero_grad``
        method.
        """
        for engine in self.engines if wrapped.gradient_state.sync_gradients else ():
            if engine.optimizer is wrapped.optimizer:
                self._drop_gradients(engine, set_to_none is None or set_to_none)

    def _drop_gradients(self, engine: EngineProtocol, set_to_none: bool) -> None:
        engine.zero_grad(set_to_none)
        clipping_of(engine).forget()

    def forget_window(self) -> None:
        """Forget what has come since the last ``optimizer.step()``, as a load of state has dropped
        its gradients. The next step of each engine does nothing, unless a backward brings new ones.
        """
        for engine in self.engines:
            clipping_of(engine).forget()
        _dropped_by_load.update(self.engines)


class StepCaller(Enum):
    """Who makes the steps of a single engine, as far as its script has shown.

    =================================  ======================================================
    UNKNOWN -> CLIPPING or BACKWARD    a forward finds a step that is due, and clipped or not
    CLIPPING -> BACKWARD               a backward finds a step that is due: it was not clipped
    any -> OPTIMIZER                   ``optimizer.step()``; refused once if another stepped
    =================================  ======================================================
    """

    UNKNOWN = "nobody yet"
    OPTIMIZER = "optimizer.step()"
    CLIPPING = "clip_grad_norm_, in a script that never calls optimizer.step()"
    BACKWARD = "accelerator.backward(), in a script that calls neither"

    @property
    def stands_in(self) -> bool:
        """Whether another call makes the steps in place of ``optimizer.step()``."""
        return self in (StepCaller.CLIPPING, StepCaller.BACKWARD)


class WindowState(Enum):
    """The accumulation window of a single engine.

    =================================  ======================================================
    any -> OPEN                        the next backward (but ENDED stays), a load of state
    OPEN -> ENDED                      the backward of the last micro-batch
    ENDED -> OPEN                      the step
    ENDED -> STEPPED_EARLY             the step, made before a forward (caller UNKNOWN)
    ENDED -> DROPPED                   ``optimizer.zero_grad()``
    ENDED -> OPEN                      a backward after ``model.zero_grad()``
    STEPPED_EARLY -> OPEN              the refusal of a clipping or step that comes too late
    DROPPED -> OPEN                    ``optimizer.step()``, which only runs its hooks
    =================================  ======================================================
    """

    OPEN = "no step is due"
    ENDED = "a step is due: no step has used the gradients of its backwards"
    STEPPED_EARLY = "the step was made before the script could clip or call it"
    DROPPED = "zero_grad() has dropped the gradients of the step that was due"


class SingleEngineSteps(EngineSteps):
    """The backwards, clipping and steps of the only engine that trains in an Accelerator, also for
    scripts that never call ``optimizer.step()`` (the note).
    """

    def __init__(self, engines: list[EngineProtocol], accumulation: AccumulationOfScript):
        super().__init__(engines, accumulation)
        (self._engine,) = engines
        self._clipping, self._unseen = clipping_of(self._engine), UnseenBackwards(self._engine)
        self.caller = StepCaller.UNKNOWN
        self.window = WindowState.OPEN
        self._trained = False  # whether the model was in training mode at the last backward
        self._hook = self._engine.register_forward_pre_hook(self._before_forward)

    @property
    def engine(self) -> EngineProtocol:
        return self._engine

    def follow_trainer(self) -> None:
        """Divide no loss, and leave the steps to ``optimizer.step()``, which the Trainer calls."""
        super().follow_trainer()
        self.caller = StepCaller.OPTIMIZER

    def close(self) -> None:
        self._hook.remove()

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Accumulate gradients of ``loss``; make the step if no other call of the script does."""
        engine = self._engine
        if self.caller is StepCaller.CLIPPING:
            self._make_overdue_step()
        if self.window is not WindowState.ENDED or not engine.held_micro_batches:
            self.window = WindowState.OPEN
        self._trained = engine.training
        super().backward(loss, sync_gradients, **kwargs)
        self._unseen.note_backward()
        if sync_gradients and not engine.in_no_sync:
            self.window = WindowState.ENDED
        if self.caller is StepCaller.BACKWARD:
            self._make_step()

    def _before_forward(self, *_: object) -> None:
        if self.window is not WindowState.ENDED or self._engine.pass_is_under_way:
            return
        # a metric in evaluation mode changes nothing
        evaluates = not torch.is_grad_enabled() or (self._trained and not self._engine.training)
        if self.caller is not StepCaller.OPTIMIZER and not evaluates:
            self._make_overdue_step()

    def _make_overdue_step(self) -> None:
        """Make the step, if one is due, of a script that has shown that it will not."""
        if self.window is not WindowState.ENDED:
            return
        is_first = self.caller is StepCaller.UNKNOWN
        clips = is_first and self._clipping.is_clipped
        self.caller = StepCaller.CLIPPING if clips else StepCaller.BACKWARD
        self._make_step()
        if is_first:
            self.window = WindowState.STEPPED_EARLY

    def make_unclaimed_step(self) -> None:
        """Make a step that is due in a script that has made steps without ``optimizer.step()``,
        before all ranks read its state. Collective.
        """
        if self.caller.stands_in and not self._engine.destroyed:
            self._make_overdue_step()

    def clip(self, engine: EngineProtocol, limit: float, syncs: bool) -> torch.Tensor | None:
        """Clip as for several engines, at the end of a window: inside return the norm of the last
        step. Make the step if the script leaves its steps to this call. Raises PartitionError if
        the step was made before.
        """
        self._refuse_if_stepped_early("clip_grad_norm_")
        ended = self.window in (WindowState.ENDED, WindowState.DROPPED)
        norm = self._clipping.clip(limit) if ended else engine.grad_norm_tensor()
        self._clipping.name_limit(limit)  # of a clipping that was not refused
        if ended and self.caller is StepCaller.CLIPPING and self._clipping.is_clipped:
            self._make_step()
        return norm

    def _claim_step(self, engine: EngineProtocol, syncs: bool) -> None:
        """Make the step that is due. Raises PartitionError for a gradient of ``loss.backward()``,
        and where another call has made steps before.
        """
        earlier, self.caller = self.caller, StepCaller.OPTIMIZER
        self._refuse_if_stepped_early("optimizer.step()", earlier.stands_in)
        self._unseen.check_step()
        self._make_step()
        if self.window is WindowState.DROPPED:
            engine.run_step_hooks()
            self.window = WindowState.OPEN
        self._unseen.note_step()

    def _refuse_if_stepped_early(self, call: str, stands_in: bool = False) -> None:
        stepped_early = self.window is WindowState.STEPPED_EARLY
        if stepped_early:
            self.window = WindowState.OPEN
        if stepped_early or stands_in:
            raise PartitionError(
                f"{call} comes after a forward with gradients that followed accelerator.backward(),"
                " before this script has first called optimizer.step(): the step was made before "
                "that forward, as for scripts that never call it. Run forwards between the "
                "backward and optimizer.step() inside `with torch.no_grad():`, and add up several "
                "losses of one step before the backward"
            )

    def _make_step(self) -> None:
        """Make the step, if it is due."""
        if self.window is WindowState.ENDED:
            if self._engine.holds_gradients():  # else the script has called engine.step() itself
                self._step_engine(self._engine, self.caller is StepCaller.OPTIMIZER)
            self.window = WindowState.OPEN

    def _drop_gradients(self, engine: EngineProtocol, set_to_none: bool) -> None:
        super()._drop_gradients(engine, set_to_none)
        self._unseen.forget()
        if self.window is WindowState.ENDED:
            self.window = WindowState.DROPPED

    def forget_window(self) -> None:
        """Forget what has come since the last ``optimizer.step()``, as a load of state has dropped
        its gradients: no step is due before the next backward.
        """
        self._clipping.forget()
        self._unseen.forget()
        self.window = WindowState.OPEN


class UnseenBackwards:
    """Detection of ``loss.backward()`` in a script, in place of ``accelerator.backward(loss)``:
    between two calls of ``optimizer.step()`` the engine has got micro-batches, and no call of the
    latter was noted.
    """

    def __init__(self, engine: EngineProtocol):
        self._engine = engine
        self._noted = False  # a call of accelerator.backward since the last step
        self._held = 0  # micro-batches in the engine after the last step

    def note_backward(self) -> None:
        """Note a call of ``accelerator.backward``."""
        self._noted = True

    def check_step(self) -> None:
        """Raise PartitionError before a step for micro-batches that no noted call has brought."""
        noted, self._noted = self._noted, False
        before, self._held = self._held, self._engine.held_micro_batches
        if not noted and self._held > before:
            raise PartitionError(
                "loss.backward() came before this optimizer.step(), which Accelerate leaves to "
                "accelerator.backward(loss) under ZeRO: nothing would be trained; call "
                "accelerator.backward(loss) in place of loss.backward()"
            )

    def note_step(self) -> None:
        """Count the micro-batches that the engine holds after a step."""
        self._held = self._engine.held_micro_batches

    def forget(self) -> None:
        """Begin anew: the gradients were dropped."""
        self._noted, self._held = False, 0


def register_engines(
    accelerator: Accelerator, limited_by_script: Iterable[EngineProtocol] = ()
) -> None:
    """Let an :class:`EngineSteps` make the steps of the engines that ``accelerator`` has prepared,
    and its optimizers call it. Called at the end of each ``prepare``.

    ``limited_by_script``: engines whose configuration leaves the clipping norm open.
    """
    for engine in limited_by_script:
        clipping_of(engine).leave_to_script()
    # an engine without an optimizer, such as a teacher's, cannot step
    engines = [m for m in accelerator._models if is_engine(m) and trains(m)]
    steps: object = accelerator.deepspeed_engine_wrapped
    if not engines:
        return
    if not (isinstance(steps, EngineSteps) and steps.engines == engines):
        if isinstance(steps, EngineSteps):
            steps.close()
        accumulation = AccumulationOfScript(accelerator.gradient_state)
        several = len(engines) > 1
        steps = (EngineSteps if several else SingleEngineSteps)(engines, accumulation)
        accelerator.deepspeed_engine_wrapped = steps
    for optimizer in accelerator._optimizers:
        optimizer.step = _method(optimizer, steps.step)
        optimizer.zero_grad = _method(optimizer, steps.zero_grad)


def _method(wrapped: AcceleratedOptimizer, call: Callable[..., None]) -> MethodType:
    """Return ``call`` as a method of ``wrapped`` with a function: torch's schedulers access its
    ``__func__``.
    """

    def method(self: AcceleratedOptimizer, *args: object, **kwargs: object) -> None:
        call(self, *args, **kwargs)

    return MethodType(method, wrapped)


@contextmanager
def add_up_in_no_sync(original: Original, self: Accelerator, model: nn.Module) -> Iterator[None]:
    """Wraps ``Accelerator.no_sync``: backwards inside accumulate at every stage; Accelerate's
    version ignores engines of stages 2 and 3.
    """
    with model.no_sync() if is_engine(model) and self.sync_gradients else original(self, model):
        yield


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
    steps: object = getattr(self, "deepspeed_engine_wrapped", None)  # Accelerate's, under ZeRO
    # the optimizer's groups have members, this rank's parts of parameters
    tensors = [t if (whole := getattr(t, "parameter", None)) is None else whole for t in tensors]
    engine = holder_of(tensors) if finder.chosen() else None
    if engine is None and isinstance(steps, EngineSteps):  # Accelerate would clip nothing
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)
    if engine is None:
        return original(self, tensors, max_norm, norm_type)
    if float(norm_type) != 2.0:
        raise PartitionError(
            f"clip_grad_norm_(norm_type={norm_type}): the engine clips in its step, by the L2 norm "
            "of the whole gradient, and keeps no other; leave norm_type at 2"
        )
    clipping_of(engine).check_call(tensors, float(max_norm))
    if not isinstance(steps, EngineSteps) or engine not in steps.engines:
        return None if steps is None else engine.grad_norm_tensor()
    return steps.clip(engine, float(max_norm), self.sync_gradients)
