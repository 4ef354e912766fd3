"""The sparse head of a masked language model on the simulated device, posing as CUDA, beside the
model as it was on the CPU.

    python -m tests.kernels.late_head      # a JSON row for each way: what differs, what the host
    has waited for, what the device reports

"right" is the head as it is; in the other ways one call is left out, which the device must report.
"""

from __future__ import annotations

import json
from typing import Any

from tests.late import device  # isort: skip  # before torch

import torch

from hf_zero.integrations.fused.deferred_heads import DeferredCall, defer_head
from hf_zero.ops import masked_rows
from tests.integrations.fused.languages import VOCABULARY, gradients, pair

SHARES = (0.1, 0.5, 0.0, 0.1)
TOKENS = 80
WAYS = (
    ("right", ()),
    ("counted before the labels are there", ("wait", "masked_rows.py __init__")),
    ("read before the count has arrived", ("synchronize", "masked_rows.py read")),
)


def train() -> dict[str, Any]:
    plain, fused = pair("bert")
    assert not isinstance(defer_head(fused), str)
    fused = fused.to("cuda")
    rows: list[int] = []
    plain_run = DeferredCall.run

    def run(call: DeferredCall, given: torch.Tensor, body: Any) -> Any:
        if call.module is fused.cls.predictions.transform.dense:
            rows.append(given.shape[0])
        return plain_run(call, given, body)

    DeferredCall.run = run  # type: ignore[method-assign]
    random = torch.Generator().manual_seed(0)
    worst, waits = 0.0, 0
    for share in SHARES:
        ids = torch.randint(3, VOCABULARY, (4, TOKENS // 4), generator=random)
        counts = torch.zeros(TOKENS, dtype=torch.bool)
        counts[torch.randperm(TOKENS, generator=random)[: int(TOKENS * share)]] = True
        given = {"input_ids": ids, "labels": ids.where(counts.view_as(ids), -100)}
        late = {
            name: tensor.pin_memory().to("cuda", non_blocking=True)
            for name, tensor in given.items()
        }
        for model in (plain, fused):
            model.zero_grad()
        expected = plain(**given).loss
        expected.backward()
        before = sum(device.stats()["sync_ops"].values())
        loss = fused(**late).loss
        loss.backward()
        waits += sum(device.stats()["sync_ops"].values()) - before
        torch.cuda.synchronize()
        if share:
            theirs, ours = gradients(plain), gradients(fused)
            off = [float((ours[name].cpu() - theirs[name]).abs().max()) for name in theirs]
            worst = max(worst, *off, abs(float(loss.detach()) - float(expected.detach())))
    DeferredCall.run = plain_run  # type: ignore[method-assign]
    return {"worst": worst, "waits": waits, "rows": rows}


def main() -> None:
    masked_rows.GRANULE = 8
    for way, left_out in WAYS:
        device.configure("lazy", seed=3)
        device.forget()
        if left_out:
            device.drop(*left_out)
        try:
            found = train()
        except Exception as error:  # nonsense was read as a number of rows
            found = {"ended": f"{type(error).__name__}: {error}"}
        device.synchronize_all()
        row = {"way": way, **found, "dropped": device.drops(), "reports": device.reports()}
        device.drop_nothing()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
