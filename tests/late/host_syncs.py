"""Host synchronisations on one of two ranks of the simulated device: ``python -m
tests.late.host_syncs JOB ...``, with RANK and so on set. One line of JSON for each case of a job;
the job ``counter`` has the operations that the counter is to note.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.helpers import token_drop
from tests.late import families

RANK = int(os.environ.get("RANK", "0"))
DOCUMENTS = (5, 4, 7)
STEPS = 6  # batches are compared at every power of two and each 256th: not in the last step


def one_bit(kind: str = "AdamW", lr: float = 1e-3, **params: Any) -> dict[str, Any]:
    bits = {name: params.pop(name) for name in ("bits", "freeze_step")} if "bits" in params else {}
    return {
        "stage": 1,
        "compressed_communication": {"block_size": 256, **bits},
        "optimizer": {"type": kind, "params": {"lr": lr, **params}},
    }


ZERO_ONE = {"lr": 1e-5, "var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2}
DROPS = {"progressive_layer_drop": {"enabled": True, "theta": 0.4, "gamma": 0.7}}
MEASURES = {
    **{name: {"enabled": True} for name in ("metrics", "comms_logger")},
    **{"wall_clock_breakdown": True, "steps_per_print": 1, "memory_breakdown": True},
}
EXPERTS = {"family": "mixtral", "expert_parallel": {"enabled": True, "autoep_size": 2}}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {
        "one bit": one_bit(bits=1, freeze_step=2),
        "measures": {"stage": 3, **MEASURES},
    },
    "one bit": {
        "dense": one_bit(bits=1, freeze_step=12),
        "LAMB": one_bit("OneBitLamb", freeze_step=3),
        "0/1 Adam": {**one_bit("ZeroOneAdam", **ZERO_ONE), "gradient_clipping": 0.0},
    },
    "dropped": {
        "stage 3": {"stage": 3},
        "layers dropped": {"stage": 3, **DROPS},
        "tokens dropped": {"stage": 3, **token_drop.section([1, 2, 3])},
    },
    "sequence": {"packed sequences": {"stage": 3, "sequence_parallel_size": 2, "documents": True}},
    "sequence, cut": {"sequences": {"stage": 3, "sequence_parallel_size": 2}},
    "expert": {
        "experts": {"stage": 3, **EXPERTS},
        "experts, checkpointed": {"stage": 3, **EXPERTS, "checkpointed": True},
    },
}


def last_steps(case: dict[str, Any]) -> list[dict[str, int]]:
    """The counts of hf_zero's waits, by place, in the last two steps of two micro-batches."""
    import torch

    import hf_zero
    from tests.helpers.host_syncs import HostSyncs

    more = dict(case)
    family, documents = more.pop("family", "llama"), more.pop("documents", False)
    checkpointed, stage = more.pop("checkpointed", False), more.pop("stage")
    config = {
        "train_micro_batch_size_per_gpu": families.ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(families.SHARDED if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "kernels": "off",
        **more,
    }
    engine, *_ = hf_zero.initialize(model=families.build(family, checkpointed), config=config)
    split = "sequence_parallel_size" in more
    sequence = hf_zero.sequence_parallel() if split else None
    generator = torch.Generator().manual_seed(5 + (0 if split else RANK))
    shape, places = (families.ROWS, families.LENGTH), [torch.arange(each) for each in DOCUMENTS]
    batches = []
    for _ in range(2 * STEPS):
        ids = torch.randint(5, families.VOCAB, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if documents:
            batch["position_ids"] = torch.cat(places).expand(shape).contiguous()
        batches.append(batch if documents else {k: v.to(engine.device) for k, v in batch.items()})
    # a script's loader of batches in host memory, or batches on the device that it cuts by itself
    loader = iter(sequence.batches(batches) if sequence is not None and documents else batches)
    found = []
    for _ in range(STEPS):
        with HostSyncs(engine.device) as syncs:
            for _ in range(2):
                batch = next(loader)
                if sequence is not None and not documents:
                    batch = sequence.shard(batch)
                loss = engine(**batch).loss
                if sequence is not None:
                    loss = sequence.mean_loss(loss, batch["labels"])
                engine.backward(loss)
                engine.step()
        found.append(dict(syncs.of("hf_zero")))
    engine.destroy()
    return found[-2:]


def noted() -> dict[str, list[str]]:
    """Return the counter's notes of each operation."""
    import torch

    from hf_zero.device import pinned, streams
    from tests.helpers.host_syncs import HostSyncs

    here, host = torch.device("cuda", 0), torch.ones(3)
    there, memory = torch.ones(3, device=here), torch.empty(3, pin_memory=True)

    def waited() -> None:
        torch.cuda.Event().synchronize()  # of nothing: over
        there.add_(1)
        streams.record_event(streams.current_stream(here)).synchronize()

    operations = {
        "to the device": lambda: host.to(here),
        "into the device": lambda: there.copy_(host),
        "not pinned": lambda: host.to(here, non_blocking=True),
        "numbers": lambda: torch.tensor([1.0, 2.0], device=here),
        "to the host": lambda: there.cpu(),
        "an event": waited,
        "the whole device": lambda: torch.cuda.synchronize(),
        "uploaded": lambda: pinned.upload(host, here),
        "into pinned memory": lambda: memory.copy_(there, non_blocking=True),
        "on the device": lambda: torch.tensor(there.add(1)),
    }
    found = {}
    for name, operation in operations.items():
        with HostSyncs(here) as syncs:
            operation()
        found[name] = [what for (_, _, what), times in syncs.found.items() for _ in range(times)]
    torch.cuda.synchronize()
    return found


def main() -> None:
    from tests.late import device

    for job in sys.argv[1:]:
        device.configure("lazy" if job == "counter" else "eager")
        for name, case in CASES.get(job, {job: {}}).items():
            device.forget()
            found: Any = last_steps(case) if case else noted()
            device.tell(case=name, rank=RANK, found=found, reports=device.reports())


if __name__ == "__main__":
    main()
