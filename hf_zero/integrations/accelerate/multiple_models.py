"""Several trained models in one script under Accelerate: steps, zero_grad and clipping of each.

[Note: who steps]
Accelerate passes every loss to the first engine prepared by an Accelerator, which steps
immediately; ``step()`` and ``zero_grad()`` of its optimizers do nothing. With a single trained
model the result is what the script intends. With two (a generator and its critic) the wrong one is
trained. So once a second engine trains, the optimizers' methods take effect: a backward leaves
gradients in every engine that it passes through, ``optimizer.step()`` steps its own engine, and
``optimizer.zero_grad()`` clears its gradients. With two Accelerators of one engine each, a backward
through one of them still steps its engine, and ``zero_grad()`` clears the gradients it left in the
other.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType, NoneType
from typing import TYPE_CHECKING, NoReturn

import torch

from hf_zero.config.resolving import ACCUMULATION
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.loaders import refuse_uneven
from hf_zero.integrations.seams import Original
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.parameter import owner_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
    from torch import nn

_training: weakref.WeakSet[Engine] = weakref.WeakSet()
_optimizers: weakref.WeakSet[AcceleratedOptimizer] = weakref.WeakSet()
_warned: weakref.WeakSet[Engine] = weakref.WeakSet()
_limited_by_script: weakref.WeakSet[Engine] = weakref.WeakSet()
_dropped: weakref.WeakSet[Engine] = weakref.WeakSet()  # until their next step: gradients, by a load
SMALLEST_LIMIT = 1e-30  # max_norm = 0 means no clipping to an engine


class AccumulationOfScript:
    """The ``gradient_accumulation_steps`` of an Accelerator, settable after ``prepare``."""

    def __init__(self, state: GradientState):
        self._state, self._last = state, state.num_steps
        self._checked: weakref.ref[object] | None = None  # the loader checked for these steps

    def pass_on(self, engines: Iterable[Engine]) -> None:
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


class MultipleEngines:
    """Replacement of the single engine that ``accelerator.backward`` uses: all trained engines of
    this Accelerator.
    """

    def __init__(self, engines: list[Engine], accumulation: AccumulationOfScript):
        self.engines = engines
        self._accumulation = accumulation

    @property
    def engine(self) -> MultipleEngines:
        """The object that ``accelerator.free_memory`` destroys."""
        return self

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Accumulate gradients of ``loss`` in the engines it passes through; no engine steps."""
        self._accumulation.pass_on(self.engines)
        for engine in self.engines:
            engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engines[0].backward(loss, **kwargs)

    def forget_window(self) -> None:
        """Have the next ``optimizer.step()`` of each engine do nothing, as a load of state has
        dropped the gradients, unless a backward brings new ones.
        """
        _dropped.update(self.engines)

    def destroy(self) -> None:
        with ExitStack() as all_engines:  # the others, too, if one raises
            for engine in reversed(self.engines):
                all_engines.callback(engine.destroy)


def register_engines(accelerator: Accelerator, limited_by_script: Iterable[Engine] = ()) -> None:
    """Record the engines that ``accelerator`` has just prepared. From the second trained engine on,
    optimizers step and clear gradients themselves.

    ``limited_by_script``: engines whose configuration leaves the clipping norm open.
    """
    _limited_by_script.update(limited_by_script)
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    engines = [m for m in accelerator._models if isinstance(m, Engine) and m.bound is not None]
    accumulation = AccumulationOfScript(accelerator.gradient_state)
    if len(engines) == 1:  # an engine prepared before it, such as a teacher's, cannot step
        if (
            engines[0] in _training
            and getattr(accelerator.deepspeed_engine_wrapped, "engine", None) is engines[0]
        ):
            return  # a later prepare of a data loader or scheduler
        accelerator.deepspeed_engine_wrapped = wrapped = DeepSpeedEngineWrapper(engines[0])
        _take_steps(wrapped, accelerator, accumulation)
    elif engines:
        accelerator.deepspeed_engine_wrapped = MultipleEngines(engines, accumulation)
    _training.update(engines)
    _optimizers.update(accelerator._optimizers)
    if sum(engine.bound is not None for engine in _training) > 1:
        for optimizer in _optimizers:
            optimizer.zero_grad = _at_window_end(optimizer, "zero_grad")
    if len(engines) > 1:
        for optimizer in accelerator._optimizers:
            optimizer.step = _at_window_end(optimizer, "step")


