"""Mixtures of experts of transformers with experts on several ranks, alone and beside
shared layers, against one process.
"""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import hf_zero
from hf_zero.deepspeed import groups
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.parallel.expert.dispatch import Routes, _Kept
from hf_zero.parallel.expert.marks import is_expert_parameter
from hf_zero.parallel.expert.moe_layer import MoE
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers import oracle, tensor_parallel
from tests.helpers.cells import in_one_item
from tests.helpers.engines import bytes_along, config_of, start, train_on_threads
from tests.helpers.models import seeded, tokens
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.stacks import on_each_rank
from tests.helpers.tensor_parallel import train_tensor_parallel
from tests.helpers.training import Plan, plain_sgd
from tests.loading.counting import counting
from tests.parallel.expert_cases import keys, spread
from tests.ranks import test_matrix
from tests.ranks.test_matrix import Routed


class Unlike(Routed):
    """Eight experts of which routers choose two, or that train alone, or that are frozen."""

    def __init__(self, kind):
        super().__init__("gpt_oss")
        self.kind, self.name = kind, f"gpt_oss, {kind}"
        self.options = {**self.options, "num_local_experts": 8}

    def build(self):
        model = super().build()
        for name, parameter in model.named_parameters():
            if self.kind == "first" and name.endswith("router.bias"):
                parameter.data[:2] += 50.0
            elif self.kind == "frozen":
                parameter.requires_grad_(".experts." not in name)
            elif self.kind == "alone":
                parameter.requires_grad_(".experts." in name)
        return model


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
OTHERS: dict[str, Any] = {
    "gradient_clipping": 0.05,
    "activation_checkpointing": {"number_checkpoints": 2},
    "zero_optimization": {"stage": 3, **OFFLOADED},
}
# job, stage, ranks, expert ranks, accumulation, further keys
CELLS: list[Any] = [
    (Routed("qwen2_moe"), 3, 4, 2, 2, {}),
    (Routed("deepseek_v3"), 2, 2, 2, 1, {}),
    (Routed("gpt_oss"), 0, 3, 3, 1, {}),
    (Unlike("first"), 3, 4, 4, 1, {}),
    (Unlike("frozen"), 3, 2, 2, 1, {}),
    (Unlike("alone"), 0, 2, 2, 1, {}),
    (Routed("mixtral"), 3, 2, 2, 2, OTHERS),
]


@in_one_item(CELLS, lambda cell: cell[0].name)
def test_as_in_one_process(cell):
    job, stage, ranks, size, accumulation, more = cell
    plan = Plan(ranks, 2, accumulation, clip=more.get("gradient_clipping", 0.0))
    got = train_on_threads(job, plan, spread(stage, size, **more))
    oracle.compare(got, oracle.kept(job, plan), weight_floor=oracle.ROUNDING)


def test_bytes_between_experts():
    """Of two columns of two ranks: rows to their experts and back, twice, and their counts."""
    ranks, job = 4, Routed("mixtral")
    models = [job.build() for _ in range(ranks)]
    config = models[0].config

    def run(rank):
        keyed = {**keys(2), "metrics": {"enabled": True}}
        engine = start(models[rank], plain_sgd(models[rank]), config_of(3, **keyed))
        along, total = get_parallel().stats["expert"], Counter()
        for step in range(3):
            along.bytes.clear()
            ids = tokens(step, 0, rank)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            total.update(along.bytes)
        assert bytes_along(engine, "expert") == total
        engine.destroy()
        return along.bytes["all_to_all"]

    rows = ranks * tokens(0, 0, 0).numel() * config.num_experts_per_tok
    counts = 8 * ranks * config.num_local_experts
    assert sum(run_ranks(ranks, run)) == config.num_hidden_layers * (
        4 * rows * config.hidden_size * 4 + counts
    )


@pytest.mark.usefixtures("loads_at_once")
@pytest.mark.parametrize("name, experts", [("mixtral", True), ("llama", False)])
def test_loaded_in_shards(name, experts, tmp_path):
    """Each rank reads its shards of its part of the layers and experts; nothing is whole."""
    whole = seeded(getattr(tensor_parallel, name))
    whole.save_pretrained(tmp_path)
    section = keys(2) if experts else {}
    config = config_of(3, **section, tensor_parallel={"autotp_size": 2})

    def run(rank):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = type(whole).from_pretrained(tmp_path)
        engine = start(model, plain_sgd(model), config)
        with hf_zero.GatheredParameters(list(model.parameters())):
            found = {
                name: (p.detach().clone(), sharding_of(p).box)
                for name, p in model.named_parameters()
            }
        engine.destroy()
        return found

    with counting() as read:
        answers = run_ranks(4, run)
    if name == "llama":
        # matrices that are cut along columns, which are short here, are read whole for each part
        assert read.bytes < 2 * sum(p.nbytes for p in whole.parameters())
    for found in answers:
        for name, p in whole.named_parameters():
            part, box = found[name]
            assert (".experts." in name) <= (part.numel() * 4 == p.numel()), name
            assert torch.equal(part, p if box is None else box.take(p)), name


