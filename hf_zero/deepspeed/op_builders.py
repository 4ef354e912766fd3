"""``deepspeed.ops.op_builder``: DeepSpeed's compiled operators and their counterparts in hf-zero.
Nothing is compiled: the counterparts are part of the installation.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from hf_zero.deepspeed.placeholders import refuse


def _always() -> bool:
    return True


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class OpBuilder:
    """One operator. ``module`` of hf-zero implements it; without one it is not built, and
    ``instead`` names the remedy.
    """

    NAME = ""
    module = ""
    instead = "there is no counterpart in this version"
    available: Callable[[], bool] = staticmethod(_always)

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return self.module or self.name

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator exists here and runs on this machine."""
        return bool(self.module) and type(self).available()

    def load(self, verbose: bool = False) -> Any:
        """Return the module of hf-zero that has the operator; scripts call this to compile ahead.
        Raises NotBuiltError if there is none.
        """
        if not self.module:
            refuse(f"the operator {self.name}", self.instead)
        return importlib.import_module(self.module)

    jit_load = load

    def builder(self) -> Any:
        """Return None: there is no extension to compile."""


def _builder(
    kind: str, name: str, module: str = "", available: Any = _always, instead: str = ""
) -> type[OpBuilder]:
    told = instead or OpBuilder.instead
    values = {
        "NAME": name,
        "module": module,
        "available": staticmethod(available),
        "instead": told,
        "__doc__": f"{module}." if module else f"Not built: {told}.",
        "__module__": __name__,
    }
    return type(kind, (OpBuilder,), values)


_INFERENCE = "generate with the engine's module, or export the model to an inference server"
_LAYER = "use the model's own layers, with `kernels` of the configuration"

CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", "hf_zero.optim.cpu")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", "hf_zero.optim.cpu")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "hf_zero.optim.cpu")
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", "torch.optim")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", "hf_zero.optim.adam_lion")
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", "hf_zero.ops.files")
PinMemoryBuilder = _builder("PinMemoryBuilder", "pin_memory", "hf_zero.deepspeed.locked_memory")
UtilsBuilder = _builder(
    "UtilsBuilder", "utils", instead="torch._utils flattens and unflattens lists of tensors"
)
SparseAttnBuilder = _builder(
    "SparseAttnBuilder", "sparse_attn", "hf_zero.ops.sparse_attention", _has_triton
)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", "hf_zero.optim.trust_ratio")
GDSBuilder = _builder(
    "GDSBuilder", "gds", instead="files are read into host memory; leave aio.use_gds false"
)
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", instead="load quantised weights")
FPQuantizerBuilder = _builder(
    "FPQuantizerBuilder", "fp_quantizer", instead="load quantised weights"
)
TransformerBuilder = _builder("TransformerBuilder", "transformer", instead=_LAYER)
StochasticTransformerBuilder = _builder(
    "StochasticTransformerBuilder", "stochastic_transformer", instead=_LAYER
)
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", "evoformer_attn", instead=_LAYER)
RandomLTDBuilder = _builder(
    "RandomLTDBuilder", "random_ltd", instead="write data_efficiency.data_routing.random_ltd"
)
SpatialInferenceBuilder = _builder(
    "SpatialInferenceBuilder", "spatial_inference", instead=_INFERENCE
)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", instead=_INFERENCE)
InferenceCoreBuilder = _builder("InferenceCoreBuilder", "inference_core_ops", instead=_INFERENCE)
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", "cutlass_ops", instead=_INFERENCE)
RaggedOpsBuilder = _builder("RaggedOpsBuilder", "ragged_device_ops", instead=_INFERENCE)
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", "ragged_ops", instead=_INFERENCE)
DeepCompileBuilder = _builder(
    "DeepCompileBuilder", "dc", instead="write compile: blocks in the configuration"
)
CCLCommBuilder = _builder("CCLCommBuilder", "deepspeed_ccl_comm", instead="gloo serves CPU ranks")
ShareMemCommBuilder = _builder(
    "ShareMemCommBuilder", "deepspeed_shm_comm", instead="gloo serves CPU ranks"
)
NotImplementedBuilder = _builder("NotImplementedBuilder", "deepspeed_not_implemented")

ALL_OPS: dict[str, OpBuilder] = {
    value.NAME: value()
    for value in list(globals().values())
    if isinstance(value, type) and issubclass(value, OpBuilder) and value.NAME
}


def compatible_ops() -> dict[str, bool]:
    """Return ``deepspeed.ops.__compatible_ops__``: whether each operator exists, by its name."""
    return {name: builder.is_compatible() for name, builder in ALL_OPS.items()}


def __getattr__(name: str) -> Any:
    made = {"COMPATIBLE": compatible_ops, "HAS_TRITON": _has_triton}.get(name)
    if made is not None:
        globals()[name] = made()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
