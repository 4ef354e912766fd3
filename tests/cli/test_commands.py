"""The commands: what they print for people and as JSON, and that bad input ends with code 2, one
line and no traceback.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli import main, smoke
from hf_zero.cli.app import BAD_INPUT, app
from hf_zero.cli.printing import in_units
from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers.meta_model import sized_model
from hf_zero.planning.simulation import Machine, Measured
from tests.cli.invoked import ROOT, ZERO3, invoke, refusal
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed
from tests.helpers.models import seeded
from tests.helpers.ranks import run_ranks

HF_ZERO = str(Path(sys.executable).with_name("hf-zero"))
COMMANDS = [
    command.name for command in app.registered_commands if command.name not in (None, "schema")
]


def plain(value: Any) -> Any:
    """``value`` as JSON has it."""
    return json.loads(json.dumps(value))


def test_each_command_is_one_line_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("--version") == f"hf-zero {(ROOT / 'VERSION').read_text().strip()}\n"
    monkeypatch.setenv("COLUMNS", "80")
    listed = invoke("--help").partition("\nCommands:\n")[2]
    names = [command.name for command in app.registered_commands]
    assert [line.split()[0] for line in listed.splitlines()] == [*names, "recipe"]
    for command in COMMANDS:
        said = " ".join(invoke(str(command), "--help").split())
        assert f"Example: hf-zero {command}" in said and "--json" in said


def test_estimate_prints_the_library_s_figures(model: str, tmp_path: Path) -> None:
    expected = hf_zero.estimate(model, ranks=4, precision="bf16", optimizer="SGD")
    command = f"estimate {model} --ranks 4 --optimizer SGD"
    assert json.loads(invoke(command, "--json")) == plain(expected.to_dict())
    table = invoke(command)
    assert f"{expected.total_parameters:,} parameters" in table
    assert all(in_units(row.state) in table for row in expected.stages)
    # the file decides the precision, and its stage and offload are shown
    file = tmp_path / "zero2.json"
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"zero_optimization": section}))
    shown = invoke(f"estimate {model} --ranks 2 --config {file}")
    offloaded, _, whole = shown.partition("as if nothing were offloaded")
    assert "with offload: optimizer on cpu" in offloaded and "fp32" in shown
    options = "--offload-optimizer nvme --moments int8 --offload-param cpu"
    away = json.loads(invoke(f"estimate {model} --ranks 2 {options} --json"))
    nvme = {"device": "nvme", "nvme_path": ".", "moments": "int8"}
    asked = {"offload_optimizer": nvme, "offload_param": {"device": "cpu"}}
    found = hf_zero.estimate(model, ranks=2, **asked)
    assert away == plain(found.to_dict())
    shown = " ".join(invoke(f"estimate {model} --ranks 2 {options}").split())
    assert "with offload: optimizer on nvme, int8 moments, parameters on cpu" in shown
    sizes = {nbytes for row in found.stages for nbytes in vars(row.tiers).values()}
    assert all(in_units(nbytes) in shown for nbytes in sizes)
    for table in (offloaded, whole):
        assert re.findall(r"^│ +(\S+) │", table, re.M) == ["0", "1", "*2", "3"]
        assert f"*: the stage of {file}." in table
    assert "*" not in invoke(f"estimate {model} --ranks 2")


def test_simulate_measures_what_the_configuration_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences of a micro-batch and the precision, which the simulated step has, too, and its
    model, which is built once.
    """
    measured = Measured("model.layers.0", 2.0, 1e9, 1e-5, 2, 1e-3, 1e8, 0.25, False)
    calls, built = list[tuple[object, ...]](), list[float]()

    def build(parameters: float) -> torch.nn.Module:
        built.append(parameters)
        return sized_model(parameters)

    def measure(module: object, *arguments: object) -> Measured:
        calls.append(arguments)
        return measured

    monkeypatch.setattr("hf_zero.planning.simulation.measure", measure)
    monkeypatch.setattr("hf_zero.planning.simulation.simulating.sized_model", build)
    config = tmp_path / "zero.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": True}}))
    command = "simulate --params 2M --ranks 2 --seq 16 --measure"
    invoke(f"{command} --config {config}")
    invoke(f"{command} --config {config} --micro-batch 3")
    invoke(f"{command} --precision fp32")
    assert calls == [(8, 16, torch.float16), (3, 16, torch.float16), (1, 16, torch.float32)]
    assert built == [2e6] * 3


