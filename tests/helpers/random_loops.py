"""Random training loops: the script of a user, with what it reads and writes at each point of a
step, on ranks by ``hf_zero.initialize`` and in one process by plain PyTorch, which has every rank's
batches and uses nothing of hf-zero.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.errors import HfZeroError
from tests.helpers.loop_script import Key, Side
from tests.helpers.offloads import offload
from tests.helpers.random_scripts import (
    IN_CONFIG,
    OPTIMIZERS,
    ROWS,
    SCHEDULES,
    Event,
    Loop,
    Net,
    Part,
)  # fmt: skip
from tests.helpers.ranks import RankFailed, RanksHung, run_ranks

# of differences, relative to a value, or to how far a weight has moved: those of equal programs,
# and the factor of what weights that begin PERTURBED off change, or values in fewer bits
EQUAL, PERTURBED, ROUNDING, IN_16_BITS = 1e-5, 1e-6, 30.0, 5.0
TOP = {
    "replicate_size", "gradient_allreduce_op", "prescale_gradients", "activation_checkpointing",
    "activation_offload",
}  # fmt: skip
SCALE = 2**8  # of losses in fp16


class Plain(Side):
    """One process. ``dtype``: weights and activations are rounded to it in forwards; ``perturbed``:
    the seed of what the weights are off at the start.
    """

    def __init__(
        self, loop: Loop, refused: set[Key], perturbed: int = 0, dtype: Any = torch.float32
    ) -> None:
        super().__init__(loop, refused)
        self.dtype, self.limit, self.last_norm = dtype, 0.0, 0.0
        self.still = set[str]()  # names of what is frozen at the end
        self.model = loop.model()
        if perturbed:
            draw = torch.Generator().manual_seed(perturbed)
            for p in self.model.parameters():
                noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
                # Newton and Schulz's products are in bf16
                off = 1000 * PERTURBED if loop.optimizer == "Muon" else PERTURBED
                p.data.mul_(1 + off * noise.to(p.dtype))
        self.make()

    def make(self) -> None:
        kind = OPTIMIZERS[self.loop.optimizer]
        self.optimizer = kind.plain(self.loop.groups_of(self.model), **kind.settings)
        schedule = SCHEDULES[self.loop.schedule]
        self.schedule: Any = schedule(self.optimizer) if schedule else None
        self.limit, self.done, self.had = self.loop.clip, 0, list[Any]()
        self.last_norm = 0.0

    def begin(self, number: int, part: Part) -> None:
        super().begin(number, part)
        self.limit, self.done, self.had, self.last_norm = self.loop.clip, 0, [], 0.0
        self.ranks = list(range(part.world))
        shared = {id(p): p for p in self.model.parameters()}
        copies = [copy.deepcopy(self.model, dict(shared)) for _ in self.ranks[1:]]
        self.nets = dict(enumerate([self.model, *copies]))
        self.shapes = {p: p.shape for p in self.model.parameters()}

    @contextmanager
    def rounded(self) -> Iterator[None]:
        kept = {p: p.data for p in self.model.parameters()}
        for p in kept:
            p.data = p.data.to(self.dtype).to(p.dtype)
        yield
        for p, data in kept.items():
            p.data = data

    def written(self, parameters: Any) -> None:
        if self.dtype != torch.float32:
            for p in parameters or self.model.parameters():
                p.data = p.data.to(self.dtype).to(p.dtype)

    def forward(self, rank: int, rows: Tensor, ids: Tensor) -> Any:
        if self.dtype == torch.float32:
            return self.nets[rank](rows, ids)
        with self.rounded():
            first, second = self.nets[rank](_rounded(rows, self.dtype), ids)
        return _rounded(first, self.dtype), _rounded(second, self.dtype)

    def backward(self, loss: Tensor, retained: bool, last: bool) -> None:
        ranks = 1 if ("gradient_allreduce_op", "sum") in self.part.keys else self.world
        (loss / (ranks * self.divisor)).backward(retain_graph=retained)
        for p in self.model.parameters() if self.dtype != torch.float32 else ():
            if p.grad is not None:
                p.grad = (p.grad * SCALE).to(self.dtype).to(p.dtype) / SCALE

    @property
    def divisor(self) -> int:
        return self.micros

    def set_boundary(self, last: bool) -> None:
        pass

    def step(self) -> None:
        self.done += 1
        if self.done < self.count:
            return
        self.done = 0
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in members if p.grad is not None]
        self.had = [p for p in members if p.grad is not None]
        total = sum(float(g.double().pow(2).sum()) for g in grads) ** 0.5
        self.last_norm = total
        if total == total and total != float("inf"):
            factor = min(1.0, self.limit / (total + 1e-6)) if self.limit else 1.0
            for grad in grads if factor < 1 else ():
                grad.mul_(factor)
            self.optimizer.step()
            if self.schedule:
                self.schedule.step()
        for p in self.model.parameters():
            p.grad = None

    def norm(self) -> float:
        return self.last_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.done = 0
        for p in self.model.parameters():
            p.grad = None
        for p in () if set_to_none else self.had:
            p.grad = torch.zeros_like(p)

    def whole(self, parameters: Any, modifier: int | None) -> Any:
        return nullcontext()

    def summoned(self, writeback: bool) -> Any:
        return nullcontext()

    def get_weight(self, p: Any) -> Tensor:
        return p.detach().clone()  # type: ignore[no-any-return]

    def set_weight(self, p: Any, value: Tensor) -> None:
        p.data.copy_(value)

    def get_grad(self, p: Any) -> Tensor:
        return torch.zeros_like(p) if p.grad is None else p.grad

    def set_grad(self, p: Any, value: Tensor) -> None:
        p.grad = value

    def assign_grad(self, p: Any, value: Tensor, first: bool) -> None:
        ranks = self.world if ("gradient_allreduce_op", "sum") in self.part.keys else 1
        p.grad = value * ranks / self.divisor if first else value

    def set_limit(self, limit: float) -> None:
        self.limit = limit

    def get_state(self, p: Any) -> Tensor:
        value = self.optimizer.state.get(p, {}).get(self.key)
        return torch.zeros_like(p) if value is None else value

    def set_state(self, p: Any, value: Tensor) -> None:
        self.optimizer.state[p][self.key].copy_(value)

    def take_over(self, old: list[Any], head: nn.Module) -> None:
        instead = dict(zip(old, head.parameters()))
        for group in self.optimizer.param_groups:
            group["params"] = [instead.get(p, p) for p in group["params"]]
        for p in old:
            self.optimizer.state.pop(p, None)

    def set_micros(self, micros: int) -> None:
        self.micros = micros

    def state_dict(self, rank: int, what: str) -> dict[str, Tensor]:
        return self.nets[rank].state_dict()  # type: ignore[no-any-return]

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    def save(self) -> None:
        parts = self.model, self.optimizer, self.schedule or nn.Module()
        self.kept = copy.deepcopy([part.state_dict() for part in parts])

    def load(self) -> None:
        weights, state, schedule = copy.deepcopy(self.kept)
        for net in self.nets.values():
            net.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        if self.schedule:
            self.schedule.load_state_dict(schedule)

    def restart(self) -> None:  # all ranks take the values of rank 0
        self.take_buffers()
        self.make()

    def take_buffers(self) -> None:
        for net in self.nets.values():
            for name, value in net.named_buffers():
                value.copy_(self.model.get_buffer(name))


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value + (value.to(dtype).to(value.dtype) - value).detach()


class OnRank(Side):
    """A rank with an engine."""

    def __init__(self, loop: Loop, rank: int, folder: Path, before: OnRank | None) -> None:
        super().__init__(loop, set())
        self.rank, self.ranks, self.folder = rank, [rank], folder
        if before is not None:  # the same rank, or the first one, in an engine that has ended
            self.frozen, self.added, self.number = set(before.frozen), before.added, before.number
            self.replaced, self.average = before.replaced, dict(before.average)

    def start(self, number: int, part: Part, model: Net) -> None:
        self.model, self.nets = model, {self.rank: model}
        self.begin(number, part)
        self.shapes = {p: p.shape for p in model.parameters()}
        self.make()
        if number:
            if self.added:
                self.add_group()
            self.engine.load_checkpoint(self.folder / "run")
            for name in self.frozen:
                model.get_parameter(name).requires_grad_(False)

    def make(self) -> None:
        loop, part = self.loop, self.part
        keys = dict(part.keys)
        section = offload(part.place, part.stage, self.folder)
        section |= {key: value for key, value in keys.items() if key not in TOP}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS // part.world,
            "gradient_accumulation_steps": part.micros,
            "gradient_clipping": loop.clip,
            "zero_optimization": section,
            **{key: value for key, value in keys.items() if key in TOP},
        }
        if loop.precision in ("bf16", "fp16"):
            config[loop.precision] = {"enabled": True}
        if loop.precision == "fp16":
            config["fp16"]["initial_scale_power"] = 8
        if loop.precision == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        kind, schedule = OPTIMIZERS[loop.optimizer], SCHEDULES[loop.schedule]
        if loop.schedule in IN_CONFIG:
            config["scheduler"], schedule = IN_CONFIG[loop.schedule], None
        optimizer: Any = None
        if loop.groups == "config":
            config["optimizer"] = {"type": loop.optimizer.split()[0], "params": kind.settings}
        else:
            optimizer = kind.ours(loop.groups_of(self.model), **kind.settings)
            schedule = schedule(optimizer) if schedule else None
        self.engine, self.optimizer, _, _ = hf_zero.initialize(
            model=self.model, optimizer=optimizer, config=config, lr_scheduler=schedule
        )

    def tried(self, key: Key, event: Event, at: str, micro: int) -> None:
        try:
            self.does(event, at, micro)
        except HfZeroError as error:
            self.refused.add((*key, f"{event.do} at {at}: {type(error).__name__}: {error}"))
            self.seen = {seen: value for seen, value in self.seen.items() if seen[:3] != key}

    def forward(self, rank: int, rows: Tensor, ids: Tensor) -> Any:
        return self.engine(rows, ids)

    def backward(self, loss: Tensor, retained: bool, last: bool) -> None:
        kind = self.window.kind
        if kind == "own backward" and self.loop.precision != "fp16":
            loss.backward(retain_graph=retained)
        elif kind == "undivided":
            self.engine.backward(loss / self.micros, retained, scale_wrt_gas=False)
        elif kind == "no sync" and not last:
            with self.engine.no_sync():
                self.engine.backward(loss, retained)
        else:
            self.engine.backward(loss, retained)

    def set_boundary(self, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)

    def step(self) -> None:
        self.engine.step()

    def norm(self) -> float:
        return self.engine.get_global_grad_norm()  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.engine.zero_grad(set_to_none)

    def whole(self, parameters: Any, modifier: int | None) -> Any:
        return hf_zero.GatheredParameters(parameters, modifier_rank=modifier)

    def summoned(self, writeback: bool) -> Any:
        return hf_zero.summon_full_params(self.model, writeback=writeback)

    def get_weight(self, p: Any) -> Tensor:
        value = hf_zero.safe_get_full_fp32_param(p)
        if value is None:  # frozen
            with self.whole([p], None):
                return p.detach().clone()  # type: ignore[no-any-return]
        return value

    def set_weight(self, p: Any, value: Tensor) -> None:
        hf_zero.safe_set_full_fp32_param(p, value)

    def get_grad(self, p: Any) -> Tensor:
        value = hf_zero.safe_get_full_grad(p)
        return torch.zeros(self.shapes[p]) if value is None else value

    def set_grad(self, p: Any, value: Tensor) -> None:
        hf_zero.safe_set_full_grad(p, value)

    def assign_grad(self, p: Any, value: Tensor, first: bool) -> None:
        p.grad = value

    def set_limit(self, limit: float) -> None:
        self.engine.max_norm = limit

    def get_state(self, p: Any) -> Tensor:
        value = hf_zero.safe_get_full_optimizer_state(p, self.key)
        return torch.zeros(self.shapes[p]) if value is None else value

    def set_state(self, p: Any, value: Tensor) -> None:
        hf_zero.safe_set_full_optimizer_state(p, value, self.key)

    def take_over(self, old: list[Any], head: nn.Module) -> None:
        self.engine.replace(head)

    def set_micros(self, micros: int) -> None:
        self.engine.set_train_batch_size(ROWS * micros)
        self.micros = micros

    def state_dict(self, rank: int, what: str) -> dict[str, Tensor]:
        source = self.engine if what.startswith("engine") else self.model
        return source.state_dict()  # type: ignore[no-any-return]

    def streamed(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.engine.iter_weights(dtype="fp32", names="model"):
            yield from bucket

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder / "mid", tag="mid")

    def load(self) -> None:
        for name in self.frozen:  # docs/loop.md: unfreeze all that has trained before a load
            self.model.get_parameter(name).requires_grad_(True)
        self.engine.load_checkpoint(self.folder / "mid", tag="mid")
        for name in self.frozen:
            self.model.get_parameter(name).requires_grad_(False)

    def restart(self) -> None:
        self.engine.destroy(gather=True)
        self.make()


def _weights(side: Side) -> None:
    side.now = ("weights",)
    for name, p in side.model.named_parameters():
        side.see(name, value=side.get_weight(p))
    side.now = ("seen",)
    for rank, net in side.nets.items():
        side.see("buffer", value=net.seen, rank=rank)


def _life(
    rank: int, models: list[Net], loop: Loop, number: int, folder: Path, before: list[OnRank]
) -> OnRank:
    last = before[rank if rank < len(before) else 0] if before else None
    on_rank = OnRank(loop, rank, folder, last)
    part = loop.lives[number]
    on_rank.start(number, part, models[rank])
    for place, window in enumerate(part.windows):
        on_rank.run(place, window)
    if number < len(loop.lives) - 1:
        on_rank.engine.save_checkpoint(folder / "run")
    else:
        _weights(on_rank)
    on_rank.engine.destroy()
    del on_rank.engine, on_rank.optimizer, on_rank.model, on_rank.nets
    return on_rank


def on_engines(loop: Loop, folder: Path) -> tuple[list[dict[Key, Tensor]], set[Key]]:
    """Return what ranks have seen, of each life and rank, and which events were refused."""
    seen: list[dict[Key, Tensor]] = []
    refused: set[Key] = set()
    before: list[OnRank] = []
    for number, part in enumerate(loop.lives):
        models = [loop.model() for _ in range(part.world)]
        args = models, loop, number, folder, before
        before = run_ranks(part.world, _life, *args, timeout=60.0)
        assert all(rank.refused == before[0].refused for rank in before), "refused on some ranks"
        refused |= before[0].refused
        seen += [rank.seen for rank in before]
    return seen, refused


def alone(loop: Loop, refused: set[Key], perturbed: int = 0, dtype: Any = torch.float32) -> Plain:
    plain = Plain(loop, {key[:3] for key in refused}, perturbed, dtype)
    for number, part in enumerate(loop.lives):
        plain.begin(number, part)
        for place, window in enumerate(part.windows):
            plain.run(place, window)
    _weights(plain)
    plain.still = {name for name, p in plain.model.named_parameters() if not p.requires_grad}
    return plain


@dataclass
class Outcome:
    """``kind``: equal, rounding, refused, both fail, raw, hang, DIFFERS."""

    kind: str
    text: str = ""
    refused: set[Key] = field(default_factory=set)


def outcome(loop: Loop) -> Outcome:
    """Run ``loop`` on ranks and in one process, and compare what they have seen."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen, refused = on_engines(loop, Path(folder))
        except RanksHung as error:
            return Outcome("hang", str(error))
        except RankFailed as error:
            cause = error.__cause__
            text = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, HfZeroError):
                return Outcome("refused", text)
            try:
                alone(loop, set())
            except Exception as plain:
                return Outcome("both fail", f"{text}\nalone {type(plain).__name__}: {plain}")
            return Outcome("raw", f"{text}\n{error}")
    return compared(loop, seen, refused)


