"""Cases for a model that is loaded in shards, on every rank, against the plain loader in the same
process.
"""

from __future__ import annotations

import gc
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

    named = model.named_parameters()
    whole = [name for name, p in named if not isinstance(p, ReleasedParameter)]
    assert not whole, whole[:4]


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype and torch.equal(mine[name], value), name


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
    pairs = zip(found.named_parameters(), expected.parameters(), strict=True)
    assert all(mine.requires_grad == theirs.requires_grad for (_, mine), theirs in pairs)
    assert found.training == expected.training


def let_go(*models: nn.Module) -> None:
    """Take the engines off, and their process groups with them."""
    from hf_zero.zero.layout.flat_buffer import owner_of

    for model in models:
        engines = {
            flat.engine_flats.engine()
            for flat in map(owner_of, model.parameters())
            if flat is not None
        }
        for engine in engines:
            engine.destroy()
            engine.mesh.close()


def assert_loads_as(found: Any, expected: Any) -> None:
    assert_same_model(found, expected)
    let_go(found)


def tokens(step: int = 0) -> torch.Tensor:
    return inputs("llama")["input_ids"] + step  # [2 samples, 8]


def initialize(model: nn.Module, config: dict[str, Any] | None = None) -> Any:
    import hf_zero

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config or CONFIG)[0]


