"""A kernel on the GPU beside its reference and beside torch there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hf_zero.ops import dispatch
from tests.helpers.errors_beside_torch import assert_no_worse_than_torch, gradients

# Relative in norm: a reference computes in fp32 with other functions, and rounds as the kernel
# does.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def compare(
    function: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``function`` and its gradients by the kernel and by the reference, alike; the kernel's no
    worse than torch's.
    """
    kernel = gradients(function, inputs)
    assert not dispatch.broken(), dispatch.broken()
    with monkeypatch.context() as context:
        context.setenv("HF_ZERO_TRITON", "0")
        reference = gradients(function, inputs)
    for number, (one, other) in enumerate(zip(kernel, reference)):
        distance = (
            (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30)
        ).item()
        assert distance <= LIMITS[inputs[0].dtype], (
            f"output {number}: {distance:.3g} between kernel and reference"
        )
    assert_no_worse_than_torch(function, torchs, inputs)
