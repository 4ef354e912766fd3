"""Train the same small Llama once for each DeepSpeed configuration: in full precision, with weights
that fall to 8 and to 4 bits (MoQ), and by torchao's quantization-aware training where torchao is
installed. Plot the held-out losses over the iterations.

    torchrun --nproc_per_node 2 run_quantization.py
    torchrun --nproc_per_node 2 run_quantization.py --deepspeed_config full.json moq_4.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from plot import line_plot  # noqa: E402

CONFIGS = ("full.json", "moq_8.json", "moq_4.json", "qat_int4.json")
VALUES = 128  # of a byte of the text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed_config", type=Path, nargs="+", default=[HERE / name for name in CONFIGS]
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument("--num_iterations", type=int, default=400)
    parser.add_argument("--seq_length", type=int, default=32, help="bytes of a row")
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--eval_every", type=int, default=20)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quantization"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text(seq_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own language reference, a number a byte: what is trained on, a stream, and 64 rows
    [64, seq_length] from its held-out end.
    """
    joined = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor([byte for byte in joined.encode() if byte < VALUES])
    end = len(stream) * 19 // 20
    rows = stream[end:].unfold(0, seq_length, seq_length)
    return stream[:end], rows[:: len(rows) // 64][:64]


def build(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the configuration, it begins with the same weights."""
    torch.manual_seed(args.seed)
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VALUES,
            max_position_embeddings=args.seq_length,
            hidden_size=args.hidden_size,
            intermediate_size=4 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config
    )
    return engine


@torch.no_grad()
def evaluate(engine: Any, rows: torch.Tensor) -> float:
    """Mean loss over the held-out rows, which each rank reads in full."""
    engine.eval()
    tokens = rows.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss.item()
    engine.train()
    return loss


def afterwards(engine: Any, bits: int, args: argparse.Namespace, rows: torch.Tensor) -> float:
    """The loss of what was trained in full precision, its weights rounded to ``bits`` bits now."""
    config = json.loads((HERE / "moq_4.json").read_text())
    section = config["quantize_training"]
    section["quantize_bits"] = {"start_bits": bits, "target_bits": bits}
    section["quantize_schedule"] = {"schedule_offset": 0}
    rounded = build(config, args)
    rounded.module.load_state_dict(engine.module.state_dict())
    return evaluate(rounded, rows)


def train(file: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A run with one configuration: a row for each evaluation, on every rank."""
    name, config = file.stem, json.loads(file.read_text())
    engine = build(config, args)
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    stream, held_out = load_text(args.seq_length)
    batch, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
    rows: list[dict[str, Any]] = [{"config": name, "step": 0, "loss": evaluate(engine, held_out)}]
    bar = tqdm(total=args.num_iterations, disable=None if rank == 0 else True, desc=name)
    for step in range(1, args.num_iterations + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(stream) - args.seq_length, (batch,), generator=random)
        for part in range(engine.gradient_accumulation_steps()):
            first = (part * ranks + rank) * micro
            places = starts[first : first + micro, None] + torch.arange(args.seq_length)
            tokens = stream[places].to(engine.device)  # [micro, seq_length]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        bar.update()
        if step % args.eval_every == 0 or step == args.num_iterations:
            rows.append({"config": name, "step": step, "loss": evaluate(engine, held_out)})
            bar.set_postfix(loss=f"{rows[-1]['loss']:.3f}", refresh=False)
    bar.close()
    if not {"quantize_training", "quantization_aware_training"} & {*config}:
        for bits in (8, 4):
            rows[-1][f"loss_in_{bits}_bits"] = afterwards(engine, bits, args, held_out)
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The rows and their plot as files, and a table."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) for row in rows)
    (args.output_dir / "rows.jsonl").write_text("\n".join(lines) + "\n")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append((row["step"], row["loss"]))
    print(f"{'':26}{'held-out loss':>14}")
    for last in {row["config"]: row for row in rows}.values():
        print(f"{last['config']:26}{last['loss']:14.3f}")
        for bits in (8, 4):
            if f"loss_in_{bits}_bits" in last:
                print(f"  then rounded to {bits} bits{last[f'loss_in_{bits}_bits']:17.3f}")
    line_plot(
        args.output_dir / "loss_over_steps.svg",
        curves,
        "A small Llama, its weights in fewer and fewer bits",
        "iterations",
        "held-out loss",
    )
    print(f"rows and plot: {args.output_dir}")


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    rows: list[dict[str, Any]] = []
    for file in args.deepspeed_config:
        needs_torchao = "quantization_aware_training" in json.loads(file.read_text())
        if needs_torchao and importlib.util.find_spec("torchao") is None:
            deepspeed.log_dist(f"{file.stem}: left out, torchao is not installed", ranks=[0])
            continue
        rows += train(file, args)
    if deepspeed.comm.get_rank() == 0:
        report(rows, args)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
