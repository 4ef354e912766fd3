"""The capabilities of an engine, a row each: what its configuration says, which model it trains,
and what the plain loop does instead. ``ranks/test_capabilities.py`` takes each through its columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

import hf_zero
from hf_zero.activations import policy as activations
from hf_zero.optim import (
    Adam8bit,
    AdamW8bit,
    Lamb,
    Lion8bit,
    OneBitAdam,
    SGD8bit,
    ZeroOneAdam,
    bf16_state,
)
from hf_zero.techniques.quantization import noise_for
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle, sequences
from tests.helpers.engines import STAGES, OnEngine
from tests.helpers.late_transfers import Late
from tests.helpers.layer_drop import LayerDropJob
from tests.helpers.left_out import LeftOut, at_random, first_used
from tests.helpers.models import ARCHITECTURES, LENGTH, Batch, Stack, seeded
from tests.helpers.offloads import DEVICE, PLACES, offload
from tests.helpers.one_bit import ADAM, BLOCK, RARE
from tests.helpers.optimizers import (
    ELEMENTWISE,
    MAIN,
    SEED,
    WHOLE,
    InBf16,
    MuonAndAdamW,
    same_directions,
)
from tests.helpers.plans import APART
from tests.helpers.tensor_parallel import TensorJob
from tests.helpers.token_drop import TokenDropJob
from tests.helpers.training import (
    ArchitectureJob,
    At,
    Driver,
    Job,
    StackJob,
    Way,
    plain_sgd,
    sgd,
    trainable,
)
from tests.helpers.ways import WAYS

Weights = Mapping[str, torch.Tensor]
Keys = dict[str, Any]

COLUMNS = ("oracle", "bytes", "destroy", "resume", "overflow")


def near(got: Weights, want: Weights, initial: Weights) -> None:
    oracle.compare_tensors("weights", got, want, floor=oracle.ADAM_ROUNDING)


def dropped(got: Weights, want: Weights, initial: Weights) -> None:
    """What is kept is scaled up, which is up to a factor of 2.5 a block for rounding, too."""
    oracle.compare_tensors("weights", got, want, 1e-4, oracle.ADAM_ROUNDING)


def exact(got: Weights, want: Weights, initial: Weights) -> None:
    oracle.compare_tensors("weights", got, want, 0.0, 0.0)


def in_16_bits(got: Weights, want: Weights, initial: Weights) -> None:
    oracle.compare_tensors("weights", got, want, 2e-2, 1e-3)


def in_few_bits(got: Weights, want: Weights, initial: Weights) -> None:
    """Int4 blocks of 32 are wrong by a twentieth of what the weights have moved."""
    off = oracle.total_norm({name: got[name] - value for name, value in want.items()})
    size = oracle.total_norm({name: value - initial[name] for name, value in want.items()})
    assert 1e-4 < off / size < 0.3, off / size


def within(limit: float) -> Callable[[Weights, Weights, Weights], None]:
    """Each parameter has moved, and none by more than ``limit``."""

    def compare(got: Weights, want: Weights, initial: Weights) -> None:
        for name, value in got.items():
            moved = float((value - initial[name]).abs().max())
            assert 0.0 < moved < limit, f"{name} has moved by {moved:.4g}"

    return compare


@dataclass(frozen=True)
class Row:
    """``job`` is trained by the engine, ``plain`` (the same, if none is given) by the plain loop.

    ``keys`` are those of the configuration, of a stage and a folder; ``plan`` fields of the Plan.
    ``readers``: groups of ranks that read rows of their own, each rank if 0. ``compare`` takes
    weights, those of the plain loop and the initial ones; rows that are not ``traced`` compare
    weights alone. ``elsewhere``: ranks that go on from a checkpoint; 0 where rows depend on the
    rank, which go on on as many. ``columns``: those that apply. ``around`` changes the environment.
    """

    job: Job
    keys: Callable[[int, Path], Keys] = lambda stage, folder: {}
    plain: Job | None = None
    stages: tuple[int, ...] = STAGES
    ranks: int = 2
    readers: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = oracle.FP32_TOLERANCE
    compare: Callable[[Weights, Weights, Weights], None] = near
    traced: bool = True
    elsewhere: int = 3
    columns: tuple[str, ...] = COLUMNS
    session: type[OnEngine] = OnEngine
    around: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    @property
    def by_hand(self) -> Job:
        return self.plain or self.job

    def only(self, *columns: str) -> Row:
        return replace(self, columns=columns)


class Same(Job):
    """``job``, of which all ranks read the rows of the first."""

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, f"{job.name}, the same rows on all ranks"

    def build(self) -> nn.Module:
        return self.job.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.job.optimizer(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        return self.job.loss(net, replace(at, rank=0))


def always(**keys: Any) -> Callable[[int, Path], Keys]:
    return lambda stage, folder: keys


def two_blocks() -> nn.Module:
    return Stack(2)


def stack_with(name: str, make: Callable[[Any], Any]) -> Way:
    return Way(name, two_blocks, make_optimizer=make)


TWO_BLOCKS = Way("two blocks", two_blocks)


# ---- optimizers ----


def _whole(name: str, **more: Any) -> Row:
    """One whose update of an element depends on other elements."""
    row, job = WHOLE[name], f"optimizer {name}"
    compare = same_directions if name.startswith("muon") else None
    return Row(
        stack_with(job, row.ours),
        plain=stack_with(f"{job}, plainly", row.by_hand),
        compare=(lambda got, want, initial: compare(got, want, False)) if compare else near,
        traced=False,
        **more,
    )


def _away(way: str, **more: Any) -> Callable[[int, Path], Keys]:
    """Sub-groups end in the middle of rows; directions of matrices travel."""
    return lambda stage, folder: {"zero_optimization": offload(way, stage, folder, **more)}


def _elementwise(name: str, way: str) -> Row:
    """One that a host kernel updates, or that steps itself."""
    job = stack_with(
        f"optimizer {name}, offloaded", lambda model: ELEMENTWISE[name](trainable(model))
    )
    return Row(job, _away(way), plan={"clip": 1.0}, traced=False).only("oracle", "destroy")


def _lion(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Lion (arXiv 2302.06675) as one would write it down."""

    class Written(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    update = torch.sign(0.9 * moment + 0.1 * p.grad)
                    p.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
                    moment.mul_(0.99).add_(p.grad, alpha=0.01)

    return Written(parameters, {})


def _muon_whose_adam_decays(model: nn.Module) -> MuonAndAdamW:
    """Linear layers by Muon, the rest by AdamW."""
    both = MuonAndAdamW(model)
    both.each[1].param_groups[0]["weight_decay"] = 0.1
    return both


LAMBS = {"lr": 0.02, "weight_decay": 0.1, "max_coeff": 0.3, "min_coeff": 0.01}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
# (parameters of the section, the plain optimizer)
BY_NAME: dict[str, tuple[Keys, Callable[..., Any]]] = {
    "SGD": (NESTEROV, torch.optim.SGD),
    "Lion": ({"lr": 1e-4, "weight_decay": 0.1}, _lion),
    "FusedLamb": (LAMBS, Lamb),
    "Adafactor": (
        {"lr": 0.02, "relative_step": False, "scale_parameter": False},
        transformers.Adafactor,
    ),
}
MUONS = {"momentum": 0.9, "weight_decay": 0.1, "muon_lr": 0.02, "adam_lr": 0.01}


def _by_name(name: str, params: Keys, plain: Callable[[nn.Module], Any], **more: Any) -> Row:
    """Of the section ``optimizer``."""
    job = stack_with(f"section {name}", lambda model: None)
    keys = always(optimizer={"type": name, "params": params})
    made = stack_with(f"section {name}, plainly", plain)
    return Row(job, keys, plain=made, traced=False, **more).only("oracle")


def _in_8_bits(way: str, make: Callable[[Any], Any]) -> Row:
    """All ranks read the same rows, so that codes are those of one process, bit for bit. Matrices
    have 8,192 elements, and sub-groups end with blocks of 256.
    """
    job = Way(f"8 bits {way}", lambda: Stack(2, 64), make_optimizer=make)
    keys = _away(way, buffer_size=1000) if way != DEVICE else always()
    return Row(job, keys, readers=1, elsewhere=4, compare=exact, traced=False)


WHOLE_AWAY = [
    ("adafactor", "optimizer on cpu", STAGES),
    ("lamb", "optimizer in files", STAGES),
    ("lars", "half on cpu", STAGES),
    ("muon", "all in files", (3,)),
]
OPTIMIZERS: dict[str, Row] = {
    **{name: _whole(name) if name in MAIN else _whole(name).only("oracle") for name in WHOLE},
    "muon, accumulated and clipped": _whole("muon", plan={"accumulation": 2, "clip": 0.1}).only(
        "oracle"
    ),
    **{
        f"{name}, {way}": replace(
            _whole(name, stages=stages), keys=_away(way, buffer_size=500)
        ).only("oracle", *(["resume"] if stages == STAGES else []))
        for name, way, stages in WHOLE_AWAY
    },
    **{
        f"{name}, {way}": _elementwise(name, way)
        for name, way in zip(ELEMENTWISE, itertools.cycle(PLACES))
    },
    **{
        f"{name} by name": _by_name(
            name, params, lambda model, kind=kind, params=params: kind(trainable(model), **params)
        )
        for name, (params, kind) in BY_NAME.items()
    },
    "AdamW in 8 bits": _in_8_bits(DEVICE, lambda m: AdamW8bit(trainable(m), 1e-3)),
    "SGD in 8 bits": _in_8_bits(
        "half on cpu", lambda m: SGD8bit(trainable(m), 1e-2, momentum=0.9, nesterov=True)
    ),
    "Lion in 8 bits": _in_8_bits("optimizer on cpu", lambda m: Lion8bit(trainable(m), 1e-4)),
    "Adam in 8 bits": _in_8_bits("optimizer in files", lambda m: Adam8bit(trainable(m), 1e-3)),
    "Muon by name": replace(
        _by_name("Muon", MUONS, _muon_whose_adam_decays),
        compare=lambda got, want, initial: same_directions(got, want),
    ),
}

# ---- places and precision ----


def _placed(way: str, **plan: Any) -> Row:
    stages = (3,) if way.startswith(("all", "parameters")) else STAGES
    return Row(TWO_BLOCKS, _away(way), stages=stages, plan=plan)


def _tied(way: str, architecture: str, stages: tuple[int, ...], **plan: Any) -> Row:
    """A model of transformers, whose weights are tied, or in fp32."""
    job = ArchitectureJob(ARCHITECTURES[architecture])
    return Row(job, _away(way), stages=stages, plan=plan).only("oracle")


PLACEMENTS: dict[str, Row] = {
    "optimizer on cpu": _placed("optimizer on cpu", accumulation=2),
    "all on cpu": _placed("all on cpu", clip=0.5),
    "optimizer in files": _placed("optimizer in files", clip=0.5),
    "all in files": _placed("all in files", accumulation=2),
    "parameters on cpu": _placed("parameters on cpu"),
    "all on cpu, t5": _tied("all on cpu", "t5", (3,), precision="bf16"),
}
PRECISIONS: dict[str, Row] = {
    precision: Row(
        TWO_BLOCKS, plan={"precision": precision, "accumulation": 2}, compare=in_16_bits
    ).only("bytes", "destroy", "resume", "overflow")
    for precision in ("bf16", "fp16")
}


def nearest(got: Weights, want: Weights, initial: Weights) -> None:
    """The errors of Kahan sums are beside the weights."""
    exact(got, {name: value.bfloat16().float() for name, value in want.items()}, initial)


def _in_bf16(
    kind: str, way: str = DEVICE, moments: bool = False, kahan: bool = False, **more: Any
) -> Row:
    """All ranks read the same rows, so that bits are those of one process."""

    def build() -> nn.Module:
        return Stack(2, 64).bfloat16()  # to begin with the same values

    make = IN_BF16[kind]
    name = f"{kind} in bf16, {way}, {moments}, {kahan}"
    section = {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": moments,
        "kahan_summation": kahan,
        "stochastic_rounding_seed": SEED,
    }

    def keys(stage: int, folder: Path) -> Keys:
        away = {} if way == DEVICE else _away(way, buffer_size=1000)(stage, folder)
        return {"bf16": section, **away}

    row = Row(
        Way(name, build, make_optimizer=make),
        keys,
        plain=Way(
            f"{name}, plainly",
            build,
            make_optimizer=lambda model: InBf16(model, make, moments, kahan),
        ),
        readers=1,
        elsewhere=4,
        plan={"precision": "bf16"},
        compare=nearest if kahan else exact,
        traced=False,
        **more,
    )
    return row.only("oracle", "bytes", "destroy", "resume")


IN_BF16: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda m: torch.optim.AdamW(trainable(m), 1e-3, weight_decay=0.1, foreach=False),
    "SGD": sgd,
    "RMSprop": lambda m: torch.optim.RMSprop(trainable(m), 1e-3, momentum=0.5),
    "AdamW8bit": lambda m: AdamW8bit(trainable(m), 1e-3, weight_decay=0.1),
}
PRECISIONS |= {
    "AdamW in bf16": _in_bf16(
        "AdamW",
        moments=True,
        around=lambda patch: patch.setattr(bf16_state, "WIDENED", 1024),  # several batches
    ),
    "SGD in bf16": _in_bf16("SGD"),
    "RMSprop in bf16": _in_bf16("RMSprop", moments=True),
    "AdamW in bf16 on cpu": _in_bf16("AdamW", "optimizer on cpu"),
    "AdamW in bf16 in files": _in_bf16("AdamW", "optimizer in files", True),
    "8 bits beside bf16 in files": _in_bf16("AdamW8bit", "optimizer in files"),
    "Kahan sums": _in_bf16("SGD", kahan=True),
    "Kahan sums of AdamW": _in_bf16("AdamW", moments=True, kahan=True),
    "Kahan sums on cpu": replace(
        _in_bf16("SGD", "optimizer on cpu", kahan=True), compare=in_16_bits
    ),
}

