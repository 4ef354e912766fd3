"""``verify``: a whole checkpoint is whole, every kind of damage is named with its file, and
nothing a file can hold breaks the check.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_zero import checkpoint
from hf_zero.checkpoint import reader
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import TWO, run, small, train_some


def save(folder: Path, **options) -> Path:
    def action(engine):
        train_some(engine, 1)
        return checkpoint.save(engine, folder, **options)

    return run(TWO, small, action)[1][0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, bytes]:
    """The files of one checkpoint, to be damaged again and again."""
    folder = save(
        tmp_path_factory.mktemp("run"), tag="a", client_state={"epoch": 2, "when": (1, 2)}
    )
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def unsigned(files: dict[str, bytes]) -> dict[str, Any]:
    """The manifest of ``files`` without its digest, so that what is changed in it is what is
    found.
    """
    document = json.loads(files["manifest.json"])
    del document["digest"]
    return document


def rank_files(files: dict[str, bytes]) -> list[str]:
    return sorted(name for name in files if name.startswith("rank-"))


def test_a_whole_one(saved, tmp_path):
    verdict = checkpoint.verify_checkpoint(put(saved, tmp_path / "a"))
    assert verdict.whole and verdict.files == 3
    assert verdict.nbytes == sum(len(saved[name]) for name in (*rank_files(saved), "objects.pt"))
    model = small()
    assert (verdict.parameters, verdict.elements) == (
        len([*model.parameters()]),
        sum(p.numel() for p in model.parameters()),
    )


def test_everything_that_is_wrong_is_named_at_once(saved, tmp_path):
    first, second = rank_files(saved)
    flipped = bytearray(saved[first])
    flipped[-5] ^= 1
    folder = put({**saved, first: bytes(flipped), second: saved[second][:-7]}, tmp_path / "a")
    (folder / "objects.pt").unlink()
    verdict = checkpoint.verify_checkpoint(folder)
    assert len(verdict.problems) == 3
    assert first in verdict.problems[0] and "its hash is" in verdict.problems[0]
    assert second in verdict.problems[1] and "cut short" in verdict.problems[1]
    assert "objects.pt is missing" in verdict.problems[2]


def test_a_file_of_another_save(saved, tmp_path):
    first = rank_files(saved)[0]
    foreign = (save(tmp_path / "other", tag="a") / first).read_bytes()
    assert len(foreign) == len(saved[first])
    problems = checkpoint.verify_checkpoint(put({**saved, first: foreign}, tmp_path / "a")).problems
    assert any("belongs to another save" in problem for problem in problems)


def test_chunks_that_miss_elements(saved, tmp_path):
    manifest = unsigned(saved)
    manifest["flats"][0]["chunks"][0]["stop"] -= 1
    verdict = checkpoint.verify_checkpoint(
        put({**saved, "manifest.json": json.dumps(manifest).encode()}, tmp_path / "a")
    )
    assert len(verdict.problems) == 1 and "does not continue at" in verdict.problems[0]


def test_no_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.verify_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.verify_all(tmp_path)


def test_the_command(saved, tmp_path):
    put(saved, tmp_path / "a"), put(saved, tmp_path / "b")
    (tmp_path / "latest").write_text("a")
    damaged = rank_files(saved)[1]
    (tmp_path / "b" / damaged).write_bytes(saved[damaged][:100])
    one = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert one.exit_code == 0 and "whole" in one.stdout and str(tmp_path / "a") in one.stdout
    both = CliRunner().invoke(app, ["verify", str(tmp_path), "--all"])
    assert both.exit_code == 1
    assert "damaged" in both.stdout
    assert damaged in both.stderr
    assert "cut short" in both.stderr
    rows = json.loads(CliRunner().invoke(app, ["verify", str(tmp_path), "--all", "--json"]).stdout)
    assert {Path(row["folder"]).name: row["whole"] for row in rows} == {"a": True, "b": False}


def test_all_names_what_has_no_manifest_and_a_latest_that_leads_nowhere(saved, tmp_path):
    put(saved, tmp_path / "a"), put(saved, tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    (tmp_path / "logs").mkdir()
    (tmp_path / "latest").write_text("b")
    found = {verdict.folder.name: verdict.problems for verdict in checkpoint.verify_all(tmp_path)}
    assert found.keys() == {"a", "b", "latest"} and found["a"] == ()
    assert f"{tmp_path / 'b' / 'manifest.json'} is missing; restore it" in found["b"][0]
    assert "no checkpoint 'b'" in found["latest"][0]
    assert "pass one of the tags that exist: a" in found["latest"][0]
    command = CliRunner().invoke(app, ["verify", str(tmp_path), "--all"])
    assert command.exit_code == 1 and "manifest.json is missing" in command.stderr
    (tmp_path / "latest").write_text("a")
    (tmp_path / "b" / "manifest.json").write_bytes(saved["manifest.json"])
    assert all(verdict.whole for verdict in checkpoint.verify_all(tmp_path))


@pytest.mark.parametrize(
    "where",
    [
        "manifest.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "objects.pt",
    ],
)
def test_no_bit_can_flip_unseen(saved, tmp_path, where):
    """In 60 places of each file, the ends included."""
    content = saved[where]
    for step in range(60):
        at = step * (len(content) - 1) // 59
        changed = bytearray(content)
        changed[at] ^= 1 << (step % 8)
        verdict = checkpoint.verify_checkpoint(
            put({**saved, where: bytes(changed)}, tmp_path / "a")
        )
        assert (
            not verdict.whole
            and where in verdict.problems[0]
            and re.search("restore|name a folder", verdict.problems[0])
        ), (at, verdict)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "manifest says"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "is missing"),
        (lambda path: path.write_bytes(b""), "is cut short: 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is cut short"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is longer than it was"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is damaged"),
    ],
    ids=["gone", "a folder", "a link to itself", "empty", "a byte short", "a byte long", "zeros"],
)
@pytest.mark.parametrize("where", ["rank-00000-of-00002.safetensors", "objects.pt"])
def test_each_kind_of_damage(saved, tmp_path, damage, says, where):
    damage(put(saved, tmp_path / "a") / where)
    command = CliRunner().invoke(app, ["verify", str(tmp_path / "a")])
    assert command.exit_code == 1
    assert f"{where} " in command.stderr
    assert says in command.stderr
    assert "restore" in command.stderr


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_one_of_the_problems(saved, tmp_path, monkeypatch, number):
    first, second = rank_files(saved)
    folder = put({**saved, second: saved[second][:-1]}, tmp_path / "a")

    def failing(path, algorithm, tick=None):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(reader, "hash_of_file", failing)
    problems = checkpoint.verify_checkpoint(folder).problems
    assert [first in problems[0], second in problems[1], "objects.pt" in problems[2]] == [True] * 3
    assert f"cannot be read ({os.strerror(number)}); make it readable or restore it" in problems[0]
    assert "cut short" in problems[1]
    monkeypatch.undo()

    def broken(fd, buffers, at):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", broken)
    header, content = (
        text for text in checkpoint.verify_checkpoint(folder).problems if first in text
    )
    assert f"cannot be read ({os.strerror(number)}); restore the file" in header
    assert f"cannot be read ({os.strerror(number)}); make it readable or restore it" in content


FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Every place in a JSON document."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@FUZZ
@given(data=st.data())
def test_any_manifest_is_read_or_refused(saved, tmp_path, data):
    """One field of a manifest replaced by anything: a verdict, never another exception."""
    document = unsigned(saved)
    path = data.draw(st.sampled_from([*places(document)]))
    changed = replaced(document, path, data.draw(JSON))
    folder = put({**saved, "manifest.json": json.dumps(changed).encode()}, tmp_path / "a")
    verdict = checkpoint.verify_checkpoint(folder)
    assert verdict.whole or all(
        "manifest" in problem or "rank-" in problem or "objects.pt" in problem
        for problem in verdict.problems
    )


@FUZZ
@given(data=st.data())
def test_any_header_is_read_or_refused(saved, tmp_path, data):
    """Bytes of a rank file's header replaced, its length included: refused, since the hash is
    another, and nothing large is allocated.
    """
    name = rank_files(saved)[0]
    content = bytearray(saved[name])
    length = struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 8 + length - 1))
        content[at] = data.draw(st.integers(0, 255))
    verdict = checkpoint.verify_checkpoint(put({**saved, name: bytes(content)}, tmp_path / "a"))
    assert verdict.whole == (bytes(content) == saved[name])


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "..", "a/b", ".hidden", "a\0b", ""])
def test_a_path_out_of_the_folder_is_refused(saved, tmp_path, name):
    document = unsigned(saved)
    document["files"][0]["name"] = name
    (problem,) = checkpoint.verify_checkpoint(
        put({**saved, "manifest.json": json.dumps(document).encode()}, tmp_path / "a")
    ).problems
    assert "leads out of the folder" in problem
