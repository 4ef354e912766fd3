"""The hooks of features in a step and between steps. A step knows these functions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from hf_zero.zero.layout.flat_buffer import FlatBuffer


@dataclass(frozen=True)
class StepHooks:
    """The methods of :class:`hf_zero.zero.feature.Feature` that a step, and what comes between
    steps, calls: of each name those of the features that override it, in the order of the features.
    """

    prepare_batch: tuple[Callable[[object], object], ...] = ()
    end_forward: tuple[Callable[[], None], ...] = ()
    begin_backward: tuple[Callable[[], None], ...] = ()
    before_reduction: tuple[Callable[[float], None], ...] = ()
    begin_step: tuple[Callable[[bool], bool], ...] = ()
    squares: tuple[Callable[[bool], torch.Tensor | None], ...] = ()
    before_update: tuple[Callable[[], None], ...] = ()
    update: tuple[Callable[[torch.Tensor | None], Sequence[FlatBuffer]], ...] = ()
    end_step: tuple[Callable[[int, bool, float], None], ...] = ()
    synchronize: tuple[Callable[[], None], ...] = ()
    complete_state: tuple[Callable[[], None], ...] = ()
    counted_state: tuple[Callable[[], AbstractContextManager[bool]], ...] = ()
    forget: tuple[Callable[[float], None], ...] = ()
    state_bytes: tuple[Callable[[], Mapping[str, int]], ...] = ()


NO_HOOKS = StepHooks()
