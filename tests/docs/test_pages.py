"""The documentation: the code, commands, keys and names in it exist; headings, links and lengths of
its pages; what it must list completely.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint.state_dict as torch_state_dict
import typer.main
import yaml

import hf_zero
from hf_zero.cli.app import app
from hf_zero.cli.doc_search import sections
from hf_zero.config import ZeroConfig, variables
from hf_zero.config.accelerate_yaml import ACCELERATE_KEYS, TRANSLATED
from hf_zero.config.keys import ALIASES, KEYS, SECTIONS
from hf_zero.config.migrating import migrate
from hf_zero.config.optimizers import OPTIMIZERS
from hf_zero.config.training_file import KEYS as TRAINING_KEYS
from hf_zero.config.training_file import read_training_file
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.engine import Engine
from hf_zero.integrations import finder
from hf_zero.ops import files
from hf_zero.parallel.pipeline.engine import PipelineTraining
from tests.docs.documents import (
    ALL,
    DOCUMENTS,
    INLINE,
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    headings,
    inline_code,
    links,
    prose,
)

KINDS = {"python", "json", "yaml", "sh", "bash", "text"}
GENERATED = {"keys", "api", "combinations"}

COMMANDS: Any = typer.main.get_command(app)


@pytest.mark.parametrize("page", DOCUMENTS)
def test_a_page(page: str, tmp_path: Path) -> None:
    """Its shape, links, blocks and commands; the keys, names and figures in it."""
    if page in PAGES:
        check_shape(page)
        check_figures(page)
    check_links(page)
    assert DOCUMENTS[page].read_text().count("\n```") % 2 == 0
    for block in blocks(page):
        try:
            check_block(block, tmp_path)
        except (Exception, AssertionError) as error:
            raise AssertionError(f"the block in line {block.line}: {error}") from error
    for code in inline_code(page):
        if code.startswith("hf-zero ") and "COMMAND" not in code and code[8] != "[":
            check_command(code.replace("…", ""))
    assert unknown_names(page) == set()


def check_shape(page: str) -> None:
    text = PAGES[page].read_text()
    lines = text.splitlines()
    assert [level for level, _ in headings(page)].count(1) == 1 and lines[0].startswith("# ")
    assert page in GENERATED or 40 <= len(lines) <= 200
    long = [n for n, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
    assert long == [], "lines of more than 120 characters"
    assert text.endswith("\n") and not text.endswith("\n\n")
    found = anchors(page)
    assert sorted(found) == sorted(set(found)), "anchors are unique"


def test_the_index_names_every_page_with_words_about_it() -> None:
    assert len(prose("index").split()) > 200 and len(ALL) > 60
    assert {link.partition(".md")[0] for link in links("index")} == {*PAGES} - {"index"}


def check_links(page: str) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (DOCUMENTS[page].parent / path) if path else DOCUMENTS[page]
        assert target.exists(), link
        if page in PAGES:  # the site has these files alone
            assert target.is_relative_to(PAGES["index"].parent), f"{link} is not in the site"
        if anchor and target.stem in PAGES:
            assert anchor in anchors(target.stem), link


def check_block(block: Block, folder: Path) -> None:
    assert block.kind in KINDS, block.kind
    if block.kind == "json":
        ZeroConfig.from_dict(json.loads(block.text), allow_auto=True)
    elif block.kind == "yaml":
        check_yaml(block, folder)
    elif block.kind == "python":
        check_python(block)
    else:
        check_commands(block)


def check_yaml(block: Block, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(block.text))
    if "task" in documents[0]:
        (tmp_path / "train.yaml").write_text(block.text)
        with chdir(tmp_path):  # where the tutorials that have it make these
            for name, made in (("model", Path.mkdir), ("dataset", Path.touch)):
                if re.search(r"^\./|\.jsonl$", documents[0][name]):
                    made(Path(documents[0][name]))
            read_training_file("train.yaml")
        return
    if "distributed_type" not in documents[0]:
        kinds = ["kind" in document for document in documents]
        assert all(kinds), "neither Accelerate's nor Kubernetes'"
        return
    file = tmp_path / "given.yaml"
    file.write_text(block.text)
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    for name in re.findall(r"deepspeed_config_file: (\S+)", block.text):
        file.write_text(file.read_text().replace(name, str(tmp_path / name)))
    if documents[0]["distributed_type"] == "DEEPSPEED":
        ZeroConfig.from_file(file, allow_auto=True)
    else:
        assert migrate(documents[0]).runs


# Names that a fragment may use without saying where they come from.
GIVEN: dict[str, Any] = {
    name: importlib.import_module(name)
    for name in ("hf_zero", "torch", "transformers", "lightning", "signal")
} | {"engine": Engine}
GIVEN |= dict.fromkeys(
    (
        "accelerator", "args", "batch", "batches", "client", "completions", "config", "data",
        "dataset", "loader", "model", "name", "optimizer", "parameter", "prompts", "steps",
        "trainer", "AutoModelForCausalLM",
    )
)  # fmt: skip


class Names(ast.NodeVisitor):
    """Names that a block binds and reads, imported ones with their values, and its calls."""

    def __init__(self, text: str) -> None:
        self.bound: set[str] = set()
        self.read: set[str] = set()
        self.values: dict[str, Any] = {}
        self.chains: list[ast.Attribute] = []
        self.calls: list[ast.Call] = []
        self.visit(ast.parse(text))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.bound.add(node.name)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            module = importlib.import_module(each.name)
            top = each.name.partition(".")[0]
            self.values[each.asname or top] = (
                module if each.asname else importlib.import_module(top)
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(node.module or "")
        for each in node.names:
            self.values[each.asname or each.name] = getattr(module, each.name)

    def visit_Name(self, node: ast.Name) -> None:
        (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.chains.append(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append(node)
        self.generic_visit(node)


ON_AN_ENGINE = set(re.findall(r"self\.([a-z]\w*)\b.*?=", inspect.getsource(Engine)))
"""Attributes that an engine sets on itself."""
for base in Engine.__mro__:
    if base.__module__.startswith("hf_zero"):
        ON_AN_ENGINE |= set(re.findall(r"self\.([a-z]\w*)\b(?=[^=\n]*=)", inspect.getsource(base)))


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """The object that a dotted name leads to, None where that is not known; AttributeError."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = value_of(node.value, known)
    if owner is Engine and not hasattr(Engine, node.attr):
        return None if node.attr in ON_AN_ENGINE else getattr(PipelineTraining, node.attr)
    if owner is None or not (inspect.ismodule(owner) or inspect.isclass(owner)):
        return None
    return getattr(owner, node.attr)


