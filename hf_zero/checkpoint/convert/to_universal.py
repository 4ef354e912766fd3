"""Universal folders of DeepSpeed 0.19: whole tensors in fp32 in a folder per parameter, which
DeepSpeed loads at stages 1 and 2, and hf-zero anywhere. hf-zero itself needs none: its checkpoints
resume on any number of ranks.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_zero.checkpoint import failures, find, storage
from hf_zero.checkpoint.convert.outputs import OutputTensor, log_left_out, outputs
from hf_zero.checkpoint.convert.targets import torch_save
from hf_zero.checkpoint.foreign.deepspeed import FOLDER, OWN_KEYS, SETTINGS, STEP, WEIGHTS
from hf_zero.checkpoint.manifest import MASTER
from hf_zero.checkpoint.manifest_reading import is_plain
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.checkpoint.reader import Checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed, log_rank0

LATEST_UNIVERSAL = "latest_universal"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
MODEL = "mp_rank_00_model_states.pt"
WRITTEN_AS = "0.19.8"  # the version of DeepSpeed that writes such files


def write_universal(checkpoint: Checkpoint, folder: Path) -> list[OutputTensor]:
    """Write ``checkpoint`` into the empty ``folder`` and return the tensors of the model in it.

    Needs memory for the model in its own dtype. Raises CheckpointError for optimizer state of whole
    tensors (Adafactor's), and for numbers beside the step count (NAdam's, ASGD's).
    """
    _refuse_unwritten(checkpoint)
    manifest = checkpoint.manifest
    wide = [name for name, (flat, _) in manifest.slots.items() if flat.dtype == torch.float64]
    if wide:
        log_rank0(
            f"a universal folder has fp32 alone: {listed(wide)}, which {checkpoint.folder} has in "
            "fp64, and their optimizer state are rounded; load the checkpoint itself to keep them",
            logging.WARNING,
        )
    log_left_out(checkpoint, {"the loss scale": checkpoint.manifest.scaler})
    (folder / FOLDER).mkdir()
    _write_states(checkpoint, folder / FOLDER)
    torch_save(_model_states(checkpoint), folder / MODEL)
    return outputs(checkpoint.manifest, torch.float32)


def name_latest(folder: Path) -> None:
    """Write the name of ``folder`` to ``latest_universal`` beside it, as DeepSpeed reads it.

    Raises CheckpointError, which says that ``folder`` itself is complete.
    """
    path = Path(os.path.abspath(folder))
    new, latest = (path.with_name(prefix + LATEST_UNIVERSAL) for prefix in (find.NEW, ""))
    try:
        storage.write_file(new, path.name.encode())
        storage.rename_durably(new, latest)
    except OSError as error:
        raise CheckpointError(
            f"{failures.describe_error(error, latest)}. {folder} itself is complete; write "
            f"{path.name} into {latest}"
        ) from error


def _refuse_unwritten(checkpoint: Checkpoint) -> None:
    optimizer = checkpoint.manifest.optimizer
    if optimizer is None:
        return
    numbers = {name for group in optimizer.groups for name in group.scalars} - {STEP}
    if optimizer.tensor_states or numbers:
        of = f"numbers ({', '.join(sorted(numbers))})" if numbers else "state of whole tensors"
        raise CheckpointError(
            f"{checkpoint.folder} holds {optimizer.class_name}'s {of}, for which a universal "
            "folder has no place; load the checkpoint as it is"
        )


def _write_states(checkpoint: Checkpoint, folder: Path) -> None:
    """Write each parameter's fp32 weights and optimizer state, and the settings of groups."""
    manifest = checkpoint.manifest
    groups = manifest.optimizer.groups if manifest.optimizer else ()
    numbers = {name: group.numbers_of(name) for group in groups for name in group.parameters}
    never_stepped = frozenset[str]().union(*(group.never_stepped for group in groups))
    for name, (flat, _) in manifest.slots.items():
        if flat.raw or flat.outside:
            continue  # bytes that only their module reads: saved with the model
        target = folder / strip_wrappers(name)
        if not is_plain(target.name) or target.parent != folder:
            raise CheckpointError(
                f"{checkpoint.folder} holds a parameter {name!r}, whose name leads out of a folder "
                "of its own; convert it to safetensors or dcp"
            )
        target.mkdir()
        weights = {"param": _whole(checkpoint, name, MASTER)}
        torch_save(weights | ({"cat_dim": 0} if flat.trainable else {}), target / f"{WEIGHTS}.pt")
        for state in flat.states if name not in never_stepped else ():
            if (tensor := _whole(checkpoint, name, state)) is not None:
                torch_save({"cat_dim": 0, "param": tensor}, target / f"{state}.pt")
        if (step := numbers.get(name, {}).get(STEP)) is not None:
            torch_save(torch.tensor(float(step)), target / f"{STEP}.pt")
    settings = [{**group.hyperparameters, "params": []} for group in groups]
    content = {"param_groups": settings, "zero_stage": 1, "ds_version": WRITTEN_AS}
    torch_save(content, folder / SETTINGS)


def _whole(checkpoint: Checkpoint, name: str, state: str) -> torch.Tensor | None:
    """Return the ``state`` of parameter ``name`` in fp32; None for one that it lacks."""
    _, slot = checkpoint.manifest.slots[name]
    ranges = checkpoint.ranges(name, state)
    if ranges is None:
        return None
    out = torch.empty(slot.whole, dtype=torch.float32)
    checkpoint.fill(out.view(-1), ranges, state)
    return out


def _model_states(checkpoint: Checkpoint) -> dict[str, object]:
    """Return DeepSpeed's model file: whole weights, counters, schedule."""
    manifest = checkpoint.manifest
    module = dict(_tensors(checkpoint))
    tied = {strip_wrappers(name): strip_wrappers(of) for name, of in manifest.aliases.items()}
    module |= {name: module[of] for name, of in tied.items() if of in module}
    trained = [name for name, (flat, _) in manifest.slots.items() if flat.trainable]
    optimizer = manifest.optimizer
    grouped = [group.parameters for group in optimizer.groups] if optimizer else [trained]
    counters = dict.fromkeys(COUNTERS, 0) | manifest.counters
    window = counters.pop("micro_steps") // max(1, counters["global_steps"])
    enabled = {} if manifest.precision == "fp32" else {manifest.precision: {"enabled": True}}
    client = checkpoint.client_state()
    if taken := sorted(client.keys() & OWN_KEYS):
        log_rank0(
            f"DeepSpeed stores its own state as {listed(taken)}: the client state in a universal "
            "folder is without these keys",
            logging.WARNING,
        )
    return {
        **client,
        **dict.fromkeys(("optimizer", "data_sampler", "random_ltd")),
        **dict.fromkeys(("frozen_param_shapes", "frozen_param_fragments")),
        "module": module,
        "buffer_names": [strip_wrappers(name) for name in manifest.buffers],
        "param_shapes": [
            OrderedDict(
                (strip_wrappers(name), torch.Size(manifest.slots[name][1].whole))
                for name in names
                if name not in manifest.outside
            )
            for names in grouped
        ],
        "shared_params": tied,
        "lr_scheduler": checkpoint.scheduler_state() or None,
        "sparse_tensor_module_names": set(),
        **counters,
        "dp_world_size": manifest.world["size"],
        "mp_world_size": 1,
        "ds_config": {
            "zero_optimization": {"stage": 1},
            "gradient_accumulation_steps": max(1, window),
            **enabled,
        },
        "ds_version": WRITTEN_AS,
    }


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters in the dtype that they train in, and its buffers."""
    for output in outputs(checkpoint.manifest):
        flat = None if output.is_buffer else checkpoint.manifest.slots[output.held][0]
        tensor = torch.empty(output.shape, dtype=flat.dtype if flat else output.dtype)
        output.fill(checkpoint, tensor)
        yield output.name, tensor
