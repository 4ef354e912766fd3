"""What a script may read and write at each point of a step, on each route: one table.

``hf_zero/docs/step.md`` prints it, and ``tests/integrations/test_step_points.py`` runs each cell
beside the same script in plain torch. Nothing reads it in a training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum


class StepPhase(Enum):
    """The part of a step that a point is in, by the gradients that the engine holds there."""

    BETWEEN = "between two steps"
    GRAPH = "after a forward, before its backward"
    WINDOW = "inside the window, after a micro-batch"
    COMPLETE = "after the last backward"
    CLIPPED = "after clipping"
    BEFORE_UPDATE = "in a hook before the update"
    AFTER_UPDATE = "in a hook after it"


class Effect(Enum):
    """The effect of an access at a point."""

    VALUE = "the value"  # as plain torch has it there
    NOTHING_HELD = "`None`"
    THIS_STEP = "this step"
    NEXT_STEP = "next step"
    AFTER_BACKWARD = "this step; at stage 3 after its backward"
    MICRO_BATCH = "next micro-batch"  # as a gradient of this rank, which the engine averages
    RESTARTS = "restarts the window"
    NO_EFFECT = "no effect"
    UNLESS_MISSED = "this step, or an error"  # where other ranks or copies miss the write
    AS_IN_TORCH = "torch's error"
    REFUSED = "refused"


@dataclass(frozen=True)
class Remedy:
    """The access in place of one that is refused, and the phase in which it works (None: the
    same). ``words``: what the message says of it.
    """

    access: str
    words: str
    phase: StepPhase | None = None


@dataclass(frozen=True)
class AccessOutcome:
    """The effect of an access in a phase; a refused one has the class of its error."""

    effect: Effect
    error: str = ""
    remedy: Remedy | None = None

    def __str__(self) -> str:
        return f"`{self.error}`" if self.effect is Effect.REFUSED else self.effect.value


@dataclass(frozen=True)
class Access:
    """A read or a write of a script, ``code``, with its outcome in each phase.

    ``sharded``: the outcome at stage 3 in each phase but GRAPH, in which some parameters are whole;
    in hooks some may be.
    """

    name: str
    code: str
    writes: bool
    outcomes: Mapping[StepPhase, AccessOutcome]
    sharded: AccessOutcome | None = None


def _all(
    outcome: AccessOutcome, changed: Mapping[StepPhase, AccessOutcome] | None = None
) -> Mapping[StepPhase, AccessOutcome]:
    return {**dict.fromkeys(StepPhase, outcome), **(changed or {})}


BETWEEN, GRAPH, WINDOW, COMPLETE, CLIPPED, BEFORE_UPDATE, AFTER_UPDATE = StepPhase
HELD = (WINDOW, COMPLETE, CLIPPED)  # phases with a gradient
HOOKS = (BEFORE_UPDATE, AFTER_UPDATE)

_VALUE = AccessOutcome(Effect.VALUE)
_NONE = AccessOutcome(Effect.NOTHING_HELD)
_THIS = AccessOutcome(Effect.THIS_STEP)
_NEXT = AccessOutcome(Effect.NEXT_STEP)
_AFTER_BACKWARD = AccessOutcome(Effect.AFTER_BACKWARD)
_MICRO = AccessOutcome(Effect.MICRO_BATCH)
_RESTARTS = AccessOutcome(Effect.RESTARTS)
_NO_EFFECT = AccessOutcome(Effect.NO_EFFECT)
_IN_TORCH = AccessOutcome(Effect.AS_IN_TORCH)
_ACTS = _all(_THIS, {BETWEEN: _NEXT, AFTER_UPDATE: _NEXT})


def _refused(
    access: str, words: str, phase: StepPhase | None = None, error: str = "PartitionError"
) -> AccessOutcome:
    return AccessOutcome(Effect.REFUSED, error, Remedy(access, words, phase))


_GRAD = _refused("gradient", "safe_get_full_grad")
_STATE = _refused("optimizer state", "safe_get_full_optimizer_state")
_SET_STATE = _refused("set optimizer state", "safe_set_full_optimizer_state")
_RELEASED = _refused("weights", "GatheredParameters", error="ReleasedParameterError")
_NO_GRADIENT = _refused("set gradient", "between backward and step", COMPLETE)
_NOT_READ = _refused("set gradient", "safe_set_full_grad")
_AFTER_STEP = _refused("unfreeze", "after", BETWEEN)
_IN_STEP = _refused("unfreeze", "between batches", BETWEEN)
_SET_BACK = _refused("unfreeze", "set it back", BETWEEN)
_NO_STEP = _refused("drop gradients", "engine.backward(loss) first", BETWEEN)
_GRAD_IN_HOOK = _refused("gradient", "safe_get_full_grad", COMPLETE)
_READ_IN_HOOK = _refused("gradient", "before optimizer.step()", COMPLETE)
_SET_IN_HOOK = _refused("set gradient", "before optimizer.step()", COMPLETE)
_DROP_IN_HOOK = _refused("drop gradients", "before optimizer.step()", BETWEEN)
_NOT_READ_IN_HOOK = _refused("set gradient", "safe_set_full_grad", COMPLETE)
_SAVE_IN_HOOK = _refused("save", "call it after the step", BETWEEN)
_CLIP = _refused("limit", "gradient_clipping")
_CLIP_IN_HOOK = _refused("limit", "gradient_clipping", COMPLETE)
_UNLESS_MISSED = AccessOutcome(
    Effect.UNLESS_MISSED, "PartitionError", Remedy("weights", "write to the parameters")
)

READS = (
    Access("read weights", "with GatheredParameters(…)", False, _all(_VALUE)),
    Access("read master weights", "safe_get_full_fp32_param(p)", False, _all(_VALUE)),
    Access("state dict", "model.state_dict()", False, _all(_VALUE)),
    Access(
        "gradient", "safe_get_full_grad(p)", False,
        _all(_NONE, {**dict.fromkeys(HELD, _VALUE), **dict.fromkeys(HOOKS, _READ_IN_HOOK)}),
    ),
    Access(
        "p.grad", "p.grad", False,
        _all(_NONE, {**dict.fromkeys(HELD, _GRAD), **dict.fromkeys(HOOKS, _GRAD_IN_HOOK)}),
    ),
    Access("norm", "engine.get_global_grad_norm()", False, _all(_VALUE)),
    Access("rate", 'optimizer.param_groups[0]["lr"]', False, _all(_VALUE)),
    Access("optimizer state", "safe_get_full_optimizer_state(p, …)", False, _all(_VALUE)),
    Access("optimizer.state", "optimizer.state[p]", False, _all(_STATE)),
    Access("evaluation", "with torch.no_grad(): model(x)", False, _all(_VALUE)),
    Access("training forward", "model(x), without a backward", False, _all(_VALUE)),
    Access(
        "save", "engine.save_checkpoint(…)", False,
        _all(_VALUE, dict.fromkeys(HOOKS, _SAVE_IN_HOOK)),
    ),
)  # fmt: skip
WRITES = (
    Access(
        "weights",
        "with GatheredParameters(…, modifier_rank=0)",
        True,
        {**_ACTS, GRAPH: _IN_TORCH},
    ),
    Access(
        "equal weights", "with GatheredParameters(…, modifier_rank=None)", True,
        {**_ACTS, GRAPH: _IN_TORCH},
    ),
    Access("master weights", "safe_set_full_fp32_param(p, …)", True, _ACTS),
    Access(
        "weights in place", "p.mul_(…)", True, {**_ACTS, GRAPH: _IN_TORCH}, sharded=_RELEASED
    ),
    Access("p.data", "p.data.mul_(…)", True, _ACTS, sharded=_RELEASED),
    Access(
        "set gradient", "safe_set_full_grad(p, …)", True,
        {
            **_ACTS, BETWEEN: _NO_GRADIENT, GRAPH: _NO_GRADIENT,
            **dict.fromkeys(HOOKS, _SET_IN_HOOK),
        },
    ),
    Access(
        "set p.grad", "p.grad = …", True,
        {**_ACTS, BETWEEN: _MICRO, GRAPH: _MICRO, BEFORE_UPDATE: _SET_IN_HOOK,
         AFTER_UPDATE: _NO_EFFECT},
    ),
    Access(
        "p.grad in place", "p.grad.mul_(…)", True,
        {**dict.fromkeys(HELD, _NOT_READ), **dict.fromkeys(HOOKS, _NOT_READ_IN_HOOK)},
    ),
    Access(
        "remove p.grad", "p.grad = None", True,
        {**_ACTS, BEFORE_UPDATE: _SET_IN_HOOK, AFTER_UPDATE: _NO_EFFECT},
    ),
    Access("set rate", 'group["lr"] = …', True, _ACTS),
    Access("decay", 'group["weight_decay"] = …', True, _ACTS),
    Access("limit", "engine.max_norm = …", True, {p: _ACTS[p] for p in (BETWEEN, GRAPH, *HELD)}),
    Access("set optimizer state", "safe_set_full_optimizer_state(p, …)", True, _ACTS),
    Access("states", "for state in optimizer.state.values(): …mul_(…)", True, _ACTS),
    Access("clear state", "optimizer.state.clear()", True, _ACTS),
    Access("replace state", "optimizer.state[p] = {}", True, _all(_SET_STATE)),
    Access("load state", "optimizer.load_state_dict(…)", True, _ACTS),
    Access("load weights", "model.load_state_dict(…)", True, {**_ACTS, GRAPH: _IN_TORCH}),
    Access(
        "members", 'for p in group["params"]: p.mul_(…)', True,
        {
            **dict.fromkeys((BETWEEN, *HELD), _UNLESS_MISSED),
            BEFORE_UPDATE: _THIS, AFTER_UPDATE: _NEXT,
        },
    ),
    Access(
        "member gradients",
        'for p in group["params"]: p.grad.clamp_(…)',
        True,
        {**dict.fromkeys(HELD, _NOT_READ), BEFORE_UPDATE: _THIS, AFTER_UPDATE: _NOT_READ_IN_HOOK},
    ),
    Access(
        "clip parameters", "clip_grad_norm_(model.parameters(), …)", True,
        {**dict.fromkeys(HELD, _CLIP), **dict.fromkeys(HOOKS, _CLIP_IN_HOOK)},
    ),
    Access(
        "clip members", 'clip_grad_norm_(group["params"], …)', True,
        {**dict.fromkeys(HELD, _CLIP), AFTER_UPDATE: _CLIP_IN_HOOK},
    ),
    Access("freeze", "p.requires_grad_(False)", True, {**_ACTS, BEFORE_UPDATE: _NEXT}),
    Access(
        "unfreeze", "p.requires_grad_(True)", True,
        _all(_NEXT, {GRAPH: _SET_BACK, WINDOW: _AFTER_STEP}),
    ),
    Access(
        "drop gradients", "optimizer.zero_grad()", True,
        {
            BETWEEN: _NEXT, GRAPH: _THIS, WINDOW: _RESTARTS, COMPLETE: _NO_STEP, CLIPPED: _THIS,
            BEFORE_UPDATE: _DROP_IN_HOOK, AFTER_UPDATE: _NO_EFFECT,
        },
    ),
)  # fmt: skip
ACCESSES = {access.name: access for access in (*READS, *WRITES)}


@dataclass(frozen=True)
class Route:
    """A way to train: its points in the order of a step of two micro-batches, and the outcomes, by
    access and point, that differ from the phase's.

    ``codes``: how its scripts write an access, where that differs.
    """

    name: str
    title: str
    points: Mapping[str, StepPhase]
    different: Mapping[tuple[str, str], AccessOutcome] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)

    def outcome(self, access: Access, point: str, stage: int = 0) -> AccessOutcome | None:
        """Return the outcome of ``access`` at ``point``; None where scripts have no such access."""
        if (access.name, point) in self.different:
            return self.different[access.name, point]
        phase = self.points[point]
        if access.sharded is not None and stage == 3 and phase is not GRAPH:
            refused = access.sharded
            return replace(refused, effect=Effect.UNLESS_MISSED) if phase in HOOKS else refused
        return access.outcomes.get(phase)

    def cells(self, writes: bool) -> Iterator[tuple[Access, str]]:
        """Yield each access, of those that write or read, with each point that has it."""
        for access in WRITES if writes else READS:
            for point in self.points:
                if self.outcome(access, point) is not None:
                    yield access, point


_LOOP = {
    "before forward": BETWEEN,
    "after forward": GRAPH,
    "after backward in the window": WINDOW,
    "after micro-batch": WINDOW,
    "after the last backward": COMPLETE,
    "register_step_pre_hook": BEFORE_UPDATE,
    "register_step_post_hook": AFTER_UPDATE,
    "after scheduler": BETWEEN,
    "after zero_grad": BETWEEN,
}
_IN_LOOP = {
    # engine.step() counts the micro-batch whose gradients were dropped before it
    ("drop gradients", "after backward in the window"): _NO_STEP,
    ("set p.grad", "after scheduler"): _NO_EFFECT,  # zero_grad() follows
}
_ACCELERATE = {
    "before forward": BETWEEN,
    "after forward": GRAPH,
    "after backward in the window": WINDOW,
    "after micro-batch": WINDOW,
    "after the last backward": COMPLETE,
    "after unscale": COMPLETE,
    "after clipping": CLIPPED,
    "register_step_pre_hook": BEFORE_UPDATE,
    "register_step_post_hook": AFTER_UPDATE,
    "after step": BETWEEN,
    "after scheduler": BETWEEN,
    "after zero_grad": BETWEEN,
}
_TRAINER = {
    "on_step_begin": BETWEEN,
    "compute_loss": GRAPH,
    "training_step": WINDOW,
    "on_substep_end": WINDOW,
    "training_step, last": COMPLETE,
    "on_pre_optimizer_step": CLIPPED,
    "register_step_pre_hook": BEFORE_UPDATE,
    "register_step_post_hook": AFTER_UPDATE,
    "on_optimizer_step": BETWEEN,
    "on_step_end": BETWEEN,
}
_LIGHTNING = {
    "on_train_batch_start": BETWEEN,
    "training_step": GRAPH,
    "on_before_zero_grad": GRAPH,
    "on_before_backward": GRAPH,
    "on_after_backward": WINDOW,
    "on_train_batch_end": WINDOW,
    "on_after_backward, last": COMPLETE,
    "on_before_optimizer_step": COMPLETE,
    "configure_gradient_clipping": CLIPPED,
    "register_step_post_hook": AFTER_UPDATE,
    "optimizer_step": BETWEEN,
    "on_train_batch_end, last": BETWEEN,
}
_MANUAL = {
    "before forward": BETWEEN,
    "after forward": GRAPH,
    "after backward in the window": WINDOW,
    "on_train_batch_end": WINDOW,
    "after the last backward": COMPLETE,
    "after clipping": CLIPPED,
    "on_before_optimizer_step": CLIPPED,
    "register_step_pre_hook": BEFORE_UPDATE,
    "register_step_post_hook": AFTER_UPDATE,
    "after step": BETWEEN,
    "after scheduler": BETWEEN,
    "after zero_grad": BETWEEN,
    "on_train_batch_end, last": BETWEEN,
}
_FABRIC = {
    "before forward": BETWEEN,
    "after forward": GRAPH,
    "after backward in the window": WINDOW,
    "after the last backward": COMPLETE,
    "after clipping": CLIPPED,
    "register_step_pre_hook": BEFORE_UPDATE,
    "register_step_post_hook": AFTER_UPDATE,
    "after step": BETWEEN,
    "after scheduler": BETWEEN,
    "after zero_grad": BETWEEN,
}


def _at(access: str, points: str, outcome: AccessOutcome) -> dict[tuple[str, str], AccessOutcome]:
    return {(access, point): outcome for point in points.split("; ")}


ROUTES = {
    route.name: route
    for route in (
        Route("loop", "A loop with `engine.backward(loss)`", _LOOP, _IN_LOOP),
        Route("plain loop", "a loop with `loss.backward()`", _LOOP, _IN_LOOP),
        Route("deepspeed", "`import deepspeed`", _LOOP, _IN_LOOP),
        Route(
            "accelerate",
            "Accelerate",
            _ACCELERATE,
            {
                # Accelerate's optimizers do nothing inside a window
                **_at(
                    "drop gradients", "after backward in the window; after micro-batch", _NO_EFFECT
                ),
                **_at("drop gradients", "after the last backward; after unscale", _THIS),
                **_at("set p.grad", "after step; after scheduler", _NO_EFFECT),
            },
            {"limit": "accelerator.clip_grad_norm_(…, limit)"},
        ),
        Route(
            "trainer",
            "The Trainer of Transformers",
            _TRAINER,
            {
                **_at("drop gradients", "training_step; on_substep_end", _NO_EFFECT),
                **_at("drop gradients", "training_step, last", _THIS),
                **_at("set p.grad", "on_optimizer_step", _NO_EFFECT),
                **_at("limit", "on_pre_optimizer_step", _NEXT),
            },
            {"limit": "args.max_grad_norm = …"},
        ),
        Route(
            "lightning",
            "Lightning, automatic optimization",
            _LIGHTNING,
            {
                **_at("drop gradients", "on_after_backward; on_train_batch_end", _THIS),
                **_at("drop gradients", "on_after_backward, last; on_before_optimizer_step", _THIS),
                # zero_grad() follows
                **_at("set p.grad", "on_train_batch_start; training_step", _NO_EFFECT),
                **_at("set p.grad", "on_before_zero_grad; optimizer_step", _NO_EFFECT),
                **_at("set p.grad", "on_train_batch_end, last", _NO_EFFECT),
                **_at("limit", "configure_gradient_clipping", _NEXT),
                # inside the forward of the engine, which keeps units whole for the backward
                **_at("master weights", "training_step", _AFTER_BACKWARD),
            },
            {"limit": "trainer.gradient_clip_val = …"},
        ),
        Route(
            "lightning manual",
            "Lightning, manual optimization",
            _MANUAL,
            {
                **_at("drop gradients", "after backward in the window; on_train_batch_end", _THIS),
                **_at("drop gradients", "after the last backward", _THIS),
                **_at("set p.grad", "after step; after scheduler", _NO_EFFECT),
                # a call of the module is no forward of the engine, which would build what trains
                **_at("unfreeze", "before forward", _IN_STEP),
            },
            {"limit": "self.clip_gradients(optimizer, limit)"},
        ),
        Route(
            "fabric",
            "Lightning's Fabric",
            _FABRIC,
            {
                **_at("drop gradients", "after backward in the window", _THIS),
                **_at("drop gradients", "after the last backward", _THIS),
                **_at("set p.grad", "after step; after scheduler", _NO_EFFECT),
            },
            {"limit": "fabric.clip_gradients(…, max_norm=limit)"},
        ),
    )
}


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*["---"] * len(cells))]


def _shown(point: str) -> str:
    """Return ``point`` in Markdown: names of functions as code."""
    name, _, which = point.partition(", ")
    shown = f"`{name}`" if "_" in name and " " not in name else name
    return f"{shown} ({which})" if which else shown


def access_table(writes: bool) -> str:
    """Return a Markdown table of the outcomes of reads or writes in each phase."""
    lines = _head("write" if writes else "read", *(phase.value for phase in StepPhase))
    for access in WRITES if writes else READS:
        note = f" (stage 3: {access.sharded})" if access.sharded else ""
        found = (access.outcomes.get(phase, "") for phase in StepPhase)
        lines.append(_row(f"`{access.code}`{note}", *found))
    return "\n".join(lines)


def remedy_table() -> str:
    """Return a Markdown table of the accesses that are refused, and what to write instead."""
    lines = _head("refused", "error", "instead")
    for access in ACCESSES.values():
        outcomes = [*access.outcomes.values(), *filter(None, [access.sharded])]
        for outcome in dict.fromkeys(found for found in outcomes if found.remedy):
            assert outcome.remedy is not None
            instead, phase = ACCESSES[outcome.remedy.access], outcome.remedy.phase
            where = f", {phase.value}" if phase else ""
            lines.append(_row(f"`{access.code}`", outcome, f"`{instead.code}`{where}"))
    return "\n".join(dict.fromkeys(lines))


def _alike() -> list[tuple[str, Route]]:
    """Return routes with different points or outcomes, each with the titles of those like it."""
    titles: dict[str, list[str]] = {}
    for route in ROUTES.values():
        first = next(
            other
            for other in ROUTES.values()
            if (other.points, other.different) == (route.points, route.different)
        )
        titles.setdefault(first.name, []).append(route.title)
    return [("; ".join(names), ROUTES[name]) for name, names in titles.items()]


def point_table() -> str:
    """Return a Markdown table of the points of each route, by phase."""
    lines = _head("route", *(phase.value for phase in StepPhase))
    for title, route in _alike():
        points = [
            ", ".join(_shown(point) for point, its in route.points.items() if its is phase)
            for phase in StepPhase
        ]
        lines.append(_row(title, *points))
    return "\n".join(lines)


def difference_table() -> str:
    """Return a Markdown table of what differs on single routes."""
    lines = _head("route", "access", "at", "effect")
    for title, route in _alike():
        found: dict[tuple[str, str], list[str]] = {}
        for (name, point), outcome in route.different.items():
            found.setdefault((name, str(outcome)), []).append(_shown(point))
        for (name, effect), points in found.items():
            code = route.codes.get(name, ACCESSES[name].code)
            lines.append(_row(title, f"`{code}`", ", ".join(points), effect))
        for name in sorted(route.codes.keys() - {name for name, _ in route.different}):
            code = f"`{route.codes[name]}`"
            lines.append(_row(title, code, "", f"as `{ACCESSES[name].code}`"))
    return "\n".join(lines)