def language_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def assert_trains_alike(rank: int, found: nn.Module, expected: nn.Module) -> None:
    """Two steps of ``found`` under ZeRO are those of ``expected`` in one process."""
    engine = initialize(found)
    assert_released(found)
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        loss = language_loss(expected, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = language_loss(engine, tokens(step)[rank : rank + 1])
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


def once(rank: int, do: Callable[[], Any]) -> None:
    """Write on rank 0 what all ranks then read."""
    if rank == 0:
        do()
    dist.barrier()


def written(rank: int, path: Path, model: Any, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with the configuration of ``model`` and ``tensors``."""

    def write() -> None:
        model.config.save_pretrained(path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    once(rank, write)
    return path


def loads_like_the_plain_loader(rank: int, folder: Path, name: str) -> None:
    torch.manual_seed(7)
    expected, told = plain(name, folder, output_loading_info=True)
    torch.manual_seed(7 + rank)
    found, info = held(name, folder, output_loading_info=True)
    assert info == told
    if name in LOGITS:
        with torch.no_grad():
            assert torch.equal(found(**inputs(name)).logits, expected(**inputs(name)).logits)
    assert_loads_as(found, expected)


def dtypes(rank: int, folder: Path) -> None:
    for name, dtype in (("mixtral", "bfloat16"), ("t5", torch.float16)):  # T5 keeps some in fp32
        expected, found = plain(name, folder, dtype=dtype), held(name, folder, dtype=dtype)
        assert found.dtype == expected.dtype == found.config.dtype
        assert_loads_as(found, expected)
    path, cls = folder / "in bf16", animal("llama").cls
    once(rank, lambda: plain("llama", folder, dtype=torch.bfloat16).save_pretrained(path))
    for dtype, wanted in (("auto", torch.bfloat16), (torch.float32, torch.float32)):
        found = load(cls, path, dtype=dtype)
        assert found.dtype == wanted
        assert_loads_as(found, cls.from_pretrained(path, dtype=dtype))


def sizes_that_do_not_match(rank: int, folder: Path) -> None:
    options = {"num_labels": 5, "ignore_mismatched_sizes": True, "output_loading_info": True}
    torch.manual_seed(3)
    expected, told = plain("roberta", folder, **options)
    torch.manual_seed(3 + rank)
    found, info = held("roberta", folder, **options)
    assert info == told and info["mismatched_keys"]
    assert_loads_as(found, expected)
    messages = []
    for way in (plain, held):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") as raised:
            way("roberta", folder, num_labels=5)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def a_new_head(rank: int, folder: Path) -> None:
    import transformers

    options = {"num_labels": 5, "output_loading_info": True}
    cls = transformers.LlamaForSequenceClassification
    torch.manual_seed(3)
    expected, told = cls.from_pretrained(folder / "llama", **options)
    after = torch.rand(3)
    torch.manual_seed(3 + rank)  # rank 0's numbers count
    found, info = load(cls, folder / "llama", **options)
    assert info == told and info["missing_keys"] and info["unexpected_keys"]
    if rank == 0:
        assert torch.equal(torch.rand(3), after)  # as many numbers are drawn
    assert_loads_as(found, expected)


def the_base_of_a_model_and_another_configuration(rank: int, folder: Path) -> None:
    import transformers

    auto = transformers.AutoModel
    found = load(auto, folder / "mixtral")
    assert type(found) is transformers.MixtralModel
    assert_loads_as(found, auto.from_pretrained(folder / "mixtral"))
    config = transformers.AutoConfig.from_pretrained(folder / "llama")
    config.num_hidden_layers = 1
    found = held("llama", folder, config=config)
    assert len(found.model.layers) == 1
    assert_loads_as(found, plain("llama", folder, config=config))


def a_state_dict_that_is_here_already(rank: int, folder: Path) -> None:
    import hf_zero

    def loaded() -> Any:
        how = {"config": expected.config, "state_dict": values}
        return hf_zero.from_pretrained(animal("llama").cls, None, "zero3", **how)

    expected = plain("llama", folder)
    values = expected.state_dict()
    found = loaded()
    assert_same_model(found, expected)
    assert_trains_alike(rank, found, expected)
    # these are its values, not missing ones
    values["lm_head.weight"] = torch.full((99, 32), float("nan"))
    assert loaded().lm_head.weight.isnan().all()


def files_of_torch(rank: int, folder: Path) -> None:
    cls, model = animal("bert").cls, plain("bert", folder)
    for zipped in (True, False):
        path = folder / f"bin {zipped}"

        def write(path: Path = path, zipped: bool = zipped) -> None:
            model.config.save_pretrained(path)
            how = {"_use_new_zipfile_serialization": zipped}
            values = {**model.state_dict(), "epoch": 3}  # which is no tensor
            torch.save(values, path / "pytorch_model.bin", **how)

        once(rank, write)
        assert_loads_as(load(cls, path), cls.from_pretrained(path))


def both_names_of_a_tied_weight(rank: int, folder: Path) -> None:
    """Equal, they are tied; different, they are two. NaN in the checkpoint is no missing weight."""
    cls, model = animal("qwen2").cls, plain("qwen2", folder)
    for more in (0.0, 1.0, float("nan")):
        tensors = {name: value.clone() for name, value in model.state_dict().items()}
        tensors["lm_head.weight"][-1, -1] += more
        path = written(rank, folder / f"both {more}", model, tensors)
        found = load(cls, path)
        assert (found.lm_head.weight is found.model.embed_tokens.weight) is (more == 0.0)
        if more == more:
            assert_same_model(found, cls.from_pretrained(path))
        else:
            assert found.state_dict()["lm_head.weight"].isnan().sum() == 1
        let_go(found)


def stages_and_devices(rank: int, folder: Path) -> None:
    """Where parameters are not sharded the model is whole."""
    import hf_zero
    from hf_zero.errors import ConfigError

    def whole(config: Any) -> None:
        found = hf_zero.from_pretrained(animal("llama").cls, folder / "llama", config)
        assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
        assert_same_model(found, expected)

    expected = plain("llama", folder)
    whole({"zero_optimization": {"stage": 0}})
    with zero3_alive():
        whole("zero2")
    with pytest.raises(ConfigError, match=r"from_pretrained\(device_map=\.\.\.\)"):
        held("llama", folder, device_map="auto")
    with torch.device("meta"):  # of the script; it would be the model's
        found = held("llama", folder)
    assert_same_state(found, expected)
    let_go(found)


def weights_that_nothing_initializes(rank: int, folder: Path) -> None:
    import transformers

    from hf_zero.errors import ConfigError

    class Scaled(transformers.BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.full((3,), 2.5))
            self.post_init()

    with pytest.raises(ConfigError, match=r"no values for scale"):
        load(Scaled, folder / "bert")
    model = plain("clip", folder)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    del tensors["logit_scale"]
    path = written(rank, folder / "clip without its scale", model, tensors)
    with pytest.raises(ConfigError, match="no values for logit_scale"):
        load(transformers.CLIPModel, path)


def files_that_are_damaged(rank: int, folder: Path) -> None:
    """Each rank reads a folder of its own. Those of all are damaged, or the last one's alone, or
    its disk fails in the middle, when the others have read their parts. Nothing is left over.
    """
    from hf_zero.checkpoint.tensorfile import TensorFile
    from hf_zero.errors import CheckpointError, RankMismatchError

    last, read_into = dist.get_world_size() - 1, TensorFile.read_into
    cls, path = animal("llama").cls, folder / f"own {rank}"

    def fails(self: TensorFile, name: str, *rest: Any) -> None:
        if "layers.1" in name:
            raise OSError(5, "Input/output error")
        read_into(self, name, *rest)

    def refused(kind: type[Exception], said: str, of_others: str = "") -> None:
        one = of_others and rank != last
        with pytest.raises(RankMismatchError if one else kind, match=of_others if one else said):
            load(cls, path)
        assert open_files() == []
        let_go(held("llama", folder))

    shutil.copytree(folder / "llama", path)
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setattr(TensorFile, "read_into", fails)
        with pytest.raises(OSError if rank == last else RankMismatchError, match="Input/output"):
            load(cls, path)
    file = sorted(path.glob("*.safetensors"))[1]
    if rank == last:
        os.truncate(file, file.stat().st_size - 100)
    told = rf"rank {last} could not load LlamaForCausalLM: CheckpointError: .*is damaged"
    refused(CheckpointError, "is damaged", told)
    if rank != last:
        os.truncate(file, file.stat().st_size - 100)
    refused(CheckpointError, "is damaged")
    path = folder / "no such folder"
    refused(OSError, "no such folder")


def conversions_that_a_user_registers(rank: int, folder: Path) -> None:
    """Any operation, on whole values where it asks for memory, or a refusal by its name."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    from hf_zero.errors import ConfigError

    class Halved(ConversionOps):
        def convert(self, input_dict: Any, target_patterns: Any = (), **unused: Any) -> Any:
            ((tensor,),) = input_dict.values()
            return {target_patterns[0]: torch.from_numpy(tensor.numpy() / 2)}

    class Doubled(ConversionOps):
        def convert(self, input_dict: Any, target_patterns: Any = (), **unused: Any) -> Any:
            ((tensor,),) = input_dict.values()
            return {target_patterns[0]: tensor.mul_(2)}

    def register(*operations: Any) -> None:
        name = "mlp.up_proj.weight"
        rows = [WeightConverter(name, name, [each]) for each in operations]
        conversion_mapping.register_checkpoint_conversion_mapping(
            "LlamaForCausalLM", rows, overwrite=True
        )

    try:
        register(Halved())
        assert_loads_as(held("llama", folder), plain("llama", folder))
        register(Doubled())
        plain("llama", folder)
        with pytest.raises(ConfigError, match=r"up_proj.weight cannot .* writes into .* Doubled"):
            held("llama", folder)
    finally:
        register()
    assert open_files() == []


def open_files() -> list[str]:
    links = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    targets = (os.readlink(link) for link in links if link.is_symlink())
    return [target for target in targets if target.endswith(".safetensors")]


def freezing_before_initialize(rank: int, folder: Path) -> None:
    expected, found = plain("qwen2", folder), held("qwen2", folder)
    for model in (expected, found):
        model.get_input_embeddings().requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.weight.requires_grad = True
    assert_trains_alike(rank, found, expected)


def adapters(rank: int, folder: Path) -> None:
    """Made here, or from a folder."""
    import peft
    import transformers

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens()).logits

    sizes = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**sizes, init_lora_weights=False)
    models = []
    for model in (held("llama", folder), plain("llama", folder)):
        torch.manual_seed(5)
        models.append(peft.get_peft_model(model, config))
    assert torch.equal(logits(models[0]), logits(models[1]))
    once(rank, lambda: models[1].save_pretrained(folder / "adapter"))
    auto = transformers.AutoModelForCausalLM
    expected, found = auto.from_pretrained(folder / "adapter"), load(auto, folder / "adapter")
    assert_same_state(found, expected)
    wrapped = peft.PeftModel.from_pretrained(held("llama", folder), folder / "adapter")
    for model in (found, wrapped):
        assert torch.equal(logits(model), logits(expected))
    let_go(found, wrapped)
    assert_trains_alike(rank, *models)


