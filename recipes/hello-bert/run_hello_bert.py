"""Train a small RoBERTa for masked language modeling, from scratch, in a loop written for
DeepSpeed.

What plain PyTorch spells with an optimizer and `torch.save` is spelled here with an engine:
`backward`, `step`, `save_checkpoint`.

    torchrun --nproc_per_node 2 run_hello_bert.py --deepspeed_config zero3.json
    torchrun --nproc_per_node 2 run_hello_bert.py --deepspeed_config zero3.json \\
        --load_checkpoint_dir runs/hello-bert
    torchrun --nproc_per_node 2 run_hello_bert.py --deepspeed_config zero3.json \\
        --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-raw-v1
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

CARD = Path(__file__).with_name("README.md")
SPECIAL = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
IGNORED = -100  # a label that the loss leaves out


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        required=True,
        help="a JSON file; the micro-batch is --batch_size",
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument(
        "--dataset_name",
        help="a data set on the hub with a `text` column; without it, Python's "
        "own language reference",
    )
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--num_iterations", type=int, default=1000)
    parser.add_argument(
        "--batch_size", type=int, default=16, help="blocks of one iteration on one rank"
    )
    parser.add_argument("--block_size", type=int, default=32)
    parser.add_argument("--mask_prob", type=float, default=0.2)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--h_dim", type=int, default=128)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--log_every", type=int, default=50)
    parser.add_argument("--checkpoint_every", type=int, default=250)
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("runs/hello-bert"))
    parser.add_argument(
        "--load_checkpoint_dir",
        type=Path,
        help="continue from the latest checkpoint in this folder",
    )
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_texts(args: argparse.Namespace) -> tuple[list[str], str]:
    """Paragraphs of English, and the name of what they come from."""
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
    paragraphs = [
        " ".join(part.split())
        for topic in topics.values()
        for part in topic.split("\n\n")
        if not part.startswith(" ")
    ]
    return [
        text for text in paragraphs if "***" not in text and "===" not in text
    ], "pydoc_data.topics"


def train_tokenizer(texts: list[str], vocab_size: int, block_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE in lower case. Every rank trains the same one from the same text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL.values()],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=block_size, **SPECIAL
    )


def cut(texts: list[str], tokenizer: Any, block_size: int) -> torch.Tensor:
    """All texts as one stream, cut into blocks [blocks, block_size] that begin with <s> and end
    with </s>.
    """
    stream = [
        token
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for token in ids
    ]
    inner = block_size - 2
    rows = torch.tensor(stream[: len(stream) // inner * inner]).view(-1, inner)
    return torch.nn.functional.pad(
        torch.nn.functional.pad(rows, (1, 0), value=tokenizer.bos_token_id),
        (0, 1),
        value=tokenizer.eos_token_id,
    )


def masked(
    blocks: torch.Tensor, tokenizer: Any, probability: float, seed: int
) -> dict[str, torch.Tensor]:
    """A batch: of the chosen tokens 8 in 10 are masked, 1 is replaced by any other, 1 is left;
    they alone are to be told.
    """
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(blocks.shape, generator=random) < probability
    chosen[:, 0] = chosen[:, -1] = False
    fate = torch.rand(blocks.shape, generator=random)
    other = torch.randint(len(SPECIAL), len(tokenizer), blocks.shape, generator=random)
    inputs = torch.where(chosen & (fate < 0.8), tokenizer.mask_token_id, blocks)
    inputs = torch.where(chosen & (fate >= 0.9), other, inputs)
    return {
        "input_ids": inputs,
        "attention_mask": torch.ones_like(blocks),
        "labels": torch.where(chosen, blocks, IGNORED),
    }


def batches(
    blocks: torch.Tensor, tokenizer: Any, args: argparse.Namespace, start: int
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches from iteration ``start`` on.

    Order and masks depend on the iteration alone: a resumed run goes on as it was.
    """
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    together = args.batch_size * ranks
    step = start
    while True:
        epoch, place = divmod(step, len(blocks) // together)
        order = torch.randperm(
            len(blocks), generator=torch.Generator().manual_seed(args.seed + epoch)
        )
        rows = order[place * together + rank :: ranks][: args.batch_size]
        yield masked(blocks[rows], tokenizer, args.mask_prob, seed=step * ranks + rank)
        step += 1


@torch.no_grad()
def evaluate(model: Any, blocks: torch.Tensor, tokenizer: Any, args: argparse.Namespace) -> float:
    """Mean loss over the masked tokens of the held-out blocks, the same masks every time; ranks
    read equal shares.
    """
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    share = blocks[rank : len(blocks) // ranks * ranks : ranks]
    sums = torch.zeros(2, device=model.device)
    model.eval()
    for number, rows in enumerate(share.split(args.batch_size)):
        batch = masked(rows, tokenizer, args.mask_prob, seed=number * ranks + rank)
        count = (batch["labels"] != IGNORED).sum()
        loss = model(
            **{name: tensor.to(model.device) for name, tensor in batch.items()}
        ).loss.float()
        sums += torch.stack([loss * count.to(loss.device), count.to(loss.device)])
    model.train()
    deepspeed.comm.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def save(model: Any, tokenizer: Any, folder: Path, run: dict[str, Any]) -> None:
    """The sharded state with what is known of the run; beside it what a converted model takes
    along.
    """
    tag = f"iter_{run['checkpoint_step']}"
    model.save_checkpoint(save_dir=str(folder), tag=tag, client_state=run)
    if deepspeed.comm.get_rank() == 0:
        tokenizer.save_pretrained(folder / tag)
        shutil.copy(CARD, folder / tag / CARD.name)
        (folder / tag / "trainer_state.json").write_text(json.dumps(run, indent=1))
    deepspeed.comm.barrier()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    texts, source = load_texts(args)
    tokenizer = train_tokenizer(texts, args.vocab_size, args.block_size)
    blocks = cut(texts, tokenizer, args.block_size)
    held_out, blocks = blocks[::20], blocks[torch.arange(len(blocks)) % 20 != 0]
    net = RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.h_dim,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            intermediate_size=4 * args.h_dim,
            # RoBERTa counts positions from the padding index on
            max_position_embeddings=args.block_size + 2,
            type_vocab_size=1,
            bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    ds_config = json.loads(args.deepspeed_config.read_text())
    ds_config["train_micro_batch_size_per_gpu"] = args.batch_size
    model, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=ds_config
    )

    run: dict[str, Any] = {
        "checkpoint_step": 0,
        "text": source,
        "processes": deepspeed.comm.get_world_size(),
        "sharding": f"ZeRO stage {model.zero_optimization_stage()}",
        "log_history": [],
    }
    if args.load_checkpoint_dir:
        folder, run = model.load_checkpoint(load_dir=str(args.load_checkpoint_dir))
        if folder is None:
            raise SystemExit(
                f"no checkpoint in {args.load_checkpoint_dir}; run once without "
                "--load_checkpoint_dir"
            )
        deepspeed.log_dist(
            f"continuing from {folder} after {run['checkpoint_step']} iterations", ranks=[0]
        )
    else:
        run["log_history"].append(
            {"step": 0, "eval_loss": evaluate(model, held_out, tokenizer, args)}
        )
    deepspeed.log_dist(
        f"evaluation loss before training: {run['log_history'][0]['eval_loss']:.4f}", ranks=[0]
    )

    window: list[torch.Tensor] = []
    start = run["checkpoint_step"]
    remaining = range(start + 1, args.num_iterations + 1)
    for step, batch in zip(remaining, batches(blocks, tokenizer, args, start)):
        # for dropout: also the same in a resumed run
        torch.manual_seed(step * run["processes"] + deepspeed.comm.get_rank())
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        model.backward(loss)
        model.step()
        window.append(loss.detach())
        if step % args.log_every == 0 or step >= args.num_iterations:
            mean = torch.stack(window).mean()
            window.clear()
            deepspeed.comm.all_reduce(mean)
            run["log_history"].append(
                {"step": step, "loss": mean.item() / deepspeed.comm.get_world_size()}
            )
            deepspeed.log_dist(
                f"iteration {step}: loss {run['log_history'][-1]['loss']:.4f}", ranks=[0]
            )
        run["checkpoint_step"] = step
        if step < args.num_iterations and step % args.checkpoint_every == 0:
            save(model, tokenizer, args.checkpoint_dir, run)

    run["log_history"].append(
        {"step": run["checkpoint_step"], "eval_loss": evaluate(model, held_out, tokenizer, args)}
    )
    save(model, tokenizer, args.checkpoint_dir, run)
    before, after = (run["log_history"][place]["eval_loss"] for place in (0, -1))
    deepspeed.log_dist(
        f"evaluation loss {before:.4f} -> {after:.4f}; sharded state in {args.checkpoint_dir}",
        ranks=[0],
    )
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
