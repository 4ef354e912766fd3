"""Uses of a model's logits: functions of a model that call it, do something with its outputs and
return a number or a text. They are run on an untouched model and on one with deferred logits.
"""

from __future__ import annotations

import copy
import io
import pickle
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


# ---- losses ----


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
        "by gather": lambda x: chosen(x.log_softmax(-1)),
        "by gather, capped": lambda x: chosen(capped(x).log_softmax(-1)),
        "by gather, in double": lambda x: chosen(x.log_softmax(-1, dtype=torch.float64)),
        "of a copy in double": lambda x: chosen(x.double().log_softmax(-1)),
        "by logsumexp": lambda x: (capped(x).logsumexp(-1) * VECTOR[:TOKENS]).mean(),
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
        "by nll_loss": lambda x: F.nll_loss(shifted(x).log_softmax(-1), NEXT, reduction="none")[
            5:
        ].mean(),
    },
)

uses(
    "loss",
    {
        "plain": ce,
        "nll of log_softmax": lambda x: F.nll_loss(shifted(x.float().log_softmax(-1)), NEXT),
        "shift, contiguous, view": lambda x: F.cross_entropy(
            x[..., :-1, :].contiguous().view(-1, WORDS), NEXT
        ),
        "a loss module": lambda x: nn.CrossEntropyLoss()(
            x[..., :-1, :].contiguous().view(-1, WORDS), NEXT
        ),
        "weights by position": lambda x: F.cross_entropy(shifted(x), NEXT, VECTOR),
        "all by name": lambda x: F.cross_entropy(input=shifted(x), target=NEXT),
        "classes in the middle": lambda x: F.cross_entropy(
            x[:, :-1].transpose(1, 2), LABELS[:, 1:]
        ),
        "one token": lambda x: F.cross_entropy(x[0, 5], LABELS[0, 6]),
        "label smoothing": lambda x: ce(x, label_smoothing=0.1),
        "weights and smoothing": lambda x: ce(x, label_smoothing=0.2, weight=VECTOR),
        "weights of zero": lambda x: ce(x, weight=torch.zeros(WORDS)),
        "weights of zero and smoothing": lambda x: ce(
            x,
            weight=(torch.arange(WORDS) < 3).float(),
            label_smoothing=0.2,  # no label is below 3
        ),
        "weights, and no label counts": lambda x: F.cross_entropy(
            shifted(x), torch.full_like(NEXT, -100), VECTOR
        ),
        "unreduced": lambda x: ce(x, reduction="none").mean(),
        "sum": lambda x: ce(x, reduction="sum"),
        "probabilities as targets": lambda x: F.cross_entropy(
            shifted(x), TEACHER[:, 1:].exp().reshape(-1, WORDS)
        ),
        "distillation": lambda x: F.kl_div(
            F.log_softmax(x, -1), TEACHER, log_target=True, reduction="batchmean"
        ),
        "entropy": lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        "selected log-probabilities": lambda x: (
            (x / 0.7)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0] - (x / 0.7)[:, :-1].logsumexp(-1)
        ).mean(),
        "no rows": lambda x: F.cross_entropy(x[:0].reshape(-1, WORDS), NEXT[:0], reduction="sum"),
        "no rows, unreduced": lambda x: F.cross_entropy(
            x[:, :0].flatten(0, 1), NEXT[:0], VECTOR, reduction="none"
        ).sum(),
        "no label counts": lambda x: F.cross_entropy(shifted(x), torch.full_like(NEXT, -100)),
        "a label outside": lambda x: F.cross_entropy(shifted(x), NEXT.where(NEXT != 5, 999)),
        "one label too few": lambda x: F.cross_entropy(shifted(x), NEXT[:-1]),
        "two losses": lambda x: (
            ce(x) + F.cross_entropy(x[:, :-2].reshape(-1, WORDS), LABELS[:, 2:].reshape(-1))
        ),
        "with a metric": lambda x: ce(x) + 0 * (x.argmax(-1)[:, :-1] == LABELS[:, 1:]).sum(),
        "with the largest": lambda x: ce(x) + 0.1 * x.max(-1)[0].sum(),
        "with a detached sum": lambda x: ce(x) + 0 * x.detach().sum(),
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
def a_tuple(model: Any) -> Any:
    return own(model, return_dict=False)[0]


@use
def label_smoother_of_the_trainer(model: Any) -> Any:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)(model(input_ids=IDS), LABELS.clone(), shift_labels=True)


