"""Predicted training steps under offload on one GPU: the engine's recorded schedule replayed on
measured ceilings.

    python scripts/bench/offload_model.py [--only NAME;...] [--timeline] [--gpu-gb 47] [--out
    scripts/bench/results]

For each way of offloading, the engine trains a Llama of the real number of blocks and 1/64 of the
real width on the CPU, with streams that write down what it does (``offload_schedule.py``). A block
then has 1/4096 of the real elements, pieces of 4096 elements stand for pieces of 16 Mi, and every
order, wait and piece is that of the real shape. The replay (``offload_replay.py``) gives the
recorded ops the bytes and operations of the real shape and the ceilings of :data:`H200`.

Beside the step stand seconds in which each resource was busy; the bound ``max`` is that of the
busiest resource, ``chain`` adds what cannot overlap where gradients are clipped: the update follows
the backward, and the last block's forward follows the update. ``GPU GB`` is state from the
preflight plus the activations that autograd keeps.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offload_replay import HOST, RESOURCES, Machine, Result, replay, timeline
from offload_schedule import Recorder, Schedule

SHRINK = 64  # of every width; elements shrink by its square
PIECE = 16_777_216  # elements that are updated at a time
WARM_UP, RECORDED = 3, 5
GIB = 2**30

# One H200 machine of 16 cores, measured: the bus alone and in both directions, a triad over host
# memory, a copy in HBM, O_DIRECT files.
H200 = Machine(
    h2d=55.5e9,
    d2h=55.4e9,
    both=102e9,
    host=120e9,
    hbm=4236e9,
    flops=0.0,
    disk_write=2.0e9,
    disk_read=2.4e9,
)
# seconds of a step with everything on that GPU, measured: it gives the operations a second of the
# model's kernels
ON_THE_GPU = 0.4052
ADAM_ON_THE_GPU = 28 / 3380e9  # seconds an element, measured: part of that step
GPU_BYTES = 139 * GIB


@dataclass(frozen=True)
class Shape:
    """A Llama and its batch."""

    hidden: int
    blocks: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int

    def config(self, shrink: int = 1) -> Any:
        import transformers

        return transformers.LlamaConfig(
            hidden_size=self.hidden // shrink, num_hidden_layers=self.blocks,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads,
            intermediate_size=self.inner // shrink, vocab_size=self.vocabulary // shrink,
            tie_word_embeddings=True, use_cache=False,
            max_position_embeddings=self.length, bos_token_id=0, eos_token_id=1,
            attn_implementation="sdpa",
        )  # fmt: skip

    def build(self, shrink: int = 1, device: str = "cpu") -> Any:
        import torch
        import transformers

        torch.manual_seed(0)
        with torch.device(device):
            return transformers.LlamaForCausalLM(self.config(shrink)).train()

    def sizes(self) -> dict[str, int]:
        """Elements by unit name."""
        from hf_zero.zero.layout.wrap import find_units

        return {
            piece.name: sum(parameter.numel() for _, parameter in piece.parameters)
            for piece in find_units(self.build(device="meta"))[0]
        }

    def flops(self) -> dict[str, float]:
        """Operations of a forward by module; a causal attention reads half of its square."""
        sizes, tokens = self.sizes(), self.batch * self.length
        attention = 2.0 * self.length * self.hidden * tokens
        blocks = {name: 2.0 * tokens * numel + attention for name, numel in sizes.items() if name}
        return {
            "model.embed_tokens": 0.0,
            **blocks,
            "lm_head": 2.0 * tokens * self.vocabulary * self.hidden,
        }

    def kept_for_backward(self) -> float:
        """Bytes that autograd keeps of a forward in bf16, parameters not counted: found on one
        and two blocks of 1/64 of the width.
        """
        one, two = (replace(self, blocks=blocks)._kept() for blocks in (1, 2))
        return one + (self.blocks - 1) * (two - one)

    def _kept(self) -> float:
        import torch

        model = self.build(SHRINK).bfloat16()
        head = self.hidden // self.heads // SHRINK
        widths = {
            self.hidden // SHRINK,
            self.inner // SHRINK,
            self.vocabulary // SHRINK,
            head,
            head * self.key_heads,
        }
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, tuple[torch.Tensor, float]] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = (
                    tensor,
                    storage.nbytes() * (SHRINK if widths & set(tensor.shape) else 1),
                )
            return tensor

        ids = torch.zeros(self.batch, self.length, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids).loss
        del loss
        return sum(nbytes for _, nbytes in kept.values())


LLAMA_3B = Shape(
    hidden=3072,
    blocks=28,
    heads=24,
    key_heads=8,
    inner=8192,
    vocabulary=128256,
    batch=4,
    length=2048,
)


@dataclass(frozen=True)
class Case:
    """A way of offloading: what the configuration says, and the most seconds a step may take (0:
    no bar).
    """

    optimizer: Mapping[str, Any]
    param: str = "none"
    clip: float = 1.0
    bar: float = 0.0

    def config(self, folder: str, piece: int) -> dict[str, Any]:
        optimizer = {"buffer_size": piece, **self.optimizer}
        if optimizer.get("device") == "nvme":
            optimizer["nvme_path"] = folder
        zero: dict[str, Any] = {
            "stage": 3 if self.param != "none" else 2,
            "offload_optimizer": optimizer,
        }
        if self.param != "none":
            zero["offload_param"] = {"device": self.param} | (
                {"nvme_path": folder, "max_in_cpu": 0} if self.param == "nvme" else {}
            )
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
        }


CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
CASES = {
    "cpu fp32": Case(CPU, bar=1.05),
    "cpu bf16 moments": Case({**CPU, "moments": "bf16"}, bar=0.85),
    "cpu int8 moments": Case({**CPU, "moments": "int8"}, bar=0.85),
    "cpu fp32, unclipped": Case(CPU, clip=0.0),
    "cpu fp32, in backward": Case({**CPU, "update_in_backward": True}, clip=0.0),
    "cpu fp32, half": Case({**CPU, "ratio": 0.5}),
    "cpu bf16 moments, half": Case({**CPU, "moments": "bf16", "ratio": 0.5}),
    "all on cpu": Case(CPU, "cpu"),
    "all on cpu, int8 moments": Case({**CPU, "moments": "int8"}, "cpu"),
    "optimizer in files": Case(NVME),
    "all in files": Case(NVME, "nvme"),
}
RATIOS = [round(0.05 * step, 2) for step in range(1, 20)]
BAR_AT_BEST_RATIO = 0.5


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def record(
    shape: Shape,
    case: Case,
    make: Callable[[Any], Any] = adamw,
    prepare: Callable[[Any], None] = lambda engine: None,
) -> Schedule:
    """Return the schedule of the engine in :data:`RECORDED` steps of ``case``.

    ``make`` makes the optimizer; ``prepare`` may change the engine.
    """
    import torch

    import hf_zero

    with tempfile.TemporaryDirectory() as folder:
        model = shape.build(SHRINK)
        engine = hf_zero.initialize(
            model=model, optimizer=make(model), config=case.config(folder, PIECE // SHRINK**2)
        )[0]
        prepare(engine)
        ids = torch.randint(2, shape.vocabulary // SHRINK, (1, 8))

        def step() -> None:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

        for _ in range(WARM_UP):
            step()
        recorder = Recorder(engine, shape.sizes(), shape.flops())
        with recorder.recording() as schedule:
            for _ in range(RECORDED):
                step()
                recorder.mark()
        engine.destroy()
    return schedule


def machine_for(shape: Shape) -> Machine:
    """:data:`H200` with the operations a second at which the step on the GPU takes what was
    measured.
    """
    seconds = ON_THE_GPU - ADAM_ON_THE_GPU * sum(shape.sizes().values())
    return replace(H200, flops=3 * sum(shape.flops().values()) / seconds)


def device_bytes(shape: Shape, case: Case, activations: float) -> float:
    """Bytes on the GPU: state as the preflight adds it up, and activations."""
    import torch

    from hf_zero.config import ZeroConfig
    from hf_zero.device import kinds
    from hf_zero.distributed.parallel_dims import ParallelDims
    from hf_zero.planning import needs
    from hf_zero.zero.layout.engine_plan import plan

    model, settings = shape.build(device="meta"), ZeroConfig.coerce(case.config("/tmp", PIECE))
    optimizer, gpu = torch.optim.AdamW(model.parameters()), kinds.meant(gpu=True)
    own = plan(model, settings.resolve(1), ParallelDims(), optimizer, device=gpu)
    return needs(own).device_bytes + activations


def chain(result: Result, shape: Shape, machine: Machine) -> float:
    """The shortest step with clipping: backward, the update, the forward of the last block and
    the head.
    """
    flops = shape.flops()
    last = flops["lm_head"] + list(flops.values())[-2]
    return 2 * sum(flops.values()) / machine.flops + result.busy(HOST) + last / machine.flops


def predict(shape: Shape, case: Case, machine: Machine) -> Result:
    return replay(record(shape, case), machine)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="",
        help="names of cases, by semicolon; 'ratios' for the search of the best ratio",
    )
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument(
        "--gpu-gb",
        type=float,
        default=47.0,
        help="what a step may take of the GPU where nothing else is said",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    shape, rows = LLAMA_3B, []
    machine, activations = machine_for(shape), shape.kept_for_backward()
    chosen = [name.strip() for name in options.only.split(";") if name.strip()] or [
        *CASES,
        "ratios",
    ]
    print(
        f"Llama of {sum(shape.sizes().values()) / 1e9:.2f}e9 parameters, {shape.batch} x "
        f"{shape.length} tokens; {machine.flops / 1e12:.0f} TFLOP/s"
    )
    print(
        f"{'case':28}{'step s':>8}{'bar':>6}{'max':>7}{'chain':>7}"
        + "".join(f"{name:>7}" for name in RESOURCES)
        + f"{'GPU GB':>8}"
    )

    def show(name: str, case: Case) -> dict[str, Any]:
        result = predict(shape, case, machine)
        busy = {resource: result.busy(resource) for resource in RESOURCES}
        row = {
            "case": name,
            "step_s": result.step,
            "bar_s": case.bar or None,
            "chain_s": chain(result, shape, machine) if case.clip else None,
            "busy_s": busy,
            "gpu_gb": device_bytes(shape, case, activations) / 1e9,
            "waited_s": {what: seconds / RECORDED for what, seconds in result.waited.items()},
        }
        cells = "".join(f"{seconds:7.3f}" for seconds in busy.values())
        bar, bound = (
            f"{case.bar:.2f}" if case.bar else "",
            f"{row['chain_s']:.3f}" if case.clip else "",
        )
        print(
            f"{name:28}{result.step:8.3f}{bar:>6}{max(busy.values()):7.3f}{bound:>7}{cells}{row['gpu_gb']:8.1f}",
            flush=True,
        )
        if options.timeline:
            print(timeline(result), flush=True)
        rows.append(row)
        return row

    for name in chosen:
        if name != "ratios":
            show(name, CASES[name])
    if "ratios" in chosen:
        tried = [
            show(f"cpu fp32, ratio {ratio}", Case({**CPU, "ratio": ratio})) for ratio in RATIOS
        ]
        for what, room in (
            (f"{options.gpu_gb:g} GB", options.gpu_gb * 1e9),
            ("the whole GPU", float(GPU_BYTES)),
        ):
            fitting = [row for row in tried if row["gpu_gb"] * 1e9 <= room]
            best = min(fitting, key=lambda row: row["step_s"], default=None)
            found = (
                f"{best['case']} at {best['step_s']:.3f} s (bar {BAR_AT_BEST_RATIO})"
                if best
                else "none of these ratios"
            )
            print(f"best within {what}: {found}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = options.out / f"offload_model-{datetime.date.today()}.jsonl"
        versions = {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "hf-zero")
        }
        facts = {
            "machine": asdict(machine),
            "shape": asdict(shape),
            "activations": activations,
            "versions": versions,
        }
        name.write_text("".join(json.dumps(row) + "\n" for row in [facts, *rows]))
        print(f"rows: {name}")


if __name__ == "__main__":
    main()
