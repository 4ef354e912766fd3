"""Wrapper of the signals on which Lightning saves: a fit of an engine saves after one step on all
ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hf_zero.checkpoint.failures import decide_on_rank_0
from hf_zero.distributed.world_group import get_world_group
from hf_zero.integrations.engine_protocol import is_engine
from hf_zero.integrations.lightning.fits import call_after_batches
from hf_zero.integrations.seams import Original
from hf_zero.integrations.signal_saves import end, listen, stop_listening

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


def save_after_a_step(original: Original, self: _SignalConnector) -> None:
    """Wraps ``_SignalConnector.register_signal_handlers``: a fit of an engine saves and ends after
    the same step on all ranks.

    In its handlers Lightning broadcasts, saves and asks SLURM for a requeue, while any collective
    may be under way.
    """
    trainer = self.trainer
    engine = trainer.strategy.model
    if not (
        is_engine(engine) and trainer.state.fn == "fit" and engine.config.checkpoint.save_on_signal
    ):
        original(self)
        return
    package = type(self).__module__.partition(".trainer.")[0]
    callback = importlib.import_module(f"{package}.callbacks").Callback
    exceptions = importlib.import_module(f"{package}.utilities.exceptions")
    slurm = trainer._accelerator_connector.cluster_environment
    # the signal on which Lightning queues a job of SLURM again
    requeues = getattr(slurm, "auto_requeue", False)
    requeue = getattr(slurm, "requeue_signal", None) if requeues else None
    listen(engine, *filter(None, [requeue]))

    def save_if_requested() -> None:
        if not engine.stop_requested:
            return
        if decide_on_rank_0(get_world_group(), lambda: requeue in engine.stop_requests.received):
            self._slurm_sigusr_handler_fn(requeue, None)  # type: ignore[arg-type]
        else:
            path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
            trainer.save_checkpoint(path)
        # The launcher's observer kills all processes once it finds that one has failed.
        getattr(trainer.strategy.launcher, "procs", []).clear()
        end(engine, exceptions.SIGTERMException)

    call_after_batches(trainer, callback, save_if_requested, lambda: stop_listening(engine))
