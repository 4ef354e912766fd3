"""Triton's interpreter with what a GPU would not forgive: memory, order and rounding.

The interpreter alone lets a wrong kernel pass. It keeps bf16 as raw integers and truncates,
computes an fp32 ``tl.dot`` exactly, reads past the end of an argument, gives zeros for a masked
load without ``other`` and runs programs one after the other. Inside ``checked_triton()``

* bf16 is bf16: every operation rounds to nearest even, as torch does (by ml_dtypes);
* ``tl.dot`` of fp32 truncates its inputs to TF32, unless ``input_precision`` says otherwise;
* an access outside the tensor that its pointer came from raises `MemoryFault`, naming the argument,
  also where it falls into another argument or into a gap between the rows of a strided view;
* lanes of a masked load without ``other`` are NaN (integers: half the largest), and so is memory of
  ``torch.empty``;
* programs run in a shuffled order, and two of them that meet at an address raise, unless both only
  load or both use atomics.

A pointer carries its argument in its upper 16 bits, which are zero in every address of user space,
so that no pointer arithmetic loses it. Pointers that a kernel reads from a table have none: they
must lie in a tensor named to ``reachable``.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

BF16 = np.dtype(ml_dtypes.bfloat16)
ARGUMENT_SHIFT = 48
ADDRESS = np.uint64((1 << ARGUMENT_SHIFT) - 1)
Order = Literal["shuffled", "forward", "reverse"]
Call = Callable[..., Any]


class MemoryFault(RuntimeError):
    """A kernel touched memory that it may not touch, or that another program writes at the same
    time.
    """


@contextmanager
def checked_triton(
    order: Order = "shuffled", *, seed: int = 0, races: bool = True, poison: bool = True
) -> Iterator[Settings]:
    """Launches inside are checked.

    ``order`` and ``seed`` say in which order programs run; ``poison`` fills ``torch.empty`` with
    NaN.
    """
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with ExitStack() as stack:
        for owner, name, replacement in _replacements():
            stack.enter_context(patch.object(owner, name, replacement))
        settings = Settings(order, seed, races)
        _SETTINGS.append(settings)
        stack.callback(_SETTINGS.pop)
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        stack.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fill)
        torch.use_deterministic_algorithms(poison or deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = poison
        stack.enter_context(patch.dict(os.environ))
        # conftest.py switches kernels off where nobody watches them
        os.environ.pop("HF_ZERO_TRITON", None)
        yield settings


@dataclass
class Settings:
    order: Order
    seed: int
    races: bool
    launches: int = 0
    tables: list[Argument] = field(default_factory=list)

    def reachable(self, *tensors: torch.Tensor) -> None:
        """Kernels may follow addresses of ``tensors`` that they read from memory."""
        self.tables += [
            Argument.of(f"reachable tensor {index}", tensor) for index, tensor in enumerate(tensors)
        ]


@dataclass(frozen=True)
class Argument:
    """The memory of a tensor: addresses [start, end), and the (stride in bytes, size) of its axes
    if it is not contiguous.
    """

    name: str
    start: int
    end: int
    item: int
    axes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        item = tensor.element_size()
        axes = sorted(
            (
                (stride * item, size)
                for stride, size in zip(tensor.stride(), tensor.shape)
                if stride and size > 1
            ),
            reverse=True,
        )
        extent = item + sum((size - 1) * stride for stride, size in axes)
        # Rows that overlap (a sliding window) or fill everything have no gaps that could be told.
        nested = all(
            outer >= inner * size for (outer, _), (inner, size) in itertools.pairwise(axes)
        )
        gaps = nested and extent > item * tensor.numel() and bool(axes)
        start = tensor.data_ptr()
        return cls(
            name,
            start,
            start + (extent if tensor.numel() else 0),
            item,
            tuple(axes) if gaps else (),
        )

    def outside(self, addresses: np.ndarray, width: int) -> np.ndarray:
        """Return a mask of the ``addresses`` (int64) whose accesses of ``width`` bytes leave the
        tensor.
        """
        outside = (addresses < self.start) | (addresses + width > self.end)
        if self.axes:
            rest = addresses - self.start
            for stride, size in self.axes:
                outside |= rest // stride >= size
                rest = rest % stride
            outside |= rest + width > self.item
        return outside


@dataclass
class Access:
    kind: str
    program: int
    addresses: np.ndarray
    width: int


class Launch:
    """One grid: its arguments, and every access of every program."""

    def __init__(
        self, settings: Settings, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.settings = settings
        self.arguments: list[Argument] = []
        self.accesses: list[Access] = []
        self.program = 0
        self.order: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        function = executor.fn
        known = inspect.getfullargspec(function)
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name in known.args or name in known.kwonlyargs
        }
        called = inspect.getcallargs(function, *args, **kwargs)
        self._names = [
            label for name, value in called.items() for label, _ in _tensors_of(name, value)
        ].__iter__()

    def pointer(self, tensor: torch.Tensor, dtype: tl.dtype) -> tl.tensor:
        """The pointer a kernel gets for ``tensor``; called in the order of the kernel's
        arguments.
        """
        self.arguments.append(Argument.of(next(self._names), tensor))
        tagged = tensor.data_ptr() + (len(self.arguments) << ARGUMENT_SHIFT)
        return tl.tensor(
            interpreter.TensorHandle(np.array([tagged], dtype=np.uint64), dtype), dtype
        )

    def arrange(self, *grid: int) -> None:
        """Choose the order of the programs of ``grid``."""
        programs = list(itertools.product(*map(range, grid)))
        ranked = list(enumerate(programs))
        if self.settings.order == "reverse":
            ranked.reverse()
        elif self.settings.order == "shuffled":
            random.Random(self.settings.seed).shuffle(ranked)
        self.order = dict(zip(programs, ranked))

    def enter(self, *index: int) -> tuple[int, ...]:
        """Return the index of the program to run in place of the one at ``index``."""
        self.program, chosen = self.order[index]
        return chosen

    def touch(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
        """Checks and records an access; the addresses without their tags."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        plain = pointers & ADDRESS
        active = plain[mask].astype(np.int64)
        if active.size:
            tags = (pointers[mask] >> np.uint64(ARGUMENT_SHIFT)).astype(np.int64)
            for tag in (
                {int(tags.min()), int(tags.max())} if tags[0] == tags[-1] else set(tags.tolist())
            ):
                self._check(kind, tag, active[tags == tag], width)
            self.accesses.append(Access(kind, self.program, active, width))
        return np.ascontiguousarray(plain)

    def _check(self, kind: str, tag: int, addresses: np.ndarray, width: int) -> None:
        if tag > len(self.arguments):
            raise MemoryFault(
                f"{kind} at no address of an argument, in program {self.program}: the pointer was "
                "computed past every tensor"
            )
        if tag == 0:
            outside = np.ones(addresses.shape, dtype=bool)
            for table in self.settings.tables:
                outside &= table.outside(addresses, width)
            if outside.any():
                raise MemoryFault(
                    f"{kind} at {int(addresses[outside][0]):#x}, in program {self.program}: an "
                    "address from memory, in no tensor named to reachable()"
                )
            return
        argument = self.arguments[tag - 1]
        outside = argument.outside(addresses, width)
        if outside.any():
            offset = int(addresses[outside][0]) - argument.start
            inside = 0 <= offset < argument.end - argument.start
            gap = ", in a gap between rows" if inside else ""
            raise MemoryFault(
                f"{kind} out of bounds of {argument.name!r}, in program {self.program}: "
                f"{int(outside.sum())} of {addresses.size} lanes, the first at "
                f"byte {offset} of {argument.end - argument.start} (element "
                f"{offset // argument.item}{gap})"
            )

    def check_races(self) -> None:
        """Raises where two programs meet at an address and not both load, nor both use atomics."""
        changes = [access for access in self.accesses if access.kind != "load"]
        if not changes or not self.settings.races:
            return
        grain = min(access.width for access in self.accesses)
        addresses = np.concatenate([_cells(access, grain) for access in changes])
        programs = np.concatenate(
            [
                np.full(access.addresses.size * (access.width // grain), access.program)
                for access in changes
            ]
        )
        atomic = np.concatenate(
            [
                np.full(access.addresses.size * (access.width // grain), access.kind == "atomic")
                for access in changes
            ]
        )
        order = np.lexsort((programs, addresses))
        addresses, programs, atomic = addresses[order], programs[order], atomic[order]
        clash = (
            (addresses[1:] == addresses[:-1])
            & (programs[1:] != programs[:-1])
            & ~(atomic[1:] & atomic[:-1])
        )
        if clash.any():
            first = int(np.argmax(clash))
            self._race(
                "store",
                int(addresses[first]),
                int(programs[first]),
                int(programs[first + 1]),
                int(clash.sum()),
            )
        cells, first_of = np.unique(addresses, return_index=True)
        last_of = np.append(first_of[1:], len(addresses)) - 1
        for access in self.accesses:
            if access.kind != "load":
                continue
            loaded = _cells(access, grain)
            at = np.minimum(np.searchsorted(cells, loaded), len(cells) - 1)
            # The programs at a cell are sorted: another one is among them if the first or the last
            # is another.
            hit = (cells[at] == loaded) & (
                (programs[first_of[at]] != access.program)
                | (programs[last_of[at]] != access.program)
            )
            if hit.any():
                cell = int(at[np.argmax(hit)])
                others = {int(programs[first_of[cell]]), int(programs[last_of[cell]])} - {
                    access.program
                }
                self._race("load", int(cells[cell]), access.program, others.pop(), int(hit.sum()))

    def _race(self, kind: str, address: int, one: int, other: int, count: int) -> None:
        where = next((each for each in self.arguments if each.start <= address < each.end), None)
        place = (
            f"element {(address - where.start) // where.item} of {where.name!r}"
            if where
            else f"{address:#x}"
        )
        raise MemoryFault(
            f"race: a {kind} of program {one} and a store of program {other} meet at {place}, and "
            f"at {count - 1} other places"
        )


_SETTINGS: list[Settings] = []


def current_settings() -> Settings:
    """Return the settings of the innermost ``checked_triton()``."""
    return _SETTINGS[-1]


_LAUNCHES: list[Launch] = []


def _cells(access: Access, grain: int) -> np.ndarray:
    """Addresses of ``access`` in steps of ``grain`` bytes."""
    if access.width == grain:
        return access.addresses
    return (access.addresses[:, None] + np.arange(0, access.width, grain)).ravel()


def _lanes_agree(addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
    """Raises where one store writes two values to one address: which of them stays is undefined."""
    addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
    addresses, values = addresses[mask], values[mask]
    if (addresses[1:] > addresses[:-1]).all():
        return
    order = np.argsort(addresses, kind="stable")
    addresses, values = addresses[order], values[order]
    differ = (addresses[1:] == addresses[:-1]) & (values[1:] != values[:-1])
    if differ.any():
        raise MemoryFault(
            f"race: two lanes of one store write {values[:-1][differ][0]} and "
            f"{values[1:][differ][0]} to one address"
        )


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _tensors_of(f"{name}[{index}]", each)
    elif hasattr(value, "data_ptr") or hasattr(value, "block_shape"):
        yield name, value


def _width(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``replacement`` in the shape of the function of Triton that it is to replace.

    ``replacement`` has the original as its first argument, then those arguments of the original
    that it reads, by their names. It calls the original with new values of some of them; all others
    pass through, so a release may have more of them, in another order.
    """
    read = tuple(inspect.signature(replacement).parameters)[1:]
    function = getattr(owner, name)
    signature = inspect.signature(function)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()

        def original(**changed: Any) -> Any:
            call.arguments.update(changed)
            return function(*call.args, **call.kwargs)

        return replacement(original, *[call.arguments[name] for name in read])

    return replaced


def _replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the patches of Triton's interpreter as (object, attribute, replacement)."""
    if _SETTINGS:  # inside another checked_triton everything is in place
        return []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    handle, failure = interpreter.TensorHandle, interpreter.InterpreterError
    tf32 = interpreter._ir.INPUT_PRECISION.TF32

    def true_dtype(original: Call, tt_dtype: tl.dtype) -> np.dtype:
        return BF16 if tt_dtype.scalar == tl.bfloat16 else original()

    def true_cast(original: Call, src: Any, dst_type: tl.dtype) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target):
            return original()
        values = src.data.astype(np.float32) if source == tl.bfloat16 else src.data
        return handle(values.astype(interpreter._get_np_dtype(target)), target)

    def true_fp_to_fp(original: Call, self: Any, src: Any, dst_type: tl.dtype) -> Any:
        wide = {tl.bfloat16, tl.float16, tl.float32, tl.float64}
        if {src.dtype.scalar, dst_type.scalar} <= wide:
            return self.cast_impl(src, dst_type)
        return original()

    def true_dot(original: Call, a: Any, b: Any, d: Any, input_precision: Any) -> Any:
        x, y = a.data, b.data
        if x.dtype not in (BF16, np.float16, np.float32) or y.dtype != x.dtype:
            return original()
        x, y = np.ascontiguousarray(x, dtype=np.float32), np.ascontiguousarray(y, dtype=np.float32)
        if a.data.dtype == np.float32 and input_precision == tf32:
            x, y = _to_tf32(x), _to_tf32(y)
        return handle((np.matmul(x, y) + d.data).astype(d.data.dtype), d.dtype.scalar)

    def true_fma(original: Call, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != BF16:
            return original()
        wide = [each.data.astype(np.float64) for each in (x, y, z)]
        return handle((wide[0] * wide[1] + wide[2]).astype(BF16), z.dtype.scalar)

    def touch(kind: str, pointers: Any, mask: np.ndarray) -> Any:
        return handle(
            _LAUNCHES[-1].touch(kind, pointers.data, mask, _width(pointers)), pointers.dtype
        )

    def checked_load(original: Call, ptrs: Any, mask: Any, other: Any) -> Any:
        dtype = ptrs.get_element_ty()
        plain = touch("load", ptrs, mask.data)
        if other is None:
            kind = interpreter._get_np_dtype(dtype)
            value = (
                np.nan
                if dtype.is_floating()
                else np.iinfo(kind).max // 2
                if kind.kind in "iu"
                else True
            )
            other = handle(np.full(plain.data.shape, value, dtype=kind), dtype)
        if dtype != tl.bfloat16:
            return original(ptrs=plain, other=other)
        bits = handle(np.ascontiguousarray(other.data).view(np.uint16), tl.uint16)
        loaded = original(ptrs=handle(plain.data, tl.pointer_type(tl.uint16)), other=bits)
        return handle(loaded.data.view(BF16), dtype)

    def checked_store(original: Call, ptrs: Any, value: Any, mask: Any) -> Any:
        plain = touch("store", ptrs, mask.data)
        _lanes_agree(plain.data, value.data, mask.data)
        if value.data.dtype == BF16:
            value = handle(np.ascontiguousarray(value.data).view(np.uint16), tl.uint16)
        return original(ptrs=plain, value=value)

    def checked_rmw(original: Call, ptr: Any, val: Any, mask: Any) -> Any:
        if val.data.dtype == BF16:
            raise NotImplementedError(
                "an atomic on bf16: Triton's interpreter has none; accumulate in fp32"
            )
        return original(ptr=touch("atomic", ptr, mask.data))

    def checked_cas(original: Call, ptr: Any) -> Any:
        return original(ptr=touch("atomic", ptr, np.ones(ptr.data.shape, dtype=bool)))

    def tagged(original: Call, arg: Any) -> Any:
        if not hasattr(arg, "data_ptr"):
            return original()
        return _LAUNCHES[-1].pointer(arg, original().dtype)

    def arrange(original: Call, nx: int, ny: int, nz: int) -> None:
        _LAUNCHES[-1].arrange(nx, ny, nz)
        original()

    def enter(original: Call, x: int, y: int, z: int) -> None:
        original(**dict(zip("xyz", _LAUNCHES[-1].enter(x, y, z))))

    def run_checked(original: Call, self: Any, args_dev: Any, kwargs: Any) -> None:
        launch = Launch(_SETTINGS[-1], self, args_dev, kwargs)
        _SETTINGS[-1].launches += 1
        _LAUNCHES.append(launch)
        try:
            original()
        except failure as error:
            raise _cause(error) from None
        finally:
            _LAUNCHES.pop()
        launch.check_races()

    return [
        (owner, name, _replaced(owner, name, replacement))
        for owner, name, replacement in (
            (interpreter, "_get_np_dtype", true_dtype),
            (interpreter, "_implicit_cvt", tagged),
            (builder, "cast_impl", true_cast),
            (builder, "create_fp_to_fp", true_fp_to_fp),
            (builder, "create_dot", true_dot),
            (builder, "create_fma", true_fma),
            (builder, "create_masked_load", checked_load),
            (builder, "create_masked_store", checked_store),
            (builder, "create_atomic_rmw", checked_rmw),
            (builder, "create_atomic_cas", checked_cas),
            (builder, "set_grid_dim", arrange),
            (builder, "set_grid_idx", enter),
            (executor, "__call__", run_checked),
        )
    ]


def _to_tf32(values: np.ndarray) -> np.ndarray:
    """Truncate fp32 to the bits that a tensor core reads: sign, exponent, upper 10 bits of
    mantissa.
    """
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _cause(error: BaseException) -> BaseException:
    """The fault itself where a kernel raised one, however many helper functions lay between;
    else the interpreter's error.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, MemoryFault):
            return inner
        inner = inner.__cause__
    return error
