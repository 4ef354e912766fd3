"""Probes of the installed libraries: small runs of what hf-zero relies on, for ``hf-zero doctor``.

A probe is a function that returns, or raises with the reason. All of them take seconds, most of
them for imports, so that the doctor runs those of releases that no test ran with or that lack a
part, and all if asked. A part that needs a new one adds a row to ``PROBES``; the names that
functions of this package import when they are called are read from their code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from packaging.version import Version

from hf_zero.errors import VerificationError
from hf_zero.integrations import finder, seams
from hf_zero.loading import LazyTensor, make_pending, read_pending
from hf_zero.loading.expressions import InMemory
from hf_zero.logging import logger
from hf_zero.techniques.blocks import first_of, hidden_state, stacked_blocks
from hf_zero.techniques.token_cut import TokenCut

LIBRARIES = frozenset(seams.RELEASES) - {"torch"}


@dataclass(frozen=True)
class Probe:
    """One probe; ``part`` is switched off, or fails, where ``run`` raises. ``since``: the first
    release of the library for which it holds, if the least release is an earlier one.
    """

    library: str
    part: str
    run: Callable[[], None]
    since: str = ""

    def expected(self, release: str) -> bool:
        """Return whether the probe holds for ``release`` of its library in the tests."""
        return not self.since or Version(release) >= Version(self.since)


def failed_probes(library: str) -> Iterator[tuple[Probe, str]]:
    """Run the probes of an installed library; yield those that fail, with the reason."""
    finder.install_hooks()
    for probe in PROBES:
        if probe.library != library:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                probe.run()
        except Exception as error:  # whatever another release raises is a finding
            yield probe, f"{type(error).__name__}: {error}"


def _hold(seam: seams.Seam) -> None:
    """Raise VerificationError if the symbol of ``seam`` is not wrapped."""
    seams.apply(importlib.import_module(seam.module))
    if seam.target in seams.left_out:
        raise VerificationError(f"{seam.target} {seams.left_out[seam.target]}")


def _import(module: str, name: str) -> None:
    """Raise ImportError if ``module`` has no ``name``."""
    home = importlib.import_module(module)
    if not hasattr(home, name) and importlib.util.find_spec(f"{module}.{name}") is None:
        raise ImportError(f"{module} has no {name}")


def imported_names() -> dict[tuple[str, str], list[str]]:
    """Return the modules and names that the code of this package imports from the libraries when it
    runs, each with the functions, or modules, that import it.
    """
    found: dict[tuple[str, str], list[str]] = {}
    package = Path(__file__).parent.parent
    for folder in ("deepspeed", "integrations"):  # the only ones that import the libraries
        for path in sorted((package / folder).rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            _collect(ast.parse(path.read_text("utf-8")), ".".join(parts), found)
    return found


def _collect(node: ast.AST, home: str, found: dict[tuple[str, str], list[str]]) -> None:
    """Add the names that ``node``, a part of ``home``, imports, but for those of types."""
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    if isinstance(node, ast.FunctionDef) and ":" not in home:
        home = f"{home}:{node.name}"
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
        for alias in node.names:
            found.setdefault((str(node.module), alias.name), []).append(home)
    if isinstance(node, ast.stmt | ast.mod | ast.ExceptHandler):  # expressions import nothing
        for child in ast.iter_child_nodes(node):
            _collect(child, home, found)


def _read_in_parts() -> None:
    whole = torch.arange(24.0).view(4, 6)
    lazy = LazyTensor(InMemory(whole))
    joined = torch.cat([lazy[:2].T, lazy[2:].T], 1).to(torch.float64)
    if not isinstance(joined, LazyTensor) or not torch.equal(joined.read_whole(), whole.T.double()):
        raise VerificationError("a tensor that is read later has other values")


def _decoder() -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _blocks_can_be_cut() -> None:
    """Cut the second block of a decoder to two of six tokens, by the arguments of its call."""
    model, tokens, calls = _decoder(), torch.arange(6)[None], []
    block = stacked_blocks(model, "this probe")[1].block
    hook = block.register_forward_hook(
        lambda block, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=tokens, use_cache=True)
        hook.remove()
        ((args, kwargs, output),) = calls
        key, state = hidden_state(block, args, kwargs) or (None, torch.empty(0))
        if state.shape != getattr(first_of(output), "shape", None):
            raise VerificationError(f"{type(block).__name__} maps no hidden state to another one")
        indices = torch.tensor([[1, 4]])
        cut = TokenCut(block, indices, 6, "attention_mask", lambda _, why: VerificationError(why))
        args, kwargs = cut.arguments(args, kwargs, key, state[:, indices[0]])
        if first_of(block(*args, **kwargs)).shape != (1, 2, 8):
            raise VerificationError(f"{type(block).__name__} returns other tokens than it gets")


def _checkpoints_load_in_shards() -> None:
    from transformers.utils.logging import disable_progress_bar

    from hf_zero.integrations.transformers.loading import read_later

    disable_progress_bar()
    model = _decoder()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        with read_later():
            loaded = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
            if not any(isinstance(parameter, LazyTensor) for parameter in loaded.parameters()):
                raise VerificationError("the loader read the weights at once")
            make_pending(loaded)
            read_pending(loaded)
    for (name, value), other in zip(model.state_dict().items(), loaded.state_dict().values()):
        if not torch.equal(value, other):
            raise VerificationError(f"{name} was loaded with other values")


def _kernels_are_active() -> None:
    """Install fused kernels in a decoder, and compare its logits."""
    from hf_zero.integrations.fused import optimize, report

    model, tokens = _decoder().eval(), torch.arange(6)[None]
    kernels = ["norms", "activations", "rotary", "qkv"]
    with torch.no_grad():
        right = model(input_ids=tokens).logits
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            optimize(model, kernels)
        finally:
            logger.setLevel(level)
        logits = model(input_ids=tokens).logits
    missing = set(kernels) - {name for line in report(model).replaced for name in line.kernels}
    if missing:
        raise VerificationError(
            f"no module of {type(model).__name__} has {', '.join(sorted(missing))}"
        )
    if not torch.allclose(logits, right, rtol=1e-4, atol=1e-5):
        raise VerificationError(f"logits of {type(model).__name__} differ with fused kernels")


PROBES: tuple[Probe, ...] = (
    Probe("torch", "loading of checkpoints in shards", _read_in_parts),
    Probe("transformers", "random_ltd and progressive_layer_drop", _blocks_can_be_cut, "5.4"),
    Probe("transformers", "from_pretrained in shards", _checkpoints_load_in_shards),
    Probe("transformers", "fused kernels", _kernels_are_active),
    *(
        Probe(seam.package, f"{seam.wrapper} ({seam.why})", partial(_hold, seam), seam.since)
        for seam in seams.SEAMS
    ),
    *(
        Probe(
            module.partition(".")[0],
            ", ".join(dict.fromkeys(users)),
            partial(_import, module, name),
            seams.SINCE.get(f"{module}:{name}", ""),
        )
        for (module, name), users in imported_names().items()
    ),
)
