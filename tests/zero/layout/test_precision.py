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
from tests.helpers.models import ARCHITECTURES

WIDE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64


def parameter(dtype, trains=True):
    return nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trains)


@pytest.mark.parametrize(
    "dtype, trains, precision, want",
    [
        (WIDE, True, "fp32", WIDE),
        (WIDE, True, "bf16", BRAIN),
        (WIDE, False, "bf16", BRAIN),
        (WIDE, True, "fp16", HALF),
        (BRAIN, True, "bf16", BRAIN),
        (BRAIN, True, "fp16", HALF),
        (HALF, False, "bf16", BRAIN),
        (BRAIN, False, "fp32", BRAIN),
        (HALF, False, "fp32", HALF),
        (DOUBLE, True, "fp32", DOUBLE),
        (DOUBLE, True, "bf16", BRAIN),
        (DOUBLE, False, "bf16", DOUBLE),
        (torch.int8, False, "fp32", torch.int8),
        (torch.uint8, False, "bf16", torch.uint8),
    ],
    ids=str,
)
def test_compute_dtype(dtype, trains, precision, want):
    assert compute_dtype("w", parameter(dtype, trains), precision, nn.Module()) == want


@pytest.mark.parametrize("dtype, key", [(BRAIN, "bf16"), (HALF, "fp16")])
def test_training_16_bit_weights_without_masters_is_refused(dtype, key):
    with pytest.raises(
        ConfigError,
        match=rf'parameter up\.weight is {dtype}.*"{key}": {{"enabled": '
        rf"true}}.*dtype=torch\.float32",
    ):
        compute_dtype("up.weight", parameter(dtype), "fp32", nn.Module())


def kept(**sets):
    model = nn.Module()
    for name, value in sets.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    "name, precision, want",
    [
        ("decoder.block.0.wo.weight", "fp16", WIDE),
        ("decoder.block.0.wo.weight", "bf16", BRAIN),
        ("wo", "fp16", WIDE),
        ("decoder.block.0.two.weight", "fp16", HALF),
        ("decoder.block.0.wo2.weight", "fp16", HALF),
        ("decoder.block.0.woXweight", "fp16", HALF),
        ("router.classifier.weight", "fp16", WIDE),
        ("router.classifier.weight", "bf16", WIDE),
        ("routerXclassifier.weight", "bf16", BRAIN),
    ],
)
def test_modules_that_a_model_keeps_in_fp32(name, precision, want):
    """The rules of transformers: the plain list counts in fp16 alone, the strict one in bf16, too.

    Only whole names match.
    """
    model = kept(_keep_in_fp32_modules=["wo"], _keep_in_fp32_modules_strict={"router.classifier"})
    assert compute_dtype(name, parameter(WIDE), precision, model) == want


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_that_keeps_nothing(precision):
    model = kept(_keep_in_fp32_modules=None, _keep_in_fp32_modules_strict=None)
    assert compute_dtype("wo.weight", parameter(WIDE), precision, model).itemsize == 2


def test_t5_keeps_wo():
    model = ARCHITECTURES["t5"].build()
    dtypes = {name: compute_dtype(name, p, "fp16", model) for name, p in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == WIDE} == {
        name for name in dtypes if ".wo." in name
    }
    assert WIDE in dtypes.values() and HALF in dtypes.values()


# A table of events (g: a good step, o: an overflow) and the scale after each, worked out by hand
# from 16.
SCALES = [
    ("halves at once without hysteresis", "ooo", {"hysteresis": 1}, [8, 4, 2]),
    ("not below the minimum", "oooo", {"hysteresis": 1, "minimum": 4.0}, [8, 4, 4, 4]),
    ("a scale below the minimum rises to it", "o", {"hysteresis": 1, "minimum": 32.0}, [32]),
    ("doubles after a window", "ggggg", {"window": 2}, [16, 16, 32, 32, 64]),
    ("a window of one", "ggo", {"window": 1, "hysteresis": 1}, [16, 32, 16]),
    (
        "an overflow starts the window anew",
        "ggogggg",
        {"window": 3, "hysteresis": 1},
        [16, 16, 8, 8, 8, 8, 16],
    ),
    (
        "a forgiven overflow does, too",
        "ggogggg",
        {"window": 3, "hysteresis": 2},
        [16, 16, 16, 16, 16, 16, 32],
    ),
    ("hysteresis forgives the first", "ooo", {"hysteresis": 2}, [16, 8, 4]),
    ("hysteresis of three", "oooo", {"hysteresis": 3}, [16, 16, 8, 4]),
    ("good steps alone do not refill it", "ogogo", {"hysteresis": 2}, [16, 16, 8, 8, 4]),
    ("a growth refills it", "ogggoo", {"hysteresis": 2, "window": 2}, [16, 16, 16, 32, 32, 16]),
    (
        "consecutive: any good step refills it",
        "ogogoo",
        {"hysteresis": 2, "consecutive": True},
        [16, 16, 16, 16, 16, 8],
    ),
    (
        "consecutive: overflows in a row",
        "ooogo",
        {"hysteresis": 3, "consecutive": True},
        [16, 16, 8, 8, 8],
    ),
]


@pytest.mark.parametrize(
    "events, options, want", [row[1:] for row in SCALES], ids=[row[0] for row in SCALES]
)
def test_the_scale_event_by_event(events, options, want):
    scaler = Fp16LossScaler(16.0, dynamic=True, **options)
    seen = []
    for event in events:
        scaler.update(event == "o")
        seen.append(scaler.scale)
    assert seen == want


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("ggggo"), min_size=12, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_scale_is_that_of_deepspeeds_rule(events, window, hysteresis, consecutive):
    """Its rule as it is written there: by the number of the step, less that of the last overflow,
    less one.
    """
    scaler = Fp16LossScaler(2.0**20, True, window, hysteresis, 1.0, consecutive)
    scale, left, last = 2.0**20, hysteresis, -1
    for step, event in enumerate(events):
        if event == "o":
            scale, left = (max(scale / 2, 1.0), left) if left == 1 else (scale, left - 1)
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
