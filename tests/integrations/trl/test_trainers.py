"""TRL's trainers with LoRA on one rank at stage 3, against the same trainers without an engine, and
the weights that they send to vLLM.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import load_dataset
from packaging.version import Version
from peft import LoraConfig
from transformers import set_seed

from hf_zero.engine import Engine
from hf_zero.ops.deferred import DeferredOutput, tensor
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import on_ranks, run_steps
from tests.helpers.trainers import assert_same_training, options
from tests.helpers.training import adamw
from tests.integrations.trl.drawing import DrawingLlama, Letters
from tests.integrations.trl.material import save_model, save_rows


def trainer_of(kind: str) -> tuple[Any, Any]:
    """Return a trainer of TRL and the class of its arguments; before 1.0 some import mergekit
    beside Transformers 5, installed or not.
    """
    try:
        return getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    except RuntimeError as error:
        pytest.skip(f"TRL {trl.__version__}: {error}")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    save_model(folder)
    save_rows(folder)
    return folder


def rows_of(material: Path, folder: Path, kind: str) -> Any:
    file, cache = str(material / "rows.jsonl"), str(folder / "cache")
    rows = load_dataset("json", data_files=file, split="train", cache_dir=cache)
    return rows.select_columns("prompt").rename_column("prompt", "text") if kind == "sft" else rows


def arguments(config: Any, folder: Path, **changes: Any) -> Any:
    """Return arguments of a trainer. Without a launcher TRL 0.29 to 1.9 load models with a
    device_map, which Transformers refuses at stage 3.
    """
    return config(**options(folder, bf16=False, model_init_kwargs={"device_map": None}, **changes))


def test_adapters_train_as_without_an_engine(material: Path, tmp_path: Path) -> None:
    """Those of SFT: a training file of test_training_files.py."""
    trainer, config = trainer_of("DPO")
    rows = rows_of(material, tmp_path, "dpo")

    def trained(**changes: Any) -> Any:
        set_seed(3)  # TRL makes adapters before the Trainer seeds
        args = arguments(config, tmp_path, max_length=64, **changes)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        base = str(material / "model")
        run = trainer(base, args=args, train_dataset=rows, peft_config=lora)
        run.train()
        return run

    plain = trained()
    run = trained(deepspeed={"zero_optimization": {"stage": 3}})
    assert isinstance(run.model_wrapped, Engine) and run.model_wrapped.stage == 3
    assert_same_training(run, plain)


GRPO = {"beta": 0.1, "top_entropy_quantile": 0.8, "temperature": 0.9}
GRPO |= {"num_generations": 2, "max_completion_length": 12}


# In 1.9, SFT with label smoothing fails without an engine, too, and GRPO computes whole logits.
IN_1_9 = Version(trl.__version__).release[:2] == (1, 9)
SMOOTHED = [] if IN_1_9 else [("sft", {"label_smoothing_factor": 0.1, "max_length": 64})]


@in_turn("kind, more", [*SMOOTHED, ("grpo", GRPO)])
def test_losses_without_whole_logits(
    kind: str, more: dict[str, Any], material: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """TRL computes most losses in chunks itself, and those with label smoothing from logits."""
    trainer, config = trainer_of(kind.upper())
    rows = rows_of(material, tmp_path, kind)

    def trained(**changes: Any) -> Any:
        args = arguments(config, tmp_path, **more, **changes)
        model: Any = str(material / "model")
        given: dict[str, Any] = {"reward_funcs": Letters()} if kind == "grpo" else {}
        if kind == "grpo":  # tokens hang on the row alone
            model = DrawingLlama.from_pretrained(model)
        run = trainer(model, args=args, train_dataset=rows, **given)
        run.train()
        return run

    plain, computed = trained(), []
    materialize = DeferredOutput.materialize
    monkeypatch.setattr(tensor, "rows_of_a_chunk", lambda *_: 5)
    monkeypatch.setattr(
        DeferredOutput, "materialize", lambda one: computed.append(one.shape) or materialize(one)
    )
    run = trained(deepspeed={"zero_optimization": {"stage": 3}, "kernels": ["loss"]})
    assert IN_1_9 or not computed
    assert_same_training(run, plain)


class Rollouts:
    """vLLM as TRL's trainers see it: what was sent to the server, or loaded beside the trainer."""

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self
        self.model = self

    def load_weights(self, named: Any) -> None:
        for name, value in named:
            assert name not in self.sent
            self.sent[name] = value

    def update_named_params(self, infos: Any, named: Any) -> None:
        values = list(named)
        told = [(name, str(v.dtype).removeprefix("torch."), list(v.shape)) for name, v in values]
        assert told == infos
        self.load_weights(values)

    def reset_prefix_cache(self) -> None:
        """Weights are whole."""


@in_turn("mode, stage", [("server", 3), ("colocate", 3), ("server", 0)])
def test_rollouts_are_of_the_weights_in_training(mode: str, stage: int) -> None:
    """By GRPO's and RLOO's way to send weights, and by online DPO's, after each of two steps."""
    if Version(trl.__version__) < Version("1.11"):
        pytest.skip("this release of TRL gathers parameter by parameter")
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    def run(rank: int, model: Any) -> None:
        engine = start(model, adamw(model), config_of(stage))
        rollouts = Rollouts()
        trainer: Any = SimpleNamespace(
            model=model, mode=mode, vllm_mode=mode, llm=rollouts, vllm_client=rollouts,
            accelerator=SimpleNamespace(is_main_process=rank == 0),
            enable_sleep_mode=False, _weight_metadata=None,
        )  # fmt: skip
        trainer._iter_named_params = partial(VLLMGeneration._iter_named_params, trainer)
        for step in range(2):
            run_steps(engine, rank, [step])
            want = full_weights(engine)
            for send in (VLLMGeneration.sync_weights, OnlineDPOTrainer._move_model_to_vllm_inner):
                rollouts.sent.clear()
                send(trainer)
                if mode == "server" and rank:
                    assert not rollouts.sent
                    continue
                assert rollouts.sent.keys() == want.keys()
                assert all(torch.equal(rollouts.sent[name], want[name]) for name in want)
        engine.destroy()

    on_ranks(2, run)
