"""Tensors are found and replaced wherever modules may put them; what holds none, or did not
change, stays the same object.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_zero.zero.layout.tree import map_tensors, tensors_in
from tests.helpers.cells import in_one_item

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    rest: Any = None
    seen: int = dataclasses.field(default=7, init=False)


def t(value):
    return torch.full((2,), float(value))


def plus_ten(tensor):
    return tensor + 10


def firsts(value):
    return [float(tensor.flatten()[0]) for tensor in tensors_in(value)]


CONTAINERS: dict[str, Any] = {
    "a tensor": t(1),
    "ordered dict": OrderedDict(b=t(1), a=t(2)),
    "default dict": defaultdict(list, {"a": t(1)}),
    "batch encoding": BatchEncoding({"input_ids": t(1), "mask": t(2)}),
    "struct sequence of torch": torch.max(torch.tensor([[1.0, 0.5]]), dim=1),
    "model output": CausalLMOutputWithPast(loss=t(1), logits=t(2), hidden_states=(t(3), t(4))),
    "all of them": [
        Pair(("s", t(1)), OrderedDict(k=(t(2), Frozen(t(3), {"z": [t(4), None]})))),
        {"e": (), "f": t(5)},
    ],
}


@in_one_item(CONTAINERS)
def test_every_tensor_is_replaced_and_the_container_keeps_its_class(name):
    value = CONTAINERS[name]
    before = firsts(value)
    visited: list[torch.Tensor] = []
    assert map_tensors(value, lambda tensor: visited.append(tensor) or tensor) is value
    assert [id(tensor) for tensor in visited] == [id(tensor) for tensor in tensors_in(value)]
    changed = map_tensors(value, plus_ten)
    assert type(changed) is type(value) and changed is not value
    assert firsts(changed) == [number + 10 for number in before] and before
    assert firsts(value) == before, "the original was changed"


def test_in_place_lists_and_dicts_stay_the_objects_that_were_passed():
    """Whoever passed a list may wait for what a module appends to it."""
    inner, outer = [t(1)], {"a": t(2), "b": 3}
    given = (inner, outer, [t(3), inner])
    changed = map_tensors(given, plus_ten, in_place=True)
    assert changed[0] is inner and changed[1] is outer and changed[2] is given[2]
    assert float(inner[0][0]) >= 11 and float(outer["a"][0]) == 12
    assert float(given[2][0][0]) == 13 and outer["b"] == 3
    frozen = Frozen(t(1), inner)
    assert map_tensors(frozen, plus_ten, in_place=True).rest is inner
    assert float(frozen.hidden[0]) == 1
    kept, other = {"a": t(1)}, [t(2)]
    changed = map_tensors((kept, other), lambda each: each + 1 if each is other[0] else each)
    assert changed[0] is kept and changed[1] is not other, "the changed branch alone is rebuilt"


def test_the_rest_of_a_container_survives():
    assert list(map_tensors(OrderedDict(b=t(1), a=3), plus_ten)) == ["b", "a"]
    assert map_tensors(CONTAINERS["default dict"], plus_ten).default_factory is list
    assert map_tensors(Frozen(t(1)), plus_ten).seen == 7
    output = CausalLMOutputWithPast(loss=None, logits=t(2))
    output["aux"], output.note = t(3), "kept"
    changed = map_tensors(output, plus_ten)
    assert list(changed) == ["logits", "aux"] and changed.note == "kept" and changed.loss is None
    assert firsts(changed) == [12, 13] and float(changed.logits[0]) == 12
    assert float(output.logits[0]) == 2


def test_unknown_objects_are_searched_one_level_and_reported():
    """As transformers' caches are."""
    cache = SimpleNamespace(keys=[t(1), t(2)], deeper=SimpleNamespace(hidden=t(3)))
    unknown: list[Any] = []
    assert firsts({"cache": cache, "x": t(9)}) == [1, 2, 9]
    list(tensors_in({"cache": cache}, unknown))
    assert unknown == [cache] and map_tensors(cache, plus_ten) is cache
    assert firsts({t(4)}) == [4] and firsts(frozenset([t(5)])) == [5]
    assert firsts(BatchEncoding({"input_ids": t(1), "mask": t(2)})) == [1, 2]
