"""Runs training scripts of others over hf-zero, as their users would: unmodified, with tiny models,
offline, on two CPU ranks. The files are fetched by whoever runs this; none is a part of hf-zero.

    git clone --depth 1 https://github.com/deepspeedai/DeepSpeedExamples sources/DeepSpeedExamples
    python scripts/published_scripts.py sources            # all that lie there
    python scripts/published_scripts.py sources deepspeed-chat

A script that needs packages which are not installed is left out, and they are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORDS = [
    "the",
    "cat",
    "dog",
    "bird",
    "tree",
    "house",
    "river",
    "sees",
    "likes",
    "finds",
    "eats",
    "old",
    "small",
    "red",
    "green",
    "and",
    "of",
]
SAMPLES = 48
MINUTES = 10


@dataclass(frozen=True)
class Case:
    """One run: ``command`` starts in ``folder`` of the checkout ``repository``. ``{work}`` in it is
    the folder of models and data, ``{stage}`` the stage of ZeRO. ``losses`` matches the losses
    that the run prints. ``stubs`` are modules of GPU libraries, made empty;
    ``before`` is a case whose result it starts from, in ``{work}/before``;
    ``moved`` are names that the installed transformers has elsewhere: "where it was from where".
    """

    name: str
    repository: str
    folder: str
    command: Sequence[str]
    losses: str
    packages: Sequence[str] = ()
    stubs: Sequence[str] = ()
    moved: Sequence[str] = ()
    before: str = ""
    stages: Sequence[int] = (2, 3)


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(6, 14)))


def prepare(work: Path) -> None:
    """Write a tokenizer, tiny models and data into ``work``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GPT2Tokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        OPTModel,
    )

    draw = random.Random(0)
    texts = [sentence(draw) for _ in range(400)]
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|endoftext|>"]
    bare.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = GPT2Tokenizer(
        tokenizer_object=bare,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        unk_token=special[2],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    opt = OPTConfig(
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **ids,
    )
    llama = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **ids,
    )
    for name, model in (
        ("opt", OPTForCausalLM(opt)),
        ("opt-base", OPTModel(opt)),
        ("llama", LlamaForCausalLM(llama)),
    ):
        model.save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
        bare.model.save(str(work / name))  # vocab.json and merges.txt, which old scripts copy
    rows = [
        {
            "prompt": f"Human: {sentence(draw)} Assistant:",
            "chosen": f" {sentence(draw)}",
            "rejected": f" {sentence(draw)}",
            "input": sentence(draw),
            "output": sentence(draw),
        }
        for _ in range(SAMPLES)
    ]
    (work / "data").mkdir()
    for split in ("train", "eval"):
        (work / "data" / f"{split}.json").write_text(json.dumps(rows))
    (work / "data" / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))


LAUNCH = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
CHAT = (
    *("--data_path", "local/jsonfile", "--max_seq_len", "64", "--num_train_epochs", "1"),
    *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
    *("--gradient_accumulation_steps", "1", "--learning_rate", "1e-3", "--dtype", "bf16"),
    *("--zero_stage", "{stage}", "--deepspeed", "--output_dir", "{work}/out"),
)
CHAT_FOLDER = "applications/DeepSpeed-Chat"
NO_INIT = (
    "transformers.modeling_utils.no_init_weights from transformers.initialization.no_init_weights",
)
FLASH = (
    "flash_attn.utils.distributed: all_gather",
    "flash_attn.bert_padding: index_first_axis pad_input rearrange unpad_input",
)
CASES = (
    Case(
        "deepspeed-chat step 1",
        "DeepSpeedExamples",
        CHAT_FOLDER,
        (
            *LAUNCH,
            "training/step1_supervised_finetuning/main.py",
            *CHAT,
            *("--model_name_or_path", "{work}/opt", "--data_split", "1,0,0", "--print_loss"),
        ),
        r"loss[ =:]+(?:tensor\()?([0-9.]+)",
        ("datasets", "tensorboard"),
        moved=NO_INIT,
    ),
    Case(
        "deepspeed-chat step 1, LoRA",
        "DeepSpeedExamples",
        CHAT_FOLDER,
        (
            *LAUNCH,
            "training/step1_supervised_finetuning/main.py",
            *CHAT,
            *("--model_name_or_path", "{work}/opt", "--data_split", "1,0,0", "--print_loss"),
            *("--lora_dim", "4", "--lora_module_name", "decoder.layers.", "--only_optimize_lora"),
        ),
        r"loss[ =:]+(?:tensor\()?([0-9.]+)",
        ("datasets", "tensorboard"),
        moved=NO_INIT,
    ),
    Case(
        "deepspeed-chat step 2",
        "DeepSpeedExamples",
        CHAT_FOLDER,
        (
            *LAUNCH,
            "training/step2_reward_model_finetuning/main.py",
            *CHAT,
            *("--model_name_or_path", "{work}/opt", "--data_split", "0,1,0"),
            *("--num_padding_at_beginning", "0"),
        ),
        r"loss[ =:]+(?:tensor\()?([0-9.]+)",
        ("datasets", "tensorboard"),
        moved=NO_INIT,
    ),
    Case(
        "deepspeed-chat step 3",
        "DeepSpeedExamples",
        CHAT_FOLDER,
        (
            *LAUNCH,
            "training/step3_rlhf_finetuning/main.py",
            *("--data_path", "local/jsonfile", "--data_split", "0,0,1", "--deepspeed"),
            *("--actor_model_name_or_path", "{work}/opt", "--critic_model_name_or_path"),
            *("{work}/before", "--num_padding_at_beginning", "0", "--dtype", "bf16"),
            *("--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"),
            *("--generation_batches", "1", "--ppo_epochs", "1", "--max_answer_seq_len", "16"),
            *("--max_prompt_seq_len", "48", "--actor_learning_rate", "1e-3"),
            *("--critic_learning_rate", "1e-3", "--num_train_epochs", "1"),
            *("--actor_zero_stage", "{stage}", "--critic_zero_stage", "{stage}"),
            *("--output_dir", "{work}/out"),
        ),
        r"Actor Loss: (-?[0-9.]+)",
        ("datasets", "tensorboard"),
        moved=NO_INIT,
        before="deepspeed-chat step 2",
    ),
    Case(
        "openrlhf sft",
        "OpenRLHF",
        "",
        (
            *TORCHRUN,
            *("-m", "openrlhf.cli.train_sft"),
            *(
                "--model.model_name_or_path",
                "{work}/llama",
                "--data.dataset",
                "{work}/data/sft.jsonl",
            ),
            *("--data.input_key", "input", "--data.output_key", "output", "--data.max_len", "64"),
            *(
                "--train.batch_size",
                "8",
                "--train.micro_batch_size",
                "2",
                "--train.max_epochs",
                "2",
            ),
            *("--ds.zero_stage", "{stage}", "--ds.attn_implementation", "eager"),
            *("--adam.lr", "1e-3", "--ckpt.output_dir", "{work}/out"),
        ),
        r"gpt_loss=([0-9.]+)",
        ("datasets", "torchdata", "pylatexenc", "sympy", "peft", "aiohttp"),
        stubs=FLASH,
    ),
)


