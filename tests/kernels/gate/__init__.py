"""The configurations of kernels that ship, for the ahead-of-time gate."""

from __future__ import annotations

from typing import Any

from tests.helpers.aot_gate import Case

TENSORS = ("*bf16", "*fp32", "*fp64", "*fp16", "*i64", "*i32", "*i8", "*u8")


def case(
    kernel: Any,
    name: str,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    occupancy: float,
    aligned: str | None = None,
    **more: Any,
) -> Case:
    """A case of ``kernel``. ``types`` has the names of arguments by their type, apart from
    pointers to bf16 (``…_ptr``) and 32-bit integers (the rest); of ``constants`` those count that
    the kernel takes. By default pointers, strides and widths are ``aligned``.
    """
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    of = {argument: kind for kind, names in types.items() for argument in names.split()}
    signature = {
        each: of.get(each, "*bf16" if each.endswith("_ptr") else "i32")
        for each in kernel.arg_names
        if each not in constants
    }
    chosen = aligned.split() if aligned is not None else _divisible(signature)
    more = {"num_stages": 3, "dot": False, **more}
    return Case(
        kernel, name, signature, constants, tuple(chosen), warps, min_occupancy=occupancy, **more
    )


def _divisible(signature: dict[str, str]) -> list[str]:
    return [
        name
        for name, kind in signature.items()
        if kind in TENSORS or name.endswith(("stride", "width"))
    ]
