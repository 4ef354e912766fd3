"""Adam and AdamW that may leave the correction of their moments' bias out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Adam(torch.optim.Adam):
    """torch.optim.Adam, or AdamW by ``decoupled_weight_decay``, with one more setting of a group.

    With ``bias_correction`` false the moments count as they are, from zero on (as BERT's AdamW has
    it; Devlin et al. 2018, arXiv:1810.04805)::

        w <- w - lr * m / (sqrt(v) + eps)

    Args:
        params: parameters or parameter groups.
        bias_correction: as above.
        settings: as torch.optim.Adam has them.
    """

    def __init__(self, params: Any, *args: Any, bias_correction: bool = True, **settings: Any):
        super().__init__(params, *args, **settings)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """torch's; without correction the update is given the step at infinity, where that is 1,
        and the steps are counted here.
        """
        answer = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: list[Tensor] = lists[-1]
        if steps and not group.get("bias_correction", True):
            skipped: Tensor | None = getattr(self, "found_inf", None)
            for step in steps:
                step += 1 if skipped is None else 1 - skipped.to(step.device)
            steps[:] = [torch.full_like(step, math.inf) for step in steps]
        return answer
