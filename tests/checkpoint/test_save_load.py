"""Save under (N, stage), load under (M, stage): every element of weights and moments comes back bit
for bit, and what is loaded is what was asked for; and tensors as models have them: buffers of every
dtype and stride, NaN, shapes without elements.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import random_generators
from hf_zero.checkpoint.random_generators import rng_states, set_rng_state
from hf_zero.checkpoint.tensorfile import CODES
from tests.checkpoint.jobs import (
    TWO,
    Engine,
    Failed,
    Job,
    errors,
    other,
    run,
    saved,
    small,
    state_of,
    train_some,
)
from tests.helpers.processes import forkserver


def loaded(job: Job, folder: Path, before=lambda engine: None, **options):
    def action(engine: Engine):
        before(engine)
        return checkpoint.load(engine, folder, **options)

    return run(job, other, action)


def assert_equal(left: list[Engine], right: list[Engine]) -> None:
    a, b = state_of(left), state_of(right)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys(), name
        for kind in a[name]:
            assert torch.equal(a[name][kind], b[name][kind]), (name, kind)
            assert not a[name][kind].isnan().any(), (name, kind)


def biases_first(name: str) -> bool:
    """The same two optimizer groups, the other one first."""
    return "bias" in name


def biases_last(name: str) -> bool:
    return "bias" not in name


jobs = st.builds(
    Job,
    world=st.integers(1, 5),
    stage=st.integers(0, 3),
    units=st.lists(st.sampled_from(["embed", "first", "norm", "second"]), unique=True).map(tuple),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    decays=st.sampled_from([biases_first, biases_last]),
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=jobs, wanted=jobs, number=st.integers(0, 1 << 40))
def test_any_ranks_stage_units_precision_and_order_of_groups(tmp_path, before, wanted, number):
    """Master weights and moments come back bit for bit."""
    turn = -1 if before.decays is not wanted.decays else 1
    before = saved(tmp_path / str(number), before, steps=2)
    after, _ = loaded(wanted, tmp_path / str(number))
    assert_equal(before, after)
    there, here = before[0].bound, after[0].bound
    assert here.state.scalars.of_groups()[::turn] == there.state.scalars.of_groups()
    assert here.settings.hyperparameters()[::turn] == there.settings.hyperparameters()
    assert after[0].counters == before[0].counters


def test_replicas_write_each_element_once(tmp_path):
    before = saved(tmp_path, Job(4, 3, copies=2, units=("first",)))
    sizes = [
        sum(each.nbytes for name, each in load_file(path).items() if not name.startswith("rng::"))
        for path in sorted((tmp_path / "global_step1").glob("rank-*"))
    ]
    # ranks 2 and 3 repeat what 0 and 1 hold
    assert sizes[2] < sizes[0] / 1.1 and sizes[3] < sizes[0] / 1.1
    assert_equal(before, loaded(Job(3, 1), tmp_path)[0])


STATE = {
    "epoch": 3,
    "best": float("inf"),
    "seen": (1, 2),
    "means": torch.arange(3.0),
    "nested": {"a": [1, None, "x"]},
}


def test_parts_of_a_checkpoint(tmp_path):
    """Weights alone, all but the optimizer's state, buffers, client state of both kinds."""
    before = state_of(saved(tmp_path, steps=2, client_state=STATE))
    for options, steps in (({"load_module_only": True}, 0), ({"load_optimizer_states": False}, 2)):
        engines, results = loaded(Job(2, 3), tmp_path, **options)
        found = state_of(engines)["second.weight"]["weights"]
        assert torch.equal(found, before["second.weight"]["weights"])
        assert not engines[0].bound.optimizer.state
        assert engines[0].counters.global_steps == steps
        assert torch.equal(engines[0].module.norm.running_mean, small().norm.running_mean)
        for _, client in results:
            assert client.keys() == STATE.keys()
            assert torch.equal(client.pop("means"), STATE["means"])
            assert client == {key: value for key, value in STATE.items() if key != "means"}
    assert "rope" not in (tmp_path / "global_step2" / "manifest.json").read_text()


Schedule = Callable[[torch.optim.Optimizer], Any]


