"""Cases for a model that is loaded in shards, on every rank, against the plain loader in the same
process.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from tests.loading.counting import counting
from tests.loading.zoo import LOGITS, animal, inputs

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


# -- loading and comparing -------------------------------------------------------------------------


def plain(name: str, folder: Path, **options: Any) -> Any:
    return animal(name).cls.from_pretrained(folder / name, **options)


def held(name: str, folder: Path, **options: Any) -> Any:
    return load(animal(name).cls, folder / name, **options)


def load(cls: Any, path: Any, **options: Any) -> Any:
    import hf_zero

    answer = hf_zero.from_pretrained(cls, path, "zero3", **options)
    assert_released(answer[0] if isinstance(answer, tuple) else answer)
    return answer


def assert_released(model: nn.Module) -> None:
    from hf_zero.zero.layout.parameter import ReleasedParameter

    whole = [
        name
        for name, parameter in model.named_parameters()
        if type(parameter) is not ReleasedParameter
    ]
    assert not whole, whole[:4]


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    wrong = [
        name
        for name, value in theirs.items()
        if mine[name].dtype != value.dtype or not torch.equal(mine[name], value)
    ]
    assert not wrong, wrong[:4]


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(each) for each in names.values()}


def assert_same_model(found: nn.Module, expected: nn.Module) -> None:
    """State, buffers, ties and what trains."""
    assert_same_state(found, expected)
    assert ties(found) == ties(expected)
    buffers = dict(found.named_buffers())
    for name, buffer in expected.named_buffers():
        assert type(buffers[name]) is torch.Tensor
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name
    for (name, mine), (_, theirs) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert mine.requires_grad == theirs.requires_grad, name
    assert found.training == expected.training


def let_go(*models: nn.Module) -> None:
    """Take the engines off, and their process groups with them."""
    from hf_zero.zero.layout.parameter import owner_of

    for model in models:
        engines = {flat.engine() for flat in map(owner_of, model.parameters()) if flat is not None}
        for engine in engines:
            engine.destroy()
            engine.mesh.close()


def tokens(step: int = 0) -> torch.Tensor:
    return inputs("llama")["input_ids"] + step  # [2 samples, 8]


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: dict[str, Any] | None = None,
) -> Any:
    import hf_zero

    optimizer = optimizer or torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3
    )
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config or CONFIG)[0]


def language_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def assert_trains_alike(
    rank: int,
    found: nn.Module,
    expected: nn.Module,
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = language_loss,
) -> None:
    """Three steps of ``found`` under ZeRO, one sample a rank and no dropout, are those of
    ``expected`` in one process.
    """
    engine = initialize(found)
    assert_released(found)
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-3)
    for step in range(3):
        loss = loss_of(expected, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = loss_of(engine, tokens(step)[rank : rank + 1])
        engine.backward(mine)
        engine.step()
        mean = mine.detach().clone()
        dist.all_reduce(mean)
        assert float(mean) / 2 == pytest.approx(float(loss.detach()), rel=1e-5), step
    engine.destroy()


@contextmanager
def zero3_alive() -> Iterator[None]:
    """A script that has made its ZeRO-3 configuration known to transformers."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(CONFIG)
    try:
        yield
    finally:
        del alive
        unset_hf_deepspeed_config()


@contextmanager
def transformers_lines() -> Iterator[list[str]]:
    """Collect transformers' log messages about the creation of models."""
    import transformers

    logger = transformers.logging.get_logger("transformers.modeling_utils")
    before, said = logger.level, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def once(rank: int, do: Callable[[], Any]) -> None:
    """Write on rank 0 what all ranks then read."""
    if rank == 0:
        do()
    dist.barrier()


# -- every type of model ---------------------------------------------------------------------------


