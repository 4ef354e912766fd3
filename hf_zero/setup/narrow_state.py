"""Training state in bf16 as a feature: what its optimizers refuse."""

from __future__ import annotations

from hf_zero.config import ZeroConfig
from hf_zero.optim.bf16_state import check_bf16
from hf_zero.zero.feature import Feature
from hf_zero.zero.layout.engine_plan import EnginePlan


class NarrowStateCheck(Feature):
    """Refuse optimizers and messages that do not go with state in bf16."""

    def __init__(self, settings: ZeroConfig):
        pass

    def check(self, plan: EnginePlan) -> None:
        if plan.optimizer is not None:
            few_bits = any(codec.sends_changes for codec in plan.extensions.codecs)
            check_bf16(plan.optimizer, plan.settings, bool(plan.names_in_8_bits), few_bits)
