"""Parts of the recipes that start from a model and a data set of the hub: data sets, a small model
and text for a run without the hub, and the curve, speed and memory of a run of a Trainer.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.trainer_utils import get_last_checkpoint

sys.path.append(str(Path(__file__).resolve().parent))
from plot import line_plot

# TRL 1.16 uses names that Transformers 5.23 deprecates, in each evaluation on each rank
warnings.filterwarnings(
    "ignore", r"`\w*gradient_checkpointing\w*` is deprecated", FutureWarning, "transformers"
)

Rows = list[dict[str, Any]]
HEADINGS = (
    "machine", "ranks", "parameters", "trained", "steps", "result", "samples/s",
    "tensors between steps", "peak of the process",
)  # fmt: skip
# Arguments of a Trainer that suit a run of seconds on CPUs; --max_steps and the others replace them
DEFAULTS: dict[str, Any] = {
    "max_steps": 60,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "logging_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 20,
    "eval_on_start": True,
    "save_strategy": "no",
    "save_steps": 20,  # with --save_strategy steps
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 42,
    "use_cpu": not torch.accelerator.is_available(),
    "bf16": torch.accelerator.is_available(),
}


def parse_arguments(parser: HfArgumentParser) -> tuple[Any, ...]:
    """The dataclasses of ``parser``, from the command line and the file of TRL's ``--config``; the
    last one has the arguments of the Trainer. Exit with one line if an argument is unknown (the
    parsers raise a ValueError), or if there is no checkpoint to resume from.
    """
    parse = getattr(parser, "parse_args_and_config", parser.parse_args_into_dataclasses)
    *found, unknown = parse(return_remaining_strings=True)
    if unknown:
        words = " ".join(unknown)
        parser.exit(
            2, f"{parser.prog}: unrecognized arguments: {words}; --help lists all of them\n"
        )
    args = found[-1]
    if args.resume_from_checkpoint:
        found_at = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
        steps = json.loads(Path(found_at, "trainer_state.json").read_text())["global_step"]
        if 0 < args.max_steps <= steps:
            raise SystemExit(
                f"{found_at} is of step {steps}, the last one; raise --max_steps to train on"
            )
        args.resume_from_checkpoint = found_at
        args.eval_on_start = False  # the interrupted run has these figures
    return tuple(found)


def find_checkpoint(wanted: str, output_dir: str) -> str:
    """The checkpoint ``wanted``, or, for `latest`, the newest one in ``output_dir``."""
    if wanted == "latest":
        newest = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if newest is None:
            raise SystemExit(
                f"no checkpoint in {output_dir}; run once without --resume_from_checkpoint, and "
                "with --save_strategy steps unless the recipe saves by itself"
            )
        return newest
    if not Path(wanted, "trainer_state.json").is_file():
        raise SystemExit(
            f"{wanted} holds no trainer_state.json: not a checkpoint of the Trainer; name another "
            "one, or `latest`"
        )
    return wanted


def load_data(
    name: str | None,
    config: str | None,
    make: Callable[[], Rows | datasets.Dataset],
    splits: Sequence[str] = ("train", "test"),
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The data sets to train on and to evaluate on: ``splits`` of ``name`` on the hub, else nine
    tenths and one tenth of the rows of ``make``. Where the hub has no second split, 1 % of the
    first.
    """
    if not name:
        made = make()
        whole = datasets.Dataset.from_list(made) if isinstance(made, list) else made
        both = whole.train_test_split(0.1, seed=0)
        return both["train"], both["test"]
    try:
        found = datasets.load_dataset(name, config)
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        remedy = "correct the name, or leave --dataset_name out to train on generated rows"
        raise SystemExit(f"{name} cannot be loaded ({error}); {remedy}") from None
    if splits[1] not in found:
        found = found[splits[0]].train_test_split(0.01, seed=0)
        return found["train"], found["test"]
    return found[splits[0]], found[splits[1]]


def byte_tokenizer(end: bool = False) -> PreTrainedTokenizerFast:
    """A token a byte; ``end``: with </s> after each text."""
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bare = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    if end:
        bare.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="</s>")