def loads_like_the_plain_loader(rank: int, folder: Path, name: str) -> None:
    torch.manual_seed(7)
    expected, told = plain(name, folder, output_loading_info=True)
    torch.manual_seed(7 + rank)
    found, info = held(name, folder, output_loading_info=True)
    assert info == told
    assert_same_model(found, expected)
    if name in LOGITS:
        with torch.no_grad():
            assert torch.equal(found(**inputs(name)).logits, expected(**inputs(name)).logits)
    let_go(found)


# -- what from_pretrained is asked for -------------------------------------------------------------


def dtypes(rank: int, folder: Path) -> None:
    for name in ("llama", "mixtral", "qwen2", "t5"):  # T5 keeps some in fp32
        for dtype in ("bfloat16", "auto", torch.float16, torch.float64):
            expected, found = plain(name, folder, dtype=dtype), held(name, folder, dtype=dtype)
            assert_same_model(found, expected)
            assert found.dtype == expected.dtype == found.config.dtype
            let_go(found)


def a_dtype_that_is_stored(rank: int, folder: Path) -> None:
    path = folder / "in bf16"
    once(rank, lambda: plain("llama", folder, dtype=torch.bfloat16).save_pretrained(path))
    cls = animal("llama").cls
    for dtype, wanted in (("auto", torch.bfloat16), (torch.float32, torch.float32)):
        found = load(cls, path, dtype=dtype)
        assert found.dtype == wanted
        assert_same_model(found, cls.from_pretrained(path, dtype=dtype))
        let_go(found)


def sizes_that_do_not_match(rank: int, folder: Path) -> None:
    options = {"num_labels": 5, "ignore_mismatched_sizes": True, "output_loading_info": True}
    torch.manual_seed(3)
    expected, told = plain("roberta", folder, **options)
    torch.manual_seed(3 + rank)
    found, info = held("roberta", folder, **options)
    assert info == told and info["mismatched_keys"]
    assert_same_model(found, expected)
    let_go(found)
    messages = []
    for way in (plain, held):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") as raised:
            way("roberta", folder, num_labels=5)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def a_new_head(rank: int, folder: Path) -> None:
    import transformers

    for cls, name in (
        (transformers.BertForSequenceClassification, "bert"),
        (transformers.LlamaForSequenceClassification, "llama"),
    ):
        torch.manual_seed(3)
        expected, told = cls.from_pretrained(folder / name, num_labels=5, output_loading_info=True)
        after = torch.rand(3)
        torch.manual_seed(3 + rank)  # rank 0's numbers count
        found, info = load(cls, folder / name, num_labels=5, output_loading_info=True)
        assert info == told and info["missing_keys"] and info["unexpected_keys"]
        assert_same_model(found, expected)
        if rank == 0:
            assert torch.equal(torch.rand(3), after)  # as many numbers are drawn
        let_go(found)


def the_base_of_a_model(rank: int, folder: Path) -> None:
    import transformers

    found = load(transformers.AutoModel, folder / "mixtral")
    assert type(found) is transformers.MixtralModel
    assert_same_model(found, transformers.AutoModel.from_pretrained(folder / "mixtral"))
    let_go(found)


def a_configuration_of_its_own(rank: int, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder / "llama")
    config.num_hidden_layers = 1
    expected, found = plain("llama", folder, config=config), held("llama", folder, config=config)
    assert_same_model(found, expected)
    assert len(found.model.layers) == 1
    let_go(found)


def a_state_dict_that_is_here_already(rank: int, folder: Path) -> None:
    import hf_zero

    expected = plain("llama", folder)
    cls, values = animal("llama").cls, expected.state_dict()
    found = hf_zero.from_pretrained(cls, None, "zero3", config=expected.config, state_dict=values)
    assert_same_model(found, expected)
    assert_trains_alike(rank, found, expected)
    # these are its values, not missing ones
    values["lm_head.weight"] = torch.full((99, 32), float("nan"))
    assert (
        hf_zero.from_pretrained(cls, None, "zero3", config=expected.config, state_dict=values)
        .lm_head.weight.isnan()
        .all()
    )


