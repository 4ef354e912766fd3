"""The recipes that compare runs: their configurations, their plots, and with ``--long`` a few steps
of each, over loopback.
"""

from __future__ import annotations

import json
import math
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


def ran(recipe: str, folder: Path, *words: str) -> dict[str, list[Row]]:
    """Return the rows of each run of a script on two ranks; curves fall and are in each plot."""
    path, out = RECIPES / recipe, folder / "out"
    command = ["torchrun", "--nproc_per_node", "2", script_of(path).name, *words]
    more = ["--evaluations", "2", "--output_dir", str(out)]
    launched.output([*command, *more], path, folder / "log.txt")
    rows, plots = rows_and_plots(out)
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(row["config"], []).append(row)
    assert plots and all(len(plot.findall("{*}polyline")) == len(curves) for plot in plots)
    for curve in curves.values():
        assert curve[-1]["loss"] < curve[0]["loss"]
        assert all(a["step"] < b["step"] for a, b in pairwise(curve))
    return curves


SMALL = ("--hidden_size", "32", "--num_layers")


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["curriculum", "mixed-lengths", "bert-large-batch", "moe"])
def test_a_few_steps_of_each(recipe: str, tmp_path: Path) -> None:
    tokens = "60000" if recipe == "bert-large-batch" else "30000"
    curves = ran(recipe, tmp_path, *SMALL, "2", "--tokens", tokens)
    assert {*curves} == {file.stem for file in (RECIPES / recipe).glob("*.json")}
    first = next(iter(curves.values()))[0]["loss"]
    for curve in curves.values():
        assert curve[0]["loss"] == pytest.approx(first, rel=0.5)
        assert curve[-1]["tokens"] >= int(tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "sizes", "samples"),
    [
        ("lamb-large-batch", ["1", "--samples", "512"], [0, 256, 512]),
        ("layer-drop", ["4", "--tokens", "12288"], [0, 96, 192]),
        ("random-ltd", ["8", "--tokens", "49152"], [0, 96, 192]),
    ],
)
def test_the_same_weights_train_apart(
    recipe: str, sizes: list[str], samples: list[int], tmp_path: Path
) -> None:
    curves = [*ran(recipe, tmp_path, *SMALL, *sizes).values()]
    assert len(curves) == len([*(RECIPES / recipe).glob("*.json")])
    assert len({curve[0]["loss"] for curve in curves}) == 1
    assert len({curve[-1]["loss"] for curve in curves}) == len(curves)
    assert [row["samples"] for row in curves[-1]] == samples


@pytest.mark.long
def test_curriculum_sampling(tmp_path: Path) -> None:
    curves = ran("curriculum-sampling", tmp_path, *SMALL, "1", "--steps", "6")
    index = tmp_path / "out" / "data-difficulty" / "vocab_rarity"
    assert f'"index_to_metric_path": "{index}"' in (tmp_path / "log.txt").read_text()
    random, rarity = curves["random"], curves["rarity"]
    assert [row["step"] for row in random] == [row["step"] for row in rarity] == [0, 3, 6]
    # the same weights, other rows
    assert random[0]["loss"] == rarity[0]["loss"] and random[1]["loss"] != rarity[1]["loss"]


@pytest.mark.long
def test_four_bits_are_told_from_full_precision(tmp_path: Path) -> None:
    folder = RECIPES / "quantization"
    config = json.loads((folder / "moq_4.json").read_text())
    config["quantize_training"]["quantize_bits"]["start_bits"] = 4
    config["quantize_training"]["quantize_schedule"]["schedule_offset"] = 0
    (tmp_path / "four.json").write_text(json.dumps(config))
    files = ["--deepspeed_config", str(folder / "full.json"), str(tmp_path / "four.json")]
    curves = ran("quantization", tmp_path, *files, "--tokens", "3072", "--num_layers", "1")
    full, four = curves["full"], curves["four"]
    assert [row["step"] for row in full] == [row["step"] for row in four] == [0, 3, 6]
    assert full[0]["loss"] != four[0]["loss"]
    lost = [full[-1][f"loss_in_{bits}_bits"] - full[-1]["loss"] for bits in (8, 4)]
    assert 0 < abs(lost[0]) < abs(lost[1])


@pytest.mark.long
def test_slow_network_over_loopback(tmp_path: Path) -> None:
    command = [launched.python(), "two_hosts.py", "--rate", "0", "--num_iterations", "5"]
    sizes = ["--eval_every", "1", "--h_dim", "64", "--num_layers", "1"]
    place = ["--output_dir", str(tmp_path / "out")]
    recipe = RECIPES / "slow-network"
    said = launched.output([*command, *sizes, *place], recipe, tmp_path / "log.txt")
    assert "no throttled hosts: not asked for" in said
    rows, (plot,) = rows_and_plots(tmp_path / "out")
    assert {row["link"] for row in rows} == {"loopback, not limited"}
    assert "loopback, not limited" in plot[0].text
    curves = [
        [row for row in rows if row["config"] == name] for name in ("dense", "four_bits", "one_bit")
    ]
    for curve in curves:
        assert [row["step"] for row in curve] == [0, 1, 2, 3, 4, 5]
        assert curve[-1]["loss"] < curve[0]["loss"]
        assert all(a["seconds"] < b["seconds"] for a, b in pairwise(curve))
    # the same weights and batches; 1-bit Adam's first step is dense
    dense, four, one = ([row["loss"] for row in curve] for curve in curves)
    assert dense[0] == four[0] == one[0] and dense[1] == one[1] and dense[1] != four[1]
    assert dense[-1] != one[-1]


