"""Rank 0's part of a save: the small files, the manifest last, and the renames that make it a
checkpoint (FORMAT.md section 6).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_zero.checkpoint import contents, folders
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.draft import Extra, Written, describe
from hf_zero.checkpoint.hashes import hash_of
from hf_zero.checkpoint.landing import Landing
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.records import FileEntry
from hf_zero.checkpoint.retention import retain

SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class Rest:
    """All files but the ranks' own, as bytes: in the folder, and ``above`` it.

    The manifest lacks the hashes of the ranks' files.
    """

    manifest: Manifest
    files: dict[str, bytes]
    above: dict[str, bytes]


def rest_of(
    engine: Engine,
    to: Landing,
    written: list[Written],
    extra: Extra,
    exclude_frozen: bool,
    save_latest: bool,
) -> Rest:
    """What rank 0 writes beside its own file."""
    manifest = describe(engine, to.tag, to.save_id, written, extra, exclude_frozen)
    files = contents.companions(engine.module)
    if any(extra.objects.values()):
        buffer = io.BytesIO()
        torch.save(extra.objects, buffer)
        name = to.named(folders.OBJECTS_NAME)
        files[name] = content = buffer.getvalue()
        manifest = replace(manifest, objects=FileEntry(name, 0, len(content), hash_of(content)))
    above = {SCRIPT: Path(__file__).with_name(SCRIPT).read_bytes()}
    if save_latest:
        above[folders.LATEST] = to.tag.encode()
    return Rest(manifest, files, above)


def publish(to: Landing, rest: Rest, hashes: Iterable[str]) -> None:
    """Write ``rest``, with the ``hashes`` of the ranks' files in the manifest: the checkpoint is
    there, or nothing has changed.
    """
    files = tuple(
        replace(entry, hash=hash) for entry, hash in zip(rest.manifest.files, hashes, strict=True)
    )
    to.publish(replace(rest.manifest, files=files), rest.files, rest.above)


def announce(to: Landing, rest: Rest, keep: int | None) -> None:
    """Have ``latest`` name the new checkpoint, then drop the one that it replaces and those too
    many.
    """
    to.announce(rest.above)
    if keep is not None:
        retain(to.final, keep)
