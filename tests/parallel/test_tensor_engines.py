"""Engines whose ranks share layers, against one plain process; their state dicts, conversions,
buckets and parts, also of experts.
"""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from hf_zero.errors import PartitionError
from hf_zero.parallel import alike
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle
from tests.helpers.causal_zoo import batch_of
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, start
from tests.helpers.host_syncs import HostSyncs
from tests.helpers.layer_drop import DEPTH
from tests.helpers.models import seeded
from tests.helpers.oracle import (
    FP32_TOLERANCE,
    compare,
    compare_mixed,
    compare_tensors,
    kept,
    mixed,
)
from tests.helpers.parts import whole
from tests.helpers.parts import whole as joined
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.tensor_parallel import (
    HIDDEN,
    MODELS,
    TensorJob,
    gpt2,
    llama,
    mixtral,
    qwen3,
    train_tensor_parallel,
)
from tests.helpers.token_drop import TokenDropJob
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.parallel.expert_cases import OnSpreadExperts, keys
from tests.parallel.test_tensor_layers import loss_and_gradients
from tests.ranks.test_matrix import Routed

RECOMPUTED = {"activation_checkpointing": {"number_checkpoints": 2}}
WINDOWS = Plan(ranks=2, accumulation=2, steps=2, clip=0.5)  # two groups
# those with plans of our own, fewer heads of keys than ranks, experts beside a shared one
CELLS = [
    ("llama-mqa", 3, WINDOWS),
    *((name, at, Plan(steps=1)) for at, name in enumerate(("bert", "t5", "deepseek", "opt"))),
]


@in_one_item(CELLS, str)
def test_models(cell):
    name, stage, plan = cell
    job = TensorJob(name, plain_sgd)
    compare(train_tensor_parallel(job, plan, 2, stage), kept(job, plan), 2 * FP32_TOLERANCE)


def test_bf16():
    plan, job = Plan(steps=3, precision="bf16"), TensorJob("llama")
    got = train_tensor_parallel(job, plan, 2, 3)
    exact = kept(job, Plan(steps=3))
    compare_mixed(got, mixed(job, plan, 3), exact, torch.bfloat16)


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


FEATURES = (
    (3, {"kernels": ["norms", "activations", "rotary", "qkv", "loss"]}),
    (1, {"compile": {"blocks": True, "backend": "aot_eager"}}),
    (3, {"zero_optimization": OFFLOADED}),
)


@in_one_item(FEATURES)
def test_with_other_features(case):
    stage, keys = case
    # AdamW has a host kernel
    job = TensorJob("llama", None if "zero_optimization" in keys else plain_sgd)
    plan = Plan(accumulation=2, steps=2)
    compare(train_tensor_parallel(job, plan, 2, stage, **keys), kept(job, plan))


def test_a_group_drops_the_same_tokens(monkeypatch):
    plan, job = Plan(ranks=2, accumulation=2, steps=2), TokenDropJob("llama")
    monkeypatch.setattr(job, "name", f"tensor-parallel {job.name}")
    monkeypatch.setattr(job, "build", lambda: seeded(lambda: llama(num_hidden_layers=DEPTH)))
    compare(train_tensor_parallel(job, plan, 2, 1, **job.keys), kept(job, plan))


class _Adapted(TensorJob):
    def build(self):
        settings = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, modules_to_save=["lm_head"]
        )
        return seeded(lambda: get_peft_model(llama(), settings))


class _PartlyFrozen(TensorJob):
    """Recomputed by reentrant checkpoints; some layers that read one input are frozen."""

    def build(self):
        model = super().build()
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.requires_grad_(False)
            layer.mlp.up_proj.weight.requires_grad_(False)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model


@in_one_item((_Adapted, _PartlyFrozen))
def test_weights_that_do_not_train(kind):
    plan, job = Plan(steps=2), kind("llama", plain_sgd)
    job.name = kind.__name__
    compare(train_tensor_parallel(job, plan, 2, 3), kept(job, plan))


STEADY = (
    # seeds from the host's own generator, before attention and MLP of two layers
    (lambda: gpt2(0.1), {}, {"dropout.py: _local_scalar_dense": 8}),
    # how many rows go where, layer by layer
    (mixtral, keys(2) | RECOMPUTED, {"dispatch.py: tolist": 4}),
)


