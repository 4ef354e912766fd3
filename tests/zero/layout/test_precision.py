"""The dtype that a parameter computes in, the fp16 loss scale event by event, the point where
averages are multiplied in, and sums of squares on a device without a kernel for them.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.precision import compute_dtype, kept_in_fp32
from hf_zero.zero.reduce.losses import AveragingFactors, Fp16LossScaler
from hf_zero.zero.reduce.norm import RUN, _sums_over_runs
from tests.helpers.cells import in_one_item

WIDE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64


def parameter(dtype, trains=True):
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trains)


DTYPES = [
    (WIDE, True, "fp32", WIDE), (WIDE, True, "bf16", BRAIN), (WIDE, False, "bf16", BRAIN),
    (WIDE, True, "fp16", HALF), (BRAIN, True, "bf16", BRAIN), (BRAIN, True, "fp16", HALF),
    (HALF, False, "bf16", BRAIN), (BRAIN, False, "fp32", BRAIN), (HALF, False, "fp32", HALF),
    (DOUBLE, True, "fp32", DOUBLE), (DOUBLE, True, "bf16", BRAIN), (DOUBLE, False, "bf16", DOUBLE),
    (torch.int8, False, "fp32", torch.int8), (torch.uint8, False, "bf16", torch.uint8),
]  # fmt: skip


@in_one_item(DTYPES)
def test_compute_dtype(row):
    dtype, trains, precision, want = row
    assert compute_dtype("w", parameter(dtype, trains), precision, ()) == want


@in_one_item([(BRAIN, "bf16"), (HALF, "fp16")])
def test_training_16_bit_weights_without_masters_is_refused(row):
    dtype, key = row
    with pytest.raises(ConfigError, match=rf'up\.weight is {dtype}.*"{key}"'):
        compute_dtype("up.weight", parameter(dtype), "fp32", ())


def with_weight(name, **declared):
    """Return a model with a parameter of that name."""
    model = inner = nn.Module()
    *path, last = name.split(".")
    for part in path:
        inner.add_module(part, nn.Module())
        inner = inner.get_submodule(part)
    inner.register_parameter(last, parameter(WIDE))
    for attribute, value in declared.items():
        setattr(model, attribute, value)
    return model


KEPT = [
    ("decoder.block.0.wo.weight", "fp16", WIDE),
    ("decoder.block.0.wo.weight", "bf16", BRAIN),
    ("decoder.block.0.two.weight", "fp16", HALF),
    ("decoder.block.0.woXweight", "fp16", HALF),
    ("router.classifier.weight", "bf16", WIDE),
    ("routerXclassifier.weight", "bf16", BRAIN),
]


@in_one_item(KEPT)
def test_modules_that_a_model_keeps_in_fp32(row):
    """As transformers: the plain list counts in fp16, the strict one in bf16, too; whole names."""
    name, precision, want = row
    declared = {
        "_keep_in_fp32_modules": ["wo"],
        "_keep_in_fp32_modules_strict": {"router.classifier"},
    }
    kept = kept_in_fp32(with_weight(name, **declared), precision, ())
    assert compute_dtype(name, parameter(WIDE), precision, kept) == want
    assert not kept_in_fp32(with_weight(name, **dict.fromkeys(declared)), precision, ())


@in_one_item(["words", "head"])
def test_every_name_of_a_tied_parameter_counts(named):
    model = nn.ModuleDict({each: nn.Linear(2, 2, bias=False) for each in ("words", "head")})
    model["head"].weight = model["words"].weight
    assert kept_in_fp32(model, "bf16", [named]) == {"words.weight", "head.weight"}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from("ggggo"), min_size=12, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1.0, 2.0**18, 2.0**21]),
    st.integers(0, 40),
)
def test_the_scale_is_that_of_deepspeeds_rule(
    events, window, hysteresis, consecutive, minimum, restored
):
    """By the number of the step, less that of the last overflow, less one; also restored."""

    def make():
        return Fp16LossScaler(2.0**20, True, window, hysteresis, minimum, consecutive)

    scaler = make()
    scale, left, last = 2.0**20, hysteresis, -1
    for step, event in enumerate(events):
        if step == restored:
            state, scaler = scaler.state_dict(), make()
            scaler.load_state_dict(state)
        if event == "o":
            scale, left = (max(scale / 2, minimum), left) if left == 1 else (scale, left - 1)
            last = step
        else:
            left = hysteresis if consecutive else left
            stable = step - last - 1
            if stable > 0 and stable % window == 0:
                scale, left = 2 * scale, hysteresis
        scaler.update(event == "o")
        assert scaler.scale == scale, step


def test_where_the_average_and_the_weight_of_a_loss_are_multiplied_in():
    """After the reduction, over a chunk; the weight goes on a wire alone that could overflow."""
    for world, precision, prescale, weight, wire in itertools.product(
        (1, 3, 8), ("fp32", "bf16", "fp16"), (False, True), (0.25, 7.0), (False, True)
    ):
        scaling = AveragingFactors.over(world, precision, prescale, 2.0)
        both = scaling.before(weight, wire) * scaling.after(weight, wire)
        assert both == pytest.approx(weight / world)
    for precision, prescale in itertools.product(("fp32", "bf16", "fp16"), (False, True)):
        scaling = AveragingFactors.over(8, precision, prescale, 2.0)
        assert (scaling.pre, scaling.post) == ((0.5, 0.25) if prescale else (1.0, 0.125))
    unscaled, half = AveragingFactors.over(8, "fp32", wire="fp16"), AveragingFactors.over(8, "fp16")
    assert (unscaled.before(0.25, True), unscaled.after(0.25, True)) == (0.25 / 8, 1.0)
    assert (half.before(0.25, True), half.after(0.25, True)) == (1.0, 0.25 / 8)
    assert (half.before(0.25, False), half.after(0.25, False)) == (0.25, 1 / 8), (
        "an accumulator is wide: it takes the weight"
    )


SIZES = (0, 1, 5, RUN - 1, RUN, RUN + 1, 3 * RUN, 7 * RUN + 11)


def one_by_one(grad: torch.Tensor) -> torch.Tensor:
    """The squares of norms over runs, each cast to fp64."""
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(run, dtype=wide).double() for run in grad.split(RUN)]
    return torch.stack(norms).square().sum() if grad.numel() else torch.zeros(()).double()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_a_sum_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    together, want = _sums_over_runs(grads), [one_by_one(grad) for grad in grads]
    assert torch.equal(torch.stack(together), torch.stack(want))
    for grad, found in zip(grads, together):
        assert torch.equal(_sums_over_runs([grad])[0], found)
    grads[3][2] = float("inf")
    assert torch.stack(_sums_over_runs(grads)).isfinite().tolist() == [n != 3 for n in range(8)]
