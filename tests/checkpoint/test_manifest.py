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
    assert written["world"] == {"size": 2, "shard": 2, "replicate": 1}


def test_the_format_document_names_every_field(written):
    text = (Path(checkpoint.__file__).parent / "FORMAT.md").read_text()
    assert [field for field in (*written, "digest") if f"`{field}`" not in text] == []


FIELDS = [
    "save_id",
    "tag",
    "world",
    "stage",
    "precision",
    "files",
    "flats",
    "parameters",
    "buffers",
    "aliases",
    "excluded",
    "export",
    "optimizer",
    "scaler",
    "lr_scheduler",
    "counters",
    "client_state",
    "objects",
    "software",
]


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
    refused(data, "no manifest of hf-zero.*name a folder")


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


def damage(written, kind):
    data = copy.deepcopy(written)
    flat = data["flats"][0]
    chunks, slots = flat["chunks"], flat["layout"]["slots"]
    if kind == "gap between chunks":
        chunks[1]["start"] += 8
    elif kind == "chunks overlap":
        chunks[1]["start"] -= 8
    elif kind == "chunk missing":
        chunks.pop()
    elif kind == "no chunks":
        chunks.clear()
    elif kind == "unknown file":
        chunks[0]["file"] = 7
    elif kind == "weights missing":
        chunks[1]["tensors"] = ["exp_avg"]
    elif kind == "slots overlap":
        slots[-1]["offset"] -= 1
    elif kind == "no shards":
        flat["layout"]["shards"] = 0
    elif kind == "negative shape":
        slots[0]["shape"] = [-1, -4]
    elif kind == "held twice":
        data["flats"].append(flat)
    elif kind == "parameter unknown":
        data["parameters"]["ghost"] = "float32"
    elif kind == "parameter not listed":
        data["parameters"].pop(slots[0]["name"])
    elif kind == "alias of nothing":
        data["aliases"]["x"] = "ghost"
    elif kind == "no dtype":
        data["parameters"][slots[0]["name"]] = "Tensor"
    elif kind == "objects not listed":
        data["objects"] = None
    elif kind == "flag for a number":
        data["stage"] = True
    elif kind == "negative size":
        data["files"][0]["size"] = -1
    return data


@pytest.mark.parametrize(
    "kind",
    [
        "gap between chunks",
        "chunks overlap",
        "chunk missing",
        "no chunks",
        "unknown file",
        "weights missing",
        "slots overlap",
        "no shards",
        "negative shape",
        "held twice",
        "parameter unknown",
        "parameter not listed",
        "alias of nothing",
        "no dtype",
        "objects not listed",
        "flag for a number",
        "negative size",
    ],
)
def test_what_does_not_fit_together(written, kind):
    refused(damage(written, kind), "is damaged: ")


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
    with pytest.raises(CheckpointError, match="is no manifest"):
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
    with pytest.raises(ValueError, match="no dtype"):
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
