"""Whether a checkpoint can be loaded, as far as its manifest, sizes and headers tell: cheap
enough to ask of every one in a folder.
"""

from __future__ import annotations

from hf_zero.checkpoint import folders
from hf_zero.checkpoint.opened import Checkpoint
from hf_zero.checkpoint.places import Place
from hf_zero.errors import CheckpointError


def trouble(folder: Place) -> str:
    """What keeps the checkpoint in ``folder`` from being loaded; "" if nothing is seen. Reads no
    tensor: ``verify`` does.

    Of a checkpoint that another program wrote it is known only that it is one.
    """
    if not folders.is_checkpoint(folder):
        return (
            ""
            if folders.can_be_read(folder)
            else f"{folder} holds no checkpoint; restore it, or load another one"
        )
    try:
        with Checkpoint(folder) as checkpoint:
            for index in range(len(checkpoint.manifest.files)):
                checkpoint.file(index)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def whole_beside(folder: Place) -> list[str]:
    """The other tags of the run that ``folder`` belongs to, oldest first, without those in which
    something is wrong.
    """
    return [
        tag
        for tag in folders.tags(folder.parent)
        if tag != folder.name and not trouble(folder.parent / tag)
    ]