def test_simulate_prints_the_library_s_figures() -> None:
    assert "2,00" in invoke("estimate --params 2M --ranks 8")
    command = "simulate --params 2M --ranks 64 --stage 2 --seq 16"
    command += " --network 100Gbit --flops 1e12 --ranks-per-host 8"
    machine = Machine(1e12, network=100e9 / 8, ranks_per_host=8)
    found = hf_zero.simulate(params=2e6, ranks=64, stage=2, sequence_length=16, machine=machine)
    shown = json.loads(invoke(command, "--json"))
    given = dict.fromkeys(("flops", "network", "ranks_per_host"), "given")
    assert shown.pop("machine")["sources"] == given
    expected = plain(found.to_dict())
    del expected["machine"]
    assert shown == expected
    assert shown["model_state_bytes"] == pytest.approx(2e6 * (2 + 14 / 64), rel=0.03)
    assert shown["peak_bytes"]["device"] > shown["model_state_bytes"]
    table = " ".join(invoke(command).split())
    assert in_units(found.peak_bytes["device"]) in table
    assert "reduce_scatter" in table and f"{found.seconds.step:.4g}" in table
    stages = " ".join(invoke("simulate --params 1e6 --ranks 2 --pp 2 --seq 16").split())
    assert "stages of the pipeline" in stages


def test_estimate_says_whether_fewer_bits_pay_on_a_link(model: str) -> None:
    command = f"estimate {model} --ranks 4 --stage 2 --link 100Mbit"
    rows = json.loads(invoke(command, "--json"))["link"]
    ways = ["dense", "4 bits both ways", "1 bit after the freeze"]
    assert [(row["stage"], row["way"]) for row in rows] == [(2, way) for way in ways]
    assert rows[0]["pays_below"] is None and rows[0]["seconds"] == 8 * rows[0]["bytes"] / 1e8
    shown = " ".join(invoke(command).split())
    assert "each with a link of 100 Mbit/s" in shown and in_units(rows[1]["bytes"]) in shown
    assert "--link" in refusal(f"{command} --fit")


def test_ranks_that_share_layers_and_experts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralConfig(**sizes, **heads).save_pretrained(tmp_path)
    command = f"estimate {tmp_path} --ranks 8 --tp 2 --ep 4"
    both = hf_zero.estimate(str(tmp_path), 8, tensor_parallel=2, expert_parallel=4)
    assert json.loads(invoke(command, "--json")) == plain(both.to_dict())
    alone = hf_zero.estimate(str(tmp_path), 8)
    assert both.total_parameters == alone.total_parameters
    assert both.at(0).parameters < alone.at(0).parameters / 2
    links = json.loads(invoke(command, "--link", "1Gbit", "--json"))["link"]
    assert {row["way"] for row in links} == {"dense"}
    # what fits a rank that holds a part of the model would not fit one that holds it whole
    memory = f"--device-memory {both.at(1).state * 2}B --ram 1GiB --stage 1"
    written = json.loads(invoke(command, "--fit", memory, "--json"))["config"]
    assert written["tensor_parallel"] == {"autotp_size": 2}
    assert written["expert_parallel"] == {"enabled": True, "autoep_size": 4}
    assert "offload_optimizer" not in written["zero_optimization"]
    assert "experts cannot be spread over 3" in refusal(f"{command[:-1]}3")
    with pytest.raises(ConfigError, match=r"8 ranks cannot be 3 tensor"):
        hf_zero.estimate(str(tmp_path), 8, tensor_parallel=3)