def compared(loop: Loop, seen: list[dict[Key, Tensor]], refused: set[Key]) -> Outcome:
    want = alone(loop, refused)
    begun = dict(loop.model().named_parameters())
    if missing := [key for key in want.seen if not any(key in one for one in seen)]:
        return Outcome("DIFFERS", f"only alone: {missing[:3]}", refused)
    limits: Callable[[Key], float] | None = None
    for key, value in want.seen.items():
        scale = _moved(key, value, begun)
        for one in seen:
            if key in one:
                off = float((one[key] - value).norm()) if one[key].shape == value.shape else 1e9
                if off <= EQUAL * scale:
                    continue
                limits = limits or rounding(loop, refused, want, begun)
                if not off <= EQUAL * scale + limits(key):
                    if _is_noise_of_16_bits(loop, off, limits(key)):
                        continue
                    text = f"{key}: off by {off:.3g} of {scale:.3g}, rounding {limits(key):.3g}"
                    return Outcome("DIFFERS", text, refused)
    return Outcome("rounding" if limits else "equal", "", refused)


def _is_noise_of_16_bits(loop: Loop, off: float, limit: float) -> bool:
    """Whether the same loop is right in fp32 where it is ``off`` by some ``limit`` in 16 bits: one
    sign or rounding of a parameter that turns the other way shifts all later steps.
    """
    near = loop.precision != "fp32" and off <= ROUNDING / IN_16_BITS * limit
    return near and not fails(replace(loop, precision="fp32"))