# ---- meshes ----


class WithoutGradients(OnEngine):
    """Reads no gradients: they are not averaged, or in parts."""

    def grads(self) -> dict[str, torch.Tensor]:
        return {}


class InParts(WithoutGradients):
    """Ranks hold parts of parameters, or read parts of sequences."""

    def __init__(self, engine: Any, plan: Any) -> None:
        super().__init__(engine, plan)
        if engine.config.ranks_of_a_sequence > 1:
            self.memory["sequence"] = hf_zero.sequence_parallel()

    def weights(self) -> dict[str, torch.Tensor]:
        whole = whole_state_dict(self.engine, dtype=torch.float32) or {}
        return {name: whole[name] for name, _ in self.module.named_parameters()}


@dataclass
class SequenceJob(sequences.SequenceJob):
    """Named, as rows are."""

    name: str = "sequence parallel"


def _replicated(**keys: Any) -> Row:
    return Row(
        TWO_BLOCKS, always(**keys), stages=(1, 2, 3), ranks=4, elsewhere=2, plan={"clip": 0.5}
    )


def _of_zero(**zero: Any) -> Callable[[int, Path], Keys]:
    return always(zero_optimization=zero)


def _two_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("LOCAL_WORLD_SIZE", "2")


PARALLELISM: dict[str, Row] = {
    "replicas": _replicated(replicate_size=2),
    "shards of a node": replace(
        _replicated(), keys=_of_zero(mics_shard_size=2), stages=(3,), elsewhere=2
    ),
    "secondary shards": replace(
        _replicated(), keys=_of_zero(zero_hpz_partition_size=2), stages=(3,)
    ).only("oracle", "bytes", "overflow"),
    "gathers in two hops": replace(
        _replicated(),
        keys=_of_zero(mics_hierarchical_params_gather=True),
        stages=(3,),
        elsewhere=4,
        around=_two_nodes,
    ).only("oracle", "destroy"),
    "tensor parallel": Row(
        TensorJob("llama", plain_sgd),
        always(tensor_parallel={"autotp_size": 2}),
        ranks=4,
        readers=2,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume"),  # an overflow is in test_flat_meshes.py
    ),
    "expert parallel": Row(
        TensorJob("mixtral", plain_sgd),
        always(expert_parallel={"enabled": True, "autoep_size": 2}),
        elsewhere=4,
        session=InParts,
        columns=("oracle", "resume"),
    ),
    "sequence parallel": Row(
        SequenceJob(sequences.llama),
        always(sequence_parallel_size=2),
        readers=1,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume", "overflow"),
    ),
    "context parallel": Row(
        replace(SequenceJob(sequences.llama), name="context parallel"),
        always(context_parallel_size=2),
        readers=1,
        elsewhere=2,
        session=InParts,
        columns=("oracle", "resume", "overflow"),
    ),
}

