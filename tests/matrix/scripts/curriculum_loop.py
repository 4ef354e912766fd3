"""An Accelerate loop whose samples are chosen by their difficulty: interrupted in the middle of an
epoch, resumed by ``skip_first_batches``; each rank reports the samples that it has seen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

STEPS, SAVED = 9, 6


def main(rows, batch_size, out, resume):
    accelerator = Accelerator()
    data = [{"id": torch.tensor(row), "x": torch.full((4,), row / rows)} for row in range(rows)]
    model: Any = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    window = accelerator.gradient_accumulation_steps
    done, batches = 0, loader
    if resume:
        accelerator.load_state(str(out / "state"))
        done = SAVED
        batches = accelerator.skip_first_batches(loader, SAVED * window % len(loader))
    seen: list[list[int]] = [[] for _ in range(STEPS)]
    while done < STEPS:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).mean())
                optimizer.step()
                optimizer.zero_grad()
            seen[done] += batch["id"].tolist()
            done += accelerator.sync_gradients
            if done == SAVED and accelerator.sync_gradients and not resume:
                accelerator.save_state(str(out / "state"))
            if done == STEPS:
                break
        batches = loader
    name = f"seen-{accelerator.process_index}{'-resumed' * resume}.json"
    (out / name).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] == ["resume"])
