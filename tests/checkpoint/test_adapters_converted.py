"""Adapters out of checkpoints: the files that PEFT's own save_pretrained writes of the same
model, and what loads from them.
"""

from __future__ import annotations

import copy
import json
import socket
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.integrations.peft import adapters
from tests.checkpoint.jobs import Engine, Job, run, train_some
from tests.helpers.adapters import KINDS, llama
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    llama().save_pretrained(folder)
    return folder


def adapted(base: Path, config: Any, *others: str) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(type(llama()).from_pretrained(base), config)
    for name in others:
        model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            # or else it is zeros, and nothing tells two of them apart
            torch.nn.init.normal_(parameter)
    return model


def saved(folder: Path, model: Any, **options: Any) -> Any:
    """``model`` is trained on two ranks and saved by them; it comes back with the values that
    were saved.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    def action(engine: Engine) -> Path:
        train_some(engine)
        return checkpoint.save(engine, folder, **options)

    run(Job(2, 3, frozen=lambda name: name in frozen), lambda: copy.deepcopy(model), action)
    if not options:
        checkpoint.load_state_dict_from_zero_checkpoint(model, folder)
    return model


def same_folders(ours: Path, theirs: Path) -> None:
    got = load_file(ours / "adapter_model.safetensors")
    want = load_file(theirs / "adapter_model.safetensors")
    assert set(got) == set(want)
    assert all(
        got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]) for name in want
    )
    read = [json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, theirs)]
    for config in read:
        config["target_modules"] = sorted(config.get("target_modules") or [])  # a set, in any order
    assert read[0] == read[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, base: Path, kind: str) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS[kind]()))
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert done.files == ("adapter_model.safetensors",) and "adapter_config.json" in done.carried
    model.save_pretrained(tmp_path / "peft")
    same_folders(tmp_path / "out", tmp_path / "peft")
    assert not {"config.json", "generation_config.json"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }


@pytest.mark.parametrize(
    "kind", ["LoRA", "DoRA", "LoRA and a module saved whole", "LoRA on the embedding", "IA3"]
)
def test_peft_loads_them(tmp_path: Path, base: Path, kind: str) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS[kind]())).eval()
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(
        type(llama()).from_pretrained(base), tmp_path / "out"
    ).eval()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.long
def test_of_a_compiled_model(tmp_path: Path, base: Path) -> None:
    model = adapted(base, KINDS["LoRA"]())
    saved(tmp_path / "run", torch.compile(model, backend="eager"))
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert done.files == ("adapter_model.safetensors",)
    model.save_pretrained(tmp_path / "peft")
    same_folders(tmp_path / "out", tmp_path / "peft")


def test_prompts(tmp_path: Path, base: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = saved(tmp_path / "run", adapted(base, config))
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "peft")
    same_folders(tmp_path / "out", tmp_path / "peft")


def test_several_adapters_each_in_its_folder(tmp_path: Path, base: Path) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS["LoRA"](), "other"))
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert set(done.files) == {"adapter_model.safetensors", "other/adapter_model.safetensors"}
    model.save_pretrained(tmp_path / "peft")
    same_folders(tmp_path / "out", tmp_path / "peft")
    same_folders(tmp_path / "out" / "other", tmp_path / "peft" / "other")
    done = convert_checkpoint(tmp_path / "run", tmp_path / "one", only="*.other.*")
    assert done.files == ("other/adapter_model.safetensors",)
    assert not (tmp_path / "one" / "adapter_config.json").exists()


def test_an_embedding_that_was_resized_is_written_with_them(tmp_path: Path, base: Path) -> None:
    grown = type(llama()).from_pretrained(base)
    grown.resize_token_embeddings(40)
    model = saved(tmp_path / "run", peft.get_peft_model(grown, KINDS["LoRA"]()))
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "peft")
    assert any(
        "embed_tokens" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors")
    )
    same_folders(tmp_path / "out", tmp_path / "peft")


def test_an_adapter_that_transformers_added(tmp_path: Path, base: Path) -> None:
    model = type(llama()).from_pretrained(base)
    model.add_adapter(KINDS["LoRA"]())
    saved(tmp_path / "run", model)
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "theirs")
    got, want = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "theirs")
    )
    assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)


def test_whole_and_in_16_bits_on_request(tmp_path: Path, base: Path) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS["LoRA"]()))
    assert convert_checkpoint(tmp_path / "run", tmp_path / "whole", adapters=False).files == (
        "model.safetensors",
    )
    assert set(load_file(tmp_path / "whole" / "model.safetensors")) == set(model.state_dict())
    convert_checkpoint(tmp_path / "run", tmp_path / "half", "bfloat16")
    assert {
        tensor.dtype
        for tensor in load_file(tmp_path / "half" / "adapter_model.safetensors").values()
    } == {torch.bfloat16}
    done = checkpoint.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "script"
    )
    assert (done / "model.safetensors").is_file()
    assert not (done / "adapter_model.safetensors").exists()


def test_saved_without_the_base(tmp_path: Path, base: Path) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS["LoRA"]()), exclude_frozen_parameters=True)
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == set(
        peft.get_peft_model_state_dict(model)
    )


def test_a_frozen_adapter_that_was_left_out_at_the_save(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    model = adapted(base, KINDS["LoRA"](), "other")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    saved(tmp_path / "run", model, exclude_frozen_parameters=True)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files == (
        "adapter_model.safetensors",
    )
    assert "left out: 'other' lacks base_model." in caplog.text
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    saved(tmp_path / "none", model, exclude_frozen_parameters=True)
    with pytest.raises(
        CheckpointError,
        match=r"no adapter that is whole: .* save it without exclude_frozen_parameters",
    ):
        convert_checkpoint(tmp_path / "none", tmp_path / "out")


def test_what_the_names_of_a_model_that_is_none_of_pefts_do_not_say(
    tmp_path: Path, base: Path
) -> None:
    saved(tmp_path / "run", type(llama()).from_pretrained(base))
    with pytest.raises(
        CheckpointError,
        match=r"holds no adapter that PEFT made; convert it whole \(adapters=False, --whole\)",
    ):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", adapters=True)


def forget_adapters(run_folder: Path) -> None:
    """Take the description out of the manifest, as if another program had written the
    checkpoint.
    """
    path = next(run_folder.glob("global_step*")) / "manifest.json"
    content = json.loads(path.read_text())
    content["export"].pop("adapters")
    del content["digest"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "kind", ["LoRA", "DoRA", "LoRA and a module saved whole", "LoRA and some tokens", "IA3"]
)
def test_names_alone_with_the_configuration_beside(tmp_path: Path, base: Path, kind: str) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS[kind]()))
    forget_adapters(tmp_path / "run")
    model.save_pretrained(tmp_path / "peft")
    (tmp_path / "run" / "adapter_config.json").write_bytes(
        (tmp_path / "peft" / "adapter_config.json").read_bytes()
    )
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    same_folders(tmp_path / "out", tmp_path / "peft")


def test_names_alone_are_not_enough(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    saved(tmp_path / "run", adapted(base, KINDS["LoRA"]()))
    forget_adapters(tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=r"the adapter 'default' and no adapter_config.json lies beside it; .* put the",
    ):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", adapters=True)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files == ("model.safetensors",)
    assert "converted whole, under the names of the wrapped model" in caplog.text
    beside = tmp_path / "run" / "adapter_config.json"
    for content in ({"peft_type": "LORA", "bias": "all"}, {"peft_type": "VBLORA"}):
        beside.write_text(json.dumps(content))
        with pytest.raises(
            CheckpointError,
            match=r"adapter_config.json describes an adapter of kind .*, whose "
            r"tensors their names do not",
        ):
            convert_checkpoint(tmp_path / "run", tmp_path / "out", adapters=True)
    for text in ("[", "[]"):
        beside.write_text(text)
        with pytest.raises(
            CheckpointError, match=r"adapter_config.json is no JSON object .*fix or remove it"
        ):
            convert_checkpoint(tmp_path / "run", tmp_path / "out")


def test_an_adapter_whose_file_is_computed(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save goes on, and says what the converter will do."""
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    config = peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    )
    saved(tmp_path / "run", adapted(base, config))
    assert "adapter 'default'" in caplog.text
    assert "for the adapter alone use save_pretrained" in caplog.text
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files == ("model.safetensors",)


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b"])
def test_an_adapter_whose_name_leads_out_of_the_folder(
    tmp_path: Path, base: Path, name: str
) -> None:
    saved(tmp_path / "run", adapted(base, KINDS["LoRA"]()))
    path = next((tmp_path / "run").glob("global_step*")) / "manifest.json"
    content = json.loads(path.read_text())
    content["export"]["adapters"] = {name: content["export"]["adapters"]["default"]}
    del content["digest"]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out")


