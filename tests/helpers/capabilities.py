"""The capabilities of an engine, a row each: what its configuration says, which model it trains,
and what the plain loop does instead. ``ranks/test_capabilities.py`` takes each through its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.activations import policy as activations
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import sequences
from tests.helpers.capabilities_of_state import OPTIMIZERS, PLACEMENTS, PRECISIONS
from tests.helpers.capabilities_of_techniques import TECHNIQUES
from tests.helpers.capability import TWO_BLOCKS, Keys, Row, WithoutGradients, always, no_compilation
from tests.helpers.late_transfers import Late
from tests.helpers.left_out import LeftOut, at_random, first_used
from tests.helpers.models import ARCHITECTURES
from tests.helpers.plans import APART
from tests.helpers.tensor_parallel import TensorJob
from tests.helpers.training import ArchitectureJob, plain_sgd
from tests.helpers.ways import WAYS


class InParts(WithoutGradients):
    """Ranks hold parts of parameters, or read parts of sequences."""

    def __init__(self, engine: Any, plan: Any) -> None:
        super().__init__(engine, plan)
        if engine.config.ranks_of_a_sequence > 1:
            self.memory["sequence"] = hf_zero.sequence_parallel()

    def weights(self) -> dict[str, torch.Tensor]:
        whole = whole_state_dict(self.engine, dtype=torch.float32) or {}
        return {name: whole[name] for name, _ in self.module.named_parameters()}


@dataclass
class SequenceJob(sequences.SequenceJob):
    """Named, as rows are."""

    name: str = "sequence parallel"


def _replicated(**keys: Any) -> Row:
    return Row(
        TWO_BLOCKS, always(**keys), stages=(1, 2, 3), ranks=4, elsewhere=2, plan={"clip": 0.5}
    )


def _of_zero(**zero: Any) -> Callable[[int, Path], Keys]:
    return always(zero_optimization=zero)


def _two_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("LOCAL_WORLD_SIZE", "2")


PARALLELISM: dict[str, Row] = {
    "replicas": _replicated(replicate_size=2),
    "shards of a node": replace(
        _replicated(), keys=_of_zero(mics_shard_size=2), stages=(3,), elsewhere=2
    ),
    "secondary shards": replace(
        _replicated(), keys=_of_zero(zero_hpz_partition_size=2), stages=(3,)
    ).only("oracle", "bytes", "overflow"),
    "gathers in two hops": replace(
        _replicated(),
        keys=_of_zero(mics_hierarchical_params_gather=True),
        stages=(3,),
        elsewhere=4,
        around=_two_nodes,
    ).only("oracle", "destroy"),
    "tensor parallel": Row(
        TensorJob("llama", plain_sgd),
        always(tensor_parallel={"autotp_size": 2}),
        ranks=4,
        readers=2,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume"),  # an overflow is in test_flat_meshes.py
    ),
    "expert parallel": Row(
        TensorJob("mixtral", plain_sgd),
        always(expert_parallel={"enabled": True, "autoep_size": 2}),
        elsewhere=4,
        session=InParts,
        columns=("oracle", "resume"),
    ),
    "sequence parallel": Row(
        SequenceJob(sequences.llama),
        always(sequence_parallel_size=2),
        readers=1,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume", "overflow"),
    ),
    "context parallel": Row(
        replace(SequenceJob(sequences.llama), name="context parallel"),
        always(context_parallel_size=2),
        readers=1,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume", "overflow"),
    ),
}


SMALL = {"min_bytes": 1, "in_flight_bytes": 1000}


def _late_transfers(patch: pytest.MonkeyPatch) -> None:
    """On the CPU activations would have nowhere to go."""
    patch.setattr(activations, "transfers_of", lambda device: Late())


def _recomputed(architecture: str, around: Any = _late_transfers, **keys: Any) -> Row:
    job = ArchitectureJob(ARCHITECTURES[architecture])
    plan = {"accumulation": 2, "clip": 0.5}
    return Row(job, always(**keys), plan=plan, around=around).only("oracle", "destroy")


def _own_checkpoints(way: str, stages: tuple[int, ...], **keys: Any) -> Row:
    plan = {"clip": 0.5}
    row = Row(WAYS[way], always(**keys), stages=stages, plan=plan, around=_late_transfers)
    return row.only("oracle")


RECOMPUTATION: dict[str, Row] = {
    "checkpoints of the model": _own_checkpoints(
        "a block called twice, each time under a checkpoint", (1,), activation_offload=SMALL
    ),
    "reentrant checkpoints of the model": _own_checkpoints(
        "reentrant checkpoint around two blocks, another block before and after",
        (3,),
        activation_offload=SMALL,
    ),
    "checkpoints of transformers": _own_checkpoints(
        "gradient_checkpointing_enable(use_reentrant=False) on bert",
        (3,),
        activation_checkpointing={"cpu_checkpointing": True},
        activation_offload={**SMALL, "enabled": False},
    ),
    "checkpointed blocks": _recomputed("bert", activation_checkpointing={"blocks": True}),
    "selective checkpoints": _recomputed("llama", activation_checkpointing={"blocks": "selective"}),
    "activations on the host": _recomputed("bert", activation_offload=SMALL),
    "checkpoints on the host": _recomputed(
        "llama",
        activation_checkpointing={"blocks": True, "cpu_checkpointing": True},
        activation_offload=SMALL,
    ),
    "compiled blocks": replace(
        _recomputed("bert", no_compilation, compile={"blocks": True, "backend": "eager"}),
        stages=(3, 0, 1, 2),
    ),
}


def _graph(architecture: str, **keys: Any) -> Row:
    """Kernels leave a record on the model, which ``hf_zero.restore`` reads."""
    columns = ("oracle",) if "kernels" in keys else ("oracle", "destroy")
    return Row(ArchitectureJob(ARCHITECTURES[architecture]), always(**keys), columns=columns)


GRAPHS: dict[str, Row] = {
    "deferred logits": _graph("llama", kernels=["loss"]),
    "kernels": _graph("gpt2", kernels="auto"),
    "an encoder and a decoder": _graph("t5", zero_optimization=APART),
}


def _left_out(job: LeftOut, ranks: int = 2, stages: tuple[int, ...] = (3,), **keys: Any) -> Row:
    """Ranks leave out blocks, each its own in every step."""
    zero = {"zero_optimization": APART, **keys}
    plan = {"steps": 3, "accumulation": 2}
    return Row(
        job, always(**zero), ranks=ranks, stages=stages, plan=plan, around=no_compilation
    ).only("oracle")


GRAPHS |= {
    "blocks left out": _left_out(LeftOut(8, at_random(8, 0.4), False), 3),
    "blocks left out, reentrant": _left_out(LeftOut(8, at_random(8, 0.4), True)),
    "blocks left out, replicated": _left_out(LeftOut(8, at_random(8, 0.4)), 4, replicate_size=2),
    "blocks left out, compiled": _left_out(
        LeftOut(8, at_random(8, 0.4)), compile={"blocks": True, "backend": "eager"}
    ),
    "blocks used later": _left_out(LeftOut(6, first_used(1, 2, 3))),
    # the length of the shard axis is 1
    "blocks used later, replicated": _left_out(LeftOut(6, first_used(1, 2, 3)), replicate_size=2),
    # gradients come in the order in which units are reduced, learned from backwards that reduce
    "gradients of the input": _left_out(
        LeftOut(6, lambda at: (), explains=lambda at: True), stages=(1,)
    ),
    "gradients of the input, blocks used later": _left_out(
        LeftOut(6, first_used(1, 2, 3), explains=lambda at: at.micro == 0)
    ),
    "gradients of the input, blocks left out": _left_out(
        LeftOut(6, at_random(6, 0.4), explains=lambda at: at.micro == 1), 3
    ),
}

GROUPS: dict[str, dict[str, Row]] = {
    "optimizers": OPTIMIZERS,
    "placements": PLACEMENTS,
    "precisions": PRECISIONS,
    "parallelism": PARALLELISM,
    "recomputation": RECOMPUTATION,
    "graphs": GRAPHS,
    "techniques": TECHNIQUES,
}
ROWS: dict[str, Row] = {name: row for group in GROUPS.values() for name, row in group.items()}
