"""Partition of models into units: blocks by kind, by name, by list, by size; large leaves apart;
shared parameters in the root.
"""

import pytest
import transformers
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.wrap import find_units
from tests.helpers.models import ARCHITECTURES, Block, Stack


def names(specs):
    return [spec.name for spec in specs]


def owned(specs):
    return {spec.name: [name for name, _ in spec.parameters] for spec in specs}


def check_complete(model, specs):
    """Every parameter in one unit, under its first name; every unit but the root owns some, and
    is reached by its name.
    """
    owned_once = [(name, id(parameter)) for spec in specs for name, parameter in spec.parameters]
    assert sorted(owned_once) == sorted((name, id(p)) for name, p in model.named_parameters())
    assert specs[0].name == "" and specs[0].module is model
    for spec in specs[1:]:
        assert spec.parameters and model.get_submodule(spec.name) is spec.module
        inside = {id(p) for p in spec.module.parameters()}
        assert all(id(parameter) in inside for _, parameter in spec.parameters)


LAYERS = {
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama": ["model.layers.0", "model.layers.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
}
TIED = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {},
    "t5": {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_transformers_models(name):
    model = ARCHITECTURES[name].build()
    specs, aliases = find_units(model)
    assert names(specs) == ["", *LAYERS[name]]
    check_complete(model, specs)
    assert aliases == TIED[name]
    root = owned(specs)[""]
    assert set(TIED[name].values()) <= set(root)
    assert not any(
        parameter.startswith(layer + ".") for parameter in root for layer in LAYERS[name]
    )


def test_large_embeddings_and_heads_of_a_language_model_are_units():
    """Untied: the input embedding and the head. Tied: neither, their weight belongs to the root."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    for tied in (False, True):
        config.tie_word_embeddings = tied
        model = transformers.LlamaForCausalLM(config)
        specs, aliases = find_units(model)
        check_complete(model, specs)
        large = [] if tied else ["model.embed_tokens", "lm_head"]
        assert sorted(names(specs)) == sorted(["", *large, "model.layers.0", "model.layers.1"])
        assert ("model.embed_tokens.weight" in owned(specs)[""]) == tied
        assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_checkpointing_layers_by_class_name():
    class GradientCheckpointingLayer(nn.Module):
        pass

    class Layer(GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(Block(4) for _ in range(2))

    class Model(nn.Module):
        _no_split_modules = ("Block",)

        def __init__(self):
            super().__init__()
            self.enter, self.one, self.two = Block(4), Layer(), Layer()

    model = Model()
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "one", "two"], (
        "they come before _no_split_modules, and the outermost count"
    )


@pytest.mark.parametrize("kind", [list, tuple, set])
def test_no_split_modules(kind):
    model = Stack(3)
    model._no_split_modules = kind(["LayerNorm", "Missing"])
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]


@pytest.mark.parametrize("nothing", [None, [], ["Missing"]])
def test_items_of_module_lists_where_nothing_is_named(nothing):
    model = Stack(3)
    model._no_split_modules = nothing
    specs, aliases = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0", "blocks.1", "blocks.2"] and aliases == {}
    assert owned(specs)[""] == ["enter.weight", "enter.bias", "head.weight", "head.bias"]


def test_small_lists_and_empty_items_are_no_units():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(16), nn.Identity(), Block(16)])
            # from a quarter of the largest list on
            self.towers = nn.ModuleList([Block(10), Block(10)])
            self.small = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.single = nn.ModuleList([Block(16)])

    model = Model()
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0", "blocks.2", "towers.0", "towers.1"]


def test_lists_in_lists_are_cut_at_the_outer_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList(Block(8) for _ in range(2)) for _ in range(2))

    specs, _ = find_units(Model())
    assert names(specs) == ["", "stages.0", "stages.1"]


def test_a_model_without_blocks_is_cut_by_size():
    wide = wrap.MIN_UNIT // 256
    model = nn.Sequential(*(nn.Linear(256, wide, bias=False) for _ in range(8)), nn.Linear(2, 2))
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", *map(str, range(8))]
    assert owned(specs)[""] == ["8.weight", "8.bias"]


def test_by_size_goes_inside_what_is_too_large():
    width = 2 * wrap.MIN_UNIT // 256

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(256, width, bias=False) for _ in range(10)))
            self.norm = nn.LayerNorm(8)

    model = nn.Module()
    model.left, model.right = Half(), Half()
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == [
        "",
        *(f"{side}.layers.{i}" for side in ("left", "right") for i in range(10)),
    ]


def test_by_size_never_cuts_at_a_container():
    """Hooks on a module that nobody calls would never fire: a ModuleDict, or a module without a
    forward.
    """
    holder = nn.Module()
    holder.one, holder.two = nn.Linear(128, 128), nn.Linear(128, 128)
    model = nn.Module()
    model.held, model.keyed = (
        holder,
        nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128)}),
    )
    model.rest = nn.Sequential(
        *(nn.Linear(256, wrap.MIN_UNIT // 256, bias=False) for _ in range(3))
    )
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == [
        "",
        "held.one",
        "held.two",
        "keyed.a",
        "keyed.b",
        "rest.0",
        "rest.1",
        "rest.2",
    ]


def test_a_small_model_without_blocks_is_one_unit():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == [""]


def test_a_model_without_parameters_is_one_empty_unit():
    specs, aliases = find_units(nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert owned(specs) == {"": []} and aliases == {}


def test_large_leaves_beside_blocks():
    """From a quarter of a block and MIN_UNIT elements on; a convolution is no leaf of this kind."""

    class Model(Stack):
        def __init__(self):
            super().__init__(2, 64)
            self.words = nn.Embedding(wrap.MIN_UNIT // 8, 8)
            self.fewer = nn.Embedding(wrap.MIN_UNIT // 8 - 1, 8)
            self.pixels = nn.Conv1d(wrap.MIN_UNIT, 2, 1)

    model = Model()
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0", "blocks.1", "words"]


def test_a_leaf_that_is_small_beside_its_blocks_stays_in_the_root(monkeypatch):
    monkeypatch.setattr(wrap, "MIN_UNIT", 1)
    model = Stack(2, 32)
    quarter = sum(p.numel() for p in model.blocks[0].parameters()) / 4
    specs, _ = find_units(model)
    assert (
        names(specs) == ["", "blocks.0", "blocks.1"]
        and sum(p.numel() for p in model.head.parameters()) < quarter
    )
    model.head = nn.Linear(32, int(quarter / 33) + 1)
    assert names(find_units(model)[0]) == ["", "blocks.0", "blocks.1", "head"]


def test_weights_tied_between_two_blocks_or_with_the_outside_belong_to_the_root():
    model = Stack(3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.enter.extra = model.blocks[1].norm.weight
    specs, aliases = find_units(model)
    check_complete(model, specs)
    assert {"blocks.0.up.weight", "enter.extra"} <= set(owned(specs)[""])
    assert aliases == {
        "blocks.2.up.weight": "blocks.0.up.weight",
        "blocks.1.norm.weight": "enter.extra",
    }
    assert "blocks.1.norm.weight" not in owned(specs)["blocks.1"]


def test_a_large_head_tied_to_the_embedding_is_no_unit_for_its_bias():
    model = Stack(2, 64)
    model.words = nn.Embedding(2048, 64)
    model.head = nn.Linear(64, 2048)
    assert names(find_units(model)[0]) == ["", "blocks.0", "blocks.1", "head", "words"]
    model.head.weight = model.words.weight
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0", "blocks.1"] and "head.bias" in owned(specs)[""]


def test_a_model_that_is_a_block_itself_is_cut_inside():
    class GradientCheckpointingLayer(Stack):
        pass

    specs, _ = find_units(GradientCheckpointingLayer(2))
    assert names(specs) == ["", "blocks.0", "blocks.1"]


def test_weights_tied_inside_a_block_stay_there():
    model = Stack(2)
    model.blocks[1].norm.bias = model.blocks[1].norm.weight
    specs, aliases = find_units(model)
    check_complete(model, specs)
    assert "blocks.1.norm.weight" in owned(specs)["blocks.1"]
    assert aliases == {"blocks.1.norm.bias": "blocks.1.norm.weight"}


def test_a_block_used_twice_is_one_unit():
    """ALBERT has one block under several names."""
    model = Stack(1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    specs, aliases = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0"]
    assert aliases["blocks.2.up.weight"] == "blocks.0.up.weight" and len(aliases) == 12


def test_a_block_whose_parameters_are_all_shared_is_no_unit():
    model = Stack(2)
    other = Block()
    for name, child in model.blocks[1].named_children():
        for key, shared in child.named_parameters():
            other.get_submodule(name).register_parameter(key, shared)
    model.copy = other
    specs, _ = find_units(model)
    check_complete(model, specs)
    assert names(specs) == ["", "blocks.0"]


def test_parameters_of_a_pack_follow_the_first_of_them():
    model = Stack(depth=2)
    model.blocks[1]._hf_zero_packed = (("up.weight", "down.weight"), ("up.bias", "down.bias"))
    plain = [name.removeprefix("blocks.0.") for name in owned(find_units(model)[0])["blocks.0"]]
    assert plain == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    packed = [name.removeprefix("blocks.1.") for name in owned(find_units(model)[0])["blocks.1"]]
    assert packed == [
        "norm.weight",
        "norm.bias",
        "up.weight",
        "down.weight",
        "up.bias",
        "down.bias",
    ]
    check_complete(model, find_units(model)[0])


def test_a_pack_has_the_order_it_is_named_in_and_reaches_no_further_than_a_unit():
    model = Stack(depth=2)
    model._hf_zero_packed = (
        ("blocks.0.down.weight", "enter.weight", "blocks.0.up.weight", "blocks.1.up.weight"),
    )
    got = owned(find_units(model)[0])
    assert [name.removeprefix("blocks.0.") for name in got["blocks.0"]] == [
        "norm.weight",
        "norm.bias",
        "down.weight",
        "up.weight",
        "up.bias",
        "down.bias",
    ]
    assert got["blocks.1"] == [f"blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()]
    check_complete(model, find_units(model)[0])


def test_a_name_of_a_pack_that_is_not_there_is_refused():
    model = Stack(depth=2)
    model.blocks[0]._hf_zero_packed = (("up.weight", "left.weight"),)
    with pytest.raises(
        PartitionError,
        match=r"_hf_zero_packed of blocks.0 \(Block\) names a parameter that is not there: .*left",
    ):
        find_units(model)
