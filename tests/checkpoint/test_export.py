"""The converter: folders that from_pretrained loads, bit-equal to what the training held,
whatever happens meanwhile; and the names that scripts for DeepSpeed call.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
)

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint, reader
from hf_zero.checkpoint.convert import export
from hf_zero.checkpoint.find import NEW
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.jobs import Engine, Job, other, run, same, small, state_of, train_some
from tests.checkpoint.setups import Setup, train
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.leftovers import held_files

MODEL = "model.safetensors"


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {"intermediate_size": 64, "vocab_size": 120, "max_position_embeddings": 32}
    return BertForMaskedLM(BertConfig(**sizes, **words))


FROZEN = Job(2, 3, frozen=lambda name: "first" in name)


def saved(folder, make=bert, job=None, steps=2, **options):
    """The whole weights that were trained, by name."""

    def action(engine: Engine):
        train_some(engine, steps)
        return checkpoint.save(engine, folder, **options)

    engines, _ = run(job or Job(2, 3), make, action)
    shapes = dict(engines[0].module.named_parameters())
    held = {name: kinds["weights"] for name, kinds in state_of(engines).items()}
    return {name: value.reshape(shapes[name].shape) for name, value in held.items()}


@pytest.fixture(scope="module")
def of_bert(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that no test changes, and its weights."""
    folder = tmp_path_factory.mktemp("bert") / "run"
    return folder, saved(folder)


