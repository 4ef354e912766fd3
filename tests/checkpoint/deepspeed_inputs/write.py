"""Writes the checkpoints beside this file with the real DeepSpeed: which version is in each.

    pip install --target FOLDER --no-deps deepspeed==0.19.8 hjson msgpack ninja packaging psutil
    py-cpuinfo pydantic tqdm einops … PYTHONPATH=FOLDER HF_ZERO_AUTOLOAD=0 DS_ACCELERATOR=cpu
    DS_BUILD_OPS=0 python write.py

DeepSpeed cannot stand beside hf-zero in one environment, which would answer `import deepspeed` in
its place; so it has a folder of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# name -> ranks, stage, precision, whether some parameters are frozen, further keys of
# zero_optimization
CASES = {
    "stage0": (2, 0, "fp32", False, {}),
    "stage0-frozen": (2, 0, "fp32", True, {}),
    "stage0-bf16": (2, 0, "bf16", False, {}),
    "stage0-bf16-fused": (2, 0, "bf16", True, {}),
    "stage1": (2, 1, "fp32", True, {}),
    "stage1-elastic": (2, 1, "fp32", True, {"elastic_checkpoint": True}),
    "stage2-bf16-round-robin": (2, 2, "bf16", True, {"round_robin_gradients": True}),
    "stage3": (3, 3, "fp32", True, {"sub_group_size": 60}),
    "stage3-bf16": (2, 3, "bf16", True, {}),
}


def write(name: str) -> None:
    import deepspeed
    import torch
    from model import SAVED_AFTER, STEPS, batch, build, optimizer_of, schedule_of

    assert "hf_zero" not in deepspeed.__file__
    _, stage, precision, frozen, more = CASES[name]
    if name.endswith("-fused"):
        # DeepSpeed's own fused class needs a GPU: its way of keeping a group end to end is chosen
        # by the class alone
        sys.modules["deepspeed.runtime.engine"].FusedAdam = torch.optim.AdamW
    model = build(frozen)
    optimizer = optimizer_of(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
    }
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule_of(optimizer), config=config
    )[0]
    rank, ranks, losses = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            engine.save_checkpoint(str(HERE / name), client_state={"epoch": 3, "note": "kept"})
        loss = engine(*batch(step, rank, ranks))
        engine.backward(loss)
        engine.step()
        whole = loss.detach().float().clone()
        torch.distributed.all_reduce(whole)
        losses.append(whole.item() / ranks)
    if rank == 0:
        (HERE / name / "losses.json").write_text(json.dumps(losses))
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (HERE / name / script).unlink(missing_ok=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo may abort a rank whose peer ends first


def run(*command: str, **more: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, **more)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    else:
        for name, (ranks, *_) in CASES.items():
            shutil.rmtree(HERE / name, ignore_errors=True)
            launch = ["torch.distributed.run", "--nproc-per-node", str(ranks)]
            launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
            run(*launch, __file__, name, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for name in ("stage1", "stage3"):
            shutil.rmtree(HERE / f"{name}-universal", ignore_errors=True)
            folders = ["--input_folder", f"{HERE / name}/global_step3"]
            folders += ["--output_folder", f"{HERE / name}-universal"]
            run("deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *folders)
            (HERE / "latest_universal").unlink(missing_ok=True)
