"""``from_pretrained`` with bitsandbytes' 4 bits in shards, on real ranks: the plain loader's bytes,
scales and losses. Runs where bitsandbytes is installed: ``pip install bitsandbytes``.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from hf_zero.engine import engines_of
from hf_zero.errors import ConfigError
from hf_zero.integrations.transformers.loading import read_later
from hf_zero.loading import read_pending
from hf_zero.zero.layout.attributes import parts_of
from tests.helpers.processes import run_processes, say
from tests.loading.cases import let_go, load
from tests.loading.counting import counting
from tests.ranks.test_quantized import alike

pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")

WIDTH = 256


def llama(folder: Path, width: int = WIDTH, inner: int = 2 * WIDTH) -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=width, intermediate_size=inner, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def gpt2(folder: Path) -> None:
    """Its layers are transposed."""
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=WIDTH, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


MODELS = {"llama": llama, "gpt2": gpt2}


def options(**more: Any) -> dict[str, Any]:
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **more}
    return {"quantization_config": transformers.BitsAndBytesConfig(**four)}


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16}),
    ("gpt2", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.bfloat16}),
    ("gpt2", {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.float32}),
]


def assert_same(found: Any, expected: Any) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        assert mine[name].shape == value.shape and alike(mine[name], value), name


def loads_as_the_plain_loader(rank: int, folder: Path) -> None:
    transformers.logging.disable_progress_bar()
    cls = transformers.AutoModelForCausalLM
    for name, kind in KINDS:
        say(f"{name} {kind}")
        expected = cls.from_pretrained(folder / name, **options(**kind))
        found = load(cls, folder / name, **options(**kind))
        assert_same(found, expected)
        if rank == 0:
            expected.save_pretrained(folder / "packed")
        dist.barrier()
        say(f"{name} {kind}, quantized before")
        with counting() as read:
            again = load(cls, folder / "packed")
        assert_same(again, expected)
        total = torch.tensor(float(read.bytes))
        dist.all_reduce(total)
        state = expected.state_dict()
        held = {name: state[name] for name in {v.data_ptr(): n for n, v in state.items()}.values()}
        size = sum(value.nbytes for value in held.values())
        small = sum(v.nbytes for n, v in held.items() if ".quant" in n or "nested" in n)
        # tables and what a state says of itself are read on each rank
        assert size <= total <= size + small + 64 * len(held)
        ids = torch.arange(16).view(2, 8)
        with torch.no_grad():
            logits = [model.train()(ids).logits for model in (expected, found, again)]
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
        let_go(found, again)
        dist.barrier()


def test_bytes_and_scales_are_those_of_the_plain_loader(tmp_path: Path) -> None:
    for name, make in MODELS.items():
        make(tmp_path / name)
    run_processes(2, loads_as_the_plain_loader, tmp_path, timeout=300)


INT8 = {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}


def of_torchao(name: str) -> dict[str, Any]:
    quantization = importlib.import_module("torchao.quantization")
    config = transformers.TorchAoConfig(getattr(quantization, name)())
    return {"quantization_config": config}


def by_rows() -> list[tuple[str, dict[str, Any]]]:
    kinds = [("llama", INT8), ("gpt2", INT8)]
    if importlib.util.find_spec("torchao"):
        names = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
        kinds += [("llama", of_torchao(name)) for name in names]
    return kinds


def plain_parts(model: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        names = parts_of(value)
        found |= {f"{name}.{part}": getattr(value, part) for part in names} or {name: value}
    return found


def loads_rows_as_the_plain_loader(rank: int, folder: Path) -> None:
    transformers.logging.disable_progress_bar()
    cls = transformers.AutoModelForCausalLM
    for number, (name, kind) in enumerate(by_rows()):
        say(f"{name} {kind}")
        expected = cls.from_pretrained(folder / name, **kind)
        want = plain_parts(expected)
        if rank == 0:
            expected.save_pretrained(folder / f"packed {number}")
        dist.barrier()
        ids = torch.arange(16).view(2, 8)
        with torch.no_grad():
            logits = expected(ids).logits
        for path, given in ((folder / name, kind), (folder / f"packed {number}", {})):
            with counting() as read:
                found = load(cls, path, **given)
            mine = plain_parts(found)
            assert set(mine) == set(want)
            for key, value in want.items():
                assert mine[key].shape == value.shape and alike(mine[key], value), key
            # bytes, scales and zero points are each made of a rank's part of the weights
            size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            # each part is made of the rank's weights, or of all if they are transposed
            assert read.bytes <= size * (2.1 if given else 0.6), (name, kind, read.bytes / size)
            engine = engines_of(found)[0]
            share = sum(flat.shard.nbytes for flat in engine.flats)
            whole = sum(value.nbytes for value in {v.data_ptr(): v for v in want.values()}.values())
            assert share <= whole / 2 + 4096 * len(engine.flats)
            with torch.no_grad():
                assert torch.equal(found(ids).logits, logits)
            let_go(found)
            dist.barrier()


def test_rows_of_8_bits_are_those_of_the_plain_loader(tmp_path: Path) -> None:
    for name, make in MODELS.items():
        make(tmp_path / name)
    run_processes(2, loads_rows_as_the_plain_loader, tmp_path, timeout=300)


def refuses_whole_tensors(rank: int, folder: Path) -> None:
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8WeightOnlyConfig()
    per_tensor = patch.object(
        quantization.quant_api, "_float8_weight_only_quant_tensor",
        lambda weight, config: quantization.Float8Tensor.from_hp(
            weight, float8_dtype=torch.float8_e4m3fn, granularity=quantization.PerTensor()
        ),
    )  # fmt: skip
    cls = transformers.AutoModelForCausalLM
    with per_tensor, pytest.raises(ConfigError, match="does not quantize each row of model"):
        load(cls, folder, quantization_config=transformers.TorchAoConfig(config))


def test_weights_with_one_scale_for_all_rows_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")
    llama(tmp_path)
    run_processes(2, refuses_whole_tensors, tmp_path, timeout=120)


LARGE = (1024, 8192)  # of a matrix, 16 MiB in bf16


def loads_within_a_tensor(rank: int, folder: Path) -> None:
    transformers.logging.disable_progress_bar()
    cls = transformers.AutoModelForCausalLM
    let_go(load(cls, folder / "warm", **options(bnb_4bit_use_double_quant=True)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = memory("VmRSS")
    with counting() as read:
        found = load(cls, folder / "large", **options(bnb_4bit_use_double_quant=True))
    peak = memory("VmHWM") - before
    share = sum(flat.shard.nbytes for flat in engines_of(found)[0].flats)
    # memory that allocators hold back is counted, too
    assert peak <= share + 2 * math.prod(LARGE) + (1 << 21), (peak, share)
    # each rank quantizes its own part; the first one reads all once more for scales of scales
    size = sum(file.stat().st_size for file in (folder / "large").glob("*.safetensors"))
    assert read.bytes <= size * (1.6 if rank == 0 else 0.6), (read.bytes, size)


def memory(field: str) -> int:
    """Bytes of this process, as /proc counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def test_no_rank_holds_more_than_its_shard_and_a_tensor(tmp_path: Path) -> None:
    llama(tmp_path / "warm")
    llama(tmp_path / "large", *LARGE)
    run_processes(2, loads_within_a_tensor, tmp_path, timeout=300)


