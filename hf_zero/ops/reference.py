"""The slow reference of every host kernel, in plain torch. It runs if there is no native core.

Each line is one rounding, in the order of torch.optim's single-tensor implementations, and the
native kernels round at the same places: element-wise results are bitwise equal. The formats are
explained in kernels/cpu/rounding.h.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hf_zero.ops import dynamic_map
from hf_zero.ops.updates import signs

BLOCK = 256
_SMALLEST_SCALE = 2.0**-90
ZERO_CODE = 127  # of the dynamic map with a sign
_LOW32, _LOW64 = (1 << 32) - 1, (1 << 64) - 1


class Encoded(Protocol):
    """Moments in 8 bits; see :class:`hf_zero.ops.moment_blocks.Blocks`."""

    codes: Tensor
    scales: Tensor
    signed: bool
    dynamic: bool


Moment = Tensor | Encoded


def adam(
    master: Tensor,
    grad: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    max_exp_avg_sq: Tensor | None,
    *,
    keep: float,
    l2: float,
    beta1: float,
    beta2: float,
    root_scale: float,
    eps: float,
    step_size: float,
    **shared: Any,
) -> None:
    """Make one step of Adam. ``keep`` multiplies the master first (decoupled decay); ``root_scale``
    is 1 / sqrt(1 - beta2^step).
    """
    g = _gradient(grad, shared)
    mean, square = _read(exp_avg), _read(exp_avg_sq)
    weight = master * keep
    if l2 != 0:
        g = g + weight * l2
    mean = mean + (g - mean) * (1 - beta1) if _fp32(1 - beta1) < 0.5 else g - (g - mean) * beta1
    square = square * beta2 + (g * (1 - beta2)) * g
    largest = square
    if max_exp_avg_sq is not None:
        largest = torch.maximum(max_exp_avg_sq, square)
        max_exp_avg_sq.copy_(largest)
    bound = _sqrt(largest) * root_scale + eps
    master.copy_(weight + (mean * -step_size) / bound)
    _keep(exp_avg, mean, shared, upper=False)
    _keep(exp_avg_sq, square, shared, upper=True)
    _write(master, shared)


def lion(
    master: Tensor,
    grad: Tensor,
    exp_avg: Moment,
    *,
    keep: float,
    beta1: float,
    beta2: float,
    lr: float,
    **shared: Any,
) -> None:
    g, mean = _gradient(grad, shared), _read(exp_avg)
    direction = signs(mean * beta1 + g * (1 - beta1))
    master.copy_(master * keep + direction * -lr)
    _keep(exp_avg, mean * beta2 + g * (1 - beta2), shared, upper=False)
    _write(master, shared)


def adagrad(
    master: Tensor,
    grad: Tensor,
    total: Tensor,
    *,
    l2: float,
    eps: float,
    step_size: float,
    **shared: Any,
) -> None:
    g = _gradient(grad, shared)
    if l2 != 0:
        g = g + master * l2
    total.add_(g * g)
    master.add_((g * -step_size) / (_sqrt(total) + eps))
    _write(master, shared)


def sgd(
    master: Tensor,
    grad: Tensor,
    momentum_buffer: Moment | None,
    *,
    first_step: bool,
    nesterov: bool,
    l2: float,
    momentum: float,
    dampening: float,
    lr: float,
    **shared: object,
) -> None:
    g = _gradient(grad, shared)
    if l2 != 0:
        g = g + master * l2
    if momentum_buffer is not None:
        moving = g if first_step else _read(momentum_buffer) * momentum + g * (1 - dampening)
        _keep(momentum_buffer, moving, shared, upper=False)
        g = g + moving * momentum if nesterov else moving
    master.add_(g * -lr)
    _write(master, shared)


def lamb_measure(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    beta1: float,
    beta2: float,
    **settings: object,
) -> tuple[float, float]:
    g = _gradient(grad, settings)
    exp_avg.copy_(exp_avg * beta1 + g * (1 - beta1))
    exp_avg_sq.copy_(exp_avg_sq * beta2 + (g * (1 - beta2)) * g)
    update = _lamb_update(master, exp_avg, exp_avg_sq, settings)
    return squared_norm(master), squared_norm(update)


def squared_norm(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def lamb_apply(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step_size: float, **settings: Any
) -> None:
    master.add_(_lamb_update(master, exp_avg, exp_avg_sq, settings) * -step_size)
    _write(master, settings)


def _lamb_update(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, settings: dict[str, Any]
) -> Tensor:
    eps = settings["eps"]
    below = _sqrt(exp_avg_sq + eps) if settings["eps_inside"] else _sqrt(exp_avg_sq) + eps
    return exp_avg / below + master * settings["decay"]


def _sqrt(x: Tensor) -> Tensor:
    """Return the root, rounded once: torch's fp32 root may be off by one place."""
    return x.double().sqrt().float()


def _fp32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _gradient(grad: Tensor, shared: dict[str, Any]) -> Tensor:
    g = grad.float() / shared["divisor"] if shared["divisor"] != 1 else grad.float()
    return -g if shared["negate"] else g


def _write(master: Tensor, shared: dict[str, Any]) -> None:
    if shared["out"] is not None:
        shared["out"].copy_(master)


def _read(moment: Moment) -> Tensor:
    if isinstance(moment, Tensor):
        return moment.float()
    return decode(moment.codes, moment.scales, moment.signed, moment.dynamic)