def files_of_torch(rank: int, folder: Path) -> None:
    cls = animal("bert").cls
    for zipped in (True, False):
        path = folder / f"bin {zipped}"

        def write(path: Path = path, zipped: bool = zipped) -> None:
            model = plain("bert", folder)
            model.config.save_pretrained(path)
            torch.save(
                model.state_dict(),
                path / "pytorch_model.bin",
                _use_new_zipfile_serialization=zipped,
            )

        once(rank, write)
        found = load(cls, path)
        assert_same_model(found, cls.from_pretrained(path))
        let_go(found)


def both_names_of_a_tied_weight(rank: int, folder: Path) -> None:
    """Equal, they are tied; different, they are two."""
    cls = animal("qwen2").cls
    for equal in (True, False):
        path = folder / f"both {equal}"

        def write(path: Path = path, equal: bool = equal) -> None:
            model = plain("qwen2", folder)
            model.config.save_pretrained(path)
            tensors = {name: value.clone() for name, value in model.state_dict().items()}
            tensors["lm_head.weight"][-1, -1] += 0.0 if equal else 1.0
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

        once(rank, write)
        expected, found = cls.from_pretrained(path), load(cls, path)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) is equal
        assert_same_model(found, expected)
        let_go(found)


def stages_that_do_not_shard_parameters(rank: int, folder: Path) -> None:
    import hf_zero

    expected = plain("llama", folder)
    for stage in (0, 1, 2):
        found = hf_zero.from_pretrained(
            animal("llama").cls, folder / "llama", {"zero_optimization": {"stage": stage}}
        )
        assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
        assert_same_model(found, expected)
    with zero3_alive():
        found = hf_zero.from_pretrained(animal("llama").cls, folder / "llama", "zero2")
        assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
    assert_same_model(found, expected)


def devices(rank: int, folder: Path) -> None:
    from hf_zero.errors import ConfigError

    with pytest.raises(
        ConfigError,
        match=r"from_pretrained\(device_map=\.\.\.\) with zero stage 3: .* drop device_map",
    ):
        held("llama", folder, device_map="auto")
    with torch.device("meta"):  # of the script; it would be the model's
        found = held("llama", folder)
    assert_same_state(found, plain("llama", folder))
    let_go(found)


# -- what goes wrong -------------------------------------------------------------------------------


def weights_that_nothing_initialises(rank: int, folder: Path) -> None:
    import transformers

    from hf_zero.errors import ConfigError

    class Scaled(transformers.BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.full((3,), 2.5))
            self.post_init()

    with pytest.raises(
        ConfigError,
        match=r"no values for scale, and the model's _init_weights gives it none; load "
        r"a checkpoint that has",
    ):
        load(Scaled, folder / "bert")

    path = folder / "clip without its scale"

    def write() -> None:
        model = plain("clip", folder)
        model.config.save_pretrained(path)
        kept = {
            name: value.clone()
            for name, value in model.state_dict().items()
            if name != "logit_scale"
        }
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})

    once(rank, write)
    with pytest.raises(ConfigError, match="no values for logit_scale"):
        load(transformers.CLIPModel, path)


def values_that_are_no_numbers(rank: int, folder: Path) -> None:
    """NaN in the checkpoint is no missing weight."""
    path = folder / "with nan"

    def write() -> None:
        model = plain("llama", folder)
        model.lm_head.weight.data[0, 0] = float("nan")
        model.save_pretrained(path)

    once(rank, write)
    found = load(animal("llama").cls, path)
    assert found.state_dict()["lm_head.weight"].isnan().sum() == 1
    let_go(found)


