"""Features beside each other: the keys of each, and what a plain loop does in its place.

A plain loop does what both features of a pair stand for, whose ``ByHand`` are independent of each
other. Those that change no number have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.func import functional_call
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from hf_zero.config.techniques import TokenDropSection
from hf_zero.optim import OneBitAdam
from hf_zero.techniques.blocks import linears_of_blocks
from hf_zero.techniques.difficulty_index import write_index
from hf_zero.techniques.quantized_linears import base_config
from hf_zero.techniques.sample_order import Criterion, SampleOrder
from hf_zero.techniques.token_drop import sample as token_drop_of
from hf_zero.techniques.token_drop import tokens_read
from tests.helpers import layer_drop, sampled, token_drop
from tests.helpers.capabilities_of_techniques import rounded
from tests.helpers.engines import STAGES
from tests.helpers.layer_drop import left_out, probabilities, switched
from tests.helpers.models import HEADS, HIDDEN, ROWS, Batch, seed_of, seeded
from tests.helpers.oracle import FP32_TOLERANCE
from tests.helpers.token_drop import one_row
from tests.helpers.training import At, Driver, Job, Plan, sgd, trainable

Keys = dict[str, Any]
Call = Callable[..., Any]
VOCAB, TOKENS, DEPTH, STEPS = 68, 48, 3, 4
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 2,
}  # fmt: skip


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
    )


def experts() -> nn.Module:
    """Blocks of experts and, the first, of an MLP."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
    config = transformers.Qwen3MoeConfig(
        **SIZES, **sizes, num_key_value_heads=2, head_dim=8, mlp_only_layers=[0],
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


class WideMLP(nn.Module):
    """What a block of BERT computes between attention and its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.dense(hidden_states))


def bert(intermediate: Callable[[], nn.Module] = WideMLP, width: int = 2 * HIDDEN) -> nn.Module:
    """Blocks whose norms are after their sublayers."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: Any = transformers.BertLMHeadModel(
        transformers.BertConfig(**{**SIZES, "intermediate_size": width}, **none, is_decoder=True)
    )
    for layer in model.bert.encoder.layer:
        layer.intermediate = intermediate()
    return model  # type: ignore[no-any-return]


def bert_of_experts() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    model: Any = bert(lambda: MixtralSparseMoeBlock(config), HIDDEN)
    for experts in (layer.intermediate.experts for layer in model.bert.encoder.layer):
        nn.init.normal_(experts.gate_up_proj, std=0.2)
        nn.init.normal_(experts.down_proj, std=0.2)
    for layer in model.bert.encoder.layer:
        nn.init.normal_(layer.intermediate.gate.weight, std=0.2)
    plan = config.base_model_ep_plan or {}
    model.config.base_model_ep_plan = {
        name.replace("layers.*.mlp", "encoder.layer.*.intermediate"): kind
        for name, kind in plan.items()
    }
    return model  # type: ignore[no-any-return]


# By name: the model, the path of its blocks, and what it has that features need.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], str, set[str]]] = {
    "llama": (llama, "model.layers", {"causal", "stages", "MLP"}),
    "experts": (experts, "model.layers", {"causal", "experts", "MLP"}),
    "bert": (bert, "bert.encoder.layer", {"causal", "norms after sublayers", "MLP"}),
    "bert of experts": (
        bert_of_experts, "bert.encoder.layer", {"causal", "norms after sublayers", "experts"}
    ),
}  # fmt: skip


def sample(row: int) -> Batch:
    """Row ``row`` of the data; every third token has no label."""
    generator = torch.Generator().manual_seed(row)
    ids = torch.randint(3, VOCAB, (TOKENS,), generator=generator)
    labels = ids.clone()
    labels[::3] = -100
    return {"input_ids": ids, "labels": labels}


def stacked(rows: Iterable[int]) -> Batch:
    samples = [sample(row) for row in rows]
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


