"""Runs training scripts of others over hf-zero, as their users would: unmodified, with tiny models,
offline, on two CPU ranks. The files are fetched by whoever runs this; none is a part of hf-zero.

    git clone --depth 1 https://github.com/deepspeedai/DeepSpeedExamples sources/DeepSpeedExamples
    python scripts/published_scripts.py sources            # all that lie there
    python scripts/published_scripts.py sources deepspeed-chat

A script that needs packages which are not installed is left out, and they are named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

MINUTES = 10


@dataclass(frozen=True)
class Case:
    """One run: ``command`` starts in ``folder`` of the checkout ``repository``. ``{work}`` in it is
    the folder of models and data (``data``: which), ``{stage}`` the stage of ZeRO. ``losses``
    matches the losses that the run prints. ``packages`` are requirements on what is installed,
    ``paths`` folders of the checkout to import from, ``variables`` those of the environment,
    ``files`` configurations that users write, by name in ``{work}``. ``stubs`` are modules of
    libraries that need a GPU, made empty, and ``starts`` statements that each process runs first;
    ``before`` is a case whose result it starts from, in ``{work}/before``.
    """

    name: str
    repository: str
    folder: str
    command: Sequence[str]
    losses: str
    packages: Sequence[str] = ()
    stubs: Sequence[str] = ()
    starts: Sequence[str] = ()
    paths: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    data: str = "language"
    before: str = ""
    stages: Sequence[int] = (2, 3)


LAUNCH = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
CHAT = (
    *("--data_path", "local/jsonfile", "--max_seq_len", "64", "--num_train_epochs", "1"),
    *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
    *("--gradient_accumulation_steps", "1", "--learning_rate", "1e-3", "--dtype", "bf16"),
    *("--zero_stage", "{stage}", "--deepspeed", "--output_dir", "{work}/out"),
)
CHAT_FOLDER = "applications/DeepSpeed-Chat"
NO_INIT = (  # where it was
    "import transformers.modeling_utils, transformers.initialization",
    "transformers.modeling_utils.no_init_weights = transformers.initialization.no_init_weights",
)
NO_DEVICE = (
    "import torch",
    "torch.cuda.set_device = lambda device: None",
    "torch.cuda.current_device = lambda: 'cpu'",
    "torch.cuda.synchronize = lambda: None",
)
NO_MEMORY_COUNTERS = (
    "import torch",
    "torch.cuda.current_device = lambda: 0",
    "torch.cuda.max_memory_reserved = torch.cuda.max_memory_allocated = lambda device=None: 0",
)
# A wheel of torchvision that was built for GPUs has no operators beside torch for the CPU.
NO_OPERATORS = (
    "import torch",
    "torch.library.define('torchvision::nms', '(Tensor a, Tensor b, float c) -> Tensor')",
    "torch.library.define('torchvision::qnms', '(Tensor a, Tensor b, float c) -> Tensor')",
)
BF16_WITHOUT_GPU = (
    "import transformers.training_args",
    "transformers.training_args.is_torch_bf16_gpu_available = lambda: True",
)
AXOLOTL = """base_model: {work}/llama
datasets: [{path: "{work}/instructions/local.json", ds_type: json, type: alpaca}]
dataset_prepared_path: {work}/prepared
val_set_size: 0
output_dir: {work}/out
sequence_len: 256
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 8
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.001
bf16: true
logging_steps: 1
attn_implementation: eager
special_tokens: {pad_token: <pad>}
deepspeed: deepspeed_configs/zero3_bf16.json
"""
TRAINER_LOSSES = r"'loss': '?([0-9.]+)"
SFT = (
    *("--learning_rate", "1e-3", "--max_steps", "8", "--per_device_train_batch_size", "4"),
    *("--bf16", "true", "--use_cpu", "true", "--logging_steps", "1", "--report_to", "none"),
)
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
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
        starts=NO_INIT,
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
        starts=NO_INIT,
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
        starts=NO_INIT,
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
        starts=NO_INIT,
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
        starts=NO_DEVICE,
    ),
    Case(
        "alignment-handbook sft",
        "alignment-handbook",
        "",
        (
            *ACCELERATE,
            *("--config_file", "recipes/accelerate_configs/zero3.yaml", "--num_processes", "2"),
            *("scripts/sft.py", "--model_name_or_path", "{work}/llama", "--eval_strategy", "no"),
            *("--dataset_name", "{work}/chat", "--output_dir", "{work}/out", *SFT),
        ),
        TRAINER_LOSSES,
        ("trl<1", "datasets"),
        paths=("src",),
        stages=(3,),
    ),
    Case(
        "llama-factory sft",
        "LLaMA-Factory",
        "",
        (
            *TORCHRUN,
            *("src/train.py", "--stage", "sft", "--do_train", "true", "--finetuning_type", "full"),
            *("--deepspeed", "examples/deepspeed/ds_z{stage}_config.json", "--template", "default"),
            *("--model_name_or_path", "{work}/llama", "--dataset_dir", "{work}/instructions"),
            *("--dataset", "local", "--cutoff_len", "64", "--output_dir", "{work}/out", *SFT),
            *("--disable_gradient_checkpointing", "true"),  # its own asks for transformers <= 5.8
        ),
        TRAINER_LOSSES,
        ("trl<1", "datasets", "omegaconf", "av", "einops", "sentencepiece", "torchdata"),
        paths=("src",),
        stubs=("torchaudio: load",),
        starts=NO_OPERATORS,
        variables={"DISABLE_VERSION_CHECK": "1"},
    ),
    Case(
        "axolotl sft",
        "axolotl",
        "",
        (*TORCHRUN, "-m", "axolotl.cli.train", "{work}/axolotl.yaml"),
        TRAINER_LOSSES,
        ("axolotl", "axolotl-contribs-lgpl", "axolotl-contribs-mit", "trl<1.9", "bitsandbytes"),
        starts=BF16_WITHOUT_GPU,
        paths=("src",),
        variables={"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "1"},
        files={"axolotl.yaml": AXOLOTL},
        stages=(3,),
    ),
    Case(
        "open-instruct sft",
        "open-instruct",
        "",
        (
            *(*ACCELERATE, "--mixed_precision", "bf16", "--num_processes", "2", "--use_deepspeed"),
            "--deepspeed_config_file",
            "configs/ds_configs/stage{stage}_no_offloading_accelerate.conf",
            *("open_instruct/finetune.py", "--model_name_or_path", "local/llama"),
            *("--tokenizer_name", "local/llama", "--chat_template_name", "tulu"),
            *("--dataset_mixer_list", "{work}/chat/train.jsonl", "1.0", "--max_seq_length", "128"),
            *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"),
            *("--learning_rate", "1e-3", "--max_train_steps", "8", "--logging_steps", "1"),
            *("--output_dir", "{work}/out", "--dataset_local_cache_dir", "{work}/prepared"),
            *("--push_to_hub", "false", "--try_launch_beaker_eval_jobs", "false"),
        ),
        r"Loss: ([0-9.]+)",
        ("ai2-olmo-core", "ray", "beaker-py", "litellm", "wandb", "nltk"),
        starts=NO_MEMORY_COUNTERS,
        paths=("",),
    ),
    Case(
        "diffusers text-to-image",
        "diffusers",
        "examples/text_to_image",
        (
            *ACCELERATE,
            *("--use_deepspeed", "--zero_stage", "{stage}", "--zero3_init_flag", "true"),
            *("--num_processes", "2", "--mixed_precision", "bf16", "train_text_to_image.py"),
            *("--pretrained_model_name_or_path", "{work}/diffusion", "--resolution", "16"),
            *("--train_data_dir", "{work}/data/images", "--train_batch_size", "4"),
            *("--max_train_steps", "8", "--learning_rate", "1e-3", "--lr_warmup_steps", "0"),
            *("--mixed_precision", "bf16", "--output_dir", "{work}/out"),
        ),
        r"step_loss=([0-9.]+)",
        ("diffusers>=0.40", "torchvision", "datasets", "tensorboard", "pillow", "ftfy"),
        starts=NO_OPERATORS,
        data="diffusion",
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


def missing(packages: Sequence[str]) -> list[str]:
    """Requirements that no installed distribution meets."""
    lacking = []
    for package in packages:
        wanted = Requirement(package)
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            lacking.append(package)
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            lacking.append(f"{package} (here: {found})")
    return lacking


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
    (work / "stubs").mkdir(exist_ok=True)
    stub(work / "stubs", case.stubs)
    (work / "stubs" / "sitecustomize.py").write_text("\n".join(case.starts))
    shutil.rmtree(work / "out", ignore_errors=True)
    for name, text in case.files.items():
        (work / name).write_text(text.replace("{work}", str(work)).replace("{stage}", str(stage)))
    command = [part.format(work=work, stage=stage) for part in case.command]
    paths = [*(str(copy / each) for each in case.paths), str(folder), str(work / "stubs")]
    paths.append(os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        **case.variables,
    }
    if not (work / "data").is_dir():
        models = [sys.executable, str(Path(__file__).with_name("published_models.py"))]
        subprocess.run([*models, case.data, str(work)], env=environment, check=True)
    shutil.copytree(work / "data", folder / "data", dirs_exist_ok=True)
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
                log = given.logs / f"{re.sub('[^a-z0-9]+', '-', case.name.lower())}-{stage}.log"
                found = run(case, stage, given.sources.resolve(), Path(folder), log)
            print(f"| {case.name} | {stage} | {found} |", flush=True)


if __name__ == "__main__":
    main()
