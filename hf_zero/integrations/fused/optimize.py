"""``hf_zero.optimize`` and ``hf_zero.restore``: installation of fused kernels in a model's modules,
and its reversal.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from hf_zero.activations.compile import to_be_compiled
from hf_zero.config.kernels import NAMES, auto, in_order
from hf_zero.config.spelling import did_you_mean
from hf_zero.device import kinds
from hf_zero.errors import KernelError
from hf_zero.integrations.fused import pre_layer_norm as pre_ln
from hf_zero.integrations.fused import projections
from hf_zero.integrations.fused.by_size import narrow_blocks, width_of
from hf_zero.integrations.fused.candidates import FusionCandidate, candidates
from hf_zero.integrations.fused.replacement import Line, Replacement, Report
from hf_zero.integrations.fused.shells import ModuleCall, calls_of_model
from hf_zero.integrations.fused.sublayers import replaced
from hf_zero.logging import log_rank0
from hf_zero.ops.dispatch import kind_for_auto
from hf_zero.ops.packed_linear import adjacent, pack_
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.initial_values import source_of
from hf_zero.zero.layout.walk import attribute_of, modules_of
from hf_zero.zero.layout.wrap import PACKED
from hf_zero.zero.transaction import on_rollback, transaction

if TYPE_CHECKING:
    from hf_zero.ops.sparse_attention import SparsityConfig

RECORD = "_hf_zero_fused"
PRE_LN = "pre_layer_norm"

IN_BLOCKS = frozenset(("norms", "activations", "rotary", "qkv", "residual"))
"""The kernels that replace modules of blocks."""

IN_COMPILED_BLOCKS = ("qkv",)
"""The kernels of "auto" inside a compiled block, where inductor fuses norms, activations,
rotations and sums itself.
"""


class Record:
    """The replacements in a model, and the report: an attribute of the model, copied with it."""

    def __init__(self, replacements: list[Replacement], report: Report) -> None:
        self.replacements, self.report = replacements, report

    def __deepcopy__(self, memo: dict[int, object]) -> Record:
        return Record(
            [replace(one, undo=_copied(one.undo, memo)) for one in self.replacements], self.report
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KernelError(
            "a model with fused kernels is not pickled; call hf_zero.restore(model) first, or "
            "save model.state_dict()"
        )


def _copied(undo: Callable[[], None], memo: dict[int, object]) -> Callable[[], None]:
    """Return ``undo`` for the copy of the model: deepcopy copies bound methods and partials with
    the objects they hold, but not closures.
    """
    if not isinstance(undo, types.FunctionType):
        return copy.deepcopy(undo, memo)
    cells = tuple(
        types.CellType(copy.deepcopy(cell.cell_contents, memo)) for cell in undo.__closure__ or ()
    )
    return types.FunctionType(
        undo.__code__, undo.__globals__, undo.__name__, undo.__defaults__, cells
    )


def optimize(
    model: nn.Module,
    kernels: str | bool | Iterable[str] | None = "auto",
    sparse_attention: SparsityConfig | Mapping[str, object] | None = None,
    *,
    pre_layer_norm: bool = False,
) -> nn.Module:
    """Install fused kernels in ``model``, in place, in the modules whose code they replace.

    Only forwards of instances change; parameters, their names, the state dict and classes do not. A
    table of replaced modules, and of others with the reason, is logged and available from
    :func:`report`. A model that has fused kernels already is restored first.

    Args:
        model: a model of transformers, also inside adapters of PEFT; in any other model only
            LayerNorms are replaced.
        kernels: "auto" or True (those that help on this device:
            :data:`hf_zero.config.kernels.AUTO`), "off", None or False, or names of ``NAMES`` there.
            Without a GPU, norms, activations, rotary, qkv and residual run slow references, whose
            results are correct.
        sparse_attention: a SparsityConfig, DeepSpeed's section as a dict, or None for dense
            attention.
        pre_layer_norm: norms before attention and MLP instead of after them, for BERT-like models
            trained from scratch.

    Returns:
        ``model``.

    Raises:
        KernelError: no model, an unknown kernel, or a model that ``sparse_attention`` or
            ``pre_layer_norm`` does not support.
    """
    kind = kind_for_auto(kinds.accelerator() or "cpu") if _is_auto(kernels) else "cpu"
    names = _names(kernels, kind)
    _refuse_no_model(model)
    with torch.inference_mode(False):  # parameters move, and train later
        narrow = narrow_blocks(to_be_compiled(model)) if _is_auto(kernels) else ()
        prepare(model, names, sparse_attention, pre_layer_norm, narrow=narrow, engine=False)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Restore the forwards that :func:`optimize` replaced in ``model`` or in a model inside it; one
    without fused kernels is unchanged.

    Raises:
        KernelError: no model, or another replacement of a forward was made since; undo that first.
    """
    _refuse_no_model(model)
    for module in modules_of(model):
        if RECORD in module.__dict__:
            with torch.inference_mode(False):
                _undo(module.__dict__[RECORD].replacements)
            del module.__dict__[RECORD]
    return model


