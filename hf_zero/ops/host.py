"""The kernels on CPU tensors: arguments are checked, then the native core or, without one, the
torch reference runs.

Tensors are 1-D, contiguous and on the CPU; with ``on_host=False`` they may be on another device,
where the reference runs, and for :func:`adam` with two ``dynamic`` moments a Triton kernel
(``eight_bit_adam.py``). An update reads the gradient in fp32, bf16 or fp16, divides it by
``divisor`` (loss scale and clipping in one number), updates the fp32 master and its moments in
place and, if ``out`` is given, writes the new master there too, in the dtype of ``out``: one pass
over memory. ``out`` may be ``grad`` itself.

Element-wise results are bitwise equal on every instruction set, with any number of threads, and
however a range is cut into calls, as long as ``first`` (the index of element 0 in the whole) and
``seed`` are those of the whole. Moments that are not fp32 are rounded stochastically: lion needs
another ``seed`` at each step; adam mixes ``step`` in itself.

All functions raise :class:`~hf_zero.errors.KernelError`, naming the tensor, for a wrong device,
layout, dtype or size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native, reference
from hf_zero.ops.eight_bit_adam import EIGHT_BIT_ADAM
from hf_zero.ops.moment_blocks import BLOCK, Blocks, Moment, core_for
from hf_zero.ops.native import FLOATS, FP32, address, flat, kind

_MOMENTS = (torch.float32, torch.bfloat16)
_LOW64 = (1 << 64) - 1


def adam(
    master: Tensor,
    grad: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    corrected: bool = True,
    maximize: bool = False,
    max_exp_avg_sq: Tensor | None = None,
    divisor: float = 1.0,
    out: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
    on_host: bool = True,
) -> None:
    """Make one step of Adam (Kingma & Ba 2014, arXiv:1412.6980), or of AdamW (Loshchilov & Hutter
    2017, arXiv:1711.05101) if ``decoupled``.

    Args:
        master: fp32 [n].
        grad: fp32, bf16 or fp16 [n].
        exp_avg: first moment: fp32 or bf16 [n], or signed Blocks.
        exp_avg_sq: second moment: fp32 or bf16 [n], or Blocks without sign.
        step: number of this step, from 1.
        corrected: correct the moments for their start at zero.
        max_exp_avg_sq: fp32 [n], AMSGrad's (Reddi et al. 2018, arXiv:1904.09237).
        divisor, out, seed, first, on_host: see the module.
    """
    _check_step("adam", step)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        # a schedule may bring beta1 above 1, as torch takes it
        if not 0 <= beta < (1 if name == "beta2" else math.inf) or beta == 1:
            raise KernelError(f"adam: {name} is {beta}, for which there is no bias correction")
    shared = _shared("adam", master, grad, divisor, maximize, out, _key(seed, step), first, on_host)
    _check_moment("adam", "exp_avg", exp_avg, master, first, signed=True)
    _check_moment("adam", "exp_avg_sq", exp_avg_sq, master, first, signed=False)
    if max_exp_avg_sq is not None:
        flat("adam", "max_exp_avg_sq", max_exp_avg_sq, FP32, master.numel(), master.device.type)
    past = step if corrected else math.inf  # the step at which the corrections are 1
    numbers = {
        "keep": 1 - lr * weight_decay if decoupled else 1.0,
        "l2": 0.0 if decoupled else weight_decay,
        "beta1": beta1,
        "beta2": beta2,
        "root_scale": 1 / math.sqrt(1 - beta2**past),
        "eps": eps,
        "step_size": lr / (1 - beta1**past),
    }
    core = core_for(master)
    if core is not None:
        moments = {
            **_moment_addresses("mean", exp_avg),
            **_moment_addresses("square", exp_avg_sq),
            "largest": address(max_exp_avg_sq),
        }
        core.adam(**_addresses(master, grad, shared), **moments, **numbers)
    elif (
        isinstance(exp_avg, Blocks)
        and isinstance(exp_avg_sq, Blocks)
        and exp_avg.dynamic
        and exp_avg_sq.dynamic
        and max_exp_avg_sq is None
    ):
        pairs = (exp_avg.codes, exp_avg.scales), (exp_avg_sq.codes, exp_avg_sq.scales)
        options = {name: shared[name] for name in ("out", "divisor", "negate")}
        EIGHT_BIT_ADAM(master, grad, *pairs, **numbers, **options)
    else:
        reference.adam(master, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, **numbers, **shared)


def lion(
    master: Tensor,
    grad: Tensor,
    exp_avg: Moment,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    divisor: float = 1.0,
    out: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
    on_host: bool = True,
) -> None:
    """Make one step of Lion (Chen et al. 2023, arXiv:2302.06675).

    ``exp_avg``: fp32 or bf16 [n], or signed Blocks; the rest as in :func:`adam`.
    """
    shared = _shared("lion", master, grad, divisor, maximize, out, _key(seed, 0), first, on_host)
    _check_moment("lion", "exp_avg", exp_avg, master, first, signed=True)
    numbers = {"keep": 1 - lr * weight_decay, "beta1": beta1, "beta2": beta2, "lr": lr}
    core = core_for(master)
    if core is None:
        reference.lion(master, grad, exp_avg, **numbers, **shared)
    else:
        core.lion(
            **_addresses(master, grad, shared), **_moment_addresses("mean", exp_avg), **numbers
        )


def adagrad(
    master: Tensor,
    grad: Tensor,
    total: Tensor,
    *,
    step: int,
    lr: float,
    lr_decay: float = 0.0,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    divisor: float = 1.0,
    out: Tensor | None = None,
) -> None:
    """Make one step of Adagrad (Duchi et al. 2011).

    ``total``: fp32 [n], the sum of squared gradients; ``step`` counts from 1.
    """
    _check_step("adagrad", step)
    shared = _shared("adagrad", master, grad, divisor, maximize, out, 0, 0)
    flat("adagrad", "total", total, FP32, master.numel())
    numbers = {"l2": weight_decay, "eps": eps, "step_size": lr / (1 + (step - 1) * lr_decay)}
    core = native.core()
    if core is None:
        reference.adagrad(master, grad, total, **numbers, **shared)
    else:
        core.adagrad(**_addresses(master, grad, shared), total=address(total), **numbers)


def sgd(
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Moment | None,
    *,
    first_step: bool = False,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
    divisor: float = 1.0,
    out: Tensor | None = None,
    seed: int = 0,
    first: int = 0,
    on_host: bool = True,
) -> None:
    """Make one step of SGD as in torch.optim.SGD.

    ``momentum_buffer``: fp32 or bf16 [n], or signed Blocks, set to the gradient in the
    ``first_step``; None without momentum.
    """
    shared = _shared("sgd", master, grad, divisor, maximize, out, _key(seed, 0), first, on_host)
    if momentum_buffer is not None:
        _check_moment("sgd", "momentum_buffer", momentum_buffer, master, first, signed=True)
    elif momentum != 0:
        raise KernelError(
            f"sgd: momentum is {momentum} and there is no momentum_buffer; give one of "
            f"{master.numel()} fp32 zeros"
        )
    numbers = {
        "first_step": first_step,
        "nesterov": nesterov,
        "l2": weight_decay,
        "momentum": momentum,
        "dampening": dampening,
        "lr": lr,
    }
    core = core_for(master)
    if core is None:
        reference.sgd(master, grad, momentum_buffer, **numbers, **shared)  # type: ignore[arg-type]
    else:
        moment = _moment_addresses("momentum_buffer", momentum_buffer)
        core.sgd(**_addresses(master, grad, shared), **moment, **numbers)


def lamb_measure(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    divisor: float = 1.0,
    **settings: Any,
) -> tuple[float, float]:
    """Run the first pass of LAMB (You et al. 2019, arXiv:1904.00962): update the moments, fp32 [n];
    the weights stay. Return the sums of squares, in float64, of the weights and of the update::

        u = exp_avg / (sqrt(exp_avg_sq) + eps) + decay * master

    (``eps_inside``: exp_avg / sqrt(exp_avg_sq + eps)). Equal for any number of threads.

    Args:
        settings: beta1, beta2, eps, decay, eps_inside.
    """
    shared = _shared("lamb_measure", master, grad, divisor, False, None, 0, 0)
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        flat("lamb_measure", name, moment, FP32, master.numel())
    core = native.core()
    if core is None:
        return reference.lamb_measure(master, grad, exp_avg, exp_avg_sq, **settings, **shared)
    moments = {"mean": address(exp_avg), "square": address(exp_avg_sq)}
    weights, update = core.lamb_measure(**_addresses(master, grad, shared), **moments, **settings)
    return weights, update


def lamb_apply(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step_size: float,
    out: Tensor | None = None,
    **settings: Any,
) -> None:
    """Run the second pass: ``master -= step_size * u``, with ``settings`` and ``u`` as in
    :func:`lamb_measure`; ``step_size`` includes the trust ratio.
    """
    shared = _shared("lamb_apply", master, master, 1.0, False, out, 0, 0)
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        flat("lamb_apply", name, moment, FP32, master.numel())
    numbers = {**settings, "step_size": step_size}
    core = native.core()
    if core is None:
        reference.lamb_apply(master, exp_avg, exp_avg_sq, **numbers, **shared)
        return
    moments = {"mean": address(exp_avg), "square": address(exp_avg_sq)}
    core.lamb_apply(**_addresses(master, master, shared), **moments, **numbers)


def cast(out: Tensor, source: Tensor, scale: float = 1.0) -> None:
    """Compute ``out = source * scale``, between any two of fp32, bf16 and fp16; multiplied in fp32,
    rounded to nearest even.
    """
    flat("cast", "source", source, FLOATS)
    flat("cast", "out", out, FLOATS, source.numel())
    core = native.core()
    if core is None:
        reference.cast(out, source, scale)
    else:
        core.cast(address(out), kind(out), address(source), kind(source), source.numel(), scale)


def accumulate(out: Tensor, source: Tensor, scale: float = 1.0) -> None:
    """Compute ``out += source * scale``; ``out`` is fp32, ``source`` fp32, bf16 or fp16."""
    flat("accumulate", "source", source, FLOATS)
    flat("accumulate", "out", out, FP32, source.numel())
    core = native.core()
    if core is None:
        reference.accumulate(out, source, scale)
    else:
        core.accumulate(address(out), address(source), kind(source), source.numel(), scale)


def _check_step(op: str, step: object) -> None:
    if not isinstance(step, int) or step < 1:
        raise KernelError(f"{op}: step is {step!r}; steps are integers and count from 1")


def _shared(
    op: str,
    master: Tensor,
    grad: Tensor,
    divisor: float,
    negate: bool,
    out: Tensor | None,
    key: int,
    first: int,
    on_host: bool = True,
) -> dict[str, Any]:
    """Check what all updates take; return the settings that the native core and the references
    share. ``op``: the name of the update, for errors; ``negate``: the gradient is ascended.
    """
    device = "cpu" if on_host else master.device.type
    flat(op, "master", master, FP32, device=device)
    flat(op, "grad", grad, FLOATS, master.numel(), device)
    if out is not None:
        flat(op, "out", out, FLOATS, master.numel(), device)
    if first < 0:
        raise KernelError(
            f"{op}: first is {first}; give the index of element 0 in the whole, at least 0"
        )
    return {"divisor": divisor, "negate": negate, "out": out, "key": key, "first": first}


def _addresses(master: Tensor, grad: Tensor, shared: dict[str, Any]) -> dict[str, Any]:
    """Return ``shared`` with addresses in place of tensors, as the native core takes them."""
    out = shared["out"]
    places = {
        "master": address(master),
        "grad": address(grad),
        "grad_kind": kind(grad),
        "numel": master.numel(),
    }
    return {**shared, **places, "out": address(out), "out_kind": kind(out)}


def _check_moment(
    op: str, name: str, moment: Moment, master: Tensor, first: int, signed: bool
) -> None:
    """Raise KernelError for a moment that ``op`` of ``master`` cannot update."""
    device = master.device.type
    if isinstance(moment, Tensor):
        flat(op, name, moment, _MOMENTS, master.numel(), device)
        return
    flat(op, f"{name}.codes", moment.codes, (torch.uint8,), master.numel(), device)
    if moment.signed != signed:
        raise KernelError(
            f"{op}: {name} needs Blocks {'with' if signed else 'without'} a sign; make it with "
            f"Blocks.zeros(n, signed={signed})"
        )
    if first % BLOCK:
        raise KernelError(
            f"{op}: first is {first} and {name} is in Blocks; cut at multiples of {BLOCK}"
        )


def _moment_addresses(name: str, moment: Moment | None) -> dict[str, int]:
    """Return the arguments ``name`` of the native core for ``moment``; addresses are 0 for None."""
    if isinstance(moment, Blocks):
        return {
            name: address(moment.codes),
            f"{name}_kind": moment.kind,
            f"{name}_scales": address(moment.scales),
        }
    return {name: address(moment), f"{name}_kind": kind(moment), f"{name}_scales": 0}


def _key(seed: int, step: int) -> int:
    """Return the key of the random bits by which moments are rounded in step ``step``."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xD1342543DE82EF95) & _LOW64