def test_checkpoints_in_memory_are_estimated_by_the_ranks_of_a_host(
    model: str, tmp_path: Path
) -> None:
    """Copies are on the next host, where there is one."""
    config = tmp_path / "memory.json"
    memory = {"every": 10, "folder": "/dev/shm"}
    config.write_text(json.dumps({"checkpoint": {"memory": memory}}))
    command = f"estimate {model} --ranks 4 --config {config} --stage 3"
    alone, pairs = (f"--ranks-per-host {count}" for count in (4, 2))

    def of(more: str) -> int:
        (row,) = json.loads(invoke(command, more, "--json"))["stages"]
        assert row["tiers"]["ram"] == row["memory_checkpoints"]
        fit = "--fit --device-memory 80GB --ram 1GiB --json"
        (trial,) = json.loads(invoke(command, more, fit))["tried"]
        assert trial["ram"] == row["memory_checkpoints"]
        return int(row["memory_checkpoints"])

    state = hf_zero.estimate(model, ranks=4, stage=3, precision="fp32").at(3)
    assert 2 * (state.parameters + state.optimizer) == of(alone) == of(pairs) // 2 > 0
    shown = " ".join(invoke(command, pairs).split())
    assert "in RAM, on 2 hosts of 2 ranks" in shown and in_units(of(pairs)) in shown
    shown = " ".join(invoke(command, "--ranks-per-host 8").split())
    assert "in RAM, on 1 host of 4 ranks" in shown
    said = refusal(f"estimate no-such-model --ranks 4 {pairs}")
    assert "--ranks-per-host = 2: it describes" in said and "leave it out" in said


