"""The recipes that compare runs: their configurations, their plots, and with ``--long`` a few steps
of each, over loopback.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hf_zero.config import ZeroConfig
from tests.helpers import launched
from tests.integrations.test_recipes import RECIPES, module_of, script_of

Row = dict[str, Any]


def configs_of(recipe: str, *files: str) -> list[dict[str, Any]]:
    return [ZeroConfig.from_file(RECIPES / recipe / file).to_dict() for file in files]


# Files of a recipe that are equal but for these keys of the second.
PAIRS = [
    ("slow-network", "dense.json", "four_bits.json", "compressed_communication"),
    ("layer-drop", "all_layers.json", "layer_drop.json", "progressive_layer_drop"),
    ("random-ltd", "all_tokens.json", "random_ltd.json", "data_efficiency"),
    ("moe", "whole.json", "spread.json", "expert_parallel"),
    ("curriculum-sampling", "random.json", "rarity.json", "data_efficiency"),
    ("elastic", "disk.json", "memory.json", "checkpoint"),
    ("curriculum", "whole.json", "truncate.json", "curriculum_learning"),
    ("curriculum", "whole.json", "reshape.json", "data_efficiency"),
    ("bert-large-batch", "pre_layer_norm.json", "layer_drop.json", "progressive_layer_drop"),
    ("long-context", "whole.yaml", "split.yaml", "sequence_parallel_size"),
    ("long-context", "whole.yaml", "ring.yaml", "context_parallel_size"),
    ("quantization", "full.json", "moq_8.json", "quantize_training"),
    ("quantization", "full.json", "moq_4.json", "quantize_training"),
    ("quantization", "full.json", "qat_int4.json", "quantization_aware_training"),
]
# Files that are equal but for the values of these keys.
VALUES = [
    ("slow-network", "dense.json", "one_bit.json", "optimizer"),
    ("lamb-large-batch", "large_batch_adamw.json", "large_batch_lamb.json", "optimizer"),
    ("mixed-lengths", "long.json", "mixed.json", "training_phases"),
    ("bert-large-batch", "post_layer_norm.json", "pre_layer_norm.json", "pre_layer_norm"),
    ("pre-layer-norm-bert", "post.json", "pre.json", "pre_layer_norm"),
]


def test_configurations_differ_in_what_is_compared() -> None:
    found: dict[tuple[str, str], Any] = {}
    for recipe, plain, other, key in (*PAIRS, *VALUES):
        one, two = configs_of(recipe, plain, other)
        found[recipe, other] = two.pop(key)
        if (recipe, plain, other, key) in VALUES:
            assert one.pop(key) != found[recipe, other], (recipe, other)
        assert one == two, (recipe, other)
    small, lamb = configs_of("lamb-large-batch", "small_batch_adamw.json", "large_batch_lamb.json")
    assert lamb["train_batch_size"] == 8 * small["train_batch_size"]
    learning = found["curriculum", "reshape.json"]["data_sampling"]["curriculum_learning"]
    ((name, metric),) = learning["curriculum_metrics"].items()
    schedule = found["curriculum", "truncate.json"]
    assert name == "seqlen_reshape" and metric == {key: schedule[key] for key in metric}
    eight, four = (found["quantization", f"moq_{bits}.json"] for bits in (8, 4))
    bits = [each["quantize_bits"].pop("target_bits") for each in (eight, four)]
    assert bits == [8, 4] and eight == four


def rows_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_and_plots(folder: Path) -> tuple[list[Row], list[ElementTree.Element]]:
    plots = [ElementTree.parse(plot).getroot() for plot in sorted(folder.glob("*.svg"))]
    return rows_of(folder / "rows.jsonl"), plots


SMALL = ("--hidden_size", "32", "--num_layers")
# Arguments for a few steps of each run of a recipe.
RUNS = {
    "bert-large-batch": (*SMALL, "2", "--tokens", "60000"),
    "curriculum": (*SMALL, "2", "--tokens", "30000"),
    "curriculum-sampling": (*SMALL, "1", "--steps", "6"),
    "lamb-large-batch": (*SMALL, "1", "--samples", "512"),
    "layer-drop": (*SMALL, "4", "--tokens", "12288"),
    "mixed-lengths": (*SMALL, "2", "--tokens", "30000"),
    "moe": (*SMALL, "2", "--tokens", "30000"),
    "random-ltd": (*SMALL, "8", "--tokens", "49152"),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", RUNS)
def test_a_few_steps_of_each(recipe: str, tmp_path: Path) -> None:
    """On two ranks; curves begin together, fall, and are in each plot."""
    path, out = RECIPES / recipe, tmp_path / "out"
    command = ["torchrun", "--nproc_per_node", "2", script_of(path).name, *RUNS[recipe]]
    more = ["--evaluations", "2", "--output_dir", str(out)]
    launched.output([*command, *more], path, tmp_path / "log.txt")
    rows, plots = rows_and_plots(out)
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append(row)
    assert {*curves} == {file.stem for file in path.glob("*.json")}
    assert plots and all(len(plot.findall("{*}polyline")) == len(curves) for plot in plots)
    first = next(iter(curves.values()))[0]["loss"]
    for curve in curves.values():
        assert curve[-1]["loss"] < curve[0]["loss"] == pytest.approx(first, rel=0.5)
        assert all(a["step"] < b["step"] for a, b in pairwise(curve))


def test_long_context_refuses_what_it_cannot_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = module_of(script_of(RECIPES / "long-context"))
    monkeypatch.setattr(sys, "argv", ["run_long_context.py", "--steps", "1"])
    with pytest.raises(SystemExit, match="2"):
        script.parse()
    assert "--steps 1" in capsys.readouterr().err
    (tmp_path / "text").write_text("short")
    words = ["--text", str(tmp_path / "text"), "--lengths", "2", "5"]
    monkeypatch.setattr(sys, "argv", ["run_long_context.py", *words])
    with pytest.raises(SystemExit, match=r"--lengths 5 .* this one has 5"):
        script.stream_of(script.parse())


# Commands of other recipes, without their output folder, and a plot that they write.
COMMANDS = {
    "tensor-parallel": (
        "accelerate launch --config_file tensor.yaml run_tensor_parallel.py --max_train_steps 4",
        "loss_over_steps.svg",
    ),
    "pipeline": (
        "torchrun --nproc_per_node 2 run_pipeline.py --hidden_size 32 --num_layers 2 "
        "--max_train_steps 4 --num_stages 2",
        "loss_over_steps.svg",
    ),
    "long-context": (
        "accelerate launch --config_file ring.yaml run_long_context.py --lengths 128 --steps 2",
        "memory_over_length.svg",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", COMMANDS)
def test_a_few_steps_of_others(recipe: str, tmp_path: Path) -> None:
    command, plot = COMMANDS[recipe]
    words = [*command.split(), "--output_dir", str(tmp_path)]
    launched.output(words, RECIPES / recipe, tmp_path / "log.txt")
    ElementTree.parse(tmp_path / plot)
