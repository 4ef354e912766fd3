"""Momenta in one bit from their equations (hf_zero/compression/flat_momentum.py, the note), on
whole vectors in one process with the gradients of N ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_zero.compression.one_bit_steps import OneBitSteps
from hf_zero.optim import OneBitAdam
from tests.helpers.compressed import Recorder, flat_of, window
from tests.helpers.engines import config_of, start
from tests.helpers.training import Plan

BLOCK = 64


def one_bit_steps(engine: Any) -> OneBitSteps:
    """Return the part of ``engine`` that makes its steps in one bit."""
    steps = engine.feature_set.get("one_bit", OneBitSteps)
    assert steps is not None
    return steps


def mean_of(part: Tensor) -> Tensor:
    """In the order of the kernels: 32 sums, element i into sum i % 32, added up in pairs."""
    lanes = torch.zeros(32)
    for at in range(0, part.numel(), 32):
        some = part[at : at + 32]
        lanes[: some.numel()] += some
    while lanes.numel() > 1:
        lanes = lanes[: lanes.numel() // 2] + lanes[lanes.numel() // 2 :]
    return lanes[0] / torch.tensor(float(max(1, part.numel())))


def blocks_of(layout: Any, block: int = BLOCK) -> Iterator[slice]:
    """Each tensor and each owner's chunk begins one of at most ``block`` elements."""
    for slot in layout.slots:
        for owner in range(layout.num_shards):
            first, end = (
                max(slot.offset, owner * layout.shard_numel),
                (owner + 1) * layout.shard_numel,
            )
            for at in range(first, min(slot.end, end), block):
                yield slice(at, min(at + block, slot.end, end))


