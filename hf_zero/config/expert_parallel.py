"""Expert parallelism: the experts of a mixture-of-experts model on different ranks, and the other
keys of DeepSpeed's section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.kinds import BOOLEAN, TEXT, integer
from hf_zero.config.rows import inert, key, under

EXPERT_PARALLEL = "expert_parallel"
AUTOEP_SIZE = f"{EXPERT_PARALLEL}.autoep_size"


def _idle(values: Mapping[str, Any]) -> str:
    return "" if values.get(f"{EXPERT_PARALLEL}.enabled") else f"{EXPERT_PARALLEL}.enabled is false"


@dataclass(frozen=True)
class ExpertParallelSection:
    """Expert parallelism for models of transformers: data-parallel ranks hold different experts and
    exchange their tokens; see :mod:`hf_zero.parallel.expert`.
    """

    enabled: bool = key(
        BOOLEAN, False, "each rank keeps a part of the experts, and tokens are sent to them"
    )
    autoep_size: int = key(
        integer(1),
        1,
        "neighbouring ranks that hold one set of the experts together",
        unit="ranks",
        idle=_idle,
    )

    @property
    def size(self) -> int:
        """The number of ranks that hold one set of the experts together; 1 if expert parallelism is
        off.
        """
        return self.autoep_size if self.enabled else 1


EXPERT_KEYS = under(
    EXPERT_PARALLEL,
    inert("preset_model", TEXT, "experts are those that the model itself names (its ep_plan)"),
    inert("use_grouped_mm", BOOLEAN, "the model's experts_implementation decides"),
)
