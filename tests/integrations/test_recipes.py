"""Every recipe: its card, its files, its script's arguments and its data."""

from __future__ import annotations

import ast
import importlib.util
import json
import runpy
import shlex
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard

from hf_zero.config import PRESETS, OffloadOptimizer, ZeroConfig
from hf_zero.distributed.parallel_dims import check_mpu
from hf_zero.errors import ConfigError, NotBuiltError
from tests.helpers import launched
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
NEEDS = {"sentence-embeddings": "sentence_transformers"}  # what tests do not install
# Those without the four presets have tests of their own.
PRESET = sorted(
    path.parent
    for path in RECIPES.glob("*/README.md")
    if any(path.parent.glob("zero3.*")) and any(path.parent.glob("zero0.*"))
)
by_name = {"ids": lambda path: path.name}


# The libraries that the scripts with four presets are written for.
DEEPSPEED = {"deepspeed", "torch"}
IMPORTS = {
    "bert-mlm": {"accelerate", "transformers"},
    "cifar10": DEEPSPEED,
    "hello-bert": DEEPSPEED,
    "gpt2": DEEPSPEED,
    "translation": {"transformers"},
}


def script_of(recipe: Path) -> Path:
    (script,) = recipe.glob("run_*.py")
    return script


def module_of(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def commands_of(recipe: Path) -> list[list[str]]:
    """Return the commands of the card that start a script of the recipe, word by word."""
    blocks = (recipe / "README.md").read_text().replace("\\\n", " ").split("```")[1::2]
    lines = [line for block in blocks for line in block.splitlines()]
    scripts = {path.name for path in recipe.glob("*.py")}
    return [shlex.split(line) for line in lines if scripts & {*line.split()}]


def imported_by(script: Path) -> set[str]:
    """Return the packages that a script imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


class ParsedError(Exception):
    """Ends a script after its arguments are read."""


@pytest.mark.parametrize("recipe", sorted(p.parent for p in RECIPES.glob("*/run_*.py")), **by_name)
def test_a_card_and_the_script_that_takes_its_words(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts know nothing of hf-zero, and name an unknown argument in one line."""
    card = ModelCard.load(recipe / "README.md")
    assert card.data.language and card.data.license and card.data.pipeline_tag
    assert "hf-zero" in card.data.tags
    assert all(f"## {name}" in card.text for name in ("Training", "Evaluation", "Limits"))
    assert f"({recipe.name})" in (RECIPES / "README.md").read_text()
    assert all("hf_zero" not in imported_by(script) for script in recipe.glob("*.py"))
    if recipe.name in NEEDS:
        pytest.importorskip(NEEDS[recipe.name])

    monkeypatch.setattr(sys, "path", [str(recipe), *sys.path])
    monkeypatch.chdir(recipe)  # commands name files of the recipe
    given = commands_of(recipe)
    assert given
    for words in given:
        at = next(at for at, word in enumerate(words) if word.endswith(".py"))
        script = module_of(recipe / words[at])
        with monkeypatch.context() as patch:
            parse = ArgumentParser.parse_known_args

            def parsed(self: Any, *args: Any, **more: Any) -> Any:
                found, rest = parse(self, *args, **more)  # noqa: B023
                raise ParsedError(found, rest)

            patch.setattr(ArgumentParser, "parse_known_args", parsed)
            patch.setattr(sys, "argv", words[at:])
            with pytest.raises(ParsedError) as ended:
                script.main()
        options, rest = ended.value.args
        assert not rest or not words[at].startswith("run_"), rest
        if hasattr(options, "model_name_or_path") and len(words) == at + 1:
            assert options.model_name_or_path is options.dataset_name is None
            assert str(options.output_dir) == f"runs/{recipe.name}"
    name = script_of(recipe).name
    first = next((words[words.index(name) :] for words in given if name in words), [name])
    monkeypatch.setattr(sys, "argv", [*first, "--learning_rte", "1"])
    with pytest.raises(SystemExit, match="2"):
        module_of(script_of(recipe)).main()
    assert "unrecognized arguments: --learning_rte 1" in capsys.readouterr().err.splitlines()[-1]
    sys.modules.pop("phrases", None)


NOTHING = {
    "cifar10": ["--resume_from_checkpoint", "latest", "--output_dir"],
    "gpt2": ["--load"],
    "hello-bert": ["--load_checkpoint_dir"],
    "translation": ["--resume_from_checkpoint", "latest", "--phrases", "50", "--output_dir"],
}


@contextmanager
def started(recipe: str, *words: str) -> Iterator[Callable[[], None]]:
    """The script of ``recipe`` with the arguments ``words``, in the recipe's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(RECIPES / recipe), *sys.path])
        patch.chdir(RECIPES / recipe)
        script = module_of(script_of(RECIPES / recipe))
        patch.setattr(sys, "argv", [script.__name__, *words])
        try:
            yield script.main
        finally:
            sys.modules.pop("phrases", None)
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


@in_one_item(NOTHING)
def test_a_run_without_a_checkpoint_to_resume_from_ends_with_one_line(recipe: str) -> None:
    small = {"cifar10": ["--train_images", "64", "--eval_images", "64"]}
    config = [] if recipe == "translation" else ["--deepspeed_config", "zero0.json"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*config, *small.get(recipe, []), *NOTHING[recipe], folder]
        said = f"no checkpoint in {folder}; run once without --"
        with started(recipe, *words) as main, pytest.raises(SystemExit, match=said):
            main()


def test_a_finished_run_that_resumes_trains_no_further(tmp_path: Path) -> None:
    words = ["--deepspeed_config", "zero0.json", "--vocab_size", "512", "--h_dim", "32"]
    words += ["--num_iterations", "2", "--log_every", "1", "--checkpoint_dir", str(tmp_path)]
    for more in ((), ("--load_checkpoint_dir", str(tmp_path))):
        with started("hello-bert", *words, *more) as main:
            main()
        assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_2"]


@pytest.mark.long
def test_a_run_continues_with_the_next_rows_on_other_ranks(tmp_path: Path) -> None:
    """Two ranks train two micro-batches an iteration, one rank four; without dropout their losses
    are equal.
    """
    words = ["run_gpt2.py", "--deepspeed_config", "zero3.json", "--vocab_size", "512"]
    words += ["--train_iters", "4", "--save_interval", "2", "--log_interval", "1"]

    def losses(ranks: int, folder: Path, *more: str) -> dict[int, float]:
        command = ["torchrun", "--nproc_per_node", str(ranks), *words, "--save", str(folder)]
        launched.output([*command, *more], RECIPES / "gpt2", tmp_path / "log.txt")
        state = json.loads((folder / "iter_4" / "trainer_state.json").read_text())
        return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}

    whole = losses(2, tmp_path / "whole")
    (tmp_path / "whole" / "latest").write_text("iter_2")
    resumed = losses(1, tmp_path / "resumed", "--load", str(tmp_path / "whole"))
    assert resumed == pytest.approx(whole, rel=1e-4)
    assert len(whole) == 4


LACKING = {
    "continued-pretraining": "trl",
    "dpo": "trl",
    "grpo": "trl",
    "lightning": "lightning",
    "ray": "ray",
    "sentence-embeddings": "sentence_transformers",
    "sft-lora": "trl",
}


def test_a_recipe_whose_library_is_missing_says_how_to_install_it() -> None:
    for name, library in LACKING.items():
        scripts = [*(RECIPES / name).glob("run*.py"), *(RECIPES / name).glob("train*.py")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            said = rf"{library}.*: this recipe needs pip install '\S+'$"
            with pytest.raises(SystemExit, match=said):
                runpy.run_path(str(scripts[0]))


def preset_of(recipe: Path, name: str) -> Path:
    (file,) = recipe.glob(f"{name}.*")
    return file


def test_presets_are_the_four_stages_and_differ_in_nothing_else() -> None:
    assert {path.name for path in PRESET} == {*IMPORTS}
    for recipe in PRESET:
        rest = set()
        for name, stage in PRESETS.items():
            file = preset_of(recipe, name)
            config = ZeroConfig.from_file(file, allow_auto=True)
            assert (config.stage, config.precision) == (stage, "fp32"), file
            assert config.gradient_clipping == 1.0 or "gradient_clipping" in config.autos, file
            if file.suffix == ".yaml":
                assert (config.launch.num_processes, config.launch.use_cpu) == (2, True)
            written = config.to_dict("default")
            del written["zero_optimization"]
            rest.add(json.dumps(written, sort_keys=True))
        assert len(rest) == 1, recipe
        names, wanted = imported_by(script_of(recipe)), IMPORTS[recipe.name]
        assert wanted <= names and ("deepspeed" in names) == ("deepspeed" in wanted), recipe


def test_the_presets_of_hello_bert_and_the_card_of_gpt2() -> None:
    """Offload needs one word; what is refused is quoted."""
    for preset in sorted((RECIPES / "hello-bert").glob("zero*.json")):
        config = json.loads(preset.read_text())
        assert config["zero_optimization"]["offload_optimizer"] == {"device": "none"}
        config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
        assert ZeroConfig.from_dict(config).offload_optimizer == OffloadOptimizer("cpu")
    with pytest.raises(NotBuiltError) as refused:
        check_mpu(SimpleNamespace(get_model_parallel_world_size=lambda: 2), 2)
    assert str(refused.value) in (RECIPES / "gpt2" / "README.md").read_text()


def test_an_mpu_that_tells_no_size() -> None:
    for size in (None, "2", 2.0, 0):
        with pytest.raises(ConfigError, match=r"get_model_parallel_world_size.* is not a number"):
            check_mpu(SimpleNamespace(get_model_parallel_world_size=lambda size=size: size), 2)


LOADERS = {
    "bert-mlm": "load_texts",
    "cifar10": "load_images",
    "gpt2": "load_texts",
    "hello-bert": "load_texts",
    "lightning": "load_images",
    "translation": "load_pairs",
}


def test_a_data_set_that_cannot_be_loaded_is_not_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {script.parent.name: script.read_text() for script in RECIPES.glob("*/run_*.py")}
    taking = {name for name, text in texts.items() if "dataset_name" in text}
    # those that call load_data have the loader of starting.py
    assert {name for name in taking if "load_data(" not in texts[name]} == set(LOADERS)
    args = SimpleNamespace(dataset_name="nobody/wikitxt", dataset_config_name=None, catalog=None)
    args.train_images = args.phrases = 8
    unknown = Mock(side_effect=ValueError("BuilderConfig 'wrong' not found"))
    monkeypatch.setattr("datasets.load_dataset", unknown)
    said = r"nobody/wikitxt cannot be loaded \(.*\); correct"
    for recipe, loader in LOADERS.items():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(RECIPES / recipe))
            script = module_of(script_of(RECIPES / recipe))
        with pytest.raises(SystemExit, match=said):
            getattr(script, loader)(args, *([1] if recipe == "translation" else []))
        sys.modules.pop("phrases", None)
    monkeypatch.syspath_prepend(str(RECIPES))
    import starting

    with pytest.raises(SystemExit, match=said):
        starting.load_data("nobody/wikitxt", None, list, ("train", "test"))
