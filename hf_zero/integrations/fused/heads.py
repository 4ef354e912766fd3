"""Heads that compute their loss without whole logits, on unmodified models of transformers.

[Note: how a head gets the labels]
The model's own forward runs without labels. It calls its head as a module, so hooks on the head
fire: at stage 3 they gather the weight. The labels wait on an object attached to this model: the
module that makes logits returns the loss instead, a scalar. Later operations of the model on it (a
scale, a soft-capping) are discarded, because the loss already includes them. The head of a masked
language model drops rows without a label at its first module. Without labels, outside training,
without gradients, or when the head is no longer the fused one (an adapter wraps it), everything
runs as if nothing had been replaced.

[Note: logits that are read]
In training with labels there are no logits until ``outputs.logits`` is read, by a script for an
accuracy next to the loss, or for a loss of its own in ``Trainer.compute_loss``. The read runs the
head on the hidden states of the loss, with gradients. The outputs have no logits as a key, in a
tuple, or in a copy (a flattened and rebuilt pytree). Evaluation and prediction have them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_zero.errors import KernelError
from hf_zero.integrations.fused.replacement import Replacement
from hf_zero.logging import log_rank0
from hf_zero.ops.linear_cross_entropy import linear_cross_entropy
from hf_zero.ops.masked_rows import RowCapacity, RowCount, select_rows

MAKER = "_hf_zero_make_logits"
IGNORED = -100  # the default ignore_index of transformers' losses


@dataclass(frozen=True)
class Head:
    """The head of a class of models, which makes logits of hidden states."""

    decoder: str  # path of the linear layer
    # first module of the head to get the hidden states, where rows may be dropped
    entry: str = ""
    shifted: bool = False  # token n is predicted from n − 1
    decodes: bool = False  # labels are shifted into the decoder's inputs
    scale: Callable[[Any], float] = lambda model: 1.0
    softcap: Callable[[Any], float | None] = lambda model: None
    # operations of the model's forward between the entry and the decoder
    between: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    legacy: bool = False  # only models with legacy=True, the former kind of head


def _softcap(model: Any) -> float | None:
    return model.config.final_logit_softcapping


CAUSAL = Head("lm_head", shifted=True)
CAPPED = Head("lm_head", shifted=True, softcap=_softcap)
HEADS = {
    **dict.fromkeys(
        [
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "GemmaForCausalLM",
        ],
        CAUSAL,
    ),
    **dict.fromkeys(
        ["PhiForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel"], CAUSAL
    ),
    **dict.fromkeys(["Gemma2ForCausalLM", "Gemma3ForCausalLM"], CAPPED),
    **dict.fromkeys(
        ["CohereForCausalLM", "Cohere2ForCausalLM"],
        Head("lm_head", shifted=True, scale=lambda model: float(model.logit_scale)),
    ),
    "GraniteForCausalLM": Head(
        "lm_head", shifted=True, scale=lambda model: 1.0 / model.config.logits_scaling
    ),
    "BertForMaskedLM": Head("cls.predictions.decoder", entry="cls"),
    "DebertaV2ForMaskedLM": Head("cls.predictions.decoder", entry="cls", legacy=True),
    "RobertaForMaskedLM": Head("lm_head.decoder", entry="lm_head"),
    "DistilBertForMaskedLM": Head(
        "vocab_projector",
        entry="vocab_transform",
        between=lambda model, hidden: model.vocab_layer_norm(model.activation(hidden)),
    ),
    "T5ForConditionalGeneration": Head("lm_head", decodes=True),
}


def fuse_head(model: nn.Module, *, sparse: bool = True) -> Replacement | str:
    """Make ``model`` compute its loss by :func:`linear_cross_entropy`, or return the reason why
    not.

    ``model`` may be a wrapper such as PEFT's. ``sparse``: the head of a masked language model drops
    rows without a label. Gradient and loss equal those of the original model, except that a masked
    language model or T5 given ``num_items_in_batch`` divides by it, which transformers' own do not.
    """
    inside = next(
        (
            (name, module, owner)
            for name, module in model.named_modules()
            if (owner := _owner(module)).__name__ in HEADS
        ),
        None,
    )
    if inside is None:
        return f"no fused head for {_owner(model).__name__}"
    place, model, owner = inside
    head = HEADS[owner.__name__]
    if head.legacy and not getattr(model, "legacy", True):
        return f"{owner.__name__} with legacy=False multiplies by the embedding itself"
    if "forward" in model.__dict__ and (
        other := _other_than(owner.__dict__["forward"], model.__dict__["forward"])
    ):
        return f"the model's forward is another one already, of {other}"
    decoder, entry = model.get_submodule(head.decoder), model.get_submodule(head.entry)
    if type(decoder) is not nn.Linear:
        return (
            f"{head.decoder} is a {type(decoder).__name__} of {type(decoder).__module__}, not a "
            "linear layer of torch"
        )
    if "forward" in decoder.__dict__ or (head.entry and "forward" in entry.__dict__):
        return (
            f"{head.decoder if 'forward' in decoder.__dict__ else head.entry} has a "
            "forward of its own already"
        )
    if head.shifted and not _loss_is_its_own(model):
        return "the model has a loss function of its own"
    fused = FusedHead(model, head, sparse and bool(head.entry))
    fused.install()
    what = "masked_rows, linear_cross_entropy" if fused.sparse else "linear_cross_entropy"
    return Replacement(what, f"{place}.{head.decoder}".lstrip("."), fused.undo)


def _owner(module: nn.Module) -> type:
    """Return the class of transformers that defines the forward of ``module``, or its own class."""
    owner = next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)
    return owner if owner.__module__.startswith("transformers.models.") else type(module)


# Modules whose wrappers pass arguments through unchanged: autocast, and outputs in fp32.
_TRANSPARENT = ("accelerate.", "torch.", __name__)


def _other_than(own: Callable[..., Any], forward: Any) -> str:
    """Return the module of the code that ``forward`` runs instead of ``own``, or "" if it is
    ``own`` inside wrappers that change no argument.

    ``functools.wraps`` alone proves nothing: TRL's fused head sets ``__wrapped__`` to the model's
    forward, and takes arguments of its own.
    """
    while True:
        forward = getattr(forward, "__func__", forward)
        if forward is own:
            return ""
        home = getattr(forward, "__globals__", {}).get("__name__") or type(forward).__module__
        inside = getattr(forward, "__wrapped__", None)
        if inside is None or not home.startswith(_TRANSPARENT):
            return str(home)
        forward = inside


def _loss_is_its_own(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


@dataclass(eq=False)
class _PendingLoss:
    """Labels passed to the head, and the loss passed back."""

    labels: torch.Tensor
    num_items: int | torch.Tensor | None
    ignore_index: int
    loss: torch.Tensor | None = None
    hidden: torch.Tensor | None = None  # input of the head: [batch, tokens, hidden]
    # number of labels that are not ignored; None if the head processes all rows
    count: RowCount | None = None


class FusedHead:
    """The replaced forwards of one model.

    Each instance is an attribute of the model and of the two modules, so a copy of the model has
    its own.
    """

    def __init__(self, model: nn.Module, head: Head, sparse: bool):
        self.model, self.head, self.sparse = model, head, sparse
        self.decoder = model.get_submodule(head.decoder)
        self.entry = model.get_submodule(head.entry) if sparse else None
        self.capacity = RowCapacity()
        self.enabled = True
        self.told = False
        self.pending: _PendingLoss | None = None
        self.before: MethodType | None = model.__dict__.get("forward")
        self.names = list(inspect.signature(model.forward).parameters)
        self.installed: MethodType | None = None

    def install(self) -> None:
        # the Trainer reads the signature to find the columns that a model takes
        @functools.wraps(type(self.model).forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            return model._hf_zero_head.run(args, kwargs)

        self.model._hf_zero_head = self  # type: ignore[assignment]
        self.model.forward = self.installed = MethodType(forward, self.model)
        for module, stand_in in ((self.decoder, _decode), (self.entry, _enter)):
            if module is not None:
                module._hf_zero_head = self  # type: ignore[assignment]
                module.forward = MethodType(stand_in, module)

    def undo(self) -> None:
        self.enabled = False
        if self.installed is None or self.model.__dict__.get("forward") is not self.installed:
            # undone already; or wrapped since, and the wrapper now runs the plain forward through
            # us
            return
        if self.before is None:
            del self.model.forward
        else:
            self.model.forward = self.before
        self.installed = None
        for module in (self.model, self.decoder, self.entry):
            if module is not None:
                module.__dict__.pop("_hf_zero_head", None)
        for module in (self.decoder, self.entry):
            if module is not None:
                module.__dict__.pop("forward", None)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return (
            type(self.model).forward(self.model, *args, **kwargs)
            if self.before is None
            else self.before(*args, **kwargs)
        )

    def _is_in_place(self) -> bool:
        """Return whether the model still calls the replaced modules: adapters may have wrapped
        them.
        """
        model, head = self.model, self.head
        if model.get_submodule(head.decoder) is not self.decoder:
            return False
        return self.entry is None or model.get_submodule(head.entry) is self.entry

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward; with labels in training, compute the loss in the head."""
        given = {**dict(zip(self.names, args)), **kwargs}
        labels, model = given.get("labels"), self.model
        if labels is None or not (self.enabled and model.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        keep = given.get("logits_to_keep", 0)
        if (
            not (isinstance(keep, int) and keep == 0)
            or not self._is_in_place()
            or (self.head.shifted and not _loss_is_its_own(model))
        ):
            return self.plain(*args, **kwargs)
        del given["labels"]
        if (
            self.head.decodes
            and given.get("decoder_input_ids") is None
            and given.get("decoder_inputs_embeds") is None
        ):
            given["decoder_input_ids"] = model._shift_right(labels)  # type: ignore[operator]
        if self.head.shifted:
            shifted = given.get("shift_labels")
            labels = (
                F.pad(labels, (0, 1), value=given.get("ignore_index", IGNORED))[..., 1:]
                if shifted is None
                else shifted
            )
        asked = given.pop("return_dict", None)
        as_dict = model.config.return_dict if asked is None else asked  # type: ignore[union-attr]
        items = given.get("num_items_in_batch")
        if items is not None and not self.head.shifted and not self.told:
            self.told = True
            log_rank0(
                f"{type(model).__name__} is given num_items_in_batch, which it ignores by itself: "
                "its loss would be that of each micro-batch, "
                "summed over the window and multiplied by the ranks. The fused head divides by it, "
                "so what is logged is the mean"
            )
        ignored = given.get("ignore_index", IGNORED)
        counted = (
            RowCount(labels, ignored) if self.sparse and not torch.compiler.is_compiling() else None
        )
        self.pending = pending = _PendingLoss(labels, items, ignored, count=counted)
        try:
            outputs = self.plain(**given, return_dict=True)
        finally:
            self.pending = None
        loss = pending.loss
        if loss is None:
            raise KernelError(
                f"{type(model).__name__} has not called its head {self.head.decoder}, so there is "
                "no loss; undo the fused head with "
                "hf_zero.restore(model) if something else replaces the model's forward"
            )
        if outputs.get("aux_loss") is not None:
            loss = loss + model.router_aux_loss_coef * outputs["aux_loss"].to(loss.device)
        kept = {name: value for name, value in outputs.items() if name not in ("loss", "logits")}
        outputs = type(outputs)(loss=loss, **kept)
        if not as_dict:
            return outputs.to_tuple()
        hidden = pending.hidden
        if hidden is None or torch.compiler.is_compiling():
            return outputs
        kind = hidden.device.type
        cast = functools.partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )
        return with_late_logits(outputs, functools.partial(self.logits, hidden, cast))

    def logits(self, hidden: torch.Tensor, cast: Callable[[], Any]) -> torch.Tensor:
        """Return the logits of the plain model: [batch, tokens, vocabulary]. Collective at stage 3,
        like every call of a module.

        ``cast`` is the autocast context of the forward that produced ``hidden``, which may have
        ended.
        """
        scale, cap = self.head.scale(self.model), self.head.softcap(self.model)
        with cast():
            if self.entry is None:
                made = self.decoder(hidden)
            elif self.head.between is None:
                made = self.entry(hidden)
            else:
                made = self.decoder(self.head.between(self.model, self.entry(hidden)))
            if scale != 1.0:
                made = made * scale
            return made if cap is None else cap * torch.tanh(made / cap)


