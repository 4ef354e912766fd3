"""DeepSpeed's checkpoints, stages 0 to 3, as version 0.19 writes them, and universal checkpoints of
``ds_to_universal``.

[Note: file layout]
``mp_rank_00_model_states.pt`` (stages 0 to 2) or one ``zero_pp_rank_R_…_model_states.pt`` per rank
(stage 3) hold the module, counters, schedule and client state; ``zero_pp_rank_R_…_optim_states.pt``
(with the prefix ``bf16_`` in bf16) hold the fp32 weights and moments of rank R. Stages 1 and 2
concatenate the parameters of a group in the order of ``param_shapes`` and cut the result into equal
parts. (``param_slice_mappings``, which names a rank's parameters, is wrong with
``round_robin_gradients``.) Stage 3 cuts each parameter into equal parts, the last one padded, and
concatenates a rank's parts, group after group, in buffers of about ``sub_group_size`` elements.
Stage 0 stores torch's own optimizer state in the model's file, in 16 bits with the fp32 weights
beside it. A universal checkpoint has whole tensors in a folder per parameter,
``zero/<name>/{fp32,exp_avg,…}.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.foreign.assembled import (
    Assembled,
    FolderContents,
    ModelGroups,
    OptimizerGroup,
    Parameter,
    ParameterPart,
    Widened,
    states,
)
from hf_zero.checkpoint.foreign.optimizer_states import (
    as_in_model,
    by_contents,
    by_shapes,
    groups_of,
    named,
    shapes_in,
    state_of,
    steps_of,
    torch_state,
)
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.checkpoint.manifest import MASTER, SHARD
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, logger

CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
)
# Keys that DeepSpeed itself stores beside the client state.
OWN_KEYS = frozenset([
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dimensions",
    "num_experts", "universal_checkpoint_info",
])  # fmt: skip
RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


class DeepSpeedFolder:
    """Reader of a DeepSpeed folder: the model's file, and the optimizer's files by rank."""

    def __init__(self, folder: Path, model_groups: ModelGroups = ()) -> None:
        self.folder, self.model_groups = folder, model_groups
        models = files_by_rank(folder, "model_states.pt")
        plain = sorted(folder.glob("mp_rank_*_model_states.pt"))
        # Any of these is refused: tensor parallelism writes a file per rank, expert parallelism one
        # per expert, pipeline parallelism one per layer.
        for part in (
            *plain[1:],
            *sorted(folder.glob("*expert_*")),
            *sorted(folder.glob("expp_rank_*")),
            *sorted(folder.glob("layer_*")),
        ):
            raise model_parallel(folder, part)
        self.model_paths = [path for _, path in sorted(models.items())] or plain
        self.optim_paths = self._optimizer_files()
        self.model = self._load(self.model_paths[0])
        if (
            not isinstance(self.model["module"], Mapping)
            or int(self.model.get("mp_world_size") or 1) > 1
        ):
            raise model_parallel(folder, self.model_paths[0])
        self.module: Mapping[str, torch.Tensor] = self.model["module"]
        self.optims = [self._load(path)["optimizer_state_dict"] for path in self.optim_paths]
        self.stage = 0 if not self.optims else 3 if "fp32_flat_groups" in self.optims[0] else 1
        self.stage = int(at(self.model, "ds_config", "zero_optimization", "stage") or self.stage)
        world = int(self.model.get("dp_world_size") or len(self.optim_paths) or 1)
        for what, paths in (
            ("optimizer", self.optim_paths),
            *([("model", self.model_paths)] if models else []),
        ):
            if paths and len(paths) != world:
                raise CheckpointError(
                    f"{folder} lacks files: {world} ranks wrote it, {len(paths)} of their {what} "
                    "files are there; restore them"
                )
        steps = [steps_of(saved) for saved in self.optims]
        for path, step in zip(self.optim_paths, steps):
            if step != steps[0]:
                raise CheckpointError(
                    f"{path} belongs to another save than {self.optim_paths[0].name} beside it: "
                    f"its optimizer took {step} steps, not {steps[0]}; "
                    "restore the file, or name another checkpoint"
                )
        self.world = world

    def _optimizer_files(self) -> list[Path]:
        return [path for _, path in sorted(files_by_rank(self.folder, "optim_states.pt").items())]

    def _load(self, path: Path) -> dict[str, Any]:
        data = load_pickle(path, CLASSES)
        key = "module" if path.name.endswith("model_states.pt") else "optimizer_state_dict"
        if not isinstance(data, dict) or key not in data:
            raise CheckpointError(
                f"{path} is not a file of a DeepSpeed checkpoint: it holds no {key!r}; name a "
                "folder that save_checkpoint wrote"
            )
        return data

    def contents(self) -> FolderContents:
        config = self.model.get("ds_config") or {}
        precision = next(
            (name for name in ("bf16", "fp16") if at(config, name, "enabled") is True), "fp32"
        )
        trained = list(self._trained())
        names = {parameter.name for parameter in trained}
        buffers = [name for name in self.model.get("buffer_names") or () if name in self.module]
        aliases = self._tied(names)
        frozen = list(self._frozen(names | {*buffers} | {*aliases}))
        accumulation = config.get("gradient_accumulation_steps", 1)
        steps = int(self.model.get("global_steps") or 0)
        return FolderContents(
            folder=self.folder,
            writer=f"DeepSpeed {self.model.get('ds_version', '')}".strip(),
            files=tuple(path.name for path in (*self.model_paths, *self.optim_paths)),
            parameters=tuple(_in_order([*trained, *frozen], self.module)),
            buffers={name: self.module[name] for name in buffers},
            aliases=aliases,
            groups=self._groups(),
            lr_scheduler=self.model.get("lr_scheduler"),
            scaler=self._scaler() if precision == "fp16" else None,
            counters={
                "global_steps": steps,
                "global_samples": int(self.model.get("global_samples") or 0),
                "skipped_steps": int(self.model.get("skipped_steps") or 0),
                "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            },
            client_state={key: value for key, value in self.model.items() if key not in OWN_KEYS},
            world=self.world,
            stage=self.stage,
            precision=precision,
        )

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the trained parameters' shapes, by group and name, in the optimizer's order; all
        of the module in one group if they are unknown.
        """
        if self._known_shapes is not None:
            return self._known_shapes
        return [{name: tuple(tensor.shape) for name, tensor in self._module_parameters()}]

    @cached_property
    def _known_shapes(self) -> list[dict[str, tuple[int, ...]]] | None:
        """The shapes that the file lists. At stage 0, which writes no names with the optimizer
        state, they are inferred from the fp32 master weights, the model that loads, or the shapes.

        None if they cannot be inferred: the optimizer state is then left out, with a warning.
        """
        listed = self.model.get("param_shapes")
        if listed is not None:
            return [{name: tuple(shape) for name, shape in group.items()} for group in listed]
        weights, masters = dict(self._module_parameters()), self._masters()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        state = self._optimizer_state()
        settings = state.get("param_groups", ())
        names_by_group = named(settings, shapes)
        if names_by_group is None and masters:
            names_by_group = by_contents(masters, weights)
        elif names_by_group is None:
            sizes = shapes_in(state)
            names_by_group = as_in_model(sizes, self.model_groups, shapes) or by_shapes(
                sizes, shapes
            )
        if names_by_group is not None:
            return [{name: shapes[name] for name in names} for names in names_by_group]
        if not settings:
            return [shapes]
        logger.warning(
            "%s, written by DeepSpeed at stage 0, does not say which parameters its "
            "optimizer's state belongs to, and %s do not tell: "
            "the weights are read%s, the optimizer's state is not",
            self.folder,
            "its master weights" if masters else "their shapes",
            " in 16 bits" if masters else "",
        )
        return None

    def _masters(self) -> list[list[torch.Tensor]]:
        """Return the float32 weights of stage 0 in 16 bits, by group: one tensor per parameter or,
        from a fused optimizer, one flat tensor.
        """
        saved = self.model.get("optimizer") or {}
        return [list(group) for group in saved.get("fp32_groups", ())] or [
            [flat] for flat in saved.get("fp32_groups_flat", ())
        ]

    def _module_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's parameters, tied ones once."""
        buffers, storages = {*(self.model.get("buffer_names") or ())}, set()
        for name, tensor in self.module.items():
            if (
                name in buffers
                or not isinstance(tensor, torch.Tensor)
                or (tensor.data_ptr(), tensor.shape) in storages
            ):
                continue
            storages.add((tensor.data_ptr(), tensor.shape))
            yield name, tensor

    def _optimizer_state(self) -> Mapping[str, Any]:
        """Return torch's state dict of the optimizer, that of rank 0 if each rank has one."""
        return torch_state(self.optims[0] if self.optims else self.model.get("optimizer") or {})

    def _dtype(self, name: str) -> torch.dtype:
        return self.module[name].dtype if name in self.module else torch.float32

    def _trained(self) -> Iterator[Parameter]:
        pieces = (
            self._parts_at_stage_0()
            if not self.optims
            else self._parts_at_stage_3()
            if "fp32_flat_groups" in self.optims[0]
            else self._parts_below_stage_3()
        )
        for group in self.shapes():
            for name, shape in group.items():
                yield Parameter(name, shape, self._dtype(name), True, tuple(pieces.get(name, ())))

    def _parts_at_stage_0(self) -> dict[str, list[ParameterPart]]:
        """Return the parts at stage 0: whole parameters, with the state that torch's optimizer
        keeps for each one, or for a whole group as one flat tensor.
        """
        shapes = self.shapes()
        known = self._known_shapes is not None
        masters = self._masters() if known else []
        base: Mapping[str, object] = self._optimizer_state() if known else {}
        parts: dict[str, list[ParameterPart]] = {}
        index = 0
        for number, names in enumerate(shapes):
            joined = bool(masters) and len(masters[number]) < len(names)
            at = 0
            for position, name in enumerate(names):
                weights = (
                    self.module[name] if not masters else masters[number][0 if joined else position]
                )
                numel = self.module[name].numel()
                state = states(state_of(base, number if joined else index).items(), weights.numel())
                cut = {MASTER: weights.reshape(-1), **state}
                if joined:
                    cut = {key: tensor[at : at + numel] for key, tensor in cut.items()}
                    at += numel
                parts[name] = [ParameterPart(0, {**cut, MASTER: _as_float(cut[MASTER])})]
                index += 1
        return parts

    def _parts_below_stage_3(self) -> dict[str, list[ParameterPart]]:
        """Return the parts at stages 1 and 2: the parameters of a group are concatenated and cut
        into equal parts; the padding at the end is not written.
        """
        parts: dict[str, list[ParameterPart]] = {}
        for group, shapes in enumerate(self.shapes()):
            numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
            gaps = self.optims[0].get("param_alignment_paddings") or ()
            after = dict(zip(numels, gaps[group])) if gaps else {}
            places, end = dict[str, int](), 0
            for name, numel in numels.items():
                places[name], end = end, end + numel + after.get(name, 0)
            start = 0
            for rank, saved in enumerate(self.optims):
                weights: torch.Tensor = saved["single_partition_of_fp32_groups"][group]
                tensors = {
                    MASTER: weights,
                    **states(state_of(torch_state(saved), group).items(), weights.numel()),
                }
                for name in numels:
                    first = max(places[name], start)
                    last = min(places[name] + numels[name], start + weights.numel())
                    if first < last:
                        cut = {key: t[first - start : last - start] for key, t in tensors.items()}
                        parts.setdefault(name, []).append(
                            ParameterPart(len(self.model_paths) + rank, cut)
                        )
                start += weights.numel() + saved["group_paddings"][group]
        return parts

    def _parts_at_stage_3(self) -> dict[str, list[ParameterPart]]:
        """Return the parts at stage 3: equal parts of parameters, concatenated by rank."""
        pieces: dict[str, list[ParameterPart]] = {}
        for rank, saved in enumerate(self.optims):
            flats: Sequence[torch.Tensor] = saved["fp32_flat_groups"]
            base = torch_state(saved)
            parts = [
                {MASTER: flat, **states(state_of(base, index).items(), flat.numel())}
                for index, flat in enumerate(flats)
            ]
            index, at = 0, 0
            for name, shape in (
                (name, shape) for group in self.shapes() for name, shape in group.items()
            ):
                numel = torch.Size(shape).numel()
                share = -(-numel // self.world)
                if index < len(parts) and at == flats[index].numel():
                    index, at = index + 1, 0
                if index >= len(parts) or at + share > flats[index].numel():
                    raise CheckpointError(
                        f"{self.optim_paths[rank]} is damaged: it ends before parameter "
                        f"{name!r}; restore it"
                    )
                real = _without_padding(numel, rank, share)
                if real or (rank == 0 and not numel):
                    cut = {key: tensor[at : at + real] for key, tensor in parts[index].items()}
                    pieces.setdefault(name, []).append(
                        ParameterPart(len(self.model_paths) + rank, cut)
                    )
                at += share
        return pieces

    def _tied(self, trained: set[str]) -> dict[str, str]:
        """Return tied name -> held name: the pairs that the file lists, and names that share a
        tensor in it. A trained name is never the tied one.
        """
        buffers = {*(self.model.get("buffer_names") or ())}
        whole = {
            name: tensor
            for name, tensor in self.module.items()
            if isinstance(tensor, torch.Tensor) and name not in buffers
        }
        candidates = (
            trained
            | {*(self.model.get("frozen_param_shapes") or ())}
            | ({*whole} if len(self.model_paths) == 1 else set())
        )
        aliases = {
            tied: first
            for tied, first in (self.model.get("shared_params") or {}).items()
            if first in candidates and tied not in trained
        }
        at: dict[tuple[int, torch.Size], str] = {}
        for name in sorted(
            (name for name in whole if name in candidates and name not in aliases),
            key=lambda name: name not in trained,
        ):
            if whole[name].numel():
                at.setdefault((whole[name].data_ptr(), whole[name].shape), name)
        for name, tensor in whole.items():
            first = at.get((tensor.data_ptr(), tensor.shape))
            if first not in (None, name) and name not in trained:
                aliases.setdefault(name, first)
        return aliases

    def _frozen(self, names: set[str]) -> Iterator[Parameter]:
        """Yield the parameters that are not trained: stored whole in the model's file, or at stage
        3 in one part per rank.
        """
        shapes = self.model.get("frozen_param_shapes") or {}
        if len(self.model_paths) == 1:
            for name, tensor in self.module.items():
                if name not in names and isinstance(tensor, torch.Tensor):
                    yield Parameter(
                        name,
                        tuple(tensor.shape),
                        tensor.dtype,
                        False,
                        (ParameterPart(0, {SHARD: tensor.reshape(-1)}),),
                    )
            return
        models = [self.model, *map(self._load, self.model_paths[1:])] if shapes else []
        fragments = [model.get("frozen_param_fragments") or {} for model in models]
        for name, shape in shapes.items():
            numel = torch.Size(shape).numel()
            share = -(-numel // self.world)
            pieces = [
                ParameterPart(
                    rank, {SHARD: part[name].reshape(-1)[: _without_padding(numel, rank, share)]}
                )
                for rank, part in enumerate(fragments)
            ]
            yield Parameter(name, tuple(shape), fragments[0][name].dtype, False, tuple(pieces))

    def _groups(self) -> tuple[OptimizerGroup, ...] | None:
        known = self._known_shapes
        groups = None if known is None else groups_of(self._optimizer_state(), known)
        rates = at(self.model.get("lr_scheduler"), "_last_lr") or ()
        if groups is None or len(rates) != len(groups):
            return groups
        # If the optimizer's settings were not written, the schedule still gives the learning rate.
        return tuple(
            replace(group, hyperparameters={"lr": float(rate), **group.hyperparameters})
            for group, rate in zip(groups, rates)
        )

    def _scaler(self) -> JsonObject | None:
        return scaler_of(self.optims[0] if self.optims else self.model.get("optimizer") or {})


def _as_float(weights: torch.Tensor) -> torch.Tensor | Widened:
    return weights if weights.dtype == torch.float32 else Widened(torch.float32, weights)


def _without_padding(numel: int, rank: int, share: int) -> int:
    """Return how many of the ``share`` elements in the part of ``rank`` belong to the parameter."""
    return max(0, min(numel - rank * share, share))


def _in_order(parameters: Sequence[Parameter], module: Mapping[str, object]) -> list[Parameter]:
    """Return ``parameters`` in the order of the ``module``, those that it lacks last."""
    places = {name: index for index, name in enumerate(module)}
    return sorted(parameters, key=lambda parameter: places.get(parameter.name, len(places)))


FOLDER, SETTINGS, WEIGHTS, STEP = "zero", "optimizer_state.pt", "fp32", "step"


class Universal(DeepSpeedFolder):
    """Reader of a universal checkpoint. The model's files are next to ``zero``, as in DeepSpeed's
    other checkpoints.
    """

    def _optimizer_files(self) -> list[Path]:
        return []

    def _trained(self) -> Iterator[Parameter]:
        for group in self.shapes():
            for name, shape in group.items():
                tensors = {
                    path.stem: self._tensor(path)
                    for path in sorted((self.folder / FOLDER / name).glob("*.pt"))
                    if path.stem != STEP
                }
                if WEIGHTS not in tensors:
                    raise CheckpointError(
                        f"{self.folder / FOLDER / name / WEIGHTS}.pt is missing; restore it, or "
                        "convert the checkpoint again"
                    )
                flat = {
                    MASTER if state == WEIGHTS else state: tensor.reshape(-1)
                    for state, tensor in tensors.items()
                }
                yield Parameter(name, shape, self._dtype(name), True, (ParameterPart(0, flat),))

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The state of the optimizer beside the parameters'."""
        settings: Mapping[str, Any] = load_pickle(self.folder / FOLDER / SETTINGS, CLASSES)
        return settings

    def _groups(self) -> tuple[OptimizerGroup, ...] | None:
        base: Mapping[str, object] = self._settings.get("optimizer_state_dict", self._settings)
        places = {name: self.folder / FOLDER / name for group in self.shapes() for name in group}
        steps = {
            name: load_pickle(path / f"{STEP}.pt", CLASSES)
            for name, path in places.items()
            if (path / f"{STEP}.pt").is_file()
        }
        return groups_of(base, self.shapes(), steps)

    def _scaler(self) -> JsonObject | None:
        return scaler_of(self._settings)

    @staticmethod
    def _tensor(path: Path) -> torch.Tensor:
        content = load_pickle(path, CLASSES)
        tensor: torch.Tensor = content["param"] if isinstance(content, dict) else content
        return tensor.detach()


def open_checkpoint(folder: Path, model_groups: ModelGroups = ()) -> Assembled:
    """Open ``folder``, one tag of a DeepSpeed run, as a checkpoint.

    Raises CheckpointError for a damaged one, and for tensor- or pipeline-parallel ones, each of
    whose files holds a part of the model.
    """
    kind = Universal if (folder / FOLDER).is_dir() else DeepSpeedFolder
    try:
        return Assembled(kind(folder, model_groups).contents())
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is not what DeepSpeed 0.19 writes, or is damaged ({type(error).__name__}: "
            f"{error}); restore its files, or name another checkpoint"
        ) from error


def scaler_of(saved: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the state that :class:`Fp16LossScaler` would have after the steps counted by the saved
    loss scale: read from its object or, at stage 0, from the optimizer's own state. None without a
    loss scale.
    """
    saved_scale = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
    if not saved_scale.get("cur_scale"):
        return None
    state = {"scale": float(saved_scale["cur_scale"]), "left": 1, "since": -1}
    if "last_overflow_iter" in saved_scale:  # a dynamic one
        since = int(saved_scale["cur_iter"]) - int(saved_scale["last_overflow_iter"]) - 2
        window = int(saved_scale["scale_window"])
        state["since"] = since % window if since > 0 else since
        state["left"] = int(saved_scale.get("cur_hysteresis", 1))
    return state


def files_by_rank(folder: Path, suffix: str) -> dict[int, Path]:
    """Return the files of one kind by data-parallel rank.

    Raises CheckpointError for files of several model-parallel ranks.
    """
    paths: dict[int, Path] = {}
    for path in folder.glob(f"*zero_pp_rank_*_{suffix}"):
        rank, part = map(int, RANK.search(path.name).groups())  # type: ignore[union-attr]
        if part or rank in paths:
            raise model_parallel(folder, path)
        paths[rank] = path
    return paths


def model_parallel(folder: Path, path: Path) -> CheckpointError:
    """Return the error for ``path``, which holds a part of the model alone."""
    return CheckpointError(
        f"{folder} was written by a model-parallel DeepSpeed run, of which each file holds a part "
        f"of the model ({path.name}); merge it with the tools of the program that wrote it"
    )


def at(tree: object, *keys: str) -> Any:
    """Return the item of nested dictionaries at ``keys``; None if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
