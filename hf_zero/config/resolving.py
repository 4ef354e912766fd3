"""Resolution of a configuration for a number of ranks: consistent batch sizes, a mesh that divides
the ranks, no value left open.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from hf_zero.config.elasticity import ELASTICITY, elastic_sizes
from hf_zero.config.reading import ConfigReading
from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.config.variables import local_world_size
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.logging import log_rank0

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
BATCH = (TOTAL, MICRO, ACCUMULATION)
EQUATION = f"{TOTAL} = {MICRO} × {ACCUMULATION} × ranks"
NO_BATCH_SIZE = "default: no batch size is written"
MICS = "zero_optimization.mics_shard_size"
HPZ = "zero_optimization.zero_hpz_partition_size"
SEQUENCE, CONTEXT = "sequence_parallel_size", "context_parallel_size"
NODE_LOCAL = "checkpoint.use_node_local_storage"
STAGE = "zero_optimization.stage"
BITS = "compressed_communication.bits"
BLOCK = "compressed_communication.block_size"
LOCO = "zero_optimization.zeropp_loco_param"
QUANTIZED = "zero_optimization.zero_quantized_"


def resolve(reading: ConfigReading, ranks: int, require_batch_size: bool, training: bool) -> None:
    """Resolve all open values of ``reading`` for ``ranks`` ranks, in place. Raises all errors."""
    # values that an earlier resolve computed hold for its number of ranks only
    for path in list(reading.filled):
        reading.discard(path)
    if not training:
        reading.forget_autos(
            "default: 'auto', which nothing fills in for an engine that only evaluates"
        )
    batches = ranks_with_batches(reading, ranks)
    for step in (
        reading.refuse_autos,
        partial(_resolve_elasticity, reading, batches),
        partial(correct_total, reading, ranks, batches),
        partial(_resolve_batch, reading, batches, require_batch_size),
        partial(_resolve_mesh, reading, ranks),
        partial(_check_storage, reading, ranks),
        partial(check_compression, reading),
    ):
        with reading.mistakes.collect():
            step()
    reading.mistakes.throw()


def ranks_with_batches(reading: ConfigReading, ranks: int) -> int:
    """Return the number of data-parallel ranks among ``ranks``: the ranks of one group that
    shares sequences or layers share their batches.
    """
    batches = ranks
    for key in (SEQUENCE, CONTEXT, TENSOR_SIZE):
        size = reading.values.get(key) or 1
        if batches % size:
            with reading.mistakes.collect():
                raise ConfigError(
                    f"{key} = {size} ({reading.sources[key]}) does not divide {batches} ranks; "
                    "choose a divisor of the number of ranks"
                )
            return ranks
        batches //= size
    return int(batches)


def correct_total(reading: ConfigReading, ranks: int, batches: int) -> None:
    """Discard a train batch size that Accelerate or the Trainer filled in by counting every rank,
    also ranks that share the batches of another: the equation yields the right number.
    """
    total, micro, accumulation = (reading.values.get(key) for key in (TOTAL, MICRO, ACCUMULATION))
    # those write an accumulation, too: without it the total is the user's, and yields it
    if batches < ranks and micro and accumulation and total == micro * accumulation * ranks:
        right = micro * accumulation * batches
        warn_of_total(total, reading.sources[TOTAL], right, ranks // batches)
        reading.discard(TOTAL)


def warn_of_total(total: int, source: str, right: int, sharing: int) -> None:
    """Warn that the train batch size ``total`` of ``source`` is taken for ``right``, as each batch
    is shared by ``sharing`` ranks.
    """
    log_rank0(
        f"{TOTAL} = {total} ({source}) is taken for {right}: {MICRO} x {ACCUMULATION} x (ranks / "
        f"{sharing} that share batches); write that, or leave {TOTAL} out",
        logging.WARNING,
    )


def _resolve_elasticity(reading: ConfigReading, ranks: int) -> None:
    section = reading.values.get(ELASTICITY) or {}
    if not section.get("enabled"):
        return
    total, micro = elastic_sizes(section, ranks)
    written = [key for key in (TOTAL, MICRO, ACCUMULATION) if key in reading.values]
    if written and not section.get("ignore_non_elastic_batch_info"):
        raise ConfigError(
            f"{ELASTICITY} computes the batch sizes, and {written[0]} is written, too "
            f"({reading.sources[written[0]]}); remove it, or write "
            f"{ELASTICITY}.ignore_non_elastic_batch_info: true"
        )
    steps = total // (micro * ranks)
    for key, value in ((TOTAL, total), (MICRO, micro), (ACCUMULATION, steps)):
        reading.discard(key)
        reading.fill(key, value, f"computed: {ELASTICITY} on {ranks} ranks")


def _equation(reading: ConfigReading) -> str:
    over = [key for key in (SEQUENCE, CONTEXT, TENSOR_SIZE) if (reading.values.get(key) or 1) > 1]
    return " / ".join([EQUATION, *over])


def _resolve_batch(reading: ConfigReading, ranks: int, required: bool) -> None:
    total, micro, accumulation = (reading.values.get(key) for key in (TOTAL, MICRO, ACCUMULATION))
    if total is None:
        if micro is None:
            if required:
                raise ConfigError(
                    f"neither {MICRO} nor {TOTAL} is set, and a data loader needs one; write "
                    f"{MICRO}: 8, for instance ({_equation(reading)})"
                )
            micro = reading.fill(MICRO, 1, NO_BATCH_SIZE)
        if accumulation is None:
            accumulation = reading.fill(ACCUMULATION, 1, "default")
        is_set = reading.sources[MICRO] != NO_BATCH_SIZE
        reading.fill(
            TOTAL,
            micro * accumulation * ranks,
            f"computed: {_equation(reading).partition(' = ')[2]}" if is_set else NO_BATCH_SIZE,
        )
    elif micro is None:
        if accumulation is None:
            accumulation = reading.fill(ACCUMULATION, 1, "default")
        reading.fill(
            MICRO,
            _share(reading, ACCUMULATION, accumulation, ranks),
            f"computed: {TOTAL} / ({ACCUMULATION} × ranks)",
        )
    elif accumulation is None:
        reading.fill(
            ACCUMULATION,
            _share(reading, MICRO, micro, ranks),
            f"computed: {TOTAL} / ({MICRO} × ranks)",
        )
    elif total != micro * accumulation * ranks:
        raise ConfigError(
            f"{TOTAL} = {total} ({reading.sources[TOTAL]}) contradicts {MICRO} × {ACCUMULATION} × "
            f"ranks = {micro} × {accumulation} × {ranks} = {micro * accumulation * ranks} "
            f"({reading.sources[MICRO]}; {reading.sources[ACCUMULATION]}): {_equation(reading)}; "
            f"change one of them, or remove {TOTAL}, which is then computed"
        )


def _share(reading: ConfigReading, other: str, factor: int, ranks: int) -> int:
    total = reading.values[TOTAL]
    if total % (factor * ranks):
        raise ConfigError(
            f"{TOTAL} = {total} ({reading.sources[TOTAL]}) is not a multiple of {other} × ranks = "
            f"{factor} × {ranks} = {factor * ranks} "
            f"({reading.sources[other]}): {_equation(reading)}; change one of them"
        )
    return int(total // (factor * ranks))


def _resolve_mesh(reading: ConfigReading, ranks: int) -> None:
    """Derive ``replicate_size`` from the shard group size of MiCS, and check both and the node size
    of hpZ. Raises ConfigError if one does not divide the ranks.
    """
    shard, replicas = reading.values.get(MICS, -1), reading.values.get("replicate_size")
    if shard > 0:
        if ranks % shard:
            raise ConfigError(
                f"{MICS} = {shard} ({reading.sources[MICS]}) does not divide {ranks} ranks into "
                "equal groups; choose a divisor"
            )
        if replicas not in (None, ranks // shard):
            raise ConfigError(
                f"replicate_size = {replicas} ({reading.sources['replicate_size']}) contradicts "
                f"{MICS} = {shard} ({reading.sources[MICS]}): replicate_size = ranks / "
                f"mics_shard_size = {ranks} / {shard} = {ranks // shard}; remove one of them"
            )
        replicas = reading.fill(
            "replicate_size", ranks // shard, "computed: ranks / mics_shard_size"
        )
    if replicas and ranks % replicas:
        raise ConfigError(
            f"replicate_size = {replicas} ({reading.sources['replicate_size']}) does not divide "
            f"{ranks} ranks: a shard group has ranks / "
            "replicate_size members; choose a divisor of the number of ranks"
        )
    node, shards = reading.values.get(HPZ) or 1, ranks // (replicas or 1)
    if shards % node:
        raise ConfigError(
            f"{HPZ} = {node} ({reading.sources[HPZ]}) does not divide the {shards} ranks that "
            "share one copy of the weights; write how many of them run on one host, the same on "
            "each"
        )


def _check_storage(reading: ConfigReading, ranks: int) -> None:
    if not reading.values.get(NODE_LOCAL):
        return
    # in a pipeline ``ranks`` are those of a stage
    world = max(ranks, int(os.environ.get("WORLD_SIZE", ranks)))
    local_ranks = local_world_size(world)
    if local_ranks < world:
        raise NotBuiltError(
            f"{NODE_LOCAL} ({reading.sources[NODE_LOCAL]}) over several machines, {local_ranks} of "
            f"{world} ranks on this one, is not provided: the ranks "
            "of a checkpoint write into one folder; set it to false (Trainer: "
            "save_on_each_node=False) and save to a shared file system or an object store; disks "
            "of the machines themselves take generations, with copies on other machines: "
            'checkpoint.memory: {"every": 100, "copies": 2, "folder": "/a/local/disk"}'
        )


def check_compression(reading: ConfigReading) -> None:
    """Raise ConfigError for compressed or hierarchical collectives that the stage lacks."""
    values = reading.values
    stage = values.get(STAGE, 0)
    up, down = f"{QUANTIZED}gradients", f"{QUANTIZED}weights"
    reasons = {}
    if values.get(f"{LOCO}.err_beta") == 1:
        reasons[f"{LOCO}.err_beta"] = "takes in no error at all; write less, such as 0.8"
    if values.get(BITS) == 4 and values.get(BLOCK) == 2048:
        reasons[BLOCK] = "is for 1 bit; write 1024 or less"
    four = BITS if values.get(BITS) == 4 else ""  # momenta in one bit: hf_zero.optim.one_bit
    if stage == 0:
        shards = f"write {STAGE}: 1, which shards the optimizer's state, or remove the key"
        reasons[four] = f"needs shards of which each rank sends its own; {shards}"
        reasons[up] = f"needs a reduce-scatter, and stage 0 has an all-reduce; {shards}"
    if stage == 3:
        reasons[four] = (
            "sends differences to whole weights, which no rank keeps at stage 3; write "
            f"{up}: true and {down}: true instead, or {STAGE}: 2"
        )
    else:
        whole = (
            f"is about the gathers of stage 3, and at stage {stage} weights are whole; remove it"
        )
        fewer = f", or write {BITS}: 4 for updates in few bits" if stage else ""
        reasons |= {down: whole + fewer, f"{QUANTIZED}nontrainable_weights": whole}
        if values.get(HPZ, 1) > 1:
            reasons[HPZ] = whole
    if not values.get(up) and values.get(BITS) != 4:
        few = f"needs gradients that travel in few bits; write {up}: true, or remove it"
        reasons |= {f"{LOCO}.{name}": few for name in ("err_beta", "reset_T")}
    wrong = [
        f"{path} = {values[path]!r} ({reading.sources[path]}) {why}"
        for path, why in reasons.items()
        if values.get(path) not in (None, False)
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
