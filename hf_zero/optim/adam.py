"""Adam and AdamW with optional bias correction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.optim.segments import ParamGroup


class Adam(torch.optim.Adam):
    """torch.optim.Adam, or AdamW by ``decoupled_weight_decay``, with one more setting per group.

    With ``bias_correction`` false the moments, which start at zero, are used uncorrected, as in
    BERT's AdamW (Devlin et al. 2018, arXiv:1810.04805)::

        w <- w - lr * m / (sqrt(v) + eps)

    Args:
        params: parameters or parameter groups.
        bias_correction: whether to correct the moments for their start at zero.
        args, settings: the other arguments of torch.optim.Adam.
    """

    def __init__(self, params: ParamsT, *args: Any, bias_correction: bool = True, **settings: Any):
        super().__init__(params, *args, **settings)
        self.defaults["bias_correction"] = bias_correction  # of groups that are added later
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(self, group: ParamGroup, *lists: Any) -> object:
        """Fill ``lists`` as torch.optim.Adam does. Without bias correction, count the steps here
        and replace them in the last list by infinity, where the correction factor is 1.
        """
        answer = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        steps: list[Tensor] = lists[-1]  # torch passes state_steps last
        if steps and not group.get("bias_correction", True):
            skipped: Tensor | None = getattr(self, "found_inf", None)
            for step in steps:
                step += 1 if skipped is None else 1 - skipped.to(step.device)
            steps[:] = [torch.full_like(step, math.inf) for step in steps]
        return answer
