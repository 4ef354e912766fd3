"""An interrupted conversion continues at the same point, and its files are equal to the byte, at
any interruption or split.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import convert_checkpoint, iterate_state_dict, reader
from hf_zero.checkpoint.convert import files
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.jobs import Job, small
from tests.checkpoint.test_export import saved
from tests.helpers.commands import completed


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Killed(BaseException):
    """The process ends here: nothing that cleans up runs."""


@pytest.fixture
def cut_often(monkeypatch):
    """Windows of a page, and a note after each."""
    monkeypatch.setattr(reader.Scratch, "ELEMENTS", 64)
    monkeypatch.setattr(files, "WINDOW", 4096)
    monkeypatch.setattr(files, "NOTED", 4096)


CALLS = ("pwrite", "write", "fsync", "replace", "ftruncate", "unlink")


def until(monkeypatch, last: int, action) -> tuple[bool, int]:
    """Run ``action`` with its ``last``-th system call that changes something cut off: whether it
    came to the end, bytes that it wrote.
    """
    count, wrote = [0], [0]
    with monkeypatch.context() as patch:
        for call in CALLS:
            original = getattr(os, call)

            def counted(*args, call=call, original=original, **kwargs):
                count[0] += 1
                if count[0] > last:
                    raise Killed
                wrote[0] += len(args[1]) if call == "pwrite" else 0
                return original(*args, **kwargs)

            patch.setattr(os, call, counted)
        try:
            action()
        except Killed:
            return False, wrote[0]
    return True, wrote[0]


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_killed_at_every_call_that_writes(tmp_path, monkeypatch, cut_often, size):
    saved(tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "whole", max_shard_size=size)
    want = content(tmp_path / "whole")
    points, kept = 0, []
    while True:
        out = tmp_path / f"out{points}"
        ended, _ = until(
            monkeypatch,
            points,
            lambda out=out: convert_checkpoint(
                tmp_path / "run", out, max_shard_size=size, workers=1
            ),
        )
        over = not (out / files.JOURNAL).exists()  # nothing was begun, or all was finished
        done = convert_checkpoint(tmp_path / "run", out, max_shard_size=size, overwrite=over)
        assert content(out) == want, points
        kept.append(done.kept)
        shutil.rmtree(out)
        if ended:
            break
        points += 3 if size == "5GB" else 7
    assert len(kept) > 12
    assert max(kept) > done.nbytes // 2 and kept[0] == 0 and kept[-1] == 0


def test_what_was_written_is_not_written_again(tmp_path, monkeypatch, cut_often):
    saved(tmp_path / "run")
    out = tmp_path / "out"
    total = convert_checkpoint(tmp_path / "run", tmp_path / "whole").nbytes
    calls, first = 60, 0
    ended, first = until(
        monkeypatch, calls, lambda: convert_checkpoint(tmp_path / "run", out, workers=1)
    )
    assert not ended and first > 4096
    results = []
    ended, second = until(
        monkeypatch, 10**9, lambda: results.append(convert_checkpoint(tmp_path / "run", out))
    )
    size = (out / "model.safetensors").stat().st_size
    left = total - results[0].kept  # bytes; they begin and end with a page
    assert ended and results[0].kept > 0
    assert left <= second < left + 4096
    assert first + second <= size + 3 * 4096, (
        "what lies behind the last note is done twice, and no more"
    )


def test_a_torn_line_of_the_journal(tmp_path, monkeypatch, cut_often):
    saved(tmp_path / "run")
    out = tmp_path / "out"
    convert_checkpoint(tmp_path / "run", tmp_path / "whole")
    want = content(tmp_path / "whole")
    until(monkeypatch, 60, lambda: convert_checkpoint(tmp_path / "run", out, workers=1))
    path = out / files.JOURNAL
    lines = path.read_bytes()
    for torn in (
        lines + b'{"file": "model.safetensors", "bytes": 99',
        lines + b"3\n",
        lines + b"{\n",
        lines + b'{"file": 3, "bytes": "x"}\n',
        b"",
        b"\xff\n",
    ):
        path.write_bytes(torn)
        again = tmp_path / "again"
        shutil.copytree(out, again)
        convert_checkpoint(tmp_path / "run", again)
        assert content(again) == want
        shutil.rmtree(again)


def test_another_conversion_starts_anew(tmp_path, monkeypatch, cut_often):
    saved(tmp_path / "run")
    out, begun = tmp_path / "out", tmp_path / "begun"
    until(monkeypatch, 60, lambda: convert_checkpoint(tmp_path / "run", begun, workers=1))

    def converted(**options):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(begun, out)
        done = convert_checkpoint(tmp_path / "run", out, **options)
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
        return done.kept

    assert converted() > 0
    assert (
        converted(dtype="bfloat16")
        == converted(max_shard_size="20KB")
        == converted(only="*embeddings*")
        == 0
    )
    os.utime(next((tmp_path / "run").rglob("rank-00001*")), (1, 1))  # restored from elsewhere, say
    assert converted() == 0
    saved(tmp_path / "run", tag="global_step2")
    assert converted() == 0


def test_temporary_files_that_are_gone_or_shorter(tmp_path, monkeypatch, cut_often):
    saved(tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "whole")
    out = tmp_path / "out"
    for harm in (lambda path: path.unlink(), lambda path: os.truncate(path, 100)):
        until(monkeypatch, 60, lambda: convert_checkpoint(tmp_path / "run", out, workers=1))
        harm(files.temporary_path(out, "model.safetensors"))
        assert convert_checkpoint(tmp_path / "run", out).kept == 0
        assert content(out) == content(tmp_path / "whole")
        shutil.rmtree(out)


def test_a_journal_removes_nothing_outside_of_its_folder(tmp_path):
    saved(tmp_path / "run", small)
    mine = tmp_path / files.temporary_path(Path(), "mine").name
    mine.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    names = ["../mine", str(tmp_path / "mine"), "a/../../mine", 3, ""]
    (out / files.JOURNAL).write_text(json.dumps({"identity": "of another", "files": names}) + "\n")
    convert_checkpoint(tmp_path / "run", out)
    assert mine.read_text() == "mine"


def test_one_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, cut_often):
    saved(tmp_path / "run")
    out = tmp_path / "out"
    until(monkeypatch, 60, lambda: convert_checkpoint(tmp_path / "run", out, workers=1))
    path = next((tmp_path / "run").rglob("rank-00000*"))
    flipped = bytearray(path.read_bytes())
    flipped[-6000] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="its hash is"):
        convert_checkpoint(tmp_path / "run", out, verify=True)
    assert not list(out.iterdir())


SCRIPT = """
import os, signal, sys
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.checkpoint.convert import files
files.WINDOW = files.NOTED = 1 << 15
note, noted = files.Journal.note, []
def killed_at_the_fourth(*args):
    note(*args)
    noted.append(args)
    if len(noted) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
