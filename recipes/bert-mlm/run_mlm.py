"""Train a small BERT for masked language modeling, from scratch, with Accelerate.

Nothing here knows how the model is partitioned: the configuration given to ``accelerate launch``
decides.

    accelerate launch --config_file zero3.yaml run_mlm.py
    accelerate launch --config_file zero3.yaml run_mlm.py --resume_from_checkpoint latest
    accelerate launch --config_file zero3.yaml run_mlm.py --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-raw-v1
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import tokenizers
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed
from huggingface_hub import ModelCard
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    get_scheduler,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from starting import peak_bytes, tensor_bytes

logger = get_logger(__name__)
CARD = Path(__file__).with_name("README.md")
BUILT_IN = "pydoc_data.topics"
RUN = "trainer_state.json"  # the name and the `log_history` that transformers' Trainer uses


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("text")
    data.add_argument(
        "--dataset_name",
        help="a data set on the hub with a `text` column; without it, Python's "
        "own language reference",
    )
    data.add_argument("--dataset_config_name")
    data.add_argument("--validation_fraction", type=float, default=0.05)
    data.add_argument("--max_seq_length", type=int, default=32)
    data.add_argument("--mlm_probability", type=float, default=0.2)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model_name_or_path",
        help="continue from this model and its tokenizer instead of starting from nothing",
    )
    model.add_argument("--vocab_size", type=int, default=2048)
    model.add_argument("--hidden_size", type=int, default=128)
    model.add_argument("--num_layers", type=int, default=2)
    model.add_argument("--num_heads", type=int, default=4)
    train = parser.add_argument_group("training")
    train.add_argument("--per_device_batch_size", type=int, default=16)
    train.add_argument("--gradient_accumulation_steps", type=int, default=1)
    train.add_argument("--max_train_steps", type=int, default=1200)
    train.add_argument("--learning_rate", type=float, default=3e-3)
    train.add_argument("--weight_decay", type=float, default=0.01)
    train.add_argument("--num_warmup_steps", type=int, default=80)
    train.add_argument("--max_grad_norm", type=float, default=1.0)
    train.add_argument("--seed", type=int, default=42)
    output = parser.add_argument_group("output")
    output.add_argument("--output_dir", type=Path, default=Path("runs/bert-mlm"))
    output.add_argument("--checkpointing_steps", type=int, default=200)
    output.add_argument(
        "--resume_from_checkpoint",
        help="a folder `step_N`, or `latest` for the newest complete one in --output_dir",
    )
    output.add_argument("--logging_steps", type=int, default=50)
    return parser.parse_args()


@dataclass
class Run:
    """What is known about this run so far.

    Its file in a checkpoint, written last, is what makes the checkpoint complete.
    """

    text: str
    sharding: str
    processes: int
    parameters: int
    sequence_length: int
    completed_steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    memory: list[dict[str, int]] = field(default_factory=list)
    log_history: list[dict[str, float]] = field(default_factory=list)

    def log(self, **values: float) -> None:
        self.log_history.append({"step": self.completed_steps, **values})

    @property
    def tokens_per_second(self) -> float:
        return self.examples * self.sequence_length / self.seconds if self.seconds else 0.0

    def save(self, folder: Path) -> None:
        partial = folder / f"{RUN}.partial"
        partial.write_text(
            json.dumps({**asdict(self), "tokens_per_second": self.tokens_per_second}, indent=1)
        )
        partial.rename(folder / RUN)

    def resume(self, folder: Path) -> None:
        saved = json.loads((folder / RUN).read_text())
        for name in ("completed_steps", "examples", "seconds", "log_history"):
            setattr(self, name, saved[name])


class PositionSeededCollator(DataCollatorForLanguageModeling):
    """Masks depend on a batch's position in the run, so that a resumed run masks what the
    uninterrupted one would have.
    """

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_seed = seed
        self.position = 0

    def __call__(self, features: Any, return_tensors: str | None = None) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.base_seed + self.position)
            self.position += 1
            return super().__call__(features, return_tensors)


def load_texts(args: argparse.Namespace) -> tuple[datasets.Dataset, str]:
    """A data set with one column `text`, and its name."""
    if args.dataset_name:
        try:
            return datasets.load_dataset(
                args.dataset_name, args.dataset_config_name, split="train"
            ), args.dataset_name
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            remedy = f"correct the name, or leave --dataset_name out to train on {BUILT_IN}"
            raise SystemExit(f"{args.dataset_name} cannot be loaded ({error}); {remedy}") from None
    paragraphs = [paragraph for topic in topics.values() for paragraph in topic.split("\n\n")]
    # Indented paragraphs are code and grammar, those with a ruled line are headings: what is left
    # is English.
    prose = [
        " ".join(paragraph.split())
        for paragraph in paragraphs
        if not paragraph.startswith(" ") and "***" not in paragraph and "===" not in paragraph
    ]
    return datasets.Dataset.from_dict({"text": prose}), BUILT_IN


def train_tokenizer(texts: list[str], vocab_size: int, length: int, folder: Path) -> None:
    """A lower-case byte-level BPE, saved where AutoTokenizer finds it. (Training a WordPiece
    does not give the same twice.)
    """
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    # it stands for a word with the space before it
    mask = tokenizers.AddedToken("[MASK]", lstrip=True, special=True)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.Lowercase()
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special.values(), mask],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    ends = [(token, model.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    PreTrainedTokenizerFast(
        tokenizer_object=model, model_max_length=length, mask_token=mask, **special
    ).save_pretrained(folder)


def cut_into_blocks(texts: datasets.Dataset, tokenizer: Any, length: int) -> datasets.Dataset:
    """All texts as one stream of tokens, cut into blocks of exactly `length` with [CLS] and
    [SEP] at their ends.
    """

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        stream = [
            token
            for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            for token in ids
        ]
        inner = length - 2
        starts = range(0, len(stream) - inner + 1, inner)
        return {
            "input_ids": [
                [tokenizer.cls_token_id, *stream[a : a + inner], tokenizer.sep_token_id]
                for a in starts
            ]
        }

    return texts.map(
        cut,
        batched=True,
        batch_size=1000,
        remove_columns=texts.column_names,
        desc="Cutting into blocks",
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and the parameters of norms do not."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or "LayerNorm" in name else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def describe_sharding(accelerator: Accelerator) -> str:
    plugin = accelerator.state.deepspeed_plugin
    return f"ZeRO stage {plugin.zero_stage}" if plugin else accelerator.distributed_type.value


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    loader: DataLoader,
    collator: PositionSeededCollator,
    accelerator: Accelerator,
) -> float:
    """Mean loss over the validation blocks, with the same masks every time."""
    collator.position = 0
    model.eval()
    losses = [
        accelerator.gather_for_metrics(model(**batch).loss.repeat(len(batch["input_ids"])))
        for batch in loader
    ]
    model.train()
    return torch.cat(losses).mean().item()


def save_checkpoint(
    folder: Path, accelerator: Accelerator, tokenizer: Any, card: ModelCard, run: Run
) -> None:
    """The sharded state, and beside it what belongs to a converted model: tokenizer, model card,
    the losses.
    """
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
        card.save(folder / CARD.name)
        run.save(folder)
    accelerator.wait_for_everyone()


def model_card(text: str, base_model: str | None) -> ModelCard:
    """The recipe's card, naming the data set and the base model where they come from the hub."""
    card = ModelCard.load(CARD)
    if text != BUILT_IN:
        card.data.datasets = [text]
    if base_model:
        card.data.base_model = base_model
    return card


