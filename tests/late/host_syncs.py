"""Host synchronizations on one of two ranks of the simulated device: ``python -m
tests.late.host_syncs JOB``, with RANK and so on set. One line of JSON for each case of a job, and
one of the operations that the counter is to note.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.helpers import token_drop
from tests.late import families

RANK = int(os.environ.get("RANK", "0"))
DOCUMENTS = (5, 4, 7)
STEPS = 3  # of two micro-batches: each 256th is compared, and at every power of two, as the fourth


ONE_BIT = {
    "compressed_communication": {"bits": 1, "freeze_step": 2, "block_size": 256},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
LARS = {"optimizer": {"type": "LARS", "params": {"lr": 0.1}}}
LION_8BIT = {"optimizer": {"type": "Lion8bit", "params": {"lr": 1e-3}}}
MEASURES = {
    **{name: {"enabled": True} for name in ("metrics", "comms_logger")},
    **{"wall_clock_breakdown": True, "steps_per_print": 1, "memory_breakdown": True},
}
NARROW = {
    "bf16": {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
        "kahan_summation": True,
    }
}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2, "documents": True}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {
        "one bit": {"stage": 1, **ONE_BIT},
        "LARS": {"stage": 3, **LARS},
        "Lion in 8 bits": {"stage": 1, **LION_8BIT},
        "measures": {"stage": 3, **MEASURES},
        "state in bf16": {"stage": 3, **NARROW},
        "tokens dropped": {"stage": 3, **token_drop.section([1, 2])},
    },
    "sequence": {"packed sequences": {"stage": 3, **SEQUENCE}},
    "ring": {"packed in a ring": {"stage": 3, "context_parallel_size": 2, "documents": True}},
    "expert": {"experts": {"stage": 3, "family": "mixtral", **EXPERTS}},
}


def last_step(case: dict[str, Any]) -> dict[str, int]:
    """The counts of hf_zero's waits, by place, in the last step."""
    import torch

    import hf_zero
    from tests.helpers.host_syncs import HostSyncs

    families.use_kernels_of_cpus()
    more = dict(case)
    family, documents = more.pop("family", "llama"), more.pop("documents", False)
    stage = more.pop("stage")
    config = {
        "train_micro_batch_size_per_gpu": families.ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(families.SHARDED if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "kernels": "off",
        **more,
    }
    model = families.build(family, False, num_hidden_layers=4)
    engine, *_ = hf_zero.initialize(model=model, config=config)
    sequence = hf_zero.sequence_parallel() if documents else None
    generator = torch.Generator().manual_seed(5 + (0 if documents else RANK))
    shape, places = (families.ROWS, families.LENGTH), [torch.arange(each) for each in DOCUMENTS]
    batches = []
    for _ in range(2 * STEPS):
        ids = torch.randint(5, families.VOCAB, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if documents:
            batch["position_ids"] = torch.cat(places).expand(shape).contiguous()
        batches.append(batch if documents else {k: v.to(engine.device) for k, v in batch.items()})
    loader = iter(sequence.batches(batches) if sequence is not None else batches)
    for _ in range(STEPS):
        with HostSyncs(engine.device) as syncs:
            for _ in range(2):
                batch = next(loader)
                loss = engine(**batch).loss
                if sequence is not None:
                    loss = sequence.mean_loss(loss, batch["labels"])
                engine.backward(loss)
                engine.step()
    engine.destroy()
    return dict(syncs.of("hf_zero"))


def noted() -> dict[str, list[str]]:
    """Return the counter's notes of each operation."""
    import torch

    from hf_zero.device import pinned, streams
    from tests.helpers.host_syncs import HostSyncs

    here, host = torch.device("cuda", RANK), torch.ones(3)
    torch.cuda.set_device(here)
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


def main(job: str) -> None:
    from tests.late import device

    device.configure("lazy")
    device.tell(case="counter", rank=RANK, found=noted(), reports=device.reports())
    device.configure("eager")
    for name, case in CASES[job].items():
        device.forget()
        device.tell(case=name, rank=RANK, found=last_step(case), reports=device.reports())


if __name__ == "__main__":
    main(sys.argv[1])
