"""Train a small GPT-2 on text, from scratch, in the loop of Megatron's users: an optimizer, a
schedule and an `mpu` go into DeepSpeed.

torchrun --nproc_per_node 2 run_gpt2.py --deepspeed_config zero3.json
torchrun --nproc_per_node 2 run_gpt2.py --deepspeed_config zero3.json --load runs/gpt2

`--dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1` takes text of the hub.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

CARD = Path(__file__).with_name("README.md")
END = "<|endoftext|>"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser = deepspeed.add_config_arguments(parser)
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument(
        "--dataset_name",
        help="a data set on the hub with a `text` column; without it, Python's "
        "own language reference",
    )
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--num_attention_heads", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--checkpoint_activations",
        action="store_true",
        help="recompute the activations of each block in backward",
    )
    parser.add_argument("--train_iters", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--warmup",
        type=float,
        default=0.05,
        help="the part of --train_iters in which the rate rises",
    )
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--log_interval", type=int, default=50)
    parser.add_argument("--save_interval", type=int, default=100)
    parser.add_argument("--save", type=Path, default=Path("runs/gpt2"))
    parser.add_argument(
        "--load", type=Path, help="continue from the latest checkpoint in this folder"
    )
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class DataParallelUnit:
    """Megatron's answers for a run in which every rank holds the same model: one model-parallel
    rank, all ranks data parallel.
    """

    def __init__(self) -> None:
        self._alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][
            dist.get_rank()
        ]

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size()


def load_texts(args: argparse.Namespace) -> tuple[list[str], str]:
    """Pieces of text, and the name of what they come from."""
    if args.dataset_name:
        try:
            import datasets

            split = datasets.load_dataset(
                args.dataset_name, args.dataset_config_name, split="train"
            )
            return [text for text in split["text"] if text.strip()], args.dataset_name
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            remedy = "correct the name, or leave --dataset_name out to train on pydoc_data.topics"
            raise SystemExit(f"{args.dataset_name} cannot be loaded ({error}); {remedy}") from None
    return [topic.strip() for topic in topics.values()], "pydoc_data.topics"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2 has one, of the text itself. Every rank trains the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, unk_token=END, pad_token=END
    )


def cut(texts: list[str], tokenizer: Any, length: int) -> torch.Tensor:
    """All texts as one stream with an end after each, cut into rows [rows, length]."""
    stream = [
        token
        for ids in tokenizer(texts, verbose=False)["input_ids"]
        for token in [*ids, tokenizer.eos_token_id]
    ]
    return torch.tensor(stream[: len(stream) // length * length]).view(-1, length)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def cosine(step: int, warmup: int, total: int) -> float:
    """The share of the full learning rate: up in a line, down in half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


