"""TRL's trainers on two ranks: what they log and what they save are those of the same script in
one plain process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers import launched, oracle
from tests.matrix.scripts import trl_material

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 600
OFTEN = (
    "sft.adapters",
    "dpo.implied",
    "dpo.resumed",
    "grpo.gathered",
    "grpo.sharded",
    "more.online",
)
SELDOM = (
    "sft.plain", "sft.assistant", "sft.packed", "sft.packed_bfd", "sft.completion", "sft.smoothed",
    "dpo.explicit", "dpo.precomputed",
    "dpo.synchronised", "dpo.adapters", "dpo.adapters_given", "dpo.adapters_precomputed",
    "reward.plain", "reward.adapters",
    "grpo.evaluated", "grpo.windows", "grpo.adapters", "grpo.judged", "grpo.rloo",
    "more.kto", "more.kto_precomputed", "more.orpo", "more.cpo", "more.distilled",
)  # fmt: skip
RELATIVE = 1e-5
# Differences of large numbers (sums of log probabilities), and losses that are zero but for
# rounding, are compared with what they are made of.
ROUNDING = {"loss": 1e-6, "eval_loss": 1e-6, "rewards/margins": 2e-5, "kl": 1e-6, "before": 1e-6}
# TRL's mean over micro-batches of their means: which rows meet in a micro-batch hangs on the number
# of ranks.
OWN_TO_A_RANK = {"grpo.windows": {"entropy"}}
FACTS = ("stage", "saved", "completions", "loaded", "loaded_here", "updates", "messages")

Report = dict[str, Any]


class Started:
    """The reports of all ranks of one launch, and those of the plain process over the same
    cases.
    """

    def __init__(self, material, folder, cases, stage, script="trl_cases.py", **keys):
        self.stage, self.folder = stage, folder
        arguments = ("--material", str(material), "--cases", ",".join(cases))
        with launched.beside(
            SCRIPTS / script, folder / "plain", *arguments, timeout=TIMEOUT
        ) as plain:
            self.ranks = launched.accelerate_launch(
                SCRIPTS / script,
                folder / "ranks",
                *arguments,
                stage=stage,
                timeout=TIMEOUT,
                **keys,
            )
            self.plain = plain()

    def compare(self, case):
        want = self.plain[case]
        numbers = [key for key in want if key not in FACTS]
        assert {"loss", "grad_norm"} <= set(numbers)
        for rank in self.ranks:
            got = rank[case]
            assert got["stage"] == self.stage
            halves = got["loaded_here"] * 2
            if case.endswith("precomputed"):  # TRL asks for a threshold below which they stay whole
                assert got["loaded"] <= halves <= 1.1 * got["loaded"], "not loaded in shards"
            else:
                assert halves == got["loaded"], "not loaded in shards"
            assert bool(got["loaded"]) == (self.stage == 3)
            for key in set(numbers) - OWN_TO_A_RANK.get(case, set()):
                assert got[key] == pytest.approx(
                    want[key], rel=RELATIVE, abs=ROUNDING.get(key, 0.0)
                ), f"{case}: {key}"
        if "completions" in want:
            for at, said in enumerate(want["completions"]):
                assert sorted(
                    text for rank in self.ranks for text in rank[case]["completions"][at]
                ) == sorted(said)
        self.compare_files(Path(self.ranks[0][case]["saved"]), Path(want["saved"]))

    def compare_files(self, got, want):
        names = [file.relative_to(want) for file in want.rglob("*.safetensors")]
        assert names, "nothing was saved"
        for name in names:
            oracle.compare_tensors(str(name), load_file(got / name), load_file(want / name))
        ids = torch.arange(24).view(2, 12) + 40
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(got)(ids).logits, loaded(want)(ids).logits, rtol=1e-4, atol=1e-5
            )


def loaded(folder):
    """The model in ``folder``, by the class that its users load it with."""
    adapters = (folder / "adapter_config.json").exists()
    if "reward" in folder.name:
        if adapters:  # their files do not say how many labels the base is to have
            return AutoPeftModelForSequenceClassification.from_pretrained(
                folder, num_labels=1
            ).eval()
        kind: Any = AutoModelForSequenceClassification
    elif adapters:
        return AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    else:
        kind = AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    trl_material.save_models(folder)
    trl_material.save_rows(folder)
    return folder


@pytest.fixture(scope="module")
def often(material, tmp_path_factory):
    return Started(material, tmp_path_factory.mktemp("often"), OFTEN, stage=3)


@pytest.mark.parametrize("case", OFTEN)
def test_as_in_one_process(case, often):
    often.compare(case)


def test_ranks_end_their_sequences_at_different_steps(often):
    for case in ("grpo.gathered", "grpo.sharded"):
        first, second = (
            [max(map(len, said)) for said in rank[case]["completions"]] for rank in often.ranks
        )
        assert first != second


@pytest.fixture(scope="module")
def seldom(material, tmp_path_factory):
    return Started(material, tmp_path_factory.mktemp("seldom"), SELDOM, stage=3)


@pytest.mark.long
@pytest.mark.parametrize("case", SELDOM)
def test_the_rest_as_in_one_process(case, seldom):
    seldom.compare(case)


@pytest.fixture(scope="module")
def below(material, tmp_path_factory):
    return Started(material, tmp_path_factory.mktemp("below"), OFTEN + SELDOM, stage=2)


@pytest.mark.long
@pytest.mark.parametrize("case", OFTEN + SELDOM)
def test_at_stage_2_as_in_one_process(case, below):
    below.compare(case)


OFFLOADED = ("sft.plain", "sft.adapters", "dpo.resumed", "grpo.sharded")


@pytest.fixture(scope="module")
def offloaded(material, tmp_path_factory):
    keys = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    return Started(material, tmp_path_factory.mktemp("offloaded"), OFFLOADED, stage=3, **keys)


@pytest.mark.long
@pytest.mark.parametrize("case", OFFLOADED)
def test_offloaded_as_in_one_process(case, offloaded):
    offloaded.compare(case)


KEYED = (
    "sft.plain",
    "sft.adapters",
    "sft.smoothed",
    "dpo.implied",
    "dpo.adapters_given",
    "reward.adapters",
    "grpo.sharded",
    "more.orpo",
)


@pytest.fixture(scope="module")
def keyed(material, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ZERO_LOG_LEVEL", "INFO")
        return Started(material, tmp_path_factory.mktemp("keyed"), KEYED, stage=3, **launched.KEYS)


@pytest.mark.long
@pytest.mark.parametrize("case", KEYED)
def test_with_fused_kernels_as_in_one_process(case, keyed):
    keyed.compare(case)


@pytest.mark.long
def test_the_head_that_trl_puts_in_is_left_and_said_to_be(keyed):
    log = (keyed.folder / "ranks" / "log.txt").read_text()
    assert "left: the model's forward is another one already, of trl.trainer.utils" in log
    assert "left: no fused head for LlamaForSequenceClassification" in log


# ---- weights sent to vLLM ----

ROLLOUTS = [
    f"{trainer}.{mode}"
    for trainer in ("grpo", "adapters", "rloo", "online")
    for mode in ("server", "colocate")
]


@pytest.fixture(scope="module")
def rollouts(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    return Started(material, folder, ROLLOUTS, stage=3, script="trl_rollouts.py")


@pytest.mark.long
@pytest.mark.parametrize("case", ROLLOUTS)
def test_rollouts_are_of_the_weights_in_training(case, rollouts):
    """A stub of vLLM draws from the weights that it was sent, one process from its own."""
    rollouts.compare(case)
    first = rollouts.ranks[0][case]
    assert first["updates"] == 3
    if case.endswith("server"):
        assert first["messages"] == 3, "one message for each update of one bucket"
