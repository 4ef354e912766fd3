#!/usr/bin/env python
"""Run Accelerate's own DeepSpeed tests over hf-zero, on the CPU.

``python scripts/accelerate_tests.py --also FOLDER``: their source is that of the installed version,
fetched into a temporary folder, or with ``--source FOLDER`` a checkout. Small models of random
weights stand in for those that they load from the hub. FOLDER has packages that the tests import
(``pip install --target FOLDER parameterized``). Figures go to
``tests/integrations/accelerate/ACCELERATE_TESTS.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "integrations" / "accelerate" / "ACCELERATE_TESTS.md"
URL = "https://github.com/huggingface/accelerate"
REASONS = {
    "test_deepspeed_alst_ulysses_sp": "sequence parallelism is not built, and its model is missing",
    "test_basic_run": "it needs the package evaluate and a data set of the hub",
    "test_dataloader_with_batch_sampler": "prepare() needs no batch size, where Accelerate raises",
    "test_prepare_deepspeed_custom_optimizer_custom_scheduler": (
        "prepare() needs no batch size, where Accelerate raises"
    ),
    "test_clip_grad_norm_returns_deepspeed_grad_norm": (
        "clip_grad_norm_ returns a tensor, as without DeepSpeed: the host need not wait for it"
    ),
}
HEAD = """# Accelerate's own DeepSpeed tests over hf-zero

Written by `scripts/accelerate_tests.py`: `tests/deepspeed` of Accelerate {tests}, on the CPU (tests
that ask for an accelerator run, too), with Accelerate {accelerate}, Transformers {transformers} and
torch {torch}.

{passed} passed, {failed} failed, {skipped} skipped for what the machine lacks.

| test that fails | why |
| --- | --- |
"""
# Loaded by pytest, and by every process of a test.
PLUGIN = """import accelerate.test_utils.testing as testing
testing.require_non_cpu = testing.require_multi_device = lambda test: test
"""
REGISTER = "import hf_zero._autoload; hf_zero._autoload.register()\n"


def make_models(cache: Path) -> None:
    """Random weights under the names that the tests load, as the hub's cache has them."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        MobileViTConfig,
        MobileViTForImageClassification,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    experts = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    experts |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    experts |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    experts |= {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    neck = [8, 8, 12, 16, 20, 24, 80]
    vision = MobileViTConfig(hidden_sizes=[16, 24, 32], neck_hidden_sizes=neck)
    models = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2)),
        "sshleifer/tiny-gpt2": GPT2LMHeadModel(GPT2Config(n_embd=2, n_layer=2, n_head=2)),
        "hf-internal-testing/tiny-random-gpt2": GPT2LMHeadModel(
            GPT2Config(n_embd=2, n_layer=2, n_head=2)
        ),
        "apple/mobilevit-xx-small": MobileViTForImageClassification(vision),
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**experts)
        ),
    }
    for name, model in models.items():
        base = cache / f"models--{name.replace('/', '--')}"
        snapshot = base / "snapshots" / ("0" * 40)
        model.save_pretrained(snapshot)
        (base / "refs").mkdir()
        (base / "refs" / "main").write_text(snapshot.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, help="a checkout of Accelerate")
    parser.add_argument("--also", type=Path, help="a folder with packages that the tests import")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = given.source or folder / "accelerate"
        if given.source is None:
            tag = f"v{version('accelerate')}"
            clone = ["git", "clone", "-q", "--depth", "1", "--branch", tag, URL, str(source)]
            subprocess.run(clone, check=True)
        make_models(folder / "hub")
        (folder / "accelerate_plugin.py").write_text(PLUGIN)
        (folder / "sitecustomize.py").write_text(REGISTER)
        bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        path = [str(folder), str(ROOT), *([str(given.also)] if given.also else [])]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "accelerate_plugin"]
            + ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "deepspeed"],
            cwd=source / "tests",
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_CACHE": str(folder / "hub")}
            | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_ZERO_AUTOLOAD": "1"}
            | {"TOKENIZERS_PARALLELISM": "false", "PATH": bins},
            capture_output=True,
            text=True,
        )
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
    if not found:
        print(done.stdout[-2000:], done.stderr[-2000:])
        return 1
    written = re.search(r'version="([^"]+)"', (source / "setup.py").read_text())
    text = HEAD.format(
        **{"passed": 0, "failed": 0, "skipped": 0} | found,
        **{name: version(name) for name in ("accelerate", "transformers", "torch")},
        tests=written[1] if written else "an unknown version",
    )
    for test in re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE):
        why = next((why for start, why in REASONS.items() if test.startswith(start)), "")
        text += f"| {test} | {why or 'not known yet'} |\n"
    TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
