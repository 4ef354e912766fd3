"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069), with DeepSpeed's settings: LAMB, and the scale of
its updates after the freeze. The engine sends the momentum (hf_zero/compression).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim.one_bit import SendsMomentum, check_momentum, log_idle_settings, steps_of
from hf_zero.optim.segments import ParamGroup
from hf_zero.optim.trust_ratio import Lamb, ratios
from hf_zero.optim.whole_tensor import Parts

FRESH = "exp_avg_sq_fresh"  # the variance that is updated after the freeze
RATIO, FACTOR = "ratio", "factor"  # per tensor
FACTOR_SETTINGS = ("factor_min", "factor_max", "factor_threshold")


class OneBitLamb(SendsMomentum, Lamb):
    """LAMB for ``freeze_step`` steps; then the variance v is frozen, and the momentum m is sent in
    one bit with error feedback.

    Per tensor, c is the moving average of LAMB's trust ratio until the freeze, v' a variance that
    starts as v and is then updated with the gradient reconstructed from the messages, and::

        u = m / (sqrt(v) + eps) + weight_decay * w
        f = max over elements of (sqrt(v) + eps) / (sqrt(v') + eps)
        f <- f * k + 1 - k with k = min(1, |u without weight decay| / |u|)
        f <- clamp to [factor_min, factor_max], then to within factor_threshold of the last
        w <- w - lr * c * f * u

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff,
            eps_inside_sqrt: as in :class:`hf_zero.optim.Lamb`.
        freeze_step: the last dense step.
        coeff_beta: coefficient of the moving average of the trust ratio, which starts as the first
            ratio.
        factor_max, factor_min: bounds of f.
        factor_threshold: upper bound of the relative change of f in a step.
        cuda_aware, comm_backend_name: accepted, without effect.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq", FRESH)
    TENSOR_STATE_NAMES = (RATIO, FACTOR)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        cuda_aware: bool | None = None,
        comm_backend_name: str | None = None,
    ) -> None:
        self.freeze_step = steps_of("OneBitLamb", "freeze_step", freeze_step)
        check_momentum("OneBitLamb", betas)
        if not 0.0 <= coeff_beta < 1.0 or not 0.0 < factor_min <= factor_max:
            raise ConfigError(
                f"OneBitLamb: coeff_beta is {coeff_beta}, factor_min {factor_min} and factor_max "
                f"{factor_max}; give a coeff_beta in [0, 1) and bounds with "
                "0 < factor_min <= factor_max"
            )
        if not factor_threshold > 0.0:
            raise ConfigError(
                f"OneBitLamb: factor_threshold is {factor_threshold}; give a number above 0"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )
        bounds = dict(zip(FACTOR_SETTINGS, (factor_min, factor_max, factor_threshold)))
        for key, value in {"coeff_beta": coeff_beta, **bounds}.items():
            self.defaults[key] = value
            for group in self.param_groups:
                group.setdefault(key, value)
        log_idle_settings(self, cuda_aware=cuda_aware, comm_backend_name=comm_backend_name)

    def is_dense(self, step: int) -> bool:
        """Return whether ``step``, from 1, sends whole gradients: the variance is not frozen."""
        return step <= self.freeze_step

    @staticmethod
    def apply(group: ParamGroup, parts: Parts) -> None:
        """Make a step of LAMB, and keep the moving averages of its trust ratios."""
        Lamb.apply(group, parts)
        beta = group["coeff_beta"]
        for state, now in zip(parts.tensor_state, ratios(group, parts.norms).float()):
            before = state.get(RATIO, now.view(1))
            state[RATIO] = before * beta + now * (1.0 - beta)


def next_factor(
    settings: Tensor, largest: Tensor, without: Tensor, whole: Tensor, last: Tensor
) -> Tensor:
    """Return f of each tensor from its ``settings`` [FACTOR_SETTINGS, tensors], the largest
    quotient of its denominators, the norms of its update without and with weight decay, and the
    last f: [tensors] each.
    """
    least, most, change = settings
    share = torch.where(whole > 0, without / whole, torch.ones_like(whole)).clamp(max=1.0)
    factor = (largest * share + 1.0 - share).clamp(least, most)
    return torch.maximum(torch.minimum(factor, last * (1.0 + change)), last * (1.0 - change))
