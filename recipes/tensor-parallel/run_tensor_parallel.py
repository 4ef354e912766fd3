"""Train a small Llama with Accelerate on ranks that share its layers, or on ranks that read batches
of their own: the launcher's file decides. Each run writes its held-out losses and the parameters
that a rank keeps of the layers, and plots the runs that are there.

    accelerate launch --config_file tensor.yaml run_tensor_parallel.py
    accelerate launch --config_file data.yaml run_tensor_parallel.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
from comparison import VALUES, load_text, report_beside


def small_llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama of ``args``' size over bytes: 4 attention heads, 2 for keys and values."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VALUES,
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=args.seq_length,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max_train_steps", type=int, default=150)
    parser.add_argument("--batch_size", type=int, default=16, help="rows of all ranks together")
    parser.add_argument("--seq_length", type=int, default=128, help="bytes of a row")
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--evaluations", type=int, default=10, help="at equal distances")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/tensor-parallel"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    accelerator = Accelerator()
    set_seed(args.seed)  # alike on all ranks: those that share layers draw the same numbers
    stream, held_out = load_text(args.seq_length)
    rows = stream.unfold(0, args.seq_length, args.seq_length).contiguous()
    plugin = accelerator.state.deepspeed_plugin
    section = plugin.deepspeed_config.get("tensor_parallel", {}) if plugin else {}
    tensor = max(1, section.get("autotp_size", 1))
    groups = accelerator.num_processes // tensor
    order = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(
        TensorDataset(rows),
        args.batch_size // groups,
        shuffle=True,
        generator=order,
        drop_last=True,
    )
    model = small_llama(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kept = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    name = f"data {groups} x tensor {tensor}"
    found, step = [], 0

    def evaluate() -> None:
        model.eval()
        batch = held_out.to(accelerator.device)
        with torch.no_grad():
            loss = float(model(input_ids=batch, labels=batch).loss)
        model.train()
        row = {"config": name, "step": step, "loss": loss, "parameters_of_layers": kept}
        found.append(row)
        accelerator.print(f"{name}: step {step}, held-out loss {loss:.3f}")

    accelerator.print(f"{name}: a rank holds {kept:,} parameters of matrices")
    evaluate()
    every = max(1, args.max_train_steps // args.evaluations)
    while step < args.max_train_steps:
        for (batch,) in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % every == 0 or step == args.max_train_steps:
                evaluate()
            if step == args.max_train_steps:
                break
    if accelerator.is_main_process:
        title = "A small Llama: degrees of data parallelism x tensor parallelism"
        report_beside(args.output_dir, name, found, title)
    accelerator.end_training()


if __name__ == "__main__":
    main()
