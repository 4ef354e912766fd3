"""torch.compile of blocks' forwards, one block at a time, with the engine's hooks outside.

[Note: one compilation for all like blocks]
The bound ``forward`` is compiled and set on each block as an attribute. ``__call__`` is unchanged,
so gathers, marks and recorded outputs run outside the graph; a forward that contains checkpoints is
traced with them, and the compiled backward recomputes. Dynamo caches graphs by the code of
``forward`` and treats a module's parameters as inputs: blocks that differ only in values share a
graph. The graph saves the parameters themselves, or views of them, for the backward: the engine
gathers into the same storage again, so they hold their values when they are read.

[Note: uncompiled calls]
Evaluation and generation (no gradient is recorded and the block does not train): each step of a
decoder has different shapes, and each block has a cache object of its own, so every block would be
compiled separately, again and again. For the same reason, a training forward with an argument of a
class that is not registered as a pytree node. Also a forward with hooks inside the block
(transformers uses them to record attentions and router logits): a graph does not call hooks
registered after it was made.

[Note: shapes]
With ``dynamic`` None a block's first shapes have a graph of their own; other shapes (the short last
batch, padding to the longest) use a second compilation, which torch makes dynamic. With one
compilation for both, the dynamic graph would replace the static one permanently.

[Note: Module.compile]
It compiles ``__call__`` with all hooks in it, which break the graph and cause a recompilation for
each state of a parameter. So modules with hooks of the engine get a ``compile`` that compiles their
forward alone or, if modules inside have hooks too, the blocks inside.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.activations.recorded_graphs import refuse_backend, refuse_recorded
from hf_zero.config.activations import CompileSection
from hf_zero.device.process_settings import ProcessSetting
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.zero.gather.model_patches import Attached, Override
from hf_zero.zero.gather.unit import Unit
from hf_zero.zero.layout.attributes import kept_in_attributes
from hf_zero.zero.layout.tree import transformed
from hf_zero.zero.layout.wrap import find_units

# limit on recompilations of one forward; torch's default of 8 is too low for a class with several
# kinds of blocks
GRAPHS = 64
_PLAIN = (str, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def signature(values: Sequence[Any], shapes: list[torch.Size]) -> Any:
    """Append the shape of every tensor in ``values`` to ``shapes``; return the first object that is
    not plain data, or None.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            shapes.append(value.shape)
        elif isinstance(value, _PLAIN):
            continue
        elif isinstance(value, dict):
            if (foreign := signature(list(value.values()), shapes)) is not None:
                return foreign
        elif isinstance(value, (tuple, list)):
            if (foreign := signature(value, shapes)) is not None:
                return foreign
        elif type(value) not in pytree.SUPPORTED_NODES:
            return value
    return None


def check_compilation(section: CompileSection, model: nn.Module, fixed: bool) -> None:
    """Raise ConfigError for an unknown backend of torch.compile, or a mode that the backend does
    not support.

    Without ``fixed`` parameter addresses also for CUDA graphs, requested here or already in
    ``model``; with them for modules that torch.cuda.make_graphed_callables has captured, whose
    parameters the engine moves once.
    """
    refuse_recorded(model, fixed)
    if not section.blocks:
        return
    if not fixed:
        refuse_backend(section.backend, section.mode, None)
    kept = kept_in_attributes(model)
    if kept is not None:
        raise ConfigError(
            f"compile.blocks with {kept}, a weight that its layer assigns in each forward (int8 of "
            "bitsandbytes), which torch.compile cannot trace; remove compile.blocks, or load the "
            "model with BitsAndBytesConfig(load_in_4bit=True) or torchao's Int8WeightOnlyConfig"
        )
    backends = torch.compiler.list_backends(())
    if section.backend not in backends:
        raise ConfigError(
            f"compile.backend = {section.backend!r} is none that torch has here; write one of "
            f"{', '.join(backends)}"
        )
    if section.mode != "default" and section.backend != "inductor":
        raise ConfigError(
            f"compile.mode = {section.mode!r} is inductor's, not {section.backend}'s; remove "
            "it, or compile.backend"
        )