def _refuse_no_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise KernelError(
            f"{model!r:.60} is of type {type(model).__name__}; pass a torch.nn.Module"
        )


def _undo(replacements: list[Replacement]) -> None:
    """Undo ``replacements``, the last one first."""
    for replacement in reversed(replacements):
        replacement.undo()


def report(model: nn.Module) -> Report:
    """Return the report of :func:`optimize` on ``model``, or on models inside it; an empty one if
    it was not called.
    """
    records = [each.__dict__[RECORD] for each in modules_of(model) if RECORD in each.__dict__]
    return Report(tuple(line for record in records for line in record.report.lines))


def _is_auto(kernels: object) -> bool:
    return kernels is True or (isinstance(kernels, str) and kernels == "auto")


def _names(kernels: object, device: str) -> tuple[str, ...]:
    if _is_auto(kernels):
        return auto(device)
    if kernels is None or kernels is False or (isinstance(kernels, str) and kernels == "off"):
        return ()
    if not isinstance(kernels, Iterable):
        raise KernelError(f"kernels={kernels!r}; give 'auto', 'off', or names: {', '.join(NAMES)}")
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    try:
        return in_order(names)
    except ValueError as unknown:
        raise KernelError(
            f"{unknown} is not a fused kernel{did_you_mean(str(unknown), NAMES)}; give 'auto', "
            f"'off', or names among {', '.join(NAMES)}"
        ) from None


def prepare(
    model: nn.Module,
    kernels: str | Iterable[str],
    sparse_attention: SparsityConfig | Mapping[str, object] | None,
    pre_layer_norm: bool,
    compiled: Iterable[nn.Module] = (),
    narrow: Iterable[nn.Module] = (),
    engine: bool = True,
) -> None:
    """Install kernels for :func:`hf_zero.initialize`: as :func:`optimize`, for an ``engine``, which
    itself lays out and updates parameters.

    Blocks that will be ``compiled`` get only the kernels of ``IN_COMPILED_BLOCKS``; ``narrow`` ones
    get none.
    """
    names = _names(kernels, "cpu")
    restore(model)
    work = _Installation(model, names, compiled, narrow, packs=not engine)
    with transaction():
        on_rollback(_undo, work.replacements)
        calls = calls_of_model(model) if pre_layer_norm or "qkv" in names else []
        moves = pre_ln.plan(model, calls) if pre_layer_norm else None
        get_base = attribute_of(model, "get_base_model")  # inside the adapters of PEFT
        base: nn.Module = model if get_base is None else get_base()
        work.replace_forwards(set() if moves is None else moves.norms(model), base)
        if "qkv" in names:
            work.join_projections(calls)
        work.report_left_out()
        if moves is not None:
            work.add(PRE_LN, model, moves.install(model, "norms" in names))
        if "loss" in names:
            from hf_zero.integrations.fused.deferred_heads import defer_head

            work.add("loss", base, defer_head(base))
        if sparse_attention is not None:
            from hf_zero.integrations.fused.sparse_attention import sparsify

            work.add("sparse_attention", model, sparsify(model, sparse_attention))
    if "optimizer" in names and not engine:
        reason = "it is the engine's update; hf_zero.initialize has it"
        work.lines.append(Line(("optimizer",), "optimizer", "", reason))
    if work.replacements or work.lines:
        # first, because pickle meets the attributes in order: its error names the remedy
        others = dict(model.__dict__)
        model.__dict__.clear()
        model.__dict__[RECORD] = Record(work.replacements, Report(tuple(work.lines)))
        model.__dict__.update(others)
        log_rank0(f"fused kernels in {type(model).__name__}:\n{report(model)}")


