"""Configured activation features on a model under an engine: checkpointing, offload, compiled
blocks, the order of attention kernels.

[Note: attention kernels]
torch tries the backends of ``scaled_dot_product_attention`` in one order for the whole process and
takes the first that supports the call; a compiled graph keeps the one chosen when it was traced,
and a backward uses the choice of its forward. The order is changed but no backend is disabled, so a
call that the preferred backend does not support (flash attention with a mask, say) uses the next.

torch's caches of compiled graphs on disk do not look at the order: a run would get the graph, and
the backend, of an earlier run with another order. The tag of the cache's keys names the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import config as compiler
from torch.nn.attention import SDPBackend
from torch.utils.hooks import RemovableHandle

from hf_zero.activations.checkpointing import Checkpoints, blocks_to_checkpoint
from hf_zero.activations.compile import CompiledBlocks, check_compilation
from hf_zero.activations.host_copies import Slabs, Streams
from hf_zero.activations.offload import Offload
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import ActivationCheckpointing, ActivationOffload, CompileSection
from hf_zero.device import kinds
from hf_zero.device.process_settings import ProcessSetting
from hf_zero.logging import logger
from hf_zero.ops.host_memory import HostArena
from hf_zero.zero.feature import Feature
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.wrap import repeated_blocks
from hf_zero.zero.training_engine import TrainingEngine

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

MEASURED: dict[tuple[int, int], str] = {}
"""The faster of flash and cuDNN in a training step, by the GPU's compute capability: what the row
"attention: cuDNN over flash" of scripts/gpu has shown. A GPU that is not here has not been
measured, and keeps torch's own order.
"""


def transfers_of(device: torch.device) -> Streams | None:
    """Return the copies between ``device`` and host memory; None if the device is the host."""
    return None if kinds.is_synchronous(device) else Streams(device)


def offload_of(device: torch.device, section: ActivationOffload) -> Offload | None:
    """Return the activation offload for ``device``; None if the device is the host."""
    transfers = transfers_of(device)
    if transfers is None:
        return None
    arena = HostArena(section.pin_memory is not False, device)
    return Offload(device, transfers, Slabs(arena.take), section.min_bytes, section.in_flight_bytes)


class ActivationPatches(Feature):
    """Activation features of ``config`` on the model of one engine; independent of sharding."""

    def __init__(self, config: ZeroConfig):
        self._config = config
        self._blocks: list[nn.Module] = []
        self._fixed_addresses = True
        self._installed = ExitStack()
        self.activations: Activations | None = None
        self.compiled: CompiledBlocks | None = None

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError if the model does not support the configured compilation or
        checkpoints.
        """
        # whether parameters keep their memory for the life of the engine
        self._fixed_addresses = not plan.policy.shards_parameters
        check_compilation(
            self._config.section_of(CompileSection), plan.model, self._fixed_addresses
        )
        self._blocks = blocks_to_checkpoint(
            plan.model, self._config.section_of(ActivationCheckpointing)
        )

    def apply(self, engine: TrainingEngine) -> None:
        model, units, device = engine.module, engine.units, engine.device
        self.activations = Activations(
            model, self._blocks, self._config, units, device, engine.mesh.rank == 0
        )
        self._installed.callback(self.activations.remove)
        # outside of checkpointing: one graph holds forward and recomputation
        before, self.compiled = self.compiled, CompiledBlocks(model, units, self._fixed_addresses)
        self._installed.callback(self.compiled.remove)
        if before is None:
            self.compiled.install(self._config.section_of(CompileSection))
        else:
            self.compiled.repeat(before)
        self._installed.callback(prefer_attention(self._config.attention_backend, device))

    def remove(self) -> None:
        self._installed.close()

    def abort_forward(self) -> None:
        if self.activations is not None and self.activations.offload is not None:
            self.activations.offload.end()

    def compile(self, backend: str, **options: Any) -> None:
        """Compile each block's forward as ``compile: blocks`` does, with other arguments."""
        assert self.compiled is not None
        self.compiled.compile(None, backend, **options)