@in_turn("make, section, wanted", STEADY)
def test_a_steady_step_reads_nothing_back(make, section, wanted, monkeypatch):
    """Between the forwards that compare batches."""
    monkeypatch.setattr(alike, "due", lambda count: False)
    models = [seeded(make) for _ in range(4)]
    plan = Plan(accumulation=2, clip=1.0)
    config = config_of(3, plan, tensor_parallel={"autotp_size": 2}, **section)

    def run(rank):
        engine = start(models[rank], adamw(models[rank]), config)
        for step in range(3):
            with HostSyncs() if step == 2 else nullcontext() as syncs:
                for micro in range(2):
                    batch = MODELS["llama"].batch(step, micro, rank // 2)
                    engine.backward(engine(**batch).loss)
                    engine.step()
        engine.destroy()
        return syncs

    for syncs in run_ranks(4, run):
        assert dict(syncs.of("hf_zero")) == wanted


def test_each_rank_writes_its_own_part():
    models = [seeded(llama) for _ in range(2)]
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = seeded(llama).state_dict()[name] * 2

    def write(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        weight = model.get_parameter(name)
        with pytest.raises(PartitionError, match="write its own part"):
            hf_zero.GatheredParameters([weight], modifier_rank=0)
        engine = start(model, plain_sgd(model), config_of(3))
        with pytest.raises(PartitionError, match=r"is cut over ranks by tensor parallelism"):
            hf_zero.GatheredParameters(model, modifier_rank=1)
        norm = model.get_parameter("model.norm.weight")
        with hf_zero.GatheredParameters([norm], modifier_rank=1), torch.no_grad():
            norm.fill_(rank)
        with hf_zero.summon_full_params(model, writeback=True), torch.no_grad():
            weight.mul_(2)
        state = model.state_dict()
        engine.destroy()
        assert torch.equal(state["model.norm.weight"], torch.ones(HIDDEN))
        return state[name]

    for state in run_ranks(2, write):
        assert torch.equal(state, wanted)


def test_batch_sizes_count_groups(tmp_path):
    written = {
        "tensor_parallel": {"autotp_size": 2},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 24,  # as Accelerate and the Trainer count, every rank
        "zero_optimization": {"stage": 1},
    }

    def sizes(rank, model):
        data = list(range(8))
        engine, _, loader, _ = hf_zero.initialize(
            model=model, optimizer=plain_sgd(model), config=written, training_data=data
        )
        assert loader is not None and engine.data_ranks == 2
        found = engine.train_batch_size(), sorted(loader.sampler)
        engine.save_checkpoint(tmp_path)
        engine.set_train_batch_size(18)
        assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 18)
        engine.destroy()
        resumed = {"optimizer": plain_sgd(model), "config": written, "resume": tmp_path}
        engine = hf_zero.initialize(model=model, **resumed)[0]
        assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (2, 12)
        engine.destroy()
        return found

    found = on_ranks(4, sizes, build=lambda: seeded(llama))
    assert [total for total, _ in found] == [12] * 4
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(found[0][1] + found[2][1]) == list(range(8))


CACHES = {
    "one head of keys": lambda: llama(key_value_heads=1),
    "two heads": llama,
    "norms of heads": qwen3,
}


@in_one_item(CACHES)
def test_prefix_tuning(kind):
    settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: Any = seeded(lambda: get_peft_model(CACHES[kind](), settings)).train()
    models = [copy.deepcopy(model) for _ in range(2)]
    loss, gradients = loss_and_gradients(model, batch_of())

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        got, found = loss_and_gradients(model, batch_of())
        assert got == pytest.approx(loss, rel=1e-5)
        compare_tensors("gradient", found, gradients)

    run_ranks(2, run)


def _compare(got, wanted, tied=frozenset()):
    assert {*got} - {*wanted} <= tied
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


TIED = {"lm_head.weight"}  # which whole_state_dict leaves out where it is tied
# how a model is cut, and the keys of an engine that takes it
CUT = {
    "llama-tied": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "gpt2": (hf_zero.tensor_parallel, {"tensor_parallel": {"autotp_size": 2}}),
    "mixtral": (hf_zero.expert_parallel, keys(2)),
}


@pytest.mark.parametrize("name", CUT)
def test_state_dicts_and_files_are_whole(name, tmp_path):
    """Before an engine, under it, in a conversion of its checkpoint, and after it is destroyed."""
    whole, (cut, section) = MODELS[name].build(), CUT[name]
    given = {key: value.clone() for key, value in whole.state_dict().items()}
    more = {key: value + 1 for key, value in given.items()}
    models = [copy.deepcopy(whole) for _ in range(2)]

    def run(rank):
        model = cut(models[rank], 2)
        _compare(model.state_dict(), given)
        model.load_state_dict(more)
        _compare(model.state_dict(), more)
        engine = start(model, adamw(model), config_of(3, **section))
        _compare(more, whole_state_dict(engine), TIED)
        model.load_state_dict(given)
        _compare(model.state_dict(), given)
        engine.backward(engine(**MODELS[name].batch(0, 0, 0)).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        _compare(model.state_dict(), trained, TIED)
        assert any(not trained[key].equal(value) for key, value in given.items())
        return trained

    trained = run_ranks(2, run)[0]
    hf_zero.convert_checkpoint(tmp_path / "saved", tmp_path / "universal", to="universal")
    plain = copy.deepcopy(whole)
    plain.load_state_dict(given)
    optimizer = adamw(plain)
    plain(**MODELS[name].batch(0, 0, 0)).loss.backward()
    optimizer.step()
    for parameter_name, parameter in plain.named_parameters():
        folder = tmp_path / "universal" / "zero" / parameter_name
        weight, moment = (torch.load(folder / f"{f}.pt")["param"] for f in ("fp32", "exp_avg"))
        assert weight.equal(trained[parameter_name])
        torch.testing.assert_close(moment, optimizer.state[parameter]["exp_avg"])
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "saved", dtype="float32"))
    _compare(trained, converted, TIED)
    if name == "mixtral":  # whose experts save_pretrained writes one by one
        return
    whole.load_state_dict(trained)
    whole.save_pretrained(tmp_path / "plain")
    hf_zero.convert_checkpoint(tmp_path / "saved", tmp_path / "model")
    folders = (tmp_path / "model", tmp_path / "plain")
    files, wanted = (load_file(folder / "model.safetensors") for folder in folders)
    _compare(files, wanted)