def nbytes(layout: Any, block: int = BLOCK) -> int:
    """Bytes of a message: for each block its bits and four of a scale, both parts of whole 16."""
    owners = Counter(place.start // layout.shard_numel for place in blocks_of(layout, block))
    count = max(owners.values())
    return -(-count * block // 128) * 16 + -(-count // 4) * 16


def C(z: Tensor, layout: Any) -> Tensor:
    """Return the one-bit code of ``z``, decoded, block by block; zeros in the padding."""
    out = torch.zeros_like(z)
    for place in blocks_of(layout):
        part = z[place]
        root = mean_of(part.square()).double().sqrt().float()
        scale = torch.minimum(root, 2.0 * mean_of(part.abs()))
        out[place] = torch.where(part >= 0, scale, -scale)
    return out


def inverses(variance: Tensor, layout: Any, beta2: float, eps: float, step: int) -> Tensor:
    """1 / D in three significant bits; D = max(sqrt(v_hat) + eps, 0.03 of its root mean square in
    its tensor), where v is zero that mean.
    """
    found = torch.zeros(layout.padded)
    for slot in layout.slots:
        part = variance[slot.offset : slot.end].clone()
        varies = part > 0
        part = part.div(1.0 - beta2**step).sqrt().add(eps)
        mean = part[varies].double().square().mean().sqrt().float()
        least = torch.where(varies, mean * 0.03, mean)
        significand, exponent = torch.frexp(1.0 / torch.maximum(part, least))
        nearest = (significand * 8.0 + 0.5).floor() / 8.0
        found[slot.offset : slot.end] = torch.ldexp(nearest, exponent)
    return found


@dataclass
class Whole:
    """The state of one flat buffer on all ranks; ``errors`` one for each."""

    limit: ClassVar[float] = 4.0

    layout: Any
    weights: Tensor
    average: Tensor
    inverses: Tensor
    momentum: Tensor
    errors: list[Tensor]
    lr: float
    decay: float
    beta: float

    def step(self, grads: Sequence[Tensor], number: int, divisor: float = 1.0) -> None:
        numel, beta = self.layout.end, self.beta
        factor = torch.tensor(1.0 - beta) / torch.tensor(divisor)
        sent = []
        for rank, grad in enumerate(grads):
            z = (self.errors[rank] + beta * self.momentum) + factor * grad
            z[numel:] = 0.0
            sent.append(C(z, self.layout))
            self.errors[rank] = z - sent[-1]
        total = sent[0].clone()
        for each in sent[1:]:
            total = total + each
        r = total * torch.tensor(1.0 / len(grads)) + beta * (self.average - self.momentum)
        r[numel:] = 0.0
        self.momentum = C(r, self.layout)
        self.average = self.momentum + (r - self.momentum) * torch.tensor(1.0 / beta)
        size = self.bounded(number) * torch.tensor(self.lr / (1.0 - beta**number))
        keep = torch.tensor(1.0 - self.lr * self.decay)
        self.weights = self.weights * keep - size * self.inverses

    def bounded(self, number: int) -> Tensor:
        """The momentum, of which no block makes updates of more than ``limit`` learning rates, root
        mean square.
        """
        held = self.momentum.clone()
        for part in blocks_of(self.layout):
            usual = self.inverses[part].double().square().mean().sqrt()
            most = self.limit * (1.0 / usual).float() * (1.0 - self.beta**number)
            held[part] = held[part].clamp(-most, most)
        return held


@dataclass
class WholeLamb(Whole):
    """1-bit LAMB's (arXiv:2104.06069): ``ratios`` are the averages of its trust ratios, by name."""

    variance: Tensor
    fresh: Tensor
    ratios: dict[str, float]
    factors: dict[str, float]
    beta2: float
    eps: float
    frozen: int
    bounds: tuple[float, float, float] = (0.5, 4.0, 0.1)

    def step(self, grads: Sequence[Tensor], number: int, divisor: float = 1.0) -> None:
        before, weights = self.average, self.weights
        super().step(grads, number, divisor)
        r = self.beta * self.average + (1 - self.beta) * self.momentum
        gradient = (r - self.beta * before) / (1 - self.beta)
        self.fresh = self.beta2 * self.fresh + (1 - self.beta2) * gradient**2
        corrected = (1 - self.beta2**self.frozen) ** 0.5 / (1 - self.beta**number)
        update = self.momentum * self.inverses
        least, most, change = self.bounds
        self.weights = weights.clone()
        for slot in self.layout.slots:
            part = slice(slot.offset, slot.end)
            x, u = weights[part], update[part]
            frozen = self.variance[part].sqrt() + self.eps
            floor = 0.03 * frozen.double().square().mean().sqrt().float()
            quotient = frozen / (self.fresh[part].sqrt() + self.eps).clamp(min=float(floor))
            k = min(1.0, float(u.norm() / (u + self.decay * x).norm()))
            f = float(quotient.max()) * k + 1 - k if self.decay else float(quotient.max())
            last = self.factors[slot.name]
            f = min(max(f, least), most)
            f = max(min(f, last * (1 + change)), last * (1 - change))
            self.factors[slot.name] = f
            size = self.lr * corrected * self.ratios[slot.name] * f
            self.weights[part] = x - size * (u + self.decay * x)


ADAM: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
LAMB: dict[str, Any] = {
    "lr": 0.02,
    "betas": (0.8, 0.95),
    "weight_decay": 0.1,
    "eps": 1e-6,
    "max_coeff": 0.3,
    "min_coeff": 0.01,
}
# steps 1 and 2 are dense; 5 and 6 synchronize every second step, those from 7 on every fourth
RARE = {
    "var_freeze_step": 2,
    "var_update_scaler": 1,
    "local_step_scaler": 2,
    "local_step_clipper": 4,
}
FREEZE, STEPS = 3, 8


def config(plan: Plan | None = None, stage: int = 1, **more: Any) -> dict[str, Any]:
    return config_of(stage, plan, compressed_communication={"block_size": BLOCK, **more})


def state_of(engine: Any) -> dict[str, Any]:
    """Return this rank's state of each flat buffer that is sent in one bit."""
    momenta = {each.flat.key: each for each in one_bit_steps(engine)._momenta}
    found = {}
    for key, each in momenta.items():
        flat = each.flat
        tensors = engine.bound.state.tensors(flat.optimizer_shard)
        found[key] = {
            "layout": flat.layout,
            "master": flat.optimizer_shard.master.clone(),
            "full": flat.full.clone(),
            "average": tensors["exp_avg"].clone(),
            "variance": tensors["exp_avg_sq"].clone(),
            "error": None if each.error is None else each.error.clone(),
        }
    return found


def trained(rank: int, model: Any, plan: Plan, stage: int = 1) -> list[Any]:
    optimizer = OneBitAdam(model.parameters(), **ADAM, freeze_step=FREEZE)
    engine = start(model, optimizer, config(plan, stage))
    record, seen = Recorder(model), []
    for number in range(STEPS):
        window(engine, rank, number, plan, record)
        scale = engine.loss_scale()
        engine.step()
        assert engine.was_step_applied()
        seen.append((list(record.micro), state_of(engine), scale, engine.get_global_grad_norm()))
    return seen


def joined(answers: Any, number: int, key: str, name: str) -> torch.Tensor:
    return torch.cat([answer[number][1][key][name] for answer in answers])


def check(answers: Sequence[Any], plan: Plan) -> None:
    """Assert that the results of :func:`trained` are those of the equations, bit for bit."""
    ranks = len(answers)
    keys = list(answers[0][0][1])
    assert keys
    for key in keys:
        layout = answers[0][0][1][key]["layout"]
        at = FREEZE - 1  # the last dense step
        average = joined(answers, at, key, "average")
        whole = Whole(
            layout,
            joined(answers, at, key, "master"),
            average,
            inverses(joined(answers, at, key, "variance"), layout, 0.95, 1e-8, FREEZE),
            C(average, layout),
            [torch.zeros(layout.padded) for _ in range(ranks)],
            ADAM["lr"],
            ADAM["weight_decay"],
            ADAM["betas"][0],
        )
        for number in range(FREEZE, STEPS):
            grads = []
            for answer in answers:
                micros, _, scale, norm = answer[number]
                dtype = answers[0][number][1][key]["full"].dtype
                flats = [flat_of(layout, each, dtype) for each in micros]
                share = 1.0 / plan.accumulation
                total = flats[0].float() * share
                for each in flats[1:]:
                    total = total + each.float() * share
                grads.append(total)
            divisor = scale
            if plan.clip:
                divisor = scale * max(1.0, (norm + 1e-6) / plan.clip)
            before = whole.weights
            whole.step(grads, number + 1, divisor)
            exact = not plan.clip  # of the norm some bits are lost on its way
            _compare(joined(answers, number, key, "master"), whole.weights, exact)
            _compare(joined(answers, number, key, "average"), whole.average, exact)
            for rank, answer in enumerate(answers):
                mine = answer[number][1][key]
                _compare(mine["error"], whole.errors[rank], exact)
                assert torch.equal(mine["full"], answers[0][number][1][key]["full"])
                assert torch.equal(
                    mine["full"].float(),
                    joined(answers, number, key, "master").to(mine["full"].dtype).float(),
                )
            assert not torch.equal(before, whole.weights)


def _compare(one: torch.Tensor, other: torch.Tensor, exact: bool) -> None:
    if exact:
        assert torch.equal(one, other), float((one - other).abs().max())
    else:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@dataclass
class WholeLocal(Whole):
    """0/1 Adam's local steps (arXiv:2202.06009): what each rank has done by itself, and ``keep``
    and ``size``, what is left of the weights and the sum of the step sizes. ``bits``: what travels.
    """

    limit: ClassVar[float] = 1.0

    bits: bool = True

    def begin(self) -> None:
        self.own = [self.momentum.clone() for _ in self.errors]
        self.moved = [torch.zeros_like(self.weights) for _ in self.errors]
        self.keep, self.size = 1.0, 0.0

    def local(self, grads: Sequence[Tensor], number: int, divisors: Sequence[float]) -> None:
        size, keep = self.lr / (1.0 - self.beta**number), 1.0 - self.lr * self.decay
        for rank, grad in enumerate(grads):
            factor = torch.tensor(1.0 - self.beta) / torch.tensor(divisors[rank])
            self.own[rank] = self.own[rank] * self.beta + grad * factor
            counted = self.held(self.own[rank], number, 4.0)
            self.moved[rank] = self.moved[rank] * keep + size * counted
        self.keep, self.size = keep * self.keep, keep * self.size + size

    def held(self, momentum: Tensor, number: int, limit: float) -> Tensor:
        """``momentum``, of which no block with its mean magnitude everywhere makes updates of more
        than ``limit`` learning rates, root mean square.
        """
        held = momentum.clone()
        for part in blocks_of(self.layout, BLOCK if self.bits else 2048):
            usual = self.inverses[part].double().square().mean().sqrt()
            most = limit * (1.0 / usual).float() * (1.0 - self.beta**number)
            held[part] *= (most / held[part].abs().mean()).clamp(max=1.0)
        return held

    def computed(self, rank: int) -> Tensor:
        return self.keep * self.weights - self.moved[rank] * self.inverses

    def synchronize(self, number: int) -> None:
        numel = self.layout.end
        sent = []
        for rank, moved in enumerate(self.moved):
            z = self.errors[rank] + moved / self.size
            z[numel:] = 0.0
            sent.append(C(z, self.layout) if self.bits else z)
            self.errors[rank] = z - sent[-1]
        r = torch.stack(sent).mean(0) + self.beta * (self.average - self.momentum)
        r[numel:] = 0.0
        self.momentum = C(r, self.layout) if self.bits else r
        self.average = self.momentum + (r - self.momentum) / self.beta
        update = self.bounded(number) if self.bits else self.momentum
        self.weights = self.keep * self.weights - self.size * update * self.inverses
        self.begin()


def local_state(engine: Any) -> dict[str, Any]:
    """Return this rank's state of each flat buffer that takes part in local steps."""
    one_bit = one_bit_steps(engine)
    found = {}
    for each in (*one_bit._chosen, *one_bit._local.uncoded):
        tensors = engine.bound.state.tensors(each.flat.optimizer_shard)
        found[each.flat.key] = {
            "layout": each.flat.layout,
            "bits": each in one_bit._chosen,
            "master": each.flat.optimizer_shard.master.clone(),
            "full": each.flat.full.clone(),
            "average": tensors["exp_avg"].clone(),
            "variance": tensors["exp_avg_sq"].clone(),
            "error": None if each.error is None else each.error.clone(),
            "exponents": None if each.exponents is None else each.exponents.clone(),
        }
    return found