files.Journal.note = killed_at_the_fourth
convert_checkpoint(*sys.argv[1:], workers=2)
"""


def test_a_process_that_is_killed(tmp_path):
    saved(tmp_path / "run", lambda: torch.nn.Linear(1024, 1024), Job(2, 3))
    convert_checkpoint(tmp_path / "run", tmp_path / "whole")
    out = tmp_path / "out"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(out)]
    assert completed(command).returncode == -signal.SIGKILL
    done = convert_checkpoint(tmp_path / "run", out)
    assert 0 < done.kept < done.nbytes
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_bytes_do_not_depend_on_the_workers(tmp_path, cut_often, workers):
    saved(tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "one", "bfloat16", workers=1)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", "bfloat16", workers=workers)
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_that_make_no_sense(tmp_path, workers):
    with pytest.raises(ConfigError, match=f"workers={workers} convert nothing; pass 1 or more"):
        convert_checkpoint(tmp_path, tmp_path / "out", workers=workers)


# ---- patterns ----


def test_only_what_fits_a_pattern(tmp_path):
    weights = saved(tmp_path / "run", small)
    done = convert_checkpoint(
        tmp_path / "run", tmp_path / "out", only=["first.*", "norm.running_*"]
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {"first.weight", "first.bias", "norm.running_mean", "norm.running_var"}
    assert torch.equal(tensors["first.weight"], weights["first.weight"])
    assert (done.tensors, done.parameters) == (4, 13 * 6 + 13)
    assert dict(iterate_state_dict(tmp_path / "run", only="first.*", dtype="bfloat16")).keys() == {
        "first.weight",
        "first.bias",
    }


@pytest.mark.parametrize(
    "only, said",
    [
        ("frist.weight", r"only='frist.weight' fits no tensor; names near it are first.weight"),
        (["first.*", "*NORM.*"], r"only='\*NORM\.\*' fits no tensor; names near it are norm\."),
        ("@@@", r"only='@@@' fits no tensor; there are 13 names, such as "),
        ([], r"only=\[\] chooses nothing; pass patterns"),
    ],
)
def test_patterns_that_fit_nothing(tmp_path, only, said):
    saved(tmp_path / "run", small)
    with pytest.raises(ConfigError, match=said):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", only=only)
    with pytest.raises(ConfigError, match=said):
        dict(iterate_state_dict(tmp_path / "run", only=only))
    assert not (tmp_path / "out").exists()


# ---- past the page cache, or not ----


@pytest.mark.parametrize("refused", ["open", "pwrite"])
def test_a_file_system_without_direct_writes(tmp_path, monkeypatch, cut_often, refused):
    saved(tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "whole")
    original, count = getattr(os, refused), [0]

    def refusing(*args, **kwargs):
        flags = args[1] if refused == "open" else fcntl.fcntl(args[0], fcntl.F_GETFL)
        if flags & files.DIRECT:
            count[0] += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refusing)
        convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert count[0] > 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("refused", ["open", "pwrite"])
def test_a_refusal_of_another_kind_is_told(tmp_path, monkeypatch, refused):
    saved(tmp_path / "run")

    original = getattr(os, refused)

    def refusing(*args, **kwargs):
        if refused == "pwrite" or (args[1] & files.DIRECT and "model" in str(args[0])):
            raise OSError(errno.EACCES, "Permission denied", "model")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refusing)
        with pytest.raises(CheckpointError, match="Permission denied; make the folder writable"):
            convert_checkpoint(tmp_path / "run", tmp_path / "out")


def test_two_conversions_into_one_folder(tmp_path, monkeypatch):
    """The second conversion is refused and changes nothing; the first runs to its end."""
    saved(tmp_path / "run")
    want = convert_checkpoint(tmp_path / "run", tmp_path / "want")
    fill, refused = files._WindowedFile.fill, []

    def meanwhile(self, *args):
        if not refused:
            before = content(tmp_path / "out")
            with pytest.raises(
                CheckpointError,
                match="out is being written by another conversion; wait until it ends, or choose",
            ) as told:
                convert_checkpoint(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
            refused.append(told)
            assert content(tmp_path / "out") == before
        return fill(self, *args)

    monkeypatch.setattr(files._WindowedFile, "fill", meanwhile)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out", workers=1).files == want.files
    assert refused and content(tmp_path / "out") == content(tmp_path / "want")


def test_a_lock_without_a_holder(tmp_path):
    """The lock file of a killed process counts as free."""
    saved(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / files.LOCK).write_bytes(b"")
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files
    assert not (tmp_path / "out" / files.LOCK).exists()


@pytest.mark.parametrize("code", files.NO_LOCKS)
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    saved(tmp_path / "run")

    def none(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl, "flock", none)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files


def test_a_lock_that_is_removed_while_it_is_waited_for(tmp_path, monkeypatch):
    """The holder removes its file when it ends: a lock on that file, taken after that, keeps
    nobody out.
    """
    flock, seen = fcntl.flock, []

    def late(descriptor, how):
        if not seen:
            (tmp_path / files.LOCK).unlink()
        seen.append(descriptor)
        flock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with files.lock_folder(tmp_path):
        monkeypatch.undo()
        assert len(seen) == 2 and (tmp_path / files.LOCK).exists()
        with (
            pytest.raises(CheckpointError, match="is being written by another conversion"),
            files.lock_folder(tmp_path),
        ):
            pass