def _saved_beside(model):
    """``model`` with PEFT's copies of layers in its MLPs, or of its experts, which train."""
    names = ["experts"] if model.config.model_type == "mixtral" else ["up_proj", "down_proj"]
    with _SEEDS:
        torch.manual_seed(5)
        return get_peft_model(
            model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
        )


def _wrapped_anew(model):
    anew = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                wrapped = torch.nn.Parameter(parameter.detach().clone())
                setattr(module, name, anew.setdefault(parameter, wrapped))
    return model


def _converted(model):
    with _SEEDS:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            model.double().float()
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
    model.tie_weights()
    return model


_SEEDS = threading.Lock()
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "assigned": lambda model: (
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        and model
    ),
    "modules_to_save": _saved_beside,
    "wrapped anew": _wrapped_anew,
    "converted": _converted,
}


@in_turn("name, made", [(name, made) for name in ("llama-tied", "mixtral") for made in COPIES])
def test_copies_of_a_cut_model_are_cut_once(name, made):
    """Before an engine and after it: losses, the gradient and state dicts are the whole model's."""
    whole, (cut, section) = MODELS[name].build(), CUT[name]
    models = [copy.deepcopy(whole) for _ in range(2)]
    plain = COPIES[made](whole)
    batch = MODELS[name].batch(0, 0, 0)
    loss, gradients = loss_and_gradients(plain, batch)
    norm = torch.nn.utils.get_total_norm(gradients.values())

    def run(rank):
        model = COPIES[made](cut(models[rank], 2))
        _compare(model.state_dict(), plain.state_dict(), TIED)
        engine = start(model, plain_sgd(model), config_of(1, **section))
        found = engine(**batch).loss
        engine.backward(found)
        engine.step()
        assert float(found.detach()) == pytest.approx(loss, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-4)
        trained = {name: value.clone() for name, value in engine.state_dict().items()}
        for other in (copy.deepcopy(engine.module), COPIES["deepcopy"](model)):
            _compare(other.state_dict(), trained, TIED)
        engine.destroy(gather=True)
        _compare(copy.deepcopy(model).state_dict(), trained, TIED)

    run_ranks(2, run)


