"""Files of a checkpoint that somebody made to do harm: numpy objects that crash, names that leave
the target, links to other files, and pipes. ``tests/fuzz`` draws damage.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hf_zero.checkpoint import reader, verify_all
from hf_zero.checkpoint.convert.export import convert_checkpoint
from hf_zero.checkpoint.find import LATEST, find_checkpoint, latest_tag, tags_in
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.checkpoint.random_generators import rng_states, set_rng_state
from hf_zero.cli.app import app
from hf_zero.deepspeed.state_dicts import convert_zero_checkpoint_to_fp32_state_dict
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import edit, saved
from tests.checkpoint.test_damaged import CLIENT_STATE, MANIFEST, TAG
from tests.helpers.cells import in_turn

CONFIG, TOKENIZER, TEMPLATES = "config.json", "tokenizer.json", "additional_chat_templates"


KEY = list(range(624))
STATES: dict[str, list[Any]] = {
    "python": [[], {}, [3, [1, 2], None], [3, [*KEY, 625], None], [3, [*KEY, 624], "a"]],
    "numpy": [
        [],
        *(["MT19937", KEY, place, 0, 0.0] for place in (10**9, -1, 625, "1", None)),
        *(["MT19937", key, 5, 0, 0.0] for key in ([1], {"a": 1}, 7, [-1] * 624, [10**400] * 624)),
        ["PCG64", KEY, 5, 0, 0.0],
    ],
}


@pytest.mark.parametrize("kind", [*STATES, "cpu"])
def test_a_state_that_no_generator_has_is_refused(kind: str) -> None:
    """numpy itself reads, at a later draw, the memory at any place that a state names."""
    texts = [json.dumps(state) for state in STATES.get(kind, [])]
    before = rng_states()
    for text in [*texts, "[" * 8192, "[3,", "\0", ""]:
        state = torch.frombuffer(bytearray(text.encode().ljust(8192)), dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=f"generator '{kind}' is damaged: .*another tag"):
            set_rng_state(kind, state)
    assert all(torch.equal(state, before[name]) for name, state in rng_states().items())


class Reduced:
    """Pickled as a call of ``maker`` with ``arguments``, then given ``state``."""

    def __init__(self, maker: Any, arguments: tuple[Any, ...], state: Any) -> None:
        self._told = (maker, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._told


def _array(shape: Any, kind: Any, values: Any) -> Reduced:
    maker, arguments, _ = np.zeros(1).__reduce__()
    return Reduced(maker, arguments, (1, shape, kind, False, values))


def _dtype(kind: str, state: tuple[Any, ...]) -> Reduced:
    return Reduced(np.dtype, (kind, False, True), state)


PLAIN = (3, "<", None, None, None, -1, -1, 0)
HOSTILE = {
    "objects": _dtype("O8", (3, "|", None, None, None, -1, -1, 63)),
    "fields": _dtype("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 1)),
    "bytes of an object": _array((1,), _dtype("O8", PLAIN), b"\xef\xbe\xad\xde\0\0\0\0"),
    "flags": _array((1,), _dtype("f8", (*PLAIN[:-1], 63)), bytes(8)),
    "too few bytes": _array((1000,), _dtype("f8", PLAIN), bytes(8)),
    "a list of objects": _array((1,), _dtype("f8", PLAIN), [1.0]),
}


@in_turn("kind", HOSTILE)
def test_other_objects_of_numpy_are_refused(kind: str, tmp_path: Path) -> None:
    class Module:
        """Pickles as ``torch.save`` does, without looking at what numpy would say."""

        Pickler, dump, dumps = pickle._Pickler, pickle._dump, pickle._dumps  # type: ignore[attr-defined]

    torch.save({"module": HOSTILE[kind]}, tmp_path / "a.pt", pickle_module=Module)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_pickle(tmp_path / "a.pt", ())


def test_metadata_that_lacks_something_is_named(run: Path, tmp_path: Path) -> None:
    """A chunk without sizes, and a setting that is listed and in no file."""
    convert_checkpoint(run, tmp_path / "whole", to="dcp", progress=False)
    content = (tmp_path / "whole" / ".metadata").read_bytes()

    def without_sizes(data: Any) -> None:
        for entry in data.state_dict_metadata.values():
            for chunk in getattr(entry, "chunks", ()):
                vars(chunk).pop("sizes", None)  # entries share chunks

    def without_settings(data: Any) -> None:
        for index in [each for each in data.storage_data if "param_groups" in each.fqn]:
            del data.storage_data[index]

    for damage in (without_sizes, without_settings):
        data = pickle.loads(content)
        damage(data)
        (tmp_path / "whole" / ".metadata").write_bytes(pickle.dumps(data))
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged or missing .*Error: "):
            convert_checkpoint(tmp_path / "whole", tmp_path / "out", progress=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "run"
    saved(folder, client_state=CLIENT_STATE)
    edit(folder / MANIFEST, lambda document: document.pop("digest"))
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "a" / "run"))


def _held(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


def test_no_name_of_a_parameter_leads_out_of_a_universal_folder(run: Path, tmp_path: Path) -> None:
    content, before = (run / MANIFEST).read_text(), _held(tmp_path)
    for name in (f"{tmp_path}/victim", "../../victim", ".hidden"):
        changed = content.replace('"first.weight"', json.dumps(name))
        assert changed != content
        (run / MANIFEST).write_text(changed)
        with pytest.raises(CheckpointError, match="leads out of a folder"):
            convert_checkpoint(run, tmp_path / "b", to="universal", progress=False)
    assert _held(tmp_path) == before


def test_no_two_tensors_get_one_name_and_no_counter_is_absurd(run: Path) -> None:
    content = (run / MANIFEST).read_text()
    changes: dict[str, Any] = {
        "gives two tensors one name": lambda d: d["export"]["names"].update(
            {"first.weight": "second.weight"}
        ),
        "'__metadata__' is not the name": lambda d: d["export"]["names"].update(
            {"first.weight": "__metadata__"}
        ),
        "global_steps is": lambda d: d["counters"].update(global_steps=-3),
        "files are listed of ranks": lambda d: d["world"].update(size=1 << 40),
    }
    for said, change in changes.items():
        (run / MANIFEST).write_text(content)
        edit(run / MANIFEST, change)
        with pytest.raises(CheckpointError, match=said):
            reader.open_checkpoint(run / TAG)


def test_links_of_a_checkpoint_are_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "key").write_text("{}")
    (tmp_path / "private" / "key").write_text("secret")
    for place, name in ((run, CONFIG), (run / TAG, TOKENIZER)):
        (place / name).symlink_to(tmp_path / "key")
    (run / TAG / TEMPLATES).mkdir()
    (run / TAG / TEMPLATES / "own").write_text("own")
    (run / TAG / TEMPLATES / "key").symlink_to(tmp_path / "private" / "key")
    (run / "vocab.json").symlink_to(run / TAG / "added_tokens.json")
    (run / TAG / "added_tokens.json").write_text('{"a": 1}')
    done = convert_checkpoint(run, tmp_path / "out", progress=False)
    assert set(done.carried) == {"added_tokens.json", TEMPLATES, "vocab.json"}
    assert os.listdir(tmp_path / "out" / TEMPLATES) == ["own"]
    (run / TAG / TEMPLATES / "key").unlink()
    (run / TAG / TEMPLATES).rename(tmp_path / TEMPLATES)
    (run / TAG / TEMPLATES).symlink_to(tmp_path / TEMPLATES)
    assert TEMPLATES not in convert_checkpoint(run, tmp_path / "two", progress=False).carried


def test_a_pipe_or_a_device_is_no_companion(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for hostile in (tmp_path / "fifo", Path("/dev/zero")):
        (run / CONFIG).symlink_to(hostile)
        with pytest.raises(CheckpointError, match=rf"{CONFIG} is no regular file; remove it"):
            convert_checkpoint(run, tmp_path / "out", progress=False)
        (run / CONFIG).unlink()
    (run / "README.md").write_bytes(b"---\n\xff\n---\n")
    with pytest.raises(CheckpointError, match=r"README\.md is not UTF-8 text .* remove it"):
        convert_checkpoint(run, tmp_path / "out", progress=False)
    assert not os.listdir(tmp_path / "out")


def test_links_of_the_target_are_replaced(run: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    out.mkdir(), kept.mkdir()
    (run / TAG / TEMPLATES).mkdir()
    for name in (TOKENIZER, CONFIG, f"{TEMPLATES}/one"):
        (run / TAG / name).write_text("{}")
    for name in (TOKENIZER, CONFIG, "model.safetensors", "README.md"):
        (kept / name).write_text("kept")
        (out / name).symlink_to(kept / name)
    (out / TEMPLATES).symlink_to(kept)
    convert_checkpoint(run, out, progress=False)
    assert {path.name: path.read_text() for path in kept.iterdir()} == dict.fromkeys(
        (TOKENIZER, CONFIG, "model.safetensors", "README.md"), "kept"
    )
    assert not (out / TEMPLATES).is_symlink() and (out / TEMPLATES / "one").is_file()
    assert (out / TOKENIZER).read_text() == "{}"


def test_a_target_that_is_a_link_or_overlaps_the_checkpoint(run: Path, tmp_path: Path) -> None:
    """Each format refuses it in one sentence, before it writes."""
    (tmp_path / "free").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "free")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "tag").symlink_to(run / TAG)
    said = {
        tmp_path / "link": "link is a link to",
        tmp_path / "dangling": "dangling is a link to",
        run / TAG: "is the checkpoint that is read",
        run / TAG / "model": "is in the checkpoint that is read",
        tmp_path / "tag" / "model": "is in the checkpoint that is read",
        run: "holds the checkpoint that is read",
        tmp_path: "holds the checkpoint that is read",
    }
    before = {str(path) for path in tmp_path.rglob("*")}
    for target, reason in said.items():
        for to in ("safetensors", "dcp", "universal"):
            with pytest.raises(CheckpointError, match=reason):
                convert_checkpoint(run, target, to=to, progress=False)  # type: ignore[arg-type]
        for command in ("--overwrite", "--quantize int8_weight"):
            words = ["convert-checkpoint", str(run), str(target), *command.split()]
            ended = CliRunner().invoke(app, words)
            assert isinstance(ended.exception, CheckpointError) and reason in str(ended.exception)
        if "holds" not in reason:  # scripts for DeepSpeed name the folder of `latest` twice
            with pytest.raises(CheckpointError, match=reason):
                convert_zero_checkpoint_to_fp32_state_dict(run, target)
        assert {str(path) for path in tmp_path.rglob("*")} == before
    convert_zero_checkpoint_to_fp32_state_dict(run, run)
    assert (run / "pytorch_model.bin").is_file()


@in_turn("kind", ("link", "pipe"))
def test_nothing_in_a_target_leads_elsewhere(kind: str, run: Path, tmp_path: Path) -> None:
    """Neither the journal of a conversion nor its unfinished files are written through a link, or
    waited for.
    """
    out, kept = tmp_path / "out", tmp_path / "kept"
    out.mkdir(), kept.write_text("kept")
    for name in ("journal", "journal-new", "model.safetensors", "pytorch_model.bin"):
        path = out / f".hf-zero-new-{name}"
        path.symlink_to(kept) if kind == "link" else os.mkfifo(path)
    assert convert_checkpoint(run, out, progress=False).files == ("model.safetensors",)
    convert_zero_checkpoint_to_fp32_state_dict(run, out)
    assert kept.read_text() == "kept"
    assert not [path for path in out.iterdir() if path.is_symlink() or path.is_fifo()]


def test_links_to_other_folders_are_not_searched(run: Path, tmp_path: Path) -> None:
    """A copy of a run may consist of links to checkpoints; other links are named."""
    elsewhere = tmp_path / "b"
    shutil.copytree(run, elsewhere / "deep" / "run")
    (run / "archive").symlink_to(elsewhere)
    (run / "again").symlink_to(run / TAG)
    verdicts = {verdict.folder: verdict for verdict in verify_all(run)}
    assert verdicts.keys() == {run / TAG, run / "archive"} and verdicts[run / TAG].whole
    named = f"{run / 'archive'} leads out of it and is not followed; pass the folder"
    assert named in verdicts[run / "archive"].problems[0]
    only = tmp_path / "only"
    only.mkdir()
    (only / "archive").symlink_to(elsewhere)
    for search in (verify_all, find_checkpoint):
        with pytest.raises(CheckpointError, match="archive leads out of it and is not followed"):
            search(only)
    (only / "copy").symlink_to(run / TAG)
    assert find_checkpoint(only) == only / "copy"
    assert [(each.folder.name, each.whole) for each in verify_all(only)] == [
        ("copy", True),
        ("archive", False),
    ]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nothing writes into it: a read would wait for ever."""
    for name in ("manifest.json", "mp_rank_00_model_states.pt", ".metadata"):
        folder = tmp_path / name.strip(".") / TAG
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            reader.open_checkpoint(folder)
        assert tags_in(folder.parent) == [TAG]
    os.mkfifo(folder.parent / LATEST)
    with pytest.raises(CheckpointError, match="latest is missing or unreadable"):
        latest_tag(folder.parent)


def test_files_of_a_snapshot_are_links_to_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "1"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, blobs / "0", {"format": "pt"})
    (blobs / "1").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/0"))
    (snapshot / TOKENIZER).symlink_to(Path("../../blobs/1"))
    assert convert_checkpoint(snapshot, tmp_path / "out", progress=False).carried == (TOKENIZER,)