@torch.no_grad()
def evaluate(model: Any, rows: torch.Tensor, mpu: DataParallelUnit) -> float:
    """Mean loss over the held-out rows; ranks read equal shares."""
    rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    sums = torch.zeros(2, device=model.device)
    model.eval()
    for some in rows[rank : len(rows) // ranks * ranks : ranks].split(16):
        tokens = some.to(model.device)
        sums += torch.stack(
            [
                model(input_ids=tokens, labels=tokens).loss.float() * len(some),
                sums.new_tensor(len(some)),
            ]
        )
    model.train()
    dist.all_reduce(sums, group=mpu.get_data_parallel_group())
    return (sums[0] / sums[1]).item()


def save(model: Any, tokenizer: Any, folder: Path, run: dict[str, Any]) -> None:
    """The sharded state with what is known of the run; beside it what a converted model takes
    along.
    """
    tag = f"iter_{run['iteration']}"
    model.save_checkpoint(str(folder), tag, client_state=run)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(folder / tag)
        shutil.copy(CARD, folder / tag / CARD.name)
        (folder / tag / "trainer_state.json").write_text(json.dumps(run, indent=1))
    dist.barrier()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    mpu = DataParallelUnit()
    torch.manual_seed(args.seed)
    texts, source = load_texts(args)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    rows = cut(texts, tokenizer, args.seq_length)
    held_out, rows = rows[::20], rows[torch.arange(len(rows)) % 20 != 0]
    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=2 * args.seq_length,
            n_embd=args.hidden_size,
            n_layer=args.num_layers,
            n_head=args.num_attention_heads,
            resid_pdrop=args.dropout,
            embd_pdrop=args.dropout,
            attn_pdrop=args.dropout,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    net.loss_type = "ForCausalLM"  # Transformers' default for this class, but with a warning
    if args.checkpoint_activations:
        net.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(
        parameter_groups(net, args.weight_decay), lr=args.lr, betas=(0.9, 0.95)
    )
    warmup = max(1, round(args.warmup * args.train_iters))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, warmup, args.train_iters)
    )
    model, optimizer, loader, schedule = deepspeed.initialize(
        args=args,
        model=net,
        optimizer=optimizer,
        lr_scheduler=schedule,
        mpu=mpu,
        training_data=TensorDataset(rows),
    )

    run: dict[str, Any] = {
        "iteration": 0,
        "micro_batches": 0,
        "text": source,
        "processes": mpu.get_data_parallel_world_size(),
        "sharding": f"ZeRO stage {model.zero_optimization_stage()}",
        "log_history": [],
    }
    if args.load:
        folder, run = model.load_checkpoint(str(args.load))
        if folder is None:
            raise SystemExit(f"no checkpoint in {args.load}; run once without --load")
        # other ranks share the rows of an iteration in other micro-batches
        run["processes"] = mpu.get_data_parallel_world_size()
        together = model.train_micro_batch_size_per_gpu() * run["processes"]
        run["micro_batches"] = model.global_samples // together
        deepspeed.log_dist(
            f"continuing from {folder} after {run['iteration']} iterations", ranks=[0]
        )
    else:
        run["log_history"].append({"step": 0, "eval_loss": evaluate(model, held_out, mpu)})
    deepspeed.log_dist(
        f"evaluation loss before training: {run['log_history'][0]['eval_loss']:.4f}", ranks=[0]
    )

    window: list[torch.Tensor] = []
    while run["iteration"] < args.train_iters:
        epoch, done = divmod(run["micro_batches"], len(loader))
        loader.data_sampler.set_epoch(epoch)
        for place, (tokens,) in enumerate(loader):
            if place < done:
                continue
            # for dropout: also the same in a resumed run
            torch.manual_seed(run["micro_batches"] * run["processes"] + dist.get_rank())
            tokens = tokens.to(model.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            ends = model.is_gradient_accumulation_boundary()
            model.step()
            run["micro_batches"] += 1
            run["iteration"] += int(ends)
            window.append(loss.detach())
            last = run["iteration"] == args.train_iters
            if ends and (last or run["iteration"] % args.log_interval == 0):
                mean = torch.stack(window).mean()
                window.clear()
                dist.all_reduce(mean, group=mpu.get_data_parallel_group())
                rate, mean = (
                    optimizer.param_groups[0]["lr"],
                    mean / mpu.get_data_parallel_world_size(),
                )
                run["log_history"].append(
                    {"step": run["iteration"], "loss": mean.item(), "learning_rate": rate}
                )
                deepspeed.log_dist(
                    f"iteration {run['iteration']}: loss {mean.item():.4f}, "
                    f"learning rate {rate:.2e}",
                    ranks=[0],
                )
            if last:
                break
            if ends and run["iteration"] % args.save_interval == 0:
                save(model, tokenizer, args.save, run)

    run["log_history"].append(
        {"step": run["iteration"], "eval_loss": evaluate(model, held_out, mpu)}
    )
    save(model, tokenizer, args.save, run)
    before, after = (run["log_history"][place]["eval_loss"] for place in (0, -1))
    deepspeed.log_dist(
        f"evaluation loss {before:.4f} -> {after:.4f}, perplexity {math.exp(before):.0f} -> "
        f"{math.exp(after):.1f}; sharded state in {args.save}",
        ranks=[0],
    )
    prompt = tokenizer("The value of", return_tensors="pt").to(model.device)
    model.eval()  # every rank generates the same tokens, together
    answer = model.module.generate(
        **prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    deepspeed.log_dist(f"continued: {tokenizer.decode(answer[0])!r}", ranks=[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
