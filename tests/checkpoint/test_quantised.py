"""Checkpoints of adapters over quantised weights: bytes as they are, what stands beside them,
and without the frozen base.
"""

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import convert_checkpoint, load_state_dict_from_zero_checkpoint
from hf_zero.errors import CheckpointError
from tests.helpers import oracle
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.packed import LinearOfBytes
from tests.helpers.stacks import by_hand, on_ranks, squared
from tests.helpers.training import At
from tests.ranks.test_quantised import PACKED, adam, adapters, alike, build

RANKS = 2
SCALES = "blocks.0.up.base_layer.weight.absmax"


def steps(engine, rank, numbers):
    for step in numbers:
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()


def saved(folder, stage=3, storage=torch.uint8, **options):
    """Train for two steps and save."""

    def run(rank, model):
        engine = start(model, adam(model), config_of(stage))
        steps(engine, rank, range(2))
        engine.save_checkpoint(folder, **options)

    on_ranks(RANKS, run, build=build(storage))
    return build(storage)().state_dict()


@pytest.mark.turns
@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 2), (2, 3)])
def test_training_goes_on_where_it_was(tmp_path, before, after, exclude):
    """Without the frozen weights the checkpoint holds adapters alone, and the model that has the
    base takes them.
    """
    want, _ = by_hand(adam, [[(1.0, 0)]] * 4, RANKS, build=build())
    given = saved(tmp_path, before, exclude_frozen_parameters=exclude)

    def run(rank, model):
        if not exclude:
            for name in PACKED:
                model.get_parameter(name).data.zero_()
            model.get_parameter(PACKED[0]).quant_state.absmax.zero_()
        else:
            assert all(
                torch.equal(value, given[name])
                for name, value in model.state_dict().items()
                if "lora_" not in name
            )
        engine = start(model, adam(model), config_of(after))
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        steps(engine, rank, range(2, 4))
        state = model.state_dict()
        assert all(
            alike(value, given[name]) for name, value in state.items() if "lora_" not in name
        )
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=build()):
        oracle.compare_tensors("weights", adapters(weights), adapters(want))


def test_without_the_frozen_weights_it_is_small(tmp_path):
    saved(tmp_path / "all")
    saved(tmp_path / "trained", exclude_frozen_parameters=True)

    def names(folder):
        return {key for file in folder.glob("*/*.safetensors") for key in load_file(file)}

    assert any("frozen" in name for name in names(tmp_path / "all"))
    assert f"buffer::{SCALES}" in names(tmp_path / "all")
    assert not any("frozen" in name or "absmax" in name for name in names(tmp_path / "trained"))
    assert any("lora" in name for name in convert(tmp_path / "trained", tmp_path / "out"))


def convert(folder, out, dtype=None):
    convert_checkpoint(folder, out, dtype, adapters=False)
    return load_file(out / "model.safetensors")


@pytest.mark.turns
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_converting_casts_no_bytes_and_keeps_what_stands_beside_them(tmp_path, storage, dtype):
    given = saved(tmp_path / "run", storage=storage)
    made = convert(tmp_path / "run", tmp_path / "out", dtype)
    assert set(made) == set(given)
    assert all(
        alike(made[name], given[name])
        for name in given
        if "up.base_layer.weight" in name or "down.weight" in name
    )
    assert made["enter.weight"].dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_whole_files_and_tensors_are_not_cast(tmp_path, dtype):
    given = build(torch.bfloat16)().state_dict()

    def run(rank, model):
        engine = start(model, adam(model), config_of(3))
        whole = dict(engine.consolidated(dtype))
        engine.save_16bit_model(tmp_path)
        return whole

    whole = on_ranks(RANKS, run, build=build(torch.bfloat16))[0]
    file = load_file(tmp_path / "model.safetensors")
    assert set(file) == set(given) and all(alike(file[name], given[name]) for name in given)
    assert all(alike(whole[name], given[name]) for name in PACKED)


def test_bytes_of_another_kind_are_refused(tmp_path):
    saved(tmp_path)

    def run(rank, model):
        model.blocks[0].down = LinearOfBytes(torch.nn.Linear(64, 32), torch.float8_e4m3fn)
        engine = start(model, adam(model), config_of(3))
        with pytest.raises(
            CheckpointError,
            match=r"not cast: blocks\.0\.down\.weight \(checkpoint torch\.int8, model "
            r"torch\.float8_e4m3fn\); quantise",
        ):
            engine.load_checkpoint(tmp_path)

    on_ranks(RANKS, run, build=build())


def test_facts_that_the_model_cannot_take_are_refused(tmp_path):
    saved(tmp_path)

    def run(rank, model):
        model.get_parameter(PACKED[0]).quant_state.blocksize = 32
        engine = start(model, adam(model), config_of(3))
        with pytest.raises(
            CheckpointError,
            match=r"other values of blocks\.0\.up\.base_layer\.weight\.quant_state\.stand_in__nf4",
        ):
            engine.load_checkpoint(tmp_path)

    on_ranks(RANKS, run, build=build())


def test_adapters_fit_an_unquantised_base(tmp_path):
    """A checkpoint without the base says nothing about how the base is kept."""
    saved(tmp_path, exclude_frozen_parameters=True)

    def run(rank, model):
        layer = model.blocks[0].up.base_layer
        model.blocks[0].up.base_layer = torch.nn.Linear(
            layer.in_features, layer.out_features
        ).requires_grad_(False)
        engine = start(model, adam(model), config_of(3))
        engine.load_checkpoint(tmp_path)
        return {name: p.clone() for name, p in full_weights(engine).items() if "lora_" in name}

    want, _ = by_hand(adam, [[(1.0, 0)]] * 2, RANKS, build=build())
    oracle.compare_tensors("weights", on_ranks(RANKS, run, build=build())[0], adapters(want))


def test_hf_zero_reads_it_into_a_plain_model(tmp_path):
    given = saved(tmp_path)
    model = build()()
    model.get_parameter(PACKED[0]).data.zero_()
    load_state_dict_from_zero_checkpoint(model, tmp_path)
    assert all(
        alike(value, given[name])
        for name, value in model.state_dict().items()
        if "lora_" not in name
    )