def stub(folder: Path, modules: Sequence[str]) -> None:
    """Make modules of libraries that need a GPU, "module: names"; the names raise when called."""
    for each in modules:
        module, _, names = each.partition(":")
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:length])
            place.mkdir(parents=True, exist_ok=True)
            (place / "__init__.py").touch()
        lines = [
            f"def {name}(*args, **kwargs): raise NotImplementedError" for name in names.split()
        ]
        (place / "__init__.py").write_text("\n".join(lines))


def put_back(folder: Path, names: Sequence[str]) -> None:
    """Have each process find names of transformers where they were."""
    lines = ["from importlib import import_module"]
    for each in names:
        old, _, new = each.partition(" from ")
        (at, name), (there, same) = old.rsplit(".", 1), new.rsplit(".", 1)
        lines.append(
            f"setattr(import_module({at!r}), {name!r}, getattr(import_module({there!r}), {same!r}))"
        )
    if names:
        (folder / "sitecustomize.py").write_text("\n".join(lines))


def missing(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def run(case: Case, stage: int, sources: Path, work: Path, log: Path) -> str:
    """Run ``case`` at ``stage`` on a copy of its checkout; what became of it, in words."""
    if case.before:
        first = next(each for each in CASES if each.name == case.before)
        told = run(first, stage, sources, work, log.with_suffix(".before.log"))
        if not (work / "out").is_dir():
            return f"{first.name}: {told}"
        shutil.rmtree(work / "before", ignore_errors=True)
        (work / "out").rename(work / "before")
    copy = work / "checkout"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sources / case.repository, copy, ignore=shutil.ignore_patterns(".git"))
    folder = copy / case.folder
    shutil.copytree(work / "data", folder / "data", dirs_exist_ok=True)
    (work / "stubs").mkdir(exist_ok=True)
    stub(work / "stubs", case.stubs)
    put_back(work / "stubs", case.moved)
    shutil.rmtree(work / "out", ignore_errors=True)
    command = [part.format(work=work, stage=stage) for part in case.command]
    paths = [str(folder), str(work / "stubs"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=60 * MINUTES,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not over after {MINUTES} minutes"
    text = log.read_text(errors="replace")
    if code:
        said = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", text, re.M)
        return f"exit {code}: {said[0][:160] if said else 'see its log'}"
    losses = [float(each) for each in re.findall(case.losses, text)]
    shown = f"losses {losses[0]:.3f} … {losses[-1]:.3f}" if losses else "no loss printed"
    weights = [
        path for path in (work / "out").rglob("*") if path.suffix in (".bin", ".safetensors")
    ]
    return f"ran; {shown}; {len(weights)} files of weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", type=Path, help="folder of the checkouts")
    parser.add_argument("names", nargs="*", help="which to run, by the beginning of their names")
    parser.add_argument("--stages", type=int, nargs="*")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()) / "published_scripts"
    )
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    print("| script | stage | |\n| --- | --- | --- |")
    for case in CASES:
        if given.names and not any(case.name.startswith(name) for name in given.names):
            continue
        if not (given.sources / case.repository).is_dir():
            print(f"| {case.name} | | left out: no checkout of {case.repository} |", flush=True)
            continue
        lacking = missing(case.packages)
        if lacking:
            print(f"| {case.name} | | left out: needs {', '.join(lacking)} |", flush=True)
            continue
        for stage in given.stages or case.stages:
            with tempfile.TemporaryDirectory() as folder:
                prepare(Path(folder))
                log = given.logs / f"{re.sub('[^a-z0-9]+', '-', case.name.lower())}-{stage}.log"
                found = run(case, stage, given.sources.resolve(), Path(folder), log)
            print(f"| {case.name} | {stage} | {found} |", flush=True)


if __name__ == "__main__":
    main()
