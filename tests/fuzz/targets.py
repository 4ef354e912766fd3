"""The kinds of files that hf-zero reads, and what reads them. Damaged, each is read or refused with
an error of hf-zero, and nothing is written outside the folder that was named.

More of one kind by hand: ``python -m tests.fuzz.targets KIND FIRST LAST``.
"""

from __future__ import annotations

import io
import json
import logging
import random
import shutil
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hf_zero.checkpoint.convert.export import convert_checkpoint
from hf_zero.checkpoint.tensorfile import hash_of
from hf_zero.checkpoint.verify import verify_checkpoint
from hf_zero.cli.configurations import explain, migrate
from hf_zero.config import ZeroConfig
from hf_zero.errors import HfZeroError
from hf_zero.launch.hosts import read_hostfile, select
from tests.checkpoint.jobs import edit, saved
from tests.fuzz.mutations import damaged_bytes, damaged_document

ROOT = Path(__file__).parents[2]
INPUTS = ROOT / "tests" / "checkpoint" / "deepspeed_inputs"
Call = Callable[[], Any]
Kind = Callable[[random.Random, Path], Sequence[Call]]
CLIENT_STATE = {"numbers": [1, 2.5, None], "text": "a", "pair": (1, "b")}


def _checkpoint(folder: Path) -> Path:
    """Return a checkpoint in ``folder``, made once in a process; its manifest has no digest."""
    if not folder.exists():
        saved(folder, client_state=CLIENT_STATE)
        edit(folder / "global_step1" / "manifest.json", lambda document: document)
    return folder / "global_step1"


def _conversions(source: Path, folder: Path) -> list[Call]:
    return [
        partial(convert_checkpoint, source, folder / "out" / to, to=to, progress=False)
        for to in ("safetensors", "dcp", "universal")
    ]


def manifest(draw: random.Random, folder: Path) -> Sequence[Call]:
    tag = _checkpoint(folder / "run")
    path = tag / "manifest.json"
    text = _kept(path)
    damaged = json.dumps(damaged_document(draw, json.loads(text))).encode()
    path.write_bytes(damaged if draw.randrange(4) else damaged_bytes(draw, text))
    return [partial(verify_checkpoint, tag), *_conversions(tag, folder)]


def rank_files(draw: random.Random, folder: Path) -> Sequence[Call]:
    """Files whose hashes are right, as those of one who made them are."""
    tag = _checkpoint(folder / "run")
    told = json.loads(_kept(tag / "manifest.json"))
    entry = draw.choice(told["files"])
    for each in told["files"]:
        (tag / each["name"]).write_bytes(_kept(tag / each["name"]))
    content = _damaged_file(draw, _kept(tag / entry["name"]), entry["name"])
    (tag / entry["name"]).write_bytes(content)
    entry |= {"size": len(content), "hash": hash_of(content)}
    entry.pop("blocks", None)
    (tag / "manifest.json").write_text(json.dumps(told))
    return [partial(verify_checkpoint, tag), *_conversions(tag, folder)]


def deepspeed(draw: random.Random, folder: Path) -> Sequence[Call]:
    name = draw.choice(["stage0", "stage1", "stage3", "stage1-universal"])
    if not (folder / name).exists():
        shutil.copytree(INPUTS / name, folder / name)
    return _damaged_folder(draw, folder, folder / name)


def torch_folder(draw: random.Random, folder: Path) -> Sequence[Call]:
    if not (folder / "dcp").exists():
        tag = _checkpoint(folder / "run")
        convert_checkpoint(tag, folder / "dcp", to="dcp", progress=False)
    return _damaged_folder(draw, folder, folder / "dcp")


def _damaged_folder(draw: random.Random, folder: Path, source: Path) -> Sequence[Call]:
    """Conversions of ``source`` with one of its files damaged; the others are as they were."""
    files = sorted(each for each in source.rglob("*") if each.is_file() and not _is_kept(each))
    for each in files:
        each.write_bytes(_kept(each))
    chosen = draw.choice(files)
    chosen.write_bytes(_damaged_file(draw, _kept(chosen), chosen.name))
    return _conversions(source, folder)


def _damaged_file(draw: random.Random, content: bytes, name: str) -> bytes:
    """Return ``content`` damaged: of an archive one of its files, of tensors mostly the header."""
    if name.endswith(".json"):
        with suppress(ValueError):
            return json.dumps(damaged_document(draw, json.loads(content))).encode()
    if content[:2] == b"PK" and draw.randrange(8):
        return _damaged_archive(draw, content)
    if name.endswith(".safetensors") and draw.randrange(4):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        document = json.dumps(damaged_document(draw, header)).encode()
        if not draw.randrange(3):
            document = damaged_bytes(draw, content[8 : 8 + length])
        return len(document).to_bytes(8, "little") + document + content[8 + length :]
    return damaged_bytes(draw, content)


