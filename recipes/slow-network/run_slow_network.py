"""Train the same small BERT on the same text once for each DeepSpeed configuration, a step of each
in turn, and plot their held-out losses over the seconds that their own steps took.

    python two_hosts.py --rate 100
    torchrun --nproc_per_node 2 run_slow_network.py

`two_hosts.py` starts this script on two hosts that it creates and joins by a slow link.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import BertConfig, BertForMaskedLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from plot import line_plot  # noqa: E402

CONFIGS = ("dense.json", "four_bits.json", "one_bit.json")
IGNORED = -100  # a label that the loss leaves out
WORDS = 2048  # the commonest, one number for all others, and the mask
OTHER, MASK = WORDS - 2, WORDS - 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        nargs="+",
        default=[HERE / name for name in CONFIGS],
        help="JSON files; --batch_size is the micro-batch, freeze_step a fifth of the iterations",
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument("--num_iterations", type=int, default=300)
    parser.add_argument(
        "--batch_size", type=int, default=8, help="blocks of one iteration on one rank"
    )
    parser.add_argument("--block_size", type=int, default=32, help="words of a block")
    parser.add_argument("--mask_prob", type=float, default=0.15)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--h_dim", type=int, default=128)
    parser.add_argument("--eval_every", type=int, default=15)
    parser.add_argument("--link", default="", help="description of the network for the plot")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/slow-network"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def load_text() -> torch.Tensor:
    """Python's own language reference, a number a word or sign."""
    joined = "\n".join(topics[name] for name in sorted(topics))
    words = re.findall(r"\w+|[^\w\s]", joined.lower())
    common = [word for word, _ in Counter(words).most_common(OTHER)]
    numbers = {word: number for number, word in enumerate(common)}
    return torch.tensor([numbers.get(word, OTHER) for word in words])


def masked_blocks(
    text: torch.Tensor, count: int, args: argparse.Namespace, seed: int
) -> dict[str, torch.Tensor]:
    """Blocks from anywhere in the text, some of their words masked: [count, block_size]."""
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - args.block_size, (count, 1), generator=random)
    blocks = text[starts + torch.arange(args.block_size)]
    chosen = torch.rand(blocks.shape, generator=random) < args.mask_prob
    return {
        "input_ids": blocks.masked_fill(chosen, MASK),
        "labels": blocks.masked_fill(~chosen, IGNORED),
    }


def build(file: Path, args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the file, the model begins with the same weights."""
    torch.manual_seed(args.seed)
    net = BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=args.h_dim,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            intermediate_size=4 * args.h_dim,
            max_position_embeddings=args.block_size,
            pad_token_id=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.06,  # BERT's 0.02 is for a hidden size of 768
        )
    )
    config = json.loads(file.read_text())
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    settings = config["optimizer"]["params"]
    if "freeze_step" in settings:
        settings["freeze_step"] = max(1, args.num_iterations // 5)

    def share(step: int) -> float:
        """Of the full learning rate: up in a tenth of the iterations, then down to a tenth."""
        done = step / args.num_iterations
        return min(10 * done + 1 / args.num_iterations, 1.0 - (done - 0.1))

    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=net.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share),
    )
    return engine


@torch.no_grad()
def evaluate(engine: Any, batch: dict[str, torch.Tensor]) -> float:
    """Mean loss over a batch, which each rank reads in full, of 16-bit logits in fp32."""
    engine.eval()
    logits = engine(input_ids=batch["input_ids"].to(engine.device)).logits.float().cpu()
    engine.train()
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()


def train(engines: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A step of each engine in turn, with the same batch; a row for each evaluation of each.

    A row's seconds are those of all steps of its engine so far, on this rank, without evaluations.
    All ranks begin a step together.
    """
    text, rank, ranks = load_text(), deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    end = len(text) * 19 // 20
    held_out, text = masked_blocks(text[end:], 64, args, args.seed), text[:end]
    spent = dict.fromkeys(engines, 0.0)
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=args.num_iterations, disable=None if rank == 0 else True, desc="training")
    for step in range(args.num_iterations + 1):
        batch = masked_blocks(text, args.batch_size, args, seed=step * ranks + rank)
        for engine_name, engine in engines.items() if step else ():
            here = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            deepspeed.comm.barrier()
            began = time.perf_counter()
            loss = engine(**here).loss
            engine.backward(loss)
            engine.step()
            loss.item()  # waits for a device
            spent[engine_name] += time.perf_counter() - began
        bar.update(1 if step else 0)
        if step % args.eval_every == 0 or step == args.num_iterations:
            losses = {name: evaluate(engine, held_out) for name, engine in engines.items()}
            rows += [
                {"config": name, "step": step, "seconds": spent[name], "loss": loss}
                for name, loss in losses.items()
            ]
            said = {name: f"{loss:.3f} in {spent[name]:.0f} s" for name, loss in losses.items()}
            bar.set_postfix(said, refresh=False)
            if bar.disable:
                deepspeed.log_dist(f"iteration {step}: held-out loss {said}", ranks=[0])
    bar.close()
    return rows


def report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The rows and their plot as files, and a table."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"link": args.link, **row}) for row in rows)
    (args.output_dir / "rows.jsonl").write_text("\n".join(lines) + "\n")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append((row["seconds"], row["loss"]))
    first = rows[-len(curves)]["seconds"]
    print(f"{'':12}{'s a step':>10}{'seconds':>10}{'to the first':>14}{'held-out loss':>15}")
    for name, curve in curves.items():
        seconds, loss = curve[-1]
        print(
            f"{name:12}{seconds / args.num_iterations:10.3f}{seconds:10.1f}"
            f"{seconds / first:14.2f}{loss:15.3f}"
        )
    title = f"BERT, masked language modeling, {deepspeed.comm.get_world_size()} ranks"
    line_plot(
        args.output_dir / "loss_over_seconds.svg",
        curves,
        f"{title}; {args.link}" if args.link else title,
        "seconds in steps",
        "held-out loss",
    )
    print(f"rows and plot: {args.output_dir}")


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    engines = {file.stem: build(file, args) for file in args.deepspeed_config}
    rows = train(engines, args)
    if deepspeed.comm.get_rank() == 0:
        report(rows, args)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
