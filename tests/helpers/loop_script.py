"""The loop of a script that :mod:`tests.helpers.random_scripts` draws. Its windows and events call
what both an engine and plain PyTorch have.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import seeded
from tests.helpers.random_scripts import CLASSES, OPTIMIZERS, Event, Loop, Part, Window, losses_of

LIMIT = 0.2  # that a script sets
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Key = tuple[Any, ...]


class Side:
    """The script. Subclasses have an engine, or plain PyTorch, in its place."""

    model: Any
    optimizer: Any
    ranks: list[int]
    nets: dict[int, Any]

    def __init__(self, loop: Loop, refused: set[Key]) -> None:
        self.loop, self.refused = loop, refused
        self.seen: dict[Key, Tensor] = {}
        self.average: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self.added = self.replaced = False
        self.key = OPTIMIZERS[loop.optimizer].key
        self.number = 0

    def see(self, *key: Any, value: Any, rank: int = -1) -> None:
        value = torch.tensor(value) if isinstance(value, float) else value
        value = value if value.isfinite().all() else torch.zeros_like(value)  # norms that overflow
        self.seen[(*self.now, *key, rank)] = value.detach().double().cpu().clone()

    # The script

    def begin(self, number: int, part: Part) -> None:
        """Begin the life of an engine."""
        self.part, self.life = part, number
        self.world, self.micros, self.by_hand = part.world, part.micros, False
        self.taken: dict[str, Any] = {}
        self.saved = False
        self.now: Key = (number, "start")

    def run(self, number: int, window: Window) -> None:
        self.window, self.place, self.number = window, number, self.number + 1
        self.now = (self.life, number)
        self.handles: list[Any] = []
        kind = window.kind
        self.points("b")
        if kind == "accumulated by hand":
            self.by_hand, self.micros_by_hand = True, 3
        if kind == "broken":
            self.break_window()
        if kind == "restarted":
            self.micro(0, drawn=False, stepped=self.count > 1)
            self.zero_grad()
        if kind == "not finite":
            self.losses(0, drawn=False)
            self.zero_grad()
        for micro in range(self.count):
            self.micro(micro)
        self.see("norm", value=float(self.norm()))
        for handle in self.handles:
            handle.remove()
        for net in self.nets.values():
            net.tapped = False

    @property
    def overflows(self) -> bool:
        return self.window.kind == "overflow" and self.loop.precision == "fp16"

    @property
    def count(self) -> int:
        return self.micros_by_hand if self.by_hand else self.micros

    def break_window(self) -> None:
        if self.count > 1:
            self.micro(0, drawn=False)
        for rank, net in self.nets.items():
            net.breaks = True
            try:
                self.forward(rank, *self.loop.batch(self.number, 1, rank, self.world))
            except ArithmeticError:
                continue
            raise AssertionError("the forward did not break")
        self.zero_grad()

    def points(self, at: str, micro: int = 0) -> None:
        for index, event in enumerate(self.window.events):
            of = {"f": self.count, "m": self.count - 1}.get(at, 1)
            key = (self.life, self.place, f"event {index}")
            # the backward of other ranks may wait for one that has none until its step
            apart = self.window.kind == "rank left out" and (
                (not micro and at in "ml") or event.do == "assign grad"
            )
            if event.at == at and event.which % of == micro % of and not apart:
                self.now = (*key, event.do, at)
                self.tried(key, event, at, micro)

    def tried(self, key: Key, event: Event, at: str, micro: int) -> None:
        if key not in self.refused:
            self.does(event, at, micro)
            if event.do.startswith("write") or event.do == "give weights":
                self.written([self.parameter(event.which)] if "write" in event.do else None)

    def written(self, parameters: Any) -> None:
        pass

    def micro(self, micro: int, drawn: bool = True, stepped: bool = True) -> None:
        last = micro == self.count - 1
        losses = self.losses(micro, drawn)
        if drawn:
            self.points("f", micro)
        self.now = (self.life, self.place)
        if self.by_hand:
            self.set_boundary(last)
        for rank in self.ranks:
            left_out = self.window.kind == "rank left out" and not micro and self.count > 1
            if not (left_out and rank == self.world - 1 and self.world > 1 and self.part.stage < 2):
                self.backwards(rank, losses[rank], last)
        if drawn:
            self.points("l" if last else "m", micro)
        if stepped:
            self.step()

    def losses(self, micro: int, drawn: bool = True) -> dict[int, list[Tensor]]:
        kind, losses = self.window.kind, {}
        self.now = (self.life, self.place, micro, drawn)
        for rank in self.ranks:
            rows, ids = self.loop.batch(self.number, micro, rank, self.world)
            if kind == "forward left out":
                self.forward(rank, rows, ids)
            of_rows = kind in ("input gradient", "penalty") or "reentrant" in self.loop.parts
            rows.requires_grad_(of_rows)
            first, second = losses_of(self.forward(rank, rows, ids), ids)
            loss = first + 0.3 * second
            if kind in ("input gradient", "penalty"):
                more = {"create_graph": True} if kind == "penalty" else {"retain_graph": True}
                (gradient,) = torch.autograd.grad(loss, rows, **more)  # type: ignore[arg-type]
                self.see("input gradient", value=gradient, rank=rank)
                loss = loss + 0.1 * gradient.pow(2).sum() if kind == "penalty" else loss
            if kind == "weight penalty":
                with self.whole([self.model.blocks[0].down.weight], None):
                    loss = loss + 0.01 * self.model.blocks[0].down.weight.float().pow(2).sum()
            if kind == "two forwards":
                other = self.loop.batch(self.number, micro + 4, rank, self.world)
                loss = loss + losses_of(self.forward(rank, *other), other[1])[0]
            if self.overflows and rank == 0 and drawn:
                loss = loss * float("inf")
            else:
                self.see("loss", value=loss, rank=rank)
            losses[rank] = [first, 0.3 * second] if kind == "twice" else [loss]
        return losses

    def backwards(self, rank: int, losses: list[Tensor], last: bool) -> None:
        kind = self.window.kind
        for number, loss in enumerate(losses):
            retained = number < len(losses) - 1 or kind == "retain"
            self.backward(loss, retained, last)

    def parameter(self, which: int) -> Any:
        parameters = list(self.model.parameters())
        return parameters[which % len(parameters)]

    @torch.no_grad()
    def does(self, event: Event, at: str, micro: int) -> None:
        p, which = self.parameter(event.which), event.which
        shape = self.shapes[p]
        match event.do.split():
            case ["read", what]:
                self.read(what, p, which)
            case ["read", *what]:
                self.read(" ".join(what), p, which)
            case ["set", "weight"]:
                self.set_weight(p, self.get_weight(p) * 1.02)
            case ["write", "gathered", *equal]:
                with self.whole([p], None if equal else 0):
                    p.mul_(1.02)
            case ["write", "summoned"]:
                with self.summoned(True):
                    p.mul_(1.02)
            case ["write", "in", "place"]:
                p.mul_(1.02)
            case ["write", "data"]:
                p.data.mul_(1.02)
            case ["write", "grad"]:
                if p.requires_grad:
                    self.set_grad(p, self.get_grad(p) * 0.5)
            case ["assign", "grad"]:
                if p.requires_grad:
                    value = torch.linspace(-0.1, 0.2, shape.numel()).view(shape).to(p.dtype)
                    self.assign_grad(p, value, at == "b" or (at == "f" and not micro))
            case ["drop", "grad"]:
                p.grad = None
            case ["rate"]:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.7
            case ["decay"]:
                for group in self.optimizer.param_groups:
                    group["weight_decay"] = 0.05
            case ["limit"]:
                self.set_limit(LIMIT)
            case ["set", "state"]:
                if (value := self.get_state(p)).any():
                    self.set_state(p, value * 0.5)
            case ["write", "state"]:
                for state in self.optimizer.state.values():
                    if isinstance(state.get(self.key), Tensor):
                        state[self.key].mul_(0.5)
            case ["clear", "state"]:
                self.optimizer.state.clear()
            case ["take", "state"]:
                self.taken["state"] = copy.deepcopy(self.optimizer.state_dict())
            case ["give", "state"]:
                if "state" in self.taken:
                    self.optimizer.load_state_dict(copy.deepcopy(self.taken["state"]))
            case ["take", "weights"]:
                self.taken["weights"] = {
                    rank: copy.deepcopy(net.state_dict()) for rank, net in self.nets.items()
                }
            case ["give", "weights"]:
                for rank, state in self.taken.get("weights", {}).items():
                    self.nets[rank].load_state_dict(state)
            case ["hook", "before"]:
                self.handles.append(self.optimizer.register_step_pre_hook(_clamp))
            case ["hook", "after"]:
                self.handles.append(self.optimizer.register_step_post_hook(_shrink))
            case ["hook", "parameter"]:
                if p.requires_grad:
                    self.handles.append(p.register_hook(lambda g: g * 0.5))
            case ["hook", kind]:
                self.hook(kind, which)
            case ["freeze" | "thaw" as do]:
                name = f"blocks.{which % 3}.down.{('weight', 'bias')[which % 2]}"
                self.freeze(name, do == "freeze")
            case ["zeros"]:
                self.zero_grad(set_to_none=False)
            case ["zero", "grad"]:
                if not micro:
                    self.optimizer.zero_grad()
            case ["add", "group"]:
                if self.may_add_group and not self.added:
                    self.add_group()
            case ["replace"]:
                if "tied embedding" not in self.loop.parts and not self.replaced:
                    self.replace_head()
            case ["micros"]:
                if not self.by_hand:
                    self.set_micros(1 + which % 4)
            case ["buffer"]:
                for net in self.nets.values():
                    net.seen.mul_(0.5)
            case ["save"]:
                self.save()
                self.saved = True
            case ["load"]:
                if self.saved:
                    self.load()
            case ["restart", "engine"]:
                if self.loop.precision == "fp32" and not (self.frozen or self.added):
                    self.restart()
                    self.taken, self.micros, self.by_hand = {}, self.part.micros, False
                    self.saved = False

    @property
    def may_add_group(self) -> bool:
        loop = self.loop
        plain = loop.schedule == "none" and loop.groups not in ("with frozen", "config")
        return "frozen" in loop.parts and plain

    def add_group(self) -> None:
        block = self.model.blocks[1].requires_grad_(True)
        muon = {"use_muon": False} if self.loop.optimizer == "Muon" else {}
        rate = OPTIMIZERS[self.loop.optimizer].settings["lr"] * 0.3
        self.optimizer.add_param_group({"params": list(block.parameters()), "lr": rate, **muon})
        self.added, self.saved = True, False
        self.taken.pop("state", None)
        self.shapes |= {p: p.shape for p in block.parameters() if p not in self.shapes}

    def replace_head(self) -> None:
        head: Any = seeded(lambda: nn.Linear(self.loop.width, CLASSES))
        old, dtype = list(self.model.head.parameters()), DTYPES.get(self.loop.precision)
        head = head.to(dtype).to(old[0].dtype)
        for net in self.nets.values():
            net.head = head
        self.take_over(old, head)
        self.saved, self.taken, self.replaced = False, {}, True
        self.shapes |= {p: p.shape for p in head.parameters()}

    def hook(self, kind: str, which: int) -> None:
        for net in self.nets.values():
            block = net.blocks[which % 3]
            if kind == "module":
                self.handles.append(block.up.register_forward_hook(lambda m, i, out: out * 0.9))
            elif kind == "backward":
                halved = lambda m, given, got: tuple(g * 0.5 for g in given)  # noqa: E731
                self.handles.append(block.down.register_full_backward_hook(halved))
            else:
                net.tapped = True

    def freeze(self, name: str, frozen: bool) -> None:
        parameter = self.model.get_parameter(name)
        if frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
            self.frozen.add(name)
        elif not frozen and name in self.frozen:
            parameter.requires_grad_(True)
            self.frozen.discard(name)

    def read(self, what: str, p: Any, which: int) -> None:
        rows, ids = self.loop.batch(self.number, 7, 0, 1)
        match what:
            case "weight":
                self.see(value=self.get_weight(p))
            case "grad":
                self.see(value=self.get_grad(p))
            case "gathered":
                with self.whole([p], None):
                    self.see(value=p)
            case "summoned":
                with self.summoned(False):
                    self.see(
                        value=torch.cat([q.double().flatten() for q in self.model.parameters()])
                    )
            case "state":
                self.see(value=self.get_state(p))
            case "norm":
                self.see(value=float(self.norm()))
            case "rate":
                rates = [float(group["lr"]) for group in self.optimizer.param_groups]
                self.see(value=torch.tensor(rates))
            case "state dict" | "engine state dict":
                for rank in self.ranks:
                    for name, value in self.state_dict(rank, what).items():
                        self.see(name, value=value, rank=rank)
            case "evaluated":
                for rank, net in self.nets.items():
                    net.eval()
                    self.see(value=self.forward(rank, rows, ids)[0], rank=rank)
                    net.train()
            case "forward":
                for rank in self.ranks:
                    with torch.enable_grad():
                        self.see(value=self.forward(rank, rows, ids)[0], rank=rank)
            case "average":
                for name, q in self.model.named_parameters():
                    if q.requires_grad:
                        value = self.get_weight(q)
                        average = torch.lerp(value, self.average.get(name, value), 0.9)
                        self.average[name] = average
                        self.see(name, value=average)
            case "streamed":
                for name, value in self.streamed():
                    self.see(name, value=value)
            case "copied":
                with self.summoned(False):
                    copied = copy.deepcopy(self.model).eval()
                for rank in self.ranks[:1]:
                    if not rank:
                        self.see(value=copied(rows, ids)[0], rank=0)

    # What subclasses have

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _clamp(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


@torch.no_grad()
def _shrink(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.mul_(0.99)
