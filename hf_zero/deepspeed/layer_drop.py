"""``engine.progressive_layer_drop``: the schedule of layer dropping under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from hf_zero.techniques.layer_drop import LayerDrop


class ProgressiveLayerDrop:
    """What scripts read of it. Models need not: the engine leaves their blocks out."""

    def __init__(self, technique: LayerDrop):
        self._technique = technique

    def get_theta(self) -> float:
        """theta(t) of the next forward: with which probability the last block is kept."""
        return self._technique.theta

    def get_state(self) -> dict[str, Any]:
        """The keywords that DeepSpeed's engine gave a model's forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}
