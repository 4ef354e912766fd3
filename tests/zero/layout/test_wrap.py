"""Partition of models into units: blocks by kind, by name, by list, by size; large leaves apart;
shared parameters in the root.
"""

import pytest
import transformers
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.wrap import find_units
from tests.helpers.cells import in_one_item
from tests.helpers.models import Block, Stack

WIDE = wrap.MIN_UNIT // 256


def names(specs):
    return [spec.name for spec in specs]


def owned(specs):
    return {spec.name: [name for name, _ in spec.parameters] for spec in specs}


def units_of(model):
    """The units of ``model``, and the other names of its parameters. Every parameter is in one
    unit, under its first name; every unit but the root owns some, and is reached by its name.
    """
    specs, aliases = find_units(model)
    owned_once = [(name, id(parameter)) for spec in specs for name, parameter in spec.parameters]
    assert sorted(owned_once) == sorted((name, id(p)) for name, p in model.named_parameters())
    assert specs[0].name == "" and specs[0].module is model
    for spec in specs[1:]:
        assert spec.parameters and model.get_submodule(spec.name) is spec.module
        inside = {id(p) for p in spec.module.parameters()}
        assert all(id(parameter) in inside for _, parameter in spec.parameters)
    return specs, aliases


@in_one_item((False, True))
def test_large_embeddings_and_heads_of_a_language_model_are_units(tied):
    """Untied: the input embedding and the head. Tied: neither, their weight belongs to the root."""
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    specs, aliases = units_of(transformers.LlamaForCausalLM(config))
    large = [] if tied else ["model.embed_tokens", "lm_head"]
    assert sorted(names(specs)) == sorted(["", *large, "model.layers.0", "model.layers.1"])
    assert ("model.embed_tokens.weight" in owned(specs)[""]) == tied
    assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


