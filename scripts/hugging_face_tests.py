#!/usr/bin/env python
"""Run Accelerate's or Transformers' own DeepSpeed tests over hf-zero, on the CPU.

``python scripts/hugging_face_tests.py accelerate --also FOLDER``: the source of the installed
version is fetched into a temporary folder (of Transformers only what the tests need), or with
``--source FOLDER`` a checkout is taken. Small models of random weights stand in for those that the
tests load from the hub. FOLDER has packages that the tests import (``pip install --target FOLDER
parameterized``). Tests that ask for accelerators run, on two ranks. Figures go to
``tests/integrations/LIBRARY/LIBRARY_TESTS.md``; a test whose failure has no reason in REASONS is
shown with what was said.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from hugging_face_models import make_models, make_questions

ROOT = Path(__file__).resolve().parents[1]
OWN_FILES = "it reads files of DeepSpeed's checkpoints by their names; hf-zero's have a manifest"
NO_BATCH_SIZE = "prepare() needs no batch size, where Accelerate raises"
HUB = "it needs the package evaluate and a data set of the hub"
LOG = 'it reads DeepSpeed\'s own line of the log, "DeepSpeed info"'
DTYPE = (
    "zero.Init keeps the dtype that a model is loaded in until an engine takes it: its fp32 master "
    "weights are not rounded to 16 bits first"
)
REASONS = {
    "accelerate": {
        "test_basic_run": HUB,
        "test_checkpointing": HUB,
        "test_lr_scheduler": HUB,
        "test_performance": HUB,
        "test_train_multiple_models": HUB,
        "test_save_checkpoints": (
            "get_state_dict gathers the weights, also with "
            "stage3_gather_16bit_weights_on_model_save: false, where Accelerate raises"
        ),
        "test_zero3_integration": "accelerate launch starts no ranks where there is no GPU",
        "test_dataloader_with_batch_sampler": NO_BATCH_SIZE,
        "test_prepare_deepspeed_custom_optimizer_custom_scheduler": NO_BATCH_SIZE,
        "test_clip_grad_norm_returns_deepspeed_grad_norm": (
            "clip_grad_norm_ returns a tensor, as without DeepSpeed: the host need not wait for it"
        ),
        "test_deepspeed_alst_ulysses_sp": "its model of the hub is missing",
    },
    "transformers": {
        "test_basic_training": LOG,
        "test_optimizer_with_cpu_offload": LOG,
        "test_stage3_nvme_offload": LOG,
        "test_hyperparameter_search": LOG,
        "test_save_checkpoints": OWN_FILES,
        "test_init_zero3_fp16": DTYPE,
        "test_init_zero3_bf16": DTYPE,
        "test_arange_bf16": DTYPE,
        "test_mixed_precision_model_and_optimizer_dtypes": (
            "it reads buffers of DeepSpeed's optimizers; engine.optimizer is the script's own"
        ),
        "test_ds_config_auto_vs_missing_fields": (
            "keys that the configuration leaves out are filled from TrainingArguments, too: else "
            "gradient_clipping would silence max_grad_norm"
        ),
        "test_torchrun_accelerate_deepspeed": "it asks for the names of CUDA devices",
    },
}
# Loaded by pytest, and by every process of a test.
PLUGINS = {
    "accelerate": """import accelerate.test_utils.testing as testing
testing.require_non_cpu = testing.require_multi_device = lambda test: test
""",
    "transformers": """import transformers.testing_utils as testing
testing.require_torch_accelerator = testing.require_torch_multi_accelerator = lambda test: test
testing.backend_device_count = lambda device: 2
""",
}
# Loaded at the start of every process; Transformers refuses bf16 where there is no accelerator.
REGISTER = "import hf_zero._autoload; hf_zero._autoload.register()\n"
STARTS = {
    "accelerate": REGISTER,
    "transformers": f"""{REGISTER}import transformers.training_args as arguments
arguments.is_torch_bf16_gpu_available = lambda: True
""",
}
HEAD = """# {Whose} own DeepSpeed tests over hf-zero

Written by `scripts/hugging_face_tests.py`: `{tests}`
of {Name} {of}, on the CPU (tests that ask for accelerators run, too), with
Accelerate {accelerate}, Transformers {transformers} and torch {torch}.

{passed} passed, {failed} failed, {skipped} skipped for what the machine lacks{left}.

