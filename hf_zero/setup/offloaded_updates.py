"""Offloaded optimizer state as a feature: its updates beside the training, the copies of gradients
to host memory, and the share that comes back to the device after the first step.
"""

from __future__ import annotations

import torch

from hf_zero.config import ZeroConfig
from hf_zero.device import free_memory, kinds
from hf_zero.logging import logger
from hf_zero.offload.gradient_offload import GradientOffload
from hf_zero.offload.storage import MASTER
from hf_zero.offload.update import OffloadedUpdater, StagedCopies
from hf_zero.optim.host_rules import compressible, refuse_offload, stored_format
from hf_zero.optim.moment_formats import updates_in_host_memory
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.engine_plan import OffloadedMoments, shard_spec
from hf_zero.zero.layout.flat_memory import keeps_master, moves_to_device
from hf_zero.zero.step.optimizer_step import OptimizerStep


class Formats(OffloadedMoments):
    """The formats of offloaded moments, by the rule of the optimizer's update."""

    compressible = staticmethod(compressible)
    stored_format = staticmethod(stored_format)
    refuse = staticmethod(refuse_offload)


FORMATS = Formats()


def formats(
    config: ZeroConfig, optimizer: torch.optim.Optimizer | None
) -> dict[str, OffloadedMoments]:
    """Return what a plan reads of offloaded moments: also a plan without any, which compares."""
    return {"offloaded_moments": FORMATS}


class OffloadedUpdates(Feature):
    """Update the optimizer state that is in host memory or in files."""

    _step: OptimizerStep | None = None

    def __init__(self, settings: ZeroConfig):
        self._keeps_buffers = settings.zero.keep_step_buffers

    def bind(self, step: OptimizerStep) -> None:
        if step.bound is None:
            return
        model, self._step = step.model, step
        mesh, placement, device = model.mesh, model.placement, model.mesh.device
        copies_gradients = None
        if not kinds.is_synchronous(device):
            copies_gradients = GradientOffload(device, placement.take_pinned)
        widest = max((flat.dtype.itemsize for flat in model.trainable), default=1)
        copies = StagedCopies(device, placement.sub_group_size * widest, placement.take_pinned)
        updater = OffloadedUpdater(model.units, mesh, device, copies, copies_gradients)
        step.offload_to(updater, copies_gradients, self._bring_back_what_fits)

    @torch.no_grad()
    def _bring_back_what_fits(self) -> None:
        """Move the state of the first units back to the device, as far as it has room after the
        first step (collective).
        """
        step = self._step
        assert step is not None
        model = step.model
        model.placement.awaits_first_step = False
        if updates_in_host_memory(step.bound.optimizer, model.mesh.device):
            return
        step.updater.finish()
        specs = [
            shard_spec(flat.spec) for flat in model.trainable if flat.optimizer_shard.offloaded
        ]
        names = {
            name
            for flat in model.trainable
            for name in step.bound.state.arrays(flat.optimizer_shard)
        } - {MASTER}
        free = min(
            model.mesh.all_gather_object(
                free_beside_a_step(model.mesh.device), "room on the device"
            )
        )
        with_master = {flat.key for flat in model.trainable if keeps_master(flat)}
        chosen = model.placement.fitting(specs, len(names), free, with_master)
        step.bound.state.move_to_device(
            moves_to_device(
                [flat for flat in model.trainable if flat.key in chosen],
                model.mesh.device,
                self._keeps_buffers,
                model.updates_in_backward,
            )
        )
        step.updater.find_units()
        if model.mesh.rank == 0:
            logger.info(
                "offload ratio auto: %d of %d flat buffers fit on the device beside the "
                "first step and stay there",
                len(chosen),
                len(specs),
            )

    def remove(self) -> None:
        self._step = None


def free_beside_a_step(device: torch.device) -> int:
    """Return the bytes of ``device`` left free by the largest step so far, less a tenth for
    fragmentation. 0 for a CPU: its memory is the host's.
    """
    if kinds.is_synchronous(device):
        return 0
    return max(0, int(0.9 * free_memory.free_at_the_peak(device)))