def check_python(block: Block) -> None:
    found = Names(block.text)
    known = {**({} if block.title else GIVEN), **found.values}
    rebound = {*found.bound} - {"engine", "model"}
    known = {name: value for name, value in known.items() if name not in rebound}
    unknown = found.read - found.bound - {*known} - {*dir(builtins)} - ({*GIVEN} - {*known})
    if block.title:
        unknown = found.read - found.bound - {*known} - {*dir(builtins)}
        if {"hf_zero"} <= {*known}:
            known["engine"] = Engine
    assert unknown == set()
    for chain in found.chains:
        value_of(chain, known)
    for call in found.calls:
        check_call(call, known)


def check_call(call: ast.Call, known: dict[str, Any]) -> None:
    """Bind the arguments of a call to the signature of what it calls, where that is ours."""
    called = value_of(call.func, known)
    if not callable(called) or not getattr(called, "__module__", "").startswith("hf_zero"):
        return
    method = isinstance(call.func, ast.Attribute) and value_of(call.func.value, known) is Engine
    whole = not any(keyword.arg is None for keyword in call.keywords)
    whole = whole and not any(
        isinstance(each, (ast.Starred, ast.Constant)) and getattr(each, "value", None) is ...
        for each in call.args
    )
    signature = inspect.signature(called)
    bind = signature.bind if whole else signature.bind_partial
    given = [None] * (len(call.args) + method)
    bind(*given, **{keyword.arg: None for keyword in call.keywords if keyword.arg})