@use
def log_probabilities_of_trl(model: Any) -> Any:
    from trl.trainer.utils import selective_log_softmax

    return -selective_log_softmax(logits(model)[:, :-1] / 0.7, IDS[:, 1:]).mean()


# ---- shapes, selections, arithmetic ----

uses(
    "rows",
    {
        "clone": lambda x: ce(x.clone()),
        "from the end": lambda x: F.cross_entropy(
            x[:, -3:-1].reshape(-1, WORDS), LABELS[:, -2:].reshape(-1)
        ),
        "a mask": lambda x: F.cross_entropy(
            x[:, :-1][LABELS[:, 1:] != -100], LABELS[:, 1:][LABELS[:, 1:] != -100]
        ),
        "flatten": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), NEXT),
        "a new dimension": lambda x: F.cross_entropy(x[None, :, :-1].reshape(-1, WORDS), NEXT),
        "split": lambda x: sum(
            F.cross_entropy(part, labels)
            for part, labels in zip(shifted(x).split(5), NEXT.split(5))
            if (labels != -100).any()
        ),
        "unbound": lambda x: torch.stack([row.logsumexp(-1) for row in x]).sum(),
        "a view over words": lambda x: x.view(ROWS, -1).square().mean(),
        "words in two": lambda x: x[:, :1].reshape(ROWS, 1, 8, 8).square().sum(),
        "a view that torch refuses": lambda x: F.cross_entropy(x[:, :-1].view(-1, WORDS), NEXT),
        "words alone": lambda x: x[..., 3:9].square().mean(),
        "concatenated": lambda x: ce(torch.cat([x, x])[:ROWS]),
    },
)
uses(
    "arithmetic",
    {
        "a vector over words": lambda x: ce(x + VECTOR),
        "a vector, scaled": lambda x: ce(torch.add(x, VECTOR, alpha=3)),
        "by row and word": lambda x: ce(x + torch.linspace(0, 1, TOKENS).view(1, -1, 1) * VECTOR),
        "more dimensions": lambda x: (torch.zeros(WORDS, 1, 1) + x[:1, :1]).square().sum(),
        "a row of words": lambda x: (x[:1, :1] + VECTOR.view(1, -1)).square().sum(),
        "reversed division": lambda x: (1.0 / (x + 3.0)).mean(),
        "division by logits": lambda x: torch.div(torch.ones(()), x[:, :-1].exp() + 1).sum(),
        "torch.div": lambda x: ce(torch.div(x, 2.0)),
        "a soft cap": lambda x: ce(3.0 * torch.tanh(x / 3.0)),
        "a scale, then a vector": lambda x: ce(x * 0.5 + VECTOR),
        "more dimensions, one element": lambda x: str((x * torch.ones(1, 1, 1, 1)).shape),
        "promotion": lambda x: str(
            ((x * torch.ones(1, dtype=torch.float64)).dtype,
             (x * torch.tensor(1.0, dtype=torch.float64)).dtype)
        ),
    },
)  # fmt: skip


@use
def a_parameter_over_words(model: Any) -> Any:
    model.register_parameter("more", nn.Parameter(torch.zeros(WORDS)))
    return ce(logits(model) + model.more)


@use
def a_learned_temperature(model: Any) -> Any:
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.3)))
    return ce(logits(model) * model.temperature)


@use
def an_output_given(model: Any) -> Any:
    out = torch.empty(ROWS, TOKENS, WORDS)
    with torch.no_grad():
        torch.mul(logits(model), 2.0, out=out)
    return float(out.sum())


# ---- writes ----


@use
def divided_in_place(model: Any) -> Any:
    made = logits(model)[:, :-1]
    made /= 0.7
    return F.cross_entropy(made.reshape(-1, WORDS), NEXT)


@use
def divided_by_a_method(model: Any) -> Any:
    made = logits(model)[:, :-1]
    made.div_(0.7)
    return F.cross_entropy(made.reshape(-1, WORDS), NEXT)


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
def clone_by_keyword(model: Any) -> Any:
    return torch.clone(input=logits(model)).sum()


