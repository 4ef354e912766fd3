"""Folders of ``torch.distributed.checkpoint`` from a checkpoint: weights and optimizer state under
the names of the model's parameters, as FSDP2 and torchtitan load them.

A folder answers to each of the forms in which they ask. Weights are ``model.<parameter>`` and, the
same bytes, ``<parameter>``; optimizer state is ``optimizer.state.<parameter>.<state>``. Settings of
groups are ``optimizer.param_groups.<n>.<setting>`` and, the same bytes again,
``optimizer.param_groups.<parameter>.<setting>``, for ``flatten_optimizer_state_dict``. The engine's
counters are beside them. A form whose names other tensors have is left out whole, with a warning.

torch writes the files; a planner fills one tensor at a time from the chunks of the checkpoint.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from hf_zero import optim
from hf_zero.checkpoint.convert.outputs import OutputTensor, log_left_out, outputs, tied_names
from hf_zero.checkpoint.convert.targets import file_error
from hf_zero.checkpoint.foreign.dcp import COUNTERS
from hf_zero.checkpoint.manifest import GroupEntry
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, logger

STEP = "step"
METADATA = ".metadata"
# forms of further names, as a warning describes them
TIED, BARE = "the further names of tied weights", "the weights as <parameter>"
SETTINGS = "settings of groups as optimizer.param_groups.<parameter>.<setting>"
FORMS = (TIED, BARE, SETTINGS)

Fill = Callable[[torch.Tensor], None]  # copies a whole tensor into one, contiguous


class _Planner(dcp.DefaultSavePlanner):
    """A plan over meta tensors, each of which is filled when it is written."""

    def __init__(self, fills: dict[str, Fill]):
        super().__init__()
        self._fills = fills

    def lookup_object(self, index: MetadataIndex) -> object:
        tensor = super().lookup_object(index)
        if index.fqn in self._fills:
            tensor = torch.empty_like(tensor, device="cpu")
            self._fills[index.fqn](tensor)
        return tensor


class _State:
    """The nested dict to be saved, its tensors' values, and further names of the same bytes."""

    def __init__(self, checkpoint: Checkpoint, tensors: list[OutputTensor]):
        self._checkpoint = checkpoint
        self.fills: dict[str, Fill] = {}
        # by form, the path of each further name in the dict that a program asks with, and the name
        # it equals
        self.further: dict[str, dict[tuple[str, ...], str]] = {form: {} for form in FORMS}
        self.tree: dict[str, Any] = {"model": {t.name: self._weights(t) for t in tensors}}
        names = {tensor.name for tensor in tensors}
        for tied, of in tied_names(checkpoint.manifest).items():
            if of in names:
                self.further[TIED][("model", tied)] = f"model.{of}"
                self.further[BARE][(tied,)] = f"model.{of}"
        manifest = checkpoint.manifest
        if manifest.optimizer is not None:
            self.tree["optimizer"] = {"state": {}, "param_groups": []}
            groups = manifest.optimizer.groups
            # an optimizer of one group may be asked for the group of frozen parameters, too
            others = self.tree["model"].keys() if len(groups) == 1 else ()
            for group in groups:
                self._add_group(group, manifest.optimizer.class_name, others)
        if manifest.lr_scheduler is not None:
            self.tree["lr_scheduler"] = checkpoint.scheduler_state()
        self.tree[COUNTERS] = dict(manifest.counters)

    def _weights(self, output: OutputTensor) -> torch.Tensor:
        self.further[BARE][(output.name,)] = f"model.{output.name}"
        self.fills[f"model.{output.name}"] = partial(output.fill, self._checkpoint)
        return torch.empty(output.shape, dtype=output.dtype, device="meta")

    def _add_group(self, group: GroupEntry, kind: str, others: Iterable[str]) -> None:
        optimizer = self.tree["optimizer"]
        outside = self._checkpoint.manifest.outside
        parameters = [name for name in group.parameters if name not in outside]
        names = [strip_wrappers(name) for name in parameters]
        number = len(optimizer["param_groups"])
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in group.hyperparameters.items()
        }
        settings = {**_defaults(kind), **settings}
        optimizer["param_groups"].append({**settings, "params": names})
        for parameter, name in zip(parameters, names):
            optimizer["state"][name] = self._states(parameter, name, group)
        for name in {*names, *others}:
            # torch flattens a setting that is a dict, into other names
            for key in (key for key, value in settings.items() if not isinstance(value, dict)):
                self.further[SETTINGS][("optimizer", f"param_groups.{name}.{key}")] = (
                    f"optimizer.param_groups.{number}.{key}"
                )

    def _states(self, source: str, name: str, group: GroupEntry) -> dict[str, torch.Tensor]:
        if source in group.never_stepped:  # torch's optimizer has no state of it
            return {}
        checkpoint = self._checkpoint
        flat, slot = checkpoint.manifest.slots[source]
        scalars = group.numbers_of(source)
        states = {key: torch.tensor(float(value)) for key, value in scalars.items()}
        for state in flat.states:
            if (ranges := checkpoint.ranges(source, state)) is None:
                continue
            fill = partial(_fill, checkpoint, ranges, state)
            self.fills[f"optimizer.state.{name}.{state}"] = fill
            dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
            states[state] = torch.empty(slot.whole, dtype=dtype, device="meta")
        return states


