"""Uses of a model's logits: functions of a model that call it, do something with its outputs and
return a number or a text. They are run on an untouched model and on one with deferred logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, ROWS, TOKENS = 64, 2, 12
_generator = torch.Generator().manual_seed(7)
IDS = torch.randint(3, WORDS, (ROWS, TOKENS), generator=_generator)
LABELS = IDS.clone()
LABELS[0, :4] = -100
NEXT = LABELS[:, 1:].reshape(-1)
NO_LABEL = torch.full_like(NEXT, -100)
VECTOR = torch.linspace(0.1, 1.0, WORDS)
TEACHER = torch.randn(ROWS, TOKENS, WORDS, generator=_generator).log_softmax(-1)

Use = Callable[[Any], Any]
USES: dict[str, Use] = {}
COMPILED: dict[str, Use] = {}


class Identity(torch.autograd.Function):
    """A function that torch functions do not reach."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def own(model: Any, **more: Any) -> Any:
    return model(input_ids=IDS, labels=LABELS, **more)


def shifted(made: torch.Tensor) -> torch.Tensor:
    return made[:, :-1].reshape(-1, WORDS)


def ce(made: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.cross_entropy(shifted(made), NEXT, **more)


def ce_of(made: torch.Tensor, **given: Any) -> torch.Tensor:
    return F.cross_entropy(shifted(made), **{"target": NEXT} | given)


def use(function: Use) -> Use:
    USES[function.__name__] = function
    return function


def norms(tensors: Sequence[torch.Tensor]) -> float:
    """Return a number that depends on all ``tensors`` and their order."""
    return sum(at * float(each.detach().norm()) for at, each in enumerate(tensors, 1))


def uses(prefix: str, functions: dict[str, Callable[[torch.Tensor], Any]]) -> None:
    """Add functions of the logits alone."""
    for name, function in functions.items():
        USES[f"{prefix}: {name}"] = lambda model, function=function: function(logits(model))


def capped(made: torch.Tensor) -> torch.Tensor:
    return 2.0 * torch.tanh(made / 0.7 / 2.0)


def masked(made: torch.Tensor, low: float) -> torch.Tensor:
    """Return logits without the last two words, such as those that pad a vocabulary."""
    return made + torch.zeros(WORDS).index_fill(0, torch.tensor([WORDS - 2, WORDS - 1]), low)


def chosen(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each next token, weighted by its position."""
    found = log_probs[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    return (found * torch.linspace(-1.0, 1.0, TOKENS - 1)).mean()


uses(
    "log-probabilities",
    {
        "by gather, capped": lambda x: chosen(capped(x).log_softmax(-1)),
        "of a copy in double": lambda x: chosen(x.double().log_softmax(-1)),
        "by logsumexp, kept": lambda x: x.logsumexp(-1, keepdim=True).square().mean(),
        "by logsumexp, words masked": lambda x: masked(x, -torch.inf).logsumexp(-1).mean(),
        "by logsumexp, words far below": lambda x: masked(x, -1e30).logsumexp(-1).mean(),
        "of a masked word": lambda x: (
            masked(x, -torch.inf)
            .log_softmax(-1)
            .gather(-1, IDS[..., None].where(IDS[..., None] > 9, WORDS - 1))
            .exp()
            .mean()
        ),
        "by an unreduced loss": lambda x: (ce(x, reduction="none") * VECTOR[:22]).sum(),
        "by weights": lambda x: ce(capped(x), weight=VECTOR, reduction="sum"),
    },
)

uses(
    "loss",
    {
        "plain": ce,
        "tokens, then dots": lambda x: F.cross_entropy(x[:, :-1, ...].flatten(0, 1), NEXT),
        "classes in the middle": lambda x: F.cross_entropy(
            x[:, :-1].transpose(1, 2), LABELS[:, 1:]
        ),
        "label smoothing": lambda x: ce(x, label_smoothing=0.1),
        "weights and smoothing": lambda x: ce(x, label_smoothing=0.2, weight=VECTOR),
        "weights of zero": lambda x: ce(x, weight=torch.zeros(WORDS)),
        "sum": lambda x: ce(x, reduction="sum"),
        "distillation": lambda x: F.kl_div(
            F.log_softmax(x, -1), TEACHER, log_target=True, reduction="batchmean"
        ),
        "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        "no rows, unreduced": lambda x: F.cross_entropy(
            x[:, :0].flatten(0, 1), NEXT[:0], VECTOR, reduction="none"
        ).sum(),
        "one label too few": lambda x: F.cross_entropy(shifted(x), NEXT[:-1]),
        "with the largest": lambda x: ce(x) + 0.1 * x.max(-1)[0].sum(),
        "of no label, to a power": lambda x: F.cross_entropy(shifted(x), NO_LABEL).exp(),
        "of no label, smoothed": lambda x: F.cross_entropy(
            shifted(x), NO_LABEL, label_smoothing=0.1
        ).square(),
        "of one token": lambda x: -(x[0, 3].softmax(-1) * x[0, 3].log_softmax(-1)).sum(-1),
        "largest of one token": lambda x: x[0, -1].max(-1)[0] + x[0, -1].argmax(-1),
        "z-loss": lambda x: ce(x) + 1e-2 * x.logsumexp(-1).square().mean(),
    },
)


@use
def labels_of_the_model(model: Any) -> Any:
    return own(model).loss


@use
def items_of_the_step(model: Any) -> Any:
    return own(model, num_items_in_batch=torch.tensor(37)).loss


@use
def step_without_items(model: Any) -> Any:
    labels = torch.full_like(LABELS, -100)
    return model(input_ids=IDS, labels=labels, num_items_in_batch=torch.tensor(0)).loss


@use
def label_smoother_of_the_trainer(model: Any) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)(model(input_ids=IDS), LABELS.clone(), shift_labels=True)


@use
def log_probabilities_of_trl(model: Any) -> Any:
    from trl.trainer.utils import selective_log_softmax

    return -selective_log_softmax(logits(model)[:, :-1] / 0.7, IDS[:, 1:]).mean()


uses(
    "refused",  # by torch, in its words
    {
        "no target": lambda x: ce_of(x, target=None),
        "target in a list": lambda x: ce_of(x, target=NEXT.tolist()),
        "weight in a list": lambda x: ce_of(x, weight=VECTOR.tolist()),
        "weight of logits": lambda x: ce_of(x, weight=x[0, 0].exp()),
        "no smoothing": lambda x: ce_of(x, label_smoothing=None),
        "ignored fraction": lambda x: ce_of(x, ignore_index=0.5),
    },
)


uses(
    "rows",
    {
        "split": lambda x: sum(
            F.cross_entropy(part, labels)
            for part, labels in zip(shifted(x).split(5), NEXT.split(5))
            if (labels != -100).any()
        ),
        "words in two": lambda x: x[:, :1].reshape(ROWS, 1, 8, 8).square().sum(),
        "all words, then dots": lambda x: x[:, :-1, 5:36, ...].logsumexp(-1).mean(),
        "a number, then dots": lambda x: x[0, 1, 3, ...] * 2,
        "places of words, then dots": lambda x: x[:, :, LABELS[0, 4:], ...].square().sum(),
        "a mask of words, then dots": lambda x: x[TEACHER > -4, ...].square().sum(),
        "no index": lambda x: ce(x[()]),
        "a view that torch refuses": lambda x: F.cross_entropy(x[:, :-1].view(-1, WORDS), NEXT),
    },
)
uses(
    "arithmetic",
    {
        "a vector, scaled": lambda x: ce(torch.add(x, VECTOR, alpha=3)),
        "more dimensions": lambda x: (torch.zeros(WORDS, 1, 1) + x[:1, :1]).square().sum(),
        "a row of words": lambda x: (x[:1, :1] + VECTOR.view(1, -1)).square().sum(),
        "torch.div": lambda x: ce(torch.div(x, 2.0)),
        "a soft cap": lambda x: ce(3.0 * torch.tanh(x / 3.0)),
        "a scale, then a vector": lambda x: ce(x * 0.5 + VECTOR),
        "a square by itself": lambda x: (lambda z: (z * z).sum(-1).mean())(x.softmax(-1)),
        "guidance by halves": lambda x: (
            lambda one, other: (other + 1.5 * (one - other)).logsumexp(-1).mean()
        )(*x.chunk(2)),
        "differences of tokens": lambda x: (x[:, 1:] - x[:, :-1]).square().mean(),
        "more dimensions, one element": lambda x: str((x * torch.ones(1, 1, 1, 1)).shape),
    },
)  # fmt: skip


@use
def a_parameter_over_words(model: Any) -> Any:
    model.register_parameter("more", nn.Parameter(torch.zeros(WORDS)))
    return ce(logits(model) + model.more)


@use
def an_output_given(model: Any) -> Any:
    out = torch.empty(ROWS, TOKENS, WORDS)
    with torch.no_grad():
        torch.mul(logits(model), 2.0, out=out)
    return float(out.sum())


@use
def an_output_given_to_softmax(model: Any) -> Any:
    out = [torch.zeros(ROWS, TOKENS, WORDS) for _ in range(2)]
    with torch.no_grad():
        torch.softmax(logits(model), -1, out=out[0])
        torch.log_softmax(logits(model), -1, out=out[1])
    return norms(out)


@use
def written_after_a_view(model: Any) -> Any:
    made = logits(model)
    view = made[:, :-1]
    made.mul_(0.5)
    return F.cross_entropy(view.reshape(-1, WORDS), NEXT)


@use
def written_after_a_copy(model: Any) -> Any:
    made = logits(model)
    double, copied = made * 2, made[:, :-1].clone()
    made.mul_(0.5)
    return ce(double) + F.cross_entropy(copied.reshape(-1, WORDS), NEXT)


@use
def written_through_a_detached_view(model: Any) -> Any:
    with torch.no_grad():
        made = logits(model)
        made.detach().mul_(0.5)
        return float(made.sum())


@use
def words_masked_in_place(model: Any) -> Any:
    made = logits(model)
    made[..., :10] = -1e4
    return F.cross_entropy(shifted(made), torch.where(NEXT < 10, -100, NEXT))


@use
def operands_changed_after_their_use(model: Any) -> Any:
    """Small operands: logits computed later are those of the earlier values."""
    found = []
    with torch.no_grad():
        bias, mask = torch.zeros(WORDS), torch.zeros(WORDS, dtype=torch.bool)
        temperature, places = torch.tensor(2.0), torch.tensor([0, 3, 5])
        rows, kept = torch.ones(ROWS, TOKENS, 1), LABELS != -100
        mask[5:40] = True
        for word in range(2):
            bias[word] = 9.0
            made = (logits(model) + bias).masked_fill(mask, -9.0) / temperature * rows
            found += [made, made[0][places], made.index_select(1, places), made[kept]]
        mask.zero_(), temperature.fill_(0.5), places.add_(1), rows.zero_(), kept.fill_(False)
        numbers = [each.logsumexp(-1).sum() for each in found] + [each.square() for each in found]
    return f"{norms(numbers):.3f}"


@use
def bias_changed_before_the_backward(model: Any) -> Any:
    bias = VECTOR.clone()
    loss = ce(logits(model) + bias)
    bias.zero_()
    return loss


def _dimension(function: Callable[[torch.Tensor], Any]) -> Use:
    def outside(model: Any) -> Any:
        try:
            return function(logits(model))
        except IndexError as error:
            return str(error)

    return outside


for _name, _function in {
    "sum": lambda made: made.sum(5), "softmax": lambda made: made.softmax(-4),
    "select": lambda made: made.select(3, 0), "gather": lambda made: made.gather(5, IDS[..., None]),
    "max": lambda made: made.max(3),
}.items():  # fmt: skip
    USES[f"dimension outside: {_name}"] = _dimension(_function)


@use
def batched_gradients(model: Any) -> Any:
    weight, two = model.lm_head.weight, torch.tensor([1.0, 2.0])
    made = logits(model)
    results = [ce(made), made.logsumexp(-1).sum()]
    return norms(
        [torch.autograd.grad(each, weight, two, True, is_grads_batched=True)[0] for each in results]
    )


@use
def backward_twice(model: Any) -> Any:
    loss = ce(logits(model))
    loss.backward(retain_graph=True)
    return loss


@use
def second_derivative(model: Any) -> Any:
    loss = ce(logits(model))
    (grad,) = torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)
    return loss + grad.square().sum()


@use
def second_derivative_of_log_probabilities(model: Any) -> Any:
    loss = logits(model).logsumexp(-1).mean()
    (grad,) = torch.autograd.grad(loss, model.model.norm.weight, create_graph=True)
    return loss + grad.square().sum()


@use
def gradient_of_the_logits(model: Any) -> Any:
    made = logits(model)
    loss = ce(made / 0.7)
    (grad,) = torch.autograd.grad(loss, made, retain_graph=True)
    loss.backward()
    return float(grad.square().sum())


@use
def gradients_of_two_logits(model: Any) -> Any:
    one, other = logits(model), logits(model)
    loss = ce(one + other) + other.logsumexp(-1).sum()
    return norms(torch.autograd.grad(loss, [one, other, model.lm_head.weight]))


@use
def second_derivative_through_the_logits(model: Any) -> Any:
    made = logits(model)
    (grad,) = torch.autograd.grad(ce(made), made, create_graph=True)
    return grad.square().sum()


@use
def gradient_of_unused_logits(model: Any) -> Any:
    made, other = logits(model), logits(model)
    loss = ce(made)
    (kept,) = torch.autograd.grad(loss, other, retain_graph=True, allow_unused=True)
    (zero,) = torch.autograd.grad(loss, other, retain_graph=True, materialize_grads=True)
    assert kept is None and zero.shape == other.shape
    try:
        return norms(torch.autograd.grad(loss, [made, other]))
    except RuntimeError as error:
        return "appears to not have been used in the graph" in str(error)


@use
def gradient_kept(model: Any) -> Any:
    made = logits(model)
    made.retain_grad()
    ce(made).backward()
    return float(made.grad.norm())  # type: ignore[union-attr]


@use
def read_without_gradients_then_in_another_way(model: Any) -> Any:
    made = logits(model)
    with torch.no_grad():
        made.softmax(-1)
    return F.nll_loss(F.log_softmax(shifted(made), -1), NEXT)


@use
def head_alone_trains(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return ce(logits(model))


@use
def head_is_frozen(model: Any) -> Any:
    model.lm_head.weight.requires_grad_(False)
    return ce(logits(model))


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad  # type: ignore[no-any-return]


uses("autograd", {
    "a function": Squares.apply,
})  # fmt: skip


@use
def saved_on_the_host(model: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return own(model).loss


@use
def autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return own(model).loss


@use
def autocast_before_a_function(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        made = logits(model)
        double = made * 2
    return Squares.apply(double) + Squares.apply(made)


@use
def half_precision(model: Any) -> Any:
    loss = ce(logits(model.bfloat16()))
    loss.backward()
    return str(loss.dtype)


uses(
    "read",
    {
        "metadata": lambda x: str(
            (isinstance(x, torch.Tensor), x.shape, x.stride(), x.is_contiguous(),
             x.storage_offset(), x.numel(), len(x), x.ndim, x.device, x.is_floating_point())
        ),
        "an item": lambda x: x[0, 0, 0].item(),
        "repr": lambda x: repr(x)[:40],
        "vmap": lambda x: float(torch.vmap(lambda row: row.sum())(x).detach().sum()),
        "to a device": lambda x: float(x.detach().to("cpu", copy=True).sum()),
    },
)  # fmt: skip


def distributed(model: Any, **more: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **more)


@use
def data_parallel(model: Any) -> Any:
    return own(distributed(model)).loss


@use
def checkpointed_head(model: Any) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    return own(model).loss


@use
def checkpointed_layers(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return own(model).loss


@use
def checkpointed_model_reentrant(model: Any) -> Any:
    return ce(checkpoint(lambda x: model(inputs_embeds=x).logits, model.model.embed_tokens(IDS),
                         use_reentrant=True))  # fmt: skip


@use
def other_parameters(model: Any) -> Any:
    others = {name: each * 1.5 for name, each in model.named_parameters()}
    return ce(functional_call(model, others, (), {"input_ids": IDS}).logits)


@use
def functional_gradient(model: Any) -> Any:
    def loss(parameters: Any) -> torch.Tensor:
        return ce(functional_call(model, parameters, (), {"input_ids": IDS}).logits)

    grads = torch.func.grad(loss)({k: v.detach() for k, v in model.named_parameters()})
    return float(grads["lm_head.weight"].norm())


@use
def evaluation(model: Any) -> Any:
    with torch.no_grad():
        outputs = own(model.eval())
    return str((round(float(outputs.loss), 5), round(float(outputs.logits.sum()), 3)))


@use
def generation(model: Any) -> Any:
    return str(model.eval().generate(IDS[:, :4], max_new_tokens=3, do_sample=False).tolist())


@use
def a_copy_of_the_model(model: Any) -> Any:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
    loss = ce(logits(model))
    return loss + float(ce(logits(copied)).detach())


@use
def some_logits(model: Any) -> Any:
    return F.cross_entropy(model(input_ids=IDS, logits_to_keep=4).logits[:, :-1].flatten(0, 1),
                           LABELS[:, -3:].flatten())  # fmt: skip


def compiled(**settings: Any) -> Use:
    return lambda model: own(torch.compile(model, **settings)).loss


COMPILED.update({
    "the model in one graph": compiled(backend="eager", fullgraph=True),
    "the loss": lambda model: torch.compile(ce, backend="aot_eager")(logits(model)),
})  # fmt: skip
