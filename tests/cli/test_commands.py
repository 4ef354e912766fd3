"""The commands: what they print for people and as JSON, and that bad input ends with code 2, one
line and no traceback.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig, MixtralConfig
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli import doctor, launch, main, smoke
from hf_zero.cli.app import BAD_INPUT, app
from hf_zero.cli.printing import in_units
from hf_zero.config import PRESETS, ZeroConfig
from hf_zero.config.launched import LAUNCHED_BY
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.launch.plan import LAUNCHER
from hf_zero.ops import dispatch, native
from hf_zero.planning.simulation import Machine
from tests.helpers.accelerators import play_accelerator
from tests.helpers.commands import completed
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks

HF_ZERO = str(Path(sys.executable).with_name("hf-zero"))
ROOT = Path(__file__).resolve().parents[2]
ZERO3 = str(ROOT / "recipes" / "bert-mlm" / "zero3.yaml")
COMMANDS = [
    command.name for command in app.registered_commands if command.name not in (None, "schema")
]


def invoke(*arguments: str, ends_with: int = 0) -> str:
    """The output of a command; an argument with blanks is several."""
    words = [word for argument in arguments for word in argument.split(" ")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result.stdout


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_each_command_is_one_line_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = invoke("--help").partition("\nCommands:\n")[2]
    assert [line.split()[0] for line in listed.splitlines()] == [
        *(command.name for command in app.registered_commands),
        "recipe",
    ]


def test_the_installed_command_is_this_app() -> None:
    result = completed([HF_ZERO, "--help"], timeout=300, check=True)
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    said = " ".join(invoke(command, "--help").split())
    assert f"Example: hf-zero {command}" in said
    assert "--json" in said


def test_estimate_prints_the_library_s_figures(model: str) -> None:
    expected = hf_zero.estimate(model, ranks=4, precision="bf16", optimizer="SGD")
    assert json.loads(
        invoke("estimate", model, "--ranks", "4", "--optimizer", "SGD", "--json")
    ) == json.loads(json.dumps(expected.to_dict()))
    table = invoke("estimate", model, "--ranks", "4", "--optimizer", "SGD")
    assert f"{expected.total_parameters:,} parameters" in table
    assert all(in_units(row.state) in table for row in expected.stages)


def test_a_stage_that_gathers_nothing_has_no_largest_unit(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.zero.layout.wrap.PERSISTENCE", 100_000)  # as outside of tests
    monkeypatch.setenv("COLUMNS", "200")
    rows = invoke("estimate", model, "--ranks", "2").splitlines()
    [row] = [row for row in rows if row.startswith("│     3 │")]
    assert "│ none: all stay whole │" in row


def test_simulate_prints_the_stages_of_a_pipeline() -> None:
    options = ["simulate", "--params", "2e6", "--ranks", "4", "--pp", "2", "--seq", "16"]
    found = hf_zero.simulate(params=2e6, ranks=4, pipeline_parallel=2, sequence_length=16)
    shown = json.loads(invoke(*options, "--json"))
    assert shown["stages"] == json.loads(json.dumps(found.to_dict()))["stages"]
    table = " ".join(invoke(*options).split())
    assert "stages of the pipeline" in table
    assert all(f"{each.parameters:,}" in table for each in found.stages)


def test_simulate_prints_the_library_s_figures() -> None:
    options = ["simulate", "--params", "2e6", "--ranks", "64", "--stage", "2", "--seq", "16"]
    machine = ["--network", "100Gbit", "--flops", "1e12", "--ranks-per-host", "8"]
    found = hf_zero.simulate(
        params=2e6, ranks=64, stage=2, sequence_length=16,
        machine=Machine(1e12, network=100e9 / 8, ranks_per_host=8),
    )  # fmt: skip
    shown = json.loads(invoke(*options, *machine, "--json"))
    assert shown.pop("machine")["sources"] == dict.fromkeys(
        ("flops", "network", "ranks_per_host"), "given"
    )
    expected = json.loads(json.dumps(found.to_dict()))
    del expected["machine"]
    assert shown == expected
    assert shown["model_state_bytes"] == pytest.approx(2e6 * (2 + 14 / 64), rel=0.02)
    assert shown["peak_bytes"]["device"] > shown["model_state_bytes"]
    table = " ".join(invoke(*options, *machine).split())
    assert in_units(found.peak_bytes["device"]) in table
    assert "reduce_scatter" in table and f"{found.seconds.step:.4g}" in table


def test_estimate_says_whether_fewer_bits_pay_on_a_link(model: str) -> None:
    options = ["--ranks", "4", "--stage", "2", "--link", "100Mbit"]
    rows = json.loads(invoke("estimate", model, *options, "--json"))["link"]
    assert [(row["stage"], row["way"]) for row in rows] == [
        (2, "dense"),
        (2, "4 bits both ways"),
        (2, "1 bit after the freeze"),
    ]
    assert rows[0]["pays_below"] is None and rows[0]["seconds"] == 8 * rows[0]["bytes"] / 1e8
    shown = " ".join(invoke("estimate", model, *options).split())
    assert "each with a link of 100 Mbit/s" in shown and in_units(rows[1]["bytes"]) in shown
    with pytest.raises(ConfigError, match="--link"):
        invoke("estimate", model, *options, "--fit")


def test_estimate_takes_precision_from_a_config(model: str) -> None:
    assert (
        json.loads(
            invoke("estimate", model, "--ranks", "2", "--config", ZERO3, "--stage", "3", "--json")
        )["precision"]
        == "fp32"
    )


def test_estimate_shows_where_bytes_lie(model: str) -> None:
    options = ["--offload-optimizer", "nvme", "--moments", "int8", "--offload-param", "cpu"]
    expected = hf_zero.estimate(
        model,
        ranks=2,
        offload_optimizer={"device": "nvme", "nvme_path": ".", "moments": "int8"},
        offload_param={"device": "cpu"},
    )
    assert json.loads(invoke("estimate", model, "--ranks", "2", *options, "--json")) == json.loads(
        json.dumps(expected.to_dict())
    )
    shown = " ".join(invoke("estimate", model, "--ranks", "2", *options).split())
    assert "with offload: optimizer on nvme, int8 moments, parameters on cpu" in shown
    assert all(
        in_units(nbytes) in shown for row in expected.stages for nbytes in vars(row.tiers).values()
    )
    assert "pinned" not in invoke("estimate", model, "--ranks", "2")


def test_fit_prints_a_configuration_that_can_be_saved(model: str, tmp_path: Path) -> None:
    state = hf_zero.estimate(model, ranks=1, stage=1).at(1).state
    small = ["--device-memory", f"{state // 2}B", "--ram", "1GiB"]
    shown = invoke("estimate", model, "--ranks", "1", "--fit", *small)
    written = json.loads(shown[shown.index("\n{") :])
    assert written["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "stage 1, all on the device" in shown
    assert "needed" in shown
    assert "Activations are not known: 20% of the device" in shown
    found = json.loads(invoke("estimate", model, "--ranks", "1", "--fit", *small, "--json"))
    assert found["config"] == written and found["free"]["ram"] == 1 << 30
    (tmp_path / "saved.json").write_text(json.dumps(written))
    assert "offload_optimizer" in invoke("explain", str(tmp_path / "saved.json"))


def test_ranks_that_share_layers_and_experts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralConfig(**sizes, **heads).save_pretrained(tmp_path)
    options = ["estimate", str(tmp_path), "--ranks", "8", "--tp", "2", "--ep", "4"]
    both = hf_zero.estimate(str(tmp_path), 8, tensor_parallel=2, expert_parallel=4)
    found = json.loads(invoke(*options, "--json"))
    assert found == json.loads(json.dumps(both.to_dict()))
    alone = hf_zero.estimate(str(tmp_path), 8)
    assert both.total_parameters == alone.total_parameters
    assert both.at(0).parameters < alone.at(0).parameters / 2
    links = json.loads(invoke(*options, "--link", "1Gbit", "--json"))["link"]
    assert {row["way"] for row in links} == {"dense"}
    # what fits a rank that holds a part of the model would not fit one that holds it whole
    memory = ["--device-memory", f"{both.at(1).state * 2}B", "--ram", "1GiB", "--stage", "1"]
    written = json.loads(invoke(*options, "--fit", *memory, "--json"))["config"]
    assert written["tensor_parallel"] == {"autotp_size": 2}
    assert written["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert "offload_optimizer" not in written["zero_optimization"]
    with pytest.raises(ConfigError, match="experts cannot be spread over 3"):
        invoke(*options[:-1], "3")
    with pytest.raises(ConfigError, match=r"8 ranks cannot be 3 tensor"):
        hf_zero.estimate(str(tmp_path), 8, tensor_parallel=3)


def test_fit_shares_a_host_among_its_ranks(model: str, tmp_path: Path) -> None:
    options = f"--fit --device-memory 80GB --ram 1GiB --disk {tmp_path} --json"
    four, two = (
        json.loads(invoke(f"estimate {model} --ranks 4 --ranks-per-host {count} {options}"))["free"]
        for count in (4, 2)
    )
    assert (four["ram"], two["ram"]) == ((1 << 30) // 4, (1 << 30) // 2)
    assert four["disks"][0]["path"] == str(tmp_path)
    assert 1.5 * four["disks"][0]["nbytes"] < two["disks"][0]["nbytes"]
    assert not four["host_device"] and four["device"] == 80_000_000_000


def test_checkpoints_in_memory_are_estimated_by_the_ranks_of_a_host(
    model: str, tmp_path: Path
) -> None:
    """Copies are on the next host, where there is one."""
    config = tmp_path / "memory.json"
    memory = {"every": 10, "folder": "/dev/shm"}
    config.write_text(json.dumps({"checkpoint": {"memory": memory}}))
    options = ["estimate", model, "--ranks", "4", "--config", str(config), "--stage", "3"]
    fits = ["--fit", "--device-memory", "80GB", "--ram", "1GiB"]
    alone, pairs = (["--ranks-per-host", count] for count in ("4", "2"))

    def of(*more: str) -> int:
        (row,) = json.loads(invoke(*options, *more, "--json"))["stages"]
        assert row["tiers"]["ram"] == row["memory_checkpoints"]
        (trial,) = json.loads(invoke(*options, *fits, *more, "--json"))["tried"]
        assert trial["ram"] == row["memory_checkpoints"]
        return int(row["memory_checkpoints"])

    state = hf_zero.estimate(model, ranks=4, stage=3, precision="fp32").at(3)
    assert 2 * (state.parameters + state.optimizer) == of(*alone) == of(*pairs) // 2 > 0
    shown = " ".join(invoke(*options, *pairs).split())
    assert "in RAM, on 2 hosts of 2 ranks" in shown and in_units(of(*pairs)) in shown
    with pytest.raises(ConfigError, match=r"--ranks-per-host = 2: it describes .* leave it out"):
        invoke("estimate", "no-such-model", "--ranks", "4", *pairs)


def test_the_stage_and_the_offload_of_a_file_are_shown(model: str, tmp_path: Path) -> None:
    file = tmp_path / "zero2.json"
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"zero_optimization": section}))
    shown = invoke("estimate", model, "--ranks", "2", "--config", str(file))
    offloaded, _, whole = shown.partition("as if nothing were offloaded")
    assert "with offload: optimizer on cpu" in offloaded
    for table in (offloaded, whole):
        assert re.findall(r"^│ +(\S+) │", table, re.M) == ["0", "1", "*2", "3"]
        assert f"*: the stage of {file}." in table
    assert "*" not in invoke("estimate", model, "--ranks", "2")


@pytest.mark.parametrize(("gpus", "share"), [(0, 8), (4, 4)])
def test_fit_takes_as_many_ranks_a_host_as_it_has_gpus(
    model: str, monkeypatch: pytest.MonkeyPatch, gpus: int, share: int
) -> None:
    play_accelerator(monkeypatch, count=gpus)
    monkeypatch.setattr("hf_zero.device.free_memory.free_bytes", lambda device: 1 << 30)
    found = json.loads(
        invoke("estimate", model, "--ranks", "8", "--fit", "--ram", "8GiB", "--json")
    )["free"]
    assert found["ram"] == (8 << 30) // share and found["host_device"] is (gpus == 0)


def test_fit_takes_this_machine_as_it_is(model: str) -> None:
    found = json.loads(invoke("estimate", model, "--ranks", "1", "--fit", "--json"))
    assert found["config"]["zero_optimization"] == {"stage": 1}
    assert found["free"]["host_device"] is not torch.cuda.is_available()


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_fit_where_nothing_fits_is_code_1(model: str, as_json: list[str]) -> None:
    tiny = "--fit --device-memory 1kB --ram 1kB"
    said = invoke(f"estimate {model} --ranks 1 {tiny}", *as_json, ends_with=1)
    nothing = "nothing that was tried fits; use more ranks"
    assert json.loads(said)["config"] is None if as_json else nothing in said


@pytest.mark.parametrize("option", ["--device-memory", "--ram"])
def test_a_memory_without_its_unit_is_refused(model: str, option: str) -> None:
    refused = CliRunner().invoke(app, ["estimate", model, "--ranks", "1", "--fit", option, "80"])
    assert isinstance(refused.exception, ConfigError)
    assert f"{option} 80 is 80 bytes; write the unit: {option} 80GB" in str(refused.exception)


def test_explain_shows_every_value_with_its_source() -> None:
    rows = {
        row["key"]: row for row in json.loads(invoke("explain", ZERO3, "--ranks", "2", "--json"))
    }
    assert rows["zero_optimization.stage"]["value"] == 3
    assert "zero3.yaml" in rows["zero_optimization.stage"]["source"]
    assert rows["train_batch_size"]["value"] == 2
    assert "zero_optimization.stage" in invoke("explain", "zero1")


def test_explain_leaves_defaults_out_unless_all_are_asked_for() -> None:
    shown, every = (
        {row["key"]: row for row in json.loads(invoke("explain", ZERO3, "--json", *more))}
        for more in ([], ["--all"])
    )
    assert set(shown) < set(every) and "gradient_predivide_factor" not in shown
    left = len(every) - len(shown)
    assert f"{left} more keys have their defaults: --all shows them" in invoke("explain", ZERO3)


def test_explain_keeps_auto_beside_a_number_of_ranks(tmp_path: Path) -> None:
    """Neither a batch size that is auto nor one that follows from it is computed."""
    path = tmp_path / "ds.json"
    for micro, total in (("auto", None), (4, 8)):
        path.write_text(
            json.dumps({"train_micro_batch_size_per_gpu": micro, "bf16": {"enabled": "auto"}})
        )
        said = json.loads(invoke("explain", str(path), "--ranks", "2", "--all", "--json"))
        rows = {row["key"]: row["value"] for row in said}
        assert rows["bf16.enabled"] == "auto"
        assert rows["train_micro_batch_size_per_gpu"] == micro
        assert rows.get("train_batch_size") == total


def test_explain_shows_values_as_the_file_writes_them(tmp_path: Path) -> None:
    params = {"lr": "auto", "betas": "auto"}
    written = {"optimizer": {"type": "Adam", "params": params}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(written))
    said = invoke("explain", str(tmp_path / "ds.json"))
    assert "bf16.enabled = true\n" in said and '"Adam"' in said and "True" not in said
    (row,) = [
        row
        for row in json.loads(invoke("explain", str(tmp_path / "ds.json"), "--json"))
        if row["key"] == "optimizer.params"
    ]
    assert row["value"] == params


def test_explain_refuses_parameters_that_a_run_refuses(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": "auto", "learning_rate": 1e-3}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_step": "auto", "warmup_max_lr": "auto"}}
    file.write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    for more in ([], ["--ranks", "2"]):
        rows = json.loads(invoke("explain", str(file), "--json", *more, ends_with=1))
        found = {row["key"]: row for row in rows}
        assert found["scheduler.params"]["value"] == scheduler["params"]
        assert list(found["scheduler.params"]["value"]) == list(scheduler["params"])
        note = found["optimizer.params"]["note"]
        assert note.startswith("a run refuses it: unknown optimizer.params key")
        assert "did you mean 'warmup_num_steps'" in found["scheduler.params"]["note"]
        said = invoke("explain", str(file), *more, ends_with=1)
        assert said.endswith("a run refuses optimizer.params, scheduler.params\n")
    del optimizer["params"]["learning_rate"]
    scheduler["params"] = {"warmup_num_steps": "auto"}
    file.write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    assert "a run refuses" not in invoke("explain", str(file))


def test_explain_calls_no_key_idle_because_of_an_auto(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"bf16": {"enabled": "auto", "check_grad_overflow": True}})
    )
    assert "no effect" not in invoke("explain", str(tmp_path / "ds.json"))


def test_explain_names_the_source_of_a_value_from_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("deepspeed_config: {zero_stage: 2, gradient_clipping: 1.0}")
    lines = invoke("explain", str(tmp_path / "a.yaml")).splitlines()
    at = lines.index("zero_optimization.stage = 2")
    assert lines[at + 2] == "    (deepspeed_config.zero_stage)"


def test_explain_shows_how_two_configurations_differ() -> None:
    (row,) = json.loads(invoke("explain", "zero1", "zero3", "--json"))
    assert row == {"key": "zero_optimization.stage", "zero1": 1, "zero3": 3}
    assert "zero_optimization.stage" in invoke("explain", "zero1", "zero3")
    assert "zero1 and zero1 mean the same" in invoke("explain", "zero1", "zero1")


def test_migrate_refuses_parameters_that_a_run_refuses(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"learning_rate": 1e-3, "lr": "auto"}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_steps": 10}}
    file.write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    shown = CliRunner().invoke(app, ["migrate", str(file), "--json"])
    assert shown.exit_code == 1
    found = {row["key"]: row for row in json.loads(shown.output)["findings"]}
    assert "unknown optimizer.params key 'learning_rate'" in found["optimizer.params"]["note"]
    assert "did you mean 'warmup_num_steps'" in found["scheduler.params"]["note"]
    for section, name in ((optimizer, "learning_rate"), (scheduler, "warmup_step")):
        section["params"] = {name: "auto"}
    file.write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    said = invoke("migrate", str(file), ends_with=1)
    assert (
        "'learning_rate' for AdamW; write lr" in said and "did you mean 'warmup_num_steps'" in said
    )
    optimizer["params"] = {"lr": "auto", "betas": [0.9, 0.95]}
    scheduler["params"] = {"warmup_num_steps": "auto"}
    file.write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    assert CliRunner().invoke(app, ["migrate", str(file), "--json"]).exit_code == 0


@pytest.mark.parametrize("width", [60, 80])
def test_explain_is_as_wide_as_columns_says_and_breaks_no_key(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    lines = invoke("explain", ZERO3).splitlines()
    assert max(map(len, lines)) <= max(width, len(f"{key} ="))
    assert [line for line in lines if line.startswith(key)]
    assert key in invoke("explain", "zero1", ZERO3).splitlines()


@pytest.mark.parametrize("kind", ["another environ", "a dumb terminal"])
def test_columns_counts_where_rich_does_not_read_it(
    kind: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "another environ":  # as after `datasets.Dataset.map(num_proc=)`
        monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))
    else:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    table = [line for line in invoke("estimate", model, "--ranks", "2").splitlines() if "│" in line]
    assert {*map(len, table)} == {60}


def test_the_version_and_completion() -> None:
    assert invoke("--version") == f"hf-zero {importlib.metadata.version('hf-zero')}\n"
    asked = {**os.environ, "_HF_ZERO_COMPLETE": "source_bash"}
    shown = completed([HF_ZERO], timeout=300, check=True, env=asked)
    assert "COMPREPLY" in shown.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("init bert-m", ["bert-mlm"]),
        ("recipe show slow", ["slow-network"]),
        ("launch --preset zero", ["zero0", "zero1", "zero2", "zero3"]),
        ("launch --precision b", ["bf16"]),
        ("convert-checkpoint a b --to ", ["safetensors", "dcp", "universal"]),
        ("convert-checkpoint a b --dtype f", ["float32", "float16"]),
        ("convert-checkpoint a b --quantize int4", ["int4_weight"]),
        ("explain zero3", ["zero3"]),
        ("explain ", []),
        ("estimate m --offload-optimizer n", ["none", "nvme"]),
        ("docs lost", ["lost-host"]),
        ("docs HF_ZERO_LOG_", ["HF_ZERO_LOG_LEVEL"]),
        ("docs metrics.ena", ["metrics.enabled"]),
    ],
)
def test_values_are_completed(words: str, offered: list[str]) -> None:
    asked = {
        "_HF_ZERO_COMPLETE": "complete_bash",
        "COMP_WORDS": f"hf-zero {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    shown = CliRunner().invoke(app, [], env=asked, prog_name="hf-zero")
    assert shown.output.split() == offered


def test_smoke_trains_as_plain_pytorch_does() -> None:
    done = completed([HF_ZERO, "smoke", "--ranks", "2", "--json"], timeout=300, check=True)
    rows = json.loads(done.stdout)
    assert [(row["stage"], row["right"]) for row in rows] == [(stage, True) for stage in range(4)]


def test_smoke_says_that_it_saves_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    smoke._print([{"stage": 0, "largest_difference": 0.0, "right": True}], 2)
    assert "2 ranks, 6 steps, saved and resumed after step 3" in capsys.readouterr().out


def test_doctor_names_both_folders_where_another_package_is_installed(tmp_path: Path) -> None:
    found = doctor._own_version(tmp_path / "hf_zero")
    assert found.status == "off"
    assert re.search(rf"imported from {tmp_path}/hf_zero, but installed is \S+ at /", found.detail)
    installed = Path(re.findall(r" at (\S+): ", found.detail)[0])
    assert doctor._own_version(installed).status == "ok"


def test_smoke_finds_weights_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, make = smoke._sharded, smoke._model
    # the ranks are threads, and share torch's generator
    monkeypatch.setattr(smoke, "_model", lambda: seeded(make))

    def wrong_at_2(stage: int, *place: Any) -> Any:
        weights = trained(stage, *place)
        return weights if stage != 2 else smoke._model().state_dict()

    monkeypatch.setattr(smoke, "_sharded", wrong_at_2)
    assert run_ranks(2, lambda rank: smoke.main([])) == [smoke.WRONG, 0]
    out = capsys.readouterr().out
    assert out.count("WRONG") == 1 and "hf-zero doctor --json" in out


def test_fit_writes_its_proposal(model: str, tmp_path: Path) -> None:
    for name in ("fits.json", "fits.yaml"):
        out = str(tmp_path / name)
        fit = ["estimate", model, "--ranks", "1", "--fit", "--device-memory", "8GB", "--ram", "9GB"]
        said = invoke(*fit, "-o", out)
        assert f"written: {out}" in said
        assert ZeroConfig.from_file(out).stage in range(4)
        with pytest.raises(ConfigError, match="exists; remove it, or pass another path with -o"):
            invoke(*fit, "-o", out)


def test_a_name_that_the_hub_cannot_be_asked_for_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: Any, seconds: float) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(ConfigError, match="the Hub cannot be reached: no route to host"):
        invoke("estimate", "some/model", "--ranks", "1")


def test_convert_checkpoint_hands_its_options_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.checkpoint.convert.export import Conversion

    asked: list[Any] = []

    def convert(*arguments: Any, **options: Any) -> Conversion:
        asked.append((arguments, options))
        return Conversion(
            Path("to"), ("model.safetensors",), ("config.json",), 3, 1000, 4000,
            dtypes=("bfloat16", "float32"),
        )  # fmt: skip

    monkeypatch.setattr(hf_zero, "convert_checkpoint", convert, raising=False)
    table = invoke(
        "convert-checkpoint from to --dtype bfloat16 --max-shard-size 1GB --tag t --verify"
    )
    assert asked[0] == (
        ("from", "to", "bfloat16", "1GB", "t", None),
        {"verify": True, "only": None, "adapters": None, "workers": 2, "to": "safetensors"}
        | {"overwrite": False},
    )
    assert (
        "1,000 parameters in bfloat16, float32, 4.00 kB: model.safetensors" in table
        and "config.json" in table
    )
    assert json.loads(invoke("convert-checkpoint", "from", "to", "--json"))["files"] == [
        "model.safetensors"
    ]
    invoke("convert-checkpoint from to --only a.* --only b --whole --workers 5")
    given = {"verify": None, "only": ["a.*", "b"], "adapters": False, "workers": 5}
    assert asked[-1][1] == given | {"to": "safetensors", "overwrite": False}
    invoke("convert-checkpoint", "from", "to", "--adapters", "--overwrite")
    assert asked[-1][1]["adapters"] is True and asked[-1][1]["overwrite"] is True
    table = invoke("convert-checkpoint", "from", "to", "--to", "dcp")
    assert "training state" in table and "carried along" not in table


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with a script of this name."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize("preset", PRESETS)
def test_launch_presets_are_read_back_as_their_stage(preset: str) -> None:
    command = json.loads(
        invoke(f"launch --preset {preset} --ranks 3 --precision bf16 --json -- train.py --lr 1")
    )["command"]
    assert command[:4] == [sys.executable, "-m", LAUNCHER, "accelerate.commands.launch"]
    assert command[-3:] == ["train.py", "--lr", "1"]

    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(command[4:])
    assert args.dynamo_backend == "no"  # else accelerate warns that it was not passed
    assert (args.use_deepspeed, int(args.zero_stage), args.num_processes, args.mixed_precision) == (
        True,
        PRESETS[preset],
        3,
        "bf16",
    )
    assert args.gradient_clipping is None, "the script or the training arguments choose it"
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])


@pytest.mark.usefixtures("train_py")
def test_a_preset_takes_no_keys_from_the_default_file_of_accelerate_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands import launch

    (tmp_path / "default.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 5\n"
        "mixed_precision: bf16\nmain_process_port: 1\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_clipping: 0.5\n  offload_optimizer_device: cpu\n  metrics: {enabled: true}\n"
    )
    for path in ("commands.launch", "commands.config.config_args", "commands.config"):
        monkeypatch.setattr(
            f"accelerate.{path}.default_config_file", str(tmp_path / "default.yaml")
        )
    command = json.loads(invoke("launch --preset zero1 --ranks 2 --json train.py"))["command"]
    parsed = launch.launch_command_parser().parse_args(command[4:])
    args, _, _ = launch._validate_launch_command(parsed)
    assert args.gradient_clipping is None and args.offload_optimizer_device is None
    assert not hasattr(args, "metrics")
    assert (int(args.zero_stage), args.num_processes, args.mixed_precision) == (1, 2, "no")
    args.deepspeed_fields_from_accelerate_config = ""
    _, environment = launch.prepare_deepspeed_cmd_env(args)
    assert not {"HF_ZERO_LAUNCH_FILE", "HF_ZERO_WRITTEN_KEYS"} & environment.keys()


def test_launch_sets_keys_beside_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_zero.integrations.accelerate.plugin import written_keys

    monkeypatch.setattr(os, "execv", lambda program, arguments: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    sets = "--set metrics.enabled=true --set metrics.path=runs/a --set csv_monitor.enabled=true"
    invoke(f"launch --preset zero2 {sets} {__file__}")
    assert os.environ[LAUNCHED_BY] == f"hf-zero launch --preset zero2 {sets}"
    assert written_keys() == {
        "metrics": {"enabled": True, "path": "runs/a"}, "csv_monitor": {"enabled": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--set metrics.enabled=true", "goes with --preset"),
        ("--preset zero2 --set metrics.enabld=true", "did you mean 'metrics.enabled'"),
        ("--preset zero2 --set metrics.enabled=maybe", "is not true or false"),
        ("--preset zero2 --set metrics", "--set metrics is not KEY=VALUE"),
        ("--preset zero2 --set metrics.=1", "is not KEY=VALUE"),
        ("--preset zero2 --set metrics=1 --set metrics.enabled=true", "contradict; keep one"),
        ("--preset zero2 --set metrics.enabled=[", "not valid YAML"),
        ("--preset zero2 --set zero_optimization.stage=3", "--preset names the stage"),
        ("--preset zero2 --set bf16.enabled=true", "write --precision bf16 in place of it"),
        ("--preset zero3 --set zero_optimization.prefetch=x", "zero_optimization.prefetch"),
    ],
)
def test_keys_that_launch_does_not_set(options: str, said: str) -> None:
    refused = CliRunner().invoke(app, ["launch", *options.split(), __file__])
    assert isinstance(refused.exception, ConfigError) and said in str(refused.exception)


def test_launch_refuses_a_file_that_accelerate_does_not_read(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    said = CliRunner().invoke(app, ["launch", "--config", str(file), "--", __file__])
    assert isinstance(said.exception, ConfigError)
    assert f"deepspeed_config: {{deepspeed_config_file: {file}}}" in str(said.exception)


def test_launch_takes_a_file_and_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(
        os, "execv", lambda program, arguments: started.append((program, arguments))
    )
    invoke("launch", "--config", ZERO3, "--", "train.py")
    ((program, arguments),) = started
    assert program == sys.executable
    assert arguments[3:] == ["accelerate.commands.launch", "--config_file", ZERO3, "train.py"]


@pytest.mark.usefixtures("train_py")
def test_launch_without_preset_or_file_is_torchrun_and_the_script_s_options_are_its_own() -> None:
    plain = ["launch", "--num-procs", "3", "--json"]
    for arguments in (
        ["train.py", "--json", "--ranks", "9"],
        ["--", "train.py", "--json", "--ranks", "9"],
    ):
        command = json.loads(invoke(*plain, *arguments))["command"]
        assert command[:4] == [sys.executable, "-m", LAUNCHER, "torch.distributed.run"]
        assert command[-4:] == ["train.py", "--json", "--ranks", "9"]
        assert command[command.index("--nproc-per-node") + 1] == "3"


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize("chosen", [[], ["--preset", "zero2"]])
def test_launch_shows_what_each_host_would_run(
    chosen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    file = tmp_path / "hosts"
    file.write_text("10.9.9.1 slots=4\n10.9.9.2 slots=4\n")
    slots = "10.9.9.1:2,3@10.9.9.2:0,1"
    options = f"--hostfile {file} -i {slots} --master-port 77 --export A=1"
    said = invoke("launch", options, *chosen, "--json", "train.py")
    shown = json.loads(said)
    assert shown["meeting"] == "10.9.9.1:77" and "hush-hush" not in said
    assert [host["host"] for host in shown["hosts"]] == ["10.9.9.1", "10.9.9.2"]
    assert [host["slots"] for host in shown["hosts"]] == [[2, 3], [0, 1]]
    module = "accelerate.commands.launch" if chosen else "torch.distributed.run"
    assert all(
        host["command"][3] == module
        and {"A", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"} <= {*host["environment"]}
        for host in shown["hosts"]
    )
    if chosen:
        assert all(
            "--num_machines" in host["command"] and host["command"].count("--num_processes") == 1
            for host in shown["hosts"]
        )


def test_launch_without_gpus_takes_two_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    play_accelerator(monkeypatch, count=0)
    assert launch.default_ranks() == 2
    play_accelerator(monkeypatch, count=5)
    assert launch.default_ranks() == 5


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("estimate /no/such/model --ranks 2", "/no/such/model"),
        (f"estimate {ZERO3} --ranks 0", "ranks = 0"),
        (
            "estimate m --ranks 2 --ram 80GB",
            "--ram = '80GB': it describes a machine for --fit; add --fit",
        ),
        ("estimate m --ranks 2 --disk /a", "--disk = ['/a']: it describes a machine"),
        (
            "estimate m --ranks 2 --fit --offload-optimizer cpu",
            "--offload-optimizer = 'cpu': --fit chooses it",
        ),
        ("estimate m --ranks 2 -o a.json", "'a.json': it is for what --fit proposes; add --fit"),
        ("migrate /no/such.json", "/no/such.json"),
        ("estimate m --ranks 2 --fit --ram much", "'much' is not a number of bytes; write 80GB"),
        (
            "estimate m --ranks 2 --moments bf16",
            "--moments = 'bf16': it goes with --offload-optimizer cpu or nvme",
        ),
        (
            "estimate m --ranks 2 --offload-param disk",
            "offload_param.device = 'disk' (str) is not one of 'none', 'cpu'",
        ),
        ("simulate --ranks 2", "either a model or params"),
        ("simulate m --params 1e9 --ranks 2", "either a model or params"),
        (
            "simulate --params 1e5 --ranks 2",
            "params = 100000 is no size of a model; write a number from 1e+06 to 1e+15",
        ),
        ("simulate --params 1e6 --ranks 2 --rank 2", "rank 2 is none of 2 ranks; choose 0 to 1"),
        ("simulate --params 1e6 --ranks 2 --flops 0", "flops = 0.0 is no rate of a machine"),
        ("simulate --params 1e6 --ranks 3 --replicas 2", "replicate_size = 2"),
        ("explain /no/such.yaml", "/no/such.yaml"),
        ("estimate /no/such --ranks 2", "there is no file or folder '/no/such'; pass a model"),
        (f"estimate {ROOT} --ranks 2", "has no config.json; pass a model folder"),
        ("analyze /no/such/data", "/no/such/data does not exist"),
        (f"analyze {ZERO3}", "has the suffix .yaml; name a file with one of .parquet, .json"),
        (f"analyze {ROOT / 'LICENSE'}", "LICENSE has no suffix; name a file with one of .parq"),
        (f"analyze {ZERO3} --metric seq_len", "did you mean 'seqlen'?"),
        (f"analyze {ZERO3} --metric no.such:thing", "'no.such:thing' cannot be imported"),
        ("convert-checkpoint /no/such/run /tmp/never-written", "/no/such/run"),
        ("verify /no/such/run", "no checkpoint at /no/such/run"),
        ("verify /no/such/run --all --tag a", "leave one of them out"),
        ("report /no/such/run", "there is no folder /no/such/run"),
        (f"report {Path(ZERO3).parent}", 'train with "metrics": {"enabled": true}'),
        ("launch --preset zero9 -- x.py", "'zero9' is unknown; choose one of zero0"),
        ("launch --preset zero1 --precision int4 -- x.py", "'int4' is unknown"),
        ("launch --precision bf16 x.py", "--precision bf16 goes with --preset"),
        (f"launch --preset zero1 --config {ZERO3} x.py", "--preset zero1 and --config"),
        (
            "launch --ranks 2 --num-procs 2 x.py",
            "--ranks counts only the ranks of this machine; in place of it use --num-procs",
        ),
        ("launch --ranks 2 --hostfile /no/such/hosts x.py", "with --hostfile use --num-procs"),
        ("launch --hostfile /no/such/hosts x.py", "the hostfile /no/such/hosts cannot be read"),
        ("launch --include worker-1 x.py", "no host 'worker-1'"),
        ("launch --ranks 0 -- x.py", "--ranks 0"),
        ("launch no-such.py --lr 1", "the script no-such.py is not in "),
        ("launch --no-python no-such-program", "no-such-program is neither a program nor a file"),
        ("launch --config /no/such.yaml -- x.py", "/no/such.yaml"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    command: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-zero", *command.split(" ")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == BAD_INPUT == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hf-zero: ") and err.count("\n") == 1
    assert says in err
    if "no-such-program" in command or "no-such.py" in command:
        return  # launch --json plans for hosts that may have the script
    name, *rest = command.split(" ")
    before, after = ([name], rest) if name != "recipe" else ([name, *rest[:1]], rest[1:])
    monkeypatch.setattr(sys, "argv", ["hf-zero", *before, "--json", *after])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == BAD_INPUT
    found, err_with_json = capsys.readouterr()
    error = json.loads(found)
    assert f"hf-zero: {error['error']}\n" == err and error["type"].endswith("Error")
    assert err_with_json == ""


def test_the_plan_of_a_launch_needs_its_script() -> None:
    said = invoke("launch --ranks 2 --json no-such.py", ends_with=2)
    assert "the script no-such.py is not in" in said


def test_json_of_the_script_changes_no_error_of_its_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-zero", "launch", "no-such.py", "--json"])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert out == "" and "the script no-such.py" in err


@pytest.mark.parametrize(
    ("command", "file", "content", "says"),
    [
        ("analyze data.json", "data.json", b"", "data.json is empty; name a file"),
        ("report .", "metrics.jsonl", b"\xff\xfe\n", "has no steps in metrics.jsonl"),
        ("report metrics.jsonl", "metrics.jsonl", b"", "is a file; name the folder of a run"),
        (
            "estimate . --ranks 2",
            "config.json",
            b'{"model_type": "bert", "hidden_size": "x"}',
            "Field 'hidden_size' expected int",
        ),
    ],
)
def test_files_that_are_empty_or_damaged_are_named(
    command: str,
    file: str,
    content: bytes,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_bytes(content)
    refused = CliRunner().invoke(app, command.split())
    assert isinstance(refused.exception, HfZeroError) and says in str(refused.exception)


@pytest.mark.parametrize(
    "arguments",
    [["estimate"], ["nonsense"], ["explain", "a", "b", "c"], ["estimate", "m", "--ranks", "two"]],
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_doctor_knows_the_slot_and_the_devices() -> None:
    found = {(row["part"], row["name"]): row for row in json.loads(invoke("doctor", "--json"))}
    assert found["versions", "torch"]["detail"] == torch.__version__
    assert found["slot", "deepspeed"]["status"] == "ok"
    assert found["slot", "entry point"]["status"] == "ok"
    assert found["devices", "gloo"]["status"] == "ok"
    assert found["devices", "cuda:0" if torch.cuda.is_available() else "accelerator"]["status"] == (
        "ok" if torch.cuda.is_available() else "off"
    )
    said = invoke("doctor")
    assert "hf-zero doctor" in said and "When you open an issue, attach" in said


def test_doctor_sees_what_turns_the_slot_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("HF_ZERO_AUTOLOAD", "off")
    status = {
        finding.name: finding.status for finding in doctor.examine() if finding.part == "slot"
    }
    assert (status["TORCH_DEVICE_BACKEND_AUTOLOAD"], status["HF_ZERO_AUTOLOAD"]) == ("off", "off")


def test_doctor_shows_the_native_core_its_set_and_its_threads() -> None:
    found = {
        row["name"]: row
        for row in json.loads(invoke("doctor", "--json"))
        if row["part"] == "kernels"
    }
    if native.available():
        assert found["native core"]["status"] == "ok"
        assert found["instruction set"]["detail"].startswith(
            f"{native.instruction_set()}; this machine has "
        )
        assert found["threads"]["detail"] == f"{native.threads()}: {native.default_share().source}"
    else:
        assert found["native core"]["status"] == "off"
        assert native.why_not() in found["native core"]["detail"]


def test_doctor_tells_what_moves_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_IO", "python")
    found = {finding.name: finding for finding in doctor.examine()}["file transfers"]
    assert (found.status, found.detail) == ("off", "by python")
    monkeypatch.setenv("HF_ZERO_IO", "pigeons")
    found = {finding.name: finding for finding in doctor.examine()}["file transfers"]
    assert found.status == "broken" and "pigeons" in found.detail


def test_doctor_says_why_the_native_core_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, doctor.Finding]:
        native._loaded.cache_clear()
        return {finding.name: finding for finding in doctor.examine() if finding.part == "kernels"}

    try:
        monkeypatch.setenv("HF_ZERO_NATIVE", "0")
        assert found()["native core"].status == "off"
        assert (
            found()["native core"].detail
            == "HF_ZERO_NATIVE=0 switches it off; the torch reference runs in its place"
        )
        monkeypatch.setenv("HF_ZERO_NATIVE", "1")
        monkeypatch.setitem(sys.modules, "hf_zero._cpu", None)
        assert (
            "install hf-zero again where a C++17 compiler is on PATH"
            in found()["native core"].detail
        )
        monkeypatch.setattr(
            native, "share_of_this_rank", lambda: pytest.fail("not needed without a core")
        )
        core = SimpleNamespace(instruction_sets=lambda: ["plain"])
        monkeypatch.setitem(sys.modules, "hf_zero._cpu", core)
        monkeypatch.setenv("HF_ZERO_ISA", "mmx")
        assert found()["native core"].status == "broken"
        assert "this machine has plain" in found()["native core"].detail
    finally:
        monkeypatch.undo()
        native._loaded.cache_clear()


def test_doctor_says_why_gpu_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, doctor.Finding]:
        return {finding.name: finding for finding in doctor.examine() if finding.part == "kernels"}

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    play_accelerator(monkeypatch, count=0)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    count = len(dispatch.declared())
    assert count
    assert found()["GPU kernels"].detail == f"{count} kernels run their references: no GPU"
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    assert found()["GPU kernels"].detail.endswith("HF_ZERO_TRITON=0; unset it")
    assert found()["GPU kernels"].status == "off"
    monkeypatch.delenv("HF_ZERO_TRITON")
    stand_in = ModuleType("triton")
    stand_in.__version__ = "3.99"
    monkeypatch.setitem(sys.modules, "triton", stand_in)
    monkeypatch.setattr(dispatch, "installed", lambda: True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    assert found()["triton"].status == "off" and "unset it" in found()["triton"].detail
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    assert found()["triton"].status == "ok"
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert doctor._triton().detail == "3.99"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert found()["triton"].status == "broken"
    assert "cannot be imported: ModuleNotFoundError" in found()["triton"].detail
    monkeypatch.setattr(dispatch, "installed", lambda: False)
    assert found()["triton"].status == "off" and "pip install triton" in found()["triton"].detail


def test_doctor_tries_each_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    play_accelerator(monkeypatch)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    monkeypatch.setattr(dispatch, "installed", lambda: True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "missing_driver", lambda: "")
    monkeypatch.setattr(dispatch, "declared", lambda: {"b": "b", "a": "a"})
    monkeypatch.setattr(
        dispatch,
        "try_out",
        lambda kernel, device: "PTXASError: no" if (kernel, device.type) == ("b", "cuda") else "",
    )
    found = list(doctor._gpu_kernels())
    assert [(each.name, each.status) for each in found] == [("a", "ok"), ("b", "broken")]
    assert found[1].detail.startswith("PTXASError: no; its reference runs in its place")
    monkeypatch.setattr(
        dispatch, "missing_driver", lambda: "AssertionError: libcuda.so cannot found!"
    )
    (only,) = doctor._gpu_kernels()
    assert only.status == "off"
    assert (
        "Triton finds no driver (AssertionError: libcuda.so cannot found!); it needs" in only.detail
    )


def test_doctor_goes_on_where_a_part_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("the driver is gone\nand more")

    monkeypatch.setattr(dispatch, "declared", fails)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    found = {(row["part"], row["name"]): row for row in json.loads(result.stdout)}
    assert (
        found["kernels", "examination"]["detail"] == "ended early: RuntimeError: the driver is gone"
    )
    # before it, and of other parts
    assert found["slot", "entry point"] and found["kernels", "C++ compiler"]


def test_doctor_ends_with_1_where_a_requirement_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.requires",
        lambda name: ["no-such-package>=1", "torch>=99", "peft>=99; extra == 'test'"],
    )
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["no-such-package"].detail == "not installed; pip install 'no-such-package>=1'"
    assert findings["torch"].status == "broken" and ">=99" in findings["torch"].detail
    assert "peft" not in findings
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_doctor_in_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    (found,) = [finding for finding in doctor.examine() if finding.name == "requirements"]
    assert found.status == "off" and "imported from a folder and not installed" in found.detail
    assert not [finding for finding in doctor.examine() if finding.name == "examination"]


def test_doctor_shows_why_the_autoload_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero._autoload.failure", ImportError("half an installation"))
    found = [finding for finding in doctor.examine() if finding.part == "slot"]
    assert found[-1].detail == "ImportError: half an installation"
    assert "examination" not in [finding.name for finding in found]


def test_every_command_that_is_named_exists() -> None:
    """In messages, docstrings and documents."""
    there = {str(command.name) for command in (*app.registered_commands, *app.registered_groups)}
    files = [*ROOT.glob("hf_zero/**/*.py"), *ROOT.glob("hf_zero/**/*.md"), *ROOT.glob("*.md")]
    named = {
        (name, path.relative_to(ROOT))
        for path in files
        for name in re.findall(r"`hf-zero ([a-z][a-z-]*)", path.read_text())
    }
    assert len({name for name, _ in named}) >= 5
    assert {(name, path) for name, path in named if name not in there} == set()
