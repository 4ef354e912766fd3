"""State of an engine that a checkpoint holds: this rank's tensors, and the names and configuration
of the model.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.checkpoint.records import MASTER, RNG, SHARD, Adapter, Export, strip_wrappers
from hf_zero.device import kinds
from hf_zero.errors import CheckpointError
from hf_zero.logging import listed
from hf_zero.zero.access.consolidate import belongs, written
from hf_zero.zero.layout.cut_parameters import WholeNames
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.sharding import sharding_of

if TYPE_CHECKING:
    from hf_zero.zero.layout.flat_buffer import FlatBuffer
    from hf_zero.zero.training_engine import TrainingEngine

# key suffix of get_extra_state, which is not part of the format
EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
# torch holds a mutex while it creates the tensor of a generator's state. A garbage collection at
# that point may switch to another thread, which would wait for the mutex while it holds the GIL:
# a deadlock.
_generator = threading.Lock()


def weights_of(flat: FlatBuffer) -> tuple[str, torch.Tensor]:
    """Return the name under which the values of ``flat`` are stored, and the tensor that holds them
    on this rank: the master weights if there are any, else the shard.
    """
    master = flat.optimizer_shard.master
    if master is not None:
        return MASTER, master
    return SHARD, flat.shard


def stage_key(flat: FlatBuffer) -> str:
    """Return the key of ``flat``, unique among the stages of a pipeline."""
    dims = flat.engine_mesh.dims
    if dims.pipeline == 1:
        return flat.key
    return f"{flat.key}|stage {dims.coordinate(flat.engine_mesh.rank, 'pipeline')}"


def is_of_this_stage(flat: FlatBuffer) -> bool:
    """Whether the stage of this rank saves ``flat``: the first of several stages that hold it."""
    mesh, stages = flat.engine_mesh, flat.spec.sharding.stages
    return not stages or mesh.dims.coordinate(mesh.rank, "pipeline") == stages[0]


def saved_key(flat: FlatBuffer) -> str:
    """Return the key of ``flat`` in a checkpoint; if tensor or expert parallelism cuts it, that of
    this rank's part. Raises CheckpointError for a part of a tensor whose Sharding has no box.
    """
    axes, dims = flat.mesh.axes, flat.engine_mesh.dims
    lost = []
    for slot in flat.layout.slots:
        named = bool(sharding_of(flat.parameters[slot.name]).names)
        if slot.box is None and axes[named:]:
            lost.append(slot.name)
    if lost:
        raise CheckpointError(
            f"{listed(lost)} are parts of tensors, and nothing says which; give their "
            "Sharding a box"
        )
    rank = flat.engine_mesh.rank
    return "|".join([stage_key(flat), *(f"{axis} {dims.coordinate(rank, axis)}" for axis in axes)])


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor of this rank, [numel], that need not be in memory until it is written."""

    dtype: torch.dtype
    numel: int
    values: Callable[[], torch.Tensor]

    @classmethod
    def here(cls, tensor: torch.Tensor) -> DeferredTensor:
        return cls(tensor.dtype, tensor.numel(), lambda: tensor)


def flat_tensors(flat: FlatBuffer, bound: Any) -> dict[str, DeferredTensor]:
    """Return the weights and per-element optimizer states that this rank stores for ``flat``."""
    kept = flat.optimizer_shard
    if kept.storage.offloaded and bound is not None:
        kept.wait_for_update()
        storage, numel = kept.storage, flat.owned[1] - flat.owned[0]
        return {
            name: DeferredTensor(storage.dtype(name), numel, partial(storage.fetch, name))
            for name in bound.names(kept)
        }
    if not flat.trainable:
        return {
            SHARD: DeferredTensor(
                flat.dtype, flat.owned[1] - flat.owned[0], lambda: weights_of(flat)[1]
            )
        }
    name, weights = weights_of(flat)
    held = {name: DeferredTensor.here(weights)}
    if bound is not None:
        held |= {
            key: DeferredTensor.here(tensor)
            for key, tensor in bound.tensors(kept).items()
            if key != MASTER
        }
    return held