def to_be_compiled(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model`` that an engine would compile."""
    return [
        module for spec in find_units(model)[0][1:] for module in spec.modules if _inside(module)
    ]


class CompiledForward(Override):
    """A block's ``forward``, compiled in training."""

    def __init__(
        self,
        module: nn.Module,
        unit: Unit,
        compilation: Callable[[Any, bool | None], Any],
        dynamic: bool | None,
        warned: set[str],
    ):
        """``compilation(forward, dynamic)`` compiles; ``warned`` holds warnings already logged."""
        super().__init__(module.forward, module, "forward")
        self.__signature__ = inspect.signature(self._fn)
        self._unit = unit
        self._own = module.__dict__.get("forward")  # an attribute set earlier on the instance
        self._inside = _inside(module)
        self._warned = warned
        self._first: list[torch.Size] | None = None
        self._of_first = compilation(self._fn, False if dynamic is None else dynamic)
        self._of_others = compilation(self._fn, None) if dynamic is None else self._of_first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alone = not (self._module.training or torch.is_grad_enabled()) or transformed()
        if alone or self._unit.guard.watched or torch.compiler.is_compiling():
            return self._fn(*args, **kwargs)
        shapes: list[torch.Size] = []
        foreign = signature((*args, *kwargs.values()), shapes)
        if foreign is not None or any(map(_has_hooks, self._inside)):
            self._warn_of_forward(foreign)
            return self._fn(*args, **kwargs)
        if self._first is None:
            self._first = shapes
            return self._compile(args, kwargs)
        with _traces_checkpoints():
            compiled = self._of_first if shapes == self._first else self._of_others
            return compiled(*args, **kwargs)

    def _compile(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the block for the first time; warn if torch.compile made several graphs of it."""
        from torch._dynamo.utils import counters  # imported late: the import takes a second

        breaks = counters["graph_break"]
        before = breaks.copy()
        with _traces_checkpoints():
            out = self._of_first(*args, **kwargs)
        for reason in breaks - before:
            self._warn(
                f"compiles in parts, which run between uncompiled code (torch.compile: "
                f"{reason.strip().splitlines()[0]})",
                "TORCH_LOGS=graph_breaks shows where",
            )
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            raise ConfigError(
                f"a {type(self._module).__name__} whose forward was replaced before it was "
                "compiled cannot be copied; copy the model before "
                "hf_zero.initialize, or after engine.destroy()"
            )
        return super().__deepcopy__(memo)

    def restore(self) -> None:
        """Restore the block's former forward."""
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            if self._own is not None:
                self._module.__dict__["forward"] = self._own

    def _warn_of_forward(self, foreign: Any) -> None:
        if foreign is not None:
            self._warn(
                f"is given a {type(foreign).__name__}, which torch.compile would "
                "compile again for each block, so its forward runs uncompiled",
                "for a cache of keys and values, train with use_cache=False",
            )
        else:
            self._warn(
                "has hooks on modules inside it, which a compiled graph would not call, so its "
                "forward runs uncompiled",
                "remove them to have it compiled",
            )

    def _warn(self, problem: str, remedy: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            logger.warning("%s %s; %s", type(self._module).__name__, problem, remedy)


def _traces_checkpoints() -> AbstractContextManager[object]:
    """Let torch.compile trace checkpoints whose code writes attributes, such as the outputs that
    fused projections keep for one another: without it, such a block silently runs uncompiled.

    The recomputation in the backward does not write them again.
    """
    import torch._dynamo.config as tracing  # imported late: the import takes a second

    patched: AbstractContextManager[object] = tracing.patch(
        skip_fwd_side_effects_in_bwd_under_checkpoint=True
    )
    return patched


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _read_limit() -> int:
    import torch._dynamo.config as limits  # imported late: the import takes a second

    return int(limits.recompile_limit)


def _write_limit(limit: int) -> None:
    import torch._dynamo.config as limits

    limits.recompile_limit = limit


_recompile_limit = ProcessSetting(_read_limit, _write_limit)


class CompiledBlocks:
    """The compiled blocks of an engine."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], fixed: bool = True):
        """Record the blocks of ``model``, on which the engine's hooks are installed.

        ``fixed``: parameters keep their addresses, as CUDA graphs require.
        """
        self._fixed = fixed
        self._root = units[0]
        self._unit_of = {module: unit for unit in units for module in unit.modules.values()}
        self._blocks = [
            module for unit in units[1:] for module in unit.modules.values() if _is_block(module)
        ]
        self._on: dict[nn.Module, CompiledForward] = {}
        # the arguments of each call of :meth:`compile`
        self._calls: list[tuple[nn.Module | None, Any, bool | None, dict[str, Any]]] = []
        self._warned: set[str] = set()
        self._restore_limit: Callable[[], object] | None = None
        self._hooked = [module for module in model.modules() if _is_hooked(module)]
        for module in self._hooked:
            module.__dict__["compile"] = Override(partial(self.compile, module), module, "compile")

    def install(self, section: CompileSection) -> None:
        """Compile as configured; :func:`check_compilation` has checked ``section``."""
        if not section.blocks:
            return
        if not self._blocks:
            logger.warning(
                "compile: blocks finds nothing to compile: no block of this model has modules of "
                "its own and its parameters to itself"
            )
        self.compile(
            None,
            section.backend,
            section.dynamic,
            **({"mode": section.mode} if section.mode != "default" else {}),
        )

    def repeat(self, before: CompiledBlocks) -> None:
        """Compile as ``before``, the blocks of the engine before it was built again."""
        for module, backend, dynamic, options in before._calls:
            if module is None or module in self._hooked:
                self.compile(module, backend, dynamic, **options)

    def compile(
        self,
        module: nn.Module | None = None,
        backend: str | Callable[..., Any] = "inductor",
        dynamic: bool | None = None,
        **options: Any,
    ) -> None:
        """Compile the forward of each block, or of ``module``, with ``torch.compile(…, backend,
        **options)``, replacing an earlier compilation.
        """
        self._calls.append((module, backend, dynamic, options))
        if not self._fixed:
            refuse_backend(backend, options.get("mode"), options.get("options"))
        if self._restore_limit is None:
            raised = max(_read_limit(), GRAPHS)
            # also called once the engine is collected without being destroyed
            self._restore_limit = at_end = weakref.finalize(self, _recompile_limit.change(raised))
            at_end.atexit = False
        if module is None:
            chosen = self._blocks
        elif not any(map(_is_hooked, _inside(module))):
            chosen = [module]
        else:
            parts = set(module.modules())
            chosen = [block for block in self._blocks if block in parts]
        for selected in chosen:
            if selected in self._on:
                self._on.pop(selected).restore()
            unit = self._unit_of.get(selected, self._root)
            self._on[selected] = CompiledForward(
                selected,
                unit,
                lambda forward, dynamic: torch.compile(
                    forward, backend=backend, dynamic=dynamic, **options
                ),
                dynamic,
                self._warned,
            )
            selected.forward = self._on[selected]  # type: ignore[method-assign]

    def remove(self) -> None:
        for forward in self._on.values():
            forward.restore()
        for module in self._hooked:
            module.__dict__.pop("compile", None)
        self._on, self._hooked = {}, []
        if self._restore_limit is not None:
            self._restore_limit()
            self._restore_limit = None


def _inside(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if part is not module]


def _is_hooked(module: nn.Module) -> bool:
    """Return whether ``module`` has a hook of the engine around its forward."""
    return any(isinstance(hook, Attached) for hook in module._forward_pre_hooks.values())


def _is_block(module: nn.Module) -> bool:
    """Return whether ``module`` has submodules, so that compiling gains something, and none of them
    has a hook of the engine.
    """
    inside = _inside(module)
    return bool(inside) and not any(map(_is_hooked, inside))
