"""Warnings of calls that leave the weights unchanged, or keep gradients that a script may mean to
drop.
"""

from __future__ import annotations

from hf_zero.logging import logger

# backwards without a step: a step of one micro-batch may well add up the gradients of several
# losses
FORGOTTEN = 8
RESTARTED = 3  # windows restarted in a row, after which a script restarts all of them

UNUSED_BACKWARDS = (
    "%d backwards without engine.step(): gradients add up and no weight has changed; call "
    "engine.step() after each engine.backward(loss)%s, or engine.zero_grad() to drop what has been "
    "added up"
)
WINDOW_IN_A_STEP = (
    "engine.step() after %d backwards has counted one micro-batch of %d and changed no weight: "
    "with gradient_accumulation_steps = %d call it after each engine.backward(loss), and one call "
    "of %d updates; where the loop itself collects micro-batches, set "
    "gradient_accumulation_steps to 1 and divide the loss by their number"
)
EMPTY_STEP = (
    "step() without a backward since the last step() counts nothing: leave out a second call, such "
    "as optimizer.step() beside engine.step(); a rank whose batch has no loss calls "
    "engine.backward(0.0 * outputs.sum())"
)
RESTARTS = (
    "engine.zero_grad() has restarted %d accumulation windows in a row, of %d micro-batches each, "
    "and no weight has changed: call it after the step that ends a window, or leave it out, as "
    "that step drops the gradients"
)
ZERO_GRAD_INSIDE = (
    "optimizer.zero_grad() after micro-batch %d of %d keeps the gradients of the first "
    "accumulation window, as for scripts that call it after every micro-batch; to drop a window "
    "that was broken off call engine.restart_window()"
)


class WindowWarnings:
    """The warnings of one engine, each logged once; none is logged if ``enabled`` is false."""

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._logged = enabled, set[str]()
        # windows with micro-batches that were restarted after the last of ``_updates``
        self._restarts = self._updates = 0

    def warn(self, text: str, *values: object) -> None:
        """Log ``text``, a template of this module, with its ``values``."""
        if self._enabled and text not in self._logged:
            self._logged.add(text)
            logger.warning(text, *values)

    def check_backwards(self, backwards: int, steps: int) -> None:
        """Warn of so many ``backwards`` since the last step or ``zero_grad()`` that it must have
        been forgotten; ``steps``: micro-batches of a window.
        """
        if backwards > max(FORGOTTEN, steps):
            inside = f", also inside a window of {steps} micro-batches" if steps > 1 else ""
            self.warn(UNUSED_BACKWARDS, backwards, inside)

    def count_restart(self, updates: int, steps: int) -> None:
        """Count a window of ``steps`` micro-batches that was restarted after some of them, and warn
        of several in a row. ``updates``: those of the run so far.
        """
        self._restarts = self._restarts + 1 if updates == self._updates else 1
        self._updates = updates
        if self._restarts == RESTARTED:
            self.warn(RESTARTS, RESTARTED, steps)
