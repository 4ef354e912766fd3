"""What recipes have in common that train one model with several configurations: a text, the runs
one after another, rows and plots of their held-out losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

sys.path.append(str(Path(__file__).resolve().parent))
from plot import line_plot

VALUES = 128  # of a byte of the text
MASK = VALUES
IGNORED = -100  # a label that the loss leaves out
Batch = dict[str, torch.Tensor]


def parser_of(description: str, configs: Sequence[Path], **amount: int) -> argparse.ArgumentParser:
    """The arguments of every such script; ``amount`` is what each run trains on: tokens=600_000."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepspeed_config", type=Path, nargs="+", default=list(configs))
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    for unit, number in amount.items():
        parser.add_argument(f"--{unit}", type=int, default=number, help=f"{unit} of each run")
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument(
        "--evaluations", type=int, default=16, help="of each run, at equal distances"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs") / configs[0].parent.name)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def small_gpt2(args: argparse.Namespace, length: int) -> GPT2LMHeadModel:
    """A GPT-2 of ``args``' size for rows of at most ``length`` bytes, without dropout."""
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VALUES,
            n_positions=length,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    net.loss_type = "ForCausalLM"  # Transformers' default for this class, but with a warning
    return net


def small_bert(args: argparse.Namespace, words: int, length: int, **more: Any) -> BertForMaskedLM:
    """A BERT of ``args``' size for rows of at most ``length`` of ``words`` words, without dropout.
    ``more`` goes to its configuration.
    """
    given = {
        "num_attention_heads": 4,
        "intermediate_size": 4 * args.hidden_size,
        # BERT's 0.02 is for a hidden size of 768; here it would leave hardly any of many layers
        "initializer_range": args.hidden_size**-0.5,
        **more,
    }
    return BertForMaskedLM(
        BertConfig(
            vocab_size=words,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_layers,
            max_position_embeddings=length,
            pad_token_id=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **given,
        )
    )


def load_text(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Python's own language reference, a number a byte: what is trained on, a stream, and 64 rows
    [64, length] from its held-out end.
    """
    joined = "\n".join(topics[name] for name in sorted(topics))
    stream = torch.tensor([byte for byte in joined.encode() if byte < VALUES])
    end = len(stream) * 19 // 20
    rows = stream[end:].unfold(0, length, length)
    return stream[:end], rows[:: len(rows) // 64][:64]


def rows_of(stream: torch.Tensor, length: int, count: int, random: torch.Generator) -> torch.Tensor:
    """``count`` rows [count, length] from anywhere in the text."""
    starts = torch.randint(len(stream) - length, (count, 1), generator=random)
    return stream[starts + torch.arange(length)]


def masked(rows: torch.Tensor, random: torch.Generator) -> Batch:
    """A batch in which one token in seven is masked, and to be told from the others."""
    chosen = torch.rand(rows.shape, generator=random) < 0.15
    return {
        "input_ids": rows.masked_fill(chosen, MASK),
        "labels": rows.masked_fill(~chosen, IGNORED),
    }


@torch.no_grad()
def evaluate(engine: Any, batch: Batch) -> float:
    """Mean of the loss that the model returns, over the held-out rows, which each rank reads in
    full.
    """
    engine.eval()
    loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss.item()
    engine.train()
    return float(loss)


def train(
    name: str,
    engine: Any,
    batch_of: Callable[[int, torch.Generator], Batch],
    held_out: Batch,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A run of ``args.tokens``: a row for each evaluation, on every rank.

    ``batch_of(count, random)`` makes a micro-batch; how many samples it has, and how many
    micro-batches are a step, is asked of the engine in each. Evaluations do not count among the
    seconds.
    """
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    step = samples = tokens = 0
    interval = max(1, args.tokens // args.evaluations)
    seconds = 0.0
    first = {
        "step": 0,
        "samples": 0,
        "tokens": 0,
        "seconds": 0.0,
        "loss": evaluate(engine, held_out),
    }
    rows = [{"config": name, **first}]
    bar = tqdm(total=args.tokens, disable=None if rank == 0 else True, desc=name)
    began = time.perf_counter()
    while tokens < args.tokens:
        step += 1
        before = tokens
        parts, micro = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
        for part in range(parts):
            random = torch.Generator().manual_seed((step * 1000 + part) * ranks + rank)
            batch = {key: each.to(engine.device) for key, each in batch_of(micro, random).items()}
            tokens += engine.prepare_batch(batch)["input_ids"].numel() * ranks
            engine.backward(engine(**batch).loss)
            engine.step()
        samples += parts * micro * ranks
        bar.update(tokens - before)
        if tokens // interval > before // interval or tokens >= args.tokens:
            seconds += time.perf_counter() - began
            loss = evaluate(engine, held_out)
            rows.append(
                {"config": name, "step": step, "samples": samples, "tokens": tokens,
                 "seconds": seconds, "loss": loss}
            )  # fmt: skip
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            began = time.perf_counter()
    bar.close()
    deepspeed.log_dist(
        f"{name}: {step} steps, {tokens:,} tokens, held-out loss {rows[-1]['loss']:.3f}", ranks=[0]
    )
    return rows


def report(rows: list[dict[str, Any]], folder: Path, title: str, over: Sequence[str]) -> None:
    """The rows as a file, a plot of losses over each column of ``over``, and a table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    print(f"{'':24}{'steps':>8}{'tokens':>12}{'seconds':>10}{'held-out loss':>16}")
    for last in {row["config"]: row for row in rows}.values():
        print(
            f"{last['config']:24}{last['step']:8}{last['tokens']:12,}{last['seconds']:10.1f}"
            f"{last['loss']:16.3f}"
        )
    for column in over:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            curves.setdefault(row["config"], []).append((row[column], row["loss"]))
        file = folder / f"loss_over_{column}.svg"
        line_plot(file, curves, title, column, "held-out loss")
    print(f"rows and plots: {folder}")


def report_beside(folder: Path, name: str, rows: list[dict[str, Any]], title: str) -> None:
    """The rows of the run ``name``, and a plot of all runs that are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rows-{name.replace(' ', '-')}.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    curves: dict[str, list[tuple[float, float]]] = {}
    for each in sorted(folder.glob("rows-*.jsonl")):
        for line in each.read_text().splitlines():
            row = json.loads(line)
            curves.setdefault(row["config"], []).append((row["step"], row["loss"]))
    line_plot(folder / "loss_over_steps.svg", curves, title, "steps", "held-out loss")
    print(f"rows and plot: {folder}")


def finish(
    rows: list[dict[str, Any]], args: argparse.Namespace, title: str, over: Sequence[str]
) -> None:
    """The report of all runs, by rank 0; the ranks end together."""
    if deepspeed.comm.get_rank() == 0:
        report(rows, args.output_dir, title, over)
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


def compare(
    args: argparse.Namespace,
    model_of: Callable[[], torch.nn.Module],
    batch_of: Callable[[int, torch.Generator], Batch],
    held_out: Batch,
    title: str,
    over: Sequence[str],
) -> None:
    """One run for each configuration, from the same weights."""
    deepspeed.init_distributed()
    rows = []
    for file in args.deepspeed_config:
        torch.manual_seed(args.seed)
        net = model_of()
        config = json.loads(file.read_text())
        engine, _, _, _ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=config
        )
        rows += train(file.stem, engine, batch_of, held_out, args)
        engine.destroy()
    finish(rows, args, title, over)
