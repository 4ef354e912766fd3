"""Blocks that cannot be cut or left out, refused in the first forward in training by class, release
and remedy, and the roles of a block's arguments, whatever their names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.techniques.token_cut import TokenCut
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, start
from tests.helpers.layer_drop import DEPTH, LayerDropJob
from tests.helpers.models import LENGTH, floats, seeded, tokens
from tests.helpers.token_drop import TokenDropJob, section
from tests.helpers.training import plain_sgd

JOBS = {"layers": LayerDropJob("gpt2"), "tokens": TokenDropJob("gpt2")}
ROWS, READ = 2, 4


def opened(model: Any, **keys: Any) -> Any:
    return start(model, plain_sgd(model), config_of(0, **keys))


@in_one_item([*JOBS])
def test_blocks_that_a_model_runs_without_calling_them(what: str) -> None:
    """The error comes in the first step, in which layer dropping still keeps all blocks."""
    model: Any = JOBS[what].build()
    blocks = [*model.transformer.h]
    uncalled = blocks[2]

    class Direct(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return uncalled.forward(*args, **kwargs)

    plain = type(model.transformer).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.h = nn.ModuleList([*blocks[:2], Direct(), *blocks[3:]])
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.h = nn.ModuleList(blocks)

    model.transformer.forward = forward.__get__(model.transformer)
    engine = opened(model, **JOBS[what].keys)
    ids = tokens(0, 0, 0)
    with torch.no_grad():
        engine(input_ids=ids)
    engine.eval()
    engine(input_ids=ids)
    engine.train()
    release = rf"GPT2Block of transformers {transformers.__version__}"
    with pytest.raises(ConfigError, match=f"has no effect on {release}.* call the block itself"):
        engine(input_ids=ids)
    engine.destroy()


def bare(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps neither the names nor the signature of what it wraps."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


class Odd(nn.Module):
    """A block whose argument names say nothing, and whose output may ignore what it was given."""

    given: int = 0

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.layer, self.whole = nn.Linear(8, 8), whole

    @bare
    def forward(self, this: Any, that: torch.Tensor, past: Any = None) -> torch.Tensor:
        assert this.dtype == torch.bool and (past is None or that.shape[1] == LENGTH)
        Odd.given = that.shape[1]
        out: torch.Tensor = that + self.layer(that) * this[..., None]
        return out.repeat(1, 3, 1)[:, :LENGTH] if self.whole else out


class Odds(nn.Module):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(whole) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache, mask = transformers.DynamicCache(), torch.ones(x.shape[:2], dtype=torch.bool)
        for layer in self.layers:
            x = layer(mask, that=x, past=cache)
        return x


def test_roles_hold_where_a_decorator_hides_the_signature() -> None:
    engine = opened(seeded(Odds), **section([1]))
    engine(floats(0, 0, 0, ROWS, LENGTH, 8))
    assert Odd.given == LENGTH, "the last block reads all tokens"
    engine.destroy()
    engine = opened(seeded(Odds), **section([2]))
    out = engine(floats(0, 0, 0, ROWS, LENGTH, 8))
    assert Odd.given == READ and out.shape[1] == LENGTH
    engine.destroy()


def test_a_block_whose_output_is_not_cut() -> None:
    engine = opened(seeded(lambda: Odds(whole=True)), **section([1]))
    x = floats(0, 0, 0, ROWS, LENGTH, 8)
    with pytest.raises(ConfigError, match=rf"tokens of Odd: for a .* {READ}, 8\] it returns"):
        engine(x)
    engine.counters.global_steps = 1000  # the schedule has reached all tokens
    engine(x)
    engine.destroy()


def test_a_block_without_a_hidden_state() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Counts() for _ in range(DEPTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                ids = layer(ids)
            return ids * self.layers[0].scale  # type: ignore[operator]

    engine = opened(Model(), **section([1]))
    with pytest.raises(ConfigError, match="tokens of Counts: its hidden state has no dimensions"):
        engine(tokens(0, 0, 0))
    engine.destroy()


def cut_of(value: Any, name: str = "this") -> Any:
    kept = torch.arange(READ).expand(ROWS, READ) + torch.tensor([[0], [1]])
    block = nn.Identity()
    cut = TokenCut(block, kept, LENGTH, "mask", lambda block, why: ConfigError(why))
    return cut.arguments((), {name: value}, None, None)[1][name]


def shaped(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


S, R = LENGTH, READ


@in_one_item(
    [
        ("positions", shaped(1, S, dtype=torch.long), (ROWS, R)),
        ("a padding mask", shaped(ROWS, S, dtype=torch.bool), (ROWS, R)),
        ("embeddings", shaped(1, S, 4), (ROWS, R, 4)),
        ("a mask of keys", shaped(ROWS, 1, 1, S), (ROWS, 1, 1, R)),
        ("a causal mask", shaped(1, 1, S, S, dtype=torch.bool), (ROWS, 1, R, R)),
        ("a bias of each head", shaped(1, 3, S, S), (ROWS, 3, R, R)),
        ("a bias of as many heads", shaped(1, S, S, S), (ROWS, S, R, R)),
        ("heads first", shaped(1, 1, S, 4), (ROWS, 1, R, 4)),
        ("heads last", shaped(ROWS, S, 2, 4), (ROWS, R, 2, 4)),
        ("another length", shaped(ROWS, S + 1, 4), (ROWS, S + 1, 4)),
    ]
)
def test_a_role_is_a_shape(case: Any) -> None:
    _, value, expected = case
    assert cut_of(value).shape == expected


def test_containers_caches_and_other_sequences() -> None:
    pair = cut_of((shaped(1, 1, S, S), shaped(1, 1, S, S)))
    assert [each.shape for each in pair] == [(ROWS, 1, R, S)] * 2, "embeddings as wide as S"
    assert [each.shape for each in cut_of([shaped(1, S, 4)])] == [(ROWS, R, 4)]
    inside = cut_of({"full": shaped(1, 1, S, S), "none": None})
    assert inside["full"].shape == (ROWS, 1, R, R) and inside["none"] is None
    assert cut_of(transformers.DynamicCache()) is None
    assert cut_of(((shaped(1, 1, S, 4),) * 2,)) is None
    assert cut_of(shaped(ROWS, S, S), "mask").shape == (ROWS, R, R)
    for name in ("encoder_hidden_states", "memory", "cross_attention_states"):
        assert cut_of(shaped(ROWS, S, 4), name).shape == (ROWS, S, 4)
    assert cut_of(3) == 3 and cut_of(None) is None and cut_of(None, "cu_seq_lens_q") is None


@in_one_item(
    [
        (shaped(S, 4), r"this is a tensor of shape \[9, 4\]"),
        (shaped(S + 1, S, 4), r"this is a tensor of shape \[10, 9, 4\]"),
        (shaped(ROWS, S, S, 4), "this is a tensor of shape"),
        (SimpleNamespace(lengths=shaped(3)), "this is a SimpleNamespace, whose tensors"),
    ]
)
def test_what_has_no_known_role_is_refused(case: Any) -> None:
    with pytest.raises(ConfigError, match=case[1]):
        cut_of(case[0])