class GradientCheckpointingLayer(nn.Module):
    """Found by its name, like that of transformers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Block(4) for _ in range(2))


def with_parts(model=None, **parts):
    model = model or nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def blocks(*sizes):
    return nn.ModuleList(Block(size) for size in sizes)


def linears(count, width=WIDE):
    return nn.Sequential(*(nn.Linear(256, width, bias=False) for _ in range(count)))


def by_class():
    """Layers come before ``_no_split_modules``, and the outermost count."""
    layers = {name: GradientCheckpointingLayer() for name in ("one", "two")}
    return with_parts(enter=Block(4), **layers, _no_split_modules=("Block",))


def a_block_itself():
    return type("GradientCheckpointingLayer", (Stack,), {})(2)


def split_by_name():
    return with_parts(Stack(3), _no_split_modules={"LayerNorm", "Missing"})


def large_leaves():
    """From a quarter of a block and MIN_UNIT elements on; a convolution is no leaf of this kind."""
    return with_parts(
        Stack(2, 64),
        words=nn.Embedding(wrap.MIN_UNIT // 8, 8),
        fewer=nn.Embedding(wrap.MIN_UNIT // 8 - 1, 8),
        pixels=nn.Conv1d(wrap.MIN_UNIT, 2, 1),
    )


def never_called():
    """A ModuleDict and a module without a forward: their hooks would never fire."""
    held = with_parts(one=nn.Linear(128, 128), two=nn.Linear(128, 128))
    keyed = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128)})
    return with_parts(held=held, keyed=keyed, rest=linears(3))


def tied_inside():
    model = Stack(2)
    model.blocks[1].norm.bias = model.blocks[1].norm.weight
    return model


def all_shared():
    """A block whose parameters are all shared with a copy outside is none."""
    model, other = Stack(2), Block()
    for name, child in model.blocks[1].named_children():
        for key, shared in child.named_parameters():
            other.get_submodule(name).register_parameter(key, shared)
    return with_parts(model, copy=other)


def used_thrice():
    """ALBERT has one block under several names."""
    model = Stack(1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return model


def tied_head():
    """A large head that is tied to the embedding is no unit for its bias."""
    model = with_parts(Stack(2, 64), words=nn.Embedding(2048, 64), head=nn.Linear(64, 2048))
    model.head.weight = model.words.weight
    return model


STACK = ["blocks.0", "blocks.1", "blocks.2"]
UNITS = {
    "layers by class": (by_class, ["one", "two"]),
    "a block itself": (a_block_itself, STACK[:2]),
    "named in a set": (split_by_name, [f"{name}.norm" for name in STACK]),
    "missing names": (lambda: with_parts(Stack(3), _no_split_modules=["Missing"]), STACK),
    # a list counts from a quarter of the largest one on
    "small lists and empty items": (
        lambda: with_parts(
            blocks=nn.ModuleList([Block(16), nn.Identity(), Block(16)]),
            towers=blocks(10, 10),
            small=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            single=blocks(16),
        ),
        ["blocks.0", "blocks.2", "towers.0", "towers.1"],
    ),
    "lists in lists": (
        lambda: with_parts(stages=nn.ModuleList(blocks(8, 8) for _ in range(2))),
        [f"stages.{stage}.{at}" for stage in range(2) for at in range(2)],
    ),
    "by size, inside": (
        lambda: with_parts(
            **{side: nn.Sequential(linears(10, 2 * WIDE), nn.LayerNorm(8)) for side in ("a", "b")}
        ),
        [f"{side}.0.{at}" for side in ("a", "b") for at in range(10)],
    ),
    "containers": (
        never_called,
        ["held.one", "held.two", "keyed.a", "keyed.b", "rest.0", "rest.1", "rest.2"],
    ),
    "small": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), []),
    "large leaves": (large_leaves, [*STACK[:2], "words"]),
    "a tied head": (tied_head, STACK[:2]),
    "tied inside": (tied_inside, STACK[:2]),
    "all shared": (all_shared, STACK[:1]),
    "used thrice": (used_thrice, STACK[:1]),
}


@in_one_item(UNITS)
def test_units(case):
    make, wanted = UNITS[case]
    assert names(units_of(make())[0]) == ["", *wanted]


def test_weights_under_several_names_belong_to_the_root():
    assert units_of(tied_inside())[1] == {"blocks.1.norm.bias": "blocks.1.norm.weight"}
    aliases = units_of(used_thrice())[1]
    assert aliases["blocks.2.up.weight"] == "blocks.0.up.weight" and len(aliases) == 12
    assert "head.bias" in owned(units_of(tied_head())[0])[""]
    model = Stack(3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.enter.extra = model.blocks[1].norm.weight
    specs, aliases = units_of(model)
    assert {"blocks.0.up.weight", "enter.extra", "head.bias"} <= set(owned(specs)[""])
    assert aliases == {
        "blocks.2.up.weight": "blocks.0.up.weight",
        "blocks.1.norm.weight": "enter.extra",
    }


def test_parameters_of_a_pack_follow_the_first_of_them():
    """In the order in which the pack names them, and no further than a unit reaches."""
    model = Stack(depth=3)
    model.blocks[1]._hf_zero_packed = (("up.weight", "down.weight"), ("up.bias", "down.bias"))
    names = ("blocks.2.down.weight", "enter.weight", "blocks.2.up.weight", "blocks.0.up.weight")
    model._hf_zero_packed = (names,)
    found = owned(units_of(model)[0])
    orders = [[name.partition(f"blocks.{at}.")[2] for name in found[f"blocks.{at}"]]
              for at in range(3)]  # fmt: skip
    norm = ["norm.weight", "norm.bias"]
    assert orders == [
        [*norm, "up.weight", "up.bias", "down.weight", "down.bias"],
        [*norm, "up.weight", "down.weight", "up.bias", "down.bias"],
        [*norm, "down.weight", "up.weight", "up.bias", "down.bias"],
    ]
    model.blocks[0]._hf_zero_packed = (("up.weight", "left.weight"),)
    with pytest.raises(PartitionError, match=r"_hf_zero_packed of blocks.0 \(Block\).*left"):
        find_units(model)