# ---- autograd ----


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
def gradient_of_a_loss_in_chunks_and_of_values(model: Any) -> Any:
    made = logits(model)
    loss = ce(made) + made.square().mean() + made.topk(3)[0].sum()
    return norms(torch.autograd.grad(loss, made))


@use
def gradient_of_the_logits_after_they_were_read(model: Any) -> Any:
    outputs = own(model)
    outputs.logits.sum()
    return norms(torch.autograd.grad(outputs.loss, outputs.logits))


@use
def gradients_of_two_logits(model: Any) -> Any:
    one, other = logits(model), logits(model)
    loss = ce(one + other) + other.logsumexp(-1).sum()
    return norms(torch.autograd.grad(loss, [one, other, model.lm_head.weight]))


@use
def gradients_of_the_logits_themselves(model: Any) -> Any:
    made = logits(model)
    double = made * 2
    return norms(
        torch.autograd.grad(double, made, TEACHER, retain_graph=True)
        + torch.autograd.grad(made, list(model.parameters()), TEACHER)
    )


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
def hook_on_the_logits(model: Any) -> Any:
    made, seen = logits(model), []
    made.register_hook(lambda grad: seen.append(1) or grad * 2)
    ce(made).backward()
    return len(seen)


@use
def facts_of_autograd(model: Any) -> Any:
    made = logits(model)
    with torch.no_grad():
        inside = made * 2
    facts = [made, made.detach(), made[:, 1:], made * 2, inside]
    return str([(x.requires_grad, x.is_leaf, x.grad_fn is None) for x in facts])


@use
def read_without_gradients(model: Any) -> Any:
    made = logits(model)
    with torch.no_grad():
        made.float().sum()
    return ce(made)


@use
def read_without_gradients_then_in_another_way(model: Any) -> Any:
    made = logits(model)
    with torch.no_grad():
        made.softmax(-1)
    return F.nll_loss(F.log_softmax(shifted(made), -1), NEXT)


@use
def read_in_inference_mode(model: Any) -> Any:
    made = logits(model)
    with torch.inference_mode():
        float(made.softmax(-1).sum())
    return F.nll_loss(F.log_softmax(shifted(made), -1), NEXT) + made.square().mean()


@use
def head_alone_trains(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return ce(logits(model))


@use
def head_is_frozen(model: Any) -> Any:
    model.lm_head.weight.requires_grad_(False)
    return ce(logits(model))


@use
def losses_of_two_forwards(model: Any) -> Any:
    return sum(ce(each) for each in [logits(model) for _ in range(2)])


@use
def concatenated_forwards(model: Any) -> Any:
    made = torch.cat([logits(model) for _ in range(2)])
    return F.cross_entropy(shifted(made), NEXT.repeat(2))


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
    "a function of a view": lambda x: Squares.apply(x[:, 1:]),
    "a function of a product": lambda x: Squares.apply(x * 2),
})  # fmt: skip