def test_a_model_that_is_read_later_is_quantized_at_once(tmp_path: Path) -> None:
    """No engine would read its scales."""
    llama(tmp_path)
    cls = transformers.AutoModelForCausalLM
    want = cls.from_pretrained(tmp_path, **options())
    with read_later():
        found = cls.from_pretrained(tmp_path, **options())
        read_pending(found)
    assert_same(found, want)


STEPS, ROWS = 4, 6
NVME = {"device": "nvme", "nvme_path": "folder"}
RUNS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "all sharded": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "in files": {"stage": 3, "offload_param": NVME, "stage3_param_persistence_threshold": 0},
}


def adapted(folder: Path, zero: dict[str, Any] | None, kind: str = "lora") -> Any:
    """The model with adapters, as scripts make it; ``zero``: None for a plain one."""
    load_options = options(bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32)
    if kind == "int8":
        load_options = INT8
    elif kind.startswith("torchao"):
        load_options = {**of_torchao(kind.removeprefix("torchao ")), "dtype": torch.float32}
    cls = transformers.AutoModelForCausalLM
    if zero is not None and zero["stage"] == 3 and dist.get_world_size() > 1:
        model = load(cls, folder / "llama", **load_options)
    else:
        model = cls.from_pretrained(folder / "llama", **load_options)
    model = peft.prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, config).train()


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randint(0, 99, (ROWS, 8))


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def trained_plainly(folder: Path, kind: str) -> tuple[list[float], Any]:
    model, losses = adapted(folder, None, kind), []
    optimizer = adam(model)
    for step in range(STEPS):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def engine_of(folder: Path, zero: dict[str, Any], kind: str) -> Any:
    import hf_zero

    model, offload = adapted(folder, zero, kind), zero.get("offload_param")
    if offload is NVME:
        zero = {**zero, "offload_param": {**NVME, "nvme_path": str(folder / "nvme")}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return hf_zero.initialize(model=model, optimizer=adam(model), config=config)[0]


def train(engine: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step).chunk(dist.get_world_size())[rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    whole = torch.stack(losses)
    dist.all_reduce(whole)
    return (whole / dist.get_world_size()).tolist()


def trains_as_one_process(rank: int, folder: Path, kind: str, names: list[str]) -> None:
    transformers.logging.disable_progress_bar()
    want, plain = trained_plainly(folder, kind)
    if rank == 0:
        plain.save_pretrained(folder / f"plain {kind}")
    for name in names:
        say(f"{kind}, {name}")
        engine = engine_of(folder, RUNS[name], kind)
        got = train(engine, rank, range(2))
        engine.save_checkpoint(folder / f"run {kind} {name}")
        got += train(engine, rank, range(2, STEPS))
        assert got == pytest.approx(want, rel=1e-5), (name, got, want)
        state = engine.state_dict()
        if rank == 0:
            engine.module.save_pretrained(folder / f"{kind} {name}", state_dict=state)
            files = [
                folder / path / "adapter_model.safetensors"
                for path in (f"plain {kind}", f"{kind} {name}")
            ]
            theirs, mine = map(load_file, files)
            assert theirs.keys() == mine.keys()
            # int8 layers round what they multiply, and a last bit can change a code
            close = 2e-4 if kind == "int8" else 2e-5
            for key, value in theirs.items():
                torch.testing.assert_close(mine[key], value, rtol=1e-4, atol=close)
        dist.barrier()
        engine.destroy()
        engine.mesh.close()


def resumes(rank: int, folder: Path, want: list[float], name: str, there: str) -> None:
    transformers.logging.disable_progress_bar()
    engine = engine_of(folder, RUNS[name], "lora")
    engine.load_checkpoint(folder / f"run lora {there}")
    assert train(engine, rank, range(2, STEPS)) == pytest.approx(want[2:], rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "int8", "torchao Int8WeightOnlyConfig"])
def test_adapters_train_as_in_one_process(tmp_path: Path, kind: str) -> None:
    if kind.startswith("torchao"):
        pytest.importorskip("torchao", reason="pip install torchao")
    llama(tmp_path / "llama")
    names = list(RUNS) if kind == "lora" else ["all sharded", "in files"]
    run_processes(2, trains_as_one_process, tmp_path, kind, names, timeout=400)
    if kind == "lora":
        want, _ = trained_plainly(tmp_path, kind)
        run_processes(3, resumes, tmp_path, want, "all sharded", "stage 2", timeout=200)
        run_processes(1, resumes, tmp_path, want, "stage 3", "in files", timeout=200)
