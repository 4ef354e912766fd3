"""``hf_zero.tensor_parallel``: each rank of a group keeps a part of every matrix of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import CONTEXT, SEQUENCE
from hf_zero.config.sections import AUTOEP_SIZE, TENSOR_SIZE, VERIFY
from hf_zero.distributed import init, process_group
from hf_zero.distributed.parallel_dims import ParallelDims, check_size
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError
from hf_zero.loading import make_pending
from hf_zero.logging import counted
from hf_zero.parallel.cutting import check_module, cut
from hf_zero.parallel.tensor import layers, partial_gradients, rehearsal
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.parallel.tensor.cutting import TensorParallel, cut_layers, cuts_for
from hf_zero.parallel.tensor.dropout import OwnRandomNumbers
from hf_zero.parallel.tensor.dtensors import unwrap
from hf_zero.parallel.tensor.entering_caches import EnteringCaches
from hf_zero.parallel.tensor.layers import is_sharded, put_on
from hf_zero.parallel.tensor.plan import (
    Target,
    has_own_plan,
    is_of_family,
    plan_of,
    targets,
    transformers_model,
)
from hf_zero.parallel.tensor.verification import Verification
from hf_zero.zero.layout.sharding import Sharding, sharding_of
from hf_zero.zero.layout.walk import text_config_of

RECORD = "_hf_zero_tensor_parallel"


def tensor_parallel(
    model: nn.Module, size: int, plan: Mapping[str, str | None] | None = None, verify: bool = False
) -> nn.Module:
    """Split the layers of ``model`` in place over groups of ``size`` neighboring ranks.
    Collective over all ranks.

    The ranks of a group must read the same batches; different groups read different ones. All ranks
    take the values of rank 0, or read their own parts if the model is loaded in shards. LoRA
    adapters are split with their layers. If you add adapters afterwards, call this function again
    to split them.

    Args:
        model: a model of transformers that has a tensor-parallel plan, or for whose family hf-zero
            has one. It can be wrapped by PEFT, or already split by transformers
            (``DistributedConfig(tp_size=...)``).
        size: number of ranks in a group; it must divide the number of ranks, the heads and the
            widths.
        plan: changes to the model's plan: a style for each module name, in which ``*`` matches any
            number. The style None leaves a module whole. A later call leaves it out, or repeats it.
        verify: compare the first forward and backward in training with those of the whole model,
            which each rank holds until then, and raise VerificationError if they differ.

    Returns:
        ``model``.

    Raises:
        ConfigError: a size that does not divide, a model without a plan, a layer that its style
            cannot run.
        NotBuiltError: a style that is not built.
    """
    check_module(model, "tensor_parallel")
    check_size(size, TENSOR_SIZE)
    if size > 1:
        init.init_distributed()  # it says how many ranks the launcher has started
    _check_divides(size)
    record = model_record(model)
    _check_same_size(record, size)
    if size == 1:
        return model
    make_pending(model)  # values still in files are cut without being read
    path, inner = transformers_model(model)
    dims = dims_of(size)
    rank = dims.coordinate(process_group.get_rank(), "tensor")
    if record is not None:
        _check_same_plan(record, plan)
        plan = record.plan
    unwrap(inner, rank, size)
    planned = _planned(path, inner, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_forwards(planned)
    cuts = _with_partial_gradients(inner, plan, cuts_for(modules, planned, rank, size), rank, size)
    if verify:
        check_verifiable(model)
    # All checks have passed: a refused call leaves the job unchanged.
    whole = rehearsal.copy_to_fill(inner) if verify and record is None else None
    groups = init_parallel(dims)  # also if cut already: another model may have reset the groups
    if record is None:
        record = _new_record(model, plan, TensorAxis(groups.along("tensor")))
    cut_layers(modules, planned, cuts, record, not has_own_plan(inner), cut)
    if RECORD not in inner.__dict__:
        inner.__dict__[RECORD] = record
        record.agreement.watch(inner)
        EnteringCaches(record.axis).watch(inner)
    if whole is not None:
        record.verifies = True
        Verification(whole, record.axis).watch(inner)
    return model


def _check_forwards(planned: Sequence[Target]) -> None:
    """Raise ConfigError for a forward that is replaced already and that the plan changes."""
    for target in planned:
        patched = target.style.runs is not None and "forward" in target.module.__dict__
        if patched and not is_sharded(target.module):
            raise ConfigError(
                f"something has replaced the forward of {target.name}, which tensor parallelism "
                "changes; undo that first (hf_zero.restore(model) for fused kernels)"
            )


def _new_record(
    model: nn.Module, plan: Mapping[str, str | None] | None, axis: TensorAxis
) -> TensorParallel:
    """Return the record of ``model``, which is cut along ``axis`` by ``plan``."""
    random = OwnRandomNumbers(axis, process_group.default_device()) if _draws(model) else None
    return TensorParallel(axis, random, plan, _rotary_width(transformers_model(model)[1]))


def check_verifiable(model: nn.Module) -> None:
    """Raise ConfigError for a model that cannot be compared with its uncut copy."""
    record = model_record(model)
    if record is not None and not record.verifies:
        raise ConfigError(
            f"{VERIFY} compares a model with what it was before it was cut, and this one is cut "
            "already; pass verify=True to the call of hf_zero.tensor_parallel that cuts it"
        )
    if _draws(model):
        raise ConfigError(
            f"{VERIFY} compares numbers, and the model draws some (dropout); verify it with the "
            "probabilities of its configuration at 0, and remove the key then"
        )


def model_record(model: nn.Module) -> TensorParallel | None:
    """Return the record that :func:`tensor_parallel` has put on ``model``, or None."""
    return transformers_model(model)[1].__dict__.get(RECORD)


def _check_divides(size: int) -> None:
    """Raise ConfigError for a size that does not divide the ranks of the job."""
    world = process_group.get_world_size()
    if world % size:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size} does not divide the {counted(world, 'rank')} of "
            f"the job; choose a size that does, or start {size} ranks: `hf-zero launch --num-procs "
            f"{size} train.py`"
        )


def _check_same_size(record: TensorParallel | None, size: int) -> None:
    """Raise ConfigError if the model with ``record`` is cut among another number of ranks."""
    if record is not None and record.size != size:
        raise ConfigError(
            f"the model is cut among {record.size} tensor-parallel ranks already, and "
            f"tensor_parallel.autotp_size is {size}; keep one size"
        )


def _check_same_plan(record: TensorParallel, plan: Mapping[str, str | None] | None) -> None:
    """Raise ConfigError for a ``plan`` that is not that of the model with ``record``."""
    before = record.plan or {}
    if plan is not None and dict(plan) != dict(before):
        different = min(name for name, _ in dict(plan).items() ^ dict(before).items())
        raise ConfigError(
            f"tensor_parallel() got another plan for {different!r} than the one by which the model "
            "is cut already; leave plan out, or pass it to the call that cuts the model"
        )


def dims_of(size: int) -> ParallelDims:
    """Return the mesh dimensions of the job with tensor-parallel groups of ``size``."""
    groups = get_parallel()
    if groups is None:
        return ParallelDims.over(process_group.get_world_size(), tensor=size)
    if groups.dims.expert > 1 and groups.dims.tensor != size:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size} in a job whose experts are spread over "
            f"{groups.dims.expert} ranks already, which would become other ranks; call "
            "hf_zero.tensor_parallel before hf_zero.expert_parallel, or write both sections into "
            "the configuration"
        )
    return groups.dims.resized(tensor=size)


def _multiplies_itself(model: nn.Module) -> bool:
    """Return whether TRL has replaced the forward of ``model`` by one that multiplies with the
    head's weight directly; it would mistake a part of the vocabulary for all of it.
    """
    code = getattr(getattr(model.__dict__.get("forward"), "__func__", None), "__code__", None)
    return code is not None and "fused_lm_head" in code.co_varnames


def _without_the_head(model: Any, planned: list[Target]) -> list[Target]:
    """Return ``planned`` without the head and embeddings that share its weight: they stay whole. A
    head that was cut before, as in a model loaded in shards, is made to join its parts when read.
    """
    head = model.get_output_embeddings()
    weight = head._parameters["weight"]
    if is_sharded(head) and not isinstance(head, layers.JoinedWhenRead):
        _, part = layers.take_off(head)
        put_on(head, layers.JoinedWhenRead, part)
    return [target for target in planned if target.module._parameters.get("weight") is not weight]


def _rotary_width(model: nn.Module) -> int:
    return int(getattr(text_config_of(model), "qk_rope_head_dim", 0) or 0)


def _draws(model: nn.Module) -> bool:
    """Return whether a forward of ``model`` may draw random numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            return True
        if any(
            isinstance(value, float) and value and "drop" in name
            for name, value in module.__dict__.items()
        ):
            return True
    return False


