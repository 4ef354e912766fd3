"""The part of the manifest that describes the model; for a pipeline, described stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint import engine_state
from hf_zero.checkpoint.records import Export, FlatEntry, dtype_of
from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.cut_parameters import WholeNames

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine


@dataclass(frozen=True, eq=False)
class Described:
    """Manifest entries for the model of one engine: the whole model, or one stage of a pipeline.

    flats: entries without their chunks. groups: parameter names in each optimizer group.
    """

    flats: tuple[FlatEntry, ...]
    parameters: dict[str, torch.dtype]  # in the model's order
    aliases: dict[str, str]
    excluded: tuple[str, ...]
    export: Export
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, engine: TrainingEngine, exclude_frozen: bool) -> Described:
        flats, excluded, names = [], [], WholeNames(engine.module)
        every = names.every
        dtypes: dict[str, torch.dtype] = {}
        for flat in filter(engine_state.is_of_this_stage, engine.flats):
            held = [slot.name for slot in flat.layout.slots]
            if exclude_frozen and not flat.trainable:
                excluded += [each for name in held for each in every(name)]
                continue
            key = engine_state.stage_key(flat)
            flats.append(FlatEntry(key, flat.trainable, flat.dtype, flat.layout, (), flat.raw))
            dtypes |= {name: dtype_of(engine.param_dtypes[name]) for name in held}
        order = engine_state.model_order(engine.module, engine.aliases, dtypes)
        group_of = {} if engine.bound is None else engine.bound.group_of
        groups = [] if engine.bound is None else engine.bound.groups
        in_groups: list[list[str]] = [[] for _ in groups]
        for name, at in group_of.items():
            in_groups[at] += every(name)
        return cls(
            tuple(flats),
            {each: dtypes[name] for name in order for each in every(name)},
            names.pairs(engine.aliases),
            tuple(excluded),
            engine_state.export_of(engine.module, engine.aliases),
            tuple(tuple(sorted(in_groups[at])) for at in range(len(groups))),
        )

    @classmethod
    def joined(cls, parts: Sequence[Described]) -> Described:
        """Merge the descriptions of the pipeline's stages into that of one model.

        Raises CheckpointError if the stages have different numbers of optimizer groups.
        """
        if len({len(part.groups) for part in parts}) > 1:
            raise CheckpointError(
                "the stages of the pipeline have different numbers of optimizer groups "
                f"({[len(part.groups) for part in parts]}); give each of them all groups, empty "
                "ones too"
            )
        exports = [part.export for part in parts]
        names = {held: name for export in exports for held, name in export.names.items()}
        return cls(
            tuple(flat for part in parts for flat in part.flats),
            {name: dtype for part in parts for name, dtype in part.parameters.items()},
            {name: held for part in parts for name, held in part.aliases.items()},
            tuple(name for part in parts for name in part.excluded),
            replace(exports[0], names=names),
            tuple(
                tuple(sorted({name for group in groups for name in group}))
                for groups in zip(*(part.groups for part in parts))
            ),
        )