def find_checkpoint(wanted: str, output_dir: Path) -> Path:
    if wanted != "latest":
        if not (Path(wanted) / RUN).exists():
            raise SystemExit(
                f"{wanted} holds no {RUN}: not a complete checkpoint of this script; name "
                "another one, or `latest`"
            )
        return Path(wanted)
    complete = {
        int(path.parent.name.removeprefix("step_")): path.parent
        for path in output_dir.glob(f"step_*/{RUN}")
    }
    if not complete:
        raise SystemExit(
            f"no complete checkpoint in {output_dir}; run once without --resume_from_checkpoint"
        )
    return complete[max(complete)]


def main() -> None:
    args = parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger(__name__).setLevel(logging.INFO)
    # The order of the examples is a function of seed and epoch: a resumed run finds its place in
    # it.
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, dataloader_config=order
    )
    logger.info(
        f"{accelerator.num_processes} processes on {accelerator.device.type}, "
        f"{describe_sharding(accelerator)}"
    )
    datasets.utils.logging.disable_progress_bar()
    set_seed(args.seed)

    texts, text_name = load_texts(args)
    source = args.model_name_or_path or args.output_dir / "tokenizer"
    with accelerator.main_process_first():
        if not args.model_name_or_path and accelerator.is_main_process:
            train_tokenizer(texts["text"], args.vocab_size, args.max_seq_length, source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    blocks = cut_into_blocks(texts, tokenizer, args.max_seq_length).train_test_split(
        args.validation_fraction, seed=args.seed
    )

    if args.model_name_or_path:
        config = AutoConfig.from_pretrained(args.model_name_or_path)
        model = AutoModelForMaskedLM.from_pretrained(args.model_name_or_path, config=config)
    else:
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            intermediate_size=4 * args.hidden_size,
            max_position_embeddings=args.max_seq_length,
            # A few passes over little text: such a model underfits, and dropout would only slow it.
            # Narrow layers need larger initial weights than BERT's 0.02 to leave the loss of plain
            # word frequencies soon.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.06,
        )
        model = AutoModelForMaskedLM.from_config(config)

    # Ranks draw different masks in training, so that no two see the same ones twice.
    masks = {"tokenizer": tokenizer, "mlm_probability": args.mlm_probability}
    collator = PositionSeededCollator(
        **masks, seed=args.seed + 1_000_000_007 * (1 + accelerator.process_index)
    )
    eval_collator = PositionSeededCollator(**masks, seed=args.seed)
    train_loader = DataLoader(
        blocks["train"],
        args.per_device_batch_size,
        shuffle=True,
        collate_fn=collator,
        drop_last=True,
    )
    eval_loader = DataLoader(blocks["test"], args.per_device_batch_size, collate_fn=eval_collator)

    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.learning_rate)
    # A prepared scheduler advances once per process in each step, hence the factors.
    scheduler = get_scheduler(
        "linear",
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    card = model_card(text_name, args.model_name_or_path)
    run = Run(
        text_name,
        describe_sharding(accelerator),
        accelerator.num_processes,
        parameters,
        args.max_seq_length,
    )
    if args.resume_from_checkpoint:
        folder = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
        accelerator.load_state(str(folder))
        run.resume(folder)
        logger.info(f"resuming from {folder} after {run.completed_steps} steps")
    else:
        run.log(eval_loss=evaluate(model, eval_loader, eval_collator, accelerator))
        accelerator.log(run.log_history[-1])
        logger.info(f"evaluation loss before training: {run.log_history[0]['eval_loss']:.4f}")

    batch_examples = args.per_device_batch_size * accelerator.num_processes
    # The bar belongs to a terminal; elsewhere the losses are logged.
    hidden = None if accelerator.is_main_process else True
    bar = tqdm(
        total=args.max_train_steps, initial=run.completed_steps, disable=hidden, desc="training"
    )
    window: list[torch.Tensor] = []
    state_bytes = 0
    model.train()
    while run.completed_steps < args.max_train_steps:
        epoch, skipped = divmod(run.examples // batch_examples, len(train_loader))
        train_loader.set_epoch(epoch)
        collator.position = run.examples // batch_examples
        loader = accelerator.skip_first_batches(train_loader, skipped) if skipped else train_loader
        started = time.perf_counter()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                window.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    if run.completed_steps + 1 == args.max_train_steps:
                        state_bytes = tensor_bytes()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.examples += batch_examples
            if not accelerator.sync_gradients:
                continue

            run.completed_steps += 1
            bar.update()
            last = run.completed_steps == args.max_train_steps
            saving = run.completed_steps % args.checkpointing_steps == 0
            if last or saving or run.completed_steps % args.logging_steps == 0:
                mean = accelerator.reduce(torch.stack(window).mean(), "mean").item()
                window.clear()
                run.seconds += time.perf_counter() - started
                run.log(loss=mean)
                bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
                if bar.disable:
                    logger.info(f"step {run.completed_steps}: loss {mean:.4f}")
                if last:
                    break
                if saving:
                    save_checkpoint(
                        args.output_dir / f"step_{run.completed_steps}",
                        accelerator,
                        tokenizer,
                        card,
                        run,
                    )
                started = time.perf_counter()
        else:
            run.seconds += time.perf_counter() - started
    bar.close()

    run.log(eval_loss=evaluate(model, eval_loader, eval_collator, accelerator))
    accelerator.log(run.log_history[-1], step=run.completed_steps)
    run.memory = gather_object(
        [{"rank": accelerator.process_index, "state": state_bytes, "peak": peak_bytes()}]
    )
    final = args.output_dir / f"step_{run.completed_steps}"
    save_checkpoint(final, accelerator, tokenizer, card, run)
    before, after = (run.log_history[place]["eval_loss"] for place in (0, -1))
    logger.info(
        f"evaluation loss {before:.4f} -> {after:.4f}, {run.tokens_per_second:,.0f} tokens/s; "
        f"sharded state in {final}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