def cuts_of(model: nn.Module, size: int, rank: int = 0) -> dict[nn.Parameter, Sharding]:
    """Return the sharding of the parameters of ``model``, left unchanged, over ``size``
    tensor-parallel ranks, for ``rank`` of them; fully replicated parameters are left out.

    Raises as :func:`tensor_parallel`.
    """
    if size == 1 or model_record(model) is not None:
        return {}
    path, inner = transformers_model(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts = cuts_for(modules, _planned(path, inner, None), rank, size)
    return _with_partial_gradients(inner, None, cuts, rank, size)


def _planned(path: str, inner: nn.Module, plan: Mapping[str, str | None] | None) -> list[Target]:
    """Return the layers to cut in ``inner``, whose path is ``path``."""
    planned = targets(path, inner, plan_of(inner, plan), is_of_family(inner))
    return _without_the_head(inner, planned) if _multiplies_itself(inner) else planned


def _with_partial_gradients(
    inner: nn.Module,
    plan: Mapping[str, str | None] | None,
    cuts: dict[nn.Parameter, Sharding],
    rank: int,
    size: int,
) -> dict[nn.Parameter, Sharding]:
    """Return ``cuts``, extended by the whole parameters whose gradient is partial."""
    partial = _rehearse(inner, plan, rank, size)
    for parameter, is_partial in partial.items():
        sharding = cuts.get(parameter, sharding_of(parameter))
        if sharding.partial != is_partial:
            cuts[parameter] = replace(sharding, partial=is_partial)
    return cuts


def _rehearse(
    inner: nn.Module, plan: Mapping[str, str | None] | None, rank: int, size: int
) -> dict[nn.Parameter, bool]:
    """Return whether the gradient of each whole parameter of ``inner`` is partial (to be summed
    over the ranks), found by running a cut copy without memory.

    Raises ConfigError for parameters with both kinds of use, and for those that the run misses.
    """
    axis, installed = rehearsal.RehearsedAxis(rank, size), model_record(inner)
    placed: dict[nn.Parameter, bool] = {}
    try:
        twin, originals = rehearsal.copy_to_rehearse(
            inner, None if installed is None else installed.axis, axis
        )
        record = model_record(twin) or TensorParallel(axis, None, plan, _rotary_width(twin))
        modules = dict(twin.named_modules(remove_duplicate=False))
        planned = _planned("", twin, plan)
        cuts = cuts_for(modules, planned, rank, size)
        cut_layers(modules, planned, cuts, record, not has_own_plan(twin), rehearsal.shrink)
        outputs, ran = rehearsal.run_on_zeros(twin)
    except Exception as error:  # the model reads values, or is not one of transformers
        text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if installed is None:
            _check_whole(inner, axis, text)
        reason = f"the model cannot be run without memory ({text})"
        placed, ran = {}, set()
    else:
        reason = "a forward over a sequence does not reach it"
        found = partial_gradients.of_whole(twin, partial_gradients.kinds_in(outputs))
        placed = {originals[parameter]: is_partial for parameter, is_partial in found.items()}
    partial_gradients.check_unplaced(inner, _planned("", inner, plan), placed, ran, reason)
    return placed


def _check_whole(inner: nn.Module, axis: rehearsal.RehearsedAxis, problem: str) -> None:
    """Raise ConfigError if ``inner`` runs whole although its cut copy failed with ``problem``."""
    try:
        rehearsal.run_on_zeros(rehearsal.copy_to_rehearse(inner, None, axis)[0])
    except Exception:  # the whole copy fails too: the failure says nothing about the plan
        return
    raise ConfigError(
        f"{type(inner).__name__} runs whole, and cut by its tensor-parallel plan it does not "
        f"({problem}): outside the layers that the plan names it computes with heads or widths of "
        "which a rank has a part; leave those layers whole, by hf_zero.tensor_parallel(model, "
        f"size, plan={{name: None, ...}}), or set {TENSOR_SIZE} to 1"
    )


def with_tensor_size(model: nn.Module, config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` with the tensor-parallel size in effect: its own, or that of ``model``, cut
    already. Raises ConfigError if the two are different, or the size does not divide the ranks.
    """
    record, size = model_record(model), config.tensor_parallel.size
    if record is not None and size == 1:
        size = record.size
        if config.tensor_parallel.autotp_size == 1:
            raise ConfigError(
                f"{TENSOR_SIZE} is 1 and the model is cut among {size} ranks already; write {size},"
                " or leave it out"
            )
        config = config.override({TENSOR_SIZE: size}, "computed: the model is cut already")
    _check_divides(size)
    _check_same_size(record, size)
    if size > 1 and config.tensor_parallel.verify:
        _check_alone(config)
    return config


def _check_alone(config: ZeroConfig) -> None:
    """Raise ConfigError if a rank would not compute, on its batch, the same as one process."""
    others = {
        AUTOEP_SIZE: config.expert_parallel.size,
        SEQUENCE: config.sequence_parallel_size,
        CONTEXT: config.context_parallel_size,
    }
    for key, size in others.items():
        if size > 1:
            raise ConfigError(
                f"{VERIFY} compares each rank with the whole model on its batch, and {key} = "
                f"{size} spreads that over ranks; verify with {key} = 1, and remove the key then"
            )
