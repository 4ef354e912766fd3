"""Matches between a checkpoint and an engine, as functions: names that wrappers changed, optimizer
states without names, groups by their parameters, ranges wanted from ranges stored; and work that is
deferred until saves end.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.checkpoint import save_job
from hf_zero.checkpoint.foreign.optimizer_states import Shape, as_asked, by_contents, by_shapes
from hf_zero.checkpoint.manifest import Chunk, FlatEntry, GroupEntry, pair_names, strip_wrappers
from hf_zero.checkpoint.match import pair_groups, reorder_schedule
from hf_zero.checkpoint.reader import copy_ranges
from hf_zero.zero.layout.flat_layout import FlatLayout

# ---- names ----


def test_wrappers_are_no_part_of_a_name() -> None:
    wrapped = "_orig_mod.layers.0._checkpoint_wrapped_module.norm.weight"
    assert strip_wrappers(wrapped) == "layers.0.norm.weight"
    assert strip_wrappers("layers._fsdp_wrapped_module.weight") == "layers.weight"
    assert strip_wrappers("my_orig_mod.weight") == "my_orig_mod.weight"
    there = ["module.a.weight", "_orig_mod.b.weight"]
    paired = dict(zip(["a.weight", "b.weight"], there))
    assert pair_names(["a.weight", "b.weight"], there) == paired
    assert pair_names(["module.a"], ["a"]) == {"module.a": "a"}
    both = ["a", "module.a"]
    assert pair_names(both, both) == {"a": "a", "module.a": "module.a"}, "the same name comes first"
    assert pair_names(["a"], ["_orig_mod.a", "module.a"]) == {}, "either of two is a guess"


SHAPES = {"up.weight": (4, 3), "up.bias": (4,), "down.weight": (3, 4), "down.bias": (3,)}
SHAPES["frozen.bias"] = (3,)


def test_states_by_the_model_that_asks_and_by_shapes_that_tell() -> None:
    wanted: list[list[Shape | None]] = [[(4, 3), (3, 4)], [(4,), None]]
    names = [["up.weight", "down.weight"], ["up.bias", "down.bias"]]
    asked = [[f"_orig_mod.{name}" for name in group] for group in names]
    assert as_asked(wanted, asked, SHAPES) == names
    assert as_asked(wanted, asked[::-1], SHAPES) is None
    assert as_asked(wanted, asked[:1], SHAPES) is None
    assert as_asked(wanted, [["up.weight", "else"], names[1]], SHAPES) is None
    assert by_shapes([[(4, 3), (3, 4)], [(4,)]], SHAPES) == [names[0], ["up.bias"]]
    assert by_shapes([[(4, 3)], [(3,)]], SHAPES) is None, "two have this shape"
    assert by_shapes([[(4, 3)], [(4, 3)]], SHAPES) is None
    assert by_shapes([[None]], SHAPES) is None


def test_states_by_the_values_of_masters() -> None:
    masters = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    held = {name: tensor.bfloat16() for name, tensor in masters.items()}
    # in no order of the model's, and without the others
    chosen = [["down.bias", "up.weight"], ["up.bias"]]
    joined = [[torch.cat([masters[name].flatten() for name in names])] for names in chosen]
    assert by_contents([[masters[name] for name in names] for names in chosen], held) == chosen
    assert by_contents(joined, held) == chosen
    assert by_contents([[torch.randn(3)]], held) is None
    assert by_contents([[joined[0][0][:-1]]], held) is None, "a parameter is there whole"
    # equal values are taken in the order of the model
    held = {"a.bias": torch.zeros(3), "b.weight": torch.ones(2), "b.bias": torch.zeros(3)}
    flat = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert by_contents([[flat]], held) == [["b.weight", "b.bias"]]
    held = {"two": torch.zeros(2), "three": torch.zeros(3), "five": torch.zeros(5)}
    each = by_contents([[torch.zeros(5), torch.zeros(2)]], held)
    assert each == [["five", "two"]], "a tensor each is a parameter each"


# ---- groups ----


def paired(saved: tuple[str, ...], *live: str) -> Any:
    entries = [GroupEntry({}, {}, tuple(names.split())) for names in saved]
    group_of = {name: index for index, names in enumerate(live) for name in names.split()}
    return pair_groups(group_of, len(live), entries, {name: name for name in group_of})


PAIRS = [
    (("a b", "c"), ("a b", "c"), [0, 1], []),
    (("a b", "c"), ("c", "b a"), [1, 0], []),
    (("a", "b", "c d"), ("c d", "a", "b"), [2, 0, 1], []),
    (("a", ""), ("", "a"), [1, 0], []),
    (("a", "", "b"), ("b", "", "a"), [2, 1, 0], []),
    (("", ""), ("a", "b"), [0, 1], []),  # a writer that does not say where parameters were
    (("a", "old"), ("a new", ""), [0, 1], []),
    (("a b c", "d"), ("a b", "d c"), [0, 1], ["c (0 there, 1 here)"]),
    (("a b", "c d"), ("c", "a b d"), [1, 0], ["d (1 there, 1 here)"]),
]


def test_groups_are_paired_by_their_parameters_and_a_schedule_follows() -> None:
    for saved, live, order, moved in PAIRS:
        assert paired(saved, *live) == (order, moved), (saved, live)
    last = {"_last_lr": (4, 5, 6), "lr_lambdas": [None]}
    state = {"base_lrs": [1, 2, 3], "last_epoch": 7, "_schedulers": [last]}
    state["_milestones"] = [1, 2, 3]
    assert reorder_schedule(state, [2, 0, 1]) == {
        "base_lrs": [3, 1, 2],
        "last_epoch": 7,
        "_milestones": [1, 2, 3],
        "_schedulers": [{"_last_lr": [6, 4, 5], "lr_lambdas": [None]}],
    }


# ---- ranges ----


def stored(names: list[str], sizes: dict[str, int], cuts: list[int], shards: int) -> Any:
    """Flats that hold ``names``, cut after the numbers in ``cuts``, each into ``shards`` chunks."""
    flats, rest = [], list(names)
    for cut in (*cuts, len(rest)):
        own, rest = rest[:cut], rest[cut:]
        layout = FlatLayout.build([(name, (sizes[name],)) for name in own], shards)
        chunks = tuple(Chunk(rank, *layout.rank_range(rank), ("master",)) for rank in range(shards))
        flats.append(FlatEntry(f"flat{len(flats)}", True, torch.float32, layout, chunks))
    slots = {slot.name: (flat, slot) for flat in flats for slot in flat.layout.slots}
    return SimpleNamespace(slots=slots, parts={name: [placed] for name, placed in slots.items()})


@settings(max_examples=80)
@given(st.data())
def test_every_element_comes_from_its_place(data: st.DataObject) -> None:
    """Against a dictionary of every single element."""
    names = [f"p{index}" for index in range(data.draw(st.integers(1, 7)))]
    sizes = {name: data.draw(st.sampled_from([0, 1, 3, 8, 20])) for name in names}
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=3))
    manifest = stored(names, sizes, cuts, data.draw(st.integers(1, 5)))
    wanted = data.draw(st.permutations(names))
    shards = data.draw(st.integers(1, 5))
    layout = FlatLayout.build([(name, (sizes[name],)) for name in wanted], shards)
    held = {name: name for name in wanted if data.draw(st.booleans())}
    for rank in range(layout.shards):
        start, stop = layout.rank_range(rank)
        expected = {
            piece.offset - start + i: (piece.name, piece.start + i)
            for piece in layout.pieces(start, stop)
            if piece.name in held
            for i in range(len(piece))
        }
        found = {}
        for run in copy_ranges(manifest, layout, start, stop, held):
            assert run.length > 0
            chunk = run.flat.chunks[run.chunk]
            assert chunk.start + run.source + run.length <= chunk.stop
            for i in range(run.length):
                at = chunk.start + run.source + i
                slot = next(slot for slot in run.flat.layout.slots if slot.offset <= at < slot.end)
                assert run.target + i not in found
                found[run.target + i] = (slot.name, at - slot.offset)
        assert found == expected


def test_neighbours_merge_and_gaps_part_them() -> None:
    manifest = stored(["a", "b"], {"a": 8, "b": 8}, [], 1)
    for names, runs in (
        ("ab", [(0, 0, 16)]),
        ("axb", [(0, 0, 8), (8, 16, 8)]),
        ("ba", [(8, 0, 8), (0, 8, 8)]),
    ):
        layout = FlatLayout.build([(name, (8,)) for name in names], 1)
        found = copy_ranges(manifest, layout, 0, layout.numel, {"a": "a", "b": "b"})
        assert [(run.source, run.target, run.length) for run in found] == runs


# ---- work deferred until saves end ----


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(save_job, "_in_flight", {})
    return []


def test_work_runs_once_after_the_last_save_in_its_folder(tmp_path, done, monkeypatch):
    save_job.started(tmp_path / "other" / "global_step1")
    save_job.after_commit(tmp_path / "run", lambda: done.append("run"))
    save_job.after_commit(tmp_path / "other" / "global_step1", lambda: done.append("beside"))
    assert done == ["run", "beside"], "at once where nothing is written"
    done.clear()
    for name in ("model", "model_1"):
        save_job.started(tmp_path / "state" / name)
    save_job.after_commit(tmp_path / "state", lambda: done.append("state"))
    for name in ("model_1", "model"):
        assert not done
        save_job.finished(tmp_path / "state" / name, whole=True)
    save_job.finished(tmp_path / "state" / "model", whole=True)
    assert done == ["state"]
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    save_job.started(Path("run") / "step")
    save_job.after_commit(tmp_path / "link", lambda: done.append("by another way"))
    assert done == ["state"]
    save_job.finished(Path("run") / "step", whole=True)
    assert done == ["state", "by another way"]


def test_work_does_not_run_where_a_save_fails(tmp_path: Path, done: list[str]) -> None:
    for fails in (0, 1):
        for index in range(2):
            save_job.started(tmp_path / str(index))
        save_job.after_commit(tmp_path, lambda: done.append("run"))
        for index in range(2):
            save_job.finished(tmp_path / str(index), whole=index != fails)
        assert not done
    save_job.after_commit(tmp_path, lambda: done.append("next"))
    assert done == ["next"]
