"""The converter: folders that from_pretrained loads, bit-equal to what the training held,
whatever happens meanwhile.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint, reader
from hf_zero.checkpoint.convert import export
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.jobs import Engine, Job, run, small, state_of, train_some
from tests.helpers.commands import completed


def bert():
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=120,
            max_position_embeddings=32,
        )
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=120, n_positions=32)
    )


def saved(folder, make=bert, job=None, **options):
    """The whole weights that were trained, by name."""

    def action(engine: Engine):
        train_some(engine)
        return checkpoint.save(engine, folder, **options)

    engines, _ = run(job or Job(2, 3), make, action)
    shapes = dict(engines[0].module.named_parameters())
    return {
        name: kinds["weights"].reshape(shapes[name].shape)
        for name, kinds in state_of(engines).items()
    }


@pytest.mark.parametrize(
    "make, auto",
    [
        pytest.param(bert, AutoModelForMaskedLM, marks=pytest.mark.long, id="bert"),
        pytest.param(gpt2, AutoModelForCausalLM, id="gpt2"),
    ],
)
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_from_pretrained_has_the_trained_weights(tmp_path, make, auto, size):
    weights = saved(tmp_path / "run", make)
    result = convert_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_size=size)
    assert len(result.files) == (
        1 if size == "5GB" else len(list((tmp_path / "out").glob("model-*.safetensors")))
    )
    model, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model) is type(make())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, weights[name]), name
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.turns
@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("size", ["5GB", "20KB", 30_000])
def test_the_same_files_as_save_pretrained(tmp_path, make, size):
    """Names of files, which tensor is in which, one name for tied weights, the index: all as
    Hugging Face's own.
    """
    saved(tmp_path / "run", make)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_size=size)
    make().save_pretrained(tmp_path / "hf", max_shard_size=size)

    def described(folder):
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
                files[path.name] = (
                    file.metadata(),
                    {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()},
                )
        index = folder / "model.safetensors.index.json"
        return files, json.loads(index.read_text()) if index.exists() else None

    assert described(tmp_path / "out") == described(tmp_path / "hf")
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "hf" / name).exists():
            assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
                (tmp_path / "hf" / name).read_text()
            ), name


def test_tied_weights_are_kept_under_the_name_that_save_pretrained_keeps(tmp_path):
    """Also where the engine holds them under the other name."""

    def kept_as_head():
        module = small()
        module._tied_weights_keys = {"embed.weight": "head.weight"}
        return module

    def action(engine: Engine):
        assert engine.aliases == {"head.weight": "embed.weight"}
        return checkpoint.save(engine, tmp_path / "run")

    run(Job(2, 3, optimizer=None), kept_as_head, action)
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["head.weight"], small().embed.weight)
    assert "embed.weight" not in tensors


def test_names_that_save_pretrained_leaves_out(tmp_path):
    def action(engine: Engine):
        engine.module._keys_to_ignore_on_save = {"norm.running_mean", "second.bias"}
        return checkpoint.save(engine, tmp_path / "run")

    run(Job(1, 0), small, action)
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert not names & {"norm.running_mean", "second.bias"}
    assert {"norm.running_var", "second.weight"} < names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.bfloat16])
def test_dtypes(tmp_path, dtype):
    weights = saved(tmp_path / "run", small)
    convert_checkpoint(tmp_path / "run", tmp_path / "out", dtype)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    for name, tensor in weights.items():
        assert tensors[name].dtype == wanted and torch.equal(tensors[name], tensor.to(wanted)), name
    assert tensors["scale"].shape == () and tensors["empty"].shape == (0, 4)
    assert tensors["norm.running_var"].dtype == torch.float32
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64


def test_by_default_the_dtype_that_was_handed_to_training(tmp_path):
    def half():
        return bert().bfloat16()

    weights = saved(tmp_path / "run", half, Job(2, 3, precision="bf16"))
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight,
        weights["bert.embeddings.word_embeddings.weight"].bfloat16(),
    )
    convert_checkpoint(tmp_path / "run", tmp_path / "full", "float32")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "full")
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight,
        weights["bert.embeddings.word_embeddings.weight"],
    )


def test_frozen_parameters(tmp_path):
    job = Job(2, 3, frozen=lambda name: "first" in name)
    saved(tmp_path / "run", small, job)
    convert_checkpoint(tmp_path / "run", tmp_path / "all")
    convert_checkpoint(tmp_path / "run", tmp_path / "trained", exclude_frozen_parameters=True)
    all_names, trained = (
        set(load_file(tmp_path / name / "model.safetensors")) for name in ("all", "trained")
    )
    assert all_names - trained == {"first.weight", "first.bias"}


def test_left_out_at_the_save_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_zero.logging.logger.propagate", True)
    saved(
        tmp_path / "run",
        small,
        Job(2, 3, frozen=lambda name: "first" in name),
        exclude_frozen_parameters=True,
    )
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert "saved without its frozen parameters" in caplog.text
    assert "first.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_slices_smaller_than_tensors(tmp_path, monkeypatch):
    weights = saved(tmp_path / "run", small, Job(3, 3))
    monkeypatch.setattr(reader.Scratch, "ELEMENTS", 7)
    for dtype in ("float32", "bfloat16"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", dtype)
        tensors = load_file(tmp_path / "out" / "model.safetensors")
        assert all(
            torch.equal(tensors[name], tensor.to(tensors[name].dtype))
            for name, tensor in weights.items()
        )


# ---- where it reads from, what it carries along ----


def test_all_that_may_be_named_as_the_source(tmp_path):
    saved(tmp_path / "out" / "checkpoint-2", small)
    for source in ("out", "out/checkpoint-2", "out/checkpoint-2/global_step2"):
        assert convert_checkpoint(tmp_path / source, tmp_path / "model").tensors == 13
    assert (
        convert_checkpoint(
            tmp_path / "out" / "checkpoint-2", tmp_path / "model", tag="global_step2"
        ).tensors
        == 13
    )


def test_what_lies_beside_it_is_carried_along(tmp_path):
    run_folder = tmp_path / "run" / "checkpoint-2"
    saved(run_folder)
    (run_folder / "tokenizer.json").write_text("nearer")
    (run_folder / "special_tokens_map.json").write_text("{}")
    (run_folder / "training_args.bin").write_text("not this")
    (run_folder / "additional_chat_templates").mkdir()
    (run_folder / "additional_chat_templates" / "tool.jinja").write_text("{{x}}")
    (run_folder / "trainer_state.json").write_text(
        json.dumps(
            {
                "log_history": [
                    {"loss": 9.0, "step": 1},
                    {"loss": 7.25, "step": 2},
                    {"eval_loss": 6.5, "step": 2},
                ]
            }
        )
    )
    (tmp_path / "run" / "tokenizer.json").write_text("further")
    (tmp_path / "run" / "vocab.txt").write_text("a")
    (tmp_path / "run" / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (tmp_path / "vocab.json").write_text("of somebody else")
    result = convert_checkpoint(tmp_path / "run", tmp_path / "out")
    out = tmp_path / "out"
    assert sorted(result.carried) == sorted(
        [
            "config.json",
            "tokenizer.json",
            "special_tokens_map.json",
            "vocab.txt",
            "README.md",
            "additional_chat_templates",
        ]
    )
    assert (out / "tokenizer.json").read_text() == "nearer"
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "{{x}}"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*result.carried, "model.safetensors"]
    )
    card = (out / "README.md").read_text()
    data = ModelCard(card).data
    (result_of_run,) = data.eval_results
    assert (data.license, data.model_name, result_of_run.task_type) == ("mit", "A card", "other")
    assert (result_of_run.metric_type, result_of_run.metric_value) == ("loss", 6.5)
    assert "\n---\n# A card\n" in card
    for fact in (
        "| steps | 2 |",
        "| ZeRO stage, ranks, precision | 3, 2, fp32 |",
        "AdamW, 0.001",
        "| training loss | 7.25 at step 2 |",
        "6.5 at step 2",
    ):
        assert fact in card
    convert_checkpoint(run_folder, out)
    (run_folder / "README.md").write_text(card)
    convert_checkpoint(run_folder, out)
    assert (out / "README.md").read_text() == card  # the facts are replaced, not added again


@pytest.mark.parametrize(
    "front, kept",
    [
        ("license: mit", "license: mit"),
        ("license: [", "license: ["),
        ("- a list", "- a list"),
        (
            "license: mit\nmodel-index:\n- name: base\n  results:\n  - task: {type: other}\n"
            "    dataset: {name: d, type: d}\n    metrics: [{type: accuracy, value: 0.9}]",
            "license: mit",
        ),
    ],
    ids=["no results", "no YAML", "no mapping", "of the base model"],
)
def test_a_card_without_evaluations_of_the_run_names_none(tmp_path, front, kept):
    saved(tmp_path / "run", small)
    (tmp_path / "run" / "README.md").write_text(f"---\n{front}\n---\n# A card\n")
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(f"---\n{kept}\n---\n# A card\n") and "| steps | 2 |" in card


def test_a_trainer_state_of_another_kind_is_no_obstacle(tmp_path):
    saved(tmp_path / "run", small)
    (tmp_path / "run" / "README.md").write_text("# Card")
    (tmp_path / "run" / "trainer_state.json").write_text('{"log_history": [3]}')
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert "| steps | 2 |" in (tmp_path / "out" / "README.md").read_text()


def test_nested_dtypes_of_the_configuration(tmp_path):
    saved(tmp_path / "run", small)
    config = {
        "torch_dtype": "float32",
        "text": {"dtype": "float32"},
        "vision": {"dtype": "float16"},
    }
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "run", tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "dtype": "bfloat16", "text": {"dtype": "bfloat16"}, "vision": {"dtype": "float16"},
    }  # fmt: skip


def test_a_configuration_that_is_no_json(tmp_path):
    saved(tmp_path / "run", small)
    (tmp_path / "run" / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON object .*fix or remove it"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out")


def test_into_the_folder_of_the_checkpoint_itself(tmp_path):
    weights = saved(tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "run")
    convert_checkpoint(tmp_path / "run", tmp_path / "run")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "run")
    assert torch.equal(model.cls.predictions.bias, weights["cls.predictions.bias"])


# ---- what goes wrong ----


@pytest.mark.parametrize(
    "options", [{}, {"only": "*.bias"}, {"max_shard_size": "20KB"}, {"dtype": "bfloat16"}]
)
def test_a_model_folder_is_not_written_over_itself(tmp_path, options):
    bert().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(
        CheckpointError,
        match=r"link is the folder that is read: model-00001-of-\d+.safetensors, .* "
        r"choose another folder",
    ):
        convert_checkpoint(tmp_path / "model", tmp_path / "link", **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_an_adapter_in_the_target_would_hide_the_model(tmp_path):
    saved(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=r"adapter_config.json would make from_pretrained load an adapter "
        r".*remove it, or choose",
    ):
        convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["adapter_config.json"]


@pytest.mark.long
@pytest.mark.parametrize(
    "make, auto",
    [(bert, AutoModelForMaskedLM), (gpt2, AutoModelForCausalLM)],
    ids=["bert", "gpt2"],
)
def test_a_compiled_model_is_written_under_its_own_names(tmp_path, make, auto):
    weights = saved(tmp_path / "run", lambda: torch.compile(make(), backend="eager"))
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(model) is type(make())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[f"_orig_mod.{name}"]), name
    checkpoint.load_state_dict_from_zero_checkpoint(plain := make(), tmp_path / "run")
    assert all(
        torch.equal(parameter, weights[f"_orig_mod.{name}"])
        for name, parameter in plain.named_parameters()
    )


def test_old_weights_in_the_target_are_replaced(tmp_path):
    saved(tmp_path / "run")
    out = tmp_path / "out"
    convert_checkpoint(tmp_path / "run", out, max_shard_size="20KB")
    convert_checkpoint(tmp_path / "run", out)
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    convert_checkpoint(tmp_path / "run", out, max_shard_size="20KB")
    assert not (out / "model.safetensors").exists()
    assert (out / "model.safetensors.index.json").exists()


def test_files_in_the_target_are_kept_unless_they_may_be_replaced(tmp_path, caplog, monkeypatch):
    """A file that is not replaced, or is read as well, is no obstacle; nor is what an interrupted
    conversion has published.
    """
    saved(tmp_path / "run")
    (tmp_path / "run" / "README.md").write_text("# Card")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    done = convert_checkpoint(tmp_path / "run", out, overwrite=False)
    assert done.dtypes == ("float32",)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(
        CheckpointError, match=r"out holds README.md, .*model.safetensors, .*--overwrite"
    ):
        convert_checkpoint(tmp_path / "run", out, "bfloat16", overwrite=False)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"out holds README.md, config.json, which would"):
        convert_checkpoint(tmp_path / "run", out, overwrite=False)
    monkeypatch.setattr(logging.getLogger("hf_zero"), "propagate", True)
    with caplog.at_level("INFO", "hf_zero"):
        assert convert_checkpoint(tmp_path / "run", out, "bfloat16").dtypes == ("bfloat16",)
    assert "README.md, config.json replaced; another folder keeps them" in caplog.text
    convert_checkpoint(tmp_path / "run", tmp_path / "run", overwrite=False)  # its own card


def test_a_disk_that_fills_up_leaves_the_old_model(tmp_path, monkeypatch):
    saved(tmp_path / "run")
    out = tmp_path / "out"
    convert_checkpoint(tmp_path / "run", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    count, pwrite = [], os.pwrite

    def full(fd, data, at):
        count.append(at)
        if len(count) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"out: No space left on device; the disk is full"):
        convert_checkpoint(tmp_path / "run", out, max_shard_size="20KB")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_disk_without_room_is_found_out_first(tmp_path, monkeypatch):
    saved(tmp_path / "run", small)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(
        CheckpointError, match=r"has room for 10 bytes, the model needs [\d,]+; free space"
    ):
        convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_file_for_a_target(tmp_path, name):
    saved(tmp_path / "run", small)
    with pytest.raises(CheckpointError, match="names a file; pass a folder"):
        convert_checkpoint(tmp_path / "run", tmp_path / name)


def test_a_checkpoint_that_is_missing_or_damaged(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "out")
    saved(tmp_path / "run", small)
    path = tmp_path / "run" / "global_step2" / "rank-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-6000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its hash is"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", verify=True)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("size", ["big", "5 parsecs", 0, -3])
def test_sizes_that_make_no_sense(tmp_path, size):
    saved(tmp_path / "run", small)
    with pytest.raises(ConfigError, match=r"max_shard_size .* is not a size"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_size=size)


@pytest.mark.parametrize("dtype", ["int8", "auto", torch.int32])
def test_dtypes_that_make_no_sense(tmp_path, dtype):
    with pytest.raises(ConfigError, match="pass float32, bfloat16, float16, or none at all"):
        convert_checkpoint(tmp_path, tmp_path / "out", dtype)


def test_the_bar_is_on_stderr_and_only_when_asked(tmp_path, capsys):
    saved(tmp_path / "run", small)
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert capsys.readouterr() == ("", "")
    convert_checkpoint(tmp_path / "run", tmp_path / "out", progress=True, verify=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "writing" in shown.err


@pytest.mark.long
def test_the_script_in_the_checkpoint_folder(tmp_path):
    weights = saved(tmp_path / "run", small)
    command = [sys.executable, "zero_to_fp32.py", ".", "../out"]
    done = completed(command, cwd=tmp_path / "run", timeout=120)
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
    done = completed([*command, "-t", "nope"], cwd=tmp_path / "run", timeout=120)
    assert done.returncode == 2
    assert "error: no checkpoint 'nope'" in done.stderr
    assert "Traceback" not in done.stderr