class Activations:
    """Activation checkpointing and offload of ``model``, as configured, until :meth:`remove`."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        config: ZeroConfig,
        units: Sequence[Unit],
        device: torch.device,
        tells: bool,
    ):
        """``blocks`` are the blocks to checkpoint
        (:func:`hf_zero.activations.checkpointing.blocks_to_checkpoint`); ``tells``: whether to log.
        """
        self._model = weakref.ref(model)
        self._units = units
        self._always = config.section_of(ActivationOffload).enabled
        self._with_checkpoints = config.section_of(ActivationCheckpointing).cpu_checkpointing
        self._tells = tells
        self._removable: list[RemovableHandle] = []
        self.checkpoints = Checkpoints(
            model, blocks, config.section_of(ActivationCheckpointing), device, tells
        )
        self.offload: Offload | None = None
        if self._always or self._with_checkpoints:
            self.offload = offload_of(device, config.section_of(ActivationOffload))
            if self.offload is None and tells:
                logger.info(
                    "activations are not offloaded: the model trains on the CPU, in its memory"
                )
        if self.offload is None and not blocks:
            return
        self._removable += [
            model.register_forward_pre_hook(Attached(self._begin), prepend=True, with_kwargs=True),
            model.register_forward_hook(Attached(self._end), always_call=True),
        ]
        if self.offload is not None:
            blocks_of_model = repeated_blocks(model)
            for _, block in blocks_of_model:
                self._removable.append(
                    block.register_forward_pre_hook(
                        Attached(_begin_block, self.offload), prepend=True
                    )
                )
            for _, last in blocks_of_model[-1:]:
                self._removable.append(
                    last.register_forward_pre_hook(Attached(_keep, self.offload), prepend=True)
                )

    def _stays(self) -> set[int]:
        """Return the storages of parameters and buffers, which are never offloaded."""
        model = self._model()
        storages = {
            buffer.untyped_storage()._cdata
            for unit in self._units
            for flat in unit.flats
            for buffer in flat.whole_buffers
        }
        if model is not None:
            storages |= {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        return storages

    def _begin(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self.checkpoints.look()
        if not torch.is_grad_enabled():
            return
        self.checkpoints.check_caches(module, args, kwargs)
        if self.offload is None:
            return
        # a forward interrupted by KeyboardInterrupt has skipped the forward hook that ends it
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

    def _end(self, module: nn.Module, args: object, output: object) -> None:
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


def _begin_block(offload: Offload, module: nn.Module, args: object) -> None:
    offload.block()


def _keep(offload: Offload, module: nn.Module, args: object) -> None:
    offload.keep()


def chosen(backend: str, device: torch.device) -> str:
    """Return ``backend``; for "auto" the backend measured on GPUs such as ``device``, or "auto" if
    none was measured.
    """
    if backend != "auto" or not MEASURED or not kinds.is_nvidia(device):
        return backend
    properties = kinds.properties(device)
    return MEASURED.get((properties.major, properties.minor), backend)


def _set_order(order: list[int]) -> None:
    torch._C._set_sdp_priority_order(order)


_order = ProcessSetting(lambda: list(torch._C._get_sdp_priority_order()), _set_order)


def prefer_attention(backend: str, device: torch.device) -> Callable[[], None]:
    """Put ``backend`` first in the order of attention kernels; return a function that restores the
    order. "auto" is the measured backend, else torch's own order.
    """
    backend = chosen(backend, device)
    if backend == "auto":
        return _nothing
    if not kinds.is_synchronous(device):
        # torch sets its own order for the GPU in the first call, overwriting an earlier one.
        nothing = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device)
        F.scaled_dot_product_attention(nothing, nothing, nothing)
    first = _BACKENDS[backend].value
    before = torch._C._get_sdp_priority_order()
    undo, tag = ExitStack(), f" attention={backend}"
    undo.callback(_order.change([first, *(other for other in before if other != first)]))
    compiler.cache_key_tag += tag
    undo.callback(_remove_tag, tag)
    return undo.close


def _remove_tag(tag: str) -> None:
    compiler.cache_key_tag = compiler.cache_key_tag.replace(tag, "", 1)


def _nothing() -> None:
    """Do nothing: the order was not changed."""