def three_experts():
    options = {**test_matrix.MODELS["mixtral"][1], "num_local_experts": 3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


def two_sizes():
    hf_zero.expert_parallel(Routed("mixtral").build(), 2)
    start(MoE(4, torch.nn.Linear(4, 4), 3, 3), None, config_of(0))


def of_an_engine():
    model = Routed("mixtral").build()
    start(model, None, config_of(3))
    hf_zero.expert_parallel(model, 2)


REFUSED = {
    r"before hf_zero\.initialize": of_an_engine,
    "does not divide the 2 ranks": lambda: hf_zero.expert_parallel(Routed("mixtral").build(), 3),
    "got a NoneType": lambda: hf_zero.expert_parallel(None, 1),
    "names no experts": lambda: hf_zero.expert_parallel(torch.nn.Linear(2, 2), 2),
    "size stays for the life": two_sizes,
    "divides 3": lambda: hf_zero.expert_parallel(three_experts(), 2),
}


@in_one_item(REFUSED)
def test_what_is_refused(words):
    with pytest.raises(RankFailed, match=words) as failed:
        run_ranks(2, lambda rank: REFUSED[words]())
    kind = PartitionError if "before" in words else ConfigError
    assert isinstance(failed.value.__cause__, kind)


def test_names_of_groups():
    models = [Routed("mixtral").build() for _ in range(4)]

    def run(rank):
        hf_zero.expert_parallel(models[rank], 2)
        groups.initialize(ep_size=2)
        with pytest.raises(ConfigError, match="name ep_size_2"):
            groups.get_expert_parallel_rank("ep_size_4")
        name = groups.get_max_expert_size_name()
        assert groups.get_expert_parallel_group("ep_size_1") is None
        return (
            groups.get_expert_parallel_rank(name),
            groups.get_expert_data_parallel_rank(name),
            groups.get_expert_data_parallel_world_size(name),
            torch.distributed.get_world_size(groups.get_expert_parallel_group(name)),
            groups.get_expert_data_parallel_rank("ep_size_1"),
        )

    assert run_ranks(4, run) == [(0, 0, 2, 2, 0), (1, 0, 2, 2, 1), (0, 1, 2, 2, 2), (1, 1, 2, 2, 3)]
    assert all(is_expert_parameter(p) for n, p in models[0].named_parameters() if ".experts." in n)


def test_routes_are_those_of_the_forward_that_runs_again():
    """Two forwards, in any order; a module that one of them calls twice finds its routes anew."""
    one, other = (SimpleNamespace(drawn={}) for _ in range(2))
    hooks = SimpleNamespace(current_forward=one)
    kept, found = _Kept(hooks), list[Routes]()

    def find():
        found.append(Routes([], [], [], torch.empty(0), torch.empty(0)))
        return found[-1]

    class AsksInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            asked.append(kept(find))
            return grad

    asked: list[Routes] = []

    def backward(forward):
        hooks.current_forward = forward
        AsksInBackward.apply(torch.ones(1, requires_grad=True)).backward()
        return asked[-1]

    first = kept(find)
    hooks.current_forward = other
    second = kept(find)
    assert backward(one) is first and backward(other) is second and len(found) == 2
    hooks.current_forward = other
    kept(find)
    assert backward(other) is found[-1] and len(found) == 4 and backward(one) is first
    assert copy.deepcopy(kept)(find) is found[-1]


class Shared(Routed):
    """A mixture whose vocabulary two ranks can share."""

    def __init__(self, name):
        super().__init__(name)
        self.name, self.options = f"{name}, even", {**self.options, "vocab_size": 68}


def by_calls(model):
    """Before ``initialize``, as the Trainer cuts layers."""
    hf_zero.expert_parallel(hf_zero.tensor_parallel(model, 2), 2)


SHARED_CELLS = [
    ("deepseek_v3", 3, {}),
    ("qwen2_moe", 1, {"prepare": by_calls, "activation_checkpointing": {"number_checkpoints": 2}}),
]


@in_one_item(SHARED_CELLS)
def test_layers_and_experts_are_shared(cell):
    name, stage, more = cell
    plan = Plan(ranks=2, steps=2, accumulation=2)
    got = train_tensor_parallel(Shared(name), plan, 2, stage, **keys(2), **more)
    oracle.compare(got, oracle.kept(Shared(name), plan), weight_floor=oracle.ROUNDING)


@on_each_rank(4, build=lambda: Shared("mixtral").build())
def test_what_is_refused_leaves_the_job_as_it_was(rank, model):
    with pytest.raises(ConfigError, match="does not divide"):
        hf_zero.expert_parallel(model, 4)
    with pytest.raises(ConfigError, match="which no module or parameter"):
        hf_zero.tensor_parallel(model, 2, plan={"layers.*.nothing": "colwise"})
    with pytest.raises(ConfigError, match="is not a layer that its style"):
        hf_zero.tensor_parallel(model, 2, plan={"model.norm": "colwise"})
    assert get_parallel() is None
    for call in (hf_zero.tensor_parallel, hf_zero.expert_parallel):
        with pytest.raises(ConfigError, match=r"= 2\.0 is not a number of ranks"):
            call(model, 2.0)
    hf_zero.expert_parallel(model, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel before hf_zero\.expert_parallel"):
        hf_zero.tensor_parallel(model, 2)
