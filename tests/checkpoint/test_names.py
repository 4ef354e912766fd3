"""Names that wrappers changed, and optimizer states that were saved without any."""

from __future__ import annotations

import torch

from hf_zero.checkpoint.foreign.optimizer_states import (
    Shape,
    as_asked,
    by_contents,
    by_shapes,
)
from hf_zero.checkpoint.manifest import pair_names, strip_wrappers

SHAPES = {
    "up.weight": (4, 3),
    "up.bias": (4,),
    "down.weight": (3, 4),
    "down.bias": (3,),
    "frozen.bias": (3,),
}


def test_wrappers_are_no_part_of_a_name() -> None:
    assert (
        strip_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.norm.weight")
        == "layers.0.norm.weight"
    )
    assert strip_wrappers("layers._fsdp_wrapped_module.weight") == "layers.weight"
    assert strip_wrappers("my_orig_mod.weight") == "my_orig_mod.weight"


def test_names_are_paired_past_wrappers() -> None:
    assert pair_names(["a.weight", "b.weight"], ["module.a.weight", "_orig_mod.b.weight"]) == {
        "a.weight": "module.a.weight",
        "b.weight": "_orig_mod.b.weight",
    }
    assert pair_names(["module.a"], ["a"]) == {"module.a": "a"}
    assert pair_names(["a", "module.a"], ["a", "module.a"]) == {"a": "a", "module.a": "module.a"}, (
        "the same name comes first"
    )
    assert pair_names(["a"], ["_orig_mod.a", "module.a"]) == {}, "either of two is a guess"


def test_by_the_model_that_asks() -> None:
    wanted: list[list[Shape | None]] = [[(4, 3), (3, 4)], [(4,), None]]
    asked = [
        ["_orig_mod.up.weight", "_orig_mod.down.weight"],
        ["_orig_mod.up.bias", "_orig_mod.down.bias"],
    ]
    assert as_asked(wanted, asked, SHAPES) == [
        ["up.weight", "down.weight"],
        ["up.bias", "down.bias"],
    ]
    assert as_asked(wanted, asked[::-1], SHAPES) is None
    assert as_asked(wanted, asked[:1], SHAPES) is None
    assert as_asked(wanted, [["up.weight", "else"], ["up.bias", "down.bias"]], SHAPES) is None


def test_by_shapes_only_where_they_tell() -> None:
    assert by_shapes([[(4, 3), (3, 4)], [(4,)]], SHAPES) == [
        ["up.weight", "down.weight"],
        ["up.bias"],
    ]
    assert by_shapes([[(4, 3)], [(3,)]], SHAPES) is None, "two have this shape"
    assert by_shapes([[(4, 3)], [(4, 3)]], SHAPES) is None
    assert by_shapes([[None]], SHAPES) is None


def test_by_the_values_of_masters() -> None:
    masters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    held = {name: tensor.bfloat16() for name, tensor in masters.items()}
    # in no order of the model's, and without the others
    chosen = [["down.bias", "up.weight"], ["up.bias"]]
    joined = [[torch.cat([masters[name].flatten() for name in names])] for names in chosen]
    assert by_contents([[masters[name] for name in names] for names in chosen], held) == chosen
    assert by_contents(joined, held) == chosen
    assert by_contents([[torch.randn(3)]], held) is None
    assert by_contents([[joined[0][0][:-1]]], held) is None, "a parameter is there whole"


def test_equal_values_are_taken_in_the_models_order() -> None:
    held = {"a.bias": torch.zeros(3), "b.weight": torch.ones(2), "b.bias": torch.zeros(3)}
    assert by_contents([[torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])]], held) == [
        ["b.weight", "b.bias"]
    ]
    held = {"two": torch.zeros(2), "three": torch.zeros(3), "five": torch.zeros(5)}
    assert by_contents([[torch.zeros(5), torch.zeros(2)]], held) == [["five", "two"]], (
        "a tensor each is a parameter each"
    )
