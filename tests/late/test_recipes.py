"""The recipes, and the tests for GPUs that need no compiler, on the simulated device, which poses
as CUDA: they pass, and there is nothing to report.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import launched
from tests.late import launch

RECIPES = launch.ROOT / "recipes"
TINY = "--vocab_size 512 --num_layers 2"
SOME = "--train_images 256 --eval_images 64 --max_train_steps 2 --logging_steps 1"
BERT = "--hidden_size 32 --max_train_steps 2 --logging_steps 1 --validation_fraction 0.005"
HELLO = "--h_dim 32 --num_iterations 2 --log_every 1 --checkpoint_dir"
PRE = "--num_layers 2 --h_dim 16 --sentence 4 --batch_size 2 --num_iterations 2 --log_every 1"
PHRASES = "--phrases 200 --eval_pairs 8 --max_steps 2 --logging_steps 1 --output_dir"
EPOCH = "--train_images 128 --batch_size 32 --max_steps 2 --max_epochs 1 --output_dir"
# The words that start each recipe for a few steps, up to its folder.
COMMANDS = {
    "bert-mlm": f"accelerate launch --config zero3.yaml run_mlm.py {TINY} {BERT} --output_dir",
    "cifar10": f"run_cifar10.py --deepspeed_config zero3.json {SOME} --output_dir",
    "gpt2": f"run_gpt2.py --deepspeed_config zero3.json {TINY} --train_iters 2 --log_interval 1 "
    "--save",
    "hello-bert": f"run_hello_bert.py --deepspeed_config zero3.json {TINY} {HELLO}",
    "translation": f"run_translation.py --deepspeed zero3.json {PHRASES}",
    "pre-layer-norm-bert": f"run_pre_layer_norm.py --deepspeed_config pre.json {PRE} "
    "--checkpoint_dir",
    "lightning": f"python run_lightning.py {EPOCH}",
}
# variables that change what is imported
OWN = {"pre-layer-norm-bert": {"TRITON_INTERPRET": "1"}}


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_trains_without_a_report(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    folder, log, words = tmp_path / "run", tmp_path / "log", COMMANDS[name].split()
    if words[0].endswith(".py"):
        words = ["torchrun", "--nproc_per_node", "2", *words]
    posed = launch.environment(as_cuda=True)
    own = launched.environment() | OWN.get(name, {})
    own |= {"LATE_REPORTS": f"{folder}-{{rank}}.json", "LATE_DEVICES": "2"}
    own |= {each: posed[each] for each in ("PYTHONPATH", "LATE_AS")}  # launchers stay without it
    own["PYTHON_EXEC"] = sys.executable if name in OWN else launch.python()
    if name == "bert-mlm":
        config = yaml.safe_load((RECIPES / name / "zero3.yaml").read_text())
        given = tmp_path / "zero3.yaml"
        given.write_text(yaml.safe_dump({**config, "use_cpu": False}))
        words[words.index("zero3.yaml")] = str(given)
    if words[0] == "python":
        own["LATE_ALL"] = posed["LATE_ALL"]
        command = [own["PYTHON_EXEC"], *words[1:], str(folder)]
    else:
        program = shutil.which(words[0], path=launched.PROGRAMS)
        assert program is not None
        starts = sys.executable if name in OWN else launched.python()
        command = [starts, program, *words[1:], str(folder)]
    with launched.running(command, RECIPES / name, log, own) as process:
        code = launched.ended(process, 500)
    assert code == 0, log.read_text()[-4000:]
    for rank in range(2):
        told = json.loads(Path(f"{folder}-{rank}.json").read_text())
        assert told["stats"]["ops"] > 100 and told["reports"] == [], told
    if name != "lightning":
        states = [*folder.glob("trainer_state.json"), *folder.glob("*/trainer_state.json")]
        history = json.loads(states[0].read_text())["log_history"]
        losses = [entry["loss"] for entry in history if "loss" in entry]
        assert len(losses) == 2 and all(map(math.isfinite, losses))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["host_memory", "engine", "offload", "activations", "ways_out", "lightning"]
)
def test_tests_for_gpus_pass(name: str, tmp_path: Path) -> None:
    launch.needs_the_device()
    own = launch.environment(
        as_cuda=True,
        HF_ZERO_BACKEND="hf_zero",
        HF_HUB_OFFLINE="1",
        LATE_DEVICES="2" if name == "lightning" else "1",
        LATE_REPORTS=f"{tmp_path}/{{rank}}-{{process}}.json",
    )
    own.pop("TRITON_INTERPRET", None)
    path = f"tests/gpu/test_{name}_on_gpu.py"
    launch.pass_tests(own, path, "-k", "not compiled", seconds=900)
    told = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert told and not any(each["reports"] for each in told), told