class _Installation:
    """The kernels ``names`` on their way into ``model``: its methods install them and add what they
    have replaced, and lines of the report. ``packs``: weights of one matrix product are made
    adjacent here, not where an engine lays out parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        compiled: Iterable[nn.Module],
        narrow: Iterable[nn.Module],
        packs: bool,
    ) -> None:
        self.replacements: list[Replacement] = []
        self.lines: list[Line] = []
        self._model, self._names, self._packs = model, names, packs
        self._narrow_blocks = [*narrow]
        self._in_compiled = {module for block in compiled for module in block.modules()}
        self._in_narrow = {module for block in self._narrow_blocks for module in block.modules()}

    def add(
        self, kernel: str, module: nn.Module, result: Replacement | list[Replacement] | str
    ) -> None:
        """Add what ``kernel`` has replaced in ``module``, or why it has replaced nothing."""
        if isinstance(result, str):
            self.lines.append(Line((kernel,), type(module).__name__, "", result))
            return
        for replacement in [result] if isinstance(result, Replacement) else result:
            self.replacements.append(replacement)
            self.lines.append(Line((kernel,), replacement.what, replacement.where))

    def replace_forwards(self, moved: Container[nn.Module], base: nn.Module) -> None:
        """Replace the forwards of modules for which there are kernels, except those of norms that
        are ``moved`` and of modules before the deferred head of ``base``.
        """
        of_head: set[nn.Module] = set()
        if "loss" in self._names:
            from hf_zero.integrations.fused.deferred_heads import deferred_before_head

            of_head = deferred_before_head(base)
        in_compiled = tuple(name for name in self._names if name in IN_COMPILED_BLOCKS)
        for name, module in list(self._model.named_modules()):
            names = in_compiled if module in self._in_compiled else self._names
            if module in self._in_narrow:
                names = ()
            if module not in moved and module not in of_head and not replaced(module):
                for candidate in candidates(module, names, moved):
                    self._replace_forward(module, name, candidate)

    def _replace_forward(self, module: nn.Module, name: str, candidate: FusionCandidate) -> None:
        kind = type(module).__name__
        if candidate.forward is None or "forward" in module.__dict__:
            taken = "something else has replaced its forward"
            reason = candidate.why_not if candidate.forward is None else taken
            self.lines.append(Line(candidate.names, kind, name, reason))
            return
        module.forward = types.MethodType(candidate.forward, module)
        undo = functools.partial(_put_back, module, name, candidate.forward)
        self.replacements.append(Replacement(", ".join(candidate.names), name, undo))
        self.lines.append(Line(candidate.names, kind, name))
        if candidate.packs:
            self._make_adjacent(module, name, candidate.packs)

    def join_projections(self, calls: list[ModuleCall] | str) -> None:
        """Install one matrix product for linear layers of one input, where no forward of ours has
        it already, and not in narrow blocks. ``calls``: the calls of the model, or why they are not
        known.
        """
        if isinstance(calls, str):
            self.lines.append(Line(("qkv",), type(self._model).__name__, "", calls))
            return
        for parent, layers in projections.groups(calls, self._model):
            module = self._model.get_submodule(parent)
            has_qkv = any(line.where == parent and "qkv" in line.kernels for line in self.lines)
            if module in self._in_narrow or (replaced(module) and has_qkv):
                continue
            linears: Any = [self._model.get_submodule(layer) for layer in layers]
            projections.install(linears)
            undo = functools.partial(projections.remove, linears)
            self.replacements.append(Replacement("qkv", parent, undo))
            self.lines.append(Line(("qkv",), type(module).__name__, parent))
            names = tuple(layer.rpartition(".")[2] for layer in layers)
            self._make_adjacent(module, parent, names)

    def _make_adjacent(self, module: nn.Module, name: str, layers: tuple[str, ...]) -> None:
        if self._packs:
            self.replacements.extend(_pack(self._model, module, name, layers))
        else:
            self.replacements.extend(_ask_for_pack(module, name, layers))

    def report_left_out(self) -> None:
        """Add a line for narrow blocks, or for residual sums that no kernel has."""
        if self._narrow_blocks and IN_BLOCKS & {*self._names}:
            self.lines.append(_left_narrow(self._narrow_blocks, self._names))
        elif "residual" in self._names and not any("residual" in x.kernels for x in self.lines):
            reason = "its residual sums are in forwards of whole blocks; compile: blocks fuses them"
            self.lines.append(Line(("residual",), type(self._model).__name__, "", reason))


def _left_narrow(blocks: list[nn.Module], names: tuple[str, ...]) -> Line:
    """Return the line of narrow blocks, in which "auto" installs no kernel."""
    reason = (
        f"{len(blocks)} blocks of width {width_of(blocks[0]):,} are narrow: the GPU would wait for "
        "launches from Python; compile: blocks fuses them, and a list of kernels installs them"
    )
    left = tuple(name for name in names if name in IN_BLOCKS)
    return Line(left, type(blocks[0]).__name__, "", reason)


def _put_back(module: nn.Module, name: str, ours: Callable[..., object]) -> None:
    current = module.__dict__.get("forward")
    if current is None:
        return
    if getattr(current, "__func__", None) is not ours:
        raise KernelError(
            f"the forward of {name} was replaced again after hf_zero.optimize, by a "
            f"{type(current).__name__} of {type(current).__module__}; undo "
            "that (engine.destroy() where an engine has compiled it), then call hf_zero.restore"
        )
    del module.__dict__["forward"]


def _ask_for_pack(module: nn.Module, name: str, layers: tuple[str, ...]) -> Iterator[Replacement]:
    """Request that the engine, when it lays out parameters, makes weights, and biases, adjacent."""
    groups = [tuple(f"{layer}.{part}" for layer in layers) for part in ("weight", "bias")]
    names = {name for name, _ in module.named_parameters()}
    module.__dict__[PACKED] = tuple(pack for pack in groups if names.issuperset(pack))
    yield Replacement("qkv", name, functools.partial(module.__dict__.pop, PACKED, None))


def _pack(
    model: nn.Module, module: nn.Module, name: str, layers: tuple[str, ...]
) -> Iterator[Replacement]:
    """Make weights, and biases, adjacent in memory, so that they form one matrix; parameters owned
    by an engine are left where they are.
    """
    for part in ("weight", "bias"):
        pieces = [getattr(getattr(module, layer), part, None) for layer in layers]
        parameters = [parameter for parameter in pieces if type(parameter) is nn.Parameter]
        if len(parameters) < len(layers) or any(
            p.is_meta or owner_of(p) is not None or source_of(p) is not None for p in parameters
        ):
            continue
        if adjacent(parameters):
            continue
        try:
            pack_(parameters, model)
        except KernelError:
            continue  # different dtypes, or tied: separate GEMMs
        yield Replacement("qkv", f"{name}.{part}", functools.partial(_apart, parameters))


def _apart(parameters: list[nn.Parameter]) -> None:
    """Give each of ``parameters`` separate memory again."""
    for parameter in parameters:
        parameter.data = parameter.data.clone()