def damaged_files(rank: int, folder: Path) -> None:
    from hf_zero.errors import CheckpointError

    path = folder / "damaged"

    def write() -> None:
        shutil.copytree(folder / "llama", path)
        file = sorted(path.glob("*.safetensors"))[1]
        os.truncate(file, file.stat().st_size - 100)

    once(rank, write)
    with pytest.raises(CheckpointError, match="is damaged"):
        load(animal("llama").cls, path)
    with pytest.raises(OSError, match="no such folder"):
        load(animal("llama").cls, folder / "no such folder")
    assert open_files() == []
    let_go(held("llama", folder))  # nothing of it is left over


def files_that_one_rank_lacks(rank: int, folder: Path) -> None:
    """Each rank reads a folder of its own; the last one's is damaged."""
    from hf_zero.errors import CheckpointError, RankMismatchError

    last = dist.get_world_size() - 1
    path = folder / f"own {rank}"
    shutil.copytree(folder / "llama", path)
    if rank == last:
        file = sorted(path.glob("*.safetensors"))[1]
        os.truncate(file, file.stat().st_size - 100)
    told = rf"rank {last} could not load LlamaForCausalLM: CheckpointError: .*is damaged"
    with pytest.raises(
        CheckpointError if rank == last else RankMismatchError,
        match="is damaged" if rank == last else told,
    ):
        load(animal("llama").cls, path)
    assert open_files() == []
    let_go(held("llama", folder))


def files_that_one_rank_cannot_read(rank: int, folder: Path) -> None:
    """The disk fails in the middle, when the others have read their parts."""
    from hf_zero.checkpoint.tensorfile import TensorFile
    from hf_zero.errors import RankMismatchError

    last = dist.get_world_size() - 1
    read_into = TensorFile.read_into

    def fails(self: TensorFile, name: str, *rest: Any) -> None:
        if "layers.1" in name:
            raise OSError(5, "Input/output error")
        read_into(self, name, *rest)

    told = rf"rank {last} could not read its part of the model: OSError: .*Input/output error"
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(TensorFile, "read_into", fails)
        with pytest.raises(
            OSError if rank == last else RankMismatchError,
            match="Input/output error" if rank == last else told,
        ):
            load(animal("llama").cls, folder / "llama")
    let_go(held("llama", folder))


def open_files() -> list[str]:
    links = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [
        target
        for target in (os.readlink(link) for link in links if link.is_symlink())
        if target.endswith(".safetensors")
    ]


def nothing_stays_behind(rank: int, folder: Path) -> None:
    found = held("llama", folder)
    assert open_files() == []
    model = weakref.ref(found)
    let_go(found)
    del found
    gc.collect()
    assert model() is None


# -- what is done with a held model ----------------------------------------------------------------


def freezing_before_initialize(rank: int, folder: Path) -> None:
    for name in ("llama", "mixtral", "qwen2"):
        expected, found = plain(name, folder), held(name, folder)
        for model in (expected, found):
            model.get_input_embeddings().requires_grad_(False)
            model.model.layers[0].requires_grad_(False)
            model.model.layers[0].self_attn.q_proj.weight.requires_grad = True
        assert_trains_alike(rank, found, expected)


def training_all_of_it(rank: int, folder: Path) -> None:
    assert_trains_alike(rank, held("gpt2", folder), plain("gpt2", folder))


def modules_added_before_initialize(rank: int, folder: Path) -> None:
    expected, found = plain("llama", folder), held("llama", folder)
    for model in (expected, found):
        torch.manual_seed(5)
        model.requires_grad_(False)
        model.extra = nn.Linear(32, 99)

    def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        answer = model(input_ids=ids, output_hidden_states=True)
        logits = answer.logits + getattr(model, "module", model).extra(answer.hidden_states[-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    assert_trains_alike(rank, found, expected, loss_of)


def adapters(rank: int, folder: Path) -> None:
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    models = []
    for model in (held("llama", folder), plain("llama", folder)):
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config))
    with torch.no_grad():
        assert torch.equal(
            models[0](input_ids=tokens()).logits, models[1](input_ids=tokens()).logits
        )
    assert_trains_alike(rank, *models)