def test_fit_writes_a_configuration_that_can_be_saved(model: str, tmp_path: Path) -> None:
    state = hf_zero.estimate(model, ranks=1, stage=1).at(1).state
    command = f"estimate {model} --ranks 1 --fit --device-memory {state // 2}B --ram 1GiB"
    shown = invoke(command)
    written = json.loads(shown[shown.index("\n{") :])
    assert written["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "stage 1, all on the device" in shown and "needed" in shown
    assert "Activations are not known: 20% of the device" in shown
    found = json.loads(invoke(command, "--json"))
    assert found["config"] == written and found["free"]["ram"] == 1 << 30
    out = tmp_path / "fits.yaml"
    assert f"written: {out}" in invoke(command, f"-o {out}")
    assert ZeroConfig.from_file(out).offload_optimizer.device == "cpu"
    said = refusal(f"{command} -o {out}")
    assert "exists; remove it, or pass another path with -o" in said


def test_fit_where_nothing_fits_is_code_1(model: str) -> None:
    command = f"estimate {model} --ranks 1 --fit --device-memory 1kB --ram 1kB"
    assert json.loads(invoke(command, "--json", ends_with=1))["config"] is None
    assert "nothing that was tried fits; use more ranks" in invoke(command, ends_with=1)
    if not kinds.device_count():
        said = invoke(f"estimate {model} --ranks 1 --fit --ram 1kB", ends_with=1)
        assert "describe one with --device-memory 80GB and its host with --ram 512GB" in said
    for option in ("--device-memory", "--ram"):
        said = refusal(f"estimate {model} --ranks 1 --fit {option} 80")
        assert f"{option} 80 is 80 bytes; write the unit: {option} 80GB" in said


COMPLETED = {
    "init bert-m": "bert-mlm",
    "recipe show slow": "slow-network",
    "convert-checkpoint a b --to ": "safetensors dcp universal",
    "explain zero3": "zero3",
    "explain ": "",
    "estimate m --offload-optimizer n": "none nvme",
    "docs lost": "lost-host",
    "docs metrics.ena": "metrics.enabled",
}


@in_one_item(COMPLETED)
def test_values_are_completed(words: str) -> None:
    asked = {
        "_HF_ZERO_COMPLETE": "complete_bash",
        "COMP_WORDS": f"hf-zero {words}",
        "COMP_CWORD": str(len(words.split(" "))),
    }
    shown = CliRunner().invoke(app, [], env=asked, prog_name="hf-zero")
    assert shown.output.split() == COMPLETED[words].split()


@pytest.mark.long
def test_smoke_trains_as_plain_pytorch_does() -> None:
    done = completed([HF_ZERO, "smoke", "--ranks", "2", "--json"], timeout=300, check=True)
    rows = json.loads(done.stdout)
    assert [(row["stage"], row["right"]) for row in rows] == [(stage, True) for stage in range(4)]


# A command, and after "=>" a part of its only line.
BAD = f"""
estimate {ZERO3} --ranks 2000000 => ranks = 2000000
estimate m --ranks 2 --fit -o a.txt => -o a.txt: the suffix decides the format; write .json or
estimate m --ranks 2 --ram 80GB => --ram = '80GB': it describes a machine for --fit; add --fit
estimate m --ranks 2 --fit --offload-optimizer cpu => --offload-optimizer = 'cpu': --fit chooses it
estimate m --ranks 2 -o a.json => 'a.json': it is for what --fit proposes; add --fit
estimate m --ranks 2 --fit --disk {ZERO3} => --disk {ZERO3}: {ZERO3} is no folder; pass one
estimate m --ranks 2 --fit --disk {ZERO3}/a/b => --disk {ZERO3}/a/b: {ZERO3} is no folder; pass one
estimate m --ranks 2 --link 1GB => --link: '1GB' is no number of bits a second
estimate m --ranks 2 --fit --ram much => --ram: 'much' is not a number of bytes; write 80GB
estimate m --ranks 2 --moments bf16 => --moments = 'bf16': it goes with --offload-optimizer cpu
estimate m --ranks 2 --offload-optimizer none --moments bf16 => --moments = 'bf16': it goes with
estimate m --ranks 2 --offload-param disk => offload_param.device = 'disk' (str) is not one of
estimate /no/such --ranks 2 => there is no file or folder '/no/such'; pass a model
estimate {ROOT} --ranks 2 => has no config.json; pass a model folder
migrate /no/such.json => /no/such.json
simulate --ranks 2 => either a model or params
simulate --params 1e5 --ranks 2 => params = 100000 is no size of a model; write a number from 1e+06
simulate --params 1e6 --ranks 2 --rank 2 => rank 2 is none of 2 ranks; choose 0 to 1
simulate --params 1e6 --ranks 2 --measure --precision foo => precision 'foo' is unknown
simulate --params 1e6 --network 5GB => --network: '5GB' is no number of bits a second; write 1Gbit
simulate --params 1e6 --measure --disk x => --disk: 'x' is no number of bits a second
simulate --params 1e6 --ranks 2 --tp 2 --measure => measured rates are of whole blocks
simulate --params 1e6 --ranks 3 --replicas 2 => replicate_size = 2
analyze /no/such/data => /no/such/data does not exist
analyze {ZERO3} => has the suffix .yaml; name a file with one of .parquet, .json
analyze {ROOT / "LICENSE"} => LICENSE has no suffix; name a file with one of .parq
analyze {ZERO3} --metric seq_len => did you mean 'seqlen'?
analyze {ZERO3} --metric no.such:thing => 'no.such:thing' cannot be imported
convert-checkpoint /no/such/run /tmp/never-written => /no/such/run
estimate --ranks 2 => pass a model, or --params 7B
estimate m --params 7B --ranks 2 => a model and --params are given
estimate --params 1K --ranks 2 => params = 1000 is no size of a model
verify /no/such/run => no checkpoint at /no/such/run
verify /no/such/run --all --tag a => leave one of them out
report /no/such/run => there is no folder /no/such/run
report {Path(ZERO3).parent} => train with "metrics": {{"enabled": true}}
launch --preset zero1 --precision int4 -- x.py => 'int4' is unknown
launch --precision bf16 x.py => --precision bf16 goes with --preset
launch --preset zero1 --config {ZERO3} x.py => --preset zero1 and --config
launch --preset zero1 --stage 3 x.py => --stage 3 and --preset zero1: write one of them
launch --stage 1 --config {ZERO3} x.py => --preset zero1 and --config
launch --ssh-port 2222 x.py => --ssh-port = 2222: no host is reached through ssh
launch --ssh rsh --node-rank 0 x.py => --ssh = 'rsh': no host is reached through ssh
train no.yaml --script --resume => --script only prints it; leave --resume out
launch --ranks 2 --num-procs 2 x.py => --ranks counts only the ranks of this machine
launch --ranks 2 --hostfile /no/such/hosts x.py => with --hostfile use --num-procs
launch --include worker-1 x.py => no host 'worker-1'
launch --ranks 0 -- x.py => --ranks 0
launch no-such.py --lr 1 => the script no-such.py is not in
launch --no-python no-such-program => no-such-program is neither a program nor a file
"""


def ended(monkeypatch: pytest.MonkeyPatch, line: str) -> object:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["hf-zero", *line.split(" ")])
    with pytest.raises(SystemExit) as raised:
        main()
    return raised.value.code


