"""The manifest: it comes back as it was written, and whatever breaks FORMAT.md is refused with
file and field.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero import checkpoint
from hf_zero.checkpoint.manifest import Manifest, dtype_of
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import Job, run, small, train_some

SOURCE = Path("somewhere/manifest.json")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("manifest")
    job = Job(2, 3, units=("first",), frozen=lambda name: "first" in name)

    def action(engine):
        train_some(engine)
        return checkpoint.save(engine, folder, client_state={"t": (1, 2)})

    path = run(job, small, action)[1][0]
    document = json.loads((path / "manifest.json").read_text())
    assert list(document)[-1] == "digest"
    del document["digest"]
    return document


def refused(data, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        Manifest.from_json(data, SOURCE)
    assert str(SOURCE) in str(caught.value)


FIELDS = [
    "save_id", "tag", "world", "stage", "precision", "files", "flats", "parameters", "buffers",
    "aliases", "excluded", "export", "optimizer", "scaler", "lr_scheduler", "counters",
    "client_state", "objects", "software",
]  # fmt: skip


def test_round_trip(written):
    assert Manifest.from_json(written, SOURCE).to_json() == written


def test_fields_it_does_not_know_are_ignored(written):
    assert Manifest.from_json(written | {"colour": "blue"}, SOURCE).to_json() == written


def test_order_and_names(written):
    assert list(written["parameters"]) == [name for name, _ in small().named_parameters()]
    assert written["aliases"] == {"head.weight": "embed.weight"}
    assert set(written["buffers"]) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "wide",
    }
    axes = dict.fromkeys(("tensor", "sequence", "expert", "pipeline"), 1)
    assert written["world"] == {"size": 2, "shard": 2, "replicate": 1, **axes}
    assert written["batch"] == {"samples": 8, "micro_batch": 4, "micro_batches": 1, "readers": 2}


def test_the_format_document_names_every_field(written):
    text = (Path(checkpoint.__file__).parent / "FORMAT.md").read_text()
    assert [field for field in (*written, "digest") if f"`{field}`" not in text] == []


@pytest.mark.parametrize("field", FIELDS)
def test_an_absent_field(written, field):
    refused(
        {key: value for key, value in written.items() if key != field},
        f"field '{field}' is absent; restore it",
    )


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type(written, field):
    refused(written | {field: 3.5}, "is damaged: .* expected")


@pytest.mark.parametrize("data", [[], None, 3, {"format": "pt"}, {}])
def test_what_is_no_manifest(data):
    refused(data, "not a manifest of hf-zero.*name a folder")


@pytest.mark.parametrize("version", [0, 4, "1", True, None])
def test_another_version(written, version):
    refused(
        written | {"version": version},
        "format version .* reads versions 1 to 3; load it with the hf-zero that wrote it",
    )


@pytest.mark.parametrize(
    "name", ["../rank.safetensors", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b"]
)
def test_a_file_name_that_leads_out_of_the_folder(written, name):
    data = copy.deepcopy(written)
    data["files"][0]["name"] = name
    refused(data, "leads out of the folder")


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


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_does_not_fit_together(written, kind):
    data = copy.deepcopy(written)
    flat = data["flats"][0]
    DAMAGES[kind](flat, flat["chunks"], flat["layout"]["slots"], data)
    refused(data, "is damaged: ")


def test_unreadable_files(tmp_path):
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


@pytest.mark.parametrize(
    "digest", [None, "", 5, [], "\ud800", "0" * 64, "xxh3_128:" + "0" * 31 + "é"]
)
def test_a_digest_that_cannot_be_right(tmp_path, written, digest):
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**written, "digest": digest}))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json is damaged: .*'digest' says; restore it"
    ):
        Manifest.read(path)
    path.write_text(json.dumps(written))
    path.write_bytes(Manifest.read(path).dumps())
    assert Manifest.read(path).to_json() == written


def test_dtype_names():
    with pytest.raises(ValueError, match="is not a dtype"):
        dtype_of("nn")


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
)


def places(data, at=()):
    """Every place in a JSON value, as a path of keys and indices."""
    yield at
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*at, key))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_mutation_gets_past_the_checks(written, data):
    """Either refused by a CheckpointError, or as consistent as what was written: never another
    exception.
    """
    mutated = copy.deepcopy(written)
    *path, last = data.draw(st.sampled_from([place for place in places(written) if place]))
    inner = mutated
    for key in path:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[last] = data.draw(leaves)
    else:
        del inner[last]
    try:
        manifest = Manifest.from_json(mutated, SOURCE)
    except CheckpointError as error:
        assert str(SOURCE) in str(error)
    else:
        assert Manifest.from_json(json.loads(manifest.dumps()), SOURCE) is not None