def commands_in(text: str) -> Iterator[str]:
    """Command lines of a block, joined where they go on in the next line."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if line and not line.startswith("#"):
            yield line


def check_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "hf-zero":
        check_ours(words[1:])
    elif words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        launch_command_parser().parse_args(words[2:])
    elif words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words[1:])
        if given.training_script == "hf-zero":
            check_ours(given.training_script_args)
    elif words[:2] == ["bash", "scripts/quickstart"] or words[0] == "bash":
        assert (ROOT / words[1]).exists(), line


def check_ours(words: list[str]) -> None:
    command = COMMANDS
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    options |= {"--help", "-h", "--install-completion", "--show-completion"}
    flags = {
        name
        for each in command.params
        if getattr(each, "is_flag", False)
        for name in (*each.opts, *each.secondary_opts)
    }
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--" or (command.name == "launch" and not word.startswith("-")):
            return  # the rest is the script's
        if re.match(r"--?[a-z]", word):
            assert word in options, f"{command.name} has no option {word}"
            place += 0 if word in flags else 1
        place += 1


HEADS = ("hf-zero ", "torchrun ", "accelerate launch ", "bash scripts/")


def check_commands(block: Block) -> None:
    lines = list(commands_in(block.text))
    for line in lines:
        if line.startswith(HEADS):
            check_command(line)
        elif block.kind == "sh":
            assert line.startswith(("python ", "python -m ", "pip install ", "accelerate ")), line


LEAVES = {path.rpartition(".")[2] for path in (*KEYS, *ALIASES, *SECTIONS, *ACCELERATE_KEYS)}
MEMBERS = {name for key in KEYS.values() for name in key.members or ()}
"""Keys inside sections that are read whole."""
PATHS = {*KEYS, *ALIASES, *SECTIONS, *MEMBERS}
# Names of other libraries, of files, of results, as they are there.
FOREIGN = {
    "add_param_group", "bnb_4bit_quant_storage", "clip_gradients", "compute_loss",
    "compute_metrics", "current_difficulties", "prepare_model_for_kbit_training",
    "dynamo_plugin", "from_config", "fsdp_activation_checkpointing", "fsdp_auto_wrap_policy",
    "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "global_step120", "load_state",
    "lr_scale", "manual_backward", "merge_adapter", "metrics.jsonl", "optimizer.state",
    "output_attentions", "output_hidden_states", "output_router_logits",
    "parallelism_config_dp_replicate_size", "predict_with_generate", "pytorch_lightning",
    "reduce_dtype", "save_pretrained", "save_to_disk", "scaled_dot_product_attention", "sp_size",
    "train_state", "training_step", "zero_stage_0", "zero_stage_2", "zero_stage_2_offload",
    "zero_stage_3", "zero_stage_3_offload", "ckpt_path", "default_root_dir", "log_softmax",
    "nll_loss", "load_from_checkpoint",
}  # fmt: skip
STATE_DICTS = {*torch_state_dict.__all__, *vars(torch_state_dict.StateDictOptions())}


@cache
def ours() -> set[str]:
    """Names of hf-zero: exports, attributes of engines, arguments of its functions, and what it
    reads as strings: parameters of sections, methods of others that it wraps.
    """
    texts = (path.read_text() for path in ROOT.glob("hf_zero/**/*.py"))
    strings = {name for text in texts for name in re.findall(r"([\"'])([a-zA-Z_]\w*)\1", text)}
    found = {*hf_zero.__all__, *dir(Engine), *dir(PipelineTraining), *ON_AN_ENGINE}
    exported = [getattr(hf_zero, name) for name in hf_zero.__all__]
    methods = [getattr(Engine, name) for name in dir(Engine) if not name.startswith("_")]
    for value in (*exported, *methods):
        if callable(value):
            found |= {*inspect.signature(value).parameters}
    found |= {key for row in OPTIMIZERS for key in row.keys}
    return found | {name for _, name in strings}


ROOMS = {path.stem for path in (ROOT / "hf_zero").iterdir()} | {"pth"}
ON_ENGINES = {*dir(Engine), *dir(PipelineTraining), *dir(DeepSpeedEngine), *ON_AN_ENGINE}


def unknown_names(page: str) -> set[str]:
    """Keys and names in sentences that are nowhere."""
    known = LEAVES | MEMBERS | {*TRAINING_KEYS} | FOREIGN | STATE_DICTS | {*TRANSLATED} | ours()
    unknown = set()
    for code in inline_code(page):
        first = code.partition(".")[0]
        dotted = re.fullmatch(r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_]+)+", code)
        if dotted and (first in SECTIONS or first in PATHS):
            unknown |= {code} - PATHS - FOREIGN
        elif re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", code):
            unknown |= {code} - known
        for name in re.findall(r"\bengine\.([a-z]\w*)", code):
            unknown |= {name} - ON_ENGINES
        for name in re.findall(r"\bhf_zero\.([A-Za-z]\w*)", code):
            unknown |= {name} - {*hf_zero.__all__} - ROOMS
    return unknown


def test_each_error_and_each_command_has_a_section() -> None:
    assert {title for level, title in headings("commands") if level == 2} == {*COMMANDS.commands}
    errors = importlib.import_module("hf_zero.errors")
    kinds = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    classes = {name for name, each in kinds.items() if issubclass(each, errors.HfZeroError)}
    assert {title for _, title in headings("errors") if title.endswith("Error")} == classes


def test_each_public_name_is_in_the_reference() -> None:
    text = PAGES["api"].read_text()
    assert {title for level, title in headings("api") if level == 3} == {*hf_zero._EXPORTS}
    for name, directive in re.findall(r"^### (\w+)\n\n::: (\S+)$", text, re.M):
        module, _, attribute = directive.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(hf_zero, name)


def test_the_pages_use_members_of_engines_that_are_stable() -> None:
    text = PAGES["api"].read_text().partition("### Engine\n")[2].partition("\n### ")[0]
    attributes, _, listed = text.partition("::: hf_zero.engine.Engine\n")
    members = {*re.findall(r"\w+", listed.partition("[")[2])}
    assert members <= {*dir(Engine)} and len(members) > 30
    stable = members | {*INLINE.findall(attributes)} | {*dir(PipelineTraining)} - {*dir(Engine)}
    assert all(name in ON_ENGINES for name in INLINE.findall(attributes))
    for page in {*PAGES} - {"architecture", "decisions", "errors", "deepspeed-scripts"}:
        code = [*inline_code(page), *(block.text for block in blocks(page))]
        used = {name for each in code for name in re.findall(r"\bengine\.([a-z]\w*)", each)}
        assert used - stable - {"py"} == set(), page


def test_each_variable_has_a_section() -> None:
    found = set()
    table = Path(variables.__file__)
    for path in {*ROOT.glob("hf_zero/**/*.py"), ROOT / "setup.py"} - {table}:
        found |= {*re.findall(r'"(HF_ZERO_[A-Z_]+)"', path.read_text())}
    for script in ("environment.sh", "environment.py"):
        found |= {*re.findall(r"HF_ZERO_[A-Z_]+", (ROOT / "scripts" / script).read_text())}
    titles = {title for level, title in headings("environment") if level == 3}
    assert {title for title in titles if title.startswith("HF_ZERO_")} == {*variables.VARIABLES}
    assert {*variables.VARIABLES} == found
    assert variables.VARIABLES["HF_ZERO_IO"] == files.BACKENDS
    assert {*variables.VARIABLES["HF_ZERO_BACKEND"]} == {*finder.BACKENDS}


def test_each_key_is_in_the_reference() -> None:
    sections = re.split(r"^## ", PAGES["keys"].read_text(), flags=re.M)[1:]
    listed = set()
    for section in sections:
        title, _, body = section.partition("\n")
        path = "" if title == "Top level" else title.strip("`") + "."
        if not title.startswith("Parameters"):
            listed |= {path + name for name in re.findall(r"^- \*\*`([^`]+)`\*\*", body, re.M)}
    assert listed == {*KEYS}


def test_each_feature_says_whether_it_works() -> None:
    """In the table of the README, which sums them up, and on the page of all features."""
    assert "hf_zero/docs/features.md" in links("README")
    features, marks = DOCUMENTS["features"].read_text(), {}
    for page in ("features", "README"):
        text = DOCUMENTS[page].read_text()
        marks[page] = re.findall(r"^\| .*[^-] \| ([●◐○]) \|", text, re.M)
    assert {*marks["features"]} == {*marks["README"]} == {*"●◐○"}
    assert len(marks["features"]) > 40 > 12 >= len(marks["README"])
    named = re.findall(r"`(\S+)`", " ".join(re.findall(r"\| ([^|]+) \|$", features, re.M)))
    assert (
        len(named) > 40
        and [each for each in named if not (Path(__file__).parents[1] / each).exists()] == []
    )


NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w.]*\d)")
MEASURED = ("Measured", "Compared with", "How many bytes")


def check_figures(page: str) -> None:
    """Figures in its tables are those of the benchmarks."""
    rows = (ROOT / "scripts/bench/README.md").read_text()
    known = {*NUMBER.findall(rows)}
    unknown = {
        number
        for section in sections(page, PAGES[page].read_text())
        if section.title.startswith(MEASURED)
        for line in section.text.splitlines()
        if line.startswith("|")
        for number in NUMBER.findall(line.partition("|")[2].partition("|")[2])
    } - known
    assert unknown == set()