class ByHand:
    """What a plain loop does in place of a feature."""

    def prepare(self, model: nn.Module) -> None:
        """Change ``model`` before the training."""

    def cut(self, batch: Batch, step: int) -> Batch:
        return batch

    def rows(self, at: At, ranks: int) -> list[int] | None:
        """Return which rows of the data are the batch of ``at``; None: any."""
        return None

    def block(self, block: nn.Module, number: int, plain: Call, at: At) -> Call:
        """Return the forward of a block, which is ``plain`` without the feature."""
        return plain

    def weight(self, name: str, value: torch.Tensor, step: int) -> torch.Tensor:
        """Return what modules compute with in place of the weight ``value``."""
        return value

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return None

    def micros(self, step: int) -> int:
        """Return how many micro-batches stand for one in ``step``."""
        return 1

    def rate(self, step: int) -> float:
        return 1.0


NOTHING = ByHand()  # of a feature that changes no number


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to use a feature: ``keys``, at ``stages``. ``share`` of at least ``ranks`` ranks
    train on one batch. ``needs``: what it needs of a model. ``by_hand``: None where no plain loop
    does the same; ``near`` is then how far weights may be from those of the loop without it,
    relative to their move. ``tolerance`` of other differences: rounding to few bits turns those of
    rounding in fp32 into larger ones. ``make`` is the optimizer of the engine. ``refused``: beside
    which features a model or a value is refused, with words of the error.
    """

    keys: Keys = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    ranks: int = 2
    share: int = 1
    needs: str = ""
    by_hand: ByHand | None = NOTHING
    near: float = 0.0
    tolerance: float = FP32_TOLERANCE
    make: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    clips: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)


class Converted(ByHand):
    """Modules are replaced in the plain model, as the function of another library does it."""

    def __init__(self, convert: Callable[[nn.Module], object]) -> None:
        self.prepare = convert  # type: ignore[method-assign, assignment]


AWARE = "int8_weight"


def quantization_aware(model: nn.Module) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    chosen = linears_of_blocks(model)
    quantize_(
        model,
        QATConfig(base_config(AWARE, 32), step="prepare"),
        filter_fn=lambda module, path: path in chosen,
    )


def in_float8(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = linears_of_blocks(model)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda _, path: path in chosen,
    )


SPARSE: Keys = {
    "mode": "bslongformer", "block": 16, "num_sliding_window_blocks": 1, "global_block_indices": [0]
}  # fmt: skip


def sparse(model: nn.Module) -> None:
    from hf_zero.integrations.fused.sparse_attention import sparsify

    sparsify(model, dict(SPARSE))


def before_sublayers(model: nn.Module) -> None:
    import hf_zero

    hf_zero.optimize(model, "off", pre_layer_norm=True)


class Shortened(ByHand):
    """Sequences of a curriculum."""

    LENGTHS = (16, 24, 40, TOKENS)  # by step

    def cut(self, batch: Batch, step: int) -> Batch:
        length = self.LENGTHS[step]
        return {name: value[:, :length].contiguous() for name, value in batch.items()}


class Sampled(ByHand):
    """Samples by their difficulty."""

    def __init__(self) -> None:
        self.drawn: dict[int, list[int]] = {}

    def rows(self, at: At, ranks: int) -> list[int]:
        if ranks not in self.drawn:
            raise LookupError(ranks)
        first = ((at.step * ACCUMULATION + at.micro) * ranks + at.rank) * ROWS
        return self.drawn[ranks][first : first + ROWS]

    def section(self, folder: Path, ranks: int) -> Keys:
        """Return the keys, with an index that this writes into ``folder``."""
        data = [{"id": torch.tensor(row), **sample(row)} for row in range(sampled.ROWS)]
        index = write_index(folder / "index", sampled.VALUES, "hard", "id", data)
        size = ROWS * ranks * ACCUMULATION
        criterion = Criterion("hard", index, sampled.at, 100)
        order = SampleOrder(sampled.ROWS, [criterion], size, token_drop.SEED).after(0)
        self.drawn[ranks] = [row for row, _ in zip(order, range(size * STEPS))]
        section = sampled.section(hard=sampled.metric(index))
        return merged(section, {"data_efficiency": {"seed": token_drop.SEED}})


class Phases(ByHand):
    """Twice the micro-batches from the third step on, whose learning rates are warmed up."""

    def micros(self, step: int) -> int:
        return 1 if step < 2 else 2

    def rate(self, step: int) -> float:
        return 1.0 if step < 2 else 0.5 * (step - 1) / 2


class Rates(Phases):
    """Without other batches."""

    def micros(self, step: int) -> int:
        return 1


class Rounded(ByHand):
    """Weights of blocks in few bits."""

    def __init__(self, section: Keys, modules: tuple[str, ...] = (".layer",)) -> None:
        self.section, self.modules = section, modules

    def weight(self, name: str, value: torch.Tensor, step: int) -> torch.Tensor:
        named = any(module in name for module in self.modules)
        return rounded(name, value, step, self.section) if named else value


class LayersLeftOut(ByHand):
    def block(self, block: nn.Module, number: int, plain: Call, at: At) -> Call:
        p = probabilities(at.step, [DEPTH])
        return switched(block, left_out(at.step, p, at.micro)[number], p[number], plain)


class TokensLeftOut(ByHand):
    CHOSEN = (1,)
    SECTION = TokenDropSection(
        min_value=token_drop.LOW, max_value=token_drop.HIGH, require_steps=token_drop.STEPS,
        seq_per_step=token_drop.EVERY,
    )  # fmt: skip

    def block(self, block: nn.Module, number: int, plain: Call, at: At) -> Call:
        if number not in self.CHOSEN:
            return plain
        read = int(tokens_read(self.SECTION).at(at.step))

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(plain).bind(*args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            x = given.pop("hidden_states")
            rows, size = x.shape[:2]
            if read >= size:
                return plain(*args, **kwargs)
            place = (at.step, at.micro, at.rank)
            kept = token_drop_of(token_drop.SEED, place, number, rows, size, read, x.device)
            named = {
                name: _joined(
                    [one_row(name, value, row, own, size) for row, own in enumerate(kept)]
                )
                for name, value in given.items()
            }
            out = plain(torch.stack([x[row, own] for row, own in enumerate(kept)]), **named)
            new = x.clone()
            for row, own in enumerate(kept):
                new[row, own] = (out[0] if isinstance(out, tuple) else out)[row]
            return (new, *out[1:]) if isinstance(out, tuple) else new

        return forward


def _joined(rows: list[Any]) -> Any:
    """Return the argument of a block for several rows."""
    if isinstance(rows[0], tuple):
        return tuple(_joined([*each]) for each in zip(*rows))
    return torch.cat(rows) if isinstance(rows[0], torch.Tensor) else rows[0]


ONE_BIT = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def one_bit(model: nn.Module, freeze_step: int) -> torch.optim.Optimizer:
    return OneBitAdam(trainable(model), **ONE_BIT, freeze_step=freeze_step)


class Dense(ByHand):
    """The optimizer that momenta in one bit are before their freeze."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trainable(model), **ONE_BIT)


