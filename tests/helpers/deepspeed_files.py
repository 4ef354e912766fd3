"""Files in the layout of DeepSpeed's checkpoints, of any size, written by torch.save: for what
real ones are too small to show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

RANKS = 2
BASE = {"param_groups": [{"lr": 1e-3, "params": [0]}], "state": {}}


def write(folder: Path, weights: dict[str, torch.Tensor], stage: int, bf16: bool = False) -> None:
    """``weights``, whose lengths two divides, as two ranks at ``stage`` save them; at stage 0 in
    16 bits without float32 beside.
    """
    folder.mkdir(parents=True)
    held = {name: tensor.bfloat16() if bf16 else tensor for name, tensor in weights.items()}
    shapes = [{name: tensor.shape for name, tensor in weights.items()}]
    model: dict[str, Any] = {
        "module": held,
        "buffer_names": [],
        "dp_world_size": RANKS,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}},
    }
    if stage == 0:
        torch.save({**model, "optimizer": None}, folder / "mp_rank_00_model_states.pt")
        return
    model["param_shapes"] = shapes
    halves = {name: tensor.reshape(RANKS, -1) for name, tensor in weights.items()}
    whole = torch.cat([tensor.reshape(-1) for tensor in weights.values()]).reshape(RANKS, -1)
    for rank in range(RANKS):
        if stage == 3:
            torch.save(
                model | {"module": {}}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
            flat = torch.cat([half[rank] for half in halves.values()])
            state = {"fp32_flat_groups": [flat], "optimizer_state_dict": BASE, "zero_stage": 3}
        else:
            own = whole[rank].clone()
            state = {
                "single_partition_of_fp32_groups": [own],
                "base_optimizer_state": BASE,
                "group_paddings": [0],
                "zero_stage": stage,
            }
        torch.save(
            {"optimizer_state_dict": state},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    if stage != 3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