def test_a_pattern_for_what_is_no_adapter(tmp_path: Path, base: Path) -> None:
    saved(tmp_path / "run", adapted(base, KINDS["LoRA"]()))
    with pytest.raises(
        ConfigError, match=r"only='\*\.mlp\.\*' fits no tensor.*pass adapters=False \(--whole\)"
    ):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", only="*.mlp.*")
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out", only="*.mlp.*", adapters=False)
    assert done.tensors == 6


def save_on_a_rank(rank: int, models: list[Any], folder: Path) -> dict[str, torch.Tensor]:
    model = models[rank]
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    engine = start(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        config,
    )
    tokens = torch.arange(12).view(2, 6)
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(str(folder))
    weights = full_weights(engine)
    engine.destroy()
    return weights


def test_saved_by_ranks_that_hold_shards(tmp_path: Path, base: Path) -> None:
    """A module that is saved whole is asked for its state dict by PEFT: on one rank alone that
    must gather nothing.
    """
    models = [adapted(base, KINDS["LoRA and a module saved whole"]()) for _ in range(2)]
    weights = run_ranks(2, save_on_a_rank, models, tmp_path / "run")[0]
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    plain = adapted(base, KINDS["LoRA and a module saved whole"]())
    plain.load_state_dict(weights, strict=False)
    want = peft.get_peft_model_state_dict(plain)
    assert set(written) == set(want) and "base_model.model.lm_head.weight" in want
    assert all(torch.equal(written[name], want[name]) for name in want)