| test that fails | how often | why |
| --- | --- | --- |
"""


# A test by its name, or a file that cannot be imported by its path, and what was said.
FAILED = r"^(?:FAILED|ERROR) (?:\S+::)?([\w./]+)(?:\[\S*\])?(?: - (.*))?"


@dataclass(frozen=True)
class Library:
    """A library, the path of its DeepSpeed tests, and the tests that are left out."""

    name: str
    tests: str
    left_out: str = ""
    why: str = ""

    @property
    def table(self) -> Path:
        folder = ROOT / "tests" / "integrations" / self.name
        return folder / f"{self.name.upper()}_TESTS.md"

    def fetch(self, folder: Path) -> Path:
        source = folder / self.name
        url = f"https://github.com/huggingface/{self.name}"
        tag = f"v{version(self.name)}"
        clone = ["git", "clone", "-q", "--depth", "1", "--branch", tag]
        clone += ["--filter=blob:none", "--sparse", url, str(source)]
        subprocess.run(clone, check=True)
        folders = ["tests/trainer", "tests/fixtures", "tests/deepspeed", "src", "examples"]
        subprocess.run(["git", "-C", str(source), "sparse-checkout", "set", *folders], check=True)
        return source


LIBRARIES = {
    each.name: each
    for each in (
        Library("accelerate", "tests/deepspeed"),
        Library(
            "transformers",
            "tests/trainer/distributed/test_trainer_distributed_deepspeed.py",
            "ModelZoo",
            "the model zoo, which needs 28 models of the hub and the examples, was left out",
        ),
    )
}


def run(library: Library, source: Path, folder: Path, also: Path | None, only: str) -> str:
    """Run the tests; return pytest's output."""
    (folder / "hugging_face_plugin.py").write_text(PLUGINS[library.name])
    (folder / "sitecustomize.py").write_text(STARTS[library.name])
    bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    path = [str(folder), str(ROOT), *([str(also)] if also else []), str(source)]
    chosen = " and ".join(
        [*([f"({only})"] if only else []), *([f"not {library.left_out}"] * bool(library.left_out))]
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "hugging_face_plugin", "--tb=line", "-rfE"]
        + ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "-k", chosen, library.tests],
        cwd=source,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_CACHE": str(folder / "hub")}
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_ZERO_AUTOLOAD": "1"}
        | {"TOKENIZERS_PARALLELISM": "false", "PATH": bins, "RUN_SLOW": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout


def table(library: Library, of: str, said: str) -> str:
    """The figures of a run; parametrizations of a test are one row. A test whose fixture fails, and
    a file that cannot be imported, have failed.
    """
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", said)
    found = {word: int(n) for n, word in counts}
    found["failed"] = found.get("failed", 0) + found.pop("error", 0)
    text = HEAD.format(
        **{"passed": 0, "skipped": 0} | found,
        **{name: version(name) for name in ("accelerate", "transformers", "torch")},
        Name=library.name.capitalize(),
        Whose="Transformers'" if library.name == "transformers" else "Accelerate's",
        tests=library.tests,
        of=of,
        left=f"; {library.why}" if library.why else "",
    )
    rows: Counter[tuple[str, str]] = Counter()
    for test, reason in re.findall(FAILED, said, re.MULTILINE):
        reasons = REASONS[library.name]
        start = next((start for start in reasons if test.startswith(start)), "")
        rows[start or test, reasons.get(start) or f"not known yet: {reason[:120]}"] += 1
    for (test, why), often in sorted(rows.items()):
        text += f"| {test} | {often} | {why} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--source", type=_folder, help="a checkout of the library")
    parser.add_argument("--of", help="its version, for the table")
    parser.add_argument("--also", type=_folder, help="with packages that the tests import")
    parser.add_argument(
        "-k", dest="only", default="", help="pytest's choice of tests; prints the table of them"
    )
    given = parser.parse_args()
    library = LIBRARIES[given.library]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = given.source or library.fetch(folder)
        make_models(folder / "hub")
        if given.source is None:  # nothing is written into a checkout
            make_questions(source / "tests/fixtures/tests_samples/SQUAD/sample.json")
        said = run(library, source, folder, given.also, given.only)
    if not re.search(r"\d+ (passed|failed)", said):
        print(said[-2000:])
        return 1
    text = table(library, given.of or version(library.name), said)
    if given.only:  # the file is about all tests
        print(text)
    else:
        library.table.write_text(text)
    print(said[-300:])
    return 0


def _folder(text: str) -> Path:
    """Return a path that processes with another working directory find, too."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text).resolve()


if __name__ == "__main__":
    sys.exit(main())
