"""The recipe of pre-LN BERT: it learns at a learning rate at which the same model, post-LN, does
not.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.helpers import launched
from tests.integrations.test_recipes import RECIPES

UNKNOWING = math.log(32)  # the loss of a guess among all words


def last_loss(preset: str, output: Path, *arguments: str) -> float:
    command = ["torchrun", "--nproc_per_node", "2", "run_pre_layer_norm.py"]
    options = ["--deepspeed_config", f"{preset}.json", "--checkpoint_dir", str(output / preset)]
    log = output / f"{preset}.log"
    launched.output([*command, *options, *arguments], RECIPES / "pre-layer-norm-bert", log)
    (state,) = (output / preset).glob("iter_*/trainer_state.json")
    return float(json.loads(state.read_text())["log_history"][-1]["loss"])


@pytest.mark.long
def test_pre_ln_learns_where_post_ln_does_not(tmp_path: Path) -> None:
    assert last_loss("post", tmp_path) > 0.98 * UNKNOWING
    assert last_loss("pre", tmp_path) < 0.75 * UNKNOWING