def _keep(moment: Moment, values: Tensor, shared: dict[str, Any], upper: bool) -> None:
    if isinstance(moment, Tensor) and moment.dtype == torch.float32:
        moment.copy_(values)
        return
    if not isinstance(moment, Tensor) and moment.dynamic:
        codes, scales = encode_dynamic(values, moment.signed)
        moment.codes.copy_(codes)
        moment.scales.copy_(scales)
        return
    random = random_bits(shared["key"], shared["first"], values.numel())
    random = random >> 16 if upper else random & 0xFFFF
    if isinstance(moment, Tensor):
        moment.copy_(to_bf16(values, random))
    else:
        codes, scales = encode(values, moment.signed, random)
        moment.codes.copy_(codes)
        moment.scales.copy_(scales)


def random_bits(key: int, first: int, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 32 random bits (int64 [numel]) for the elements from ``first`` on: a hash of ``key``
    and the index of each.
    """
    upper = first >> 32
    run = min(numel, ((upper + 1) << 32) - first)  # elements with the same words of the key
    a, b = key_words(key, upper)
    low = first & _LOW32
    x = torch.arange(low, low + run, dtype=torch.int64, device=device) ^ a
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW32
    x = ((x ^ (x >> 13) ^ b) * 0xC2B2AE35) & _LOW32
    x = x ^ (x >> 16)
    if run == numel:
        return x
    return torch.cat([x, random_bits(key, first + run, numel - run, device)])


def key_words(key: int, upper: int) -> tuple[int, int]:
    """Return two words of 32 bits from ``key`` and the ``upper`` 32 bits of an index."""
    x = (key + upper * 0x9E3779B97F4A7C15) & _LOW64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW64
    x ^= x >> 31
    return x & _LOW32, x >> 32


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & _LOW32


def _floats(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Round up with a probability proportional to the cut-off bits; ``random`` is below 2^16."""
    rounded = _floats((_bits(x) + random) & 0xFFFF0000)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def encode(source: Tensor, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [n], scales fp32 [blocks]) of ``source``: the nearest codes, or rounded
    stochastically by ``random``.
    """
    numel = source.numel()
    top = 127 if signed else 255
    smallest = 1.25 * 2.0 ** (-16 if signed else -32)
    scales, live = _scales(source)
    element_scales = scales.repeat_interleave(BLOCK)[:numel]
    part = source.abs() / element_scales
    code = ((_bits(part) + (0x80000 if random is None else random << 4)) >> 20) - (
        (0x3F800000 >> 20) - top
    )
    if not signed:
        low = part > 0
    elif random is None:
        low = part * 2 >= smallest
    else:
        low = part * (65536 / smallest) > random.float()
    code = torch.where(part < smallest, low.to(code.dtype), code)
    if signed:
        code = torch.where(code > 0, code | ((_bits(source) >> 24) & 0x80), code)
    code = torch.where(live.repeat_interleave(BLOCK)[:numel], code, torch.zeros_like(code))
    return code.to(torch.uint8), scales


def _scales(source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each block, and whether it is neither 0 nor NaN."""
    blocks = -(-source.numel() // BLOCK)
    padded = torch.nn.functional.pad(source, (0, blocks * BLOCK - source.numel()))
    padded = padded.view(blocks, BLOCK)
    scales = padded.abs().amax(1) if blocks else source.new_zeros(0)
    finite = padded.isfinite().all(1)
    live = finite & (scales >= _SMALLEST_SCALE)
    return torch.where(live, scales, torch.where(finite, 0.0, float("nan"))), live


def encode_dynamic(
    source: Tensor, signed: bool, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [n], scales fp32 [blocks]) by the dynamic map; ``scales``: those to take,
    instead of each block's largest magnitude.
    """
    zero = ZERO_CODE if signed else 0
    scales, live = _scales(source) if scales is None else (scales, scales > 0)
    element_scales = scales.repeat_interleave(BLOCK)[: source.numel()]
    _, edges, slopes, shifts, tops = dynamic_map.on_device(signed, source.device)
    part = source.abs() * element_scales.reciprocal()
    region = torch.bucketize(part, edges)
    code = torch.minimum(part * slopes[region] + shifts[region], tops[region]).nan_to_num(0.0)
    code = code.to(torch.int64)
    if signed:
        below = ZERO_CODE - code.clamp(max=ZERO_CODE)
        code = torch.where(source < 0, below, code + ZERO_CODE)
    code = torch.where(live.repeat_interleave(BLOCK)[: source.numel()], code, zero)
    return code.to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool, dynamic: bool = False) -> Tensor:
    """Return the values, fp32 [n]."""
    if dynamic:
        value = dynamic_map.on_device(signed, codes.device)[0][codes.long()]
        return value * scales.repeat_interleave(BLOCK)[: codes.numel()]
    code = codes.to(torch.int64)
    magnitude = code & 0x7F if signed else code
    value = _floats((magnitude + ((0x3F800000 >> 20) - (127 if signed else 255))) << 20)
    value = torch.where(magnitude == 0, torch.zeros_like(value), value)
    if signed:
        value = torch.where(code >= 0x80, -value, value)
    return value * scales.repeat_interleave(BLOCK)[: codes.numel()]


def cast(out: Tensor, source: Tensor, scale: float) -> None:
    out.copy_(source.float() * scale)


def accumulate(out: Tensor, source: Tensor, scale: float) -> None:
    out.add_(source.float() * scale)
