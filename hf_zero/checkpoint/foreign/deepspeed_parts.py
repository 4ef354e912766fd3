"""Files and dictionaries of a DeepSpeed checkpoint: ranks of files, the optimizer state in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.foreign.assembled import OptimizerGroup
from hf_zero.errors import CheckpointError
from hf_zero.optim import hyperparameters

CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
)
# Keys that DeepSpeed itself stores beside the client state.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
        "num_experts",
        "universal_checkpoint_info",
    ]
)
RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


def groups_of(
    base: Mapping[str, Any], shapes: Sequence[Mapping[str, Any]], step: Any = None
) -> tuple[OptimizerGroup, ...] | None:
    """Return the groups of ``base``, torch's state dict of an optimizer, with their parameters'
    names; None if it has none. ``step`` is the step count if it is stored elsewhere.
    """
    if "param_groups" not in base:
        return None
    settings = base["param_groups"]
    # Stage 3 lists parameters by buffer, and a group may have several buffers: join them.
    if len(shapes) > len(settings):
        buffers = iter(shapes)
        shapes = [
            {name: shape for _ in group["params"] for name, shape in next(buffers, {}).items()}
            for group in settings
        ]
    made = []
    for group, names in zip(settings, shapes):
        kept = hyperparameters.plain(group)
        state = state_of(base, group["params"][0]) if group.get("params") else {}
        # FusedAdam keeps the step count in the group, torch beside the tensors.
        steps = [
            value
            for value in (step, state.get("step"), kept.pop("step", None))
            if value is not None
        ]
        made.append(OptimizerGroup(kept, {"step": float(steps[0])} if steps else {}, tuple(names)))
    return tuple(made)


def steps_of(saved: Mapping[str, Any]) -> float | None:
    """Return the step count of the optimizer in a rank's file; None if it has none."""
    base = torch_state(saved)
    counts = [
        kept["step"]
        for kept in (*base.get("state", {}).values(), *base.get("param_groups", ()))
        if "step" in kept
    ]
    return float(counts[0]) if counts else None


def scaler_of(saved: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the state that :class:`Fp16LossScaler` would have after the steps counted by the saved
    loss scale: read from its object or, at stage 0, from the optimizer's own state. None without a
    loss scale.
    """
    kept = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    if not kept.get("cur_scale"):
        return None
    state = {"scale": float(kept["cur_scale"]), "left": 1, "since": -1}
    if "last_overflow_iter" in kept:  # a dynamic one
        since = int(kept["cur_iter"]) - int(kept["last_overflow_iter"]) - 2
        window = int(kept["scale_window"])
        state["since"] = since % window if since > 0 else since
        state["left"] = int(kept.get("cur_hysteresis", 1))
    return state


def files_by_rank(folder: Path, suffix: str) -> dict[int, Path]:
    """Return the files of one kind by data-parallel rank.

    Raises CheckpointError for files of several model-parallel ranks.
    """
    made: dict[int, Path] = {}
    for path in folder.glob(f"*zero_pp_rank_*_{suffix}"):
        rank, part = map(int, RANK.search(path.name).groups())  # type: ignore[union-attr]
        if part or rank in made:
            raise model_parallel(folder, path)
        made[rank] = path
    return made


def model_parallel(folder: Path, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} was written by a model-parallel DeepSpeed run, of which each file holds a part "
        f"of the model ({path.name}); "
        "merge it with the tools of the program that wrote it"
    )


def torch_state(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return torch's state dict of the optimizer in ``saved``.

    With ``elastic_checkpoint`` DeepSpeed writes a list of states without settings, which is
    converted.
    """
    found = saved.get("base_optimizer_state") or saved.get("optimizer_state_dict") or saved
    if isinstance(found, list):
        step = {
            key: saved[name]
            for key, name in (("step", "base_optimizer_state_step"),)
            if name in saved
        }
        return {
            "state": dict(enumerate(found)),
            "param_groups": [{"params": [index], **step} for index in range(len(found))],
        }
    return found if isinstance(found, Mapping) else {}


def state_of(base: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = base.get("state", {}).get(index, {})
    return found


def at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
