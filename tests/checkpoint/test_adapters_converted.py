"""Adapters out of checkpoints: the files that PEFT writes of the same model, and what loads from
them. Adapters over quantized weights: bytes as they are, what stands beside them, and without the
frozen base.
"""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint, load_state_dict_from_zero_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.integrations.peft import adapter_files
from hf_zero.zero.layout.attributes import QuantizedWeights
from tests.checkpoint.jobs import Engine, Job, edit, run, train_some
from tests.helpers import oracle
from tests.helpers.adapters import KINDS, llama
from tests.helpers.cells import fast
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.packed import LinearOfBytes
from tests.helpers.stacks import by_hand, on_ranks, run_steps
from tests.ranks.test_quantized import PACKED, adam, alike, build
from tests.ranks.test_quantized import adapters as lora_of

FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    llama().save_pretrained(folder)
    return folder


def of_base(base: Path) -> Any:
    return type(llama()).from_pretrained(base)


def adapted(base: Path, config: Any, *others: str) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(of_base(base), config)
    for name in others:
        model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            # or else it is zeros, and nothing tells two of them apart
            torch.nn.init.normal_(parameter)
    return model


def saved(folder: Path, model: Any, **options: Any) -> Any:
    """``model`` with the values that it has after a training on two ranks, which save it."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    def action(engine: Engine) -> Path:
        train_some(engine, 1)
        return checkpoint.save(engine, folder, **options)

    run(Job(2, 3, frozen=lambda name: name in frozen), lambda: copy.deepcopy(model), action)
    if not options:
        checkpoint.load_state_dict_from_zero_checkpoint(model, folder)
    return model


def same_folders(ours: Path, theirs: Path) -> None:
    got, want = (load_file(folder / FILE) for folder in (ours, theirs))
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    read = [json.loads((folder / "adapter_config.json").read_text()) for folder in (ours, theirs)]
    for config in read:
        config["target_modules"] = sorted(config.get("target_modules") or [])  # a set, in any order
    assert read[0] == read[1]


def resized(base: Path) -> Any:
    grown = of_base(base)
    grown.resize_token_embeddings(40)
    return peft.get_peft_model(grown, KINDS["LoRA"]())


def prompts(base: Path) -> Any:
    return adapted(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


LOADED = ("LoRA", "DoRA", "LoRA and a module saved whole", "LoRA on the embedding", "IA3")
BY_NAMES = ("LoRA", "DoRA", "LoRA and a module saved whole", "LoRA and some tokens", "IA3")
MODELS: dict[str, Callable[[Path], Any]] = {
    **{kind: lambda base, kind=kind: adapted(base, KINDS[kind]()) for kind in KINDS},
    "prompts": prompts,
    "an embedding that was resized": resized,
}


def forget_adapters(folder: Path) -> None:
    """Take the description out of the manifest, as other programs leave it."""
    (path,) = folder.glob("global_step*/manifest.json")
    edit(path, lambda document: document["export"].pop("adapters"))


SELDOM = ("DoRA", "LoRA on the embedding", "AdaLoRA", "VeRA", "LoHa", "OFT")


@pytest.mark.parametrize("kind", fast(MODELS, lambda kind: kind not in SELDOM))
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, base: Path, kind: str) -> None:
    """PEFT loads them; and names alone tell what they are, with the configuration beside."""
    model = saved(tmp_path / "run", MODELS[kind](base)).eval()
    out, theirs = tmp_path / "out", tmp_path / "peft"
    done = convert_checkpoint(tmp_path / "run", out)
    assert done.files == (FILE,) and "adapter_config.json" in done.carried
    model.save_pretrained(theirs)
    same_folders(out, theirs)
    assert not {"config.json", "generation_config.json"} & {path.name for path in out.iterdir()}
    assert kind != "an embedding that was resized" or "embed_tokens" in str(load_file(out / FILE))
    if kind in LOADED:
        loaded, tokens = peft.PeftModel.from_pretrained(of_base(base), out), torch.arange(12)
        with torch.no_grad():
            wanted = model(tokens.view(2, 6)).logits
            assert torch.equal(loaded.eval()(tokens.view(2, 6)).logits, wanted)
    if kind in BY_NAMES:
        forget_adapters(tmp_path / "run")
        content = (theirs / "adapter_config.json").read_bytes()
        (tmp_path / "run" / "adapter_config.json").write_bytes(content)
        convert_checkpoint(tmp_path / "run", tmp_path / "by names")
        same_folders(tmp_path / "by names", theirs)


def test_several_adapters_each_in_its_folder(tmp_path: Path, base: Path) -> None:
    model = saved(tmp_path / "run", adapted(base, KINDS["LoRA"](), "other"))
    done = convert_checkpoint(tmp_path / "run", tmp_path / "out")
    assert set(done.files) == {FILE, f"other/{FILE}"}
    model.save_pretrained(tmp_path / "peft")
    for name in ("", "other"):
        same_folders(tmp_path / "out" / name, tmp_path / "peft" / name)
    done = convert_checkpoint(tmp_path / "run", tmp_path / "one", only="*.other.*")
    assert done.files == (f"other/{FILE}",)
    assert not (tmp_path / "one" / "adapter_config.json").exists()
    # one configuration beside the checkpoint cannot tell two adapters that the manifest does not
    forget_adapters(tmp_path / "run")
    beside = (tmp_path / "peft" / "adapter_config.json").read_bytes()
    (tmp_path / "run" / "adapter_config.json").write_bytes(beside)
    with pytest.raises(CheckpointError, match=r"the adapters default, other, not one alone; "):
        convert_checkpoint(tmp_path / "run", tmp_path / "names", adapters=True)


def test_names_alone_are_not_enough(tmp_path: Path, base: Path, heard: list[str]) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    saved(folder, adapted(base, KINDS["LoRA"]()))
    (path,) = folder.glob("global_step*/manifest.json")
    for name in ("../x", "", ".x", "a/b"):
        edit(path, lambda document, name=name: renamed(document["export"], name))
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            convert_checkpoint(folder, out)
    forget_adapters(folder)
    with pytest.raises(CheckpointError, match=r"the adapter 'default' and no adapter_config.json"):
        convert_checkpoint(folder, out, adapters=True)
    assert convert_checkpoint(folder, out).files == ("model.safetensors",)
    assert any("converted whole, under the names of" in line for line in heard)
    beside = folder / "adapter_config.json"
    for content in ({"peft_type": "LORA", "bias": "all"}, {"peft_type": "VBLORA"}):
        beside.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"adapter_config.json describes an adapter of"):
            convert_checkpoint(folder, out, adapters=True)
    for text in ("[", "[]"):
        beside.write_text(text)
        with pytest.raises(CheckpointError, match=r"adapter_config.json is no JSON object"):
            convert_checkpoint(folder, out)
    saved(tmp_path / "plain", of_base(base))
    with pytest.raises(CheckpointError, match=r"holds no adapter that PEFT made"):
        convert_checkpoint(tmp_path / "plain", out, adapters=True)


def renamed(export: dict[str, Any], name: str) -> None:
    export["adapters"] = {name: next(iter(export["adapters"].values()))}


def test_saved_without_what_is_frozen(tmp_path: Path, base: Path, heard: list[str]) -> None:
    """The base is not needed; a frozen adapter that was left out is."""
    model = adapted(base, KINDS["LoRA"](), "other")
    trained = {"exclude_frozen_parameters": True}
    saved(tmp_path / "both", model.requires_grad_(True), **trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".default." in name)
    saved(tmp_path / "run", model, **trained)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files == (FILE,)
    assert set(load_file(tmp_path / "out" / FILE)) == set(peft.get_peft_model_state_dict(model))
    assert any("left out: 'other' lacks base_model." in line for line in heard)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    saved(tmp_path / "none", model, **trained)
    with pytest.raises(CheckpointError, match=r"no complete adapter"):
        convert_checkpoint(tmp_path / "none", tmp_path / "out")


def test_an_adapter_whose_file_is_computed(tmp_path: Path, base: Path, heard: list[str]) -> None:
    """The save goes on, and says what the converter will do."""
    sizes = {"num_virtual_tokens": 3, "encoder_hidden_size": 8}
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", **sizes)
    saved(tmp_path / "run", adapted(base, config))
    assert any("adapter 'default'" in line and "save_pretrained" in line for line in heard)
    assert convert_checkpoint(tmp_path / "run", tmp_path / "out").files == ("model.safetensors",)


def test_a_base_is_not_asked_for_over_the_network(tmp_path, monkeypatch):
    """One in the hub's cache is read."""

    def refused(*args: Any) -> None:
        raise AssertionError("a save went to the network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    for name in (None, "", "nobody/no-such-model", "no/model/of/the/hub"):
        assert adapter_files._base_configuration(name) == {}
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    cached = lambda name, file: str(tmp_path / file)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert adapter_files._base_configuration("some/model") == {"vocab_size": 5}


RANKS = 2
SCALES = "blocks.0.up.base_layer.weight.absmax"


def opened(model, stage=3):
    return start(model, adam(model), config_of(stage))


def saved_over_bytes(folder, stage=3, storage=torch.uint8, **options):
    """Train for two steps and save."""

    def run(rank, model):
        engine = opened(model, stage)
        run_steps(engine, rank, range(2))
        engine.save_checkpoint(folder, **options)

    on_ranks(RANKS, run, build=build(storage))
    return build(storage)().state_dict()


def bases_alike(state, given):
    return all(alike(value, given[name]) for name, value in state.items() if "lora_" not in name)


@pytest.mark.parametrize(("before", "after", "exclude"), [(3, 3, True), (2, 3, False)])
def test_training_goes_on_where_it_was(tmp_path, before, after, exclude):
    """Without the frozen weights the model that has the base takes the adapters."""
    want, _ = by_hand(adam, [[(1.0, 0)]] * 4, RANKS, build=build())
    given = saved_over_bytes(tmp_path, before, exclude_frozen_parameters=exclude)

    def run(rank, model):
        if not exclude:
            for name in PACKED:
                model.get_parameter(name).data.zero_()
            model.get_parameter(PACKED[0]).quant_state.absmax.zero_()
        engine = opened(model, after)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2
        run_steps(engine, rank, range(2, 4))
        assert bases_alike(model.state_dict(), given)
        return full_weights(engine)

    held = {key for file in tmp_path.glob("*/*.safetensors") for key in load_file(file)}
    assert exclude != any("frozen" in name or "absmax" in name for name in held)
    assert exclude or f"buffer::{SCALES}" in held

    for weights in on_ranks(RANKS, run, build=build()):
        oracle.compare_tensors("weights", lora_of(weights), lora_of(want))


class ScalesAsBuffers(QuantizedWeights):
    def register(self, *_):
        pass


def test_scales_that_were_saved_as_buffers_are_read_into_shards(tmp_path, monkeypatch):
    """Former releases kept the scales whole, as buffers."""
    wide = build(width=128)
    name = "blocks.0.up.base_layer.weight.absmax"

    def save(rank, model):
        opened(model).save_checkpoint(tmp_path)

    def load(rank, model):
        model.get_parameter(PACKED[0]).quant_state.absmax.zero_()
        engine = opened(model)
        engine.load_checkpoint(tmp_path)
        assert name in dict(model.named_parameters())
        return dict(engine.consolidated())

    with monkeypatch.context() as patch:
        patch.setattr("hf_zero.setup.steps.parameter_classes", ScalesAsBuffers)
        on_ranks(RANKS, save, build=wide)
    files = {key for file in tmp_path.glob("*/*.safetensors") for key in load_file(file)}
    assert f"buffer::{name}" in files
    given = wide().state_dict()
    for whole in on_ranks(RANKS, load, build=wide):
        assert whole[name].any() and alike(whole[name], given[name])


def test_what_is_converted_or_written_whole_is_not_cast(tmp_path):
    """What stands beside the bytes is kept."""
    storage = torch.bfloat16
    given = saved_over_bytes(tmp_path / "run", storage=storage)
    for dtype in (None, "bfloat16", "float32"):
        convert_checkpoint(tmp_path / "run", tmp_path / "out", dtype, adapters=False)
        made = load_file(tmp_path / "out" / "model.safetensors")
        assert set(made) == set(given)
        packed = [name for name in given if "up.base_layer.weight" in name or "down.weight" in name]
        assert packed and all(alike(made[name], given[name]) for name in packed)
        wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert made["enter.weight"].dtype == wanted
    model = build(storage)()
    model.get_parameter(PACKED[0]).data.zero_()
    load_state_dict_from_zero_checkpoint(model, tmp_path / "run")
    assert bases_alike(model.state_dict(), given)

    def run(rank, model):
        engine = opened(model)
        engine.save_16bit_model(tmp_path / "whole")
        return [dict(engine.consolidated(each)) for each in (None, torch.float32, torch.bfloat16)]

    for whole in on_ranks(RANKS, run, build=build(storage))[0]:
        assert all(alike(whole[name], given[name]) for name in PACKED)
    file = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(file) == set(given) and all(alike(file[name], given[name]) for name in given)


def of_another_kind(model):
    model.blocks[0].down = LinearOfBytes(torch.nn.Linear(64, 32), torch.float8_e4m3fn)


def in_other_blocks(model):
    model.get_parameter(PACKED[0]).quant_state.blocksize = 32


def with_facts_of_another_length(model):
    state = model.get_parameter(PACKED[0]).quant_state
    facts, written = torch.zeros(5, dtype=torch.int64), state.as_dict
    state.as_dict = lambda: {**written(), "quant_state.stand_in__nf4": facts}


REFUSED = {
    r"blocks\.0\.down\.weight \(checkpoint torch\.int8, model torch\.float8_e4m3fn\)": (
        of_another_kind
    ),
    r"other values of blocks\.0\.up\.base_layer\.weight\.quant_state": in_other_blocks,
    r"quantized weights of other values or another kind: .*quant_state.*load the base that it": (
        with_facts_of_another_length
    ),
}


def test_bytes_of_another_kind_and_facts_that_differ_are_refused(tmp_path):
    saved_over_bytes(tmp_path)
    for said, change in REFUSED.items():

        def run(rank, model, said=said, change=change):
            change(model)
            with pytest.raises(CheckpointError, match=said):
                opened(model).load_checkpoint(tmp_path)

        on_ranks(RANKS, run, build=build())
