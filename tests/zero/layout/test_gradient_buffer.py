"""Contents of a gradient buffer after each of its moves and of a script's writes; state of a unit
that its owner alone changes.
"""

import ast
from functools import cache
from pathlib import Path

import torch

from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.flat_spec import FlatSpec
from hf_zero.zero.layout.training_state import GradientBuffer, GradState
from tests.helpers.cells import in_one_item

WHOLE, OWNED = 16, (8, 16)  # elements, of which rank 1 of 2 owns the second half


def buffer(whole=True, offloaded=False):
    layout = FlatLayout.build([("a", (6,)), ("b", (10,))], 2)
    made = GradientBuffer(
        FlatSpec(0, "key", layout, torch.float32, True, False, False, True, OWNED)
    )
    shard = torch.zeros(8) if offloaded or not whole else None
    made.allocate(shard, torch.zeros(WHOLE) if whole else None, offloaded=offloaded)
    return made


def test_the_shard_is_a_part_of_the_accumulated_gradient_unless_it_is_offloaded():
    made, apart = buffer(), buffer(offloaded=True)
    for each in (made, apart):
        assert each.accumulated_grad is not None and each.shard is not None
        each.accumulated_grad[8:] = 3.0
    assert made.shard is not None and made.shard.eq(3).all()
    assert apart.shard is not None and not apart.shard.any()


def test_a_reduction_of_later_gradients_is_added_to_the_first():
    """One average is not averaged again: it is set aside, and added to the next."""
    made = buffer()
    assert made.accumulated_grad is not None and made.shard is not None
    made.mark_accumulated(0b01)
    assert made.state is GradState.UNREDUCED and not made.has_reduced
    made.shard.fill_(2.0)  # the result of the first reduction
    made.mark_reduced()
    made.keep_reduced()
    made.mark_accumulated(0b10)
    assert made.state is GradState.BOTH and not made.adds_to_shard
    assert made.used == made.all_used == 0b11
    made.accumulated_grad.fill_(5.0)
    made.mark_reduced()
    assert made.state is GradState.REDUCED and made.shard.eq(7).all() and made.pending_grad is None
    made.clear()
    assert made.state is GradState.EMPTY and not made.holds_gradient and made.used == 0


@in_one_item((True, False))
def test_a_shard_of_its_own_is_added_to_by_the_reduction(whole):
    made = buffer(whole, offloaded=True)
    made.mark_reduced()
    made.keep_reduced()
    assert made.adds_to_shard and made.pending_grad is None


def test_a_write_replaces_what_is_reduced_and_what_is_not_counts_once():
    """After it the gradient is the value: in unreduced gradients, where there are any."""
    value = torch.arange(10.0)
    made = buffer()
    assert made.accumulated_grad is not None and made.shard is not None
    made.shard.fill_(9.0)
    made.mark_reduced()
    made.write("b", value, 0.5, 2.0)  # 4 elements of b are rank 0's: 6 to 8 of the buffer
    assert made.shard.tolist() == (2 * value[2:]).tolist()
    made.keep_reduced()
    made.mark_accumulated()
    made.write("b", value, 0.5, 2.0)
    assert made.pending_grad is not None and not made.pending_grad.any()
    assert made.accumulated_grad[6:].tolist() == (0.5 * value).tolist()
    made.write("b", None, 0.5, 2.0)
    assert not made.accumulated_grad[6:].any() and made.used == 0


@in_one_item((True, False))
def test_an_upcast_keeps_what_is_held(holds):
    made = buffer()
    made.allocate(None, torch.full((WHOLE,), 1.5, dtype=torch.bfloat16), True)
    made._others = [made]
    if holds:
        made.mark_accumulated()
    made.upcast()
    assert made.accumulated_grad is not None and made.shard is not None
    assert made.accumulated_grad.dtype == torch.float32 and not made.upcast_on_accumulate
    assert made.shard.data_ptr() == made.accumulated_grad[8:].data_ptr()
    assert made.accumulated_grad.eq(1.5 if holds else 0.0).all()


PACKAGE = Path(__file__).parents[3] / "hf_zero"
OWNERS = {
    "FlatBuffer": "zero/layout/flat_buffer.py",
    "GradientBuffer": "zero/layout/training_state.py",
    "OptimizerShard": "zero/layout/training_state.py",
}
# How the package names what holds one of these objects: the receivers of attributes whose names
# other classes have, too.
NAMES = {"flat", "gradient", "optimizer_shard", "shard"}


def owned(tree):
    """Attributes that the methods of a class set on ``self``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


@cache
def trees():
    """The files of the package, by their paths in it."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def others():
    return {path: tree for path, tree in trees().items() if path not in OWNERS.values()}


@cache
def attributes():
    """The attributes of the three objects, and those that other classes have, too."""
    own = {
        attribute
        for name, path in OWNERS.items()
        for node in ast.walk(trees()[path])
        if isinstance(node, ast.ClassDef) and node.name == name
        for attribute in owned(node)
    }
    return own, {attribute for tree in others().values() for attribute in owned(tree)}


def writes(tree):
    """Assignments in ``tree``, also augmented ones and ``del``, to an attribute of these
    objects.
    """
    (own, shared), found = attributes(), []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and node.attr in own
        ):
            receiver = node.value
            last = receiver.attr if isinstance(receiver, ast.Attribute) else ast.unparse(receiver)
            theirs = last in NAMES or last.endswith(("_flat", "_gradient"))
            if theirs or node.attr not in shared:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_file_writes_the_state_of_another():
    found = {path: writes(tree) for path, tree in others().items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


LINES = (
    "flat.gradient.state = GradState.EMPTY",
    "flat.full, x = 1, 2",
    "unit.flats[0].gradient.used |= 3",
    "del self._flat.full",
    "each.grad_sq_norm = None",
)


@in_one_item(LINES)
def test_such_a_write_is_found(line):
    assert len(writes(ast.parse(line))) == 1
