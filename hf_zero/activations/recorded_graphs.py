"""Refusals of compilations that record CUDA graphs.

[Note: CUDA graphs]
A CUDA graph is replayed with its recorded addresses, and torch.compile assumes fixed parameter
addresses. At stage 3 a parameter's memory is released and allocated again for each gather, so a
replay would silently read other data. Any compilation that records graphs is therefore refused
there, however it was requested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.zero.layout.walk import attribute_of, named_modules_of

BACKEND = "cudagraphs"
OPTION = "triton.cudagraphs"


def refuse_backend(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None
) -> None:
    """Raise ConfigError for arguments of torch.compile, or global settings of inductor, that record
    CUDA graphs.
    """
    if backend == BACKEND:
        raise _refusal(f"backend={BACKEND!r}")
    if backend != "inductor":
        return
    # imported late: the import takes a second
    from torch._inductor import config, list_mode_options

    by_mode = list_mode_options(mode).get(OPTION) if mode else None
    by_option = {name.replace("-", "_"): value for name, value in (options or {}).items()}.get(
        OPTION
    )
    if by_option is not None:
        is_asked, why = by_option, f"options={{{OPTION!r}: True}}"
    elif by_mode is not None:
        is_asked, why = by_mode, f"mode={mode!r}"
    else:
        is_asked = config.triton.cudagraphs
        why = "torch._inductor.config.triton.cudagraphs (TORCHINDUCTOR_CUDAGRAPHS)"
    if is_asked:
        raise _refusal(why)


def refuse_recorded(model: nn.Module, fixed: bool) -> None:
    """Raise ConfigError for modules of ``model`` that were captured to CUDA graphs before the
    engine was made, and without ``fixed`` addresses for those compiled to record them: with fixed
    ones they record again at the new addresses.
    """
    for name, module in named_modules_of(model):
        forward = module.__dict__.get("forward")
        if getattr(forward, "__module__", None) == "torch.cuda.graphs":
            what = f"torch.cuda.make_graphed_callables of {name or 'the model'}"
            if not fixed:
                raise _refusal(what)
            raise ConfigError(
                f"{what} has recorded the addresses of parameters, which hf_zero.initialize moves "
                "into flat buffers: its replays would read the old ones; call it after "
                "hf_zero.initialize"
            )
        for compiled in (module, forward, attribute_of(module, "_compiled_call_impl")):
            if not fixed and _records(compiled):
                raise _refusal(
                    f"the torch.compile of {name or 'the model'} before hf_zero.initialize"
                )


def _records(compiled: Any) -> bool:
    name = "get_compiler_config"  # set on results of torch.compile
    is_module = isinstance(compiled, nn.Module)
    config_of = attribute_of(compiled, name) if is_module else getattr(compiled, name, None)
    if config_of is None:
        return False
    options = config_of()
    if options is not None:
        return bool(options.get(OPTION))
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and inspect.isfunction(compiled):
        context = inspect.getclosurevars(compiled).nonlocals.get("self")
    inner = getattr(context, "callback", None)
    while inner is not None:
        if getattr(inner, "compiler_name", None) == BACKEND:
            return True
        inner = getattr(inner, "_torchdynamo_orig_backend", None)
    return False


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"{what} records CUDA graphs, which keep the addresses of parameters, and stage 3 gathers "
        "parameters into new memory; use mode 'default' or 'max-autotune-no-cudagraphs', or stage 2"
    )