def scheduled(
    folder: Path, schedule: Schedule, wanted: Job, fresh: Schedule, **options: Any
) -> list[list[dict[str, Any]]]:
    """The settings of the groups after a load into ``wanted``, and after one step more."""

    def save(engine: Engine) -> None:
        engine.lr_scheduler = schedule(engine.optimizer)
        train_some(engine, 3)
        checkpoint.save(engine, folder)

    def load(engine: Engine) -> list[list[dict[str, Any]]]:
        engine.lr_scheduler = fresh(engine.optimizer)
        checkpoint.load(engine, folder, **options)
        settings = [copied(engine.optimizer)]
        assert [group["lr"] for group in settings[0]] == engine.lr_scheduler.get_last_lr()
        train_some(engine, 1)
        return [*settings, copied(engine.optimizer)]

    def copied(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    run(Job(1, 3), small, save)
    return run(wanted, other, load)[1][0]


def of_two_rates(optimizer: torch.optim.Optimizer) -> Any:
    """The rate of biases is a tenth of that of the other parameters, whatever their groups."""
    for group in optimizer.param_groups:
        group["lr"] = 0.1 if group["weight_decay"] else 0.01
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def one_cycle(rate: float, first: float = 0.9) -> Schedule:
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=20, max_momentum=first, base_momentum=first / 2
    )


def test_a_schedule_without_the_optimizer_continues(tmp_path: Path) -> None:
    """Its rates are in the groups, in whatever order these are, and go on from there."""
    reverse = Job(1, 3, decays=biases_first)
    only = {"load_optimizer_states": False}
    found = scheduled(tmp_path / "a", of_two_rates, reverse, of_two_rates, **only)
    assert [[group["lr"] for group in groups] for groups in found] == [
        pytest.approx([0.00125, 0.0125]),
        pytest.approx([0.000625, 0.00625]),
    ]
    whole = scheduled(tmp_path / "b", one_cycle(0.1), TWO, one_cycle(0.001, 0.5))
    alone = scheduled(tmp_path / "c", one_cycle(0.1), TWO, one_cycle(0.001, 0.5), **only)
    assert alone == whole


@pytest.mark.parametrize("nested", [False, True])
def test_a_schedule_that_starts_anew_keeps_its_settings(tmp_path: Path, nested: bool) -> None:
    def fresh(optimizer: torch.optim.Optimizer) -> Any:
        schedule = one_cycle(0.001, 0.5)(optimizer)
        return torch.optim.lr_scheduler.ChainedScheduler([schedule]) if nested else schedule

    alone = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], betas=(0.9, 0.9))
    want, schedule = [], one_cycle(0.001, 0.5)(alone)
    for _ in range(2):
        group = alone.param_groups[0]
        want.append((group["lr"], group["betas"][0], group["max_lr"], group["min_lr"]))
        alone.step()
        schedule.step()
    options = {"load_lr_scheduler_states": False}
    found = scheduled(tmp_path, one_cycle(0.1), TWO, fresh, **options)
    for groups, (rate, momentum, upper, lower) in zip(found, want, strict=True):
        for group in groups:
            assert (group["lr"], group["betas"]) == (rate, (momentum, 0.999))
            assert (group["max_lr"], group["min_lr"]) == (upper, lower)


def test_a_schedule_of_other_groups_is_refused(tmp_path: Path) -> None:
    one = Job(1, 3, optimizer=lambda groups: torch.optim.AdamW(groups[0]["params"], lr=1e-3))
    only = {"load_optimizer_states": False}
    with pytest.raises(Failed, match="schedule of 2 optimizer groups, this engine") as refused:
        scheduled(tmp_path, of_two_rates, one, of_two_rates, **only)
    assert "load_lr_scheduler_states=False" in str(refused.value)
    restarted = scheduled(
        tmp_path, of_two_rates, one, of_two_rates, load_lr_scheduler_states=False, **only
    )
    assert restarted[0][0]["lr"] == 0.1


