"""Conversions of checkpoints, of the installed release of transformers and such as nobody has seen:
each runs on lazy tensors as on real ones, or is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_zero.loading import LazyTensor
from hf_zero.loading.expressions import InMemory
from tests.helpers.cells import in_one_item

SIZE, EXPERTS = 24, 4
SHAPES = [(SIZE, SIZE), (SIZE,), (3, SIZE, SIZE), (SIZE, SIZE, 2, 2, 2)]


class Config:
    """Two of everything that a conversion asks for."""

    def get_text_config(self) -> Config:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 2


class Model:
    """Parameters of the size that a tensor cut into ``parts`` has."""

    def __init__(self, parts: int):
        self.config, self.parts = Config(), parts

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty((SIZE // self.parts,) * 3)


def lazy(tensor: torch.Tensor) -> torch.Tensor:
    return LazyTensor(InMemory(tensor))


def converted(
    conversion: WeightConverter, shape: tuple[int, ...], make: Callable[[torch.Tensor], Any]
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = deepcopy(conversion)
    name = made.target_patterns[0].replace("*", "0")
    for source in made.source_patterns:
        for place in range(EXPERTS if "*" in source else 1):
            value = make(torch.randn(shape, generator=generator))
            made.add_tensor(
                name, source.replace("*", str(place)), source, lambda value=value: value
            )
    model: Any = Model(len(made.target_patterns))
    out = made.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in out.items()}


def of_transformers() -> Iterator[WeightConverter]:
    """The conversions of all models, each chain of operations once."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    seen = set()
    for each in itertools.chain.from_iterable(mapping.values()):
        for one in (each, each.reverse_transform()) if isinstance(each, WeightConverter) else ():
            kind = [(type(op).__name__, str(sorted(vars(op).items()))) for op in one.operations]
            key = (str(kind), len(one.source_patterns), len(one.target_patterns))
            if key not in seen:
                seen.add(key)
                yield one


def test_each_conversion_of_the_installed_release() -> None:
    """Those that take one of a few shapes: the others need formats of their own."""
    tried: set[str] = set()
    every: set[str] = set()
    for conversion in of_transformers():
        names = {type(op).__name__ for op in conversion.operations}
        every |= names
        for shape in SHAPES:
            try:
                expected = converted(conversion, shape, lambda tensor: tensor)
            except Exception:  # not of this shape
                continue
            found = converted(conversion, shape, lazy)
            assert list(found) == list(expected)
            for name, value in expected.items():
                other = found[name]
                real = other.read_whole() if isinstance(other, LazyTensor) else other
                assert real.dtype == value.dtype and torch.equal(real, value), (names, shape)
            tried |= names
    assert len(tried) > 0.8 * len(every), every - tried


class Operation(ConversionOps):
    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]):
        self.compute = compute

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return {target_patterns[0]: self.compute(tensor)}


def through(compute: Callable[[torch.Tensor], torch.Tensor], make: Any) -> torch.Tensor:
    conversion = WeightConverter("old", "new", operations=[Operation(compute)])
    (out,) = converted(conversion, (SIZE, SIZE), make).values()
    return out.read_whole() if isinstance(out, LazyTensor) else out


def by_pieces(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(tensor, device="cpu")
    for first in range(0, len(tensor), 5):
        out[first : first + 5] = tensor[first : first + 5].abs().cumsum(1)
    return out


@in_one_item(
    [
        by_pieces,
        lambda tensor: torch.from_numpy(tensor.numpy() + 1),
        lambda tensor: torch.tensor(tensor.tolist()),
        lambda tensor: torch.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=torch.float32),
        lambda tensor: torch.from_dlpack(tensor) * 2,
        lambda tensor: tensor.view(torch.int32) >> 4,
        lambda tensor: tensor[tensor > 0],
        lambda tensor: torch.linspace(0, 1, 256)[tensor.to(torch.uint8).long()],
        lambda tensor: tensor.T.contiguous().unflatten(0, (2, -1)).flip(0),
    ],
    named=lambda compute: compute.__code__.co_firstlineno,
)
def test_an_operation_that_nobody_has_seen(compute: Callable[[torch.Tensor], Any]) -> None:
    plain = through(compute, lambda tensor: tensor)
    assert torch.equal(through(compute, lazy), plain)


def test_random_numbers_are_drawn_once() -> None:
    """Each read of what was drawn gives the same values."""
    drawn = torch.bernoulli(lazy(torch.full((50,), 0.5)))
    assert torch.equal(torch.as_tensor(drawn + 0), torch.as_tensor(drawn + 0))
    noisy: Any = torch.nn.functional.dropout(lazy(torch.ones(50)), 0.5)
    reads = [noisy.read_whole() if isinstance(noisy, LazyTensor) else noisy for _ in range(2)]
    assert torch.equal(*reads) and 0 < int((reads[0] == 0).sum()) < 50
