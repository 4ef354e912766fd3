"""State other than tensors: as JSON if that preserves the value, else in a form that torch's
weights_only loader accepts.

Nothing here can execute code when it is read: a save refuses what ``torch.load(weights_only=True)``
refuses.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from hf_zero.checkpoint.storage import AnyPath, store_errors
from hf_zero.errors import CheckpointError


def is_json(value: Any) -> bool:
    """Whether ``json.loads(json.dumps(value))`` equals ``value``, with equal types (no tuples, no
    integer keys).
    """
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(is_json(item) for item in value)
    return type(value) is dict and all(
        type(key) is str and is_json(item) for key, item in value.items()
    )


def split(what: str, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide ``state`` into its manifest form ``{"json", "objects"}`` and the values for
    ``objects.pt``.

    ``what`` names the state in errors. Raises CheckpointError for a value that neither form can
    hold.
    """
    plain, objects = {}, {}
    for key, value in state.items():
        if type(key) is not str:
            raise CheckpointError(
                f"{what} has the key {key!r} of type {type(key).__name__}; keys must be strings"
            )
        if is_json(value):
            plain[key] = value
        else:
            _check_loadable(f"{what}[{key!r}]", value)
            objects[key] = value
    return {"json": plain, "objects": sorted(objects)}, objects


def _check_loadable(what: str, value: Any) -> None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"{what} of type {type(value).__name__} cannot be saved without a "
            "pickle that executes code "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); "
            "store numbers, strings, tensors, or lists and dictionaries of these"
        ) from error


def load_objects(path: AnyPath) -> dict[str, dict[str, Any]]:
    """Return the content of ``objects.pt``.

    Raises CheckpointError if the file is damaged or would execute code.
    """
    try:
        with store_errors(path), path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise CheckpointError(
            f"{path} cannot be loaded ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no detail'}); "
            "restore the file, or load another tag of this run"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(part, dict) for part in content.values()
    ):
        raise CheckpointError(
            f"{path} does not hold what hf-zero writes there; restore the file, or load "
            "another tag of this run"
        )
    return content


def join(
    what: str, state: Mapping[str, Any], objects: Mapping[str, Any], source: AnyPath
) -> dict[str, Any]:
    """Inverse of :func:`split`.

    Raises CheckpointError for a promised key that ``objects`` lacks.
    """
    missing = [key for key in state["objects"] if key not in objects]
    if missing:
        raise CheckpointError(
            f"{source} lacks {missing} of {what}; restore the file, or load another tag of this run"
        )
    return dict(state["json"]) | {key: objects[key] for key in state["objects"]}