def test_a_schedule_of_momentum_alone_continues_where_the_optimizer_has_it(tmp_path: Path) -> None:
    """A checkpoint of AdamW holds betas, which groups of SGD do not get."""
    momentum = Job(1, 3, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    only = {"load_optimizer_states": False}
    with pytest.raises(Failed, match="cycles 'betas', which groups of this engine's SGD") as error:
        scheduled(tmp_path / "a", one_cycle(0.1), momentum, one_cycle(0.1), **only)
    assert "load_lr_scheduler_states=False" in str(error.value)

    def rates_only(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=20, cycle_momentum=False
        )

    found = scheduled(tmp_path / "b", rates_only, momentum, rates_only, **only)
    for group in itertools.chain(*found):
        assert "betas" not in group
        assert group["momentum"] == 0.9
    own = {"load_lr_scheduler_states": False}
    scheduled(tmp_path / "c", one_cycle(0.1), momentum, one_cycle(0.1), **only, **own)


def test_an_engine_without_optimizer(tmp_path):
    before = state_of(saved(tmp_path))
    bare = Job(3, 3, optimizer=None)
    for name, kinds in state_of(loaded(bare, tmp_path)[0]).items():
        assert torch.equal(kinds["weights"], before[name]["weights"])
    run(bare, small, lambda engine: checkpoint.save(engine, tmp_path, tag="bare"))
    again, _ = loaded(Job(2, 3), tmp_path, tag="bare", load_optimizer_states=False)
    assert torch.equal(state_of(again)["first.bias"]["weights"], small().first.bias.detach())


def test_random_generators_come_back_on_request(tmp_path, heard):
    """On as many ranks; on others they are said to be lost."""
    torch.manual_seed(1)
    run(Job(1, 3), small, lambda engine: checkpoint.save(engine, tmp_path))
    expected = torch.rand(3)
    torch.manual_seed(2)
    loaded(Job(1, 3), tmp_path)
    assert not torch.equal(torch.rand(3), expected)
    loaded(Job(1, 3), tmp_path, load_rng=True)
    assert torch.equal(torch.rand(3), expected)
    assert not heard
    loaded(Job(2, 3), tmp_path, lambda engine: torch.manual_seed(5), load_rng=True)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())
    assert "random generators are not restored on 2 ranks" in heard[0]


def test_a_generator_of_numpy_that_was_replaced_is_left_out(tmp_path, heard, monkeypatch):
    """Saves and loads go on, with one warning in the process concerned."""
    monkeypatch.setenv("RANK", "1")
    before = np.random.get_bit_generator()
    random_generators._warn_of_generator.cache_clear()
    saved(tmp_path / "default", Job(1, 3))
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saved(tmp_path / "other", Job(1, 3))
            expected = np.random.rand()
            for name in ("default", "other"):
                np.random.set_bit_generator(np.random.PCG64(5))
                loaded(Job(1, 3), tmp_path / name, load_rng=True)
                assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(before)
    (told,) = (line for line in heard if "generator was replaced" in line)
    assert "PCG64" in told
    former = json.dumps({"bit_generator": "PCG64", "state": {}}).encode()
    state = np.random.get_state()[1].tolist()
    set_rng_state("numpy", torch.frombuffer(bytearray(former), dtype=torch.uint8))
    assert np.random.get_state()[1].tolist() == state


