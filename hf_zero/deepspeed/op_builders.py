"""``deepspeed.ops.op_builder``: DeepSpeed's compiled operators and their counterparts in hf-zero.
Nothing is compiled: the counterparts are part of the installation.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from hf_zero.deepspeed.modules import refuse

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
    "PinMemoryBuilder": ("pin_memory", "hf_zero.deepspeed.pinned_tensors"),
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
