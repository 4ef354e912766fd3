"""Checkpoints in object stores, in fsspec's own memory file system: what files of this machine
promise, without a rename.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from safetensors.torch import load_file
from typer.testing import CliRunner
from upath import UPath

from hf_zero import checkpoint
from hf_zero.checkpoint import (
    commit,
    convert_checkpoint,
    file_writer,
    find,
    iterate_state_dict,
    storage,
    verify_checkpoint,
)
from hf_zero.checkpoint.commit import ObjectStoreTarget
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import (
    ONE,
    TWO,
    errors,
    flip,
    load,
    names,
    other,
    run,
    run_holds,
    same,
    saved,
    trained,
    weights,
)
from tests.checkpoint.test_cut_off import STATE, Killed, Reader, step

__all__ = ["step"]

URL = "memory://bucket/run"


def empty() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def store() -> Iterator[UPath]:
    """The folder of the run, empty before and after."""
    empty()
    yield UPath(URL)
    empty()


def test_what_a_save_puts_and_what_reads_it(store: UPath, tmp_path: Path) -> None:
    """Rank 0's identifier of the save is in all names, though every rank draws one. The converter,
    the iterator and the command line read it.
    """
    engines = saved(URL, client_state=STATE)
    assert run_holds(store) == ["global_step1"] == find.tags_in(storage.as_path(URL))
    assert (store / "latest").read_text() == "global_step1"
    held = names(store / "global_step1")
    mark = held[1].removeprefix("objects-").removesuffix(".pt")
    ranks = [f"rank-{rank:05d}-of-00002-{mark}.safetensors" for rank in range(2)]
    assert len(mark) == 12 and held == ["manifest.json", f"objects-{mark}.pt", *ranks]
    again, results = run(TWO, other, lambda engine: checkpoint.load(engine, URL, verify=True))
    assert torch.equal(results[0][1]["seen"], STATE["seen"])
    assert same(weights(again), weights(engines))
    saved(tmp_path / "run", client_state=STATE)
    (store / "config.json").write_text('{"model_type": "none"}')
    (store / "tokenizer_config.json").write_text("{}")
    convert_checkpoint(tmp_path / "run", tmp_path / "one")
    done = convert_checkpoint(URL, tmp_path / "two")
    assert set(done.carried) == {"config.json", "tokenizer_config.json"}
    assert (tmp_path / "two" / "tokenizer_config.json").read_text() == "{}"
    command = ["convert-checkpoint", f"{URL}/global_step1", str(tmp_path / "three")]
    assert CliRunner().invoke(app, command).exit_code == 0
    verified = CliRunner().invoke(app, ["verify", URL])
    assert verified.exit_code == 0 and "whole" in verified.output
    one, *others = (
        load_file(tmp_path / each / "model.safetensors") for each in ("one", "two", "three")
    )
    assert all(one.keys() == each.keys() and same(one, each) for each in others)
    assert same(dict(iterate_state_dict(UPath(URL))), dict(iterate_state_dict(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"memory://bucket/model: .* folder of a file system"):
        convert_checkpoint(tmp_path / "run", "memory://bucket/model")


class Service:
    """Counts the requests that change something, and ends the process at the ``last`` of them."""

    CHANGES = (
        (MemoryFileSystem, "pipe_file"),
        (MemoryFileSystem, "rm_file"),
        (MemoryFileSystem, "_open"),
        (MemoryFile, "write"),
    )

    def __init__(self, last: int) -> None:
        self.last, self.made, self.ended = last, [], False

    def run(self, action: Callable[[], Any]) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            for owner, call in self.CHANGES:
                patch.setattr(owner, call, self._counted(call, getattr(owner, call)))
            try:
                action()
            except Killed:
                return False
        return not self.ended

    def _counted(self, call: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if call == "_open" and kwargs.get("mode", args[2] if len(args) > 2 else "rb") == "rb":
                return original(*args, **kwargs)
            if self.ended or len(self.made) >= self.last:
                self.ended = True
                raise Killed
            self.made.append(call)
            return original(*args, **kwargs)

        return counted


def test_a_save_that_is_cut_off_at_every_request(store: UPath, step: int, monkeypatch: Any) -> None:
    """Over the old one of its tag, while older ones go."""
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 1024)
    engines = {f"global_step{step}": trained(step) for step in (1, 2, 3)}
    states = {tag: weights([engine]) for tag, engine in engines.items()}
    reader, engine, untrained = Reader(), trained(4), trained(0)
    new, fresh = weights([engine]), weights([untrained])
    for tag, earlier in engines.items():
        checkpoint.save(earlier, URL, tag=tag, client_state=STATE)
    contents = {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}
    for point in itertools.count(step=step):
        MemoryFileSystem.store.clear()
        for name, content in contents.items():
            fsspec.filesystem("memory").pipe_file(name, content)
        service = Service(point)
        done = service.run(
            lambda: checkpoint.save(engine, URL, tag="global_step3", client_state=STATE, keep=2)
        )
        where = f"at request {point}, after {service.made[-3:]}"
        found, held = reader.weights(URL), find.tags_in(store)
        assert same(found, new) or (same(found, states["global_step3"]) and not done), where
        assert held[-2:] == ["global_step2", "global_step3"] and (not done or len(held) == 2), where
        for tag in held:
            assert not integrity_error(store / tag), where
        if done:
            assert same(reader.weights(URL, tag="global_step2"), states["global_step2"])
        checkpoint.save(untrained, URL, tag="global_step3")
        assert same(reader.weights(URL), fresh), where
        # the manifest and one rank: nothing is left over
        assert len(names(store / "global_step3")) == 2, where
        if done:
            break
    # objects, manifest, script, latest
    assert service.made.count("write") > 5 and service.made.count("pipe_file") == 4, service.made
    assert service.made.count("rm_file") == 5, service.made


def test_a_file_that_cannot_be_put(store, monkeypatch):
    """Of rank 1, and the manifest."""
    before = weights(saved(URL, tag="a"))
    write, pipe = MemoryFile.write, MemoryFileSystem.pipe_file

    def failing(self: Any, data: Any) -> int:
        if "rank-00001" in self.path:
            raise ValueError("403: Forbidden")
        return write(self, data)

    def failing_pipe(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith("manifest.json"):
            raise PermissionError("403: Forbidden")
        pipe(self, path, value, **kwargs)

    for owner, call, by, tag, named in (
        (MemoryFile, "write", failing, "b", f"rank 1: {URL}/b/rank-00001-of-00002-"),
        (MemoryFileSystem, "pipe_file", failing_pipe, "a", f"{URL}/a/manifest.json"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, by)
            for text in errors(saved, URL, steps=3, tag=tag):
                assert named in text and "403: Forbidden" in text
                assert "earlier checkpoints are as they were" in text
    assert names(store / "b") == [] and (store / "latest").read_text() == "a"
    assert same(weights(load(URL, verify=True)), before) and len(names(store / "a")) == 3


def test_a_manifest_that_the_store_accepts_without_an_answer(store, monkeypatch, heard):
    original = MemoryFileSystem.pipe_file

    def unanswered(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        original(self, path, value, **kwargs)
        if path.endswith("manifest.json"):
            raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", unanswered)
    before = weights(saved(URL, tag="a"))
    monkeypatch.undo()
    assert any(f"{URL}/a is saved" in line and "no answer" in line for line in heard)
    assert (store / "latest").read_text() == "a"
    assert same(weights(load(URL, verify=True)), before)


def test_a_save_that_is_given_up_after_its_manifest_keeps_its_files(store, monkeypatch):
    """Also where the manifest cannot be read back."""
    before = weights(saved(URL, tag="a"))
    save_id = read_manifest(store / "a" / "manifest.json").save_id

    def unreachable(path: Any) -> Manifest:
        raise CheckpointError(f"{path} cannot be read")

    ObjectStoreTarget(store, "a", save_id).abort()
    with monkeypatch.context() as patch:
        patch.setattr(commit, "read_manifest", unreachable)
        ObjectStoreTarget(store, "a", save_id).abort()
    assert same(weights(load(URL, verify=True)), before)


def test_damage_is_named(store: UPath) -> None:
    for text in errors(load, URL):
        assert f"no checkpoint in {URL}: {URL}/latest is missing" in text
    with pytest.raises(CheckpointError, match=f"no checkpoint at {URL}"):
        verify_checkpoint(URL)
    saved(URL)
    item = next(each for each in (store / "global_step1").iterdir() if "rank-00001" in each.name)
    for damage, said in (
        (lambda item: flip(item, -6000), "its hash is xxh3_128:"),
        (lambda item: item.write_bytes(item.read_bytes()[:-1]), "is cut short"),
        (lambda item: item.unlink(), "is missing"),
    ):
        damage(item)
        for text in errors(load, URL, verify=True):
            assert str(item) in text and said in text
        assert said in verify_checkpoint(URL).problems[0]


def test_what_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in errors(saved, "nosuch://bucket/run"):
        assert "nosuch://bucket/run cannot be opened" in text
    saved(f"file://{tmp_path}/run", ONE)
    held = ["manifest.json", "rank-00000-of-00001.safetensors"]
    assert names(tmp_path / "run" / "global_step1") == held, "a URL of files is a folder"
    for text in errors(saved, Path("s3://bucket/run")):
        assert "s3:/bucket/run looks like a URL that was made a path" in text
    (UPath(URL) / "b" / "precious").write_text("")
    for text in errors(saved, URL, tag="b"):
        assert f"{URL}/b holds precious and is no checkpoint" in text
    with pytest.raises(CheckpointError, match="3 of type int is not a place"):
        storage.as_path(3)

    def missing(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(sys.modules["fsspec.registry"], "get_filesystem_class", missing)
    monkeypatch.setattr(sys.modules["upath.core"], "get_filesystem_class", missing)
    with pytest.raises(CheckpointError, match="Install s3fs to access S3"):
        storage.as_path("s3://bucket/run")
