"""Several models of one script under Accelerate: which of them step, whose gradients are cleared,
and what is clipped.

[Note: who steps]
Accelerate gives every loss to the first engine that an Accelerator has prepared, which steps at
once; ``step()`` and ``zero_grad()`` of its optimizers do nothing. With one model that trains the
result is the script's. With two (a generator and its critic) the wrong one is trained. So as soon
as a second engine trains, the optimizers' methods take effect: a backward leaves gradients in every
engine it goes through, ``optimizer.step()`` steps its own engine, and ``optimizer.zero_grad()``
clears its gradients. With two Accelerators that have an engine each, a backward through one of them
still steps its engine, and ``zero_grad()`` clears what it has left in the other.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from hf_zero.engine import Engine
from hf_zero.errors import PartitionError
from hf_zero.integrations import finder
from hf_zero.logs import log_rank0
from hf_zero.parameters.parameter import owner_of

_training: weakref.WeakSet[Engine] = weakref.WeakSet()
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # Accelerate's wrappers around theirs
_warned: weakref.WeakSet[Engine] = weakref.WeakSet()


class MultipleEngines:
    """Takes the place of the one engine that ``accelerator.backward`` uses: all engines that train
    under this Accelerator.
    """

    def __init__(self, engines: list[Engine]):
        self.engines = engines

    @property
    def engine(self) -> MultipleEngines:
        """What ``accelerator.free_memory`` destroys."""
        return self

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Leave the gradients of ``loss`` in the engines it goes through; none of them steps."""
        for engine in self.engines:
            engine.set_gradient_accumulation_boundary(sync_gradients)
        self.engines[0].backward(loss, **kwargs)

    def destroy(self) -> None:
        for engine in self.engines:
            engine.destroy()


def register_engines(accelerator: Any) -> None:
    """Record the engines that ``accelerator`` has just prepared. From the second one that trains
    on, optimizers step and clear gradients themselves.
    """
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    here = [
        model
        for model in accelerator._models
        if isinstance(model, Engine) and model.bound is not None
    ]
    if len(here) == 1:  # one that was prepared before it, such as a teacher, cannot step
        if (
            here[0] in _training
            and getattr(accelerator.deepspeed_engine_wrapped, "engine", None) is here[0]
        ):
            return  # a later prepare, of a data loader or a scheduler
        accelerator.deepspeed_engine_wrapped = wrapped = DeepSpeedEngineWrapper(here[0])
        _refuse_merged_steps(wrapped, accelerator)
    elif here:
        accelerator.deepspeed_engine_wrapped = MultipleEngines(here)
    _training.update(here)
    _optimizers.update(accelerator._optimizers)
    if sum(engine.bound is not None for engine in _training) > 1:
        for optimizer in _optimizers:
            optimizer.zero_grad = _at_window_end(optimizer, "zero_grad")
    if len(here) > 1:
        for optimizer in accelerator._optimizers:
            optimizer.step = _at_window_end(optimizer, "step")


def _refuse_merged_steps(wrapped: Any, accelerator: Any) -> None:
    """``optimizer.step()`` refuses two backwards since the last one: each has been a step of the
    engine, plain PyTorch adds them.

    A script that never calls it, as DeepSpeed allows, trains by its backwards. Inside
    ``accelerator.no_sync`` a backward only adds up.
    """
    backward, engine = wrapped.backward, wrapped.engine
    applied = 0

    def counted(loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        nonlocal applied
        before = engine.counters.global_steps
        backward(loss, sync_gradients=bool(sync_gradients) and not engine.in_no_sync, **kwargs)
        applied += engine.counters.global_steps > before and engine.was_step_applied()

    def checked(own: Callable[..., Any]) -> Callable[..., Any]:
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal applied
            steps, applied = applied, 0
            if steps > 1:
                raise PartitionError(
                    f"{steps} calls of accelerator.backward() came before this optimizer.step(): "
                    "under ZeRO each of them has been a step of its "
                    "own. For one step of several losses add them and call accelerator.backward() "
                    "once; to accumulate micro-batches put each "
                    "inside `with accelerator.accumulate(model):` (or all but the last inside "
                    "`with accelerator.no_sync(model):`)"
                )
            return own(*args, **kwargs)

        return step

    wrapped.backward = counted
    for optimizer in accelerator._optimizers:
        # a method: torch's schedulers look for its function
        optimizer.step = MethodType(checked(optimizer.step), optimizer)


def add_up_in_no_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Accelerator.no_sync``: backwards inside accumulate at every stage; Accelerate's own
    ignores engines of stages 2 and 3.
    """

    @contextmanager
    def no_sync(self: Any, model: Any) -> Iterator[None]:
        # accumulate() comes here as well, with sync_gradients off, which says the same.
        with (
            model.no_sync()
            if isinstance(model, Engine) and self.sync_gradients
            else original(self, model)
        ):
            yield

    return no_sync


def _at_window_end(wrapped: Any, name: str) -> Callable[..., None]:
    """The method ``name`` of the optimizer inside ``wrapped``, which acts only at the end of an
    accumulation window.
    """
    own, state = wrapped.optimizer, wrapped.gradient_state

    def method(*args: Any, **kwargs: Any) -> None:
        if state.sync_gradients:
            getattr(own, name)()

    return method


def clip_by_the_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Accelerator.clip_grad_norm_``: returns the gradient norm, a tensor on the device, of
    the engine that owns ``parameters``; warns once if ``max_norm`` is not the engine's limit.
    """

    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if hasattr(parameters, "numel") else list(parameters)
        owner = (
            next((flat for flat in map(owner_of, given) if flat is not None), None)
            if finder.chosen()
            else None
        )
        engine = owner.engine() if owner is not None else None
        if engine is None:
            return original(self, given, max_norm, norm_type)
        if float(norm_type) != 2.0:
            raise PartitionError(
                f"clip_grad_norm_(norm_type={norm_type}): the engine clips in its step, by the L2 "
                "norm of the whole gradient, and keeps no "
                "other; leave norm_type at 2"
            )
        _warn_limit(engine, float(max_norm))
        if isinstance(self.deepspeed_engine_wrapped, MultipleEngines):
            return engine.gradient_norm() if self.sync_gradients else None
        wrapped = self.deepspeed_engine_wrapped
        return None if wrapped is None else wrapped.engine.grad_norm_tensor()

    return clip_grad_norm_


def _warn_limit(engine: Engine, max_norm: float) -> None:
    limit = float(engine.config.gradient_clipping or 0.0)
    if limit != max_norm != math.inf and engine not in _warned:  # infinity only asks for the norm
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
