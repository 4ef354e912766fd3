"""What an engine needs of other libraries on any model, as a feature of it."""

from __future__ import annotations

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.integrations import finder
from hf_zero.integrations.bitsandbytes import keep_packing
from hf_zero.zero.feature import Feature
from hf_zero.zero.training_engine import TrainingEngine


class EngineSeams(Feature):
    """The layers of bitsandbytes keep their packing, and the seams of torch are applied."""

    def __init__(self, settings: ZeroConfig):
        pass

    def prepare(self, model: nn.Module) -> None:
        keep_packing(model)

    def apply(self, engine: TrainingEngine) -> None:
        if engine.device.type != "meta":  # a simulation
            finder.watch("torch")
