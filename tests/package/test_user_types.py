"""Type checking of a user's scripts: mypy and pyright report each mistake, and nothing else."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

import hf_zero
from tests.docs.documents import ROOT, blocks
from tests.helpers.commands import completed

SCRIPT = """
import pathlib
import typing

import torch
import transformers
import hf_zero
from hf_zero.config.sections import Bf16Section

model = torch.nn.Linear(2, 2)
config = hf_zero.ZeroConfig(
    3, bf16=True, offload_optimizer="cpu", gradient_clipping=1, kernels=["norms"],
    checkpoint={"keep": 2}, communication_data_type=torch.bfloat16, timeout=60,
)
config = hf_zero.ZeroConfig(stage=2, bf16=Bf16Section(enabled=True))
engine, optimizer, loader, schedule = hf_zero.initialize(model=model, config=config)
loss = engine(torch.ones(2)).sum()
engine.backward(loss)
engine.step()
path = engine.save_checkpoint("run", tag="best", client_state={"epoch": 1})
folder, state = engine.load_checkpoint("run")
engine.save_checkpoint(pathlib.Path("run")), engine.load_checkpoint(pathlib.Path("run"))
with hf_zero.GatheredParameters(model.parameters()):
    pass
hf_zero.convert_checkpoint("run", "model", dtype="bfloat16")
hf_zero.convert_checkpoint("run", "model", dtype=torch.float16, to="dcp")
hf_zero.TrainingArguments("out", zero_config="zero3")

hf_zero.initialise(model=model)  # mistake
hf_zero.initialize(model="gpt2")  # mistake
hf_zero.initialize(model=model, config=3)  # mistake
hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 3}})
hf_zero.initialize(model, "zero3")
hf_zero.initialize(model=model, config=pathlib.Path("zero3.json"))
hf_zero.ZeroConfig("three")  # mistake
hf_zero.ZeroConfig(config.stage)
hf_zero.ZeroConfig(3, gradient_cliping=1.0)  # mistake
hf_zero.ZeroConfig(3, train_batch_size="8")  # mistake
engine.bakward(loss)  # mistake
print(engine.global_step)  # mistake
engine.lr_schedule = model  # mistake
untyped: typing.Any = model
hf_zero.initialize(model=untyped, config="zero1")[0].bakward(loss)  # mistake
engine.global_steps.upper()  # mistake
print(engine.global_steps + 1, engine.world_size // 2)
engine.save_checkpoint("run", tag=3)  # mistake
hf_zero.convert_checkpoint("run", "model", dtype="int8")  # mistake
hf_zero.TrainingArguments("out", zero_conf="zero3")  # mistake
hf_zero.ZeroConfig(3, kernels=["norm"])  # mistake

hf_zero.estimate(model, 8, "fp32", stage=config.stage)
hf_zero.estimate(model, 8, precision=config.precision)
hf_zero.estimate(model, 8, precision="int8")  # mistake
hf_zero.simulate(model, 8, 3, "fp8")  # mistake
llama = hf_zero.from_pretrained(transformers.LlamaForCausalLM, "llama", "zero3", dtype="auto")
typing.assert_type(llama, transformers.LlamaForCausalLM)
read = hf_zero.from_pretrained(transformers.AutoModelForCausalLM, pathlib.Path("gpt2"), config)
typing.assert_type(read, transformers.PreTrainedModel)
hf_zero.from_pretrained(transformers.AutoModel, "gpt2")  # mistake

stages = hf_zero.PipelineModule([torch.nn.Linear(2, 2)], num_stages=2)
pipeline, _, _, _ = hf_zero.initialize(model=stages, config=config, training_data=[])
assert isinstance(pipeline, hf_zero.PipelineEngine)
pipeline.eval_batch([], reduce_output=None)
pipeline.train_batch().item()
pipeline.save_checkpoint("run")
pipeline.train_batches()  # mistake
"""

PIPELINE = """
from collections.abc import Iterator
from typing import Any

import hf_zero
from transformers import AutoModelForCausalLM

name, steps = "gpt2", 10
config: dict[str, Any] = {}
data: Iterator[dict[str, Any]] = iter([])
"""
"""The names that the script of the page about pipelines uses."""

# Strict for the user's files and for the names that hf_zero exports; for other packages the options
# of pyproject.toml, so that mypy takes what it has cached of them in its run for this repository.
SETTINGS = """
[mypy]
ignore_missing_imports = true
check_untyped_defs = true
no_implicit_optional = true
warn_unused_ignores = false

[mypy-train,pipeline]
disallow_any_generics = true
disallow_subclassing_any = true
disallow_untyped_calls = true
disallow_untyped_defs = true
disallow_incomplete_defs = true
disallow_untyped_decorators = true
warn_unused_ignores = true
warn_return_any = true
strict_equality = true
extra_checks = true

[mypy-hf_zero.*]
implicit_reexport = false

[mypy-hf_zero.ops.triton_kernels.*]
ignore_errors = true
"""
CHECKERS = {
    "mypy": ["mypy", "--no-error-summary", "--config-file", "mypy.ini", "--cache-dir", "cache"],
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


def test_a_checker_sees_each_public_name_where_it_is() -> None:
    tree = ast.parse(Path(hf_zero.__file__).read_text())
    guards = [node for node in tree.body if isinstance(node, ast.If)]
    (block,) = [node for node in guards if ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.asname: getattr(importlib.import_module(str(node.module)), alias.name)
        for node in imported
        for alias in node.names
        if node.module != "typing"
    }
    assert seen.keys() == hf_zero._EXPORTS.keys()
    assert all(value is getattr(hf_zero, name) for name, value in seen.items())
    assert (Path(hf_zero.__file__).parent / "py.typed").exists()


@pytest.mark.long
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_reports_each_mistake_and_nothing_else(checker: str, tmp_path: Path) -> None:
    """In a folder of the user's, where hf_zero is found as it is installed."""
    pytest.importorskip(checker, reason="of the extra `test`")
    (tmp_path / "train.py").write_text(SCRIPT)
    page = next(block.text for block in blocks("pipelines") if block.kind == "python")
    (tmp_path / "pipeline.py").write_text(PIPELINE + page)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    if checker == "mypy" and (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "cache")
    command = [sys.executable, "-m", *CHECKERS[checker], "train.py", "pipeline.py"]
    result = completed(command, timeout=600, cwd=tmp_path)
    reported = set(map(int, re.findall(r"train\.py:(\d+):.*\berror\b", result.stdout)))
    wanted = {at for at, line in enumerate(SCRIPT.split("\n"), 1) if line.endswith("# mistake")}
    assert reported == wanted, result.stdout
    assert "pipeline.py" not in result.stdout, result.stdout
    assert len(wanted) >= 15