class Slow:
    """Garbage in a cycle, whose collection lets the other thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.002)


def look() -> None:
    for _ in range(200):
        Slow()
        rng_states()
        rng_states()


def look_twice() -> None:
    gc.freeze()  # else each collection looks at all that the process has imported
    gc.set_threshold(2)
    with ThreadPoolExecutor(2) as threads:
        looks = [threads.submit(look) for _ in range(2)]
    os._exit(any(each.exception() is not None for each in looks))


def test_garbage_that_is_collected_while_two_threads_read_the_generator():
    process = forkserver().Process(target=look_twice)
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended is not None, "the threads wait for each other"
    assert ended == 0, "a thread raised"


EVERY = sorted(CODES, key=str)
Make = Callable[[], torch.nn.Module]


def odd(dtype: torch.dtype, values: bool) -> torch.Tensor:
    """[2, 3] of ``dtype``: bytes that count upwards, or zeros."""
    count = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        count = count % 2
    return (count if values else torch.zeros_like(count)).view(dtype).reshape(2, 3)


def with_buffers(make: Make, **buffers: torch.Tensor) -> Make:
    def build() -> torch.nn.Module:
        module = make()
        for name, buffer in buffers.items():
            plain = buffer.is_contiguous() and not buffer.is_conj()
            module.register_buffer(name, buffer.clone() if plain else buffer)
        return module

    return build


def put(folder: Path, make: Make) -> None:
    run(TWO, make, lambda engine: checkpoint.save(engine, folder))


def got(folder: Path, make: Make) -> torch.nn.Module:
    """The module of the second rank."""
    engines, _ = run(TWO, make, lambda engine: checkpoint.load(engine, folder, verify=True))
    return engines[1].module


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def of_every_dtype(values: bool) -> dict[str, torch.Tensor]:
    named = {str(dtype).replace("torch.", "of_"): odd(dtype, values) for dtype in EVERY}
    scalars = {f"{name}_scalar": value[1, 2] for name, value in named.items()}
    return named | scalars | {"none": torch.empty(0, 3)}


def test_buffers_of_every_dtype(tmp_path: Path) -> None:
    wanted = of_every_dtype(True)
    put(tmp_path, with_buffers(small, **wanted))
    module = got(tmp_path, with_buffers(other, **of_every_dtype(False)))
    for name, value in wanted.items():
        found = module.get_buffer(name)
        assert bits(found) == bits(value) and found.shape == value.shape, name
    for dtype in (torch.complex128, torch.float8_e8m0fnu):
        make = with_buffers(small, phase=torch.ones(3, dtype=dtype))
        saving = lambda engine: checkpoint.save(engine, tmp_path, tag="b")  # noqa: E731
        for text in errors(run, TWO, make, saving):
            assert f"rank 0: 'buffer::phase' is of {dtype}" in text


def test_floats_for_an_integer_buffer_are_refused_before_anything_changes(tmp_path: Path) -> None:
    put(tmp_path, with_buffers(small, early=torch.zeros(2), phase=torch.tensor([0.5, 2.0])))
    make = with_buffers(other, early=torch.ones(2), phase=torch.ones(2, dtype=torch.int64))

    def load(engine: Any) -> None:
        try:
            checkpoint.load(engine, tmp_path)
        finally:
            assert engine.module.get_buffer("early").tolist() == [1.0, 1.0]

    for text in errors(run, TWO, make, load):
        assert "has other values of phase, which the model cannot take" in text
        assert "Nothing was loaded" in text


def test_buffers_of_another_shape_are_refused_before_anything_changes(tmp_path: Path) -> None:
    """Also where a program does not tell them from parameters; a copy would broadcast them."""
    state = small().state_dict() | {"norm.running_mean": torch.ones(1)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    def load(engine: Any) -> None:
        try:
            checkpoint.load(engine, tmp_path / "dcp", load_optimizer_states=False)
        finally:
            assert not engine.module.norm.running_mean.any()

    for text in errors(run, TWO, other, load):
        assert "shapes differ: norm.running_mean (checkpoint [1], model [13])" in text


class Scaled(Job):
    """A job in fp16 with a constant loss scale."""

    @property
    def config(self) -> dict[str, Any]:
        return super().config | {"fp16": {"enabled": True, "loss_scale": 64.0}}


def test_a_constant_loss_scale_stays_over_loads(tmp_path: Path, heard: list[str]) -> None:
    dynamic, constant = Job(1, 2, precision="fp16"), Scaled(1, 2, precision="fp16")
    (saver,) = saved(tmp_path / "dynamic", dynamic)
    assert saver.scaler.scale > 64.0
    (engine,), _ = loaded(constant, tmp_path / "dynamic")
    assert engine.scaler.scale == 64.0 and not engine.scaler.dynamic
    (told,) = (line for line in heard if "fp16.loss_scale" in line)
    assert f"has a loss scale of {saver.scaler.scale:g}" in told

    saved(tmp_path / "constant", constant)
    loaded(constant, tmp_path / "constant")
    assert len([line for line in heard if "fp16.loss_scale" in line]) == 1
    (engine,), _ = loaded(dynamic, tmp_path / "constant")
    assert engine.scaler.scale == 64.0 and engine.scaler.dynamic