class SingleEngine:
    """The steps of the single engine that ``accelerator.backward`` uses.

    A backward that ends a window is a step, as with DeepSpeed, even in a script that never calls
    ``optimizer.step()``. If the script sets the clipping norm (:data:`_limited_by_script`), the
    step is deferred to ``clip_grad_norm_`` or ``optimizer.step()``; in a script that calls neither,
    it is made before the next forward with gradients, or before ``save_state``, and from then on in
    the backward.
    """

    def __init__(self, wrapped: DeepSpeedEngineWrapper, accumulation: AccumulationOfScript):
        self.engine: Engine = wrapped.engine
        self._accumulation = accumulation
        self._backward = wrapped.backward
        self._waits = self.engine in _limited_by_script
        self.due = False  # whether a step is deferred
        # since the last ``optimizer.step()``: steps, and backwards of ``accelerator.backward``
        self._applied = self._backwards = 0
        self._held = 0  # micro-batches at the last ``optimizer.step()``
        self._limit_given = self._claimed = False  # whether the script names a limit; calls step()
        self._trained = False  # whether the model was in training mode at the last backward
        # settings of the optimizer in the last step, which ``optimizer.step()`` did not make
        self._settings: list[dict[str, object]] | None = None
        self._warned_of_settings = False
        if self._waits:
            self.engine.register_forward_pre_hook(self._before_forward)

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: bool) -> None:
        """Replaces ``DeepSpeedEngineWrapper.backward``. Inside ``accelerator.no_sync`` it only
        accumulates.
        """
        if self.due and self._claimed:  # the forward had the weights before that step
            self.make_step()
            self._applied = self._backwards = 0
            _refuse_backwards(2)
        self._make_overdue_step()
        self._trained = self.engine.training
        self._accumulation.pass_on([self.engine])
        self._backwards += 1
        ends = bool(sync_gradients) and not self.engine.in_no_sync
        if self._waits:
            self.engine.set_gradient_accumulation_boundary(ends)
            self.engine.backward(loss, **kwargs)
            self.due = ends
        else:
            self._count(lambda: self._backward(loss, sync_gradients=ends, **kwargs))

    def _before_forward(self, *_: object) -> None:
        # one for a metric may precede the script's clip_grad_norm_, unless a part of the model has
        # been updated
        evaluates = self._trained and not self.engine.training
        trains = torch.is_grad_enabled() and not (self._claimed or evaluates)
        if trains or self.engine.sharded_model.updates_in_backward:
            self._make_overdue_step()

    def make_unclaimed_step(self) -> None:
        """Make the deferred step, if any, of a script that has made steps without a call of
        ``optimizer.step()``, before all ranks read its state. Collective.
        """
        if self._applied and not (self._claimed or self.engine.destroyed):
            self._make_overdue_step()

    def _make_overdue_step(self) -> None:
        if self.due:
            self._waits = False
            self.make_step()

    def clip(self, limit: float) -> None:
        """Make the deferred step, if any, with gradients clipped to ``limit``, and the next ones
        until another limit is given.

        After a step that no call has claimed, backwards go on to make theirs until the script calls
        ``optimizer.step()``: the last one of a script that clips only sometimes would be lost.
        """
        if self.engine in _limited_by_script:
            self._limit_given = True
            set_limit(self.engine, limit)
        self.make_step()

    def forget_window(self) -> None:
        """Forget what has come since the last ``optimizer.step()``, as a load of state has dropped
        its gradients and replaced its results.
        """
        self.due = False
        self._applied = self._backwards = self._held = 0
        self._settings = None

    def make_step(self) -> None:
        """Make the deferred step, if any."""
        if self.due:
            self.due = False
            if not self._limit_given:
                self._warn_of_limit()
            self._count(self.engine.step)

    def _warn_of_limit(self) -> None:
        """Warn once of the limit that Accelerate fills in for a script that names none."""
        limit, self._limit_given = self.engine.max_norm, True
        if limit:
            log_rank0(
                f"gradients are clipped to a norm of {limit:g}: Accelerate fills that in where "
                "neither the configuration nor the script names a limit; write "
                "gradient_clipping: 0.0 in the configuration for no clipping, or your limit "
                "(hf-zero launch --set gradient_clipping=0.0)",
                logging.WARNING,
            )

    def _count(self, act: Callable[[], object]) -> None:
        before = self.engine.counters.global_steps
        act()
        after = self.engine.counters.global_steps
        self._applied += after > before and self.engine.was_step_applied()
        if after > before and not self._warned_of_settings:
            self._settings = _settings_of(self.engine)

    def _warn_of_settings(self) -> None:
        """Warn once of settings that the script has written since the step of this window."""
        settings, self._settings = self._settings, None
        groups = zip(settings or (), _settings_of(self.engine) if settings else ())
        changed = sorted({key for old, new in groups for key in new if new[key] != old.get(key)})
        if changed and not self._warned_of_settings:
            self._warned_of_settings = True
            log_rank0(
                f"a new {' and '.join(changed)} of the optimizer came before optimizer.step(), and "
                "acts on the next step only: accelerator.backward() or clip_grad_norm_ had made "
                "this one, as with DeepSpeed; write it before accelerator.backward()",
                logging.WARNING,
            )

    def checked(self, method: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``optimizer.step`` to raise PartitionError after two backwards since the last call:
        each was a step of the engine, while plain PyTorch adds their gradients; and after a
        ``loss.backward()``, with which no step is made.
        """

        def step(wrapped: AcceleratedOptimizer, *closure: object, **kwargs: object) -> object:
            if closure or kwargs:
                wrapped.optimizer.step(*closure, **kwargs)  # the engine's, which takes no closure
            self.make_step()  # the settings of now are its own
            self._warn_of_settings()
            self._claimed, self._waits = True, self.engine in _limited_by_script
            steps, self._applied = self._applied, 0
            backwards, self._backwards = self._backwards, 0
            before, self._held = self._held, self.engine.held_micro_batches
            if not backwards and self._held > before:
                raise PartitionError(
                    "loss.backward() came before this optimizer.step(), which Accelerate leaves to "
                    "accelerator.backward(loss) under ZeRO: nothing would be trained; call "
                    "accelerator.backward(loss) in place of loss.backward()"
                )
            if steps > 1:
                _refuse_backwards(steps)
            return method()

        return step


def _settings_of(engine: Engine) -> list[dict[str, object]]:
    """Return the settings of the optimizer's groups; of a tensor or another object, its identity,
    and the tensor's version.
    """
    return [
        {
            key: value
            if isinstance(value, (int, float, str, tuple, NoneType))
            else (id(value), getattr(value, "_version", None))
            for key, value in group.items()
            if key != "params"
        }
        for group in engine.optimizer.param_groups
    ]


def _refuse_backwards(number: int) -> NoReturn:
    """Raise PartitionError for ``number`` backwards without an ``optimizer.step()`` between."""
    raise PartitionError(
        f"{number} calls of accelerator.backward() came before an optimizer.step(): under ZeRO "
        "each of them is a step of its own, which zero_grad() does not discard. For one step of "
        "several losses add them and call accelerator.backward() once; to accumulate micro-batches "
        "put each inside `with accelerator.accumulate(model):` (or all but the last inside "
        "`with accelerator.no_sync(model):`); to leave out a batch, decide before its backward"
    )


def _take_steps(
    wrapped: DeepSpeedEngineWrapper, accelerator: Accelerator, accumulation: AccumulationOfScript
) -> None:
    """Let a :class:`SingleEngine` make the steps of ``wrapped``."""
    wrapped.single = single = SingleEngine(wrapped, accumulation)
    wrapped.backward = single.backward
    for optimizer in accelerator._optimizers:
        # bound, as in _at_window_end
        optimizer.step = MethodType(single.checked(optimizer.step), optimizer)


def set_limit(engine: Engine, limit: float) -> None:
    """Clip gradients of the next steps of ``engine`` to norm ``limit``; infinity: no clipping."""
    engine.max_norm = 0.0 if math.isinf(limit) else max(limit, SMALLEST_LIMIT)


@contextmanager
def add_up_in_no_sync(original: Original, self: Accelerator, model: nn.Module) -> Iterator[None]:
    """Wraps ``Accelerator.no_sync``: backwards inside accumulate at every stage; Accelerate's
    version ignores engines of stages 2 and 3.
    """
    with (
        model.no_sync()
        if isinstance(model, Engine) and self.sync_gradients
        else original(self, model)
    ):
        yield


def _at_window_end(wrapped: AcceleratedOptimizer, name: str) -> MethodType:
    """Return the method ``name`` of the optimizer inside ``wrapped``, restricted to the end of an
    accumulation window: a bound method, since torch's schedulers access its ``__func__``.
    """
    optimizer, state = wrapped.optimizer, wrapped.gradient_state

    def method(_: object, *args: object, **kwargs: object) -> None:
        if state.sync_gradients and not (name == "step" and _were_dropped(optimizer)):
            getattr(optimizer, name)(*args, **kwargs)

    return MethodType(method, wrapped)


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
    owner = (
        next((flat for flat in map(owner_of, tensors) if flat is not None), None)
        if finder.chosen()
        else None
    )
    engine = owner.live_engine if owner is not None else None
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
    if isinstance(wrapped, MultipleEngines):
        if engine in _limited_by_script:
            set_limit(engine, float(max_norm))
        return engine.gradient_norm() if self.sync_gradients else None
    if wrapped is None:
        return None
    if wrapped.engine is engine:
        wrapped.single.clip(float(max_norm))
    return wrapped.engine.grad_norm_tensor()


def _refuse_part(engine: Engine, parameters: Iterable[object]) -> None:
    """Raise PartitionError if ``parameters`` lacks a parameter that ``engine`` trains."""
    named = {id(parameter) for parameter in parameters}
    owners = [(parameter, owner_of(parameter)) for parameter in engine.module.parameters()]
    trained = [parameter for parameter, owner in owners if owner is not None and owner.trainable]
    missing = sum(id(parameter) not in named for parameter in trained)
    if missing:
        raise PartitionError(
            f"clip_grad_norm_ got parameters without {missing} of the {len(trained)} that the "
            "engine trains: the engine clips by the norm of the whole gradient. Pass "
            "model.parameters(), or write gradient_clipping in the configuration"
        )


def _warn_limit(engine: Engine, max_norm: float) -> None:
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
