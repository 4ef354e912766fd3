"""Weights of float8 linear layers that are gathered in float8, beside layers that cast gathered
weights, and beside one plain process. The layers are torchao's: ``pip install hf-zero[torchao]``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.techniques.float8_weights import FLOAT8, LARGEST, Float8Weights, is_float8, scales_of
from hf_zero.zero.gather.shared_shards import shard_bytes_of
from hf_zero.zero.layout.flat_layout import FlatLayout
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.float8 import cast
from tests.helpers.models import features, llama, seeded
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, sgd
from tests.ranks.test_quantized_linears import distance, needs_torchao

SCALES = "scales of float8 weights"


def keys(gathers: bool, plan: Plan, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})}
    section = {"recipe": "tensorwise", "emulate": True, "gather_weights": gathers}
    return config_of(3, plan, zero_optimization=sharded, float8_training=section, **more)


def in_float8(model: nn.Module) -> list[nn.Module]:
    """The layers that torchao has put into ``model``."""
    return [module for module in model.modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-14, 1e-6, 0.02, 1.0, 1e30])
def test_a_cast_of_what_arrives_has_the_bytes_that_were_sent(dtype, size):
    def cast_in_one(weight):
        scale = (LARGEST / weight.abs().max().double().clamp(min=1e-12)).float()
        scaled = (weight.float() * scale).clamp(-LARGEST, LARGEST)
        return scaled.to(FLOAT8).view(torch.uint8), scale

    layout = FlatLayout.build([("a", (64, 80)), ("b", (3, 7)), ("none", (0, 5))], 3)
    whole = torch.randn(layout.padded, generator=torch.Generator().manual_seed(3)).mul(size)
    whole = whole.to(dtype)
    codecs = [Float8Weights(layout, layout.shard_range(shard)) for shard in range(3)]
    chunks = whole.chunk(3)
    amax = torch.stack([c.amax(chunk, c._owned[0]) for c, chunk in zip(codecs, chunks)]).amax(0)
    for codec in codecs:
        codec.set_scales(*scales_of(amax))
    messages = torch.cat([codec.encode(chunk) for codec, chunk in zip(codecs, chunks)])
    assert messages.nbytes == layout.padded
    again = Float8Weights(layout, layout.shard_range(1)).encode(whole, 3)  # needs no agreement
    out = torch.full_like(whole, float("nan"))
    codecs[0].decode(messages, out)
    for slot in layout.slots[:2]:
        here = slice(slot.offset, slot.end)
        bytes_of, scale = cast_in_one(whole[here])
        assert torch.equal(messages.view(-1)[here], bytes_of)
        assert torch.equal(again.view(-1)[here], bytes_of)
        got, its_scale = cast_in_one(out[here])
        assert torch.equal(got, bytes_of) and torch.equal(scale, its_scale)


def one_life(rank: int, model: Any, config: Any, micros: int, folder: Path) -> list[torch.Tensor]:
    """Steps with whatever changes weights between them; returns losses and weights."""
    engine = start(model, adamw(model), config)
    found = run_steps(engine, rank, range(2), micros)
    first, second = model.blocks[0].up.weight, model.blocks[1].down.weight
    with hf_zero.GatheredParameters([first], modifier_rank=0), torch.no_grad():
        first[0, 0] = 3.0  # another scale
    found += run_steps(engine, rank, [2], micros)
    master = hf_zero.safe_get_full_fp32_param(second)
    if master is not None:
        hf_zero.safe_set_full_fp32_param(second, master * 0.25)
    found += run_steps(engine, rank, [3], micros)
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    parameters = list(model.parameters())
    with hf_zero.GatheredParameters(parameters):  # the backward is the first to gather
        loss = squared(engine, At(4, 0, rank), parameters[0].dtype)
    found.append(loss.detach())
    for _ in range(micros - 1):
        engine.backward(squared(engine, At(4, 1, rank), parameters[0].dtype))
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        found.append(squared(engine, At(4, 0, rank), next(model.parameters()).dtype))
    engine.train()
    engine.save_checkpoint(str(folder), tag="a")
    found += run_steps(engine, rank, [5], micros)
    engine.load_checkpoint(str(folder), tag="a")
    found += run_steps(engine, rank, [5], micros)
    weights = [*full_weights(engine).values()]
    engine.destroy()
    return found + weights


BF16 = Plan(precision="bf16")
HOST = {"device": "cpu"}
FEW_BITS = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
COMPILED = {"blocks": True, "backend": "aot_eager"}


@needs_torchao
@in_turn(
    ("ranks", "plan", "zero", "more"),
    [
        (2, BF16, {}, {}),
        (3, Plan(precision="fp32", accumulation=2), {}, {}),
        (4, BF16, {"mics_shard_size": 2}, {"activation_checkpointing": {"blocks": True}}),
        (2, BF16, {"offload_param": HOST, "offload_optimizer": HOST}, {}),
        (2, BF16, {"keep_parameter_shards": True}, {"compile": COMPILED}),
        (4, BF16, {"zero_hpz_partition_size": 2}, {}),
        (4, BF16, {"mics_hierarchical_params_gather": True}, {}),
        (1, BF16, {}, {}),
    ],
)  # fmt: skip
def test_results_are_those_of_layers_that_cast_gathered_weights(ranks, plan, zero, more, tmp_path):
    """Bit for bit, with frozen layers among them."""

    def run(rank: int, model: Any, gathers: bool) -> Any:
        model.blocks[2].requires_grad_(False)
        model.blocks[0].down.requires_grad_(False)
        config = keys(gathers, plan, zero, **more)
        return one_life(rank, model, config, plan.accumulation, tmp_path / str(gathers))

    wanted, got = (on_ranks(ranks, run, gathers) for gathers in (False, True))
    for want, found in zip(wanted, got):
        assert len(want) == len(found)
        for number, (one, other) in enumerate(zip(want, found)):
            assert torch.equal(one, other), number


@needs_torchao
@pytest.mark.parametrize("bits", [{}, FEW_BITS], ids=["alone", "beside ZeRO++"])
@on_each_rank(3)
def test_layers_multiply_with_the_cast_of_the_whole_weight(rank, model, bits):
    """The bytes and the scale that torchao computes of the weight in one process; a script that
    asks for the weight gets all its numbers.
    """
    engine = start(model, adamw(model), keys(True, BF16, bits))
    used: dict[nn.Module, Any] = {}
    for layer in in_float8(model):
        layer.register_forward_pre_hook(
            lambda module, _: used.update({module: cast(module.weight)})
        )
    for step in range(3):
        exact = {}
        for layer in in_float8(model):
            with hf_zero.GatheredParameters([layer.weight]):
                exact[layer] = layer.weight.detach().clone()
            master = hf_zero.safe_get_full_fp32_param(layer.weight)
            assert torch.equal(master.bfloat16(), exact[layer])
        run_steps(engine, rank, [step])
        assert len(used) == 6
        for layer, (coded, scale) in used.items():
            want = cast(exact[layer])
            assert torch.equal(coded, want[0]) and torch.equal(scale, want[1])


@needs_torchao
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_stays_beside_one_plain_process(ranks):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted() -> nn.Module:
        model = stack()
        recipe = Float8LinearConfig(emulate=True)
        inside = {f"blocks.{n}.{name}" for n in range(3) for name in ("up", "down")}
        convert_to_float8_training(
            model, config=recipe, module_filter_fn=lambda _, name: name in inside
        )
        return model

    def run(rank: int, model: Any) -> Any:
        engine = start(model, sgd(model), keys(True, Plan()))
        run_steps(engine, rank, range(4))
        return full_weights(engine)

    want, _ = by_hand(sgd, [[(1.0, 0)]] * 4, ranks, build=converted)
    plain, _ = by_hand(sgd, [[(1.0, 0)]] * 4, ranks)
    for found in on_ranks(ranks, run):
        for name, value in want.items():
            assert distance(found[name], value) < 1e-5, name
    assert distance(want["blocks.0.up.weight"], plain["blocks.0.up.weight"]) > 1e-5


@needs_torchao
@on_each_rank(2)
def test_bytes_and_messages(rank, model):
    """Half the bytes of bf16, and one message a step for all scales."""
    engine = start(model, adamw(model), keys(True, Plan(precision="bf16", accumulation=2)))
    coded = [flat for flat in engine.flats if flat.key.endswith("|float8")]
    assert sorted(name for flat in coded for name in flat.parameters) == sorted(
        f"blocks.{n}.{name}.weight" for n in range(3) for name in ("up", "down")
    )
    # their shards are casts of the master weights, as in gathers of bf16
    assert all(flat.cast_master is not None for flat in engine.flats)
    stats = engine.mesh.stats
    run_steps(engine, rank, range(2), 2)
    stats.keep_log = True
    stats.log.clear()
    run_steps(engine, rank, range(2, 4), 2)
    gathers = [(key, nbytes) for kind, key, nbytes in stats.log if kind == "all_gather"]
    assert Counter(key for key, _ in gathers)[SCALES] == 2
    assert dict(gathers)[SCALES] == 2 * 4 * 6  # ranks, bytes, weights
    units = {unit.label: unit for unit in engine.units}
    for key, nbytes in gathers:
        if key != SCALES:
            flats = units[key].sharded_flats
            sizes = [flat.layout.padded * (1 if flat in coded else 2) for flat in flats]
            assert nbytes == sum(sizes)
    order = [key for _, key, _ in stats.log]  # a message in the pass itself could deadlock
    assert order[0] == SCALES
    stats.log.clear()
    engine.eval()
    with torch.no_grad():
        for step in range(2):
            squared(engine, At(step, 0, rank), torch.bfloat16)
    assert [key for _, key, _ in stats.log].count(SCALES) == 1


@needs_torchao
@in_turn(("ranks", "stage"), [(1, 3), (3, 3), (2, 1), (4, 0)])
def test_a_run_resumes_on_other_ranks_and_stages(ranks, stage, tmp_path):
    def saves(rank: int, model: Any) -> Any:
        engine = start(model, adamw(model), keys(True, BF16))
        run_steps(engine, rank, range(2))
        engine.save_checkpoint(str(tmp_path))
        return full_weights(engine)

    def resumes(rank: int, model: Any, gathers: bool) -> Any:
        config = keys(gathers, BF16, {"stage": stage})
        engine = start(model, adamw(model), config)
        engine.load_checkpoint(str(tmp_path))
        weights = full_weights(engine)
        return weights, run_steps(engine, rank, range(2, 4)), full_weights(engine)

    saved = on_ranks(2, saves)[0]
    wanted = on_ranks(ranks, resumes, False)
    got = on_ranks(ranks, resumes, stage == 3)
    for (read, losses, weights), (_, other, others) in zip(wanted, got):
        assert all(torch.equal(read[name], value) for name, value in saved.items())
        assert all(map(torch.equal, losses, other))
        assert all(torch.equal(others[name], value) for name, value in weights.items())


@needs_torchao
@on_each_rank(3)
def test_a_unit_that_is_fetched_has_the_values_of_a_gather(rank, model):
    engine = start(model, adamw(model), keys(True, Plan()))
    unit = engine.units[1]
    for agree in engine.schedule.before_rounding:
        agree()
    unit.launch_gather()
    unit.finish_gather()
    gathered = [flat.views[name].clone() for flat in unit.sharded_flats for name in flat.parameters]
    unit.release()
    chunks = engine.mesh.all_gather_object(shard_bytes_of(unit))
    unit.gather_from({other: data for other, data in enumerate(chunks) if other != rank})
    filled = [flat.views[name] for flat in unit.sharded_flats for name in flat.parameters]
    assert all(map(torch.equal, filled, gathered))
    unit.release()


@needs_torchao
@on_each_rank(2)
def test_a_unit_that_stays_whole_across_a_step(rank, model):
    """It has the new values, by their scales."""
    engine = start(model, adamw(model), keys(True, BF16))
    engine.backward(squared(engine, At(0, 0, rank), torch.bfloat16))
    loss = squared(engine, At(1, 0, rank), torch.bfloat16)  # its backward may follow
    engine.step()
    coded = [flat for flat in engine.flats if flat.spec.gather_codec is not None]
    kept = [flat for flat in coded if flat.full.untyped_storage().size()]
    assert kept and all("blocks.2.up.weight" in flat.parameters for flat in kept)
    for flat in kept:
        whole = flat.whole_from_shards()
        for slot in flat.layout.slots:
            want = cast(whole[slot.offset : slot.end])
            assert all(map(torch.equal, cast(flat.views[slot.name].reshape(-1)), want))
    del loss


@needs_torchao
@on_each_rank(2)
def test_a_write_in_a_forward_is_refused(rank, model):
    """It would keep the other elements of the weight in float8."""
    engine = start(model, adamw(model), keys(True, BF16))

    def writes(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight[0, 0] = 3.0

    model.blocks[1].up.register_forward_pre_hook(writes)
    with pytest.raises(
        PartitionError, match=r"weights sent in float8 with a scale for each weight"
    ):
        run_steps(engine, rank, [0])


@needs_torchao
@on_each_rank(2)
def test_what_trains_changes(rank, model):
    """An engine that is built again for it gathers in float8, too."""
    model.blocks[1].requires_grad_(False)
    optimizer = adamw(stack())
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model.parameters())})
    engine = start(model, optimizer, keys(True, BF16))
    run_steps(engine, rank, [0])
    model.blocks[1].requires_grad_(True)
    run_steps(engine, rank, [1])
    names = {name for flat in engine.flats if flat.spec.gather_codec for name in flat.parameters}
    assert len(names) == 6 and all(flat.trainable for flat in engine.flats)
    engine.mesh.stats.keep_log = True
    run_steps(engine, rank, [2])
    assert SCALES in [key for _, key, _ in engine.mesh.stats.log]


class Tied(nn.Module):
    """Blocks, one with the weight of an embedding, and two with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(3)
        )
        self.blocks[0][0].weight = self.embedding.weight
        self.blocks[2][2].weight = self.blocks[1][2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.embedding.weight.t() @ self.embedding.weight
        for block in self.blocks:
            x = x + block(x)
        return x


@needs_torchao
def test_tied_weights():
    """One that an embedding holds is gathered as it is."""

    def run(rank: int, model: Any, gathers: bool) -> Any:
        engine = start(model, adamw(model), keys(gathers, BF16))
        assert not is_float8(model.embedding.weight)
        assert is_float8(model.blocks[1][2].weight) is gathers
        losses = []
        for step in range(3):
            x = features(step, 0, rank).repeat(1, 32)[:, :32].bfloat16()
            loss = engine(x).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return [*losses, *full_weights(engine).values()]

    wanted, got = (
        on_ranks(2, run, gathers, build=lambda: seeded(Tied)) for gathers in (False, True)
    )
    for want, found in zip(wanted, got):
        assert all(map(torch.equal, want, found))


@needs_torchao
@in_turn(
    ("change", "message"),
    [
        ({"float8_training": {"recipe": "rowwise", "emulate": True, "gather_weights": True}},
         r"does not go with float8_training\.recipe: rowwise: .*write recipe: tensorwise"),
        ({"float8_training": {"gather_weights": True}}, "recipe: null: .*or remove gather_weights"),
        ({"zero_optimization": {"stage": 2}}, r"zero_optimization\.stage: 2: .*write .*stage: 3"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16 has no room for the small"),
        ({"quantize_training": {"enabled": True}}, "quantize_training: both change the weights"),
    ],
)  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ConfigError, match=message):
        start(stack(), None, keys(True, BF16) | change)
    assert not any(map(is_float8, stack().parameters()))


@needs_torchao
def test_without_linear_layers_in_blocks():
    with pytest.raises(ConfigError, match=r"float8_training .* this model has none there"):
        start(nn.Sequential(nn.Linear(7, 5)), None, keys(True, BF16))


@needs_torchao
def test_llama_with_checkpoints():
    from tests.helpers.models import tokens

    def run(rank: int, model: Any, gathers: bool) -> Any:
        config = keys(gathers, BF16, activation_checkpointing={"blocks": True})
        engine = start(model, adamw(model), config)
        losses = []
        for step in range(3):
            ids = tokens(step, 0, rank)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return [*losses, *full_weights(engine).values()]

    wanted, got = (on_ranks(2, run, gathers, build=lambda: seeded(llama)) for gathers in (0, 1))
    for want, found in zip(wanted, got):
        assert all(map(torch.equal, want, found))