def _decode(decoder: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Replaced forward of the decoder: return the loss while labels are pending, else the
    logits.
    """
    fused: FusedHead = decoder._hf_zero_head
    pending, model = fused.pending, fused.model
    if pending is None:
        return nn.Linear.forward(decoder, hidden)
    if pending.hidden is None:
        pending.hidden = hidden
    pending.loss = linear_cross_entropy(
        hidden,
        decoder.weight,
        pending.labels.to(hidden.device),
        bias=decoder.bias,
        ignore_index=pending.ignore_index,
        softcap=fused.head.softcap(model),
        scale=fused.head.scale(model),
        num_items=pending.num_items,
    )
    return pending.loss


def _enter(entry: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaced forward of the head's first module: while labels are pending, it keeps only the
    hidden states of tokens with a label.
    """
    fused: FusedHead = entry._hf_zero_head
    pending = fused.pending
    if pending is not None:
        pending.hidden = hidden
        places = (
            fused.capacity.places(pending.count, hidden.device)
            if pending.count is not None
            else pending.labels.numel()
        )
        if places < pending.labels.numel():
            labels, rows = (
                pending.labels.to(hidden.device).reshape(-1),
                hidden.reshape(-1, hidden.shape[-1]),
            )
            hidden, pending.labels, _ = select_rows(
                rows, labels, ignore_index=pending.ignore_index, capacity=places
            )
    return type(entry).forward(entry, hidden, *args, **kwargs)


def with_late_logits(outputs: Any, make: Callable[[], Any]) -> Any:
    """Return ``outputs``, an instance of a ModelOutput without logits, whose attribute ``logits``
    calls ``make()`` once, on demand.
    """
    kind: Callable[..., Any] = type(outputs)  # mypy considers a type unhashable
    outputs.__class__ = _kind(kind)
    outputs.__dict__[MAKER] = make
    return outputs


@functools.cache
def _kind(kind: Callable[..., Any]) -> Any:
    """Return the subclass of ``kind`` that computes logits on demand, under the same name."""
    return type(
        kind.__name__,
        (kind,),  # type: ignore[arg-type]
        {
            "__module__": kind.__module__,
            "logits": property(_read, _write),
            "__repr__": _shown,
            "__reduce__": _without,
        },
    )


def _read(outputs: Any) -> Any:
    make = outputs.__dict__.pop(MAKER, None)
    if make is not None:
        outputs.__dict__["logits"] = make()
    return outputs.__dict__.get("logits")


def _shown(outputs: Any) -> str:
    """Return a repr without unread logits: at stage 3 a single rank that prints its outputs would
    wait for the others.
    """
    fields = ", ".join(f"{name}={value!r}" for name, value in outputs.items())
    return f"{type(outputs).__name__}({fields})"


def _without(outputs: Any) -> tuple[Any, ...]:
    return functools.partial(type(outputs).__bases__[0], **outputs), ()


def _write(outputs: Any, value: Any) -> None:
    outputs.__dict__["logits"] = value
