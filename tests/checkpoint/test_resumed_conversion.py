"""An interrupted conversion continues at the same point, and its files are equal to the byte, at
any interruption or split.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import convert_checkpoint, iterate_state_dict, reader
from hf_zero.checkpoint.convert import files, targets
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.jobs import flip, small
from tests.checkpoint.test_cut_off import Killed
from tests.checkpoint.test_export import saved


def content(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A checkpoint that no test changes."""
    folder = tmp_path_factory.mktemp("run") / "run"
    saved(folder)
    return folder


@pytest.fixture
def cut_often(monkeypatch):
    """Windows of a page, and a note after each."""
    monkeypatch.setattr(reader.Scratch, "ELEMENTS", 64)
    monkeypatch.setattr(files, "WINDOW", 4096)
    monkeypatch.setattr(files, "NOTED", 4096)


CALLS = ("pwrite", "write", "fsync", "replace", "ftruncate", "unlink")


def until(last: int, action) -> bool:
    """Cut ``action`` off at its ``last``-th call: whether it came to the end."""
    count = [0]
    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            original = getattr(os, call)

            def counted(*args, original=original, **kwargs):
                count[0] += 1
                if count[0] > last:
                    raise Killed
                return original(*args, **kwargs)

            patch.setattr(os, call, counted)
        try:
            action()
        except Killed:
            return False
    return True


@pytest.fixture
def begun(run, tmp_path, cut_often) -> Path:
    """A conversion that was cut off in the middle."""
    until(60, lambda: convert_checkpoint(run, tmp_path / "begun", workers=1))
    return tmp_path / "begun"


@pytest.fixture
def want(run, tmp_path) -> dict[str, bytes]:
    convert_checkpoint(run, tmp_path / "whole")
    return content(tmp_path / "whole")


def test_killed_at_every_call_that_writes(run, tmp_path, cut_often):
    """Of many, every few."""
    how = {"max_shard_size": "20KB"}
    whole = convert_checkpoint(run, tmp_path / "whole", **how)
    kept = []
    for points in itertools.count(step=17):
        out = tmp_path / f"out{points}"
        ended = until(points, lambda out=out: convert_checkpoint(run, out, workers=1, **how))
        over = not (out / files.JOURNAL).exists()  # nothing was begun, or all was finished
        kept.append(convert_checkpoint(run, out, overwrite=over, **how).kept)
        assert content(out) == content(tmp_path / "whole"), points
        shutil.rmtree(out)
        if ended:
            break
    assert len(kept) > 4 and max(kept) > whole.nbytes // 2 and kept[0] == kept[-1] == 0


TORN = [
    b'{"file": "model.safetensors", "bytes": 99',
    b"3\n",
    b"{\n",
    b'{"file": 3, "bytes": "x"}\n',
    b'{"file": "model.safetensors", "bytes": -4096}\n',
]


def test_a_journal_or_a_temporary_file_that_is_damaged(run, tmp_path, begun, want):
    lines = (begun / files.JOURNAL).read_bytes()
    out, temporary = tmp_path / "out", targets.temporary_path(tmp_path / "out", "model.safetensors")
    harms = [lambda text=text: (out / files.JOURNAL).write_bytes(lines + text) for text in TORN]
    harms += [
        lambda text=text: (out / files.JOURNAL).write_bytes(text) for text in (b"", b"\xff\n")
    ]
    gone = [temporary.unlink, lambda: os.truncate(temporary, 100)]
    for harm in (*harms, *gone):
        shutil.copytree(begun, out)
        harm()
        done = convert_checkpoint(run, out)
        assert content(out) == want and (harm not in gone or done.kept == 0)
        shutil.rmtree(out)


def test_another_conversion_starts_anew(run, tmp_path, begun):
    out, changed = tmp_path / "out", shutil.copytree(run, tmp_path / "changed")

    def converted(source, **options):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(begun, out)
        done = convert_checkpoint(source, out, **options)
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
        return done.kept

    assert converted(run) > 0
    for options in ({"dtype": "bfloat16"}, {"max_shard_size": "20KB"}, {"only": "*embeddings*"}):
        assert converted(run, **options) == 0
    until(60, lambda: convert_checkpoint(changed, tmp_path / "again", workers=1))
    shutil.rmtree(begun)
    (tmp_path / "again").rename(begun)
    assert converted(changed) > 0
    os.utime(next(changed.rglob("rank-00001*")), (1, 1))  # restored from elsewhere, say
    assert converted(changed) == 0
    saved(changed, tag="global_step2")
    assert converted(changed) == 0
    flip(next(changed.rglob("rank-00000*")), -6000)
    with pytest.raises(CheckpointError, match="its hash is"):
        converted(changed, verify=True)
    assert not list(out.iterdir()), "one that fails leaves nothing behind"


