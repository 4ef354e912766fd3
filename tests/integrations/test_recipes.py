"""Every recipe: its card and presets can be read, its script knows nothing of hf-zero, and its
card's command runs it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.find import find_checkpoint
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.config import PRESETS, ZeroConfig
from tests.helpers import launched

ROOT = Path(__file__).resolve().parents[2]
# Those without the four presets are started by a library's own launcher or a scheduler, and have
# tests of their own.
RECIPES = sorted(
    path.parent
    for path in (ROOT / "recipes").glob("*/README.md")
    if any(path.parent.glob("zero3.*")) and any(path.parent.glob("zero0.*"))
)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


@dataclass(frozen=True)
class Kind:
    """The options of a recipe's script for steps, folder and the rest; ``imports`` are the
    libraries that it is written for.

    A checkpoint is a folder ``tag`` + N. ``resume``: arguments that continue from the last one in a
    folder. ``half``: arguments of a run that is interrupted at step 60 of 150, with epochs and,
    where it can, accumulation. ``long``: even two steps are left to the long matrices.
    """

    imports: frozenset[str]
    tag: str
    steps: str = "--max_train_steps"
    output: str = "--output_dir"
    saving: str = "--checkpointing_steps"
    logging: str = "--logging_steps"
    resume: Callable[[Path], tuple[str, ...]] = lambda folder: (
        "--resume_from_checkpoint",
        "latest",
    )
    half: tuple[str, ...] = ()
    long: bool = False


ACCELERATE, DEEPSPEED, TRAINER = (
    frozenset(names.split())
    for names in ("accelerate transformers", "deepspeed torch", "transformers")
)

KINDS = {
    "bert-mlm": Kind(ACCELERATE, "step_", half=("--gradient_accumulation_steps", "2")),
    "cifar10": Kind(DEEPSPEED, "step_", half=("--train_images", "4096"), long=True),
    "hello-bert": Kind(
        DEEPSPEED,
        "iter_",
        "--num_iterations",
        "--checkpoint_dir",
        "--checkpoint_every",
        "--log_every",
        lambda folder: ("--load_checkpoint_dir", str(folder)),
        long=True,
    ),
    "gpt2": Kind(
        DEEPSPEED,
        "iter_",
        "--train_iters",
        "--save",
        "--save_interval",
        "--log_interval",
        lambda folder: ("--load", str(folder)),
        half=("--checkpoint_activations",),
        long=True,
    ),
    "translation": Kind(
        TRAINER,
        "checkpoint-",
        "--max_steps",
        saving="--save_steps",
        half=("--phrases", "4000", "--eval_pairs", "50"),
        long=True,
    ),
}


def kind_of(recipe: Path) -> Kind:
    assert recipe.name in KINDS, f"say in KINDS how the script of {recipe} is called"
    return KINDS[recipe.name]


def script_of(recipe: Path) -> Path:
    (script,) = recipe.glob("run_*.py")
    return script


def command_of(recipe: Path) -> list[str]:
    """The first command of the card, word by word."""
    lines = (recipe / "README.md").read_text().partition("```\n")[2].splitlines()
    return shlex.split(lines[0])


def preset_of(recipe: Path, name: str) -> Path:
    (file,) = recipe.glob(f"{name}.*")
    return file


def launch(
    recipe: Path, preset: str, output: Path, *arguments: str, limit: float = 600
) -> dict[str, Any]:
    """Run the card's command inside the recipe with another preset; return its losses, and where
    its last checkpoint is.
    """
    kind = kind_of(recipe)
    words = [
        preset_of(recipe, preset).name if Path(word).stem == "zero3" else word
        for word in command_of(recipe)
    ]
    command = [*words, kind.output, str(output), *arguments]
    launched.output(command, recipe, output.with_suffix(".log"), limit)
    last = max(
        output.glob(f"{kind.tag}*/trainer_state.json"),
        key=lambda path: int(path.parent.name.removeprefix(kind.tag)),
    )
    # the Trainer's, which is complete; others write theirs with the last checkpoint
    state = output / "trainer_state.json"
    return {**json.loads((state if state.exists() else last).read_text()), "folder": last.parent}


def losses(run: dict[str, Any], *names: str) -> list[tuple[int, float]]:
    return [
        (entry["step"], entry[name])
        for entry in run["log_history"]
        for name in (names or ("loss", "eval_loss"))
        if name in entry
    ]


def test_a_gpt2_names_its_loss() -> None:
    """Transformers warns of each model of this class that does not."""
    for path in (*ROOT.glob("recipes/**/*.py"), *ROOT.glob("recipes/**/*.ipynb")):
        text = path.read_text()
        assert text.count("GPT2LMHeadModel(") == text.count(".loss_type = "), path


def test_there_are_recipes() -> None:
    assert {"bert-mlm", "cifar10", "gpt2", "hello-bert", "translation"} <= {
        recipe.name for recipe in RECIPES
    }


@every_recipe
def test_the_card_has_front_matter(recipe: Path) -> None:
    card = ModelCard.load(recipe / "README.md")
    assert card.data.language and card.data.license and card.data.pipeline_tag
    assert "hf-zero" in card.data.tags
    for heading in ("## Training", "## Evaluation", "## Limits"):
        assert heading in card.text
    assert f" {recipe.name} " in (ROOT / "recipes" / "README.md").read_text().replace(
        "[", " "
    ).replace("]", " ")


@every_recipe
def test_presets_are_the_four_stages_and_differ_in_nothing_else(recipe: Path) -> None:
    rest = set()
    for name, stage in PRESETS.items():
        config = ZeroConfig.from_file(preset_of(recipe, name), allow_auto=True)
        assert (config.stage, config.precision) == (stage, "fp32")
        assert config.gradient_clipping == 1.0 or "gradient_clipping" in config.autos
        if preset_of(recipe, name).suffix == ".yaml":
            assert (config.launch.num_processes, config.launch.use_cpu) == (2, True)
        rest.add(
            json.dumps(
                {
                    key: value
                    for key, value in config.to_dict("default").items()
                    if key != "zero_optimization"
                },
                sort_keys=True,
            )
        )
    assert len(rest) == 1


@every_recipe
def test_the_script_does_not_know_hf_zero(recipe: Path) -> None:
    imported = [
        node
        for node in ast.walk(ast.parse(script_of(recipe).read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {
        alias.name.split(".")[0]
        for node in imported
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        (node.module or "").split(".")[0] for node in imported if isinstance(node, ast.ImportFrom)
    }
    wanted = kind_of(recipe).imports
    assert wanted <= names
    assert "hf_zero" not in names
    assert ("deepspeed" in names) == ("deepspeed" in wanted)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            path, marks=pytest.mark.long if path.name in KINDS and KINDS[path.name].long else ()
        )
        for path in RECIPES
    ],
    ids=lambda path: path.name,
)
def test_two_steps_and_a_converted_model(recipe: Path, tmp_path: Path) -> None:
    kind = kind_of(recipe)
    run = launch(recipe, "zero3", tmp_path / "run", kind.steps, "2")
    (_, before), *_, (step, after) = losses(run, "eval_loss")
    assert step == 2 and after < before

    manifest = Manifest.read(find_checkpoint(run["folder"]) / MANIFEST_NAME)
    assert (manifest.stage, manifest.world["size"], manifest.counters["global_steps"]) == (3, 2, 2)
    done = hf_zero.convert_checkpoint(run["folder"], tmp_path / "model", progress=False)
    card = ModelCard.load(done.folder / "README.md")
    assert "| steps | 2 |" in card.text.partition("## This run")[2]
    LOADS[card.data.pipeline_tag](done.folder, recipe)
    if "memory" in run:
        predicted = hf_zero.estimate(done.folder, ranks=2, precision="fp32").at(3)
        assert done.parameters == run["parameters"] and len(run["memory"]) == 2
        for rank in run["memory"]:
            assert (
                predicted.state
                <= rank["state"]
                <= 1.02 * (predicted.state + predicted.gradient_buffers)
            )


def loads_for_masked_words(folder: Path, recipe: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"The value of {tokenizer.mask_token} expression."
    assert model(**tokenizer(text, return_tensors="pt")).logits.shape[-1] == len(tokenizer)


def loads_for_text(folder: Path, recipe: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model(**tokenizer("The value of", return_tensors="pt")).logits.shape[-1] == len(
        tokenizer
    )


def loads_for_translation(folder: Path, recipe: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (
        model.generate(
            **tokenizer("at half past six", return_tensors="pt"), max_new_tokens=2
        ).shape[0]
        == 1
    )


def loads_for_images(folder: Path, recipe: Path) -> None:
    script = module_of(script_of(recipe))
    net = script.Net()
    net.load_state_dict(load_file(folder / "model.safetensors"))
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


LOADS = {
    "fill-mask": loads_for_masked_words,
    "text-generation": loads_for_text,
    "translation": loads_for_translation,
    "image-classification": loads_for_images,
}


def module_of(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@every_recipe
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(recipe: Path, tmp_path: Path) -> None:
    """The run makes several passes over the data: the resumed one starts inside one and ends in
    another.
    """
    kind = kind_of(recipe)
    arguments = (kind.steps, "150", kind.saving, "60", kind.logging, "1", *kind.half)
    whole = launch(recipe, "zero3", tmp_path / "whole", *arguments)
    middle, again = f"{kind.tag}60", tmp_path / "resumed"
    again.mkdir()
    shutil.copytree(tmp_path / "whole" / middle, again / middle)
    if (tmp_path / "whole" / "latest").exists():
        (again / "latest").write_text(middle)
    if recipe.name == "bert-mlm":
        (again / "step_120").mkdir()  # torn: it lacks the file that is written last
    resumed = launch(recipe, "zero3", again, *arguments, *kind.resume(again))
    assert len(losses(whole)) == 152
    assert losses(resumed) == losses(whole)


@pytest.mark.long
@every_recipe
def test_all_stages_train_alike(recipe: Path, tmp_path: Path) -> None:
    kind = kind_of(recipe)
    curves = {}
    for name in PRESETS:
        curves[name] = losses(
            launch(recipe, name, tmp_path / name, kind.steps, "20", kind.logging, "5")
        )
    for name, curve in curves.items():
        assert [step for step, _ in curve] == [step for step, _ in curves["zero0"]]
        assert [loss for _, loss in curve] == pytest.approx(
            [loss for _, loss in curves["zero0"]], rel=1e-5
        ), name


LACKING = {
    "continued-pretraining": "trl",
    "dpo": "trl",
    "grpo": "trl",
    "lightning": "lightning",
    "ray": "ray",
    "sentence-embeddings": "sentence_transformers",
    "sft-lora": "trl",
}


@pytest.mark.parametrize("name", LACKING)
def test_a_recipe_whose_library_is_missing_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = (
        path
        for path in (ROOT / "recipes" / name).glob("*.py")
        if path.stem.startswith(("run", "train"))
    )
    monkeypatch.setitem(sys.modules, LACKING[name], None)
    with pytest.raises(
        SystemExit, match=rf"{LACKING[name]}.*: this recipe needs pip install '\S+'$"
    ):
        runpy.run_path(str(script))
