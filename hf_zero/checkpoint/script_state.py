"""Client state and the schedule's state: what JSON holds of them is in the manifest, the rest in
``objects.pt``, of values that load without running code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from hf_zero.checkpoint.manifest import FileEntry, class_name
from hf_zero.checkpoint.storage import AnyPath, store_errors
from hf_zero.checkpoint.tensorfile import hash_of
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

T = TypeVar("T")


@dataclass(frozen=True)
class NonTensorState:
    """State other than tensors, in the manifest's form, and its part for ``objects.pt``."""

    client_state: dict[str, object]
    lr_scheduler: dict[str, object] | None
    objects: dict[str, dict[str, object]]


def non_tensor_state(engine: TrainingEngine, client_state: Mapping[str, object]) -> NonTensorState:
    """Return the current state other than tensors. Raises CheckpointError if it cannot be saved."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"client_state={client_state!r:.80} is of type {type(client_state).__name__}; pass a "
            "dictionary"
        )
    client, objects_of_client = split("client_state", client_state)
    scheduler: dict[str, object] | None = None
    objects_of_scheduler: dict[str, object] = {}
    if hasattr(engine.lr_scheduler, "state_dict"):
        state, objects_of_scheduler = split(
            "the state of the lr scheduler", engine.lr_scheduler.state_dict()
        )
        scheduler = {"class": class_name(engine.lr_scheduler), "state": state}
    return NonTensorState(
        client, scheduler, {"client_state": objects_of_client, "lr_scheduler": objects_of_scheduler}
    )


def objects_file(extra: NonTensorState, name: str) -> tuple[FileEntry, bytes] | None:
    """Return entry and content of ``objects.pt``, called ``name``; None if all state is JSON."""
    if not any(extra.objects.values()):
        return None
    buffer = io.BytesIO()
    torch.save(extra.objects, buffer)
    content = buffer.getvalue()
    return FileEntry(name, 0, len(content), hash_of(content)), content


def is_json(value: object) -> bool:
    """Return whether ``json.loads(json.dumps(value))`` equals ``value``, with equal types (no
    tuples, no integer keys).
    """
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(is_json(item) for item in value)
    return type(value) is dict and all(
        type(key) is str and is_json(item) for key, item in value.items()
    )


def split(what: str, state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
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
        try:
            plain_value = is_json(value)
            json.dumps(value if plain_value else None)
        except (RecursionError, ValueError) as error:  # of cycles, depth, and digits of an integer
            raise CheckpointError(
                f"{what}[{key!r}] cannot be saved ({error}); store values that are not nested in "
                "themselves or thousands deep, and long integers as strings"
            ) from error
        if plain_value:
            plain[key] = value
        else:
            _check_loadable(f"{what}[{key!r}]", value)
            objects[key] = value
    return {"json": plain, "objects": sorted(objects)}, objects


def copy_as_saved(value: T) -> T:
    """Return a copy of ``value``, which a checkpoint can hold, as a load would return it."""
    return saved_and_loaded(value)[1]


def saved_and_loaded(value: T) -> tuple[bytes, T]:
    """Return the bytes of ``value`` in a checkpoint, and what a load returns for them. Raises any
    exception for a value that a checkpoint cannot hold.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer.getvalue(), cast(T, torch.load(buffer, map_location="cpu", weights_only=True))


def _check_loadable(what: str, value: object) -> None:
    try:
        copy_as_saved(value)
    except Exception as error:  # pickling runs code of the value, which may raise anything
        raise CheckpointError(
            f"{what} of type {type(value).__name__} cannot be saved without a pickle that executes "
            f"code ({str(error).splitlines()[0] if str(error) else type(error).__name__}); store "
            "numbers, strings, tensors, or lists and dictionaries of these"
        ) from error


def load_objects(path: AnyPath) -> dict[str, dict[str, object]]:
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
    what: str, state: JsonObject, objects: Mapping[str, object], source: AnyPath
) -> dict[str, object]:
    """Return the state that :func:`split` has divided; ``source`` is the file of its ``objects``.

    Raises CheckpointError for a promised key that ``objects`` lacks.
    """
    missing = [key for key in state["objects"] if key not in objects]
    if missing:
        raise CheckpointError(
            f"{source} lacks {missing} of {what}; restore the file, or load another tag of this run"
        )
    return dict(state["json"]) | {key: objects[key] for key in state["objects"]}