# ---- recomputation ----

SMALL = {"min_bytes": 1, "in_flight_bytes": 1000}


def _late_transfers(patch: pytest.MonkeyPatch) -> None:
    """On the CPU activations would have nowhere to go."""
    patch.setattr(activations, "transfers_of", lambda device: Late())


def _no_compilation(patch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()


def _recomputed(architecture: str, around: Any = _late_transfers, **keys: Any) -> Row:
    job = ArchitectureJob(ARCHITECTURES[architecture])
    plan = {"accumulation": 2, "clip": 0.5}
    return Row(job, always(**keys), plan=plan, around=around).only("oracle", "destroy")


def _own_checkpoints(way: str, stages: tuple[int, ...], **keys: Any) -> Row:
    plan = {"clip": 0.5}
    row = Row(WAYS[way], always(**keys), stages=stages, plan=plan, around=_late_transfers)
    return row.only("oracle")


RECOMPUTATION: dict[str, Row] = {
    "checkpoints of the model": _own_checkpoints(
        "a block called twice, each time under a checkpoint", (1,), activation_offload=SMALL
    ),
    "reentrant checkpoints of the model": _own_checkpoints(
        "reentrant checkpoint around two blocks, another block before and after",
        (3,),
        activation_offload=SMALL,
    ),
    "checkpoints of transformers": _own_checkpoints(
        "gradient_checkpointing_enable(use_reentrant=False) on bert",
        (3,),
        activation_checkpointing={"cpu_checkpointing": True},
        activation_offload={**SMALL, "enabled": False},
    ),
    "checkpointed blocks": _recomputed("bert", activation_checkpointing={"blocks": True}),
    "selective checkpoints": _recomputed("llama", activation_checkpointing={"blocks": "selective"}),
    "activations on the host": _recomputed("bert", activation_offload=SMALL),
    "checkpoints on the host": _recomputed(
        "llama",
        activation_checkpointing={"blocks": True, "cpu_checkpointing": True},
        activation_offload=SMALL,
    ),
    "compiled blocks": replace(
        _recomputed("bert", _no_compilation, compile={"blocks": True, "backend": "eager"}),
        stages=(3, 0, 1, 2),
    ),
}

# ---- graphs ----


def _graph(architecture: str, **keys: Any) -> Row:
    """Kernels leave a record on the model, which ``hf_zero.restore`` reads."""
    columns = ("oracle",) if "kernels" in keys else ("oracle", "destroy")
    return Row(ArchitectureJob(ARCHITECTURES[architecture]), always(**keys), columns=columns)


GRAPHS: dict[str, Row] = {
    "deferred logits": _graph("llama", kernels=["loss"]),
    "kernels": _graph("gpt2", kernels="auto"),
    "an encoder and a decoder": _graph("t5", zero_optimization=APART),
}


def _left_out(job: LeftOut, ranks: int = 2, stages: tuple[int, ...] = (3,), **keys: Any) -> Row:
    """Ranks leave out blocks, each its own in every step."""
    zero = {"zero_optimization": APART, **keys}
    plan = {"steps": 3, "accumulation": 2}
    return Row(
        job, always(**zero), ranks=ranks, stages=stages, plan=plan, around=_no_compilation
    ).only("oracle")


GRAPHS |= {
    "blocks left out": _left_out(LeftOut(8, at_random(8, 0.4), False), 3),
    "blocks left out, reentrant": _left_out(LeftOut(8, at_random(8, 0.4), True)),
    "blocks left out, replicated": _left_out(LeftOut(8, at_random(8, 0.4)), 4, replicate_size=2),
    "blocks left out, compiled": _left_out(
        LeftOut(8, at_random(8, 0.4)), compile={"blocks": True, "backend": "eager"}
    ),
    "blocks used later": _left_out(LeftOut(6, first_used(1, 2, 3))),
    # the length of the shard axis is 1
    "blocks used later, replicated": _left_out(LeftOut(6, first_used(1, 2, 3)), replicate_size=2),
    # gradients come in the order in which units are reduced, learned from backwards that reduce
    "gradients of the input": _left_out(
        LeftOut(6, lambda at: (), explains=lambda at: True), stages=(1,)
    ),
    "gradients of the input, blocks used later": _left_out(
        LeftOut(6, first_used(1, 2, 3), explains=lambda at: at.micro == 0)
    ),
    "gradients of the input, blocks left out": _left_out(
        LeftOut(6, at_random(6, 0.4), explains=lambda at: at.micro == 1), 3
    ),
}

# ---- techniques ----

GROWING = [3, 5, 8, LENGTH]  # tokens of a row, by step
SCHEDULE = {
    "min_difficulty": 3,
    "max_difficulty": 64,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": GROWING, "max_step": [1, 2, 3]},
}
LEGACY: Keys = {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen", **SCHEDULE}}


def by_metric(name: str, **more: Any) -> Keys:
    metrics = {name: {**SCHEDULE, **more}}
    learning = {"enabled": True, "curriculum_metrics": metrics}
    sampling = {"enabled": True, "curriculum_learning": learning}
    return {"data_efficiency": {"enabled": True, "data_sampling": sampling}}


def cut(batch: Batch, length: int) -> Batch:
    return {name: value[:, :length].contiguous() for name, value in batch.items()}


def reshaped(batch: Batch, length: int) -> Batch:
    rows = LENGTH // length
    return {
        name: torch.cat([value[i : i + 1, : rows * length].reshape(rows, length) for i in (0, 1)])
        for name, value in batch.items()
    }


@dataclass
class CutByHand(ArchitectureJob):
    """Batches that are cut, or reshaped, before the model is called."""

    by: Callable[[Batch, int], Batch] = cut

    def __post_init__(self) -> None:
        self.name = f"{self.architecture.name}, {self.by.__name__} by hand"

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        loss: torch.Tensor = net(**self.by(self.batch(at), GROWING[at.step])).loss
        return loss


def _grown(architecture: str, by: Callable[[Batch, int], Batch], keys: Keys, **plan: Any) -> Row:
    chosen = ARCHITECTURES[architecture]
    return Row(
        ArchitectureJob(chosen),
        always(**keys),
        plain=CutByHand(chosen, by=by),
        plan={"steps": len(GROWING), **plan},
    )


MOQ: Keys = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 2,
}
BITS = [None, 6, 5, 4, 4, 4]  # of each step's forwards


def rounded(name: str, weight: torch.Tensor, step: int, section: Keys) -> torch.Tensor:
    """Weights in few bits by their definition, group by group."""
    bits = BITS[step]
    if bits is None:
        return weight
    levels, found = 2**bits, []
    stochastic = section.get("quantize_rounding") == "stochastic"
    symmetric = section.get("quantize_type", "symmetric") == "symmetric"
    noise = noise_for(weight, name, 0, step - 1).flatten()
    groups = section["quantize_groups"]
    for part, drawn in zip(weight.flatten().chunk(groups), noise.chunk(groups)):
        shift = torch.zeros(()) if symmetric else part.min()
        span = 2 * part.abs().max() if symmetric else part.max() - part.min()
        low = -levels // 2 if symmetric else 0
        scaled = (part - shift) * (levels / span)
        whole = torch.floor(scaled + drawn) if stochastic else torch.round(scaled)
        found.append(whole.clamp(low, low + levels - 1) * (span / levels) + shift)
    value = torch.cat(found).view(weight.shape)
    mixed = section.get("fp16_mixed_quantize", {"enabled": False})
    if mixed["enabled"]:
        share = max(0.0, 1 - mixed["quantize_change_ratio"] * (step - BITS.index(bits)))
        value = share * weight + (1 - share) * value
    return value


@dataclass
class RoundedJob(StackJob):
    """Weights of blocks are rounded before each forward of the plain loop; their gradients go to
    the weights as they are.
    """

    section: Keys
    make: Callable[[], nn.Module] = Stack
    chosen: Callable[[str], bool] = lambda name: name.startswith(("blocks.", "transformer.h."))

    def __post_init__(self) -> None:
        self.name = f"rounded {id(self)}"

    def build(self) -> nn.Module:
        return seeded(self.make)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        if not hasattr(net, "engine"):
            net = _Rounded(net, self, at.step)
        return self.loss_of(net, at)

    def loss_of(self, net: Driver, at: At) -> torch.Tensor:
        return super().loss(net, at)


class _Rounded(Driver):
    def __init__(self, net: Driver, job: RoundedJob, step: int) -> None:
        self.module, self.dtype = net.module, net.dtype
        self.weights = {
            name: p + (rounded(name, p.detach(), step, job.section) - p.detach())
            if job.chosen(name) and p.dim() > 1
            else p
            for name, p in net.module.named_parameters()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, self.weights, args, kwargs)


def _rounded(more: Keys, **fields: Any) -> Row:
    section = {**MOQ, **more}
    plan = {"steps": 3, **fields.pop("plan", {})}
    return Row(RoundedJob(section), always(quantize_training=section), plan=plan, **fields)


FEW = {"block_size": 32}
FOUR: Keys = {"compressed_communication": {"bits": 4, **FEW}}
ERRORS = {"err_beta": 0.8, "reset_T": 3}


def partly_frozen() -> nn.Module:
    model = Stack(2)
    model.blocks[0].requires_grad_(False)
    return model


def _compressed(keys: Keys, stages: tuple[int, ...], **zero: Any) -> Row:
    keys = {"compressed_communication": FEW, "zero_optimization": zero, **keys}
    return Row(
        stack_with("4 bits", plain_sgd),
        always(**keys),
        stages=stages,
        plan={"accumulation": 2},
        compare=in_few_bits,
        traced=False,
    )


def _one_bit(cls: Any, settings: Keys, dense: Any) -> Row:
    """Before its freeze, where it is the dense optimizer."""
    shared = {name: value for name, value in settings.items() if "freeze" not in name}
    name = f"{cls.__name__} before its freeze: {shared}"
    return Row(
        stack_with(name, lambda model: cls(trainable(model), **{**shared, "freeze_step": 1000})),
        always(compressed_communication={"block_size": BLOCK}),
        plain=stack_with(f"{name}, plainly", lambda model: dense(trainable(model), **shared)),
        stages=(1, 2, 0),
        plan={"accumulation": 2, "clip": 0.3},
        traced=False,
        columns=("oracle", "resume"),
    )


def _frozen(name: str, cls: Any, settings: Keys, limit: float) -> Row:
    """After it, where no parameter moves further than the others: the equations are those of
    ``helpers/one_bit.py``.
    """
    return Row(
        stack_with(name, lambda model: cls(trainable(model), **settings)),
        always(compressed_communication={"block_size": BLOCK}),
        plain=stack_with(f"{name}, plainly", lambda model: torch.optim.AdamW(trainable(model))),
        stages=(1, 2, 0),
        plan={"steps": 3},
        compare=within(limit),
        traced=False,
        session=WithoutGradients,
        columns=("destroy", "resume", "overflow"),
    )


DROPS = {"tolerance": 1e-4, "compare": dropped}
COMPILED: Keys = {"compile": {"blocks": True, "backend": "eager"}}
CHECKPOINTED: Keys = {"activation_checkpointing": {"blocks": True}}


def _dropping(job: Any, ranks: int = 1, **keys: Any) -> Row:
    """Of another family of models, or beside what else is on blocks; without a resume, by rank."""
    row = Row(job, always(**job.keys, **keys), ranks=ranks, elsewhere=0, **DROPS)
    return replace(row, around=_no_compilation).only("oracle")


TECHNIQUES: dict[str, Row] = {
    "layer drop": Row(
        LayerDropJob("stack"),
        lambda stage, folder: {**LayerDropJob("stack").keys, "zero_optimization": APART},
        plan={"steps": 3, "accumulation": 2, "clip": 0.5},
        **DROPS,
    ).only("oracle", "bytes", "destroy", "resume"),
    "layer drop by rank": Row(
        LayerDropJob("stack", per_rank=True),
        lambda stage, folder: {
            **LayerDropJob("stack", per_rank=True).keys,
            "zero_optimization": APART,
        },
        stages=(3,),
        plan={"steps": 3, "accumulation": 2},
        elsewhere=0,
        **DROPS,
    ).only("oracle", "resume"),
    "token drop": Row(
        TokenDropJob("bert", padded=True),
        always(**TokenDropJob("bert", padded=True).keys),
        plan={"accumulation": 2},
        elsewhere=0,
        **DROPS,
    ),
    "layer drop, T5": _dropping(LayerDropJob("t5")),
    "layer drop, ViT": _dropping(LayerDropJob("vit")),
    "layer drop, compiled": _dropping(LayerDropJob("gpt2"), 2, **CHECKPOINTED, **COMPILED),
    "layer drop, replicated": _dropping(LayerDropJob("gpt2"), 2, replicate_size=2),
    "token drop, GPT-2": _dropping(TokenDropJob("gpt2")),
    "token drop, Llama": _dropping(TokenDropJob("llama", eager=True, padded=True), **CHECKPOINTED),
    "token drop, T5": _dropping(TokenDropJob("t5", chosen=(1, 3, 6, 8), padded=True)),
    # four patches and the token of the class, of which a step or two leave one out
    "token drop, ViT": _dropping(TokenDropJob("vit")),
    "curriculum": _grown("gpt2", cut, LEGACY, accumulation=2),
    "curriculum by truncation": _grown("t5", cut, by_metric("seqlen_truncate")).only("oracle"),
    "curriculum by reshaping": _grown("bert", reshaped, by_metric("seqlen_reshape")).only("oracle"),
    "weights in few bits": _rounded({}, plan={"accumulation": 2}),
    "weights in few bits, asymmetric": _rounded({"quantize_type": "asymmetric"}).only("oracle"),
    "weights in few bits, stochastic": _rounded(
        {"quantize_rounding": "stochastic", "quantize_groups": 8}
    ).only("oracle", "resume"),
    "weights in few bits, mixed": _rounded(
        {"fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}}
    ).only("oracle"),
    # parameters lag behind the master weights
    "4 bits both ways": _compressed(FOUR, (1, 2)).only("oracle", "bytes", "resume", "overflow"),
    "4 bits up, 8 down": _compressed(
        {}, (3,), zero_quantized_gradients=True, zero_quantized_weights=True
    ),
    "4 bits both ways, replicated": replace(
        _compressed({**FOUR, "replicate_size": 2}, (1, 2)), ranks=4, elsewhere=2
    ).only("oracle", "resume"),
    "4 bits up, 8 down, partly frozen": replace(
        _compressed({}, (3,), zero_quantized_gradients=True, zero_quantized_weights=True),
        job=Way("4 bits, partly frozen", partly_frozen, make_optimizer=plain_sgd),
    ).only("oracle"),
    "4 bits up, offloaded": _compressed(
        {}, (2, 3), zero_quantized_gradients=True, offload_optimizer={"device": "cpu"}
    ).only("oracle"),
    "4 bits both ways, offloaded": _compressed(
        FOUR, (2,), offload_optimizer={"device": "cpu"}
    ).only("oracle"),
    "4 bits up, errors fed back": _compressed(
        {},
        (1, 2, 3),
        zero_quantized_gradients=True,
        zeropp_loco_param={**ERRORS, "reset_T": 64},  # cleared by a step
    ).only("oracle", "resume"),
    "1-bit Adam, dense": _one_bit(OneBitAdam, ADAM, torch.optim.AdamW),
    "1-bit Adam": _frozen("1-bit Adam", OneBitAdam, {**ADAM, "freeze_step": 1}, 120 * ADAM["lr"]),
    "0/1 Adam, local steps": _frozen(
        "local steps", ZeroOneAdam, {**ADAM, **RARE, "lr": 1e-3, "var_freeze_step": 1}, 0.1
    ),
}

GROUPS: dict[str, dict[str, Row]] = {
    "optimizers": OPTIMIZERS,
    "placements": PLACEMENTS,
    "precisions": PRECISIONS,
    "parallelism": PARALLELISM,
    "recomputation": RECOMPUTATION,
    "graphs": GRAPHS,
    "techniques": TECHNIQUES,
}
ROWS: dict[str, Row] = {name: row for group in GROUPS.values() for name, row in group.items()}
