"""Save under (N, stage), load under (M, stage'): every element of weights and moments comes back
bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_zero import checkpoint
from tests.checkpoint.jobs import Engine, Job, other, run, small, state_of, train_some
from tests.helpers.commands import completed
from tests.helpers.launched import environment


def trained(job: Job, folder: Path, steps: int = 2, **options):
    def action(engine: Engine):
        train_some(engine, steps)
        return checkpoint.save(engine, folder, **options)

    engines, results = run(job, small, action)
    assert len({str(path) for path in results}) == 1
    return engines


def loaded(job: Job, folder: Path, before=lambda engine: None, **options):
    def action(engine: Engine):
        before(engine)
        return checkpoint.load(engine, folder, **options)

    engines, results = run(job, other, action)
    return engines, results


def assert_equal(left, right) -> None:
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


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(saved=jobs, wanted=jobs, number=st.integers(0, 1 << 40))
def test_any_ranks_stage_units_precision_and_order_of_groups(tmp_path, saved, wanted, number):
    """Master weights and moments come back bit for bit."""
    folder = tmp_path / str(number)
    before = trained(saved, folder)
    after, _ = loaded(wanted, folder)
    assert_equal(before, after)
    there, here = before[0].bound, after[0].bound
    turn = -1 if saved.decays is not wanted.decays else 1
    assert here.scalars()[::turn] == there.scalars()
    assert here.hyperparameters()[::turn] == there.hyperparameters()
    assert after[0].counters == before[0].counters


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", range(1, 9))
def test_every_pair_of_ranks_and_stages(tmp_path, world, stage):
    before = trained(Job(world, stage, units=("first",)), tmp_path)
    for other_world, other_stage in itertools.product(range(1, 9), range(4)):
        after, _ = loaded(
            Job(other_world, other_stage, units=("norm", "second"), decays=biases_first), tmp_path
        )
        assert_equal(before, after)


def test_replicas_write_each_element_once(tmp_path):
    job = Job(4, 3, copies=2, units=("first",))
    before = trained(job, tmp_path)
    files = map(load_file, sorted((tmp_path / "global_step2").glob("rank-*")))
    sizes = [
        sum(each.nbytes for name, each in file.items() if not name.startswith("rng::"))
        for file in files
    ]
    # rank 2 and 3 repeat what 0 and 1 hold
    assert sizes[2] < sizes[0] / 1.1 and sizes[3] < sizes[0] / 1.1
    assert_equal(before, loaded(Job(3, 1), tmp_path)[0])


def test_training_goes_on_bit_for_bit(tmp_path):
    """Also hyper-parameters that changed in training, and the schedule."""

    def schedule(engine: Engine) -> None:
        engine.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            engine.bound.optimizer, max_lr=0.1, total_steps=20
        )

    def whole(engine: Engine):
        schedule(engine)
        train_some(engine, 3)
        checkpoint.save(engine, tmp_path)
        train_some(engine, 3)

    def resumed(engine: Engine):
        schedule(engine)
        checkpoint.load(engine, tmp_path)
        train_some(engine, 3)

    job = Job(2, 2, units=("embed",))
    one, _ = run(job, small, whole)
    two, _ = run(job, other, resumed)
    assert_equal(one, two)
    assert one[0].counters == two[0].counters and one[0].counters.global_steps == 6
    assert one[0].lr_scheduler.state_dict() == two[0].lr_scheduler.state_dict()
    assert one[0].bound.hyperparameters() == two[0].bound.hyperparameters()


def test_load_into_an_engine_that_has_trained(tmp_path):
    before = trained(Job(2, 3), tmp_path)
    after, _ = loaded(Job(3, 2), tmp_path, before=lambda engine: train_some(engine, 5))
    assert_equal(before, after)
    assert after[0].counters.global_steps == 2


def test_an_optimizer_that_had_not_stepped_starts_anew(tmp_path):
    trained(Job(2, 1), tmp_path, steps=0)
    after, _ = loaded(Job(2, 1), tmp_path, before=lambda engine: train_some(engine, 2))
    assert all(not engine.bound.optimizer.state for engine in after)


def test_states_that_one_group_has(tmp_path):
    def optimizer(groups):
        groups[0]["momentum"] = 0.9
        return torch.optim.SGD(groups, lr=0.1)

    before = trained(Job(3, 3, units=("first", "second"), optimizer=optimizer), tmp_path)
    after, _ = loaded(Job(2, 3, units=("second",), optimizer=optimizer), tmp_path)
    for name, kinds in state_of(after).items():
        for kind, tensor in kinds.items():
            if "bias" not in name:
                assert torch.equal(tensor, state_of(before)[name][kind]), (name, kind)
    assert torch.equal(
        state_of(after)["second.bias"]["weights"], state_of(before)["second.bias"]["weights"]
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_keeps_the_masters(tmp_path, precision):
    job = Job(2, 3, precision=precision, frozen=lambda name: "first" in name)
    before = trained(job, tmp_path)
    after, _ = loaded(Job(3, 2, precision=precision, frozen=job.frozen), tmp_path)
    assert_equal(before, after)
    assert state_of(after)["first.weight"]["weights"].dtype == job.dtype


def test_other_precision_and_trainability(tmp_path):
    """A weight frozen in bf16 becomes trainable in fp32 with zero moments; a trained one is
    frozen.
    """
    before = state_of(
        trained(Job(2, 3, precision="bf16", frozen=lambda name: "first" in name), tmp_path)
    )
    engines, _ = loaded(
        Job(2, 1, frozen=lambda name: "second" in name), tmp_path, before=train_some
    )
    after = state_of(engines)
    assert torch.equal(after["first.weight"]["weights"], before["first.weight"]["weights"].float())
    assert not after["first.weight"]["exp_avg"].any()
    assert torch.equal(after["second.weight"]["weights"], before["second.weight"]["weights"])
    assert torch.equal(after["embed.weight"]["exp_avg"], before["embed.weight"]["exp_avg"])


def test_frozen_parameters_left_out(tmp_path):
    job = Job(2, 3, frozen=lambda name: "first" in name)
    before = state_of(trained(job, tmp_path, exclude_frozen_parameters=True))
    manifest = (tmp_path / "global_step2" / "manifest.json").read_text()
    assert "unit0|frozen" not in manifest
    engines, _ = loaded(job, tmp_path)
    after = state_of(engines)
    assert not after["first.weight"]["weights"].any()  # as the model to load into had it
    assert torch.equal(after["second.weight"]["weights"], before["second.weight"]["weights"])


def test_buffers(tmp_path):
    trained(Job(2, 3), tmp_path)
    engines, _ = loaded(Job(1, 0), tmp_path)
    assert torch.equal(engines[0].module.norm.running_mean, small().norm.running_mean)
    assert "rope" not in (tmp_path / "global_step2" / "manifest.json").read_text()


def test_weights_only(tmp_path):
    before = trained(Job(2, 3), tmp_path, client_state={"epoch": 3})
    engines, results = loaded(Job(2, 3), tmp_path, load_module_only=True)
    assert torch.equal(
        state_of(engines)["second.weight"]["weights"], state_of(before)["second.weight"]["weights"]
    )
    assert not engines[0].bound.optimizer.state
    assert engines[0].counters.global_steps == 0
    assert results[0][1] == {"epoch": 3}


def test_without_optimizer_states(tmp_path):
    trained(Job(2, 3), tmp_path)
    engines, _ = loaded(Job(2, 3), tmp_path, load_optimizer_states=False)
    assert not engines[0].bound.optimizer.state
    assert engines[0].counters.global_steps == 2


def test_an_engine_without_optimizer(tmp_path):
    before = trained(Job(2, 3), tmp_path)
    after, _ = loaded(Job(3, 3, optimizer=None), tmp_path)
    weights = state_of(before)
    assert all(
        torch.equal(kinds["weights"], weights[name]["weights"])
        for name, kinds in state_of(after).items()
    )
    run(
        Job(3, 3, optimizer=None),
        small,
        lambda engine: checkpoint.save(engine, tmp_path, tag="bare"),
    )
    again, _ = loaded(Job(2, 3), tmp_path, tag="bare", load_optimizer_states=False)
    assert torch.equal(state_of(again)["first.bias"]["weights"], small().first.bias.detach())


def test_loss_scale(tmp_path):
    def action(engine: Engine):
        engine.scaler.scale = 512.0
        return checkpoint.save(engine, tmp_path)

    run(Job(2, 3, precision="fp16"), small, action)
    assert loaded(Job(2, 1, precision="fp16"), tmp_path)[0][1].scaler.scale == 512.0
    assert loaded(Job(2, 1, precision="bf16"), tmp_path)[0][1].scaler.scale == 1.0


def test_client_state_of_both_kinds(tmp_path):
    state = {
        "epoch": 3,
        "best": float("inf"),
        "seen": (1, 2),
        "means": torch.arange(3.0),
        "nested": {"a": [1, None, "x"]},
    }
    trained(Job(2, 3), tmp_path, client_state=state)
    for _, given_back in loaded(Job(1, 0), tmp_path)[1]:
        assert given_back.keys() == state.keys()
        assert torch.equal(given_back.pop("means"), state["means"])
        assert given_back == {key: value for key, value in state.items() if key != "means"}


def test_random_generators_come_back_on_request(tmp_path):
    trained(Job(1, 3), tmp_path)
    torch.manual_seed(1)
    run(Job(1, 3), small, lambda engine: checkpoint.save(engine, tmp_path, tag="here"))
    expected = torch.rand(3)
    torch.manual_seed(2)
    loaded(Job(1, 3), tmp_path, tag="here")
    assert not torch.equal(torch.rand(3), expected)
    loaded(Job(1, 3), tmp_path, tag="here", load_rng=True)
    assert torch.equal(torch.rand(3), expected)


def test_random_generators_of_other_ranks_are_said_to_be_lost(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    trained(Job(1, 3), tmp_path)
    loaded(Job(2, 3), tmp_path, load_rng=True, before=lambda engine: torch.manual_seed(5))
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())
    said = "was saved by 1 rank: the states of random generators are not restored on 2 ranks"
    assert said in caplog.text


def test_every_rank_reads_its_own_bytes_only(tmp_path, monkeypatch):
    """Two ranks at stage 3 read the checkpoint once between them, not once each."""
    from hf_zero.checkpoint import tensorfile

    trained(Job(3, 3), tmp_path)
    counted = []
    original = tensorfile.TensorFile.read_into

    def read_into(self, name, start, out):
        if "::" in name and not name.startswith("buffer::"):
            counted.append(out.numel())
        return original(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", read_into)
    loaded(Job(2, 3), tmp_path)
    assert sum(counted) == 3 * sum(parameter.numel() for parameter in small().parameters())


def test_same_ranks_read_each_tensor_in_one_piece(tmp_path, monkeypatch):
    from hf_zero.checkpoint import tensorfile

    trained(Job(2, 3, units=("first",)), tmp_path)
    calls = []
    original = tensorfile.TensorFile.read_into

    def read_into(self, name, start, out):
        calls.append(name)
        return original(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", read_into)
    loaded(Job(2, 3, units=("first",)), tmp_path)
    per_rank = 2 * 3 + len([name for name, _ in small().named_buffers() if name != "rope"])
    assert len(calls) == 2 * per_rank


COLLECTED = """
import gc, os, threading, time
from hf_zero.checkpoint.engine_state import rng_states

class Slow:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.002)  # the other thread runs meanwhile

def look():
    for _ in range(200):
        Slow()
        rng_states()
        rng_states()

gc.set_threshold(2)
looking = [threading.Thread(target=look) for _ in range(2)]
for each in looking:
    each.start()
for each in looking:
    each.join()
os._exit(0)
"""


def test_garbage_that_is_collected_while_two_threads_read_the_generator():
    completed([sys.executable, "-c", COLLECTED], env=environment(), check=True, timeout=60)