def adapters_from_a_folder(rank: int, folder: Path) -> None:
    import peft
    import transformers

    path = folder / "adapter"
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    once(rank, lambda: peft.get_peft_model(plain("llama", folder), config).save_pretrained(path))
    expected = transformers.AutoModelForCausalLM.from_pretrained(path)
    found = load(transformers.AutoModelForCausalLM, path)
    assert_same_state(found, expected)
    wrapped = peft.PeftModel.from_pretrained(held("llama", folder), path)
    with torch.no_grad():
        for model in (found, wrapped):
            assert torch.equal(
                model(input_ids=tokens()).logits, expected(input_ids=tokens()).logits
            )
    let_go(found, wrapped)


def more_tokens(rank: int, folder: Path) -> None:
    for name, mean in (("llama", False), ("llama", True), ("qwen2", False), ("bert", False)):
        expected = plain(name, folder)
        torch.manual_seed(5)
        expected.resize_token_embeddings(110, mean_resizing=mean)
        with zero3_alive():
            found = plain(name, folder)
            torch.manual_seed(5)
            found.resize_token_embeddings(110, mean_resizing=mean)
            assert ties(found) == ties(expected)
            assert_trains_alike(rank, found, expected)


def gathered_parameters(rank: int, folder: Path) -> None:
    import hf_zero

    expected, found = plain("llama", folder), held("llama", folder)
    with hf_zero.GatheredParameters(found.model.embed_tokens.weight):
        assert torch.equal(found.model.embed_tokens.weight, expected.model.embed_tokens.weight)
    assert_released(found)
    with hf_zero.GatheredParameters(list(found.parameters()), modifier_rank=1), torch.no_grad():
        if rank == 1:
            for parameter in found.parameters():
                parameter.add_(1)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(1)
    assert_same_state(found, expected)
    assert_trains_alike(rank, found, expected)


def saving(rank: int, folder: Path) -> None:
    """The files hold what the loaded ones held, in the hub's layout."""
    for name in ("llama", "mixtral", "qwen2", "t5"):
        found = held(name, folder)
        path = folder / "saved again" / name
        found.save_pretrained(path, max_shard_size=40000)
        dist.barrier()
        before, after = (
            {k: v for file in each.glob("*.safetensors") for k, v in load_file(file).items()}
            for each in (folder / name, path)
        )
        assert before.keys() == after.keys() and len(list(path.glob("*.safetensors"))) > 1
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert_released(found)
        let_go(found)


def two_at_once(rank: int, folder: Path) -> None:
    first, second = held("llama", folder), held("bert", folder)
    expected = plain("bert", folder)
    assert_same_model(first, plain("llama", folder))
    assert_trains_alike(rank, first, plain("llama", folder))
    assert_same_model(second, expected)
    with torch.no_grad():
        assert torch.equal(second(**inputs("bert")).logits, expected(**inputs("bert")).logits)
    let_go(second)


def two_in_one(rank: int, folder: Path) -> None:
    """A module of the user's around two held models."""

    class Both(nn.Module):
        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return language_loss(self.first, ids) + language_loss(self.second, ids)

    found = Both(held("llama", folder), held("gpt2", folder))
    expected = Both(plain("llama", folder), plain("gpt2", folder))
    assert_trains_alike(rank, found, expected, lambda model, ids: model(ids))


def other_stages_afterwards(rank: int, folder: Path) -> None:
    expected = plain("llama", folder)
    for stage in (0, 2):
        engine = initialize(
            held("llama", folder), config={**CONFIG, "zero_optimization": {"stage": stage}}
        )
        assert_same_state(engine.module, expected)
        engine.backward(language_loss(engine, tokens()[rank : rank + 1]))
        engine.step()
        engine.destroy()


def masters_of_16_bit_training(rank: int, folder: Path) -> None:
    """Training in bf16 starts from the fp32 values of the files."""
    import hf_zero

    expected, found = plain("llama", folder), held("llama", folder)
    engine = initialize(found, config={**CONFIG, "bf16": {"enabled": True}})
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(hf_zero.safe_get_full_fp32_param(mine), theirs)
    engine.destroy()


