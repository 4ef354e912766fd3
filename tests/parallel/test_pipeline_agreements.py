"""What the stages of a pipeline agree on before a step, on two gloo processes of a stage each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import OffloadError, UnusedParameterError
from hf_zero.ops.files import parse_faults
from hf_zero.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from hf_zero.parallel.pipeline.module import set_random_seed
from tests.helpers.cells import in_one_item
from tests.helpers.processes import run_processes, say
from tests.parallel import pipeline_features as features
from tests.parallel.pipelines import (
    CLIP,
    STEPS,
    VOCAB,
    WIDTH,
    batches,
    config,
    loss_of,
    pipeline,
    plain,
    sgd,
    unembed,
    windows_of,
)

MICRO, TIMEOUT = 2, 30.0


class Spare(nn.Embedding):
    """An embedding with a parameter that only a call with ``spare`` uses."""

    def __init__(self, uses: bool = False):
        super().__init__(VOCAB, WIDTH)
        self.spare, self.uses = nn.Parameter(torch.ones(WIDTH)), uses

    def forward(self, input):
        return super().forward(input) + (self.spare if self.uses else 0.0)


def use_spare(module, hidden):
    return unembed(module, hidden * module.spare)


def layers(first, last):
    """Tied over both stages; ``first`` and ``last`` tell which of them uses ``spare``."""
    return [
        TiedLayerSpec("embed", Spare, first),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("embed", Spare, first, forward_fn=use_spare if last else unembed),
    ]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def started(module, optimizer=sgd, clip=CLIP, **zero):
    written = config(MICRO, 1, timeout=TIMEOUT, gradient_clipping=clip)
    written["zero_optimization"] |= zero
    return hf_zero.initialize(model=module, config=written, optimizer=optimizer)[0]


def _write_fails(rank, folder, fails):
    """The error of the step after a failed write on rank ``fails``."""
    offload = {"device": "nvme", "nvme_path": folder}
    engine = started(pipeline(2, 2), offload_optimizer=offload)
    data = iter(batches(3 * MICRO))
    engine.train_batch(data)
    engine.updater.finish()
    files = engine.sharded_model.placement.files
    files.write_error()
    if rank == fails:
        for one in files._files.values():
            one._queue.inject(parse_faults("write:1+:ENOSPC"))
    engine.train_batch(data)
    with pytest.raises(OffloadError) as raised:
        engine.train_batch(data)
    told = str(raised.value), engine.global_steps
    try:
        engine.destroy()
    except OSError:
        assert rank == fails
    return told


def _unused(rank):
    """The error of a step where only the first stage has a parameter without a gradient."""
    made = [
        LayerSpec(Spare),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, VOCAB),
    ]
    engine = started(pipeline(2, 2, made), ignore_unused_parameters=False)
    with pytest.raises(UnusedParameterError) as raised:
        engine.train_batch(iter(batches(MICRO)))
    engine.destroy()
    return str(raised.value)


def _norms(rank, frozen):
    """Norms that a hook before the step has measured, and those of the step."""
    module = pipeline(2, 2)
    features.freeze(module, frozen)
    engine = started(module, clip=0.0)  # a hook would find the clipped gradient
    measured, data = [engine.gradient_norm()], iter(batches(STEPS * MICRO))
    engine.optimizer.register_step_pre_hook(lambda *_: measured.append(engine.gradient_norm()))
    norms = [0.0]
    for _ in range(STEPS):
        engine.train_batch(data)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return measured, norms


def _tied(rank, uses):
    """Weights of a tied module after steps with weight decay."""
    engine = started(pipeline(2, 2, layers(*uses)), adamw)
    data = iter(batches(STEPS * MICRO))
    for _ in range(STEPS):
        engine.train_batch(data)
    weights = {
        name: p.detach().clone() for name, p in engine.module.named_parameters() if "tied" in name
    }
    engine.destroy()
    return weights


FROZEN = {"first": ("tied_modules", "1.", "3."), "last": ("tied_modules", "5.", "7.")}
USES = {"no stage": (False, False), "the first": (True, False), "the last": (False, True)}


def _rank(rank, folder):
    found: dict[str, Any] = {}
    for fails in (0, 1):
        say(f"write fails on {fails}")
        found[f"write fails on {fails}"] = _write_fails(rank, folder, fails)
    say("unused")
    found["unused"] = _unused(rank)
    for name, frozen in FROZEN.items():
        say(f"norms, {name}")
        found[f"norms, {name}"] = _norms(rank, frozen)
    for name, uses in USES.items():
        say(f"tied, {name}")
        found[f"tied, {name}"] = _tied(rank, uses)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return run_processes(2, _rank, str(tmp_path_factory.mktemp("disk")), timeout=240.0)


def test_a_failed_write_is_told_on_all_stages(launched):
    for fails in (0, 1):
        for text, steps in (answers[f"write fails on {fails}"] for answers in launched):
            assert f"failed: rank {fails}: " in text and text.count("; rank") == 0, text
            assert steps == 2


def test_an_unused_parameter_is_told_on_all_stages(launched):
    for answers in launched:
        assert "0.spare got no gradient on at least one rank" in answers["unused"]


def test_a_hook_measures_the_norm_of_all_stages(launched):
    """Also on a stage that is frozen."""

    def check(name):
        for measured, norms in (answers[f"norms, {name}"] for answers in launched):
            assert measured == pytest.approx(norms, rel=1e-6) and min(norms[1:]) > 0.0

    in_one_item(FROZEN)(check)()


def _plain(uses):
    """The tied module after the same steps in one process."""
    first, last = uses
    built = nn.ModuleList()
    for index, layer in enumerate(layers(first, last)[:3]):
        set_random_seed(1234 + index)
        built.append(layer.build())
    embed, *inner = built

    def loss(model, batch):
        hidden = embed(batch[0])
        for linear in inner:
            hidden = linear(hidden)
        return loss_of((use_spare if last else unembed)(embed, hidden), batch[1])

    plain(built, windows_of(batches(STEPS * MICRO), MICRO, 1), loss, adamw)
    return dict(embed.named_parameters())


def test_a_tied_parameter_that_no_stage_uses_stays_as_it_is(launched):
    """And one that a single stage uses is updated on both."""

    def check(name):
        wanted = _plain(USES[name])
        assert bool((wanted["spare"] == 1.0).all()) == (name == "no stage")
        for weights in (answers[f"tied, {name}"] for answers in launched):
            assert len(weights) == 2
            for key, value in weights.items():
                want = wanted[key.rpartition(".")[2]].detach()
                assert (value - want).norm() <= 1e-5 * want.norm(), key

    in_one_item(USES)(check)()