ACCUMULATION = 2
FOLDER = "{folder}"  # in place of the folder of a run
FEW = {"block_size": 32}
MOQ: Keys = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 2,
}
SEQLEN: Keys = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 16,
    "max_difficulty": TOKENS,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [*Shortened.LENGTHS], "max_step": [1, 2, 3]},
}
SAMPLED = Sampled()
FLOAT8 = {"recipe": "tensorwise", "emulate": True}


FEW_BITS = 5e-3


def of_groups(*modules: str) -> Keys:
    """Return the section of weights in few bits, of ``modules``."""
    params = {"start_bits": 6, "target_bits": 4, "quantization_period": 1}
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, "quantize_groups": 2},
        "different_groups": {"all": {"params": params, "modules": [*modules]}},
    }


def zero(**keys: Any) -> Keys:
    return {"zero_optimization": keys}


def exact(stages: tuple[int, ...] = STAGES, **keys: Any) -> list[Variant]:
    """Of a feature that changes no number."""
    return [Variant(keys, stages)]


def converted(convert: Callable[[nn.Module], object], **keys: Any) -> list[Variant]:
    return [Variant(keys, by_hand=Converted(convert), tolerance=FEW_BITS)]


PHASES = {"phases": [{"steps": 2}, {"lr_scale": 0.5, "warmup_steps": 2}]}
TABLE: dict[str, list[Variant]] = {
    "zero_optimization.offload_optimizer": exact(**zero(offload_optimizer={"device": "cpu"})),
    "zero_optimization.offload_param": exact((3,), **zero(offload_param={"device": "cpu"})),
    "zero_optimization.update_in_backward": [
        Variant(zero(update_in_backward=True), clips=False)
    ],
    "tensor_parallel": [Variant({"tensor_parallel": {"autotp_size": 2}}, ranks=4, share=2)],
    "expert_parallel": [
        Variant({"expert_parallel": {"enabled": True, "autoep_size": 2}}, needs="experts")
    ],
    "sequence_parallel": [
        Variant({"sequence_parallel_size": 2}, ranks=2, share=2),
        Variant({"context_parallel_size": 2}, ranks=2, share=2, needs="causal"),
    ],
    "pipeline": [Variant({}, (1, 0), ranks=4, share=2, needs="stages")],
    "replicate_size": [Variant({"replicate_size": 2}, ranks=4)],
    "zero_optimization.zero_hpz_partition_size": [
        Variant(zero(zero_hpz_partition_size=2), (3,), ranks=4)
    ],
    "compressed_communication": [
        Variant({"compressed_communication": {"bits": 4, **FEW}}, (1, 2), by_hand=None, near=0.5),
        Variant(
            {
                "compressed_communication": FEW,
                **zero(zero_quantized_gradients=True, zero_quantized_weights=True),
            },
            (3,),
            by_hand=None,
            near=0.5,
        ),
    ],
    "one_bit": [
        Variant({}, (1, 2, 0), make=partial(one_bit, freeze_step=1000), by_hand=Dense()),
        Variant({}, (1, 2, 0), make=partial(one_bit, freeze_step=3), by_hand=Dense(), near=1.0),
    ],
    "quantization_aware_training": converted(
        quantization_aware, quantization_aware_training={"config": AWARE}
    ),
    "float8_training": converted(in_float8, float8_training=FLOAT8),
    "float8_training.gather_weights": [
        Variant(
            {"float8_training": {**FLOAT8, "gather_weights": True}},
            (3,),
            by_hand=Converted(in_float8),
            tolerance=FEW_BITS,
        )
    ],
    "sparse_attention": [
        Variant({"sparse_attention": SPARSE}, by_hand=Converted(sparse))
    ],
    "pre_layer_norm": [
        Variant(
            {"pre_layer_norm": True},
            needs="norms after sublayers",
            by_hand=Converted(before_sublayers),
        )
    ],
    "fused_modules": exact(kernels=["norms", "activations", "loss"]),
    "activation_checkpointing": exact(activation_checkpointing={"blocks": True}),
    "activation_offload": exact(activation_offload={"min_bytes": 1, "in_flight_bytes": 1000}),
    "compile.blocks": exact(compile={"blocks": True, "backend": "eager"}),
    "compile.capture": [
        Variant({"compile": {"capture": "step"}, "kernels": ["optimizer"]}, (0, 1, 2))
    ],
    "curriculum_learning": [Variant({"curriculum_learning": SEQLEN}, by_hand=Shortened())],
    "data_efficiency.data_sampling": [Variant({}, by_hand=SAMPLED)],
    "training_phases": [
        Variant(
            {"training_phases": PHASES},
            by_hand=Phases(),
            refused={"data_efficiency.data_sampling": "changes how many samples a step has"},
        ),
        Variant({"training_phases": PHASES}, by_hand=Rates()),
    ],
    "quantize_training": [
        Variant({"quantize_training": MOQ}, by_hand=Rounded(MOQ), tolerance=FEW_BITS)
    ],
    "weight_quantization": [
        Variant(
            {"compression_training": {"weight_quantization": of_groups("self_attn", "attention")}},
            by_hand=Rounded(MOQ, ("self_attn", "attention")),
            tolerance=FEW_BITS,
            refused={"tensor_parallel": "is cut over ranks by tensor parallelism"},
        ),
        Variant(
            {"compression_training": {"weight_quantization": of_groups("position_embeddings")}},
            needs="norms after sublayers",
            by_hand=Rounded(MOQ, ("position_embeddings",)),
            tolerance=FEW_BITS,
        ),
    ],
    "progressive_layer_drop": [
        Variant(
            {
                "progressive_layer_drop": {
                    "enabled": True, "theta": layer_drop.THETA, "gamma": layer_drop.GAMMA
                },
                "seed": layer_drop.SEED,
            },
            by_hand=LayersLeftOut(),
        )
    ],
    "data_efficiency.data_routing.random_ltd": [
        Variant(token_drop.section([*TokensLeftOut.CHOSEN]), by_hand=TokensLeftOut())
    ],
    "tiled_mlp": [Variant({"tiled_mlp": {"enabled": True}}, needs="MLP")],
    "checkpoint.async_save": exact(checkpoint={"async_save": True}),
    "checkpoint.memory": exact(
        checkpoint={"memory": {"every": 3, "folder": f"{FOLDER}/memory", "job": "job"}}
    ),
    "comms_logger": exact(comms_logger={"enabled": True}),
    "flops_profiler": exact(flops_profiler={"enabled": True}),
    "metrics": exact(metrics={"enabled": True, "path": FOLDER}),
}  # fmt: skip