def test_the_bytes_do_not_depend_on_the_workers(run, tmp_path, cut_often):
    convert_checkpoint(run, tmp_path / "1", "bfloat16", workers=1)
    for workers in (2, 7):
        convert_checkpoint(run, tmp_path / f"{workers}", "bfloat16", workers=workers)
        assert content(tmp_path / f"{workers}") == content(tmp_path / "1")
    for workers in (0, -1):
        with pytest.raises(ConfigError, match=f"workers={workers} convert nothing"):
            convert_checkpoint(run, tmp_path / "out", workers=workers)


PATTERNS = [
    ("frist.weight", "only='frist.weight' fits no tensor; names near it are first.weight"),
    (["first.*", "*NORM.*"], r"only='\*NORM\.\*' fits no tensor; names near it are norm\."),
    ("@@@", "only='@@@' fits no tensor; there are 13 names, such as "),
    ([], r"only=\[\] chooses nothing"),
]


def test_only_what_fits_a_pattern(tmp_path):
    weights, patterns = saved(tmp_path / "run", small), ["first.*", "norm.running_*"]
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out", only=patterns)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first = {"first.weight", "first.bias"}
    assert set(tensors) == first | {"norm.running_mean", "norm.running_var"}
    assert torch.equal(tensors["first.weight"], weights["first.weight"])
    assert (done.tensors, done.parameters) == (4, 13 * 6 + 13)
    found = dict(iterate_state_dict(tmp_path / "run", only="first.*", dtype="bfloat16"))
    assert found.keys() == first
    for only, said in PATTERNS:
        with pytest.raises(ConfigError, match=said):
            convert_checkpoint(tmp_path / "run", tmp_path / "none", only=only)
        with pytest.raises(ConfigError, match=said):
            dict(iterate_state_dict(tmp_path / "run", only=only))
    for options in ({"only": 5}, {"only": [5]}, {"workers": "2"}, {"workers": None}):
        with pytest.raises(ConfigError, match=f"^{next(iter(options))}="):
            convert_checkpoint(tmp_path / "run", tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("call", "cleared"), [("open", False), ("pwrite", False), ("pwrite", True)]
)
def test_a_file_system_without_direct_writes(
    run, tmp_path, monkeypatch, cut_often, want, call, cleared
):
    """Also where another thread has ``cleared`` the flag of the file since the write was refused. A
    refusal of another kind is told.
    """
    original, refused = getattr(os, call), []

    def refusing(*args, **kwargs):
        flags = args[1] if call == "open" else fcntl.fcntl(args[0], fcntl.F_GETFL)
        if flags & files.DIRECT:
            refused.append(args[0])
            if cleared:
                fcntl.fcntl(args[0], fcntl.F_SETFL, flags & ~files.DIRECT)
            raise OSError(number, os.strerror(number), "model")
        return original(*args, **kwargs)

    number = errno.EINVAL
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing)
        convert_checkpoint(run, tmp_path / "out")
    assert refused and content(tmp_path / "out") == want
    number = errno.EACCES
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing)
        with pytest.raises(CheckpointError, match="Permission denied"):
            convert_checkpoint(run, tmp_path / "none")


def test_a_journal_removes_nothing_outside_of_its_folder(run, tmp_path):
    """The lock file of a killed process counts as free."""
    mine, out = tmp_path / targets.temporary_path(Path(), "mine").name, tmp_path / "out"
    mine.write_text("mine")
    out.mkdir()
    names = ["../mine", str(tmp_path / "mine"), "a/../../mine", 3, ""]
    (out / files.JOURNAL).write_text(json.dumps({"identity": "of another", "files": names}) + "\n")
    (out / targets.LOCK).write_bytes(b"")
    convert_checkpoint(run, out)
    assert mine.read_text() == "mine" and not (out / targets.LOCK).exists()
