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
    convert_checkpoint,
    file_writer,
    find,
    iterate_state_dict,
    storage,
    verify_checkpoint,
)
from hf_zero.checkpoint.commit import StoreTarget
from hf_zero.checkpoint.find import integrity_error
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.verify import verify_all
from hf_zero.cli.app import app
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger
from tests.checkpoint.faults import Killed
from tests.checkpoint.jobs import (
    TWO,
    Job,
    errors,
    load,
    names,
    other,
    run,
    run_holds,
    same,
    saved,
    small,
    train_some,
    weights,
)
from tests.checkpoint.test_cut_off import ONE, STATE, trained
from tests.checkpoint.test_engine import Setup, global_losses, second_half, train
from tests.checkpoint.test_offloaded import Away
from tests.helpers.ranks import run_ranks

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def store() -> Iterator[UPath]:
    """The folder of the run, empty before and after."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield UPath(URL)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


# ---- what is there ----


def test_what_a_save_puts(store: UPath) -> None:
    engines, paths = run(
        TWO,
        small,
        lambda engine: (train_some(engine, 1), checkpoint.save(engine, URL, client_state=STATE)),
    )
    assert str(paths[0][1]) == f"{URL}/global_step1"
    assert run_holds(store) == ["global_step1"]
    assert (store / "latest").read_text() == "global_step1"
    held = names(store / "global_step1")
    mark = held[1].removeprefix("objects-").removesuffix(".pt")
    ranks = [f"rank-{rank:05d}-of-00002-{mark}.safetensors" for rank in range(2)]
    assert len(mark) == 12 and held == ["manifest.json", f"objects-{mark}.pt", *ranks]
    again, results = run(TWO, other, lambda engine: checkpoint.load(engine, URL, verify=True))
    assert torch.equal(results[0][1]["seen"], STATE["seen"])
    assert same(weights(again), weights(engines))
    assert find.tags_in(storage.as_path(URL)) == ["global_step1"]


@pytest.mark.turns
@pytest.mark.parametrize(
    "before, after",
    [
        (Setup(ranks=2, stage=3), Setup(ranks=1, stage=0)),
        (Setup(ranks=1, stage=2, precision="bf16"), Setup(ranks=4, stage=3, precision="bf16")),
        (Away(ranks=2, stage=2, way="optimizer on cpu"), Away(ranks=4, stage=1)),
    ],
    ids=["2 to 1", "1 to 4", "from the CPU"],
)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "beside"])
def test_training_goes_on_elsewhere(before: Setup, after: Setup, blocking: bool) -> None:
    def first(engine: Any, rank: int) -> Any:
        train(engine, rank, range(3))
        engine.save_checkpoint(URL, client_state={"step": 3}, blocking=blocking)
        losses = train(engine, rank, range(3, 6))
        engine.wait_for_checkpoint()
        return losses

    whole = before.run(first)
    resumed = run_ranks(after.ranks, second_half, after.models(), after, UPath(URL))
    expected = global_losses(whole, before.ranks)
    found = global_losses([losses for losses, _ in resumed], after.ranks)
    assert found == pytest.approx(expected, rel=5e-3 if before.precision == "bf16" else 1e-6)
    assert verify_checkpoint(URL).whole


def test_the_converter_and_the_iterator_read_it(store: UPath, tmp_path: Path) -> None:
    saved(tmp_path / "run")
    saved(URL)
    (store / "config.json").write_text('{"model_type": "none"}')
    (store / "tokenizer_config.json").write_text("{}")
    convert_checkpoint(tmp_path / "run", tmp_path / "one")
    done = convert_checkpoint(URL, tmp_path / "two")
    assert set(done.carried) == {"config.json", "tokenizer_config.json"}
    assert (tmp_path / "two" / "tokenizer_config.json").read_text() == "{}"
    one, two = (load_file(tmp_path / each / "model.safetensors") for each in ("one", "two"))
    assert one.keys() == two.keys() and same(one, two)
    assert same(dict(iterate_state_dict(UPath(URL))), dict(iterate_state_dict(tmp_path / "run")))


def test_the_command_line_takes_urls(tmp_path: Path) -> None:
    saved(URL)
    runner = CliRunner()
    verified = runner.invoke(app, ["verify", URL])
    assert verified.exit_code == 0 and "whole" in verified.output
    converted = runner.invoke(
        app, ["convert-checkpoint", f"{URL}/global_step1", str(tmp_path / "model")]
    )
    assert converted.exit_code == 0, converted.output
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_url_of_files_is_a_folder(tmp_path: Path) -> None:
    saved(f"file://{tmp_path}/run")
    assert names(tmp_path / "run" / "global_step1") == [
        "manifest.json",
        *(f"rank-{rank:05d}-of-00002.safetensors" for rank in range(2)),
    ]
    load(f"file://{tmp_path}/run")
    load(UPath(f"file://{tmp_path}/run"))


def test_ranges_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PART", 64)
    asked: list[int] = []
    original = MemoryFileSystem.cat_file

    def counted(
        self: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        asked.append((end or 0) - (start or 0))
        return original(self, path, start, end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    engines = saved(URL)
    again = load(URL, verify=True)
    assert same(weights(again), weights(engines)) and max(asked) == 64 and len(asked) > 100


# ---- one tag after another ----


def test_a_tag_that_is_saved_again(store: UPath) -> None:
    saved(URL, tag="a")
    (store / "a" / "notes.txt").write_text("mine")
    old = set(names(store / "a"))
    after = weights(saved(URL, tag="a", steps=4, job=Job(3, 3)))
    new = set(names(store / "a"))
    assert old & new == {"manifest.json", "notes.txt"} and len(new) == 5
    engines = load(URL)
    assert same(weights(engines), after)


def test_older_ones_go(store: UPath) -> None:
    for step in range(1, 5):
        saved(URL, steps=step, keep=2)
    assert run_holds(store) == ["global_step3", "global_step4"]
    (store / "global_step4" / "manifest.json").write_text("{")
    saved(URL, steps=5, keep=1)
    assert names(store)[:2] == ["global_step4", "global_step5"], "a damaged one is not thrown away"
    assert [verdict.whole for verdict in verify_all(URL)] == [False, True]


def test_what_is_none_of_ours_stays(store: UPath) -> None:
    (store / "a" / "precious").write_text("")
    for text in errors(saved, URL, tag="a"):
        assert f"{URL}/a holds precious and is no checkpoint of hf-zero; move it away" in text
    assert names(store / "a") == ["precious"]


# ---- whatever happens ----


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


def every_request(save: Callable[[], object], check: Callable[[bool, str], None]) -> list[str]:
    start = dict(MemoryFileSystem.store)
    contents = {name: file.getvalue() for name, file in start.items()}
    for point in itertools.count():
        MemoryFileSystem.store.clear()
        for name, content in contents.items():
            fsspec.filesystem("memory").pipe_file(name, content)
        service = Service(point)
        done = service.run(save)
        check(done, f"at request {point}, after {service.made[-3:]}")
        if done:
            return service.made
    raise AssertionError("never done")


@pytest.mark.parametrize("tag", ["a", "b"], ids=["over the old one", "beside it"])
def test_a_save_that_is_cut_off_at_every_request(
    tag: str, store: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "BLOCK_BYTES", 1024)
    saved(URL, ONE, tag="a", client_state=STATE)
    old = weights(load(URL, ONE))
    engine = trained(4)
    new, fresh = weights([engine]), weights([trained(0)])

    def check(done: bool, where: str) -> None:
        resumed = load(URL, ONE, verify=True)
        found = weights(resumed)
        assert same(found, new) or (same(found, old) and not done), where
        for held in find.tags_in(store):
            assert not integrity_error(store / held), where
        run(ONE, small, lambda engine: checkpoint.save(engine, URL, tag=tag))
        assert same(weights(load(URL, ONE)), fresh), where
        # the manifest and one rank: nothing is left over
        assert len(names(store / tag)) == 2, where

    made = every_request(lambda: checkpoint.save(engine, URL, tag=tag, client_state=STATE), check)
    # objects, manifest, script, latest
    assert made.count("write") > 5 and made.count("pipe_file") == 4, made
    assert tag == "b" or made.count("rm_file") == 2, made


def test_cut_off_while_older_ones_go(store: UPath) -> None:
    for step in (1, 2, 3):
        saved(URL, ONE, steps=step)
    engine = trained(4)
    states = {f"global_step{step}": weights([trained(step)]) for step in (1, 2, 3, 4)}

    def check(done: bool, where: str) -> None:
        held = find.tags_in(store)
        assert "global_step3" in held and (not done or held == ["global_step3", "global_step4"]), (
            where
        )
        for tag in held:
            resumed = load(URL, ONE, tag=tag, verify=True)
            assert same(weights(resumed), states[tag]), where

    made = every_request(lambda: checkpoint.save(engine, URL, keep=2), check)
    assert made.count("rm_file") == 4


@pytest.mark.parametrize("kind", [PermissionError, ValueError])
def test_a_rank_that_cannot_put_its_file(
    kind: type[Exception], store: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(URL, tag="a")
    before = weights(load(URL))
    original = MemoryFile.write

    def failing(self: Any, data: Any) -> int:
        if "rank-00001" in self.path:
            raise kind("403: Forbidden")
        return original(self, data)

    monkeypatch.setattr(MemoryFile, "write", failing)
    for text in errors(saved, URL, steps=3, tag="b"):
        assert text.startswith(f"rank 1: {URL}/b/rank-00001-of-00002-") and "403: Forbidden" in text
        assert "earlier checkpoints are as they were" in text
    monkeypatch.undo()
    assert names(store / "b") == [] and (store / "latest").read_text() == "a"
    engines = load(URL)
    assert same(weights(engines), before)


def test_a_manifest_that_cannot_be_put(store: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(URL, tag="a")
    before = weights(load(URL))
    original = MemoryFileSystem.pipe_file

    def failing(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith("manifest.json"):
            raise ConnectionError("reset by peer")
        original(self, path, value, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", failing)
    for text in errors(saved, URL, steps=3, tag="a"):
        assert f"{URL}/a/manifest.json" in text and "reset by peer" in text
    monkeypatch.undo()
    engines = load(URL, verify=True)
    assert same(weights(engines), before) and len(names(store / "a")) == 3


def test_a_manifest_that_the_store_accepts_without_an_answer(
    store: UPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = MemoryFileSystem.pipe_file

    def unanswered(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        original(self, path, value, **kwargs)
        if path.endswith("manifest.json"):
            raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", unanswered)
    monkeypatch.setattr(logger, "propagate", True)
    before = weights(saved(URL, tag="a"))
    monkeypatch.undo()
    assert f"{URL}/a is saved" in caplog.text and "no answer" in caplog.text
    assert (store / "latest").read_text() == "a"
    assert same(weights(load(URL, verify=True)), before)


def test_a_save_that_is_interrupted_after_its_manifest_keeps_its_files(store: UPath) -> None:
    before = weights(saved(URL, tag="a"))
    save_id = Manifest.read(store / "a" / "manifest.json").save_id
    StoreTarget(store, "a", save_id).abort()
    assert same(weights(load(URL, verify=True)), before)


def test_a_save_whose_manifest_cannot_be_read_back_keeps_its_files(
    store: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(saved(URL, tag="a"))
    save_id = Manifest.read(store / "a" / "manifest.json").save_id

    def unreachable(path: Any) -> Manifest:
        raise CheckpointError(f"{path} cannot be read")

    monkeypatch.setattr(Manifest, "read", unreachable)
    StoreTarget(store, "a", save_id).abort()
    monkeypatch.undo()
    assert same(weights(load(URL, verify=True)), before)


def rank_1(store: UPath) -> UPath:
    return next(item for item in (store / "global_step1").iterdir() if "rank-00001" in item.name)


def flipped(content: bytes) -> bytes:
    return content[:-6000] + bytes([content[-6000] ^ 1]) + content[-5999:]


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda item: item.unlink(), "is missing"),
        (lambda item: item.write_bytes(item.read_bytes()[:-1]), "is cut short"),
        (lambda item: item.write_bytes(flipped(item.read_bytes())), "its hash is xxh3_128:"),
    ],
    ids=["gone", "cut", "flipped"],
)
def test_damage_is_named(damage: Callable[[UPath], None], said: str, store: UPath) -> None:
    saved(URL)
    item = rank_1(store)
    damage(item)
    for text in errors(load, URL, verify=True):
        assert str(item) in text and said in text
    assert said in verify_checkpoint(URL).problems[0]


def test_nothing_there(store: UPath) -> None:
    for text in errors(load, URL):
        assert f"no checkpoint in {URL}: {URL}/latest is missing" in text
    with pytest.raises(CheckpointError, match="no checkpoint at memory://bucket/run"):
        verify_checkpoint(URL)


def test_an_object_that_shrinks_while_it_is_read(store: UPath) -> None:
    (store / "file").write_bytes(bytes(100))
    file = storage.open_ranges(store / "file")
    (store / "file").write_bytes(bytes(40))
    assert file.read(memoryview(bytearray(80)), 10) == 30


# ---- what cannot be ----


def test_urls_that_nothing_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in errors(saved, "nosuch://bucket/run"):
        assert "nosuch://bucket/run cannot be opened" in text
        assert "fsspec's package for this store" in text

    def missing(protocol: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(sys.modules["fsspec.registry"], "get_filesystem_class", missing)
    monkeypatch.setattr(sys.modules["upath.core"], "get_filesystem_class", missing)
    with pytest.raises(
        CheckpointError,
        match=r"Install s3fs to access S3; pip install .*, or pass a path",
    ):
        storage.as_path("s3://bucket/run")


def test_a_url_that_was_made_a_path() -> None:
    for text in errors(saved, Path("s3://bucket/run")):
        assert (
            "s3:/bucket/run looks like a URL that was made a path, which lost a slash; "
            "pass the URL as a string" in text
        )


def test_what_is_no_place() -> None:
    with pytest.raises(
        CheckpointError, match="3 of type int is not a place for checkpoints; pass a path or a URL"
    ):
        storage.as_path(3)


def test_a_model_is_converted_to_a_file_system(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(
        CheckpointError,
        match="memory://bucket/model: a converted model must be a folder of a file system",
    ):
        convert_checkpoint(tmp_path, "memory://bucket/model")


def test_one_file_of_the_whole_model_is_written_to_a_file_system() -> None:
    def action(rank: int, models: list[torch.nn.Module]) -> None:
        engine = Setup(ranks=1).open(models[rank])
        try:
            with pytest.raises(
                CheckpointError,
                match="one file of the whole model must be a folder of a file system",
            ):
                engine.save_16bit_model("memory://bucket/model")
        finally:
            engine.destroy()

    run_ranks(1, action, Setup(ranks=1).models())


def test_other_engines_than_the_first(store: UPath) -> None:
    """Rank 0's identifier of the save is in all names, though every rank draws one."""
    run(TWO, small, lambda engine: (train_some(engine, 1), checkpoint.save(engine, URL)))
    marks = {
        item.stem.rpartition("-")[2]
        for item in (store / "global_step1").iterdir()
        if item.name.startswith("rank-")
    }
    assert len(marks) == 1
