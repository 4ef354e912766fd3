"""Layers and communicators of a pipeline, the engine on one rank, a script by DeepSpeed's names."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.distributed import flat_mesh, stage_messages
from hf_zero.distributed.collective_log import CollectiveLog, CollectiveStats
from hf_zero.distributed.hang_detection import HangDetection, Watchdog
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.distributed.stage_messages import StageMessages
from hf_zero.errors import (
    ConfigError,
    PartitionError,
    PipelineError,
    RankMismatchError,
    UnmanagedWindowError,
)
from hf_zero.parallel.expert.moe_layer import MoE
from hf_zero.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from hf_zero.parallel.pipeline.module import PipelineModule
from hf_zero.parallel.pipeline.stage_bounds import bounds_of
from hf_zero.parallel.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from tests.helpers.cells import in_one_item
from tests.helpers.models import ARCHITECTURES
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_each_rank
from tests.parallel.pipelines import (
    VOCAB,
    WIDTH,
    Whole,
    batches,
    config,
    layers,
    loss_of,
    pipeline,
    plain,
    sgd,
)


def test_partitions_by_number_by_parameters_and_by_class():
    names = ["Embedding", "Block", "Block", "Block", "Head"]
    numels = [100, 10, 10, 10, 100]
    for method, parts, bounds in (
        ("uniform", 2, [0, 3, 5]),
        ("parameters", 3, [0, 1, 4, 5]),
        ("type:block", 3, [0, 2, 3, 5]),
    ):
        assert bounds_of(method, parts, names, numels) == bounds
    # what weighs nothing leaves no stage empty
    heads = bounds_of("type:head", 4, names, numels)
    assert heads == sorted({*heads})
    for method, parts, said in (
        ("type:Conv", 2, "type:Conv"),
        ("type:", 2, "partition_method is 'type:'"),
        ("type:[", 2, r"partition_method 'type:\['"),
        (None, 2, "partition_method is None"),
        ("profile", 2, "partition_method is 'profile'"),
        ("uniform", 6, "leaves stages empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            bounds_of(method, parts, ["Block"] * 5, [1] * 5)


def test_a_rank_builds_the_layers_of_its_stages_alone(as_rank):
    built: list[int] = []

    class Counted(nn.Linear):
        def __init__(self, index):
            super().__init__(4, 4)
            if not self.weight.is_meta:
                built.append(index)

    held: set[str] = set()
    for rank in range(4):
        as_rank(rank, 4)
        built.clear()
        module = PipelineModule([LayerSpec(Counted, index) for index in range(8)], 4)
        assert built == [2 * rank, 2 * rank + 1]
        names = {name for name, _ in module.named_parameters()}
        assert names == {f"{index}.{name}" for index in built for name in ("weight", "bias")}
        assert module.stage_owner(built[0]) == module.stage_id == rank
        held |= names
    assert len(held) == 16 and repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == (
        "Linear(2, 3, bias=False)"
    )
    with pytest.raises(ConfigError, match="needs the topology of a PipelineModule"):
        PipelineParallelGrid()
    with pytest.raises(ConfigError, match="layer 8 is in no stage"):
        module.stage_owner(8)


def test_recomputed_layers_give_the_same():
    ids, labels = batches(1)[0]
    found = []
    for interval in (0, 2):
        module = PipelineModule(
            layers(),
            1,
            seed_layers=True,
            loss_fn=loss_of,
            activation_checkpoint_interval=interval,
            checkpointable_layers=["Linear", "ReLU"],
        )
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t
        ):
            loss = module.loss(module(ids), labels)
        loss.backward()
        found.append((float(loss.detach()), [p.grad for p in module.parameters()], sum(saved)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))
    assert found[1][2] < found[0][2]


def test_topologies():
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"] and topology.world_size() == 8
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert tuple(topology.get_coord(5)) == (1, 0, 1) and topology.get_coord(5).model == 1
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert topology.get_rank_repr(5) == "model_01" and topology.get_dim("expert") == 0
    assert topology.get_axis_comm_lists("expert") == []
    with pytest.raises(ConfigError, match="names no rank"):
        topology.get_rank(pipe=1)
    for rank in (8, -1, "0"):
        with pytest.raises(ConfigError, match=f"rank {rank} is not in"):
            topology.get_coord(rank)
    for call in (lambda: topology.filter_match(row=0), lambda: topology.get_axis_list("row", 0)):
        with pytest.raises(ConfigError, match="has no axis row"):
            call()
    plain_one = PipeDataParallelTopology(2, 3)
    assert [plain_one.get_coord(rank).pipe for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def module_of(**given):
    return PipelineModule(**{"layers": layers(), **given})


def engine_of(made=None, **keys):
    module = PipelineModule(made or layers(), 1, loss_fn=loss_of)
    hf_zero.initialize(model=module, config={**config(2, 0), **keys}, optimizer=sgd)


ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 1}}
EXPERTS = {"enabled": True, "autoep_size": 2}
REFUSED: dict[str, Callable[[], Any]] = {
    "needs num_stages or topology": module_of,
    "num_stages is 3": lambda: module_of(num_stages=3),
    "1 ranks were started": lambda: module_of(topology=PipeDataParallelTopology(2, 2)),
    'needs an axis "pipe"': lambda: module_of(topology=ProcessTopology(["data"], [1])),
    "axes of the topology": lambda: module_of(topology=ProcessTopology(["data", "pipe"], [1, 1])),
    "pass one of them": lambda: module_of(num_stages=2, topology=PipeDataParallelTopology(1, 1)),
    **{
        f"num_stages = {value!r}": partial(module_of, num_stages=value)
        for value in ("1", 1.0, True, 0)
    },
    "topology = 'x'": lambda: module_of(topology="x"),
    "activation_checkpoint_interval=-2": lambda: module_of(num_stages=1).set_checkpoint_interval(
        -2
    ),
    **{
        f"{name}.*{re.escape(repr(value))}": partial(module_of, num_stages=1, **{name: value})
        for name, value in (
            ("stages_per_rank", 0),
            ("stages_per_rank", None),
            ("stages_per_rank", 2.0),
            ("activation_checkpoint_interval", -1),
            ("activation_checkpoint_interval", "1"),
            ("activation_checkpoint_interval", 1.5),
            ("partition_method", None),
            ("partition_method", "parameters:"),
            ("partition_method", "uniform:x"),
            ("loss_fn", "mse"),
            ("seed_fn", 3),
            ("checkpointable_layers", "Linear"),
            ("checkpointable_layers", [nn.Linear]),
            ("activation_checkpoint_func", 3),
            ("base_seed", "1234"),
        )
    },
    "neither a module, a function": lambda: module_of(num_stages=1, layers=[3]),
    "layers is a Linear": lambda: module_of(num_stages=1, layers=nn.Linear(1, 1)),
    "layers is a NoneType": lambda: module_of(num_stages=1, layers=None),
    r"pass LayerSpec\(ReLU": lambda: module_of(num_stages=1, layers=[nn.ReLU]),
    **{
        said: partial(ProcessTopology, axes, sizes)
        for said, axes, sizes in (
            (r"\['pipe', 'data'\] and the sizes \[2\]", ["pipe", "data"], [2]),
            ("the size of axis 'pipe' = '2'", ["pipe"], ["2"]),
            ("duplicate field name: 'pipe'", ["pipe", "pipe"], [1, 1]),
            ("keyword: 'class'", ["pipe", "class"], [1, 1]),
            ("axes 'pd' and the sizes", "pd", [1, 1]),
            ("and the sizes 1; give", ["pipe"], 1),
        )
    },
    r"get_rank\({'pipe': \[0\], 'data': 0}\) names no rank": lambda: PipeDataParallelTopology(
        1, 1
    ).get_rank(pipe=[0], data=0),
    "needs a class of": lambda: LayerSpec(torch.tanh),
    **{
        rf"TiedLayerSpec\({key!r}\)": partial(TiedLayerSpec, key, nn.Linear, 4, 4)
        for key in ("", "a.b", "keys", "training", 1, None)
    },
    "stage: 2": lambda: engine_of(zero_optimization={"stage": 2}),
    "stage: 3": lambda: engine_of(zero_optimization={"stage": 3}),
    "progressive_layer_drop": lambda: engine_of(progressive_layer_drop={"enabled": True}),
    "autotp_size is 2": lambda: engine_of(tensor_parallel={"autotp_size": 2}),
    "sequence_parallel_size is 2": lambda: engine_of(sequence_parallel_size=2),
    "context_parallel_size is 2": lambda: engine_of(context_parallel_size=2),
    "spread over 2 ranks": lambda: engine_of(expert_parallel=EXPERTS),
    "interleaved_1f1b": lambda: engine_of(pipeline={"schedule": "interleaved_1f1b"}),
    "momentum in one bit": lambda: hf_zero.initialize(
        model=PipelineModule(layers(), 1, loss_fn=loss_of),
        config={**config(2, 0), "optimizer": ONE_BIT},
    ),
    "has no parameters": lambda: engine_of([torch.tanh]),
}


@in_one_item(REFUSED)
def test_what_is_refused(words):
    with pytest.raises(ConfigError, match=words):
        REFUSED[words]()


def test_windows_of_the_script_are_refused():
    with pytest.raises(UnmanagedWindowError, match="pipeline parallelism"):
        engine_of(managed_gradient_accumulation=False)


def test_what_is_refused_on_several_ranks():
    def rank(number):
        init_parallel(ParallelDims.over(2, pipeline=2))
        experts = LayerSpec(MoE, 8, nn.Linear(8, 8), num_experts=2, ep_size=2)
        module = PipelineModule([experts, LayerSpec(nn.Linear, 8, 8)], 2)
        # the other stage, without experts, does not go on alone
        error = RankMismatchError if number else ConfigError
        with pytest.raises(error, match=r"spread over 2 ranks \(expert_parallel.autoep_size, ep_s"):
            hf_zero.initialize(model=module, config=config(1, 0), optimizer=sgd)

    def saves(_):
        init_parallel(ParallelDims.over(2, pipeline=2))
        own = {**config(1, 0), "checkpoint": {"async_save": True}}
        with pytest.raises(ConfigError, match=r"a save joins the shards of several stages; remove"):
            hf_zero.initialize(model=PipelineModule(layers(), 2), config=own, optimizer=sgd)

    def reads(_):
        module = pipeline(1, 2)
        sequence = hf_zero.sequence_parallel(2)
        with pytest.raises(ConfigError, match=r"sequence_parallel_size is 2, and the model is"):
            hf_zero.initialize(model=module, config=config(1, 0), optimizer=sgd, mpu=sequence)
        with pytest.raises(ConfigError, match=r"are not built beside the stages of a pipeline"):
            PipelineModule(layers(), 2)

    run_ranks(2, rank)
    run_ranks(2, saves)
    run_ranks(2, reads)


@on_each_rank(2)
def test_a_parameter_of_two_stages_is_tied_by_key_or_refused(rank):
    embedding, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = embedding.weight
    shared = [embedding, nn.Linear(WIDTH, WIDTH), head]
    said = r"weight of layer 2 \(Linear\) .* layer 0 \(Embedding\).*TiedLayerSpec"
    with pytest.raises(ConfigError, match=said):
        PipelineModule(shared, 2)
    frozen = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
    PipelineModule([frozen, nn.Linear(WIDTH, WIDTH), frozen], 2)
    # ranks 0, 1, 0: one rank holds both layers
    between = [shared[0], nn.Linear(WIDTH, WIDTH), shared[2], nn.Linear(VOCAB, VOCAB)]
    module = PipelineModule(between, 2, stages_per_rank=2, partition_method="uniform")
    held = {name for name, _ in module.named_parameters()}
    assert held == ({"1.weight", "1.bias", "3.weight", "3.bias"} if rank else {"0.weight"})


def test_what_an_evaluation_returns():
    def rank(_):
        engine, _, _, _ = hf_zero.initialize(
            model=pipeline(1, 1, stages_per_rank=3), config=config(4, 1), optimizer=sgd
        )
        mean = float(engine.eval_batch(batches(4), num_micro_batches=4))
        single, logits = engine.eval_batch(
            batches(4), return_logits=True, reduce_output=None, num_micro_batches=4
        )
        engine.destroy()
        return mean, [float(each) for each in single], logits

    ((mean, single, logits),) = run_ranks(1, rank)
    whole = Whole()
    with torch.no_grad():
        wanted = [whole(ids) for ids, _ in batches(4)]
    losses = [float(loss_of(each, labels)) for each, (_, labels) in zip(wanted, batches(4))]
    assert single == pytest.approx(losses, rel=1e-5)
    assert mean == pytest.approx(sum(losses) / 4, rel=1e-5)
    for each, value in zip(logits, wanted, strict=True):
        torch.testing.assert_close(each, value)


def test_logits_of_an_evaluation_that_are_its_losses():
    """Without loss_fn, the last layer gives the loss, which has no dimension to join along."""

    def rank(_):
        module = PipelineModule([nn.Linear(4, 4), lambda hidden: hidden.square().mean()], 1)
        engine, _, _, _ = hf_zero.initialize(model=module, config=config(2, 1), optimizer=sgd)
        data = [(torch.full((2, 4), float(index)), None) for index in range(2)]
        mean, outputs = engine.eval_batch(data, return_logits=True)
        assert float(mean) == pytest.approx(float(sum(outputs)) / 2)
        with torch.no_grad():
            assert outputs == [module(inputs) for inputs, _ in data]
        engine.destroy()

    run_ranks(1, rank)


@in_one_item([*itertools.product(("inputs", "labels"), (False, True))])
def test_stages_that_read_different_batches_are_told(case):
    """Before a micro-batch begins."""
    differs, evaluates = case
    whole = batches(2)
    other = [
        (ids + 1, labels) if differs == "inputs" else (ids, labels.flip(0)) for ids, labels in whole
    ]

    def rank(rank):
        engine, _, _, _ = hf_zero.initialize(
            model=pipeline(2, 2), config=config(2, 0), optimizer=sgd
        )
        given = other if engine.is_last_stage() else whole
        with pytest.raises(RankMismatchError, match=f"given different {differs} of the same"):
            engine.eval_batch(given) if evaluates else engine.train_batch(iter(given))
        engine.destroy()

    run_ranks(2, rank)


def test_what_the_engine_of_a_pipeline_refuses():
    def rank(_):
        engine, _, _, _ = hf_zero.initialize(
            model=pipeline(1, 1), config=config(2, 0), optimizer=sgd
        )
        ids, labels = batches(1)[0]
        for call in (
            lambda: engine(ids),
            lambda: engine.backward(labels),
            engine.step,
            lambda: engine.no_sync().__enter__(),
        ):
            with pytest.raises(PipelineError, match="only train_batch"):
                call()
        with pytest.raises(PipelineError, match="has no gradients"), torch.no_grad():
            engine.train_batch(iter(batches(2)))
        with pytest.raises(PipelineError, match="has no data"):
            engine.train_batch()
        for loader in (batches(2), torch.utils.data.DataLoader(Images())):
            with pytest.raises(ConfigError, match=rf"{type(loader).__name__}, .*set_dataloader"):
                engine.train_batch(loader)
        with pytest.raises(PipelineError, match="ended after 1 of the 2"):
            engine.train_batch(iter(batches(1)))
        with pytest.raises(PipelineError, match="gives no batch"):
            engine.set_dataloader([])
            engine.train_batch()
        with pytest.raises(ConfigError, match=r"is \(inputs, labels\), not of type Tensor"):
            engine.train_batch(iter([ids, ids]))
        with pytest.raises(ConfigError, match="reduce_output is 'sum'"):
            engine.eval_batch(batches(2), reduce_output="sum")
        for data in (None, 3):
            with pytest.raises(ConfigError, match=rf"eval_batch\(\) got {data}"):
                engine.eval_batch(data)
            with pytest.raises(ConfigError, match=rf"set_dataiterator\(\) got {data}"):
                engine.set_dataiterator(data)
        for count in (0, -1, "2"):
            with pytest.raises(ConfigError, match=f"num_micro_batches={count!r}"):
                engine.eval_batch(batches(2), num_micro_batches=count)
        engine.set_dataloader(batches(2))
        engine.set_batch_fn(lambda batch: (batch[0], batch[1]))
        first = float(engine.train_batch())
        assert float(engine.train_batch()) < first  # the same two again
        engine.destroy()

    run_ranks(1, rank)


NO_LOSS: dict[str, Any] = {
    "loss_fn gives a tuple": lambda output, labels: (output.sum(), output),
    "loss_fn gives a float": lambda output, labels: 1.0,
    "the last layer, without a loss_fn, gives a dict": None,
}


@in_one_item(NO_LOSS)
def test_a_loss_is_a_tensor(words):
    def rank(_):
        last = nn.Identity() if NO_LOSS[words] else lambda hidden: {"loss": hidden.sum()}
        module = PipelineModule([nn.Linear(4, 4), last], 1, loss_fn=NO_LOSS[words])
        engine, _, _, _ = hf_zero.initialize(model=module, config=config(1, 0), optimizer=sgd)
        data = [(torch.ones(2, 4), torch.ones(2))]
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(ConfigError, match=words):
                call(iter(data))
        engine.destroy()

    run_ranks(1, rank)


def test_what_may_pass_between_stages():
    def rank(_):
        module = PipelineModule(
            [LayerSpec(nn.Linear, 4, 4), lambda x: {"hidden": x}, lambda x: x["hidden"]],
            1,
            stages_per_rank=3,
            loss_fn=lambda x, y: x.sum(),
            partition_method="uniform",
        )
        engine, _, _, _ = hf_zero.initialize(model=module, config=config(1, 0), optimizer=sgd)
        with pytest.raises(ConfigError, match="gives a dict"):
            engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2))]))
        engine.destroy()

    run_ranks(1, rank)


class Named(NamedTuple):
    hidden: torch.Tensor


class Opened(nn.Module):
    """Takes what the layer before gives in its own class alone."""

    def __init__(self, kind, length):
        super().__init__()
        self.kind, self.length = kind, length
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, given):
        assert type(given) is self.kind and len(given) == self.length
        return given[0] * self.scale


class Chain(nn.Module):
    """The plain run of layers, some of which are functions."""

    def __init__(self, made):
        super().__init__()
        self.made = made
        for index, layer in enumerate(made):
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)

    def forward(self, value):
        for layer in self.made:
            value = layer(value)
        return value


def opening(gives, kind, length):
    torch.manual_seed(3)
    return [nn.Linear(4, 4), gives, Opened(kind, length), nn.Linear(4, 4)]


PASSED: dict[str, tuple[Callable[[torch.Tensor], Any], type, int]] = {
    "a tuple of one": (lambda x: (x,), tuple, 1),
    "a tuple": (lambda x: (x, None, x.detach()), tuple, 3),
    "a list of one": (lambda x: [x], list, 1),
    "a list": (lambda x: [x, None], list, 2),
    "a named tuple": (Named, Named, 1),
}


# stages, and how many layers are recomputed together
@in_one_item(
    [
        *itertools.product(PASSED, ((1, 0), (1, 2), (2, 0), (2, 1)), (False,)),
        *itertools.product(PASSED, ((1, 1), (2, 1)), (True,)),
    ]
)
def test_a_layer_gets_what_the_one_before_gives(case):
    passed, (stages, interval), reentrant = case
    recompute = {
        "activation_checkpoint_func": partial(checkpoint, use_reentrant=True),
        "checkpointable_layers": ["Opened"],  # whose inputs require grad, as such checkpoints need
    }
    whole = Chain(opening(*PASSED[passed]))
    data = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(2)]
    loss = nn.functional.mse_loss

    def rank(_):
        module = PipelineModule(
            opening(*PASSED[passed]), 1, stages_per_rank=stages, loss_fn=loss,
            partition_method="uniform", activation_checkpoint_interval=interval,
            **recompute if reentrant else {},
        )  # fmt: skip
        engine, _, _, _ = hf_zero.initialize(model=module, config=config(2, 0), optimizer=sgd)
        if passed == "a named tuple" and stages > 1:
            with pytest.raises(ConfigError, match="gives a Named"):
                engine.train_batch(iter(data))
            return None
        # inputs in a tuple of one are that one
        found = float(engine.train_batch((((x,), y) for x, y in data)))
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
        return found, weights

    (found,) = run_ranks(1, rank)
    if found is None:
        return
    ((wanted, _),), _ = plain(whole, [data], lambda m, b: loss(m(b[0]), b[1]))
    assert found[0] == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(found[1], {name: p.detach() for name, p in whole.named_parameters()})


@on_each_rank(2)
def test_another_number_of_stages(rank):
    PipelineModule(layers(), 2)
    with pytest.raises(ConfigError, match=r"number of stages stays for the life .* new ones"):
        PipelineModule(layers(), 1)


@on_each_rank(2)
def test_a_refused_pipeline_leaves_the_job_as_it_was(rank):
    model = ARCHITECTURES["llama"].build()
    for refused in (
        lambda: PipelineModule(layers()[:1], 2),
        lambda: PipelineModule(layers(), 2, stages_per_rank=0),
        lambda: PipelineModule(layers(), 2, partition_method="profile"),
        lambda: hf_zero.pipeline_stages(model, 2, stages_per_rank=9),
    ):
        with pytest.raises(ConfigError):
            refused()
        assert get_parallel() is None
    PipelineModule(layers(), 2)
    assert get_parallel().dims == ParallelDims.over(2, pipeline=2)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((2, 2)),
        nn.Flatten(1),
        nn.Linear(16, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 10),
    )


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=draw), index % 10


def test_a_script_that_trains_from_its_own_data():
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "steps_per_print": 1,
    }

    def rank(_):
        layers = [*net()[:3], lambda x: torch.flatten(x, 1), *net()[4:]]
        model = deepspeed.PipelineModule(
            layers=layers,
            loss_fn=nn.CrossEntropyLoss(),
            num_stages=1,
            partition_method="parameters",
            activation_checkpoint_interval=0,
        )
        engine, optimizer, _, _ = deepspeed.initialize(
            config=config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            training_data=Images(),
        )
        assert isinstance(engine, PipelineEngine) and engine.pipeline_parallelism
        assert isinstance(engine, deepspeed.DeepSpeedEngine) and optimizer is engine.optimizer
        assert engine.is_first_stage() and engine.is_last_stage() and engine.micro_batches == 4
        assert (engine.prev_stage, engine.stage_id, engine.next_stage) == (-1, 0, 1)
        grid = engine.grid
        assert isinstance(grid, PipelineParallelGrid) and grid.stage_to_global(0) == 0
        assert isinstance(model.mpu(), PipelineParallelGrid)
        assert grid.get_pipe_parallel_world_size() == grid.get_data_parallel_world_size() == 1
        assert grid.get_model_parallel_rank() == 0 and grid.get_data_parallel_group_ranks() == [0]
        with pytest.raises(PipelineError, match="only train_batch"):
            engine.step()
        order = [index for epoch in range(2) for index in _order(engine, epoch)]
        losses = [float(engine.train_batch()) for _ in range(4)]  # of two epochs
        engine.destroy()
        return losses, order

    ((losses, order),) = run_ranks(1, rank)
    model, data = net(), Images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        chosen = [data[index] for index in order[8 * step : 8 * step + 8]]
        images, labels = (
            torch.stack([image for image, _ in chosen]),
            torch.tensor([label for _, label in chosen]),
        )
        expected = nn.functional.cross_entropy(model(images), labels)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)


def _order(engine, epoch):
    sampler = engine.training_dataloader.data_sampler
    sampler.set_epoch(epoch)
    return list(sampler)


DEVICE = torch.device("cuda", 0)


def test_the_communicator_is_made_with_its_group(monkeypatch):
    """All ranks of a pipeline have to come to it, and messages are between two of them."""
    dims, reduced = ParallelDims.over(6, pipeline=3), list[Any]()
    detection = HangDetection()
    world = SimpleNamespace(detection=detection, watchdog=detection.watchdog)
    groups: Any = SimpleNamespace(
        dims=dims,
        rank=3,
        device=DEVICE,
        stats={"pipeline": CollectiveStats()},
        along=lambda axis: SimpleNamespace(
            gathers=CollectiveLog("gathers", (1, 3, 5), 5.0),
            reductions=CollectiveLog("reductions", (1, 3, 5), 5.0),
        ),
    )
    bound = []

    def new_group(ranks, timeout, backend, device_id):
        bound.append((backend, device_id))
        return tuple(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append((tensor, group)))
    monkeypatch.setattr(torch, "zeros", lambda size, device: (size, device))
    monkeypatch.setattr(stage_messages, "get_world_group", lambda: world)
    monkeypatch.setattr(stage_messages, "serving_backend", lambda device: "gloo")
    monkeypatch.setattr(stage_messages, "group_backend", lambda device: "nccl")
    monkeypatch.setattr(stage_messages, "subgroup_backend_string", lambda: "cpu:gloo,cuda:nccl")
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    messages = StageMessages.over(groups, "engine 1", 5.0)
    assert environ == {stage_messages.WARNING: "0"}
    assert messages.ranks == [1, 3, 5]
    assert reduced == [((1, DEVICE), (1, 3, 5))]
    # NCCL would make others for messages that are in no batch
    assert bound == [("cpu:gloo,cuda:nccl", DEVICE)] * 2
    monkeypatch.setattr(dist, "all_reduce", None)  # the host needs none
    flat_mesh.connect(None, (0, 1), torch.device("cpu"), Watchdog(), "an axis")


def test_a_step_that_failed_is_repeated():
    data = batches(4)

    def run(rank, call):
        failing, calls = call is not None, []

        def loss(output, labels):
            calls.append(len(calls))
            if failing and calls[-1] == 2:
                raise torch.OutOfMemoryError("of a test")
            return loss_of(output, labels)

        torch.manual_seed(0)
        module = PipelineModule(layers(), num_stages=1, loss_fn=loss)
        keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        engine = hf_zero.initialize(model=module, config=keys, optimizer=sgd)[0]
        if failing:
            with pytest.raises(torch.OutOfMemoryError):
                getattr(engine, call)(iter(data))
            failing = False
        mean = engine.train_batch(iter(data))
        found = mean.item(), engine.get_global_grad_norm(), engine.global_steps
        engine.destroy()
        return found

    (wanted,) = run_ranks(1, run, None)
    for call in ("train_batch", "eval_batch"):
        assert run_ranks(1, run, call) == [wanted]


def test_a_tied_weight_that_one_stage_freezes():
    def run(rank):
        module = PipelineModule(layers(), num_stages=2, loss_fn=loss_of)
        if rank == 1:
            module.tied_modules.requires_grad_(False)
        keys = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        with pytest.raises(PartitionError, match=r"stages \[0, 1\] .* or freeze them, on all"):
            hf_zero.initialize(model=module, config=keys, optimizer=sgd)

    run_ranks(2, run)


def test_seeds_of_layers_follow_the_micro_batch():
    """On any number of stages, and in a run that begins after a step."""
    data = batches(4)

    def run(rank, stages, begins):
        torch.manual_seed(0)
        module = PipelineModule(
            [
                LayerSpec(nn.Embedding, 11, 8),
                LayerSpec(nn.Dropout, 0.5),
                LayerSpec(nn.Linear, 8, 11),
                LayerSpec(nn.Dropout, 0.5),
            ],
            num_stages=1, stages_per_rank=stages, seed_layers=True, loss_fn=loss_of,
            partition_method="uniform",
        )  # fmt: skip
        keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        engine = hf_zero.initialize(
            model=module, config=keys, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0)
        )[0]
        engine.counters.micro_steps = begins
        steps = [engine.train_batch(iter(data[at : at + 2])).item() for at in range(begins, 4, 2)]
        engine.destroy()
        return steps

    (wanted,) = run_ranks(1, run, 1, 0)
    assert run_ranks(1, run, 2, 0) == [wanted]
    assert run_ranks(1, run, 1, 2) == [wanted[1:]]
