"""Save under (N, stage), load under (M, stage'): every element of weights and moments comes back
bit for bit, and what is loaded is what was asked for.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import tensorfile
from hf_zero.checkpoint.engine_state import rng_states
from tests.checkpoint.jobs import Engine, Job, other, run, saved, small, state_of, train_some
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


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=jobs, wanted=jobs, number=st.integers(0, 1 << 40))
def test_any_ranks_stage_units_precision_and_order_of_groups(tmp_path, before, wanted, number):
    """Master weights and moments come back bit for bit."""
    turn = -1 if before.decays is not wanted.decays else 1
    before = saved(tmp_path / str(number), before, steps=2)
    after, _ = loaded(wanted, tmp_path / str(number))
    assert_equal(before, after)
    there, here = before[0].bound, after[0].bound
    assert here.scalars()[::turn] == there.scalars()
    assert here.hyperparameters()[::turn] == there.hyperparameters()
    assert after[0].counters == before[0].counters


def momentum_of_one(groups):
    """States that one group has."""
    groups[0]["momentum"] = 0.9
    return torch.optim.SGD(groups, lr=0.1)


def frozen(name: str) -> bool:
    return "first" in name


def test_into_an_engine_that_has_trained_and_groups_with_other_states(tmp_path):
    job = Job(3, 3, units=("first", "second"), optimizer=momentum_of_one)
    before = saved(tmp_path / "a", job)
    into = Job(2, 3, units=("second",), optimizer=momentum_of_one)
    after, _ = loaded(into, tmp_path / "a", lambda engine: train_some(engine, 3))
    assert after[0].counters.global_steps == 1
    found, wanted = state_of(after), state_of(before)
    for name, kinds in found.items():
        for kind, tensor in kinds.items() if "bias" not in name else ():
            assert torch.equal(tensor, wanted[name][kind]), (name, kind)
    assert torch.equal(found["second.bias"]["weights"], wanted["second.bias"]["weights"])
    saved(tmp_path / "b", Job(2, 1), steps=0)
    fresh, _ = loaded(Job(2, 1), tmp_path / "b", train_some)
    assert all(not engine.bound.optimizer.state for engine in fresh)


def test_replicas_write_each_element_once(tmp_path):
    before = saved(tmp_path, Job(4, 3, copies=2, units=("first",)))
    sizes = [
        sum(each.nbytes for name, each in load_file(path).items() if not name.startswith("rng::"))
        for path in sorted((tmp_path / "global_step1").glob("rank-*"))
    ]
    # ranks 2 and 3 repeat what 0 and 1 hold
    assert sizes[2] < sizes[0] / 1.1 and sizes[3] < sizes[0] / 1.1
    assert_equal(before, loaded(Job(3, 1), tmp_path)[0])


def test_other_precision_and_trainability(tmp_path):
    """A frozen weight becomes trainable with zero moments, a trained one is frozen."""
    job = Job(2, 3, precision="bf16", frozen=frozen)
    before = state_of(saved(tmp_path, job))
    assert state_of(loaded(job, tmp_path)[0])["first.weight"]["weights"].dtype == job.dtype
    into = Job(2, 1, frozen=lambda name: "second" in name)
    engines, _ = loaded(into, tmp_path, train_some)
    # what has no moments has the step count of its group
    assert {float(scalars["step"]) for scalars in engines[0].bound.scalars()} == {1.0}
    after = state_of(engines)
    assert torch.equal(after["first.weight"]["weights"], before["first.weight"]["weights"].float())
    assert not after["first.weight"]["exp_avg"].any()
    assert torch.equal(after["second.weight"]["weights"], before["second.weight"]["weights"])
    assert torch.equal(after["embed.weight"]["exp_avg"], before["embed.weight"]["exp_avg"])


def test_frozen_parameters_left_out(tmp_path):
    job = Job(2, 3, frozen=frozen)
    before = state_of(saved(tmp_path, job, exclude_frozen_parameters=True))
    assert "unit0|frozen" not in (tmp_path / "global_step1" / "manifest.json").read_text()
    after = state_of(loaded(job, tmp_path)[0])
    assert not after["first.weight"]["weights"].any()  # as the model to load into had it
    assert torch.equal(after["second.weight"]["weights"], before["second.weight"]["weights"])


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


def test_an_engine_without_optimizer(tmp_path):
    before = state_of(saved(tmp_path))
    bare = Job(3, 3, optimizer=None)
    for name, kinds in state_of(loaded(bare, tmp_path)[0]).items():
        assert torch.equal(kinds["weights"], before[name]["weights"])
    run(bare, small, lambda engine: checkpoint.save(engine, tmp_path, tag="bare"))
    again, _ = loaded(Job(2, 3), tmp_path, tag="bare", load_optimizer_states=False)
    assert torch.equal(state_of(again)["first.bias"]["weights"], small().first.bias.detach())


def test_loss_scale(tmp_path):
    def action(engine: Engine):
        engine.scaler.scale = 512.0
        return checkpoint.save(engine, tmp_path)

    run(Job(2, 3, precision="fp16"), small, action)
    assert loaded(Job(2, 1, precision="fp16"), tmp_path)[0][1].scaler.scale == 512.0
    assert loaded(Job(2, 1, precision="bf16"), tmp_path)[0][1].scaler.scale == 1.0


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


def test_same_ranks_read_each_tensor_in_one_piece(tmp_path, monkeypatch):
    job = Job(2, 3, units=("first",))
    saved(tmp_path, job)
    calls, original = [], tensorfile.TensorFile.read_into

    def read_into(self, name, start, out):
        calls.append(name)
        return original(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", read_into)
    loaded(job, tmp_path)
    per_rank = 2 * 3 + len([name for name, _ in small().named_buffers() if name != "rope"])
    assert len(calls) == 2 * per_rank


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
    looking: list[Any] = [threading.Thread(target=look) for _ in range(2)]
    for each in looking:
        each.start()
    for each in looking:
        each.join()
    os._exit(0)


def test_garbage_that_is_collected_while_two_threads_read_the_generator():
    process = forkserver().Process(target=look_twice)
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended == 0, "the threads wait for each other"
