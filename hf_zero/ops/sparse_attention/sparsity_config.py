"""Base class of all sparsity configurations, and their numbers: an operator takes a configuration
as an integer, so that torch.compile can trace it.

Equal configurations share a number. They are kept for the life of the process: an operator's
backward may run long after its forward.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle

import torch

from hf_zero.errors import KernelError

_CONFIGS: dict[int, SparsityConfig] = {}
_HANDLES: dict[tuple[type, str], int] = {}
_NUMBERS = itertools.count(1)


class _Registered(type):
    """A metaclass that registers a configuration after its last constructor."""

    def __call__(cls, *args: object, **kwargs: object) -> object:
        config = super().__call__(*args, **kwargs)
        config.__dict__["handle"] = register(config)
        return config


class SparsityConfig(metaclass=_Registered):
    """Base class of all patterns: ``num_heads``, the ``block`` size in tokens, and whether heads
    differ.

    ``attention`` is "bidirectional" or "unidirectional"; a unidirectional pattern makes
    sparse_attention causal, within blocks too.
    """

    handle: int
    attention: str = "bidirectional"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False
    ) -> None:
        if num_heads < 1 or block < 1:
            raise KernelError(
                f"num_heads is {num_heads} and block is {block}; both must be at least 1"
            )
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def __setattr__(self, name: str, value: object) -> None:
        if "handle" in self.__dict__:
            raise KernelError(
                f"{type(self).__name__}.{name} cannot change once the configuration is made: "
                "layouts compiled from it are kept; make another"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (
            type(self),
            {name: value for name, value in self.__dict__.items() if name != "handle"},
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsityConfig) and self.handle == other.handle

    def __hash__(self) -> int:
        return self.handle

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={value!r}"
            for name, value in self.__dict__.items()
            if name not in ("handle", "num_layout_heads")
        )
        return f"{type(self).__name__}({fields})"

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Return the layout for ``seq_len`` tokens, a multiple of ``block``: int64 [num_heads,
        blocks, blocks] of 0 and 1 on the CPU.
        """
        if seq_len % self.block:
            raise KernelError(
                f"a sequence of {seq_len} tokens is not a multiple of the block, {self.block}; "
                "sparse_attention pads by itself"
            )
        blocks = seq_len // self.block
        with torch.device("cpu"):  # whatever the default device is
            random = torch.Generator().manual_seed(getattr(self, "seed", 0))
            heads = range(self.num_layout_heads)
            layouts = [self.head_layout(head, blocks, random) for head in heads]
            layout = torch.stack(layouts).to(torch.int64)
        if self.num_layout_heads == self.num_heads:
            return layout
        return layout.repeat(self.num_heads, 1, 1)

    def head_layout(self, head: int, blocks: int, random: torch.Generator) -> torch.Tensor:
        """Return the pattern of one head: bool [blocks, blocks]."""
        raise NotImplementedError(
            f"{type(self).__name__} describes no pattern; use one of its subclasses, "
            "or define head_layout"
        )


def register(config: SparsityConfig) -> int:
    """Return the number of ``config``, equal for all configurations of its class and content."""
    key = type(config), _content(config.__dict__)
    if key not in _HANDLES:
        handle = next(_NUMBERS)
        _CONFIGS[handle] = config  # first: another thread may look a number up once it is known
        _HANDLES.setdefault(key, handle)
    return _HANDLES[key]


def config_of(handle: int) -> SparsityConfig:
    return _CONFIGS[handle]


def _content(attributes: dict[str, object]) -> str:
    """Return a digest of all attributes of a configuration; if they cannot be pickled, a unique
    string, so that it equals only itself.
    """
    try:
        return hashlib.sha256(pickle.dumps(sorted(attributes.items()))).hexdigest()
    except Exception:  # pickling a subclass's attributes may raise anything
        return f"unpickled {next(_NUMBERS)}"


def _restored(kind: type[SparsityConfig], attributes: dict[str, object]) -> SparsityConfig:
    config: SparsityConfig = kind.__new__(kind)
    config.__dict__.update(attributes)
    config.__dict__["handle"] = register(config)
    return config
