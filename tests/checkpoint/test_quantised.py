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
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.ranks.test_quantised import PACKED, adam, adapters, alike, build

RANKS = 2
SCALES = "blocks.0.up.base_layer.weight.absmax"


def opened(model, stage=3):
    return start(model, adam(model), config_of(stage))


def saved(folder, stage=3, storage=torch.uint8, **options):
    """Train for two steps and save."""

    def run(rank, model):
        engine = opened(model, stage)
        run_steps(engine, rank, range(2))
        engine.save_checkpoint(folder, **options)

    on_ranks(RANKS, run, build=build(storage))
    return build(storage)().state_dict()


def bases_alike(state, given):
    return all(alike(value, given[name]) for name, value in state.items() if "lora_" not in name)


@pytest.mark.parametrize(
    ("before", "after", "exclude"), [(3, 3, True), (3, 2, False), (2, 3, False)]
)
def test_training_goes_on_where_it_was(tmp_path, before, after, exclude):
    """Without the frozen weights the model that has the base takes the adapters."""
    want, _ = by_hand(adam, [[(1.0, 0)]] * 4, RANKS, build=build())
    given = saved(tmp_path, before, exclude_frozen_parameters=exclude)

    def run(rank, model):
        if not exclude:
            for name in PACKED:
                model.get_parameter(name).data.zero_()
            model.get_parameter(PACKED[0]).quant_state.absmax.zero_()
        engine = opened(model, after)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        run_steps(engine, rank, range(2, 4))
        assert bases_alike(model.state_dict(), given)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=build()):
        oracle.compare_tensors("weights", adapters(weights), adapters(want))


def convert(folder, out, dtype=None):
    convert_checkpoint(folder, out, dtype, adapters=False)
    return load_file(out / "model.safetensors")


def test_without_the_frozen_weights_it_is_small(tmp_path):
    saved(tmp_path / "all")
    saved(tmp_path / "trained", exclude_frozen_parameters=True)

    def names(folder):
        return {key for file in folder.glob("*/*.safetensors") for key in load_file(file)}

    assert any("frozen" in name for name in names(tmp_path / "all"))
    assert f"buffer::{SCALES}" in names(tmp_path / "all")
    assert not any("frozen" in name or "absmax" in name for name in names(tmp_path / "trained"))
    assert any("lora" in name for name in convert(tmp_path / "trained", tmp_path / "out"))


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_what_is_converted_or_written_whole_is_not_cast(tmp_path, storage):
    """What stands beside the bytes is kept."""
    given = saved(tmp_path / "run", storage=storage)
    for dtype in (None, "bfloat16", "float32"):
        made = convert(tmp_path / "run", tmp_path / "out", dtype)
        assert set(made) == set(given)
        packed = [name for name in given if "up.base_layer.weight" in name or "down.weight" in name]
        assert packed and all(alike(made[name], given[name]) for name in packed)
        wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert made["enter.weight"].dtype == wanted
    model = build(storage)()
    model.get_parameter(PACKED[0]).data.zero_()
    load_state_dict_from_zero_checkpoint(model, tmp_path / "run")
    assert bases_alike(model.state_dict(), given)

    def run(rank, model):
        engine = opened(model)
        engine.save_16bit_model(tmp_path / "whole")
        return [dict(engine.consolidated(each)) for each in (None, torch.float32, torch.bfloat16)]

    for whole in on_ranks(RANKS, run, build=build(storage))[0]:
        assert all(alike(whole[name], given[name]) for name in PACKED)
    file = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(file) == set(given) and all(alike(file[name], given[name]) for name in given)


def of_another_kind(model):
    model.blocks[0].down = LinearOfBytes(torch.nn.Linear(64, 32), torch.float8_e4m3fn)


def in_other_blocks(model):
    model.get_parameter(PACKED[0]).quant_state.blocksize = 32


REFUSED = {
    r"blocks\.0\.down\.weight \(checkpoint torch\.int8, model torch\.float8_e4m3fn\)": (
        of_another_kind
    ),
    r"other values of blocks\.0\.up\.base_layer\.weight\.quant_state": in_other_blocks,
}


def test_bytes_of_another_kind_and_facts_that_differ_are_refused(tmp_path):
    saved(tmp_path)
    for said, change in REFUSED.items():

        def run(rank, model, said=said, change=change):
            change(model)
            with pytest.raises(CheckpointError, match=said):
                opened(model).load_checkpoint(tmp_path)

        on_ranks(RANKS, run, build=build())


def test_adapters_fit_an_unquantised_base(tmp_path):
    """A checkpoint without the base says nothing about how the base is kept."""
    saved(tmp_path, exclude_frozen_parameters=True)

    def run(rank, model):
        layer = model.blocks[0].up.base_layer
        plain = torch.nn.Linear(layer.in_features, layer.out_features)
        model.blocks[0].up.base_layer = plain.requires_grad_(False)
        engine = opened(model)
        engine.load_checkpoint(tmp_path)
        return {name: p.clone() for name, p in full_weights(engine).items() if "lora_" in name}

    want, _ = by_hand(adam, [[(1.0, 0)]] * 2, RANKS, build=build())
    oracle.compare_tensors("weights", on_ranks(RANKS, run, build=build())[0], adapters(want))
