"""The recipes that compare runs: their files, their plots, and a few steps of each, over
loopback.
"""

from __future__ import annotations

import ast
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard

from hf_zero.config import ZeroConfig
from tests.helpers import launched
from tests.integrations.test_recipes import module_of

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SLOW, LAMB, SAMPLING = (
    RECIPES / name for name in ("slow-network", "lamb-large-batch", "curriculum-sampling")
)
CURRICULUM, MIXED, BERT, BITS = (
    RECIPES / name for name in ("curriculum", "mixed-lengths", "bert-large-batch", "quantization")
)
DROP, TOKENS, MOE, LONG = (
    RECIPES / name for name in ("layer-drop", "random-ltd", "moe", "long-context")
)
TENSOR, STAGES, ELASTIC = (RECIPES / name for name in ("tensor-parallel", "pipeline", "elastic"))
every = pytest.mark.parametrize(
    "recipe",
    [
        SLOW,
        LAMB,
        SAMPLING,
        CURRICULUM,
        MIXED,
        BERT,
        BITS,
        DROP,
        TOKENS,
        TENSOR,
        STAGES,
        MOE,
        LONG,
        ELASTIC,
    ],
    ids=lambda path: path.name,
)


def config_of(file: Path) -> dict[str, Any]:
    return ZeroConfig.from_file(file).to_dict()


