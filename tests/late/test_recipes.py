"""The recipes on two ranks of the simulated device, which poses as CUDA: no report; without
dropout, the losses of CPU ranks.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import launched
from tests.late import launch

RECIPES = launch.ROOT / "recipes"
CLOSE = 2e-5  # relative, of losses in fp32

INTERPRETED = {"TRITON_INTERPRET": "1"}
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
OWN = {"pre-layer-norm-bert": INTERPRETED}  # variables that change what is imported


def run(name: str, folder: Path, as_cuda: bool) -> list[float]:
    """The losses of a recipe; on the device its ranks have used it, and have nothing to report."""
    reports = {"LATE_REPORTS": f"{folder}-{{rank}}.json", "LATE_DEVICES": "2"}
    own = launched.environment() | reports | OWN.get(name, {})
    starts = sys.executable if name in OWN else launched.python()
    words = COMMANDS[name].split()
    if words[0].endswith(".py"):
        words = ["torchrun", "--nproc_per_node", "2", *words]
    if as_cuda:
        on_device = launch.environment(as_cuda)
        own |= {each: on_device[each] for each in ("PYTHONPATH", "LATE_AS", "LATE_ALL")}
        own["PYTHON_EXEC"] = sys.executable if name in OWN else launch.python()
        if name == "lightning":
            starts = own["PYTHON_EXEC"]
        else:
            del own["LATE_ALL"]  # launchers stay without
    if as_cuda and name == "bert-mlm":
        config = yaml.safe_load((RECIPES / name / "zero3.yaml").read_text())
        folder.with_suffix(".yaml").write_text(yaml.safe_dump({**config, "use_cpu": False}))
        words[words.index("zero3.yaml")] = str(folder.with_suffix(".yaml"))
    if words[0] == "python":
        command = [starts, *words[1:], str(folder)]
    else:
        program = shutil.which(words[0], path=launched.PROGRAMS)
        assert program is not None
        command = [starts, program, *words[1:], str(folder)]
    log = folder.with_suffix(".log")
    with launched.running(command, RECIPES / name, log, own) as process:
        code = launched.ended(process, 500)
    assert code == 0, log.read_text()[-4000:]
    for rank in range(2 if as_cuda else 0):
        told: dict[str, Any] = json.loads(Path(f"{folder}-{rank}.json").read_text())
        assert told["stats"]["ops"] > 100 and told["reports"] == [], told
    if name == "lightning":
        return []
    states = [*folder.glob("trainer_state.json"), *folder.glob("*/trainer_state.json")]
    history = json.loads(states[0].read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_trains_without_a_report(name: str, tmp_path: Path) -> None:
    """Without dropout, with the losses of CPU ranks."""
    launch.needs_the_device()
    losses = run(name, tmp_path / "late", as_cuda=True)
    assert all(map(math.isfinite, losses)) and len(losses) == (0 if name == "lightning" else 2)
    if name in ("cifar10", "gpt2"):
        cpu = run(name, tmp_path / "cpu", as_cuda=False)
        assert losses == pytest.approx(cpu, rel=CLOSE)