def test_bad_input_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set[str]()
    for row in BAD.strip().splitlines():
        line, said = row.split(" => ")
        assert ended(monkeypatch, line) == BAD_INPUT == 2, line
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("hf-zero: ") and err.count("\n") == 1, (line, err)
        assert said in err, (line, err)
        name, _, rest = line.partition(" ")
        if name in seen:
            continue
        seen.add(name)
        assert ended(monkeypatch, f"{name} --json {rest}") == BAD_INPUT
        found, err_with_json = capsys.readouterr()
        error = json.loads(found)
        assert f"hf-zero: {error['error']}\n" == err and error["type"].endswith("Error")
        assert err_with_json == ""
    # --json of the script changes no error of its launch
    assert ended(monkeypatch, "launch no-such.py --json") == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and "the script no-such.py" in err
    for line in (
        "estimate",
        "nonsense",
        "explain a b c",
        "estimate m --ranks two",
        "estimate --params seven --ranks 2",
    ):
        assert ended(monkeypatch, line) == 2


def test_files_that_are_empty_or_damaged_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = b'{"model_type": "bert", "hidden_size": "x"}'
    for command, file, content, said in (
        ("analyze data.json", "data.json", b"", "data.json is empty; name a file"),
        ("report .", "metrics.jsonl", b"\xff\xfe\n", "metrics.jsonl has no steps yet; call again"),
        ("report metrics.jsonl", "metrics.jsonl", b"", "is a file; name the folder of a run"),
        ("estimate . --ranks 2", "config.json", config, "Field 'hidden_size' expected int"),
    ):
        Path(file).write_bytes(content)
        assert said in refusal(command)


def test_a_stage_that_gathers_nothing_has_no_largest_unit(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.zero.layout.wrap.PERSISTENCE", 100_000)  # as outside of tests
    monkeypatch.setenv("COLUMNS", "200")
    rows = invoke("estimate", model, "--ranks", "2").splitlines()
    [row] = [row for row in rows if row.startswith("│     3 │")]
    assert "│ none: all stay whole │" in row


def test_smoke_finds_a_nan_in_any_tensor() -> None:
    whole = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for name in whole:
        difference = smoke.largest_difference(whole | {name: torch.tensor([0.0, math.nan])}, whole)
        assert math.isnan(difference)
    assert smoke.largest_difference(whole | {"b": torch.tensor([0.0, -2.0])}, whole) == 2


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
    assert out.count("WRONG") == 1 and "hf-zero doctor --probe --json" in out
    smoke._print([{"stage": 0, "largest_difference": 0.0, "right": True}], 2)
    assert "2 ranks, 6 steps, saved and resumed after step 3" in capsys.readouterr().out


ENDS = """
import os, sys
from hf_zero.cli import smoke

def main(arguments):
    if arguments == ["raises"] and os.environ["RANK"] == "1":
        raise ValueError("of rank 1")
    return int(arguments[0]) if os.environ["RANK"] == "1" else 0

smoke.main = main
for argument in ("0", "5", "raises"):
    print(smoke.fork(2, {"HOW": "forked"}, [argument]), os.environ["HOW"], flush=True)
"""


def test_forked_ranks_of_smoke_end_with_the_code_of_the_one_that_failed() -> None:
    done = completed([sys.executable, "-c", ENDS])
    assert done.stdout.splitlines() == ["0 forked", "5 forked", "1 forked"], done.stderr
    assert "ValueError: of rank 1" in done.stderr


def test_a_name_that_the_hub_cannot_be_asked_for_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: Any, seconds: float) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    said = refusal("estimate some/model --ranks 1")
    assert "the Hub cannot be reached: no route to host" in said