@pytest.mark.usefixtures("loads_at_once")
def test_values_that_are_assigned_before_those_of_the_file_are_read(tmp_path):
    whole = seeded(llama)
    whole.save_pretrained(tmp_path)
    given = {name: torch.full_like(value, 7.0) for name, value in whole.state_dict().items()}

    def run(rank):
        def build():
            model = type(whole).from_pretrained(tmp_path)
            hf_zero.tensor_parallel(model, 2).load_state_dict(dict(given), assign=True)
            return model

        _compare(hf_zero.pipeline_stages(build, 1).state_dict(), given)

    run_ranks(2, run)


@pytest.mark.parametrize("name, stage", [("llama", 3), ("phi3", 1)])
def test_weights_in_buckets_and_in_parts(name, stage):
    """``iter_weights``, and what ``torch.distributed.checkpoint.state_dict`` gives on each rank."""
    sent, parts = [], []

    def observe(engine):
        sent.append({n: v.clone() for b in engine.iter_weights("4KiB", "fp32") for n, v in b})
        parts.append(get_state_dict(engine.module, engine.optimizer))

    job, plan = TensorJob(name), Plan(ranks=2, steps=1)
    want = train_tensor_parallel(job, plan, 2, stage, observe=observe).weights
    assert len(sent) == len(parts) == 4
    for each in sent:
        _compare(each, want)
    (gradients,) = oracle.kept(job, plan).grads
    for key, value in want.items():
        assert joined([weights[key] for weights, _ in parts]).equal(value), key
        moment = joined([states["state"][key]["exp_avg"] for _, states in parts])
        torch.testing.assert_close(moment, 0.1 * gradients[key], rtol=1e-4, atol=1e-6)


RANKS, SAVED_AFTER, STEPS = 4, 2, 4
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamRouted(Routed):
    def optimizer(self, model):
        return adamw(model)


def run(job, stage, spread, given=None):
    """Per rank: its state dicts after SAVED_AFTER steps, the weights that it is sent then, and the
    whole ones after STEPS. ``given(rank)``: the state dicts to begin with, in place of these steps.
    """
    models, plan = [job.build() for _ in range(RANKS)], Plan(ranks=RANKS)

    def train(session, rank, steps):
        for step in steps:
            job.micro(session, At(step, 0, rank))
            session.step()

    def on_rank(rank):
        model, more = models[rank], keys(2) if spread else {}
        engine = start(model, adamw(model), config_of(stage, plan, **more))
        session, of = OnSpreadExperts(engine, plan), (engine.module, engine.optimizer)
        if given is None:
            train(session, rank, range(SAVED_AFTER))
        else:
            weights, states = given(rank)
            set_state_dict(*of, model_state_dict=weights, optim_state_dict=states)
        parts = get_state_dict(*of)
        buckets = engine.iter_weights("4KiB", "fp32")
        sent = {name: value.clone() for bucket in buckets for name, value in bucket}
        train(session, rank, range(SAVED_AFTER, STEPS))
        ended = session.weights()
        session.close()
        return parts, sent, ended

    return run_ranks(RANKS, on_rank)


def near(got, want):
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


def test_parts_are_those_of_the_whole_model():
    job, stage = AdamRouted("mixtral"), 3
    job.name += ", AdamW"
    found = run(job, stage, True)
    saved, ended = (
        oracle.kept(job, Plan(ranks=RANKS, steps=steps)).weights for steps in (SAVED_AFTER, STEPS)
    )
    weights, moments = {}, {}
    for key in saved:
        holders = [parts for parts, _, _ in found if key in parts[0]]
        weights[key] = whole([model[key] for model, _ in holders])
        moments[key] = {
            each: whole([states["state"][key][each] for _, states in holders]) for each in MOMENTS
        }
    for (model, _), sent, _ in found:
        assert model.keys() <= sent.keys() == weights.keys()
        assert all(torch.equal(sent[key], value) for key, value in weights.items())
    near(weights, saved)
    near(found[0][2], ended)
    again = run(job, stage, True, lambda rank: found[rank][0])
    assert all(torch.equal(value, found[0][2][key]) for key, value in again[0][2].items())

    count = torch.tensor(float(SAVED_AFTER))
    state = {key: {"step": count, **values} for key, values in moments.items()}
    (group,) = found[0][0][1]["param_groups"]
    states = {"state": state, "param_groups": [{**group, "params": [*state]}]}
    near(run(job, 3 - stage, False, lambda rank: (weights, states))[0][2], ended)