@use
def anomalies(model: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        loss = own(model).loss
        loss.backward()
    return loss.detach()


@use
def saved_on_the_host(model: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return own(model).loss


# ---- dtypes ----


@use
def autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return own(model).loss


@use
def autocast_dtypes(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        made = logits(model)
    return str((made.dtype, made.float().dtype, made.log_softmax(-1).dtype))


@use
def autocast_before_the_loss(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        made = logits(model)
    return ce(made.float())


@use
def autocast_before_a_function(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        made = logits(model)
        double = made * 2
    return Squares.apply(double) + Squares.apply(made)


@use
def autocast_entered_before_reading(model: Any) -> Any:
    made = logits(model)
    double = made.log_softmax(-1) * 2
    with torch.autocast("cpu", torch.bfloat16):
        return made.topk(3)[0].sum() + double.topk(3)[0].sum() + double.logsumexp(-1).sum()


@use
def half_precision(model: Any) -> Any:
    loss = ce(logits(model.bfloat16()))
    loss.backward()
    return str(loss.dtype)


@use
def half_precision_dtypes(model: Any) -> Any:
    made = logits(model.bfloat16())
    return str((made.float().dtype, made.to(torch.float32).dtype, made.type(), (made * 2).dtype))


@use
def outputs_in_full_precision(model: Any) -> Any:
    from accelerate.utils.operations import convert_outputs_to_fp32

    model.bfloat16()
    model.forward = convert_outputs_to_fp32(model.forward)
    outputs = own(model)
    outputs.loss.backward()
    return str((outputs.logits.dtype, outputs.loss.dtype))


# ---- reads of values ----


def saved(made: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(made.detach(), file)
    file.seek(0)
    return type(torch.load(file, weights_only=True)).__name__


uses(
    "read",
    {
        "metadata": lambda x: str(
            (isinstance(x, torch.Tensor), x.shape, x.stride(), x.is_contiguous(),
             x.storage_offset(), x.numel(), len(x), x.ndim, x.device, x.is_floating_point())
        ),
        "numpy": lambda x: float(x.detach().numpy().sum()),
        "an item": lambda x: x[0, 0, 0].item(),
        "a list": lambda x: sum(x[0, 0].tolist()),
        "repr": lambda x: repr(x)[:40],
        "pickle": lambda x: float(pickle.loads(pickle.dumps(x.detach())).sum()),
        "deepcopy": lambda x: float(copy.deepcopy(x.detach()).sum()),
        "torch.save": saved,
        "vmap": lambda x: float(torch.vmap(lambda row: row.sum())(x).detach().sum()),
        "dlpack": lambda x: float(torch.from_dlpack(x.detach()).sum()),
        "to a device": lambda x: float(x.detach().to("cpu", copy=True).sum()),
        "top words": lambda x: str(x.topk(3).indices.tolist()),
    },
)  # fmt: skip


@use
def detached_by_the_trainer(model: Any) -> Any:
    from transformers.trainer_pt_utils import nested_detach

    return float(nested_detach(logits(model)).sum())


@use
def gathered_by_accelerate(model: Any) -> Any:
    from accelerate.utils.operations import gather, pad_across_processes

    return float(gather(pad_across_processes(logits(model).detach(), 1)).sum())


@use
def mapped_as_a_tree(model: Any) -> Any:
    from torch.utils._pytree import tree_map

    outputs = tree_map(
        lambda x: x * 1 if isinstance(x, torch.Tensor) else x, model(input_ids=IDS, use_cache=False)
    )
    return ce(outputs.logits)


# ---- hooks, wrappers, transforms ----


def distributed(model: Any, **more: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **more)


@use
def data_parallel(model: Any) -> Any:
    return own(distributed(model)).loss


@use
def data_parallel_logits(model: Any) -> Any:
    return ce(logits(distributed(model)))


@use
def data_parallel_with_unused(model: Any) -> Any:
    return ce(logits(distributed(model, find_unused_parameters=True)))


@use
def hook_on_the_head(model: Any) -> Any:
    seen = []
    model.lm_head.register_forward_hook(lambda *given: seen.append(float(given[2].detach().norm())))
    own(model).loss.backward()
    return seen[0]


@use
def backward_hook_on_the_head(model: Any) -> Any:
    seen = []
    model.lm_head.register_full_backward_hook(lambda *given: seen.append(float(given[2][0].norm())))
    own(model).loss.backward()
    return sum(seen)


@use
def checkpointed_head(model: Any) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: checkpoint(plain, x, use_reentrant=False)
    return own(model).loss


@use
def checkpointed_head_reentrant(model: Any) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: checkpoint(plain, x, use_reentrant=True)
    return own(model).loss


@use
def checkpointed_layers(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return own(model).loss


@use
def checkpointed_model(model: Any) -> Any:
    return ce(checkpoint(lambda x: model(inputs_embeds=x).logits, model.model.embed_tokens(IDS),
                         use_reentrant=False))  # fmt: skip


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
def generation_in_training(model: Any) -> Any:
    return str(model.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).tolist())


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


# ---- compiled ----


def compiled(**settings: Any) -> Use:
    return lambda model: own(torch.compile(model, **settings)).loss


COMPILED.update({
    "the model": compiled(backend="eager"),
    "the model and its backward": compiled(backend="aot_eager"),
    "the model in one graph": compiled(backend="aot_eager", fullgraph=True),
    "the loss": lambda model: torch.compile(ce, backend="aot_eager")(logits(model)),
})  # fmt: skip