def saving(rank: int, folder: Path) -> None:
    """The files hold what the loaded ones held, in the hub's layout."""

    def tensors(path: Path) -> dict[str, torch.Tensor]:
        files = path.glob("*.safetensors")
        return {name: value for file in files for name, value in load_file(file).items()}

    for name in ("mixtral", "qwen2"):
        found, path = held(name, folder), folder / "saved again" / name
        found.save_pretrained(path, max_shard_size=40000)
        dist.barrier()
        before, after = tensors(folder / name), tensors(path)
        assert before.keys() == after.keys() and len(list(path.glob("*.safetensors"))) > 1
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert_released(found)
        let_go(found)


def training_in_bf16_afterwards(rank: int, folder: Path) -> None:
    """It starts from the fp32 values of the files."""
    import hf_zero

    expected, found = plain("llama", folder), held("llama", folder)
    engine = initialize(found, {**CONFIG, "bf16": {"enabled": True}})
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(hf_zero.safe_get_full_fp32_param(mine), theirs)
    engine.destroy()


def bytes_of_the_files_and_what_stays_behind(rank: int, folder: Path) -> None:
    for name in ("qwen2", "mixtral"):
        with counting() as read:
            found = held(name, folder)
        size = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        total = torch.tensor([float(read.bytes)])
        dist.all_reduce(total)
        assert float(total) <= 1.05 * size, name
        assert read.bytes <= 1.15 * size / dist.get_world_size(), name
        assert open_files() == []
        model = weakref.ref(found)
        let_go(found)
        del found
        gc.collect()
        assert model() is None, "nothing keeps the model"