def _damaged_archive(draw: random.Random, content: bytes) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(found, "w") as new:
        names = old.namelist()
        pickles = [name for name in names if name.endswith(".pkl")]
        chosen = draw.choice(pickles if pickles and draw.randrange(4) else names)
        for name in names:
            part = old.read(name)
            new.writestr(name, damaged_bytes(draw, part) if name == chosen else part)
    return found.getvalue()


def configuration(draw: random.Random, folder: Path) -> Sequence[Call]:
    """Configurations of recipes, as JSON, Hjson and YAML."""
    given = draw.choice(sorted((ROOT / "recipes").glob("*/zero*.yaml")))
    document = yaml.safe_load(given.read_text())
    inner = document.get("zero_config") or document.get("deepspeed_config") or document
    chosen = draw.choice([document, inner])
    if draw.randrange(3):
        chosen = damaged_document(draw, chosen)
    suffix = draw.choice([".json", ".yaml", ".hjson"])
    text = json.dumps(chosen)
    if suffix == ".yaml":
        with suppress(yaml.YAMLError, RecursionError):
            text = yaml.safe_dump(chosen)
    content = text.encode("utf-8", "replace")
    path = folder / f"config{suffix}"
    path.write_bytes(content if draw.randrange(3) else damaged_bytes(draw, content))
    return [
        partial(ZeroConfig.coerce, str(path)),
        partial(explain, str(path), every=True),
        partial(migrate, str(path)),
    ]


def hostfile(draw: random.Random, folder: Path) -> Sequence[Call]:
    text = b"# ours\nworker-0 slots=4\nworker-1 slots=2  # small\n\n10.0.0.3 slots = 8\n"
    (folder / "hostfile").write_bytes(damaged_bytes(draw, text))
    chosen = damaged_bytes(draw, b"worker-0@worker-1:0,1").decode("utf-8", "replace")

    def read() -> None:
        hosts = read_hostfile(folder / "hostfile")
        for include, exclude in ((chosen, ""), ("", chosen)):
            with suppress(HfZeroError):
                select(hosts, include, exclude)

    return [read]


KINDS: dict[str, Kind] = {
    each.__name__: each
    for each in (manifest, rank_files, deepspeed, torch_folder, configuration, hostfile)
}
SUFFIX = ".as-it-was"


def _kept(path: Path) -> bytes:
    """Return ``path`` as it was at the first call."""
    kept = path.with_name(path.name + SUFFIX)
    kept = path.parent.parent / f".{path.parent.name}-{kept.name}"
    if not kept.exists():
        shutil.copyfile(path, kept)
    return kept.read_bytes()


def _is_kept(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


def fuzz(kind: str, seeds: range, folder: Path) -> Iterator[tuple[int, BaseException]]:
    """Read files of a kind damaged by each of ``seeds``; yield the errors that are not
    hf-zero's, and what was written beside the target.
    """
    work = folder / "a" / "b" / kind
    work.mkdir(parents=True, exist_ok=True)
    before = None
    logging.disable(logging.ERROR)
    try:
        for seed in seeds:
            draw = random.Random(f"{kind} {seed}")
            for call in KINDS[kind](draw, work):
                before = before or _outside(folder, work)
                try:
                    with redirect_stdout(io.StringIO()):
                        call()
                except HfZeroError:
                    pass
                except SystemExit as error:
                    if error.code not in (0, 1, 2):
                        yield seed, error
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    if type(error).__name__ != "Exit":
                        yield seed, error
            shutil.rmtree(work / "out", ignore_errors=True)
            if _outside(folder, work) != before:
                yield seed, AssertionError(f"written outside: {_outside(folder, work)}")
                return
    finally:
        logging.disable(logging.NOTSET)


def _outside(folder: Path, work: Path) -> set[Path]:
    return {each for each in folder.rglob("*") if work not in each.parents}


if __name__ == "__main__":
    kind, first, last = sys.argv[1], *map(int, sys.argv[2:4])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for seed, error in fuzz(kind, range(first, last), Path(name)):
            frames = traceback.extract_tb(error.__traceback__)
            at = next(
                (each for each in reversed(frames) if "hf_zero/" in each.filename), frames[-1]
            )
            said = f"{type(error).__name__} {error!s:.200}".replace("\n", " ")
            print(kind, seed, f"{at.filename}:{at.lineno}", said)
