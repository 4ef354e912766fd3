"""Operations that a profile counts: those of kernels, as many as without them; modules that are
left out.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_zero.measures.flops_profiler import FlopsProfiler
from hf_zero.ops.packed_linear import packed_linear
from hf_zero.ops.sparse_attention import BlockLayout, sparse_attention
from tests.helpers.engines import config_of, start
from tests.helpers.linear_heads import chunked_log_probabilities, chunked_loss
from tests.helpers.models import ARCHITECTURES, tokens
from tests.helpers.stacks import on_ranks
from tests.helpers.training import adamw


def test_a_profile_counts_the_operators_of_kernels():
    """As many operations as without kernels."""

    def run(rank, model, kernels):
        model.set_attn_implementation("eager")
        section = {"enabled": True, "profile_step": 0}
        config = config_of(0, kernels=kernels, flops_profiler=section)
        engine, ids = start(model, adamw(model), config), tokens(0, 0, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        found = engine.measures.profile.profiler.get_total_flops()
        engine.destroy()
        return found

    build = ARCHITECTURES["llama"].build
    (off,) = on_ranks(1, run, "off", build=build)
    assert on_ranks(1, run, ["qkv"], build=build) == [off] and off > 0


def operations(run: Any) -> int:
    profiler = FlopsProfiler(nn.Module())
    profiler.start_profile()
    run()
    profiler.stop_profile()
    return profiler.get_total_flops()


def test_operators_count_as_the_products_that_they_stand_for():
    x = torch.randn(2, 3, 12, requires_grad=True)
    weights = [torch.randn(n, 12, requires_grad=True) for n in (8, 4)]
    plain = operations(lambda: sum(F.linear(x, w).sum() for w in weights).backward())
    assert operations(lambda: packed_linear(x, weights).sum().backward()) == plain
    assert plain == 3 * 2 * 6 * 12 * 12
    rows, head, labels = x.flatten(0, 1), weights[0], torch.tensor([0, 1, 7, 3, 3, 3])
    logits = operations(lambda: F.linear(rows, head))
    assert operations(lambda: chunked_loss(rows, head, labels)) == logits > 0
    scored = operations(lambda: chunked_log_probabilities(rows, head, labels).sum().backward())
    assert scored == (1 + 3) * logits  # logits are computed again

    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    layout = BlockLayout(torch.ones(1, 5, 5), 16)
    with sdpa_kernel(SDPBackend.MATH):
        whole = operations(lambda: F.scaled_dot_product_attention(q, k, v))
    assert operations(lambda: sparse_attention(q, k, v, layout)) == whole
    assert whole == 2 * 2 * 2 * 70 * 70 * 16
    half = BlockLayout(torch.ones(1, 5, 5).tril(), 16)
    attended = 2 * 2 * 2 * 16 * (10 * 16 * 16 + 6 * (4 * 16 + 6))
    assert operations(lambda: sparse_attention(q, k, v, half)) == attended
    assert operations(lambda: sparse_attention(q, k, v, layout, causal=True)) == attended
    both = operations(lambda: sparse_attention(q, k, v, half).sum().backward())
    assert both == attended + attended // 2 * 5


def test_a_module_inside_an_ignored_one_is_left_out_once():
    inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(4, 4), inner)
    profiler = FlopsProfiler(model)
    profiler.start_profile([nn.Linear, nn.Sequential])
    model(torch.ones(2, 4))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 0
    profiler.start_profile([type("None", (nn.Linear,), {}), nn.Sequential])
    model(torch.ones(2, 4))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * 2 * 4 * 4


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_list_of_ignored_modules_has_no_operations_to_lose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = FlopsProfiler(Listed())
    profiler.start_profile([nn.Linear])
    profiler.model(torch.ones(2, 4))
    profiler.stop_profile()
    profiler.print_model_profile()
    assert profiler.get_total_flops() == 0 and "-" not in capsys.readouterr().out


def test_a_forward_that_raises_has_no_seconds() -> None:
    profiler = FlopsProfiler(nn.Linear(4, 4))
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        profiler.model(torch.ones(2, 5))
    assert profiler.get_total_duration() == 0
    began = time.perf_counter()
    profiler.model(torch.ones(2, 4))
    assert 0 < profiler.get_total_duration() <= time.perf_counter() - began
    profiler.end_profile()
