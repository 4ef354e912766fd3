"""What becomes of activations under an engine: blocks that recompute them, and saved tensors
that wait in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.config import ActivationOffload, ZeroConfig
from hf_zero.core.flat import Flat
from hf_zero.core.guards import Attached
from hf_zero.core.recompute import Checkpoints
from hf_zero.core.saved import Offload
from hf_zero.core.slabs import Slabs
from hf_zero.core.transfers import Streams, Transfers
from hf_zero.core.wrap import repeated_blocks
from hf_zero.device import kinds
from hf_zero.logs import logger
from hf_zero.ops.host_memory import HostArena


def transfers_of(device: torch.device) -> Transfers | None:
    """How activations leave ``device``; None where it is the host, which has them in its memory
    already.
    """
    return None if kinds.is_host(device) else Streams(device)


def offload_of(device: torch.device, section: ActivationOffload) -> Offload | None:
    """Offload of activations from ``device``, if there is somewhere to go."""
    transfers = transfers_of(device)
    if transfers is None:
        return None
    arena = HostArena(section.pin_memory is not False, device)
    return Offload(device, transfers, Slabs(arena.take), section.min_bytes, section.in_flight_bytes)


class Activations:
    """Of ``model``, as the configuration says. :meth:`remove` takes everything off again."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: ZeroConfig,
        flats: Sequence[Flat],
        device: torch.device,
        tells: bool,
    ):
        """``blocks`` are those to be checkpointed
        (:func:`hf_zero.core.recompute.blocks_to_checkpoint`); ``tells`` logs.
        """
        self._model = weakref.ref(model)
        self._flats = flats
        self._always, self._with_checkpoints = (
            config.activation_offload.enabled,
            config.activation_checkpointing.cpu_checkpointing,
        )
        self._tells = tells
        self._removable: list[Any] = []
        self.checkpoints = Checkpoints(
            model, blocks, config.activation_checkpointing, device, tells
        )
        self.offload: Offload | None = None
        if self._always or self._with_checkpoints:
            self.offload = offload_of(device, config.activation_offload)
            if self.offload is None and tells:
                logger.info("activations stay where they are: the device is the host")
        if self.offload is None and not blocks:
            return
        self._removable += [
            model.register_forward_pre_hook(Attached(self._begin), prepend=True),
            model.register_forward_hook(Attached(self._end), always_call=True),
        ]
        if self.offload is not None:
            blocks_of_model = repeated_blocks(model)
            for _, block in blocks_of_model:
                self._removable.append(
                    block.register_forward_pre_hook(
                        Attached(partial(_begin_block, self.offload)), prepend=True
                    )
                )
            for _, last in blocks_of_model[-1:]:
                self._removable.append(
                    last.register_forward_pre_hook(
                        Attached(partial(_keep, self.offload)), prepend=True
                    )
                )

    def _stays(self) -> set[int]:
        """The storages of parameters and buffers."""
        model = self._model()
        storages = {flat.full.untyped_storage()._cdata for flat in self._flats}
        if model is not None:
            storages |= {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        return storages

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.checkpoints.look()
        if self.offload is None or not torch.is_grad_enabled():
            return
        # of a forward that KeyboardInterrupt has ended, which passes by the hook on leaving
        self.offload.end()
        if not self._always and not self.checkpoints.on:
            if self._tells:
                self._tells = False
                logger.warning(
                    "activation_checkpointing.cpu_checkpointing has nothing to move: no block is "
                    "checkpointed; set activation_checkpointing.blocks, "
                    "or gradient_checkpointing of the Trainer"
                )
            return
        self.offload.begin(self._stays())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.offload is not None:
            self.offload.end()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable = []
        self.checkpoints.remove()
        if self.offload is not None:
            self.offload.close()
            self.offload = None


def _begin_block(offload: Offload, module: nn.Module, args: Any) -> None:
    offload.block()


def _keep(offload: Offload, module: nn.Module, args: Any) -> None:
    offload.keep()
