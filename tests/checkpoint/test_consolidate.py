"""The names that scripts for DeepSpeed call."""

from __future__ import annotations

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Engine, Job, other, run, small, state_of, train_some


@pytest.fixture
def trained(tmp_path):
    def action(engine: Engine):
        train_some(engine)
        return checkpoint.save(engine, tmp_path)

    engines, _ = run(
        Job(3, 3, units=("second",), precision="bf16", frozen=lambda name: "first" in name),
        small,
        action,
    )
    return {name: kinds["weights"].float() for name, kinds in state_of(engines).items()}


def test_the_state_dict(tmp_path, trained):
    state = checkpoint.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(state) == set(small().state_dict())
    assert state["head.weight"] is state["embed.weight"]
    assert all(torch.equal(state[name].reshape(-1), tensor) for name, tensor in trained.items())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.int64}
    model = small()
    model.wide = model.wide.clone()
    model.load_state_dict(state, strict=True)
    only = checkpoint.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, "global_step2", exclude_frozen_parameters=True
    )
    assert set(state) - set(only) == {"first.weight", "first.bias"}


def test_tensor_by_tensor(tmp_path, trained):
    names = [
        name
        for name, tensor in checkpoint.iterate_state_dict(tmp_path, dtype="bfloat16")
        if tensor.dtype == torch.bfloat16
    ]
    assert names == [name for name, _ in small().named_parameters()]
    assert (
        dict(checkpoint.iterate_state_dict(tmp_path, dtype=None))["first.weight"].dtype
        == torch.float32
    )


def test_into_a_model(tmp_path, trained):
    model = other()
    model.first.weight.data = torch.zeros(6, 13).t()  # not contiguous
    assert checkpoint.load_state_dict_from_zero_checkpoint(model, tmp_path) is model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.reshape(-1), trained.get(name, torch.empty(0))), name
    assert torch.equal(model.norm.running_mean, small().norm.running_mean)


def test_into_a_16_bit_model(tmp_path, trained):
    model = checkpoint.load_state_dict_from_zero_checkpoint(other().bfloat16(), tmp_path)
    assert torch.equal(model.second.weight.reshape(-1), trained["second.weight"].bfloat16())


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda module: module.add_module("third", torch.nn.Linear(1, 1)),
            "lacks third.weight, third.bias",
        ),
        (lambda module: delattr(module, "second"), "has in excess second.weight, second.bias"),
        (
            lambda module: setattr(module, "second", torch.nn.Linear(13, 7)),
            "has in another shape second.weight, second.bias",
        ),
    ],
)
def test_into_another_model(tmp_path, trained, change, said):
    model = other()
    change(model)
    with pytest.raises(CheckpointError, match=f"global_step2 {said}; build the model"):
        checkpoint.load_state_dict_from_zero_checkpoint(model, tmp_path)
    assert not model.first.weight.any()


def test_into_a_model_whose_frozen_parameters_were_left_out(tmp_path):
    job = Job(2, 3, frozen=lambda name: "first" in name)
    run(
        job,
        small,
        lambda engine: checkpoint.save(engine, tmp_path, exclude_frozen_parameters=True),
    )
    model = checkpoint.load_state_dict_from_zero_checkpoint(other(), tmp_path)
    assert not model.first.weight.any() and torch.equal(model.second.weight, small().second.weight)


def test_under_the_name_of_the_script(tmp_path, trained):
    out = checkpoint.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "out", max_shard_size="1KB"
    )
    assert (out / "model.safetensors.index.json").exists()


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'lode'; it has save, "):
        _ = checkpoint.lode