# As ``Variant.near``: a scale in float8 is that of the tokens of a rank or a tile.
NEAR = {
    frozenset((one, other)): 0.5
    for one in ("sequence_parallel", "tiled_mlp")
    for other in ("float8_training", "float8_training.gather_weights")
}
OF_TORCHAO = {"quantization_aware_training", "float8_training", "float8_training.gather_weights"}


def merged(one: Keys, other: Mapping[str, Any]) -> Keys:
    keys = dict(one)
    for name, value in other.items():
        known = keys.get(name)
        both = isinstance(known, dict) and isinstance(value, Mapping)
        keys[name] = merged(known, value) if both else value  # type: ignore[arg-type]
    return keys


def in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: in_folder(each, folder) for name, each in value.items()}
    return value.replace(FOLDER, str(folder)) if isinstance(value, str) else value


class PairJob(Job):
    """A model that two features change. ``names``: of both; ``variants`` of each."""

    def __init__(self, names: tuple[str, ...], variants: tuple[Variant, ...]) -> None:
        self.names, self.variants = names, variants
        needs = {variant.needs for variant in variants} - {""}
        self.family = next((name for name, (*_, has) in FAMILIES.items() if needs <= has), "")
        self.share = 1
        for variant in variants:
            self.share *= variant.share
        self.ranks = max(self.share, *(variant.ranks for variant in variants))
        self.readers = self.ranks // self.share
        self.stages = [s for s in STAGES if all(s in variant.stages for variant in variants)]
        self.clips = all(variant.clips for variant in variants)
        self.near = max(*(each.near for each in variants), NEAR.get(frozenset(names), 0.0))
        refused = (each.refused.get(name, "") for each in variants for name in names)
        self.refused = next(filter(None, refused), "")
        self.tolerance = max(variant.tolerance for variant in variants)
        self.hands = [each.by_hand for each in variants if each.by_hand is not None]
        changing = {id(hand): type(hand).__name__ for hand in self.hands if hand is not NOTHING}
        self.name = f"{self.family} {sorted(changing.items())}"

    @property
    def plan(self) -> Plan:
        clip = 1.0 if self.clips else 0.0
        return Plan(self.readers, STEPS, ACCUMULATION, clip=clip)

    def build(self) -> nn.Module:
        return seeded(FAMILIES[self.family][0])

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [*model.get_submodule(FAMILIES[self.family][1]).children()]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        make = next((each.make for each in self.variants if each.make is not None), sgd)
        return make(model)

    def keys(self, folder: Path) -> Keys:
        """Return the keys of both. Writes into ``folder`` what they name."""
        keys: Keys = {}
        for name, variant in zip(self.names, self.variants):
            keys = merged(keys, in_folder(variant.keys, folder))
            if variant.by_hand is SAMPLED:
                keys = merged(keys, SAMPLED.section(folder, self.readers))
            if name == "training_phases" and isinstance(variant.by_hand, Phases):
                keys = merged(keys, self._phases(variant.by_hand))
        return keys

    def _phases(self, hand: Phases) -> Keys:
        if type(hand) is Rates:
            return {}
        size = 2 * ROWS * ACCUMULATION * self.readers
        first, second = PHASES["phases"]
        return {"training_phases": {"phases": [first, {**second, "train_batch_size": size}]}}

    def rows(self, at: At) -> list[int]:
        found = [rows for hand in self.hands if (rows := hand.rows(at, self.readers)) is not None]
        if found:
            return found[0]
        return [seed_of(at.step, at.micro, at.rank) * 10 + row for row in range(ROWS)]

    def micros(self, plan: Plan, step: int) -> int:
        times = 1
        for hand in self.hands:
            times *= hand.micros(step)
        return plan.accumulation * times

    def rate(self, step: int) -> float:
        rate = 1.0
        for hand in self.hands:
            rate *= hand.rate(step)
        return rate

    def batch(self, net: Driver, at: At) -> Batch:
        if data := net.memory.get("data"):
            batch = next(data)
            batch.pop("id")
            return batch  # type: ignore[no-any-return]
        sequence, batch = net.memory.get("sequence"), stacked(self.rows(at))
        return sequence.shard(batch) if sequence is not None else batch

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        batch, sequence = self.batch(net, at), net.memory.get("sequence")
        loss: torch.Tensor = net(**batch).loss
        if sequence is None:
            return loss
        labels = batch["labels"] if "labels" in batch else batch["shift_labels"]
        return sequence.mean_loss(loss, labels)  # type: ignore[no-any-return]

    def window(self, net: Driver, at: Any, end_micro: Callable[[], None]) -> list[torch.Tensor]:
        engine = getattr(net, "engine", None)
        if not hasattr(engine, "train_batch"):
            return super().window(net, at, end_micro)
        return [engine.train_batch(iter([self.batch(net, each) for each in at]))]


class Plainly(PairJob):
    """What the plain loop trains."""

    def build(self) -> nn.Module:
        model = super().build()
        for hand in self.hands:
            hand.prepare(model)
        self.forwards = [block.forward for block in self.blocks(model)]
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        made = [made for hand in self.hands if (made := hand.optimizer(model)) is not None]
        return made[0] if made else sgd(model)

    def loss(self, net: Driver, at: At) -> torch.Tensor:
        model, batch = net.module, stacked(self.rows(at))
        for hand in self.hands:
            batch = hand.cut(batch, at.step)
        # tokens are left out inside of a block that is left out
        inside = sorted(self.hands, key=lambda hand: not isinstance(hand, TokensLeftOut))
        for number, block in enumerate(self.blocks(model)):
            forward = self.forwards[number]
            for hand in inside:
                forward = hand.block(block, number, forward, at)
            block.forward = forward  # type: ignore[method-assign]
        loss: torch.Tensor = functional_call(model, self.weights(model, at.step), (), batch).loss
        return loss

    def weights(self, model: nn.Module, step: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            for hand in self.hands:
                value = hand.weight(name, value, step) if value.dim() > 1 else value
            # the gradient is that of what modules compute with
            found[name] = parameter + (value - parameter.detach())
        return found