def _moved(key: Key, value: Tensor, begun: dict[str, Any]) -> float:
    moved = value - begun[key[1]].double() if key[0] == "weights" else value
    return float(moved.detach().norm()) + 1e-7 * float(value.norm()) + 1e-12


def rounding(
    loop: Loop, refused: set[Key], want: Plain, begun: dict[str, Any]
) -> Callable[[Key], float]:
    """Return the limit of differences that rounding explains, by key."""

    def off(key: Key, near: list[dict[Key, Tensor]]) -> float:
        return max(float((one[key] - want.seen[key]).norm()) for one in near)

    if loop.precision == "fp32":
        near = [alone(loop, refused, seed).seen for seed in (1, 2)]
        if loop.optimizer != "Muon":
            return lambda key: ROUNDING * off(key, near)
        # two samples of a number may both be near by chance: those of all steps
        return lambda key: (
            IN_16_BITS
            * max(
                off(one, near)
                for one in want.seen
                if one == key or (one[-2] == key[-2] and key[-2] in ("loss", "norm"))
            )
        )
    dtype = torch.float16 if loop.precision == "fp16" else torch.bfloat16
    others = [alone(loop, refused, seed, dtype).seen for seed in (0, 1)]
    names = [key for key in want.seen if key[0] == "weights"]
    moves = sum(_moved(key, want.seen[key], begun) ** 2 for key in names)
    errors = sum(float((others[0][key] - want.seen[key]).norm()) ** 2 for key in names)
    of_all = (errors / moves) ** 0.5  # of all weights together, relative to their moves

    def limit(key: Key) -> float:
        value = want.seen[key]
        scale = _moved(key, value, begun)
        noise = max(of_all * scale, off(key, others))
        # what is read in 16 bits, and frozen weights
        read = key[0] != "weights" or key[1] in want.still or scale < 1e-6 * float(value.norm())
        return IN_16_BITS * (noise + (2**-8 * float(value.norm()) if read else 0.0))

    return limit


