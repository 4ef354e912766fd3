"""Layouts are DeepSpeed's: golden digests made with its sparsity_config.py, and what the
definitions say of small ones.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from typing import Any

import pytest
import torch

from hf_zero.errors import ConfigError, KernelError
from hf_zero.ops import sparse_attention as sparse
from hf_zero.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BlockLayout,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    from_section,
    sparsity_config,
)
from tests.helpers.cells import in_one_item

PER_HEAD = {"different_layout_per_head": True}
UNIDIRECTIONAL = {"attention": "unidirectional"}
TWO = {"num_heads": 2}
NOT_RANDOM = {**TWO, "num_random_blocks": 0}
PATTERNS = {**PER_HEAD, "num_different_global_patterns": 3, "horizontal_global_attention": True}
WINDOWS = {"local_window_blocks": [1, 3, 2], "global_block_indices": [0, 5, 40]}
ENDS = {"global_block_indices": [1, 7], "global_block_end_indices": [3, 99], **UNIDIRECTIONAL}
LONG = {"global_block_indices": [0, 4], "global_block_end_indices": [2, 6], **UNIDIRECTIONAL}
WIDE = {"num_sliding_window_blocks": 5, "num_global_blocks": 2, **UNIDIRECTIONAL}
# The first 16 digits of the SHA-256 of the layout of 23 blocks, as bytes.
GOLDEN: list[tuple[str, dict[str, Any], str]] = [
    ("Dense", TWO, "bfaec1be8b1e87c9"),
    ("Fixed", TWO, "b6f3053c53e24c0f"),
    ("Fixed", {"num_heads": 4, "num_different_global_patterns": 4, **PER_HEAD}, "f21dcc3f4d18d1b7"),
    (
        "Fixed",
        {"num_heads": 5, "num_local_blocks": 6, "num_global_blocks": 2, **PATTERNS},
        "b9ead313871f325b",
    ),
    ("Fixed", {**TWO, "num_global_blocks": 2, **UNIDIRECTIONAL}, "5ff603f1a70e5aff"),
    ("Variable", TWO, "c6e025597a2a47c9"),
    ("Variable", {**TWO, **WINDOWS, "horizontal_global_attention": True}, "fc54d0bc09f0dadc"),
    ("Variable", {**TWO, "local_window_blocks": [50, 3], **ENDS}, "e7b10350d47f305e"),
    ("BigBird", NOT_RANDOM, "0ebe5b049095b547"),
    ("BigBird", {**NOT_RANDOM, **WIDE}, "9f5a24e2ce44ceae"),
    ("BSLongformer", TWO, "0ebe5b049095b547"),
    ("BSLongformer", {**TWO, "num_sliding_window_blocks": 4, **LONG}, "784a345612b96093"),
    ("LocalSlidingWindow", TWO, "bf67470fbddb4aa7"),
    (
        "LocalSlidingWindow",
        {**TWO, "num_sliding_window_blocks": 5, "attention": "bidirectional"},
        "843b09b05b1897e3",
    ),
]


def test_layouts_are_deepspeeds() -> None:
    for name, arguments, digest in GOLDEN:
        layout = getattr(sparse, f"{name}SparsityConfig")(**arguments).make_layout(16 * 23)
        assert layout.dtype == torch.int64 and layout.shape == (arguments["num_heads"], 23, 23)
        found = hashlib.sha256(layout.numpy().astype("uint8").tobytes()).hexdigest()
        assert found[:16] == digest, (name, arguments)


@in_one_item([BigBirdSparsityConfig, VariableSparsityConfig])
def test_random_blocks_agree_among_ranks_and_leave_torch_alone(kind: Any) -> None:
    state = torch.get_rng_state()
    without = kind(3, num_random_blocks=0).make_layout(640)
    layout = kind(3, num_random_blocks=4).make_layout(640)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layout, kind(3, num_random_blocks=4).make_layout(640))
    assert not torch.equal(layout, kind(3, num_random_blocks=4, seed=1).make_layout(640))
    added = (layout - without).sum(-1)
    assert (added <= 4).all() and added.sum() > 3 * 40
    heads = kind(3, num_random_blocks=4, different_layout_per_head=True).make_layout(640)
    assert not torch.equal(heads[0], heads[1])


def test_a_sequence_shorter_than_the_pattern_is_attended_to_whole() -> None:
    sizes = {"num_random_blocks": 3, "num_sliding_window_blocks": 7, "num_global_blocks": 3}
    whole = torch.ones(2, 2, dtype=torch.int64)
    for attention, want in (("unidirectional", whole.tril()), ("bidirectional", whole)):
        config = BigBirdSparsityConfig(1, **sizes, attention=attention)
        assert torch.equal(config.make_layout(32)[0], want)
    config = FixedSparsityConfig(1, num_local_blocks=2, attention="unidirectional")
    spelled = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert config.make_layout(64)[0].tolist() == spelled


def test_negative_blocks_count_from_the_end() -> None:
    """As indices and slices of tensors do, by which DeepSpeed writes them."""
    horizontal = {"horizontal_global_attention": True}
    for kind, more in (
        (VariableSparsityConfig, {}),
        (VariableSparsityConfig, horizontal),
        (VariableSparsityConfig, UNIDIRECTIONAL),
        (sparse.BSLongformerSparsityConfig, {}),
    ):

        def layout(*starts: int, ends: Any = None, kind: Any = kind, more: Any = more) -> Any:
            spans = {"global_block_indices": starts, "global_block_end_indices": ends}
            return kind(1, **spans, **more).make_layout(16 * 9)

        assert torch.equal(layout(-1, -4), layout(8, 5))
        assert torch.equal(layout(-3, ends=[-1]), layout(6, ends=[8]))
        assert torch.equal(layout(-2, ends=[99]), layout(7, ends=[9]))
        assert torch.equal(layout(1, ends=[-6]), layout(1, ends=[3]))
        assert torch.equal(layout(-99), layout(99))  # no block of this sequence


def held(config: Any) -> None:
    SparsityConfig.__init__(config, 1)
    config.own = lambda: None


def test_equal_configurations_are_one_and_do_not_change() -> None:
    one, same, other = (BigBirdSparsityConfig(2, block=block) for block in (16, 16, 32))
    assert one == same == copy.deepcopy(one) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(same) and one != other
    assert one.handle == same.handle != other.handle
    assert "block=32" in repr(other) and "handle" not in repr(other)
    with pytest.raises(KernelError, match="cannot change"):
        one.block = 64
    own = type("Own", (SparsityConfig,), {"__init__": held})  # cannot be pickled: like itself alone
    assert own() != own()
    with pytest.raises(NotImplementedError, match="no pattern"):
        own().make_layout(16)


def test_a_number_is_known_once_it_has_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbers(dict[Any, int]):
        def __setitem__(self, key: Any, number: int) -> None:
            assert isinstance(sparsity_config.config_of(number), DenseSparsityConfig)
            super().__setitem__(key, number)

        def setdefault(self, key: Any, number: int = 0) -> int:
            self[key] = number
            return number

    monkeypatch.setattr(sparsity_config, "_HANDLES", Numbers())
    assert DenseSparsityConfig(2, 16) == DenseSparsityConfig(2, 16)


Fixed, Variable = FixedSparsityConfig, VariableSparsityConfig
WRONG: list[tuple[Any, str]] = [
    (lambda: DenseSparsityConfig(0), "num_heads is 0"),
    (lambda: DenseSparsityConfig(1).make_layout(17), "not a multiple of the block"),
    (lambda: Fixed(1, num_local_blocks=4, num_global_blocks=3), "multiple of num_global_blocks"),
    (lambda: Fixed(1, num_different_global_patterns=2), "at most 1"),
    (lambda: Fixed(1, attention="both"), "'both'"),
    (lambda: Fixed(1, **UNIDIRECTIONAL, horizontal_global_attention=True), "needs bidirectional"),
    (lambda: Variable(1, local_window_blocks=[]), "local_window_blocks"),
    (
        lambda: Variable(1, global_block_indices=[3], global_block_end_indices=[3]),
        "each below its end",
    ),
    (
        lambda: Variable(1, global_block_indices=[-2], global_block_end_indices=[0]),
        "each below its end",
    ),
    (lambda: Variable(1, global_block_indices="0"), "lists of integers"),
    (lambda: Variable(1, local_window_blocks=[2.5]), r"local_window_blocks is \[2\.5\]"),
    (lambda: Variable(1, num_random_blocks=1.5), r"num_random_blocks is 1\.5"),
    (lambda: Fixed(1, num_local_blocks=4.0), r"num_local_blocks is 4\.0"),
    (lambda: BigBirdSparsityConfig(1, seed="x"), "seed is 'x'; write an integer"),
    (lambda: LocalSlidingWindowSparsityConfig(1, attention="past"), "'past'"),
    (lambda: BlockLayout(torch.ones(2, 3), 16), "has the shape"),
    (lambda: BigBirdSparsityConfig(1, num_global_blocks=-1), "num_global_blocks is -1"),
    (lambda: BigBirdSparsityConfig(1, num_random_blocks=-1), "num_random_blocks is -1"),
    (lambda: Variable(1, num_random_blocks=-2), "num_random_blocks is -2"),
    (
        lambda: sparse.BSLongformerSparsityConfig(1, num_sliding_window_blocks=-3),
        "num_sliding_window_blocks is -3",
    ),
    (lambda: LocalSlidingWindowSparsityConfig(1, num_sliding_window_blocks=-3), "is -3; write"),
]


def test_what_makes_no_layout_is_named() -> None:
    for made, said in WRONG:
        with pytest.raises(KernelError, match=said):
            made()


def test_deepspeeds_section() -> None:
    patterns = {"num_local_blocks": 4, "num_different_global_patterns": 4}
    section = {"mode": "fixed", "block": 32, **PER_HEAD, **patterns, "attention": "bidirectional"}
    section |= {"num_random_blocks": 0, "num_sliding_window_blocks": 3}
    assert from_section(section, 8) == FixedSparsityConfig(8, 32, True, **patterns)
    assert from_section({}, 8) == FixedSparsityConfig(8)
    window = from_section({"mode": "local_sliding_window"}, 8)
    assert isinstance(window, LocalSlidingWindowSparsityConfig)
    for wrong, said in (
        ({"mode": "sparse"}, "must be one of"),
        ({"mode": ["fixed"]}, "must be one of"),
        ({"mode": "bigbird", "num_global_blocks": -1}, "mode 'bigbird': num_global_blocks is -1"),
        ({"blocks": 16}, "no key 'blocks'"),
        ({"mode": "fixed", "num_global_blocks": 3}, "multiple of num_global_blocks"),
        ({"mode": "fixed", "block": "64"}, "mode 'fixed'"),
    ):
        with pytest.raises(ConfigError, match=said):
            from_section(wrong, 8)
