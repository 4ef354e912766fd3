"""Rank 0's part of a save: the small files, the manifest last, and the renames that make it a checkpoint (FORMAT.md section 6)."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from hf_zero.checkpoint import contents, folders
from hf_zero.checkpoint.contract import Engine
from hf_zero.checkpoint.draft import Extra, Written, describe
from hf_zero.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_zero.checkpoint.retention import retain

SCRIPT = "zero_to_fp32.py"


@dataclass(frozen=True)
class Rest:
    """All files but the ranks' own, as bytes; and the manifest, which is written once the hashes of those are known."""

    manifest: Manifest
    files: dict[str, bytes]

    def with_hashes(self, digests: list[str]) -> Rest:
        """``digests``: the SHA-256 of each rank's file."""
        files = tuple(replace(entry, sha256=digest) for entry, digest in zip(self.manifest.files, digests))
        return replace(self, manifest=replace(self.manifest, files=files))


def rest_of(engine: Engine, tag: str, save_id: str, written: list[Written], extra: Extra, exclude_frozen: bool, save_latest: bool) -> Rest:
    """What rank 0 writes beside its own file."""
    manifest = describe(engine, tag, save_id, written, extra, exclude_frozen)
    files = contents.companions(engine.module)
    if any(extra.objects.values()):
        buffer = io.BytesIO()
        torch.save(extra.objects, buffer)
        files[folders.OBJECTS_NAME] = content = buffer.getvalue()
        manifest = replace(manifest, objects=FileEntry(folders.OBJECTS_NAME, 0, len(content), sha256(content).hexdigest()))
    # Written with the others, moved to their places by announce: a disk that fills up is found out before anything has changed.
    files[folders.NEW + SCRIPT] = Path(__file__).with_name(SCRIPT).read_bytes()
    if save_latest:
        files[folders.NEW + folders.LATEST] = tag.encode()
    return Rest(manifest, files)


def publish(temporary: Path, rest: Rest) -> None:
    """Write ``rest`` beside the ranks' files, the manifest last and read back, and give the folder its name."""
    for name, content in rest.files.items():
        folders.write_file(temporary / name, content)
    folders.write_file(temporary / MANIFEST_NAME, rest.manifest.dumps())
    Manifest.read(temporary / MANIFEST_NAME)
    folders.publish(temporary, rest.manifest.tag)


def announce(final: Path, keep: int | None) -> None:
    """Move ``zero_to_fp32.py`` and ``latest`` to their places, then drop the checkpoint that this one replaces and those too many."""
    for name in (SCRIPT, folders.LATEST):
        if (final / (folders.NEW + name)).exists():
            os.replace(final / (folders.NEW + name), final.parent / name)
    folders.fsync_folder(final.parent)
    folders.discard_replaced(final)
    if keep is not None:
        retain(final, keep)
