"""Signals on which a Trainer under ZeRO saves: :class:`~.stop_callback.StopCallback` in place of
the stock callback.

Imported while ``import transformers`` runs: everything of it is imported inside the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_zero.integrations.engine_protocol import EngineProtocol
from hf_zero.integrations.seams import Original
from hf_zero.integrations.transformers.trainer_route import under_zero

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback


def leave_signals_to_engine(
    original: Original, self: JITCheckpointCallback, trainer: Trainer
) -> None:
    """Wraps ``JITCheckpointCallback.set_trainer``: under ZeRO the stock callback does nothing."""
    if under_zero(trainer):
        self.trainer = trainer  # without a manager the stock events do nothing
    else:
        original(self, trainer)


def save_on_signals(trainer: Trainer, engine: EngineProtocol) -> None:
    """Add the callback that saves ``engine`` on a signal, in place of that of an attempt with a
    larger batch. It is the last callback: its choice to save is final.
    """
    from hf_zero.integrations.transformers.stop_callback import StopCallback

    trainer.pop_callback(StopCallback)
    trainer.add_callback(StopCallback(trainer, engine))


def stop_saving_on_signals(trainer: Trainer) -> None:
    """Remove that callback, if there is one, and restore the handlers of its signals. A signal
    received after the last step acts now.
    """
    from hf_zero.integrations.signal_saves import stop_listening
    from hf_zero.integrations.transformers.stop_callback import StopCallback

    callback = trainer.pop_callback(StopCallback)
    if isinstance(callback, StopCallback):
        stop_listening(callback.engine, callback.returns)