@pytest.fixture(scope="module")
def of_small(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("small") / "run"
    return folder, saved(folder, small)


def loads(auto: Any, folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name
    return model


def described(folder: Path) -> Any:
    """Names of files, which tensor is in which, the index."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            held = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
            files[path.name] = (file.metadata(), held)
    index = folder / "model.safetensors.index.json"
    return files, json.loads(index.read_text()) if index.exists() else None


def test_the_folder_is_as_save_pretrained_writes_it(of_bert, tmp_path):
    """``from_pretrained`` has the trained weights; files, one name for tied weights and the index
    are as Hugging Face's own. An earlier model in the folder is replaced.
    """
    run_folder, weights = of_bert
    for size in ("5GB", 30_000):
        # an option of a command is a text
        result = convert_checkpoint(run_folder, tmp_path / "out", max_shard_size=str(size))
        model = loads(AutoModelForMaskedLM, tmp_path / "out", weights)
        assert type(model) is BertForMaskedLM and model.dtype == torch.float32
        assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
        hf = tmp_path / f"hf {size}"
        bert().save_pretrained(hf, max_shard_size=size)
        assert described(tmp_path / "out") == described(hf)
        assert set(result.files) == {path.name for path in hf.glob("*.safetensors")}
        for path in hf.glob("*config.json"):
            written = (tmp_path / "out" / path.name).read_text()
            assert json.loads(written) == json.loads(path.read_text()), path.name


def test_dtypes(of_small, tmp_path, monkeypatch):
    """Also where slices are smaller than tensors; by default the one that training was handed."""
    run_folder, weights = of_small
    for dtype in ("float32", "float16", torch.bfloat16):
        convert_checkpoint(run_folder, tmp_path / "out", dtype)
        tensors = load_file(tmp_path / "out" / MODEL)
        wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        for name, tensor in weights.items():
            assert tensors[name].dtype == wanted, name
            assert torch.equal(tensors[name], tensor.to(wanted)), name
        monkeypatch.setattr(reader.Scratch, "ELEMENTS", 7)
    assert tensors["scale"].shape == () and tensors["empty"].shape == (0, 4)
    assert tensors["norm.running_var"].dtype == torch.float32
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64
    half = saved(tmp_path / "half", lambda: bert().bfloat16(), Job(2, 3, precision="bf16"))
    for dtype, wanted in ((None, torch.bfloat16), ("float32", torch.float32)):
        convert_checkpoint(tmp_path / "half", tmp_path / "of it", dtype)
        assert loads(AutoModelForMaskedLM, tmp_path / "of it", half).dtype == wanted
    for dtype in ("int8", "auto", torch.int32):
        with pytest.raises(ConfigError, match="pass float32, bfloat16, float16"):
            convert_checkpoint(tmp_path, tmp_path / "out", dtype)
    for size in ("big", "5 parsecs", "-5GB", "0GB", "0", 0, -3, None):
        with pytest.raises(ConfigError, match=r"max_shard_size .* is not a size"):
            convert_checkpoint(run_folder, tmp_path / "out", max_shard_size=size)


def test_frozen_parameters(tmp_path, heard):
    saved(tmp_path / "run", small, FROZEN)
    convert_checkpoint(tmp_path / "run", tmp_path / "all")
    convert_checkpoint(tmp_path / "run", tmp_path / "trained", exclude_frozen_parameters=True)
    of_all, trained = (set(load_file(tmp_path / name / MODEL)) for name in ("all", "trained"))
    assert of_all - trained == {"first.weight", "first.bias"} and not heard
    saved(tmp_path / "part", small, FROZEN, exclude_frozen_parameters=True)
    convert_checkpoint(tmp_path / "part", tmp_path / "out")
    assert any("saved without its frozen parameters" in line for line in heard)
    assert set(load_file(tmp_path / "out" / MODEL)) == trained
    model = checkpoint.load_state_dict_from_zero_checkpoint(other(), tmp_path / "part")
    assert not model.first.weight.any() and model.second.weight.any()


def test_frozen_weights_that_are_tied_and_left_out(tmp_path, heard):
    tied = Job(1, 2, frozen=lambda name: name.startswith("embed"))
    saved(tmp_path / "run", small, tied, exclude_frozen_parameters=True)
    for to in ("safetensors", "dcp", "universal"):
        heard.clear()
        convert_checkpoint(tmp_path / "run", tmp_path / to, to=to)
        assert any("saved without its frozen parameters" in line for line in heard), to
    states = torch.load(tmp_path / "universal" / "mp_rank_00_model_states.pt", weights_only=False)
    assert "second.weight" in states["module"]
    assert not {"embed.weight", "head.weight"} & states["module"].keys()


def test_what_lies_beside_it_is_carried_along(tmp_path):
    folder, run_folder = tmp_path / "run", tmp_path / "run" / "checkpoint-2"
    saved(run_folder)
    history = [{"loss": 9.0, "step": 1}, {"loss": 7.25, "step": 2}, {"eval_loss": 6.5, "step": 2}]
    (run_folder / "additional_chat_templates").mkdir()
    for path, content in {
        run_folder / "tokenizer.json": "nearer",
        run_folder / "special_tokens_map.json": "{}",
        run_folder / "training_args.bin": "not this",
        run_folder / "additional_chat_templates" / "tool.jinja": "{{x}}",
        run_folder / "trainer_state.json": json.dumps({"log_history": history}),
        folder / "tokenizer.json": "further",
        folder / "vocab.txt": "a",
        folder / "README.md": "---\nlicense: mit\n---\n# A card\n",
        tmp_path / "vocab.json": "of somebody else",
    }.items():
        path.write_text(content)
    result, out = convert_checkpoint(folder, tmp_path / "out"), tmp_path / "out"
    wanted = ["README.md", "additional_chat_templates", "config.json", "special_tokens_map.json"]
    assert sorted(result.carried) == [*wanted, "tokenizer.json", "vocab.txt"]
    assert (out / "tokenizer.json").read_text() == "nearer"
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "{{x}}"
    assert {path.name for path in out.iterdir()} == {*result.carried, MODEL}
    card = (out / "README.md").read_text()
    data = ModelCard(card).data
    (evaluated,) = data.eval_results
    assert (data.license, data.model_name, evaluated.task_type) == ("mit", "A card", "other")
    assert (evaluated.metric_type, evaluated.metric_value) == ("loss", 6.5)
    assert "\n---\n# A card\n" in card
    for fact in ("| steps | 2 |", "| 3, 2, fp32 |", "AdamW, 0.001", "7.25 at step 2"):
        assert fact in card
    (run_folder / "README.md").write_text(card)
    for source in (run_folder, run_folder / "global_step2"):
        assert convert_checkpoint(source, out).files == (MODEL,)
    assert (out / "README.md").read_text() == card  # the facts are replaced, not added again


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_files_in_the_target_are_kept_unless_they_may_be_replaced(of_bert, tmp_path, heard_in_full):
    """Files of other names are no obstacle."""
    folder, out = shutil.copytree(of_bert[0], tmp_path / "run"), tmp_path / "out"
    (folder / "README.md").write_text("# Card")
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert convert_checkpoint(folder, out, overwrite=False).dtypes == ("float32",)
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"out holds README.md, .*model.safetensors"):
        convert_checkpoint(folder, out, "bfloat16", overwrite=False)
    assert contents(out) == before
    (out / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"out holds README.md, config.json, which would"):
        convert_checkpoint(folder, out, overwrite=False)
    assert convert_checkpoint(folder, out, "bfloat16").dtypes == ("bfloat16",)
    assert any("README.md, config.json replaced" in line for line in heard_in_full)


def test_targets_that_are_refused(of_bert, tmp_path, monkeypatch):
    """An adapter would hide the model; a disk may be full; a file is no folder."""
    folder, out = of_bert[0], tmp_path / "out"
    convert_checkpoint(folder, out)
    before = contents(out)
    count, pwrite = [], os.pwrite

    def full(fd, data, at):
        count.append(at)
        if len(count) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"out: No space left on device"):
            convert_checkpoint(folder, out, max_shard_size="20KB")
    assert contents(out) == before
    (out / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config.json would make from_pretrained"):
        convert_checkpoint(folder, out)
    for name in ("pytorch_model.bin", MODEL):
        with pytest.raises(CheckpointError, match=f"{name} names a file"):
            convert_checkpoint(folder, tmp_path / name)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"has room for 10 bytes"):
        convert_checkpoint(folder, tmp_path / "none")
    assert not list((tmp_path / "none").iterdir())


def test_what_another_format_has_no_place_for_is_named(tmp_path, heard):
    """The loss scale in both, and the client state in that of torch."""
    job = Job(1, 2, precision="fp16")
    saved(tmp_path / "run", small, job, client_state={"epoch": 3})
    for to, names in (("dcp", "the client state, the loss scale"), ("universal", "the loss scale")):
        heard.clear()
        convert_checkpoint(tmp_path / "run", tmp_path / to, to=to)
        assert (
            [line for line in heard if "is not written" in line]
            == [line for line in heard if f"{names} in " in line]
            != []
        )


def test_a_universal_folder_of_float64_is_announced_as_rounded(tmp_path, heard):
    model = torch.nn.Linear(3, 2).double()
    engine = start(model, torch.optim.AdamW(model.parameters()), config_of(1))
    engine.save_checkpoint(tmp_path, tag="run")
    engine.destroy()
    convert_checkpoint(tmp_path / "run", tmp_path / "out", to="universal")
    assert any("fp32" in line and "weight, bias" in line for line in heard)


def test_state_dicts_of_scripts(tmp_path):
    job = Job(3, 3, units=("second",), precision="bf16", frozen=FROZEN.frozen)
    trained = {name: value.float() for name, value in saved(tmp_path, small, job).items()}
    state = checkpoint.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(state) == set(small().state_dict())
    assert state["head.weight"] is state["embed.weight"]
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32, torch.int64}
    model = small()
    model.wide = model.wide.clone()
    model.load_state_dict(state, strict=True)
    lazy = checkpoint.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert list(lazy) == list(state) and lazy["head.weight"] is lazy["embed.weight"]
    for name, tensor in state.items():
        assert (lazy[name].shape, lazy[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(lazy[name].contiguous(), tensor)
    assert held_files(tmp_path)
    del lazy
    gc.collect()
    assert not held_files(tmp_path)
    only = checkpoint.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path, "global_step2", exclude_frozen_parameters=True
    )
    assert set(state) - set(only) == {"first.weight", "first.bias"}
    half = dict(checkpoint.iterate_state_dict(tmp_path, dtype="bfloat16"))
    names = [name for name, tensor in half.items() if tensor.dtype == torch.bfloat16]
    assert names == [name for name, _ in small().named_parameters()]
    given = dict(checkpoint.iterate_state_dict(tmp_path, dtype=None))
    assert given["first.weight"].dtype == torch.float32
    out = checkpoint.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "out", max_shard_size="1KB"
    )
    assert (out / "model.safetensors.index.json").exists()
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = checkpoint.lode


def wider(module):
    module.second = torch.nn.Linear(13, 7)


OTHERS = {
    "lacks third.weight, third.bias": lambda m: m.add_module("third", torch.nn.Linear(1, 1)),
    "lacks module.second.weight, module.second.bias": lambda m: m.add_module(
        "module", torch.nn.ModuleDict({"second": torch.nn.Linear(13, 6)})
    ),
    "in excess second.weight, second.bias": lambda m: delattr(m, "second"),
    "in another shape second.weight, second.bias": wider,
}


def test_into_a_model(of_small):
    folder, trained = of_small
    load = checkpoint.load_state_dict_from_zero_checkpoint
    model = other()
    model.first.weight.data = torch.zeros(6, 13).t()  # not contiguous
    assert load(model, folder) is model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained.get(name, torch.empty(0, 4))), name
    assert torch.equal(model.norm.running_mean, small().norm.running_mean)
    half = load(other().bfloat16(), folder)
    assert torch.equal(half.second.weight, trained["second.weight"].bfloat16())
    for said, change in OTHERS.items():
        model = other()
        change(model)
        with pytest.raises(CheckpointError, match=f"global_step2 .*{said}"):
            load(model, folder)
        assert not model.first.weight.any()


class Extra(torch.nn.Linear):
    """With a buffer that is a view of conjugates, and state that is no tensor."""

    def __init__(self, seen: int, phase: complex) -> None:
        super().__init__(2, 2)
        self.seen = seen
        self.register_buffer("phase", torch.tensor([phase, 1j]).conj())

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_into_a_model_with_views_of_conjugates_and_extra_state(tmp_path):
    run(Job(1, 1), lambda: Extra(3, 2 + 1j), lambda engine: checkpoint.save(engine, tmp_path))
    model = checkpoint.load_state_dict_from_zero_checkpoint(Extra(7, 0j), tmp_path)
    assert model.seen == 7 and model.phase.tolist() == [2 - 1j, -1j]


def test_into_a_model_without_memory(of_small):
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"weight, bias.*to_empty"):
        checkpoint.load_state_dict_from_zero_checkpoint(model, of_small[0])


def test_whole_and_converted_it_is_the_model_that_was_trained(tmp_path):
    """``from_pretrained`` loads both; the state dict and all files hold the engine's weights."""
    setup = Setup(way="all in files", precision="bf16", frozen="h.0").at(tmp_path)

    def run(engine: Any, rank: int) -> Any:
        train(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path / "run"))
        earlier = full_weights(engine)
        train(engine, rank, range(2, 3))
        engine.save_16bit_model(str(tmp_path / "whole"), "model.safetensors")
        engine.save_16bit_model(str(tmp_path / "whole"), "pytorch_model.bin")
        engine.save_16bit_model(str(tmp_path / "whole"), "trained.safetensors", True)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        return earlier, full_weights(engine), state

    earlier, weights, state = setup.run(run)[0]
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    loads(AutoModelForCausalLM, tmp_path / "out", earlier)
    setup.models()[0].config.save_pretrained(tmp_path / "whole")
    rounded = {name: value.bfloat16() for name, value in weights.items()}
    loads(AutoModelForCausalLM, tmp_path / "whole", rounded)
    pickled = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    for found in (state, pickled):
        assert same({name: found[name] for name in weights}, rounded)
    assert pickled._metadata == setup.models()[0].state_dict()._metadata
    head, embedding = pickled["lm_head.weight"], pickled["transformer.wte.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    trained = load_file(tmp_path / "whole" / "trained.safetensors")
    assert set(weights) - set(trained) == {name for name in weights if "h.0" in name}


def test_the_whole_model_into_a_folder_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank hears of it, and training goes on."""
    (tmp_path / "file").write_text("")
    fsync = os.fsync

    def full(fd: int) -> None:
        if "late" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)

    def run(engine: Any, rank: int) -> list[float]:
        for name in ("model.safetensors", "pytorch_model.bin"):
            with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
                engine.save_16bit_model(str(tmp_path / "file"), name)
        if rank == 0:
            (tmp_path / f"{NEW}full.bin").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"rank 0: .*disk is full"):
            engine.save_16bit_model(str(tmp_path), "full.bin")
        with pytest.raises(CheckpointError, match="one file of the whole model"):
            engine.save_16bit_model("memory://bucket/model")
        refuse = lambda *_: 1 / 0  # noqa: E731
        hook = engine.module.register_state_dict_post_hook(refuse)
        with pytest.raises(CheckpointError, match=r"rank 0: .*ZeroDivisionError"):
            engine.save_16bit_model(str(tmp_path / "hooked"), "full.bin")
        hook.remove()
        with pytest.raises(CheckpointError, match=r"rank 0: .*disk is full"):
            engine.save_16bit_model(str(tmp_path / "late"), "model.safetensors")
        assert not any((tmp_path / "late").iterdir())
        return train(engine, rank, range(1))

    assert [len(losses) for losses in Setup().run(run)] == [2, 2]


def test_a_file_of_the_whole_model_whose_gathers_break_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of it, and the file before it stays."""

    def run(engine: Any, rank: int) -> None:
        engine.save_16bit_model(str(tmp_path), "model.safetensors")
        before, gathers = (tmp_path / "model.safetensors").read_bytes(), engine.consolidated

        def broken(*args: Any) -> Any:
            yield next(gathers(*args))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "consolidated", broken)
            with pytest.raises(KeyboardInterrupt):
                engine.save_16bit_model(str(tmp_path), "model.safetensors")
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes() == before

    Setup(ranks=1).run(run)


def test_a_state_dict_is_on_the_device_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync = list[str](), os.fsync

    def noted(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    Setup(ranks=1).run(lambda engine, _: engine.save_16bit_model(str(tmp_path), "full.bin"))
    assert flushed == [f"{NEW}full.bin", tmp_path.name]
