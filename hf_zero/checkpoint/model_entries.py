"""The manifest's description of a model: its flat buffers, parameters and optimizer groups, under
their names in the whole model, and the names of ``save_pretrained`` and PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint.manifest import Adapter, Export, FlatEntry
from hf_zero.checkpoint.manifest_reading import dtype_of
from hf_zero.checkpoint.parameter_names import strip_wrappers
from hf_zero.config.feature_rows import provided
from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.walk import attribute_of
from hf_zero.zero.layout.whole_names import WholeNames, persistent_buffers

if TYPE_CHECKING:
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.training_engine import TrainingEngine


def pp_stage_key(flat: FlatBuffer) -> str:
    """Return the key of ``flat``, unique among the stages of a pipeline."""
    dims = flat.engine_mesh.dims
    if dims.pipeline == 1:
        return flat.key
    return f"{flat.key}|stage {dims.coordinate(flat.engine_mesh.rank, 'pipeline')}"


@dataclass(frozen=True, eq=False)
class ModelEntries:
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
    def of(
        cls,
        engine: TrainingEngine,
        saved: Iterable[FlatBuffer],
        names: WholeNames,
        exclude_frozen: bool,
    ) -> ModelEntries:
        """Return the entries for the flat buffers ``saved`` of the engine."""
        flats, left_out = [], []
        dtypes: dict[str, torch.dtype] = {}
        for flat in saved:
            in_flat = [slot.name for slot in flat.layout.slots]
            if exclude_frozen and not flat.trainable:
                left_out += in_flat
                continue
            entry = FlatEntry(pp_stage_key(flat), flat.trainable, flat.dtype, flat.layout, ())
            bf16_masters = flat.trainable and flat.spec.master_dtype == torch.bfloat16
            outside = flat.spec.outside
            flats.append(replace(entry, raw=flat.raw, bf16_masters=bf16_masters, outside=outside))
            dtypes |= {name: dtype_of(engine.sharded_model.param_dtypes[name]) for name in in_flat}
        order = model_order(engine.module, engine.aliases, dtypes)
        group_of = {} if engine.bound is None else engine.bound.group_of
        every = names.every_of([*order, *left_out, *group_of])
        groups: list[list[str]]
        groups = [] if engine.bound is None else [[] for _ in engine.bound.optimizer.param_groups]
        for name, index in group_of.items():
            groups[index] += every[name]
        return cls(
            flats=tuple(flats),
            parameters={whole: dtypes[name] for name in order for whole in every[name]},
            aliases=names.pairs(engine.aliases),
            excluded=tuple(whole for name in left_out for whole in every[name]),
            export=export_of(engine.module, engine.aliases, names),
            groups=tuple(tuple(sorted(group)) for group in groups),
        )

    @classmethod
    def joined(cls, parts: Sequence[ModelEntries]) -> ModelEntries:
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
        names = {first: name for export in exports for first, name in export.names.items()}
        return cls(
            flats=tuple(flat for part in parts for flat in part.flats),
            parameters={name: dtype for part in parts for name, dtype in part.parameters.items()},
            aliases={tied: first for part in parts for tied, first in part.aliases.items()},
            excluded=tuple(name for part in parts for name in part.excluded),
            export=replace(exports[0], names=names),
            groups=tuple(
                tuple(sorted({name for group in groups for name in group}))
                for groups in zip(*(part.groups for part in parts))
            ),
        )


def model_order(
    module: torch.nn.Module, aliases: Mapping[str, str], unordered: Iterable[str]
) -> list[str]:
    """Return the names ``unordered`` in the order of the model's parameters."""
    left = dict.fromkeys(unordered)
    names = [aliases.get(name, name) for name, _ in module.named_parameters(remove_duplicate=False)]
    return [*dict.fromkeys(name for name in (*names, *left) if name in left)]


def export_of(
    module: torch.nn.Module, aliases: Mapping[str, str], whole_names: WholeNames
) -> Export:
    """Return the names for ``save_pretrained``: the one of several tied names that Hugging Face
    keeps, and the names it leaves out, read from the model's own lists.
    """
    patterns = []
    ignored: dict[str, Sequence[str]] = {}  # by prefix: as in save_pretrained, of outermost models
    for prefix, child in module.named_modules():
        ignores = attribute_of(child, "_keys_to_ignore_on_save")
        if ignores and not any(f"{prefix}.".startswith(outer) for outer in ignored):
            ignored[f"{prefix}." if prefix else ""] = tuple(ignores)
        for pattern in attribute_of(child, "_tied_weights_keys") or ():
            patterns.append(re.compile(f"{re.escape(prefix)}\\.{pattern}" if prefix else pattern))
    groups: dict[str, list[str]] = {}
    for tied, first in aliases.items():
        groups.setdefault(first, [first]).append(tied)
    names: dict[str, str] = {}
    for first, group in groups.items():
        # A name in `_tied_weights_keys` is tied to another one at load time, so the other one is
        # saved.
        sources = [name for name in group if not any(pattern.search(name) for pattern in patterns)]
        if sources and first not in sources:
            names[first] = min(sources)
    skip = tuple(sorted(f"{prefix}{name}" for prefix, names in ignored.items() for name in names))
    model_class = type(unwrapped(module)).__name__
    return Export(whole_names.pairs(names), skip, model_class, adapters_of(module, aliases))


def adapters_of(module: torch.nn.Module, aliases: Mapping[str, str]) -> dict[str, Adapter]:
    """Return PEFT's description of each adapter, by held parameter names; {} without PEFT."""
    if not attribute_of(unwrapped(module), "peft_config"):
        return {}
    inner = unwrapped(module)
    described = provided("described_adapters")(inner, set(persistent_buffers(inner)))
    outer = "_orig_mod." if "_orig_mod" in module._modules else ""
    return {
        adapter: Adapter(
            config,
            {
                strip_wrappers(written): aliases.get(outer + name, outer + name)
                for written, name in tensors.items()
            },
        )
        for adapter, (config, tensors) in described.items()
    }


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside ``torch.compile``'s wrapper or a pipeline stage; else ``module``."""
    inner = module._modules.get("_orig_mod") or module
    cut: torch.nn.Module | None = inner.__dict__.get("hf_model")  # the stages of a pipeline
    return inner if cut is None else cut
