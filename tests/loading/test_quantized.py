"""``from_pretrained`` with bitsandbytes' 4 bits in shards, on real ranks: the plain loader's bytes,
scales and losses. Runs where bitsandbytes is installed: ``pip install bitsandbytes``.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from hf_zero.errors import ConfigError
from hf_zero.loading.shard_only import engines_of
from tests.helpers.processes import run_processes, say
from tests.loading.cases import CONFIG, assert_released, let_go, load
from tests.loading.counting import counting
from tests.ranks.test_quantised import alike

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
    assert peak <= share + 2 * math.prod(LARGE), (peak, share)
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


def refuses_maps(rank: int, folder: Path) -> None:
    for given in ("auto", {"model": 0, "lm_head": 1}):
        with pytest.raises(ConfigError, match=r"device_map=.* with zero stage 3.*drop device_map"):
            load_under_config(folder, device_map=given)
    let_go(load_under_config(folder, device_map={"": "cpu"}))


def load_under_config(folder: Path, **more: Any) -> Any:
    """As a script does inside ``zero.Init``."""
    import hf_zero

    with hf_zero.Init(config=CONFIG):
        cls = transformers.AutoModelForCausalLM
        model = cls.from_pretrained(folder, **options(), **more)
    assert_released(model)
    return model


def test_maps_over_devices_are_refused(tmp_path: Path) -> None:
    llama(tmp_path)
    run_processes(2, refuses_maps, tmp_path, timeout=120)