# -- what is read ----------------------------------------------------------------------------------


def bytes_of_the_files(rank: int, folder: Path) -> None:
    for name in ("llama", "qwen2", "mixtral", "bert"):
        with counting() as read:
            found = held(name, folder)
        size = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        total = torch.tensor([float(read.bytes)])
        dist.all_reduce(total)
        assert float(total) <= 1.05 * size, name
        assert read.bytes <= 1.15 * size / dist.get_world_size(), name
        let_go(found)


# -- scripts that never call hf_zero ---------------------------------------------------------------


def a_script_with_its_configuration_alive(rank: int, folder: Path) -> None:
    import transformers

    names = {
        "llama": transformers.AutoModelForCausalLM,
        "mixtral": transformers.AutoModelForCausalLM,
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "clip": transformers.AutoModel,
        "wav2vec2": transformers.AutoModelForCTC,
    }
    for name, auto in names.items():
        with transformers_lines() as said:
            expected = auto.from_pretrained(folder / name)
            if name == "llama":
                let_go(held(name, folder))
        assert not any("Detected DeepSpeed ZeRO-3" in line for line in said)
        with zero3_alive(), transformers_lines() as said:
            found = auto.from_pretrained(folder / name)
            assert any("Detected DeepSpeed ZeRO-3" in line for line in said)
            assert_released(found)
            assert_same_model(found, expected)
            if name == "llama":
                asked = {"max_new_tokens": 4, "do_sample": False}
                assert torch.equal(
                    found.generate(tokens(), **asked), expected.generate(tokens(), **asked)
                )
        let_go(found)


def the_trainer(rank: int, folder: Path) -> None:
    """Its arguments are made before the model, and the model comes in shards; it trains like one
    that came whole.
    """
    import transformers

    from tests.helpers.trainers import logged, options, weights

    data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(32 * 8).view(32, 8) * 7 % 90]
    runs = []
    for whole in (True, False):
        model = plain("llama", folder)
        zero = {"zero_optimization": {"stage": 3}}
        args = transformers.TrainingArguments(
            **options(folder / "trainer", per_device_train_batch_size=2), deepspeed=zero
        )
        if not whole:
            model = plain("llama", folder)
            assert_released(model)
        run = transformers.Trainer(model=model, args=args, train_dataset=data)
        run.train()
        runs.append((logged(run), weights(run)))
        run.model_wrapped.destroy()
        run.accelerator.free_memory()
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
        del args, run
    (losses, trained), (expected, whole_weights) = runs[1], runs[0]
    assert losses == expected and len(losses) == 4
    assert all(torch.equal(value, whole_weights[name]) for name, value in trained.items())


CASES: dict[str, Callable[[int, Path], None]] = {
    case.__name__.replace("_", " "): case
    for case in (
        dtypes,
        a_dtype_that_is_stored,
        sizes_that_do_not_match,
        a_new_head,
        the_base_of_a_model,
        a_configuration_of_its_own,
        a_state_dict_that_is_here_already,
        files_of_torch,
        both_names_of_a_tied_weight,
        stages_that_do_not_shard_parameters,
        devices,
        weights_that_nothing_initialises,
        values_that_are_no_numbers,
        damaged_files,
        files_that_one_rank_lacks,
        files_that_one_rank_cannot_read,
        nothing_stays_behind,
        freezing_before_initialize,
        training_all_of_it,
        modules_added_before_initialize,
        adapters,
        adapters_from_a_folder,
        more_tokens,
        gathered_parameters,
        saving,
        two_at_once,
        two_in_one,
        other_stages_afterwards,
        masters_of_16_bit_training,
        bytes_of_the_files,
        a_script_with_its_configuration_alive,
        the_trainer,
    )
}