def persistent_buffers(
    module: torch.nn.Module, without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the tensors in ``state_dict`` that are not parameters, under every name they have
    there: buffers, the state of quantised weights.

    Tensors that accompany a parameter named in ``without`` are left out.
    """
    held = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in written(child).items():
            if (
                name not in child._parameters
                and name != EXTRA_STATE
                and isinstance(value, torch.Tensor)
            ):
                held[f"{prefix}.{name}" if prefix else name] = value
    return {name: value for name, value in held.items() if not belongs(name, without)}


def model_buffers(engine: TrainingEngine, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """Return :func:`persistent_buffers` of the engine's model, or of its pipeline stage."""
    return persistent_buffers(engine.module, frozen_names(engine) if exclude_frozen else ())


def buffers_of_other_stages(
    engine: TrainingEngine, exclude_frozen: bool
) -> dict[str, torch.Tensor]:
    """Return the buffers that rank 0 lacks, on the CPU: those of other pipeline stages, and those
    of modules that differ between ranks. Collective if the model has any of these.
    """
    mesh, names = engine.mesh, WholeNames(engine.module)
    if mesh.dims.pipeline == 1 and not names:
        return {}
    sent = {}
    if mesh.job.rank:
        held = {
            names.own(name): buffer
            for name, buffer in model_buffers(engine, exclude_frozen).items()
            if mesh.whole.is_first or names.own(name) != name
        }
        sent = {name: buffer.cpu() for name, buffer in held.items()}
    every: list[dict[str, torch.Tensor]] = mesh.job.all_gather_object(sent, "buffers of the stages")
    return {name: buffer for held in every for name, buffer in held.items()}


def refuse_destroyed(engine: TrainingEngine, what: str) -> None:
    """Raise CheckpointError if the engine has released its shards and optimizer state."""
    if engine.destroyed:
        raise CheckpointError(
            f"the engine was destroyed and holds no weights and no optimizer state to {what}; "
            f"{what} before destroy()"
        )


def frozen_names(engine: TrainingEngine) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {slot.name for flat in engine.flats if not flat.trainable for slot in flat.layout.slots}


def rng_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's torch generators. The accelerator's is included only if it
    is in use, so that a save does not initialise it.
    """
    with _generator:
        states = {f"{RNG}cpu": torch.get_rng_state()}
    kind = kinds.in_use()
    if kind is not None:
        states[f"{RNG}{kind}"] = kinds.module_of(kind).get_rng_state()
    return states


def model_order(
    module: torch.nn.Module, aliases: Mapping[str, str], held: Iterable[str]
) -> list[str]:
    """Return the names in ``held`` in the order of the model's parameters."""
    left = dict.fromkeys(held)
    names = [aliases.get(name, name) for name, _ in module.named_parameters(remove_duplicate=False)]
    order = [name for name in dict.fromkeys(names) if name in left]
    return order + [name for name in left if name not in set(order)]


def export_of(module: torch.nn.Module, aliases: Mapping[str, str]) -> Export:
    """Return the names for ``save_pretrained``: the one of several tied names that Hugging Face
    keeps, and the names it leaves out, read from the model's own lists.
    """
    patterns = []
    for prefix, child in module.named_modules():
        for pattern in getattr(child, "_tied_weights_keys", None) or ():
            patterns.append(re.compile(f"{re.escape(prefix)}\\.{pattern}" if prefix else pattern))
    groups: dict[str, list[str]] = {}
    for tied, held in aliases.items():
        groups.setdefault(held, [held]).append(tied)
    names: dict[str, str] = {}
    for held, group in groups.items():
        # A name in `_tied_weights_keys` is tied to another one at load time, so the other one is
        # saved.
        sources = [name for name in group if not any(pattern.search(name) for pattern in patterns)]
        if sources and held not in sources:
            names[held] = min(sources)
    skip = tuple(sorted(getattr(module, "_keys_to_ignore_on_save", None) or ()))
    names = WholeNames(module).pairs(names)
    return Export(names, skip, type(unwrapped(module)).__name__, adapters_of(module, aliases))


def adapters_of(module: torch.nn.Module, aliases: Mapping[str, str]) -> dict[str, Adapter]:
    """Return PEFT's description of each adapter, by held parameter names; {} without PEFT."""
    if not getattr(module, "peft_config", None):
        return {}
    inner = unwrapped(module)
    described = importlib.import_module("hf_zero.integrations.peft.adapter_files").described(
        inner, set(persistent_buffers(inner))
    )
    outer = "_orig_mod." if hasattr(module, "_orig_mod") else ""
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
    inner: torch.nn.Module = getattr(module, "_orig_mod", module)
    cut: torch.nn.Module | None = inner.__dict__.get("hf_model")  # the stages of a pipeline
    return inner if cut is None else cut


def config_files(module: torch.nn.Module) -> dict[str, bytes]:
    """Return the configuration files that make a converted folder loadable, by name; {} for a model
    without a configuration (duck-typed).
    """
    files = {}
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_json_string"):
        content = json.loads(config.to_json_string())
        # save_pretrained sets this field; it is empty if the model was built from a bare
        # configuration and never saved.
        content["architectures"] = content.get("architectures") or [
            type(unwrapped(module)).__name__
        ]
        files["config.json"] = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def scalars_of(engine: TrainingEngine) -> list[dict[str, Any]]:
    return [] if engine.bound is None else [dict(group) for group in engine.bound.scalars()]


def saved_layout(flat: FlatBuffer, names: WholeNames) -> FlatLayout:
    """Return the layout of ``flat`` with parameter names of the whole model."""
    slots = tuple(replace(slot, name=names.own(slot.name)) for slot in flat.layout.slots)
    return replace(flat.layout, slots=slots)


def apart_of(engine: TrainingEngine) -> list[dict[str, Any]]:
    """Return, for each optimizer group, the scalars of its parameters by name if these have not all
    made the same steps, else {}. Covers the parameters of which this rank has elements.
    """
    if engine.bound is None:
        return []
    names = WholeNames(engine.module)
    return [
        {names.own(name): numbers for name, numbers in group.items()}
        for group in engine.bound.apart()
    ]


def factors_of(engine: TrainingEngine) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer states of whole tensors, by parameter and state name, for the parameters
    whose first elements this rank writes.
    """
    if engine.bound is None:
        return {}
    written = {
        slot.name
        for flat in engine.flats
        if flat.writes and is_of_this_stage(flat)
        for slot in flat.layout.slots
    }
    held = engine.bound.factors.held(firsts=True)
    return {name: of for name, of in held.items() if name in written}


def class_name(instance: Any) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
