"""The manifest: it comes back as it was written, and whatever breaks FORMAT.md is refused with
file and field. State that is no tensor: JSON where it is faithful, weights_only where it is not,
and nothing that executes.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero import checkpoint
from hf_zero.checkpoint.manifest import Manifest, dtype_of
from hf_zero.checkpoint.reader import join, load_objects
from hf_zero.checkpoint.save_sharded import is_json, split
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Job, saved, small

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
        Manifest.from_json(data, SOURCE)
    assert caught.match(match), case
    assert str(SOURCE) in str(caught.value), case


def test_round_trip(written):
    """Fields that it does not know are ignored."""
    for document in (written, written | {"colour": "blue"}):
        assert Manifest.from_json(document, SOURCE).to_json() == written


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
    for version in (0, 4, "1", True, None):
        refused(written | {"version": version}, "reads versions 1 to 3", version)
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


def test_unreadable_files(tmp_path, written):
    path = tmp_path / "manifest.json"
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        Manifest.read(path)
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no JSON"):
            Manifest.read(path)
    with open(path, "wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        Manifest.read(path)
    for digest in (None, "", 5, [], "\ud800", "0" * 64, "xxh3_128:" + "0" * 31 + "é"):
        path.write_text(json.dumps({**written, "digest": digest}))
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .*'digest'"):
            Manifest.read(path)
    path.write_text(json.dumps(written))
    path.write_bytes(Manifest.read(path).dumps())
    assert Manifest.read(path).to_json() == written


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, as a path of keys and indices."""
    yield at
    items = data.items() if isinstance(data, dict) else ()
    for key, value in enumerate(data) if isinstance(data, list) else items:
        yield from places(value, (*at, key))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=100)
@given(st.data())
def test_no_mutation_gets_past_the_checks(written, data):
    """Refused by a CheckpointError, or as consistent as before: never another exception."""
    mutated = copy.deepcopy(written)
    *path, last = data.draw(st.sampled_from([place for place in places(written) if place]))
    inner = mutated
    for key in path:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[last] = data.draw(leaves | st.just([]) | st.just({}))
    else:
        del inner[last]
    try:
        manifest = Manifest.from_json(mutated, SOURCE)
    except CheckpointError as error:
        assert str(SOURCE) in str(error)
    else:
        assert Manifest.from_json(json.loads(manifest.dumps()), SOURCE) is not None


# ---- state that is no tensor ----


class Custom:
    pass


class Attack:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


FAITHFUL = [None, True, 3, 2.5, float("inf"), "x", [1, [2]], {"a": {"b": []}}, {}]
OTHERS = [(1, 2), {1: 2}, {"a": (1,)}, {3}, torch.ones(2), OrderedDict(a=1), b"x", 1j]
EXECUTED = [Custom(), Attack(), lambda: None, {"deep": [Custom()]}, open]


def test_what_is_json_and_what_is_not():
    for value in FAITHFUL:
        assert is_json(value), value
        assert split("s", {"k": value}) == ({"json": {"k": value}, "objects": []}, {})
    for value in OTHERS:
        assert not is_json(value), value
        plain, objects = split("s", {"k": value, "n": 1})
        assert plain == {"json": {"n": 1}, "objects": ["k"]}
        assert type(objects["k"]) is type(value)
    for value in EXECUTED:
        with pytest.raises(CheckpointError, match=r"client_state\['bad'\] .* cannot be saved"):
            split("client_state", {"good": 1, "bad": value})
    with pytest.raises(CheckpointError, match=r"client_state has the key 3 of type int"):
        split("client_state", {3: 1})


def test_objects_that_are_damaged_or_would_execute(tmp_path):
    path = tmp_path / "objects.pt"
    torch.save({"client_state": {"k": Attack()}}, path)
    executing = [path.read_bytes(), pickle.dumps(Attack(), protocol=2)]
    for content in (*executing, b"", b"nonsense", b"PK\3\4 cut"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"objects\.pt cannot be loaded"):
            load_objects(path)
    for content in ([1], {"client_state": 3}):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=r"objects\.pt does not hold"):
            load_objects(path)
    with pytest.raises(CheckpointError, match=r"o\.pt lacks \['k'\] of client_state"):
        join("client_state", {"json": {}, "objects": ["k"]}, {}, Path("o.pt"))
