"""Fused kernels, block-sparse attention and moved norms as a feature of an engine."""

from __future__ import annotations

from torch import nn

from hf_zero.activations.compile import to_be_compiled
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import CompileSection, sparse_layout
from hf_zero.zero.feature import EngineInputs, Feature


class FusedModules(Feature):
    """Forwards of modules that fused kernels replace, before an engine's hooks are around them."""

    def __init__(self, settings: ZeroConfig):
        self._kernels, self._moves_norms = settings.kernels, settings.pre_layer_norm
        self._sparse = sparse_layout(settings.sparse_attention)
        self._chooses = settings.chooses_kernels
        self._compiles = settings.section_of(CompileSection).blocks

    def check_inputs(self, inputs: EngineInputs) -> None:
        """Raise ConfigError for attention that no layout describes, and norms that cannot move."""
        if self._sparse is not None:
            from hf_zero.integrations.fused.sparse_attention import layout_of

            layout_of(inputs.model, self._sparse)
        if self._moves_norms:
            from hf_zero.integrations.fused.pre_layer_norm import plan
            from hf_zero.integrations.fused.shells import calls_of_model

            plan(inputs.model, calls_of_model(inputs.model))

    def prepare(self, model: nn.Module) -> None:
        if self._kernels == "off" and self._sparse is None and not self._moves_norms:
            return
        from hf_zero.integrations import fused  # with all kernels

        blocks = to_be_compiled(model) if self._chooses else []
        fused.prepare(
            model,
            self._kernels,
            self._sparse,
            self._moves_norms,
            # inductor fuses the blocks that it compiles
            compiled=blocks if self._compiles else (),
            narrow=() if self._compiles else fused.narrow_blocks(blocks),
        )
