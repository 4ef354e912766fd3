"""Activations that are foreseen are those that a pass adds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import FreeBytes
from hf_zero.errors import ConfigError
from tests.cli.invoked import invoke, refusal
from tests.helpers.cells import fast, in_one_item
from tests.helpers.engines import start
from tests.helpers.models import seeded
from tests.helpers.training import plain_sgd

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "use_cache": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
LLAMA = transformers.LlamaConfig(**SIZES)
MIB = 2**20


def llama() -> Any:
    return transformers.LlamaForCausalLM(LLAMA)


def peak_of(run: Callable[[], None]) -> int:
    """The most bytes of tensors that ``run`` adds at once."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    allocations = sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda each: each.start_ns()
    )
    return max(itertools.accumulate(event.nbytes() for event in allocations))


def added(length: int, keys: Any) -> int:
    """By a forward and backward of an engine that has made what stays."""
    model = seeded(llama)
    zero = {"stage": 1, "keep_step_buffers": True}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **keys}
    engine = start(model, plain_sgd(model), config)
    ids = torch.randint(512, (2, length), generator=torch.Generator().manual_seed(3))

    def run() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)

    run()
    engine.step()
    peak = peak_of(run)
    engine.destroy()
    return peak


RECOMPUTED = "no logits, blocks recomputed"
WAYS = ["", "no logits", RECOMPUTED, f"{RECOMPUTED}, MLPs in stretches"]
SCRATCH = 1.5 * MIB  # of torch's attention on a CPU, inside its kernels


@pytest.mark.parametrize("place", fast([2, 3], lambda place: place == 2))
def test_what_is_foreseen_is_what_a_pass_adds(place: int) -> None:
    config, lengths = {"train_micro_batch_size_per_gpu": 2}, [512, 1024]
    rows = hf_zero.estimate(LLAMA, 1, config=config, sequence_lengths=lengths).lengths
    found = []
    for length, row in zip(lengths, rows):
        assert (row.length, row.rows, row.tokens) == (length, 2, length)
        assert [way.name for way in row.ways] == WAYS
        way = row.ways[place]
        assert 0 < way.kept < way.most
        found.append((way.most, added(length, way.keys)))
    for foreseen, measured in found:
        assert measured == pytest.approx(foreseen, rel=0.02, abs=SCRATCH)
    first, second = (more - less for less, more in zip(*found))
    assert second == pytest.approx(first, rel=0.05)


VIT = transformers.ViTConfig(num_hidden_layers=1, architectures=["ViTForImageClassification"])
TENSOR = {"tensor_parallel": {"autotp_size": 2}}


@in_one_item(
    [
        (LLAMA, {"sequence_parallel": 3}, "sequence_parallel_size = 3 .* does not divide 8 ranks"),
        (LLAMA, {"context_parallel": 2, "sequence_lengths": [514]}, "choose a multiple of 4"),
        (LLAMA, {"sequence_parallel": 8}, "sequence_parallel_size = 8 does not divide 4 attention"),
        (LLAMA, {"sequence_parallel": 2, "sequence_lengths": [511]}, "511 tokens do not divide"),
        (LLAMA, {"config": TENSOR}, "beside tensor, .* not known; leave"),
        (VIT, {}, "ViTForImageClassification cannot be run .* leave the sequence lengths out"),
    ]
)
def test_bad_input_is_named(case: tuple[Any, dict[str, Any], str]) -> None:
    model, given, says = case
    with pytest.raises(ConfigError, match=says):
        hf_zero.estimate(model, 8, **{"sequence_lengths": [512], **given})


def proposed(device: int, **given: Any) -> Any:
    free = FreeBytes(device=device, ram=0)
    return hf_zero.propose(LLAMA, 1, free, "fp32", stage=1, margin=0.0, **given)


def test_what_makes_activations_smaller_is_proposed_where_it_is_needed() -> None:
    known: dict[str, Any] = {"sequence_length": 1024}
    (row,) = hf_zero.estimate(LLAMA, 1, "fp32", sequence_lengths=[1024]).lengths
    state = proposed(1 << 40).fit.chosen.needs.device_bytes
    way = row.ways[2]
    found = proposed(state + way.most, **known)
    assert found.fit.chosen.activations == replace(row.ways[0], **vars(way))
    assert found.fit.chosen.needs.device_bytes == state + way.most
    assert all(found.config[key] == value for key, value in way.keys.items())
    ZeroConfig.from_dict(found.config).resolve(1)
    narrow = proposed(state + row.ways[-1].most - 1, **known)
    assert narrow.config["optimizer"]["type"] == "AdamW8bit"
    nothing = proposed(row.ways[-1].most, **known)
    assert nothing.config is None and "activations" in str(nothing.fit.trials[-1].needs.device)


def test_the_command(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    command = f"estimate {tmp_path} --ranks 2 --stage 1 --seq 256"
    shown = invoke(command, "--sp 2")
    assert "each shared by 2 ranks" in shown and "as configured" in shown and "128" in shown
    assert "each shared by 2 ranks" in invoke(command, "--cp 2")
    assert "--cp = 2: it is about sequences" in refusal(f"estimate {tmp_path} --ranks 2 --cp 2")
    assert "--fit is for sequences of one length" in refusal(f"{command} --seq 512 --fit")
