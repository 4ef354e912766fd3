"""What operations cannot take is refused by name: one table of calls and of what the error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import KernelError
from hf_zero.ops.activations import gelu, swiglu, swiglu_packed
from hf_zero.ops.flat_optimizers import FlatRun, RowSettings, Tiles, adam_, advance_, lion_
from hf_zero.ops.flat_optimizers import settings_table as settings_of
from hf_zero.ops.flat_tiles import squared_norms
from hf_zero.ops.host import adagrad, adam, lamb_apply, lamb_measure, sgd
from hf_zero.ops.level_rounding import round_to_levels
from hf_zero.ops.masked_rows import select_rows
from hf_zero.ops.moment_blocks import Blocks
from hf_zero.ops.norms import layer_norm_of_sum
from hf_zero.ops.packed_linear import pack_, packed_linear
from hf_zero.ops.residual import dropout_add
from hf_zero.ops.rotary import rotary
from hf_zero.ops.sign_blocks import SignBlocks
from hf_zero.ops.sparse_attention import BlockLayout, DenseSparsityConfig, FixedSparsityConfig
from hf_zero.ops.sparse_attention import sparse_attention as attend
from hf_zero.ops.symmetric_blocks import SymmetricBlocks
from hf_zero.zero.layout.initial_values import pending
from tests.helpers.buffers import reference
from tests.helpers.cells import in_one_item

Row = tuple[Callable[[], object], str]
F64, I32, I64, I8 = torch.float64, torch.int32, torch.int64, torch.int8


def zeros(*shape: int, of: torch.dtype = torch.float32, on: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=of, device=on)


X, Q, K, ANGLE = zeros(3, 8), zeros(1, 2, 3, 8), zeros(1, 1, 3, 8), zeros(1, 3, 8)
TWICE, ODD = ANGLE.expand(2, 3, 8), ANGLE[..., :3]
TRAINED = zeros(1, 3, 8).requires_grad_()
ELEMENTWISE: list[Row] = [
    (lambda: gelu(X.int()), "gelu: x is torch.int32"),
    (lambda: gelu(torch.tensor(1.0)), "gelu: x has no axis"),
    (lambda: gelu(X, zeros(7)), r"gelu: bias has shape \[7\]"),
    (lambda: gelu(X, zeros(8, on="meta")), "gelu: bias is on meta"),
    (lambda: gelu(X, approximate="fast"), "gelu: approximate='fast'"),
    (lambda: swiglu(X, X.half()), "swiglu: gate is torch.float32 and up torch.float16"),
    (lambda: swiglu_packed(X[:, :7]), "swiglu_packed: gate_up has width 7"),
    (lambda: dropout_add(X, X[:2]), r"dropout_add: x has shape \[3, 8\] and residual \[2, 8\]"),
    (lambda: dropout_add(X, X, dropout=1.5), "dropout=1.5"),
    (lambda: rotary(Q.int(), K, ANGLE, ANGLE), "rotary: q is torch.int32"),
    (lambda: rotary(Q, K.half(), ANGLE, ANGLE), "q is torch.float32 and k torch.float16"),
    (lambda: rotary(Q, K.to("meta"), ANGLE, ANGLE), "k is on meta and q on cpu"),
    (lambda: rotary(Q, K[:, :, :2], ANGLE, ANGLE), r"k \[1, 1, 2, 8\]"),
    (lambda: rotary(Q, K, ANGLE[:, :2], ANGLE), r"cos has shape \[1, 2, 8\] and sin \[1, 3, 8\]"),
    (lambda: rotary(Q, K, TWICE, TWICE), "give both as"),
    (lambda: rotary(Q, K, ODD, ODD), "the rotary width is 3"),
    (lambda: rotary(Q, K, TRAINED, ANGLE), "cos or sin asks for a gradient"),
]


def normed(**more: Any) -> object:
    whole = {"x": zeros(2, 4), "residual": zeros(2, 4), "weight": zeros(4), "bias": zeros(4)}
    return layer_norm_of_sum(**{**whole, **more})


NORMS: list[Row] = [
    (lambda: normed(x=zeros(2, 4, of=I64)), "x must be floating point"),
    (lambda: normed(weight=zeros(5)), r"weight of a norm is \[5\].*must be \[4\]"),
    (lambda: normed(bias=zeros(4, on="meta")), "bias of a norm is on meta, x on cpu"),
    (lambda: normed(residual=zeros(1, 4)), r"residual of a norm is \[1, 4\]"),
    (lambda: normed(dropout=1.0), "dropout 1.0 of a norm"),
]

LABELS = zeros(4, of=I64)
LOSSES: list[Row] = [
    (lambda: select_rows(zeros(4, 6), LABELS[:3], capacity=2), r"hidden \(4, 6\) with labels"),
    (lambda: select_rows(zeros(4, 6), LABELS.to("meta"), capacity=2), "labels are on meta"),
]

WEIGHTS = [nn.Parameter(zeros(n, 12)) for n in (8, 4, 6)]
BIASES = [nn.Parameter(zeros(n)) for n in (8, 4, 6)]
ROWS = zeros(5, 12)
A = nn.Parameter(zeros(4, 6))
SHARED = [nn.Parameter(zeros(4, 6))]
SHARED.append(nn.Parameter(SHARED[0].detach()))
VIEW = nn.Parameter(zeros(8, 6)[2:4])
HOLDER = nn.Module()
HOLDER.a, HOLDER.alias = A, nn.Parameter(A.detach())


def released() -> nn.Parameter:
    """A parameter whose values are elsewhere."""
    nowhere = type("Nowhere", (), {"dtype": torch.float32, "sliceable": False})
    return pending((4, 6), nowhere())


def packs(*shape: int, **more: Any) -> None:
    pack_([A, nn.Parameter(zeros(*shape, **more))])


LINEAR: list[Row] = [
    (lambda: packed_linear(ROWS, []), "packed_linear: no weights"),
    (lambda: packed_linear(ROWS, WEIGHTS, BIASES[:2]), "2 biases for 3 weights"),
    (lambda: packed_linear(ROWS[:, :7], WEIGHTS), r"weight 0 has shape \[8, 12\] .* \[5, 7\]"),
    (lambda: packed_linear(ROWS, WEIGHTS, [BIASES[0]] * 3), r"bias 1 has shape \[8\]"),
    (lambda: packed_linear(ROWS.half(), WEIGHTS), "weight 0 is torch.float32 .* torch.float16"),
    (lambda: packs(4, 5), r"pack_: parameter 1 is torch.float32 \[4, 5\]"),
    (lambda: packs(4, 6, of=F64), "parameter 1 is torch.float64"),
    (lambda: packs(4, 6, on="meta"), "parameter 1 of shape .* has no values here"),
    (lambda: pack_([A, nn.Parameter(zeros(2, 6)), A]), "parameter 2 is given twice"),
    (lambda: pack_([A, VIEW]), "parameter 1 is a view of a larger buffer"),
    (lambda: pack_(SHARED), "two of the parameters share their memory"),
    (lambda: pack_([A, nn.Parameter(zeros(2, 6))], HOLDER), "alias shares the memory"),
    (lambda: pack_([released(), nn.Parameter(zeros(4, 6))]), "pack before the model is sharded"),
]


def attends(width: int = 16, layout: Any = None, **more: Any) -> object:
    given = {name: zeros(1, 2, 70, width) for name in "qkv"} | more
    layout = DenseSparsityConfig(2) if layout is None else layout
    return attend(given.pop("q"), given.pop("k"), given.pop("v"), layout, **given)


PER_HEAD = {"different_layout_per_head": True, "num_different_global_patterns": 4}
ATTENTION: list[Row] = [
    (lambda: attends(k=zeros(1, 2, 60, 16)), "self-attention"),
    (lambda: attends(q=zeros(1, 3, 70, 16)), "cannot share"),
    (lambda: attends(q=zeros(1, 2, 70, 16).half()), "one floating dtype"),
    (lambda: attends(q=zeros(1, 2, 70, 16, on="meta")), "one device"),
    (lambda: attends(dropout=1.0), "below 1"),
    (lambda: attends(key_padding_mask=zeros(1, 1, 70, 70)), "key_padding_mask"),
    (lambda: attends(layout=torch.ones(1, 4, 4)), "fits 70 tokens with no block"),
    (lambda: attends(layout=torch.ones(3, 3)), "has the shape"),
    (lambda: attends(layout=BlockLayout(torch.ones(1, 3, 3), 16)), "the layout has 3 blocks of 16"),
    (lambda: attends(layout=DenseSparsityConfig(2, block=24)), "blocks of 16, 32, 64"),
    (lambda: attends(layout=FixedSparsityConfig(4, **PER_HEAD)), "num_heads=2"),
    (lambda: attends(264), "at most 256"),
]


TILES = Tiles.cut([FlatRun(64, 0, 0, 0, 0, 0)], "cpu", 64)
ONE_ROW = settings_of([RowSettings(1e-3)], "cpu")
FLATS = {name: zeros(64) for name in ("master", "grad", "exp_avg", "exp_avg_sq")}


def updates(lion: bool, wrong: dict[str, torch.Tensor]) -> None:
    given = {**FLATS, "tiles": TILES, "coefficients": advance_(zeros(1), ONE_ROW), **wrong}
    if lion:
        del given["exp_avg_sq"]
    (lion_ if lion else adam_)(**given)


OF_UPDATES: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"grad": zeros(64, of=F64)}, "grad is torch.float64"),
    ({"exp_avg_sq": zeros(63)}, "exp_avg_sq has 63 elements"),
    ({"master": zeros(128)[::2]}, r"master has shape \(64,\) and strides \(2,\)"),
    ({"grad": zeros(64, on="meta")}, "grad is on meta and master on cpu"),
    ({"out": zeros(100)[1:]}, "out does not begin at a multiple of 16 bytes"),
    ({"coefficients": zeros(0, 16)}, "the tiles use 1 rows"),
    ({"coefficients": zeros(1, 16, of=F64)}, "coefficients is torch.float64"),
    ({"divisor": torch.ones(2)}, r"divisor is torch.float32 \(2,\)"),
    ({"found_inf": torch.tensor(True)}, "found_inf is torch.bool"),
]


META, ONES = zeros(2, on="meta"), torch.ones(2)
FLAT: list[Row] = [
    *((lambda wrong=wrong: updates(False, wrong), said) for wrong, said in OF_UPDATES),
    (lambda: updates(True, OF_UPDATES[0][0]), OF_UPDATES[0][1]),
    (lambda: Tiles.cut([], "cpu", 24), "a tile of 24 elements"),
    (lambda: Tiles.cut([FlatRun(4, 0, -1, 0, 0)], "cpu"), "negative length, row or place"),
    (lambda: advance_(zeros(2), ONE_ROW), r"settings are torch.float64 \(1, 9\) for 2 rows"),
    (lambda: advance_(zeros(1, of=I64), ONE_ROW), r"steps is torch\.int64"),
    (lambda: squared_norms([]), "there are no tensors"),
    (lambda: squared_norms([ONES, ONES.double()]), r"tensor 1 is torch\.float64"),
    (lambda: squared_norms([torch.ones(2, 2).t()]), r"tensor 0 has strides \(1, 2\)"),
    (lambda: squared_norms([ONES, META]), "tensor 1 is on meta and tensor 0 on cpu"),
    (lambda: round_to_levels(torch.ones(6), 4, 4), "round_to_levels: .* contiguous ones"),
    *((lambda n=n: round_to_levels(torch.ones(4), 4, n), f"in {n} parts") for n in (0, -1)),
    (lambda: round_to_levels(torch.ones(4), 4, noise=zeros(3)), "noise has 3 elements"),
    (lambda: round_to_levels(torch.ones(4), 4, noise=zeros(4, of=F64)), "noise .*float64"),
    (lambda: round_to_levels(torch.ones(4), 4, noise=torch.ones(8)[::2]), "noise .*strides"),
]

SIGNS = SignBlocks(32).cut((0,), 80, 2, 40)
MESSAGE, VALUES, NUMBERS = SIGNS.empty(torch.device("cpu")), zeros(80), zeros(2, 2)
EXPONENTS, UNIT, FIRST = zeros(80, of=I8), torch.ones(()), SIGNS.row(0)
FOUR = SymmetricBlocks(4)
NIBBLES = FOUR.quantize(torch.ones(16))
BLOCKS: list[Row] = [
    (lambda: SignBlocks(100), r"SignBlocks\(100\): there are blocks of 32"),
    (lambda: SIGNS.compress(VALUES.half(), VALUES, MESSAGE, 0.9, UNIT), "error is .*float16"),
    (lambda: SIGNS.compress(VALUES, VALUES, MESSAGE[:, :16], 0.9, UNIT), "rows of 32 bytes"),
    (lambda: SIGNS.compress(VALUES, VALUES, MESSAGE[:1], 0.9, UNIT), "1 messages for 2 chunks"),
    (lambda: SIGNS.apply(VALUES, MESSAGE, VALUES, NUMBERS, NUMBERS), "exponents is .*float32"),
    (lambda: SIGNS.apply(VALUES, MESSAGE, EXPONENTS, UNIT, NUMBERS), "keep is .*for each block"),
    (lambda: SymmetricBlocks(4, 100), "blocks of 32, 64, 128, 256, 512, 1024"),
    (lambda: FOUR.quantize(torch.ones(16), 3), "16 elements, which are not 3 equal rows"),
    (lambda: FOUR.quantize(torch.ones(16), 1, torch.ones(8)), r"minus is .* \(8,\)"),
    (
        lambda: FOUR.quantize(torch.ones(16), 1, zeros(16, of=F64)),
        r"minus is .*float64.* of one of",
    ),
    (lambda: FOUR.dequantize(NIBBLES, torch.ones(4000)), "contiguous rows of 2032 bytes"),
    (lambda: FOUR.dequantize_sum(NIBBLES, torch.ones(16).half()), "sums are taken in fp32"),
    (lambda: Blocks(zeros(8, of=torch.uint8), zeros(2), True), "Blocks: scales has 2 elements"),
]


ADAM = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
ADAM |= {"weight_decay": 0.0, "decoupled": True}


def steps(**wrong: Any) -> None:
    adam(**{**{name: zeros(8) for name in FLATS}, **ADAM, **wrong})


LAMB = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.1, "eps_inside": False}


def measured(place: int, wrong: torch.Tensor, applies: bool = False) -> None:
    given = [zeros(8) for _ in range(4)]
    given[place] = wrong
    if applies:
        lamb_apply(given[0], *given[2:], step_size=1.0, **LAMB)
    else:
        lamb_measure(*given, **LAMB)


SIGNED, RATES = Blocks.zeros(8, signed=True), {"lr": 0.1, "eps": 0.0, "weight_decay": 0.0}
HOST: list[Row] = [
    (lambda: steps(master=zeros(8, on="meta")), "adam: master is on meta"),
    (lambda: steps(grad=zeros(16)[::2]), r"adam: grad has shape \(8,\) and strides \(2,\)"),
    (lambda: steps(grad=zeros(7)), "adam: grad has 7 elements and the others have 8"),
    (lambda: steps(exp_avg=zeros(8).half()), "adam: exp_avg is torch.float16"),
    (lambda: steps(exp_avg_sq=SIGNED), "adam: exp_avg_sq needs Blocks without a sign"),
    (lambda: steps(exp_avg=SIGNED, first=8), "adam: first is 8 and exp_avg is in Blocks"),
    (lambda: steps(first=-1), "adam: first is -1"),
    (lambda: steps(step=0), "adam: step is 0"),
    (lambda: steps(step=torch.tensor(1.0)), "adam: step is tensor"),
    (lambda: steps(beta2=1.0), "adam: beta2 is 1.0"),
    (lambda: steps(beta1=-0.5), "adam: beta1 is -0.5"),
    (lambda: steps(beta1=float("inf")), "adam: beta1 is inf"),
    (lambda: steps(beta2=float("nan")), "adam: beta2 is nan"),
    (lambda: steps(beta2=1.5), "adam: beta2 is 1.5"),
    (lambda: steps(out=zeros(8, of=I8)), "adam: out is torch.int8"),
    (lambda: sgd(zeros(8), zeros(8), None, lr=0.1, momentum=0.9), "no momentum_buffer"),
    (lambda: adagrad(*[zeros(8)] * 3, step=0, **RATES), "adagrad: step is 0"),
    (lambda: measured(0, zeros(8, of=F64)), "master"),
    (lambda: measured(3, zeros(7)), "sq"),
    (lambda: measured(3, zeros(7), True), "sq"),
]


MODELS = [*ELEMENTWISE, *NORMS, *LOSSES, *LINEAR, *ATTENTION]


def is_refused(row: Row) -> None:
    with pytest.raises(KernelError, match=row[1]):
        row[0]()


@in_one_item([*MODELS, *FLAT, *BLOCKS, *HOST], lambda row: row[1])
def test_what_an_operation_cannot_take_is_named(row: Row) -> None:
    is_refused(row)
    if row in HOST:
        with reference():  # the same without the native core
            is_refused(row)
