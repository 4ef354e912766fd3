"""``tensor_parallel.verify``: compare the first forward and backward of a cut model with those of
the whole model on each rank.

A copy without values is made before the cut. In the first forward in training it receives the whole
values and reads the same inputs; the gradients that the backward brings to the outputs of the model
are propagated through it, too. So no loss is computed twice, whatever scales it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_zero.config.sections import VERIFY
from hf_zero.device.free_memory import free_bytes
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError, DoesNotFitError, VerificationError
from hf_zero.logging import in_units, log_rank0
from hf_zero.parallel.tensor.axis import TensorAxis
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.tree import map_tensors, tensors_in

# A gradient that lacks a sum is off by half or more; another rounding order by less than these.
_TOLERANCES = {torch.float32: 5e-3, torch.float64: 5e-3}
_OF_16_BITS = 0.25
_FLOOR = 1e-3  # times a gradient's share in the whole norm: for gradients that are zero in theory
_NAMED = 5


class Verification:
    """Compare the first forward and backward in training of a cut model with those of ``whole``, a
    copy from before the cut. A forward that raises is compared anew, with the batch of the next.
    """

    def __init__(self, whole: nn.Module, axis: TensorAxis):
        self._axis = axis
        # None once both are compared; hooks on views of the outputs stay, for further backwards
        self._comparison: _Comparison | None = _Comparison(whole, axis)
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Compare the first forward of ``model`` in training, and its backward."""
        self._handles = [
            model.register_forward_pre_hook(Attached(self._before), with_kwargs=True),
            model.register_forward_hook(Attached(self._after)),
        ]

    def _before(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        if self._comparison is not None and model.training and torch.is_grad_enabled():
            self._comparison.run_whole(model, args, kwargs)

    def _after(self, model: nn.Module, args: object, output: object) -> object:
        comparison = self._comparison
        if comparison is None or not comparison.outputs:
            return None
        self._remove_hooks()
        outputs = _differentiable(output)
        comparison.compare_outputs(type(model).__name__, outputs)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(comparison.add_gradient, name)
                self._handles.append(parameter.register_hook(hook))
        places = iter(range(len(outputs)))

        def passed_on(x: torch.Tensor) -> torch.Tensor:
            """Hook a view of ``x`` for readers of the output; a loss beside logits reads ``x``."""
            if not x.requires_grad:
                return x
            view = x.view_as(x)
            view.register_hook(partial(self._take_given, model, next(places)))
            return view

        return map_tensors(output, passed_on)

    def _take_given(self, model: nn.Module, index: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output; end the comparison when its backward ends."""
        if self._comparison is None:
            return
        if not self._comparison.given:
            finish = partial(self._finish, model)
            Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]
        self._comparison.add_given(index, gradient)

    def _finish(self, model: nn.Module) -> None:
        self._remove_hooks()
        comparison, self._comparison = self._comparison, None
        assert comparison is not None
        count = comparison.compare_gradients(model)
        log_rank0(
            f"{VERIFY}: loss and {count} gradients of {type(model).__name__} are those of the "
            f"whole model, on {self._axis.size} ranks"
        )

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Comparison:
    """One comparison with the model ``whole``.

    ``outputs``: of the whole model, [] before :meth:`run_whole`. ``given``: the gradients that the
    backward of the cut model brings to its outputs, by their number.
    """

    def __init__(self, whole: nn.Module, axis: TensorAxis):
        self._whole, self._axis = whole, axis
        self.outputs: list[torch.Tensor] = []
        self.given: dict[int, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}  # of the cut model

    def run_whole(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Run the whole model, with the values of ``model``, on the arguments of its forward."""
        self.outputs = []  # of a forward that has raised; their graph holds the former parameters
        self._take_values(model)
        parameter = next(self._whole.parameters())
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda x: x.detach().to(parameter.dtype) if x.is_floating_point() else x,
            (args, kwargs),
        )
        self.outputs = _differentiable(self._whole(*args, **kwargs))

    def _take_values(self, model: nn.Module) -> None:
        device = process_group.default_device()
        needed = 2 * sum(p.numel() * p.element_size() for p in self._whole.parameters())
        if free_bytes(device) < needed:
            raise DoesNotFitError(
                f"{VERIFY} needs {in_units(needed)} on each rank for the whole model and its "
                f"gradients, and {in_units(free_bytes(device))} are free; verify a smaller model "
                "of this type, or remove the key"
            )
        values, parameters = model.state_dict(), dict(self._whole.named_parameters())
        if missing := sorted(set(parameters) - set(values)):
            raise ConfigError(
                f"{VERIFY} compares the model with what it was before it was cut, and "
                f"{missing[0]} has gone since; add adapters before the model is cut"
            )
        for name, parameter in parameters.items():
            value = values[name].to(device, copy=True)
            replacement = nn.Parameter(value, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, replacement)
        self._whole.to(device).train(model.training)

    def compare_outputs(self, name: str, outputs: Sequence[torch.Tensor]) -> None:
        """Raise VerificationError, on all ranks of the group, if ``outputs`` of the cut model, of
        the class ``name``, differ (collective).
        """
        if [output.shape for output in outputs] != [output.shape for output in self.outputs]:
            raise VerificationError(
                f"{VERIFY}: {name} has outputs of {[list(output.shape) for output in outputs]}, "
                f"cut, and of {[list(output.shape) for output in self.outputs]}, whole; {_REMEDY}"
            )
        expected = {f"output {index}": output for index, output in enumerate(self.outputs)}
        self._compare("outputs", dict(zip(expected, outputs)), expected)

    def add_given(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient that the backward brings to output ``index``."""
        self.given[index] = self.given.get(index, 0) + gradient.detach()

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient of parameter ``name`` of the cut model."""
        self._gradients[name] = self._gradients.get(name, 0) + gradient.detach()

    def compare_gradients(self, model: nn.Module) -> int:
        """Run the backward of the whole model, compare the gradients of ``model`` with its own, and
        return their number. Raises VerificationError as :meth:`compare_outputs` (collective).
        """
        reached = [(self.outputs[index], gradient) for index, gradient in self.given.items()]
        torch.autograd.backward(
            [output for output, _ in reached],
            [gradient.to(output.dtype) for output, gradient in reached],
        )
        expected, actual = {}, {}
        whole = dict(self._whole.named_parameters())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or name not in whole:
                continue
            sharding, want = sharding_of(parameter), whole[name].grad
            if want is None:
                want = torch.zeros_like(whole[name])
            want = want if sharding.box is None else sharding.box.take(want)
            gradient = self._gradients.get(name)
            gradient = torch.zeros_like(want) if gradient is None else gradient.reshape(want.shape)
            if sharding.partial:
                gradient = self._axis.sum(gradient, f"{name} ({VERIFY})")
            expected[name], actual[name] = want, gradient
        self._compare("gradients", actual, expected)
        return len(expected)

    @torch.no_grad()
    def _compare(
        self, what: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise VerificationError on all ranks of the group if they differ (collective)."""
        elements = sum(value.numel() for value in expected.values())
        norm = torch.stack([value.float().norm() for value in expected.values()]).norm()
        shares = [norm * (value.numel() / max(1, elements)) ** 0.5 for value in expected.values()]
        errors = torch.stack(
            [
                (actual[name].float() - want.float()).norm()
                / (want.float().norm() + _FLOOR * share + torch.finfo(torch.float32).tiny)
                for (name, want), share in zip(expected.items(), shares)
            ]
        )
        errors = errors.nan_to_num(nan=torch.inf, posinf=torch.inf)
        self._axis.dim.all_reduce(errors, f"errors of {what} ({VERIFY})", maximum=True).wait()
        allowed = max(_TOLERANCES.get(value.dtype, _OF_16_BITS) for value in actual.values())
        wrong = [
            f"{name} (off by {error:.2g} of its norm)"
            for name, error in zip(expected, errors.tolist())
            if not error <= allowed
        ]
        if wrong:
            raise VerificationError(
                f"{VERIFY}: {len(wrong)} of {len(expected)} {what} differ from those of the whole "
                f"model: {', '.join(wrong[:_NAMED])}; {_REMEDY}"
            )


_REMEDY = (
    "the tensor-parallel plan does not fit the model: change the styles of the layers that are "
    "named or lie before them by hf_zero.tensor_parallel(model, size, plan=...), or leave them "
    "whole (None)"
)


def _differentiable(output: object) -> list[torch.Tensor]:
    tensors: Iterable[torch.Tensor] = tensors_in(output)
    return [tensor for tensor in tensors if tensor.requires_grad]
