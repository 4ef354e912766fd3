"""LAMB and LARS: updates scaled for each tensor by a ratio of norms.

LAMB (You et al. 2019, arXiv:1904.00962) scales Adam's update by the norms of the tensor and of its
update, with the settings and the arithmetic of DeepSpeed; LARS (You et al. 2017, arXiv:1708.03888)
scales SGD with momentum by the norms of the tensor and of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.device.pinned import upload
from hf_zero.errors import ConfigError
from hf_zero.ops.flat_reference import sums_of_squares
from hf_zero.ops.lamb import LambSettings, apply_, measure_
from hf_zero.optim import ranges
from hf_zero.optim.segments import ParamGroup
from hf_zero.optim.tensor_sums import TensorSumOptimizer
from hf_zero.optim.whole_tensor import Parts


class Lamb(ranges.CheckedOptimizer, TensorSumOptimizer):
    """LAMB.

    Per tensor, with gradient ``g``, moments ``m`` and ``v`` and weights ``w``::

        m <- beta1 * m + (1 - beta1) * g;    v <- beta2 * v + (1 - beta2) * g * g
        u = m / (sqrt(v) + eps) + weight_decay * w      (eps_inside_sqrt: m / sqrt(v + eps))
        r = clamp(|w| / |u|, min_coeff, max_coeff), or 1 where a norm is 0
        w <- w - lr * c * r * u;             c = sqrt(1 - beta2^t) / (1 - beta1^t), or 1 without
                                             bias_correction

    The bias correction is not part of ``u``, as in DeepSpeed and unlike the paper's algorithm; the
    paper's authors also leave it out if the learning rate is warmed up.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: coefficients of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: times the weights, added to the update before its norm is taken.
        bias_correction: correct the moments for their start at zero.
        max_coeff: upper bound of the ratio ``r``.
        min_coeff: its lower bound.
        eps_inside_sqrt: add ``eps`` under the root.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    SUMS = 2
    MOMENTS: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    RANGES = {
        **ranges.not_negative("lr", "eps", "weight_decay", "min_coeff", "max_coeff"),
        "betas": ranges.BETAS,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: ParamGroup) -> None:
        super().check_group(group)
        if not group["min_coeff"] <= group["max_coeff"]:
            raise ConfigError(
                f"{type(self).__name__}: min_coeff is {group['min_coeff']} and max_coeff "
                f"{group['max_coeff']}; give numbers with 0 <= min_coeff <= max_coeff"
            )

    def get_lamb_coeffs(self) -> list[float]:
        """Return the ratio ``r`` of each tensor in the last step, in the order of the groups; []
        before the first step.
        """
        return [
            ratio
            for group, norms in zip(self.param_groups, self.norms)
            for ratio in ratios(group, norms).tolist()
        ]

    @staticmethod
    def measure(group: ParamGroup, parts: Parts) -> Tensor:
        averages, variances, *_ = parts.moments
        return measure_(
            parts.weights, parts.grads, averages, variances, _settings(group),
            divisor=parts.divisor, kernels=parts.kernels
        )  # fmt: skip

    @staticmethod
    def apply(group: ParamGroup, parts: Parts) -> None:
        sizes = [step_size(group, step) for step in parts.steps]
        step_sizes = upload(torch.tensor(sizes, dtype=torch.float64), parts.norms.device)
        rates = ratios(group, parts.norms) * step_sizes
        averages, variances, *_ = parts.moments
        apply_(parts.weights, averages, variances, rates, _settings(group), kernels=parts.kernels)


def step_size(group: ParamGroup, step: int, variance: int | None = None) -> float:
    """Return the factor of an update and its trust ratio in step ``step``: the learning rate with
    bias correction. ``variance``: the step that the variance dates from, if another.
    """
    (beta1, beta2), of = group["betas"], step if variance is None else variance
    corrected = (1 - beta2**of) ** 0.5 / (1 - beta1**step) if group["bias_correction"] else 1.0
    return float(group["lr"]) * corrected


def _settings(group: ParamGroup) -> LambSettings:
    beta1, beta2 = map(float, group["betas"])
    eps, decay = float(group["eps"]), float(group["weight_decay"])
    return LambSettings(beta1, beta2, eps, decay, bool(group["eps_inside_sqrt"]))


def ratios(group: ParamGroup, norms: Tensor) -> Tensor:
    """Return the trust ratio of each tensor, [tensors], from the norms of its weights and of its
    update, ``norms`` [tensors, 2].
    """
    weights, updates = norms.unbind(1)
    ratio = (weights / updates).clamp(group["min_coeff"], group["max_coeff"])
    return torch.where((weights > 0) & (updates > 0), ratio, torch.ones_like(ratio))


class LARS(ranges.CheckedOptimizer, TensorSumOptimizer):
    """LARS.

    Per tensor of two dimensions and more, with gradient ``g``, momentum ``b`` and weights ``w``::

        r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), or 1 where |w| or |g| is 0
        b <- momentum * b + lr * r * (g + weight_decay * w);    w <- w - b

    ``r`` is 1 for biases and norms, as in the implementation of the paper's authors.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: coefficient of the momentum, in [0, 1).
        weight_decay: times the weights, added to the gradient.
        trust_coefficient: eta of the paper.
        eps: added to the denominator of the ratio.
        nesterov: step by ``lr * r * (g + weight_decay * w) + momentum * b`` instead of ``b``.

    Raises:
        ConfigError: a hyperparameter is out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    SUMS = 2
    MOMENTS = ("momentum_buffer",)
    RANGES = {
        **ranges.not_negative("lr", "weight_decay", "eps"),
        "momentum": ranges.COEFFICIENT,
        "trust_coefficient": ranges.POSITIVE,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient, "eps": eps, "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, defaults)

    @staticmethod
    def measure(group: ParamGroup, parts: Parts) -> Tensor:
        return sums_of_squares([parts.weights, parts.gradients()])

    @staticmethod
    def apply(group: ParamGroup, parts: Parts) -> None:
        (buffers,) = parts.moments
        decay, momentum = group["weight_decay"], group["momentum"]
        weights, gradients = parts.norms.unbind(1)
        ratio = group["trust_coefficient"] * weights / (gradients + decay * weights + group["eps"])
        scaled = (weights > 0) & (gradients > 0)
        scaled &= upload(torch.tensor([len(shape) > 1 for shape in parts.shapes]), ratio.device)
        rates = torch.where(scaled, ratio, torch.ones_like(ratio)) * float(group["lr"])
        update = list(torch._foreach_add(parts.gradients(), parts.weights, alpha=decay))
        torch._foreach_mul_(update, list(rates.to(parts.weights[0].dtype).unbind()))
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, update)
        if group["nesterov"]:
            torch._foreach_add_(update, buffers, alpha=momentum)
        torch._foreach_sub_(parts.weights, update if group["nesterov"] else buffers)