def a_script_with_its_configuration_alive(rank: int, folder: Path) -> None:
    import transformers

    for name, auto in {
        "llama": transformers.AutoModelForCausalLM,
        "clip": transformers.AutoModel,
    }.items():
        expected = auto.from_pretrained(folder / name)
        with zero3_alive():
            found = auto.from_pretrained(folder / name)
            assert_released(found)
            assert_same_state(found, expected)
            if name == "llama":
                asked = {"max_new_tokens": 4, "do_sample": False}
                answers = [model.generate(tokens(), **asked) for model in (found, expected)]
                assert torch.equal(*answers)
        let_go(found)


CASES: dict[str, Callable[[int, Path], None]] = {
    case.__name__.replace("_", " "): case
    for case in (
        dtypes,
        sizes_that_do_not_match,
        a_new_head,
        the_base_of_a_model_and_another_configuration,
        a_state_dict_that_is_here_already,
        files_of_torch,
        both_names_of_a_tied_weight,
        stages_and_devices,
        weights_that_nothing_initializes,
        files_that_are_damaged,
        conversions_that_a_user_registers,
        freezing_before_initialize,
        adapters,
        saving,
        training_in_bf16_afterwards,
        bytes_of_the_files_and_what_stays_behind,
        a_script_with_its_configuration_alive,
    )
}
