"""Train a U-Net of diffusers to remove noise, in a loop of Accelerate as its tutorial has it.

accelerate launch ... pictures.py OUT [--resume CHECKPOINT]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel

STEPS, SAVE, BATCH = 6, 3, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    if accelerator.num_processes != 2:
        raise SystemExit(f"{accelerator.num_processes} ranks, not 2")
    set_seed(0)
    model = UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randn(64, 1, 16, 16, generator=draw)
    loader = torch.utils.data.DataLoader(pictures, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: dict[int, float] = {}
    done = 0
    if options.resume:
        accelerator.load_state(options.resume)
        losses = {
            int(step): loss
            for step, loss in json.loads((options.resume / "losses.json").read_text()).items()
        }
        done = len(losses)
    batches = enumerate(accelerator.skip_first_batches(loader, 2 * done), 2 * done)
    total = 0.0
    for place, clean in batches:
        draw.manual_seed(2 * place + accelerator.process_index + 1)
        noise = torch.randn(clean.shape, generator=draw)
        times = torch.randint(0, 100, (len(clean),), generator=draw)
        with accelerator.accumulate(model):
            noisy = noises.add_noise(clean, noise, times)
            loss = torch.nn.functional.mse_loss(model(noisy, times, return_dict=False)[0], noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += float(accelerator.gather(loss.detach().reshape(1)).mean()) / 2
        if place % 2:
            losses[place // 2 + 1], total = total, 0.0
            if len(losses) == SAVE and not options.resume:
                accelerator.save_state(options.out / f"checkpoint-{SAVE}")
                if accelerator.is_main_process:
                    saved = options.out / f"checkpoint-{SAVE}" / "losses.json"
                    saved.write_text(json.dumps(losses))
        if len(losses) == STEPS:
            break
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.out / "final", state_dict=state)
        (options.out / "losses.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