def fails(loop: Loop) -> str:
    """Return how ``loop`` differs from plain PyTorch, or "" where it is the same, or refused."""
    found = outcome(loop)
    return f"{found.kind}: {found.text}" if found.kind in ("raw", "hang", "DIFFERS") else ""


def _simpler(loop: Loop) -> Iterator[Loop]:
    """Changes of all lives first, then of each."""
    bare = [{"events": ()}, {"kind": "plain"}]
    for one in ({"keys": ()}, {"place": "device"}, {"world": 1}, {"micros": 1}, *bare):
        yield replace(loop, lives=tuple(_with(part, one) for part in loop.lives))
    for more in ({"parts": frozenset()}, {"clip": 0.0}, {"schedule": "none"}, {"groups": "one"}):
        yield replace(loop, **more)  # type: ignore[arg-type]
    yield replace(loop, precision="fp32")
    for number, part in enumerate(loop.lives):
        before, after = loop.lives[:number], loop.lives[number + 1 :]
        if after or before:
            yield replace(loop, lives=before + after)
        for n, window in enumerate(part.windows):
            head, tail = part.windows[:n], part.windows[n + 1 :]
            changed = [(*head, *tail)] if head or tail else []
            changed += [(*head, replace(window, kind="plain"), *tail)]
            for i in range(len(window.events)):
                events = window.events[:i] + window.events[i + 1 :]
                changed.append((*head, replace(window, events=events), *tail))
            for windows in changed:
                yield replace(loop, lives=(*before, replace(part, windows=windows), *after))
        simpler: list[dict[str, Any]] = [{"world": 1}, {"world": 2}, {"place": "device"}]
        simpler += [{"keys": part.keys[:k] + part.keys[k + 1 :]} for k in range(len(part.keys))]
        for one in (*simpler, {"micros": 1}):
            yield replace(loop, lives=(*before, replace(part, **one), *after))
    for name in sorted(loop.parts):
        yield replace(loop, parts=loop.parts - {name})


def _with(part: Part, more: dict[str, Any]) -> Part:
    if {"events", "kind"} & {*more}:
        return replace(part, windows=tuple(replace(window, **more) for window in part.windows))
    return replace(part, **more)


def shrunk(loop: Loop, seconds: float = 100.0) -> Loop:
    """Return ``loop`` as plain as it still fails, as far as that takes about ``seconds``."""
    kind, again, begun = fails(loop).split(":")[0], True, time.monotonic()
    while again:
        again = False
        tried = _simpler(loop)
        for simpler in tried:
            if time.monotonic() - begun > seconds:
                return loop
            if simpler != loop and fails(simpler).split(":")[0] == kind:
                loop, again = simpler, True
                break
    return loop
