"""The manifest: it comes back as it was written, and whatever breaks FORMAT.md is refused with file
and field. State that is no tensor. Matches between a checkpoint and an engine: names, optimizer
groups; and work that is deferred until saves end.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero import checkpoint
from hf_zero.checkpoint import background_saves, match_schedule
from hf_zero.checkpoint.copy_ranges import copy_ranges
from hf_zero.checkpoint.manifest import Chunk, FlatEntry, GroupEntry
from hf_zero.checkpoint.manifest_reading import dtype_of, manifest_of, read_manifest
from hf_zero.checkpoint.match import pair_groups
from hf_zero.checkpoint.script_state import join, load_objects
from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.flat_layout import FlatLayout
from tests.checkpoint.jobs import Harm, Job, saved, small
from tests.checkpoint.written import write

SOURCE = Path("somewhere/manifest.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("manifest")
    job = Job(2, 3, units=("first",), frozen=lambda name: "first" in name)
    saved(folder, job, client_state={"t": (1, 2)})
    document = json.loads((folder / "global_step1" / "manifest.json").read_text())
    assert list(document)[-1] == "digest"
    del document["digest"]
    return document


def refused(data: Any, match: str, case: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        manifest_of(data, SOURCE)
    assert caught.match(match), case
    assert str(SOURCE) in str(caught.value), case


def test_round_trip(written):
    """Fields that it does not know are ignored."""
    for document in (written, written | {"color": "blue"}):
        assert manifest_of(document, SOURCE).to_json() == written


def test_order_and_names(written):
    assert list(written["parameters"]) == [name for name, _ in small().named_parameters()]
    assert written["aliases"] == {"head.weight": "embed.weight"}
    norm = [f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert set(written["buffers"]) == {*norm, "wide"}
    axes = dict.fromkeys(("tensor", "sequence", "expert", "pipeline"), 1)
    assert written["world"] == {"size": 2, "shard": 2, "replicate": 1, **axes}
    assert written["batch"] == {"samples": 8, "micro_batch": 4, "micro_batches": 1, "readers": 2}
    text = (Path(checkpoint.__file__).parent / "FORMAT.md").read_text()
    assert [field for field in (*written, "digest") if f"`{field}`" not in text] == []


FIELDS = [
    "save_id", "tag", "world", "stage", "precision", "files", "flats", "parameters", "buffers",
    "aliases", "excluded", "export", "optimizer", "scaler", "lr_scheduler", "counters",
    "client_state", "objects", "software",
]  # fmt: skip
NAMES = ["../rank.safetensors", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b"]
# What is changed: in the first flat, f, its chunks, c, its slots, s, or the document, d.
DAMAGES = {
    "no hash": lambda f, c, s, d: d["files"][0].update(hash="md5:" + "0" * 32),
    "gap between chunks": lambda f, c, s, d: _add(c[1], "start", 8),
    "chunks overlap": lambda f, c, s, d: _add(c[1], "start", -8),
    "chunk missing": lambda f, c, s, d: c.pop(),
    "no chunks": lambda f, c, s, d: c.clear(),
    "unknown file": lambda f, c, s, d: c[0].update(file=7),
    "weights missing": lambda f, c, s, d: c[1].update(tensors=["exp_avg"]),
    "slots overlap": lambda f, c, s, d: _add(s[-1], "offset", -1),
    "no shards": lambda f, c, s, d: f["layout"].update(shards=0),
    "negative shape": lambda f, c, s, d: s[0].update(shape=[-1, -4]),
    "held twice": lambda f, c, s, d: d["flats"].append(f),
    "parameter unknown": lambda f, c, s, d: d["parameters"].update(ghost="float32"),
    "parameter not listed": lambda f, c, s, d: d["parameters"].pop(s[0]["name"]),
    "alias of nothing": lambda f, c, s, d: d["aliases"].update(x="ghost"),
    "no dtype": lambda f, c, s, d: d["parameters"].update({s[0]["name"]: "Tensor"}),
    "objects not listed": lambda f, c, s, d: d.update(objects=None),
    "flag for a number": lambda f, c, s, d: d.update(stage=True),
    "no file of rank 0": lambda f, c, s, d: d["files"][0].update(rank=5),
    "files in another order": lambda f, c, s, d: d["files"].reverse(),
    "negative size": lambda f, c, s, d: d["files"][0].update(size=-1),
}


def _add(entry: dict, key: str, amount: int) -> None:
    entry[key] += amount


def test_what_is_no_manifest_is_refused(written):
    for field in FIELDS:
        without = {key: value for key, value in written.items() if key != field}
        refused(without, f"field '{field}' is absent", field)
        refused(written | {field: 3.5}, "is damaged: .* expected", field)
    for data in ([], None, 3, {"format": "pt"}, {}):
        refused(data, "not a manifest of hf-zero", data)
    for version in (0, 6, "1", True, None):
        refused(written | {"version": version}, "reads versions 1 to 5", version)
    for name in NAMES:
        data = copy.deepcopy(written)
        data["files"][0]["name"] = name
        refused(data, "leads out of the folder", name)
    for kind, damage in DAMAGES.items():
        data = copy.deepcopy(written)
        flat = data["flats"][0]
        damage(flat, flat["chunks"], flat["layout"]["slots"], data)
        refused(data, "is damaged: ", kind)
    with pytest.raises(ValueError, match="is not a dtype"):
        dtype_of("nn")


# of a parameter that is cut over two ranks
BOXES = {
    "is held twice": lambda slot: slot.pop("box"),
    "hold the same elements": lambda slot: slot["box"]["cuts"][0][1].__setitem__(0, [6, 12]),
    "do not make one of shape": lambda slot: slot["box"].update(whole=[13, 12]),
    "the layout is damaged": lambda slot: slot["box"]["cuts"][0][1].__setitem__(0, [0, 5]),
    "a box holds the whole shape": lambda slot: slot["box"].pop("whole"),
}


def test_boxes_that_do_not_fit_are_refused():
    text = (write.HERE / "version3" / write.TAG / "manifest.json").read_text()
    for message, change in BOXES.items():
        data = json.loads(text)
        data.pop("digest")
        slots = [slot for flat in data["flats"] for slot in flat["layout"]["slots"]]
        change(next(slot for slot in slots if slot["name"] == "blocks.0.value.weight"))
        refused(data, message, message)


def test_unreadable_files(tmp_path, written):
    path = tmp_path / "manifest.json"
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(path)
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no JSON"):
            read_manifest(path)
    with open(path, "wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(path)
    for digest in (None, "", 5, [], "\ud800", "0" * 64, "xxh3_128:" + "0" * 31 + "é"):
        path.write_text(json.dumps({**written, "digest": digest}))
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .*'digest'"):
            read_manifest(path)
    path.write_text(json.dumps(written))
    path.write_bytes(read_manifest(path).dumps())
    assert read_manifest(path).to_json() == written


def test_objects_that_are_damaged_or_would_execute(tmp_path):
    path = tmp_path / "objects.pt"
    torch.save({"client_state": {"k": Harm()}}, path)
    executing = [path.read_bytes(), pickle.dumps(Harm(), protocol=2)]
    for content in (*executing, b"", b"nonsense", b"PK\3\4 cut"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"objects\.pt cannot be loaded"):
            load_objects(path)
    assert Harm.done == []
    for content in ([1], {"client_state": 3}):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"objects\.pt does not hold"):
            load_objects(path)
    with pytest.raises(CheckpointError, match=r"o\.pt lacks \['k'\] of client_state"):
        join("client_state", {"json": {}, "objects": ["k"]}, {}, Path("o.pt"))


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
    for there, live, order, moved in PAIRS:
        assert paired(there, *live) == (order, moved), (there, live)
    last = {"_last_lr": (4, 5, 6), "lr_lambdas": [None]}
    state = {"base_lrs": [1, 2, 3], "last_epoch": 7, "_schedulers": [last]}
    state["_milestones"] = [1, 2, 3]
    assert match_schedule.reorder(state, [2, 0, 1]) == {
        "base_lrs": [3, 1, 2],
        "last_epoch": 7,
        "_milestones": [1, 2, 3],
        "_schedulers": [{"_last_lr": [6, 4, 5], "lr_lambdas": [None]}],
    }


def test_a_schedule_without_a_state_takes_none_of_another_class() -> None:
    schedule = SimpleNamespace(state_dict=lambda: None, load_state_dict=lambda state: None)
    manifest = SimpleNamespace(lr_scheduler={"class": ""})
    foreign: Any = SimpleNamespace(manifest=manifest, scheduler_state=lambda: {"gamma": 0.1})
    with pytest.raises(CheckpointError, match=r"SimpleNamespace, whose state has no gamma; use"):
        match_schedule.saved_state(schedule, foreign, "x")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(background_saves, "_in_flight", {})
    return []


def test_work_runs_once_after_the_last_save_in_its_folder(tmp_path, done, monkeypatch):
    background_saves.register_save(tmp_path / "other" / "global_step1")
    background_saves.after_commit(tmp_path / "run", lambda: done.append("run"))
    background_saves.after_commit(
        tmp_path / "other" / "global_step1", lambda: done.append("beside")
    )
    assert done == ["run", "beside"], "at once where nothing is written"
    done.clear()
    for name in ("model", "model_1"):
        background_saves.register_save(tmp_path / "state" / name)
    background_saves.after_commit(tmp_path / "state", lambda: done.append("state"))
    for name in ("model_1", "model"):
        assert not done
        background_saves.unregister_save(tmp_path / "state" / name, complete=True)
    background_saves.unregister_save(tmp_path / "state" / "model", complete=True)
    assert done == ["state"]
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    background_saves.register_save(Path("run") / "step")
    background_saves.after_commit(tmp_path / "link", lambda: done.append("by another way"))
    assert done == ["state"]
    background_saves.unregister_save(Path("run") / "step", complete=True)
    assert done == ["state", "by another way"]


def test_work_does_not_run_where_a_save_fails(tmp_path: Path, done: list[str]) -> None:
    for fails in (0, 1):
        for index in range(2):
            background_saves.register_save(tmp_path / str(index))
        background_saves.after_commit(tmp_path, lambda: done.append("run"))
        for index in range(2):
            background_saves.unregister_save(tmp_path / str(index), complete=index != fails)
        assert not done
    background_saves.after_commit(tmp_path, lambda: done.append("next"))
    assert done == ["next"]


def parted(parts: int, *, of: int = 3) -> list[FlatEntry]:
    """Entries of a matrix of 6 x 12 whose columns ``parts`` files hold, each in ``of`` chunks."""
    entries = []
    for file in range(parts):
        box = Box.even((6, 12), 1, file, parts)
        layout = FlatLayout.build([("w", box.shape)], of, {"w": box})
        size = layout.numel // of
        chunks = tuple(Chunk(file, at * size, (at + 1) * size, ("master",)) for at in range(of))
        entries.append(FlatEntry(f"{file}", True, torch.float32, layout, chunks))
    return entries


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_a_part_that_is_cut_as_it_was_saved_has_no_run_for_each_row(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs are those of the chunks; of another cut they hold the same elements."""
    whole = torch.arange(72).view(6, 12)
    entries = parted(parts)
    manifest: Any = SimpleNamespace(parts={"w": [(e, e.layout.by_name["w"]) for e in entries]})
    held = [slot.box.take(whole).reshape(-1) for _, slot in manifest.parts["w"]]
    for ranks in (2, 3, 4):
        box = Box.even((6, 12), 1, ranks - 1, ranks)
        layout = FlatLayout.build([("w", box.shape)], 1, {"w": box})
        with monkeypatch.context() as patch:
            if ranks == parts:
                patch.setattr(Box, "runs", None)
                patch.setattr(Box, "runs_within", None)
            runs = [*copy_ranges(manifest, layout, 1, 17, {"w": "w"})]
        out = torch.full((16,), -1)
        for run in runs:
            start = run.flat.chunks[run.chunk].start + run.source
            out[run.target : run.target + run.length] = held[int(run.flat.key)][
                start : start + run.length
            ]
        assert out.tolist() == box.take(whole).reshape(-1)[1:17].tolist()
