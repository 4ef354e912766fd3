"""Clipping of the gradients of an engine in scripts for Accelerate.

An engine clips in its step, to ``engine.max_norm``, the limit of its configuration. Where the
configuration leaves the limit open, Accelerate fills in DeepSpeed's default, and a script may name
another in each call of ``clip_grad_norm_``, which then clips at once, as in torch.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from enum import Enum

import torch

from hf_zero.errors import PartitionError
from hf_zero.integrations.engine_protocol import EngineProtocol, holder_of, trains
from hf_zero.logging import log_rank0

SMALLEST_LIMIT = 1e-30  # max_norm = 0 means no clipping to an engine


class LimitSource(Enum):
    """Who has named the limit of the gradient norm of an engine.

    ====================================  ======================================
    CONFIGURATION -> DEFAULT              ``EngineClipping.leave_to_script``
    DEFAULT -> SCRIPT                     ``EngineClipping.name_limit``
    ====================================  ======================================
    """

    CONFIGURATION = "gradient_clipping of the configuration"
    DEFAULT = "Accelerate: the configuration leaves the limit open, and so has the script so far"
    SCRIPT = "clip_grad_norm_: the configuration leaves the limit open"


class EngineClipping:
    """The clipping of the gradients of one engine, as long as the engine lives
    (:func:`clipping_of`). The callers:

    - ``prepare`` of the engine: :meth:`leave_to_script`
    - ``clip_grad_norm_``: :meth:`check_call`, :meth:`clip` where the engine may hold the gradients
      of a step, and then :meth:`name_limit`
    - each step of the engine: :meth:`before_step`, and :meth:`forget` after it
    - ``zero_grad`` and loads of state: :meth:`forget`
    """

    def __init__(self, engine: EngineProtocol):
        self._engine: EngineProtocol = weakref.proxy(engine)
        self.source = LimitSource.CONFIGURATION
        self.is_clipped = False  # the script has clipped the gradients of the next step
        self._may_warn = True  # of a limit that the script does not use, or does not know

    def leave_to_script(self) -> None:
        """Let ``clip_grad_norm_`` name the limit, as the configuration leaves it open."""
        self.source = LimitSource.DEFAULT

    def check_call(self, parameters: Sequence[torch.Tensor], limit: float) -> None:
        """Check the arguments of ``clip_grad_norm_``: warn once of a limit that differs from that
        of the configuration, raise PartitionError for parameters of several models, and for a
        part of the engine's where the configuration leaves the limit open.
        """
        self._refuse_other_models(parameters)
        if self.source is LimitSource.CONFIGURATION:
            self._warn_of_unused(limit)
        else:
            self._refuse_part(parameters)

    def name_limit(self, limit: float) -> None:
        """Clip the next steps to ``limit`` if the configuration leaves it open; infinity clips
        none.
        """
        if self.source is not LimitSource.CONFIGURATION:
            self.source = LimitSource.SCRIPT
            self._engine.max_norm = 0.0 if math.isinf(limit) else max(limit, SMALLEST_LIMIT)

    def clip(self, limit: float) -> torch.Tensor:
        """Clip the gradients to ``limit`` if the configuration leaves it open or has the same.
        Return their norm before, on the device: 0 without gradients, as after ``zero_grad()``.
        Collective.
        """
        engine = self._engine
        if not engine.holds_gradients():
            return torch.zeros_like(engine.grad_norm_tensor())
        if self.source is LimitSource.CONFIGURATION and limit != engine.max_norm:
            return engine.measure_gradient()
        self.is_clipped = True
        return engine.clip_gradient(max(limit, SMALLEST_LIMIT))

    def before_step(self, script_steps: bool) -> None:
        """Prepare a step that the script has not clipped. One that calls ``optimizer.step()``
        (``script_steps``) and clips other steps means this one to be unclipped; one that has never
        clipped is told once of the default. Collective.
        """
        engine = self._engine
        if self.is_clipped or self.source is LimitSource.CONFIGURATION:
            return
        if self.source is LimitSource.DEFAULT:
            self._warn_of_default()
        elif script_steps and engine.max_norm and engine.holds_gradients():
            engine.clip_gradient(math.inf)

    def forget(self) -> None:
        """Forget the clipping of gradients that were used or dropped."""
        self.is_clipped = False

    def _warn_of_default(self) -> None:
        limit = self._engine.max_norm
        if limit and self._may_warn:
            log_rank0(
                f"gradients are clipped to a norm of {limit:g}: Accelerate fills that in "
                "where neither the configuration nor the script names a limit; write "
                "gradient_clipping: 0.0 in the configuration for no clipping, or your limit "
                "(hf-zero launch --set gradient_clipping=0.0)",
                logging.WARNING,
            )
        self._may_warn = False

    def _warn_of_unused(self, max_norm: float) -> None:
        limit = float(self._engine.config.gradient_clipping or 0.0)
        if limit != max_norm != math.inf and self._may_warn:  # infinity only reads the norm
            self._may_warn = False
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

    def _refuse_other_models(self, parameters: Sequence[torch.Tensor]) -> None:
        own = {id(parameter) for parameter in self._engine.module.parameters()}
        for other in parameters:
            if id(other) in own or not other.requires_grad:
                continue
            holder = holder_of([other])
            # the engine's optimizer may have parameters outside the model: of the same holder
            trained = other.grad is not None if holder is None else trains(holder)
            if trained and (holder is None or holder.module is not self._engine.module):
                raise PartitionError(
                    "clip_grad_norm_ got parameters of several models: each engine clips by the "
                    "norm of its own gradient. Call it for each model with its parameters(), and "
                    "torch.nn.utils.clip_grad_norm_ for parameters that no engine trains"
                )

    def _refuse_part(self, parameters: Sequence[torch.Tensor]) -> None:
        named = {id(parameter) for parameter in parameters}
        trained = [p for p in self._engine.module.parameters() if p.requires_grad]
        if missing := sum(id(parameter) not in named for parameter in trained):
            raise PartitionError(
                f"clip_grad_norm_ got parameters without {missing} of the {len(trained)} that the "
                "engine trains: the engine clips by the norm of the whole gradient. Pass "
                "model.parameters(), or write gradient_clipping in the configuration"
            )


_clippings: weakref.WeakKeyDictionary[EngineProtocol, EngineClipping] = weakref.WeakKeyDictionary()


def clipping_of(engine: EngineProtocol) -> EngineClipping:
    """Return the clipping of ``engine``, one object for its life: an Accelerator that prepares a
    second engine goes on with that of the first.
    """
    if engine not in _clippings:
        _clippings[engine] = EngineClipping(engine)
    return _clippings[engine]
