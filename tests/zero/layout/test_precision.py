"""The dtype that a parameter computes in, the fp16 loss scale event by event, and the point where
averages are multiplied in.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.zero.layout.precision import compute_dtype
from hf_zero.zero.reduce.losses import Fp16LossScaler, Scaling
from tests.helpers.cells import in_one_item
from tests.helpers.models import ARCHITECTURES

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
    assert compute_dtype("w", parameter(dtype, trains), precision, nn.Module()) == want


@in_one_item([(BRAIN, "bf16"), (HALF, "fp16")])
def test_training_16_bit_weights_without_masters_is_refused(row):
    dtype, key = row
    with pytest.raises(ConfigError, match=rf'up\.weight is {dtype}.*"{key}"'):
        compute_dtype("up.weight", parameter(dtype), "fp32", nn.Module())


def kept(**sets):
    model = nn.Module()
    for name, value in sets.items():
        setattr(model, name, value)
    return model


KEPT = [
    ("decoder.block.0.wo.weight", "fp16", WIDE),
    ("decoder.block.0.wo.weight", "bf16", BRAIN),
    ("wo", "fp16", WIDE),
    ("decoder.block.0.two.weight", "fp16", HALF),
    ("decoder.block.0.woXweight", "fp16", HALF),
    ("router.classifier.weight", "fp16", WIDE),
    ("router.classifier.weight", "bf16", WIDE),
    ("routerXclassifier.weight", "bf16", BRAIN),
]


@in_one_item(KEPT)
def test_modules_that_a_model_keeps_in_fp32(row):
    """The rules of transformers: the plain list counts in fp16 alone, the strict one in bf16, too.

    Only whole names match.
    """
    name, precision, want = row
    model = kept(_keep_in_fp32_modules=["wo"], _keep_in_fp32_modules_strict={"router.classifier"})
    assert compute_dtype(name, parameter(WIDE), precision, model) == want
    none = kept(_keep_in_fp32_modules=None, _keep_in_fp32_modules_strict=None)
    assert compute_dtype(name, parameter(WIDE), precision, none).itemsize == 2


def test_t5_keeps_wo():
    model = ARCHITECTURES["t5"].build()
    dtypes = {name: compute_dtype(name, p, "fp16", model) for name, p in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == WIDE} == {
        name for name in dtypes if ".wo." in name
    }
    assert WIDE in dtypes.values() and HALF in dtypes.values()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from("ggggo"), min_size=12, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1.0, 2.0**18, 2.0**21]),
)
def test_the_scale_is_that_of_deepspeeds_rule(events, window, hysteresis, consecutive, minimum):
    """Its rule as it is written there: by the number of the step, less that of the last overflow,
    less one. A scale below the minimum rises to it.
    """
    scaler = Fp16LossScaler(2.0**20, True, window, hysteresis, minimum, consecutive)
    scale, left, last = 2.0**20, hysteresis, -1
    for step, event in enumerate(events):
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


def test_a_static_scale_never_moves():
    scaler = Fp16LossScaler(128.0, window=1, hysteresis=1)
    for overflow in (True, False, True, False):
        scaler.update(overflow)
        assert scaler.scale == 128.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(0, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 4]),
)
def test_a_restored_scaler_goes_on_alike(events, cut, window, hysteresis, consecutive, minimum):
    def make():
        return Fp16LossScaler(256.0, True, window, hysteresis, minimum, consecutive)

    whole, first, second = make(), make(), make()
    for event in events[:cut]:
        whole.update(event)
        first.update(event)
    second.load_state_dict(first.state_dict())
    for event in events[cut:]:
        whole.update(event)
        second.update(event)
        assert second.scale == whole.scale >= minimum
    assert second.state_dict() == whole.state_dict()


def scaler_of(**config):
    return Fp16LossScaler.from_config(
        ZeroConfig.from_dict({"zero_optimization": {"stage": 1}, **config}).resolve(1)
    )


def test_the_scaler_of_a_config():
    assert scaler_of().scale == scaler_of(bf16={"enabled": True}).scale == 1.0
    assert not scaler_of().dynamic and not scaler_of(bf16={"enabled": True}).dynamic
    static = scaler_of(fp16={"enabled": True, "loss_scale": 512})
    assert static.scale == 512 and not static.dynamic
    options = {
        "loss_scale": 0,
        "initial_scale_power": 5,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "min_loss_scale": 16,
    }
    dynamic = scaler_of(fp16={"enabled": True, **options})
    assert dynamic.scale == 32 and dynamic.dynamic
    for overflow, want in ((True, 16), (True, 16), (False, 16), (False, 16), (False, 32)):
        dynamic.update(overflow)
        assert dynamic.scale == want
    patient = {**options, "hysteresis": 2, "consecutive_hysteresis": True}
    scaler = scaler_of(fp16={"enabled": True, **patient})
    for overflow, want in ((True, 32), (False, 32), (True, 32), (True, 16)):
        scaler.update(overflow)
        assert scaler.scale == want


WORLDS = st.sampled_from([1, 2, 3, 8, 1024])


@given(
    WORLDS,
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
    st.sampled_from([1.0, 2.0, 7.0]),
    st.floats(0.01, 8),
    st.booleans(),
)
def test_before_and_after_make_the_average_and_the_weight(
    world, precision, prescale, predivide, weight, wire
):
    scaling = Scaling.over(world, precision, prescale, predivide)
    assert scaling.before(weight, wire) * scaling.after(weight, wire) == pytest.approx(
        weight / world
    )


def test_where_the_average_is_multiplied_in():
    """After the reduction, over a chunk and with nothing small lost on the way; prescaling
    splits it.
    """
    rows = {
        ("fp32", False): (1.0, 0.125),
        ("bf16", False): (1.0, 0.125),
        ("fp16", False): (1.0, 0.125),
        ("fp32", True): (0.5, 0.25),
        ("fp16", True): (0.5, 0.25),
    }
    for (precision, prescale), (pre, post) in rows.items():
        scaling = Scaling.over(8, precision, prescale, 2.0)
        assert (scaling.pre, scaling.post) == (pre, post), (precision, prescale)


def test_the_weight_goes_on_a_wire_alone_that_could_overflow():
    unscaled, half = Scaling.over(8, "fp32", wire="fp16"), Scaling.over(8, "fp16")
    assert (unscaled.before(0.25, True), unscaled.after(0.25, True)) == (0.25 / 8, 1.0)
    assert (half.before(0.25, True), half.after(0.25, True)) == (1.0, 0.25 / 8)
    assert (half.before(0.25, False), half.after(0.25, False)) == (0.25, 1 / 8), (
        "an accumulator is wide: it takes the weight"
    )