@pytest.mark.parametrize("name", [None, "", "nobody/no-such-model", "no/model/of/the/hub"])
def test_a_base_that_is_not_on_this_machine_is_not_asked_for(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise AssertionError("a save went to the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    assert adapters._base_configuration(name) == {}


def test_a_base_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file)
    )
    assert adapters._base_configuration("some/model") == {"vocab_size": 5}


@pytest.mark.turns
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("kind", ["LoRA", "LoRA and a module saved whole", "LoRA on the embedding"])
def test_ranks_that_share_layers_write_whole_adapters(
    tmp_path: Path, base: Path, kind: str, stage: int
) -> None:
    """Rank 0 alone finds out what PEFT would write, and must ask nobody for a part."""
    models = [adapted(base, KINDS[kind]()) for _ in range(3)]
    tokens = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(1))

    def train(rank: int) -> None:
        trained = [each for each in models[rank].parameters() if each.requires_grad]
        keys = {"tensor_parallel": {"autotp_size": 2}}
        engine = start(models[rank], torch.optim.SGD(trained, 0.1), config_of(stage, **keys))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "run")
        engine.destroy()

    run_ranks(2, train)
    plain = models[2]
    plain(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], 0.1).step()
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    plain.save_pretrained(tmp_path / "peft")
    got, want = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "peft")
    )
    assert set(got) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