def _fill(checkpoint: Checkpoint, ranges: Any, state: str, out: torch.Tensor) -> None:
    checkpoint.fill(out.view(-1), ranges, state)


# How an optimizer computes: settings that no checkpoint of hf-zero holds, and that a loader of
# torch asks for where its optimizer has them.
IMPLEMENTATION: dict[str, object] = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}


def _defaults(kind: str) -> dict[str, object]:
    """Return the settings that an optimizer of this name, of torch or of hf-zero, has beside those
    of a checkpoint.
    """
    name = kind.rpartition(".")[2]
    cls = getattr(torch.optim, name, None)
    if cls is None and name in optim.__all__:
        cls = getattr(optim, name)
    if cls is None:
        return IMPLEMENTATION
    group = cls([torch.zeros(1, 1, requires_grad=True)]).param_groups[0]  # Muon takes matrices
    settings = {key: value for key, value in group.items() if key != "params"}
    return settings | {key: v for key, v in IMPLEMENTATION.items() if key not in settings}


def write_dcp(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None, exclude_frozen: bool
) -> list[OutputTensor]:
    """Write ``checkpoint`` into the empty ``folder`` and return the tensors of the model in it.

    Raises CheckpointError for optimizer state of whole tensors (Adafactor's), which torch's
    optimizers do not name.
    """
    optimizer, scaler = checkpoint.manifest.optimizer, checkpoint.manifest.scaler
    if optimizer is not None and optimizer.tensor_states:
        raise CheckpointError(
            f"{checkpoint.folder} holds {optimizer.class_name}'s state of whole tensors, for which "
            "torch.distributed.checkpoint has no names; convert it with --to safetensors"
        )
    left_out = {"the client state": checkpoint.client_state(), "the loss scale": scaler}
    log_left_out(checkpoint, left_out)
    tensors = outputs(checkpoint.manifest, dtype, exclude_frozen)
    state = _State(checkpoint, tensors)
    writer = dcp.FileSystemWriter(folder, thread_count=1)
    try:
        with warnings.catch_warnings():  # of a save in one process, which this is meant to be
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(state.tree, storage_writer=writer, planner=_Planner(state.fills), no_dist=True)
    except CheckpointException as error:  # torch's, around what was raised here
        cause, _ = error.failures[0]
        raise file_error(cause) from None
    _name_again(folder / METADATA, state.further)
    return tensors


def _name_again(path: Path, further: dict[str, dict[tuple[str, ...], str]]) -> None:
    """Add the names ``further``, by form, to a folder's metadata, each for the bytes of an existing
    name. A form with a name that is taken is left out whole, with a warning: a program that asks
    with it gets an error, not other values.
    """
    metadata = dcp.FileSystemReader(path.parent).read_metadata()
    places: dict[str, list[tuple[MetadataIndex, object]]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((index, info))
    for form, names in further.items():
        entries = {".".join(keys): (keys, name) for keys, name in names.items()}
        entries = {fqn: entry for fqn, entry in entries.items() if fqn != entry[1]}
        if taken := [fqn for fqn in entries if fqn in metadata.state_dict_metadata]:
            logger.warning(
                "the converted folder is without %s: other values have the names %s; load it as "
                "torch's get_state_dict has it",
                form,
                listed(taken, 3),
            )
            continue
        for fqn, (keys, name) in entries.items():
            metadata.state_dict_metadata[fqn] = metadata.state_dict_metadata[name]
            metadata.planner_data[fqn] = keys
            for index, info in places[name]:
                metadata.storage_data[MetadataIndex(fqn, index.offset, index.index)] = info
    new = path.with_name(f"{path.name}-new")
    new.write_bytes(pickle.dumps(metadata))
    os.replace(new, path)