def options_of(names: Any, args: Any) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` in ``names``, TRL's ModelConfig, and ``args``, those of a
    trainer. Exit with one line if the built-in model would have to take one.
    """
    options = {
        "model_revision": names.model_revision if names.model_revision != "main" else None,
        "dtype": names.dtype,
        "attn_implementation": names.attn_implementation,
        "load_in_4bit": names.load_in_4bit,
        "load_in_8bit": names.load_in_8bit,
    }
    options = {name: value for name, value in options.items() if value}
    if options and not names.model_name_or_path:
        words = ", ".join(f"--{name}" for name in options)
        raise SystemExit(
            f"{words}: options of a loaded model, not of the built-in one; name a model with "
            "--model_name_or_path, or leave them out"
        )
    if "model_revision" in options:
        options["revision"] = options.pop("model_revision")
    if args.trust_remote_code:
        options["trust_remote_code"] = True
    if options.pop("load_in_4bit", False):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=names.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=names.use_bnb_nested_quant,
            bnb_4bit_compute_dtype=names.dtype if names.dtype not in (None, "auto") else "bfloat16",
            bnb_4bit_quant_storage=names.bnb_4bit_quant_storage,
        )
    elif options.pop("load_in_8bit", False):
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return options


def load_causal(name: str | None, **options: Any) -> tuple[Any, Any]:
    """A model and a tokenizer by their name on the hub, or a Llama of 64 x 2 with a token a byte,
    from scratch. ``options`` are keywords of ``from_pretrained``.
    """
    if name:
        both = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        model = AutoModelForCausalLM.from_pretrained(name, **options)
        return model, AutoTokenizer.from_pretrained(name, **both)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,  # a frozen head of the usual 0.02 would say nothing
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config), tokenizer


def paragraphs() -> list[tuple[str, str]]:
    """Names of topics of Python's language reference, each with a paragraph of prose of it."""
    found = []
    for name, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            if paragraph[:1].isalpha() and not re.search(r"\*\*\*|===|::=", paragraph):
                found.append((name, " ".join(paragraph.split())))
    return found


def tensor_bytes() -> int:
    """Bytes of all tensors alive in this process, storages counted once: between two steps, the
    state of training.
    """
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if (
                issubclass(type(thing), torch.Tensor)
                and thing.layout == torch.strided
                and not thing.is_meta
            ):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes() -> int:
    """The most memory this process has held: on its GPU, else resident in RAM, libraries
    included.
    """
    if torch.accelerator.is_available() and torch.get_device_module().is_initialized():
        return torch.get_device_module().max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


@dataclass
class Start:
    """The arguments of scripts whose library has none for a model and a data set."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "a model on the hub; without it, a small one from scratch"}
    )
    dataset_name: str | None = field(
        default=None, metadata={"help": "a data set on the hub; without it, generated rows"}
    )
    dataset_config: str | None = None


class Measured(TrainerCallback):
    """Writes the curves of a run as a plot, and its speed and memory as a row, beside its model.

    ``curves``: columns of the Trainer's log by the name that the plot gives them; the first one's
    ends are the row's result, which is None for a run that has not logged it.
    """

    def __init__(self, recipe: str, curves: dict[str, str], y: str = "loss") -> None:
        self.recipe, self.curves, self.y = recipe, curves, y
        self.state_bytes = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Count before the engine flattens what it shards."""
        model = given["model"]
        sizes = [
            (getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in model.parameters()
        ]
        self.parameters = sum(size for size, _ in sizes)
        self.trained = sum(size for size, trains in sizes if trains)
        self.first_step = state.global_step  # of a resumed run, after those of the former one

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == state.max_steps:
            self.state_bytes = tensor_bytes()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if not state.is_world_process_zero:
            return
        history = state.log_history
        runtime = next(entry["train_runtime"] for entry in history if "train_runtime" in entry)
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        points = {
            name: [(entry["step"], entry[column]) for entry in history if column in entry]
            for column, name in self.curves.items()
        }
        name, curve = next(iter(points.items()))
        # no curve, or only the point before the first step, without --eval_strategy
        result = [name, curve[0][1], curve[-1][1]] if len(curve) > 1 else None
        report(
            Path(args.output_dir),
            {
                "recipe": self.recipe,
                "ranks": args.world_size,
                "parameters": self.parameters,
                "trained": self.trained,
                "steps": state.global_step,
                "result": result,
                "samples_per_second": (state.global_step - self.first_step) * samples / runtime,
                "seconds": runtime,
                "state_bytes": self.state_bytes,
            },
            points,
            self.y,
        )


def report(
    folder: Path, row: dict[str, Any], points: dict[str, list[tuple[float, float]]], y: str
) -> None:
    """Write ``row`` with the machine and its peak, and the plot of ``points`` over steps."""
    folder.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    cores = f"{os.cpu_count()} CPU cores at load {os.getloadavg()[0]:.0f}"
    machine = torch.cuda.get_device_name() if cuda else cores
    row = {**row, "machine": machine, "peak_bytes": peak_bytes()}
    (folder / "row.json").write_text(json.dumps(row) + "\n")
    line_plot(folder / "curve.svg", points, row["recipe"], "steps", y)
    print(card_line(HEADINGS), card_line(["---"] * len(HEADINGS)), card_line(cells(row)), sep="\n")


def card_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def cells(row: dict[str, Any]) -> list[str]:
    """The row as the card shows it."""
    result = "{} {:.3f} → {:.3f}".format(*row["result"]) if row["result"] else "—"
    return [
        row["machine"],
        str(row["ranks"]),
        f"{row['parameters']:,}",
        f"{row['trained']:,}",
        str(row["steps"]),
        result,
        f"{row['samples_per_second']:.1f}",
        f"{row['state_bytes'] / 2**20:.1f} MiB",
        f"{row['peak_bytes'] / 2**20:.0f} MiB",
    ]
