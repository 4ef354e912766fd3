"""The oracle for losses of deferred logits beside other features: every stage, the optimizer in
host memory, activations that are recomputed or in host memory, LoRA on the head, sequence
parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_zero.activations import policy
from hf_zero.ops.deferred import heads, tensor
from hf_zero.ops.deferred.tensor import DeferredOutput
from tests.helpers import oracle
from tests.helpers.capabilities import SMALL
from tests.helpers.cells import in_one_item
from tests.helpers.engines import engine_opener
from tests.helpers.engines import train_on_threads as on_data_ranks
from tests.helpers.late_transfers import Late
from tests.helpers.sequences import Ranks, SequenceJob, llama, train_on_threads
from tests.helpers.training import Plan

STAGES = (0, 1, 2, 3)
OPTIMIZER = ("on the device", "on the host")
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"activation_checkpointing": {"blocks": True}},
    "on the host": {"activation_offload": SMALL},
}


def adapted() -> nn.Module:
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "lm_head"])
    return get_peft_model(llama(), config)  # type: ignore[arg-type,return-value]


MODELS: dict[str, Callable[[], nn.Module]] = {"trained whole": llama, "LoRA on the head": adapted}
RANKS = ("data parallel", "sequence parallel", "context parallel")
Cell = tuple[int, str, str, str, str]
# each value of each feature at some stage, and pairs of features
FEW: list[Cell] = [
    (0, "on the device", "on the host", "LoRA on the head", "sequence parallel"),
    (1, "on the host", "recomputed", "trained whole", "sequence parallel"),
    (3, "on the host", "recomputed", "trained whole", "context parallel"),
    (2, "on the host", "on the host", "LoRA on the head", "data parallel"),
    (3, "on the host", "recomputed", "LoRA on the head", "data parallel"),
]
ALL: list[Cell] = [*itertools.product(STAGES, OPTIMIZER, ACTIVATIONS, MODELS, RANKS)]


def check(cell: Cell) -> None:
    stage, optimizer, activations, model, kind = cell
    keys: dict[str, Any] = {"kernels": ["loss"], **ACTIVATIONS[activations]}
    if optimizer == "on the host":
        keys["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    job = SequenceJob(MODELS[model])
    job.name = f"deferred beside features: {model}"
    deferred: list[Any] = []
    computed: list[Any] = []
    moved: list[Late] = []
    of_call, materialize = DeferredOutput.of_call, DeferredOutput.materialize

    def late(device: Any) -> Late:
        moved.append(Late())
        return moved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "transfers_of", late)  # on a CPU they would have nowhere to go
        patch.setattr(tensor, "rows_of_a_chunk", lambda *_: 5)
        patch.setattr(heads.chunked_head, "rows_of_a_chunk", lambda *_: 5)
        patch.setattr(DeferredOutput, "of_call", lambda *a: deferred.append(a) or of_call(*a))
        patch.setattr(
            DeferredOutput, "materialize", lambda one: computed.append(one) or materialize(one)
        )
        if kind != "data parallel":
            plan = Plan(ranks=1, steps=2, accumulation=2)
            ranks = Ranks(2) if kind == "sequence parallel" else Ranks(1, context=2)
            found, _ = train_on_threads(job, plan, ranks, stage, **keys)
        else:
            plan = Plan(ranks=2, steps=2, accumulation=2)
            found = on_data_ranks(job, plan, engine_opener(stage, **keys))
    oracle.compare(found, oracle.kept(job, plan))
    assert deferred and not computed
    if activations == "on the host":
        assert moved and all(transfers.sent_bytes for transfers in moved)


@in_one_item(FEW, long=[cell for cell in ALL if cell not in FEW])
def test_losses_as_in_one_process(cell: Cell) -> None:
    check(cell)
