"""``deepspeed.ops.op_builder``: DeepSpeed's compiled operators and their counterparts in hf-zero.
Nothing is compiled: the counterparts are part of the installation.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
from typing import TYPE_CHECKING

import torch

from hf_zero.deepspeed.modules import refuse
from hf_zero.device import kinds
from hf_zero.distributed import process_group
from hf_zero.errors import HostMemoryError

if TYPE_CHECKING:
    from types import ModuleType


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class OpBuilder:
    """One operator. ``module`` of hf-zero implements it; without one it is not built, and
    ``instead`` names the remedy. The defaults are those of a library's own operator.
    """

    NAME = ""
    module = ""
    instead = "compile its sources with torch.utils.cpp_extension.load"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return self.module or self.name

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the operator exists here and runs on this machine."""
        return bool(self.module) and (self.NAME != "sparse_attn" or _has_triton())

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the module of hf-zero that has the operator; scripts call this to compile ahead.
        Raises NotBuiltError if there is none.
        """
        if not self.module:
            refuse(f"the operator {self.name or type(self).__name__}", self.instead)
        return importlib.import_module(self.module)

    jit_load = load

    def builder(self) -> object:
        """Return None: there is no extension to compile."""


_GENERATE = "generate with the engine's module, or export the model to an inference server"
_LAYER = "use the model's own layers, with `kernels` of the configuration"
_LOAD = "load quantized weights"
_GLOO = "gloo serves CPU ranks"

HERE = {
    "AsyncIOBuilder": ("async_io", "hf_zero.ops.files"),
    "CPUAdagradBuilder": ("cpu_adagrad", "hf_zero.optim.cpu"),
    "CPUAdamBuilder": ("cpu_adam", "hf_zero.optim.cpu"),
    "CPULionBuilder": ("cpu_lion", "hf_zero.optim.cpu"),
    "FusedAdamBuilder": ("fused_adam", "torch.optim"),
    "FusedLambBuilder": ("fused_lamb", "hf_zero.optim.trust_ratio"),
    "FusedLionBuilder": ("fused_lion", "hf_zero.optim.lion"),
    "PinMemoryBuilder": ("pin_memory", __name__),
    "SparseAttnBuilder": ("sparse_attn", "hf_zero.ops.sparse_attention"),
}
"""Builders of operators that exist here: DeepSpeed's name, and the module."""

NOT_BUILT = {
    "CCLCommBuilder": ("deepspeed_ccl_comm", _GLOO),
    "DeepCompileBuilder": ("dc", "write compile: blocks in the configuration"),
    "EvoformerAttnBuilder": ("evoformer_attn", _LAYER),
    "FPQuantizerBuilder": ("fp_quantizer", _LOAD),
    "GDSBuilder": ("gds", "files are read into host memory; leave aio.use_gds false"),
    "InferenceBuilder": ("transformer_inference", _GENERATE),
    "InferenceCoreBuilder": ("inference_core_ops", _GENERATE),
    "InferenceCutlassBuilder": ("cutlass_ops", _GENERATE),
    "NotImplementedBuilder": ("deepspeed_not_implemented", "there is no counterpart"),
    "QuantizerBuilder": ("quantizer", _LOAD),
    "RaggedOpsBuilder": ("ragged_device_ops", _GENERATE),
    "RaggedUtilsBuilder": ("ragged_ops", _GENERATE),
    "RandomLTDBuilder": ("random_ltd", "write data_efficiency.data_routing.random_ltd"),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", _GLOO),
    "SpatialInferenceBuilder": ("spatial_inference", _GENERATE),
    "StochasticTransformerBuilder": ("stochastic_transformer", _LAYER),
    "TransformerBuilder": ("transformer", _LAYER),
    "UtilsBuilder": ("utils", "torch._utils flattens and unflattens lists of tensors"),
}
"""Builders of operators that do not: DeepSpeed's name, and the remedy."""

BUILDERS: dict[str, type[OpBuilder]] = {
    kind: type(kind, (OpBuilder,), {"NAME": name, "module": module, "__module__": __name__})
    for kind, (name, module) in HERE.items()
} | {
    kind: type(kind, (OpBuilder,), {"NAME": name, "instead": instead, "__module__": __name__})
    for kind, (name, instead) in NOT_BUILT.items()
}
globals().update(BUILDERS)
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}


def compatible_ops() -> dict[str, bool]:
    """Return ``deepspeed.ops.__compatible_ops__``: whether each operator exists, by its name."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> object:
    compute = {"COMPATIBLE": compatible_ops, "HAS_TRITON": _has_triton}.get(name)
    if compute is not None:
        globals()[name] = compute()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mlock.argtypes = _LIBC.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class PinHandle:
    """Make and free such tensors: pinned for the device, or locked if the device is the host."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return ``num_elem`` zeros in the dtype of ``example_tensor``, 1-D. Raises HostMemoryError
        if the system does not lock that much.
        """
        dtype, device = example_tensor.dtype, process_group.default_device()
        if kinds.is_synchronous(device):
            nbytes = max(1, num_elem * dtype.itemsize)
            tensor = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype, count=num_elem)
            if _LIBC.mlock(tensor.data_ptr(), nbytes):
                raise HostMemoryError(
                    f"{nbytes:,} bytes could not be locked in memory: "
                    f"{os.strerror(ctypes.get_errno())}; raise the limit (ulimit -l), or use plain "
                    "tensors"
                )
        else:
            tensor = torch.zeros(num_elem, dtype=dtype, pin_memory=True)
        self._held[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is within a tensor of this handle, or is pinned by torch."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        inside = (at <= start and stop <= at + locked.nbytes for at, locked in self._held.items())
        return any(inside) or bool(tensor.is_pinned())

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Unlock the memory, which is freed with the last tensor on it; return False for a tensor
        not made by this handle.
        """
        locked = self._held.pop(locked_tensor.data_ptr(), None)
        if locked is not None and not locked.is_pinned():
            _LIBC.munlock(locked.data_ptr(), max(1, locked.nbytes))
        return locked is not None


pin_handle: object = PinHandle


def get_active_native_pinned_memory() -> None:
    """Return None: torch pins the buffers of the engine and of ``get_accelerator().pin_memory``,
    and frees them with their tensors, whatever DS_PIN_MEMORY_BACKEND says.
    """