@every
def test_the_files_are_a_recipe(recipe: Path) -> None:
    card = ModelCard.load(recipe / "README.md")
    assert card.data.language and card.data.license and card.data.pipeline_tag
    assert "hf-zero" in card.data.tags and all(
        f"## {heading}" in card.text for heading in ("Training", "Evaluation", "Limits")
    )
    assert f"({recipe.name})" in (RECIPES / "README.md").read_text()
    for script in recipe.glob("*.py"):
        imported = [
            name
            for node in ast.walk(ast.parse(script.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        ]
        assert not [name for name in imported if name and name.startswith("hf_zero")]


def test_configurations_differ_in_what_is_compared() -> None:
    dense, four, one = (
        config_of(SLOW / f"{name}.json") for name in ("dense", "four_bits", "one_bit")
    )
    assert four.pop("compressed_communication")["bits"] == 4
    assert one["optimizer"]["type"] == "OneBitAdam"
    assert dense == four and {**one, "optimizer": dense["optimizer"]} == dense
    small, large, lamb = (
        config_of(LAMB / f"{name}.json")
        for name in ("small_batch_adamw", "large_batch_adamw", "large_batch_lamb")
    )
    settings = lamb["optimizer"]["params"]
    assert (settings["min_coeff"], settings["max_coeff"]) == (0.01, 0.3)
    assert {**lamb, "optimizer": large["optimizer"]} == large
    assert large["train_batch_size"] == 8 * small["train_batch_size"]
    whole, dropping = (config_of(DROP / f"{name}.json") for name in ("all_layers", "layer_drop"))
    assert dropping.pop("progressive_layer_drop")["enabled"] and dropping == whole
    every, part = (config_of(TOKENS / f"{name}.json") for name in ("all_tokens", "random_ltd"))
    routing = part.pop("data_efficiency")["data_routing"]["random_ltd"]
    assert routing["enabled"] and len(routing["random_ltd_layer_id"]) == 6 and part == every
    together, spread = (config_of(MOE / f"{name}.json") for name in ("whole", "spread"))
    assert spread.pop("expert_parallel") == {"enabled": True, "autoep_size": 2}
    assert spread == together
    random, rarity = (config_of(SAMPLING / f"{name}.json") for name in ("random", "rarity"))
    sampling = rarity.pop("data_efficiency")["data_sampling"]
    assert [*sampling["curriculum_learning"]["curriculum_metrics"]] == ["vocab_rarity"]
    assert rarity == random
    memory, disk = (config_of(ELASTIC / f"{name}.json") for name in ("memory", "disk"))
    assert memory.pop("checkpoint")["memory"]["every"] == 5 and memory == disk


def test_configurations_of_what_changes_within_a_run() -> None:
    whole, cut, reshaped = (
        config_of(CURRICULUM / f"{name}.json") for name in ("whole", "truncate", "reshape")
    )
    schedule = cut.pop("curriculum_learning")
    (metric,) = reshaped.pop("data_efficiency")["data_sampling"]["curriculum_learning"][
        "curriculum_metrics"
    ].items()
    assert whole == cut == reshaped
    assert metric == ("seqlen_reshape", {name: schedule[name] for name in metric[1]})
    long, mixed = (config_of(MIXED / f"{name}.json") for name in ("long", "mixed"))
    lengths = [phase.get("sequence_length") for phase in mixed.pop("training_phases")["phases"]]
    assert long.pop("training_phases") and lengths == [64, None] and long == mixed
    post, pre = (config_of(BERT / f"{name}_layer_norm.json") for name in ("post", "pre"))
    drop = config_of(BERT / "layer_drop.json")
    assert drop.pop("progressive_layer_drop")["enabled"] and drop == pre
    assert not post.pop("pre_layer_norm") and pre.pop("pre_layer_norm") and post == pre
    settings = pre["optimizer"]["params"]
    assert pre["optimizer"]["type"] == "Lamb"
    assert (settings["min_coeff"], settings["max_coeff"]) == (0.01, 0.3)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [CURRICULUM, MIXED, BERT, MOE], ids=lambda path: path.name)
def test_a_few_steps_of_each(recipe: Path, tmp_path: Path) -> None:
    (script,) = recipe.glob("run_*.py")
    sizes = ["--hidden_size", "32", "--num_layers", "2", "--evaluations", "2"]
    tokens = "60000" if recipe is BERT else "30000"
    launched.output(
        ["torchrun", "--nproc_per_node", "2", script.name, *sizes, "--tokens", tokens,
         "--output_dir", str(tmp_path / "out")],
        recipe,
        tmp_path / "log.txt",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    names = {file.stem for file in recipe.glob("*.json")}
    plots = [ElementTree.parse(file).getroot() for file in (tmp_path / "out").glob("*.svg")]
    assert plots and all(len(plot.findall("{*}polyline")) == len(names) for plot in plots)
    assert {row["config"] for row in rows} == names
    for name in names:
        curve = [row for row in rows if row["config"] == name]
        assert curve[0]["loss"] == pytest.approx(rows[0]["loss"], rel=0.5)
        assert curve[-1]["loss"] < curve[0]["loss"] and curve[-1]["tokens"] >= int(tokens)
        assert all(a["step"] < b["step"] for a, b in pairwise(curve))


def rows_and_plots(folder: Path) -> tuple[list[dict[str, Any]], list[ElementTree.Element]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return rows, [ElementTree.parse(plot).getroot() for plot in sorted(folder.glob("*.svg"))]


def test_slow_network_over_loopback(tmp_path: Path) -> None:
    command = [launched.python(), "two_hosts.py", "--rate", "0", "--num_iterations", "5"]
    sizes = [
        "--eval_every",
        "1",
        "--h_dim",
        "64",
        "--num_layers",
        "1",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    said = launched.output([*command, *sizes], SLOW, tmp_path / "log.txt")
    assert "no throttled hosts: not asked for" in said
    rows, (plot,) = rows_and_plots(tmp_path / "out")
    assert {row["link"] for row in rows} == {"loopback, not limited"}
    assert "loopback, not limited" in plot[0].text
    curves = {
        name: [row for row in rows if row["config"] == name]
        for name in ("dense", "four_bits", "one_bit")
    }
    for curve in curves.values():
        assert [row["step"] for row in curve] == [0, 1, 2, 3, 4, 5]
        assert curve[-1]["loss"] < curve[0]["loss"]
        assert all(a["seconds"] < b["seconds"] for a, b in pairwise(curve))
    # the same weights and batches; 1-bit Adam's first step is dense
    dense, four, one = ([row["loss"] for row in curve] for curve in curves.values())
    assert dense[0] == four[0] == one[0] and dense[1] == one[1] and dense[1] != four[1]
    assert dense[-1] != one[-1]


@pytest.mark.long
def test_lamb_large_batch(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc_per_node", "2", "run_lamb_large_batch.py"]
    sizes = ["--samples", "512", "--hidden_size", "32", "--num_layers", "1"]
    launched.output(
        [*command, *sizes, "--evaluations", "2", "--output_dir", str(tmp_path / "out")],
        LAMB,
        tmp_path / "log.txt",
    )
    rows, (plot,) = rows_and_plots(tmp_path / "out")
    assert len(plot.findall("{*}polyline")) == 3
    for name in ("small_batch_adamw", "large_batch_adamw", "large_batch_lamb"):
        curve = [row for row in rows if row["config"] == name]
        assert [row["samples"] for row in curve] == [0, 256, 512]
        assert curve[-1]["loss"] < curve[0]["loss"] == rows[0]["loss"]


@pytest.mark.long
def test_curriculum_sampling(tmp_path: Path) -> None:
    """In one process: two ranks draw the same (tests/ranks/test_data_sampling.py)."""
    command = [launched.python(), "run_curriculum_sampling.py", "--output_dir", str(tmp_path)]
    sizes = ["--steps", "6", "--hidden_size", "32", "--num_layers", "1", "--evaluations", "2"]
    said = launched.output([*command, *sizes], SAMPLING, tmp_path / "log.txt")
    assert f'"index_to_metric_path": "{tmp_path}/data-difficulty/vocab_rarity"' in said
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for unit in ("samples", "seconds"):
        plot = ElementTree.parse(tmp_path / f"loss_over_{unit}.svg").getroot()
        assert len(plot.findall("{*}polyline")) == 2
    random, rarity = (
        [row for row in rows if row["config"] == name] for name in ("random", "rarity")
    )
    for curve in (random, rarity):
        assert [row["step"] for row in curve] == [0, 3, 6]
        assert curve[-1]["loss"] < curve[0]["loss"]
    # the same weights, other rows
    assert random[0]["loss"] == rarity[0]["loss"] and random[1]["loss"] != rarity[1]["loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "plain", "technique", "sizes"),
    [
        (DROP, "all_layers", "layer_drop", ["--num_layers", "4", "--tokens", "12288"]),
        (TOKENS, "all_tokens", "random_ltd", ["--num_layers", "8", "--tokens", "49152"]),
    ],
    ids=["layer-drop", "random-ltd"],
)
def test_what_is_left_out(
    recipe: Path, plain: str, technique: str, sizes: list[str], tmp_path: Path
) -> None:
    (script,) = recipe.glob("run_*.py")
    command = ["torchrun", "--nproc_per_node", "2", script.name, "--hidden_size", "32"]
    folder = tmp_path / "out"
    more = ["--evaluations", "2", *sizes, "--output_dir", str(folder)]
    launched.output([*command, *more], recipe, tmp_path / "log.txt")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for unit in ("samples", "seconds"):
        root = ElementTree.parse(folder / f"loss_over_{unit}.svg").getroot()
        assert len(root.findall("{*}polyline")) == 2
    whole, part = ([row for row in rows if row["config"] == name] for name in (plain, technique))
    assert [row["samples"] for row in part] == [0, 96, 192]
    assert part[0]["loss"] == whole[0]["loss"] and part[-1]["loss"] != whole[-1]["loss"]
    assert part[-1]["loss"] < part[0]["loss"]


@pytest.mark.long
def test_ranks_that_share_layers_learn_as_those_that_share_batches(tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in ("tensor", "data"):
        place = [
            "--config_file",
            str(TENSOR / f"{name}.yaml"),
            str(TENSOR / "run_tensor_parallel.py"),
        ]
        launched.output(
            [
                "accelerate",
                "launch",
                *place,
                "--max_train_steps",
                "4",
                "--output_dir",
                str(tmp_path),
            ],
            tmp_path,
            tmp_path / f"{name}.txt",
        )
        file = (
            tmp_path / f"rows-data-{'1-x-tensor-2' if name == 'tensor' else '2-x-tensor-1'}.jsonl"
        )
        rows[name] = [json.loads(line) for line in file.read_text().splitlines()]
    shared, alone = rows["tensor"], rows["data"]
    assert shared[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    assert shared[-1]["loss"] < shared[0]["loss"]
    assert shared[0]["parameters_of_layers"] * 2 == alone[0]["parameters_of_layers"]
    assert (tmp_path / "loss_over_steps.svg").is_file()


@pytest.mark.long
def test_a_few_steps_with_stages_and_without(tmp_path: Path) -> None:
    sizes = ["--hidden_size", "32", "--num_layers", "2", "--max_train_steps", "4"]
    rows = {}
    for stages, name in ((2, "2-stages"), (1, "no-stages")):
        launched.output(
            ["torchrun", "--nproc_per_node", "2", str(STAGES / "run_pipeline.py"), *sizes,
             "--num_stages", str(stages), "--output_dir", str(tmp_path)],
            tmp_path,
            tmp_path / f"{name}.txt",
        )  # fmt: skip
        file = tmp_path / f"rows-{name}.jsonl"
        rows[name] = [json.loads(line) for line in file.read_text().splitlines()]
    apart, together = rows["2-stages"], rows["no-stages"]
    for one, other in zip(apart, together):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert apart[-1]["loss"] < apart[0]["loss"]
    assert apart[0]["parameters_of_rank"] < together[0]["parameters_of_rank"]
    assert (tmp_path / "loss_over_steps.svg").is_file()


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module_of(SLOW / "two_hosts.py")


def test_why_there_are_no_throttled_hosts(
    two_hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert two_hosts.throttled(100) == "there is no command 'ip'"
    calls, ip = tmp_path / "calls", tmp_path / "ip"
    ip.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho not permitted >&2\nexit 1\n')
    ip.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    said = two_hosts.throttled(100)
    assert "`ip netns add" in said and "not permitted" in said and "you are not" in said
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["add"] + 3 * ["delete"]


def test_a_host_that_fails_ends_the_other(two_hosts: Any) -> None:
    goes_on = "import sys, time; time.sleep(20); sys.exit(9)"
    commands = [["/bin/sh", "-c", "exit 3"], [sys.executable, "-S", "-c", goes_on]]
    assert two_hosts.run_together(commands, [{}, {}]) == 3


def test_a_plot(tmp_path: Path) -> None:
    plot, file = module_of(RECIPES / "plot.py"), tmp_path / "plot.svg"
    curves = {"a < b": [(0, 5.0), (30, 2.5), (61, 1.1)], "gone": [(1, 3.0), (2, float("nan"))]}
    plot.line_plot(file, curves, "falling", "seconds", "loss")
    root = ElementTree.parse(file).getroot()
    lines = [
        [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
        for line in root.findall("{*}polyline")
    ]
    assert [len(line) for line in lines] == [3, 1]
    for x, y in lines[0] + lines[1]:
        assert plot.LEFT <= x <= plot.WIDTH - plot.RIGHT
        assert plot.TOP <= y <= plot.HEIGHT - plot.BOTTOM
    (left, high), _, (right, low) = lines[0]
    assert left == plot.LEFT < right and high < low
    words = [text.text for text in root.findall("{*}text")]
    assert {"falling", "a < b", "gone", "seconds", "loss", "0", "20", "1", "5"} <= {*words}


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.0, 61.0, [0, 20, 40, 60, 80]),
        (1.1, 5.0, [1, 2, 3, 4, 5]),
        (3.27, 3.29, [3.27, 3.275, 3.28, 3.285, 3.29]),
        (2.0, 2.0, [2.0, 2.5]),
        (0.0, 0.0, [0.0, 0.2]),
    ],
)
def test_ticks(low: float, high: float, found: list[float]) -> None:
    assert module_of(RECIPES / "plot.py").ticks(low, high) == pytest.approx(found)


@pytest.mark.long
def test_a_rank_needs_less_for_parts_of_sequences(tmp_path: Path) -> None:
    for config in ("whole.yaml", "split.yaml"):
        launched.output(
            ["accelerate", "launch", "--config_file", config, "run_long_context.py",
             "--lengths", "128", "1024", "--steps", "2", "--output_dir", str(tmp_path)],
            LONG,
            tmp_path / "log.txt",
        )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["length"] for row in rows] == [128, 1024, 128, 1024]
    assert rows[3]["peak_mib"] < 0.85 * rows[1]["peak_mib"]
    assert all(row["loss"] < 5.5 for row in rows)
    ElementTree.parse(tmp_path / "memory_over_length.svg")


def test_only_the_split_of_sequences_differs_between_configurations() -> None:
    whole, split = config_of(LONG / "whole.yaml"), config_of(LONG / "split.yaml")
    assert split.pop("sequence_parallel_size") == 2 and split == whole


def test_what_a_kill_costs_is_read_from_the_rows(tmp_path: Path) -> None:
    hosts = module_of(ELASTIC / "hosts.py")
    rows = [
        {"event": "begun", "step": 0},
        *({"event": "step", "step": step, "loss": 9.0 - step} for step in (1, 2, 3)),
        {"event": "killed", "step": 3, "host": 1},
        {"event": "begun", "step": 2},
        *({"event": "step", "step": step, "loss": 9.0 - step} for step in (3, 4)),
        {"event": "ended", "step": 4},
    ]
    timed = [{**row, "seconds": 2.0 * at} for at, row in enumerate(rows)]
    assert hosts.lost(timed) == [(1, 3, 1, 6.0)]
    hosts.report({"a": timed, "b": timed}, "nowhere", tmp_path)
    found, (plot,) = rows_and_plots(tmp_path)
    assert len(found) == 2 * len(rows) and {row["hosts"] for row in found} == {"nowhere"}
    assert len(plot.findall("{*}polyline")) == 2
    assert [text.text for text in plot.findall("{*}text")].count("×") == 2


@pytest.mark.long
def test_a_host_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Over loopback; with two hosts one goes on alone."""
    out = tmp_path / "out"
    command = [launched.python(), "hosts.py", "--loopback", "--hosts", "2", "--kill", "22:0"]
    sizes = ["--num_iterations", "60", "--save_every", "20", "--hidden_size", "64"]
    said = launched.output(
        [*command, "--away", "4", "--output_dir", str(out), *sizes],
        ELASTIC,
        tmp_path / "log.txt",
        timeout=500,
    )
    assert "no network namespaces: not asked for" in said
    rows, (plot,) = rows_and_plots(out)
    assert "names on 127.0.0.1" in plot[0].text
    for run in {row["run"] for row in rows}:
        own = [row for row in rows if row["run"] == run]
        assert next(row["step"] for row in own if row["event"] == "killed") >= 22
        starts = [row for row in own if row["event"] == "begun"]
        assert starts[0]["step"] == 0 and len(starts) > 1 and starts[1]["step"] >= 20
        steps = {row["step"] for row in own if row["event"] == "step"}
        assert steps == set(range(1, 61))