@pytest.mark.long
def test_ranks_that_share_layers_learn_as_those_that_share_batches(tmp_path: Path) -> None:
    recipe = RECIPES / "tensor-parallel"
    sizes = ["--max_train_steps", "4", "--output_dir", str(tmp_path)]
    for name in ("tensor", "data"):
        place = [str(recipe / f"{name}.yaml"), str(recipe / "run_tensor_parallel.py")]
        command = ["accelerate", "launch", "--config_file", *place, *sizes]
        launched.output(command, tmp_path, tmp_path / f"{name}.txt")
    shared = rows_of(tmp_path / "rows-data-1-x-tensor-2.jsonl")
    alone = rows_of(tmp_path / "rows-data-2-x-tensor-1.jsonl")
    assert shared[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    assert shared[-1]["loss"] < shared[0]["loss"]
    assert shared[0]["parameters_of_layers"] * 2 == alone[0]["parameters_of_layers"]
    assert (tmp_path / "loss_over_steps.svg").is_file()


@pytest.mark.long
def test_a_few_steps_with_stages_and_without(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc_per_node", "2", str(RECIPES / "pipeline" / "run_pipeline.py")]
    sizes = [*SMALL, "2", "--max_train_steps", "4", "--output_dir", str(tmp_path)]
    for stages in ("2", "1"):
        log = tmp_path / f"{stages}.txt"
        launched.output([*command, *sizes, "--num_stages", stages], tmp_path, log)
    apart, together = (rows_of(tmp_path / f"rows-{name}-stages.jsonl") for name in ("2", "no"))
    for one, other in zip(apart, together):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert apart[-1]["loss"] < apart[0]["loss"]
    assert apart[0]["parameters_of_rank"] < together[0]["parameters_of_rank"]
    assert (tmp_path / "loss_over_steps.svg").is_file()


@pytest.mark.long
def test_a_rank_needs_less_for_parts_of_sequences(tmp_path: Path) -> None:
    sizes = ["--lengths", "128", "1024", "--steps", "2", "--output_dir", str(tmp_path)]
    for config in ("whole.yaml", "split.yaml", "ring.yaml"):
        command = ["accelerate", "launch", "--config_file", config, "run_long_context.py", *sizes]
        launched.output(command, RECIPES / "long-context", tmp_path / "log.txt")
    rows = rows_of(tmp_path / "rows.jsonl")
    assert [row["length"] for row in rows] == 3 * [128, 1024]
    assert len({row["config"] for row in rows}) == 3
    assert max(row["peak_mib"] for row in rows[3::2]) < 0.85 * rows[1]["peak_mib"]
    assert all(row["loss"] < 5.5 for row in rows)
    ElementTree.parse(tmp_path / "memory_over_length.svg")


@pytest.mark.long
def test_a_host_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Over loopback; with two hosts one goes on alone."""
    out = tmp_path / "out"
    command = [launched.python(), "hosts.py", "--loopback", "--hosts", "2", "--kill", "22:0"]
    sizes = ["--num_iterations", "60", "--save_every", "20", "--hidden_size", "64"]
    more = ["--away", "4", "--output_dir", str(out), *sizes]
    said = launched.output([*command, *more], RECIPES / "elastic", tmp_path / "log.txt", 500)
    assert "no network namespaces: not asked for" in said
    rows, (plot,) = rows_and_plots(out)
    assert "names on 127.0.0.1" in plot[0].text
    for run in {row["run"] for row in rows}:
        own = [row for row in rows if row["run"] == run]
        assert next(row["step"] for row in own if row["event"] == "killed") >= 22
        starts = [row for row in own if row["event"] == "begun"]
        assert starts[0]["step"] == 0 and len(starts) > 1 and starts[1]["step"] >= 20
        assert {row["step"] for row in own if row["event"] == "step"} == set(range(1, 61))


def test_hosts_that_are_not_throttled_and_hosts_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told; a host that fails ends the other."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    two_hosts = module_of(RECIPES / "slow-network" / "two_hosts.py")
    goes_on = "import sys, time; time.sleep(20); sys.exit(9)"
    commands = [["/bin/sh", "-c", "exit 3"], [sys.executable, "-S", "-c", goes_on]]
    assert two_hosts.run_together(commands, [{}, {}]) == 3
    monkeypatch.setenv("PATH", str(tmp_path))
    assert two_hosts.throttled(100) == "there is no command 'ip'"
    calls, ip = tmp_path / "calls", tmp_path / "ip"
    ip.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho not permitted >&2\nexit 1\n')
    ip.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    said = two_hosts.throttled(100)
    assert "`ip netns add" in said and "not permitted" in said and "you are not" in said
    assert [line.split()[1] for line in calls.read_text().splitlines()] == ["add"] + 3 * ["delete"]


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
    assert plot.ticks(3.27, 3.29) == pytest.approx([3.27, 3.275, 3.28, 3.285, 3.29])
    assert plot.ticks(0.0, 0.0) == pytest.approx([0.0, 0.2])


UNKNOWING = math.log(32)  # the loss of a guess among all words


@pytest.mark.long
@pytest.mark.parametrize(("preset", "least", "most"), [("post", 0.98, 2), ("pre", 0, 0.75)])
def test_pre_ln_learns_where_post_ln_does_not(
    preset: str, least: float, most: float, tmp_path: Path
) -> None:
    command = ["torchrun", "--nproc_per_node", "2", "run_pre_layer_norm.py"]
    options = ["--deepspeed_config", f"{preset}.json", "--checkpoint_dir", str(tmp_path / preset)]
    launched.output([*command, *options], RECIPES / "pre-layer-norm-bert", tmp_path / "log")
    (state,) = (tmp_path / preset).glob("iter_*/trainer_state.json")
    loss = float(json.loads(state.read_text())["log_history"][-1]["loss"])
    assert least * UNKNOWING < loss < most * UNKNOWING
