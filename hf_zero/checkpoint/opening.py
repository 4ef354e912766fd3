"""Opens a checkpoint of any program that is read here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_zero.checkpoint.foreign import open_foreign, recognise
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.checkpoint.storage import AnyPath


def open_checkpoint(
    folder: AnyPath, grouped: Callable[[], Sequence[Sequence[str]]] = tuple
) -> Checkpoint:
    """The checkpoint in ``folder``, ours or of a kind that ``foreign`` reads, which may ask how an
    optimizer groups names.

    Raises CheckpointError.
    """
    if not (folder / MANIFEST_NAME).is_file() and recognise(folder):
        return open_foreign(folder, grouped())
    return Checkpoint(folder)
