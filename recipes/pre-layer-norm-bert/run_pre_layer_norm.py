"""Train a deep, narrow BERT at a learning rate that a post-LN model does not learn at:
`pre_layer_norm` in the JSON file decides.

torchrun --nproc_per_node 2 run_pre_layer_norm.py --deepspeed_config pre.json
torchrun --nproc_per_node 2 run_pre_layer_norm.py --deepspeed_config post.json
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

CARD = Path(__file__).with_name("README.md")
IGNORED = -100  # a label that the loss leaves out
WORDS = 32
MASK = WORDS


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
    parser.add_argument("--num_iterations", type=int, default=240)
    parser.add_argument(
        "--batch_size", type=int, default=8, help="sentences of one iteration on one rank"
    )
    parser.add_argument("--sentence", type=int, default=16, help="words of a sentence")
    parser.add_argument("--num_layers", type=int, default=12)
    parser.add_argument("--h_dim", type=int, default=32)
    parser.add_argument("--log_every", type=int, default=30)
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("runs/pre-layer-norm-bert"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def sentences(count: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of a language in which each word names the next; one in five is masked, and to be
    told from its neighbors.
    """
    following = torch.randperm(WORDS, generator=torch.Generator().manual_seed(7))
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (count, 1), generator=random)
    for _ in range(length - 1):
        words = torch.cat([words, following[words[:, -1:]]], dim=1)
    chosen = torch.rand(words.shape, generator=random) < 0.2
    return {
        "input_ids": words.masked_fill(chosen, MASK),
        "labels": words.masked_fill(~chosen, IGNORED),
    }


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    net = BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS + 1,
            hidden_size=args.h_dim,
            num_hidden_layers=args.num_layers,
            num_attention_heads=2,
            intermediate_size=2 * args.h_dim,
            max_position_embeddings=args.sentence,
            pad_token_id=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            # BERT's 0.02 is for a hidden size of 768; here it would leave hardly any layers
            initializer_range=args.h_dim**-0.5,
        )
    )
    config = json.loads(args.deepspeed_config.read_text())
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    model, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config
    )
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()

    history: list[dict[str, float]] = []
    window: list[torch.Tensor] = []
    for step in range(1, args.num_iterations + 1):
        batch = sentences(args.batch_size, args.sentence, seed=step * ranks + rank)
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        model.backward(loss)
        model.step()
        window.append(loss.detach())
        if step % args.log_every == 0 or step == args.num_iterations:
            mean = torch.stack(window).mean()
            window.clear()
            deepspeed.comm.all_reduce(mean)
            history.append({"step": step, "loss": mean.item() / ranks})
            deepspeed.log_dist(f"iteration {step}: loss {history[-1]['loss']:.4f}", ranks=[0])
    tag = f"iter_{args.num_iterations}"
    model.save_checkpoint(save_dir=str(args.checkpoint_dir), tag=tag)
    if rank == 0:
        shutil.copy(CARD, args.checkpoint_dir / tag / CARD.name)
        (args.checkpoint_dir / tag / "trainer_state.json").write_text(
            json.dumps({"log_history": history}, indent=1)
        )
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
