"""Optimizers by name, from the section ``optimizer`` of a configuration.

Names are case-insensitive. DeepSpeed's names have DeepSpeed's meaning: ``Adam`` decays weights like
AdamW unless ``adam_w_mode`` is false, and ``weight_decay`` defaults to 0 (also for ``AdamW``, where
PyTorch's own default of 0.01 applies only with ``torch_adam: true``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.config.feature_rows import loaded, provided
from hf_zero.config.optimizers import NAMED, OPTIMIZERS
from hf_zero.config.reading import Mistakes
from hf_zero.config.refusals import built_name, refusals
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.optim.adam import Adam
from hf_zero.optim.probing import bare_twin
from hf_zero.optim.segments import current_settings

if TYPE_CHECKING:
    from hf_zero.config import OptimizerConfig

_Class = type[torch.optim.Optimizer]
_Settings = dict[str, Any]

# an example value of the expected type for keys whose default is None
_LIKE = {"lr": 1e-3}
# names of these settings in Transformers and other libraries
_OTHER_NAMES = {
    "learning_rate": "lr", "adam_epsilon": "eps", "epsilon": "eps", "adam_beta1": "betas",
    "beta_1": "betas", "wd": "weight_decay",
}  # fmt: skip


def build_optimizer(
    cfg: OptimizerConfig, params: Any, model: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that ``cfg`` names.

    Args:
        cfg: ``type`` and ``params`` of the configuration's ``optimizer`` section.
        params: as torch.optim takes them. Settings of a group take precedence.
        model: of the parameters, for an optimizer that tells them apart by their modules.

    Raises:
        ConfigError: a type or parameter that does not exist, an ``"auto"`` left over, a value of
            the wrong type or range.
        NotBuiltError: an optimizer that hf-zero knows and does not provide.
    """
    name = canonical_name(cfg.type)
    cls, settings = _resolve(name, dict(cfg.params))
    if NAMED[name].groups:
        params = loaded(NAMED[name].groups)(params, model, cfg.params)
    try:
        return cls(params, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        empty = isinstance(params, list) and not params
        remedy = "Pass parameters that it trains" if empty else "Correct optimizer.params"
        raise ConfigError(
            f"optimizer {cfg.type!r} with {dict(cfg.params)}: {error}. {remedy}."
        ) from error


def canonical_name(kind: str) -> str:
    """Return the class name for ``kind``, such as ``"CPUAdam"`` for ``"deepspeedcpuadam"``; raises
    as :func:`build_optimizer`.
    """
    return NAMED[built_name("optimizer", kind)].names[0]


def _resolve(
    name: str, params: Mapping[str, object], later: Collection[str] = ()
) -> tuple[_Class, _Settings]:
    """Return class and settings for the checked parameters ``params``; of the names ``later`` the
    values are not known yet.
    """
    row = NAMED[name]
    cls: _Class = loaded(row.cls)
    accepted = {
        key: p.default
        for key, p in inspect.signature(cls.__init__).parameters.items()
        if key not in ("self", "params", *row.per_parameter)
    }
    accepted.pop("decoupled_weight_decay", None)  # spelled adam_w_mode in DeepSpeed's dialect
    keys, mistakes = (*accepted, *row.keys), Mistakes()
    for key in (*params, *later):
        with mistakes.collect():
            _check_key(name, key, keys)
    for key, value in params.items():
        kind, default = row.keys.get(key, _LIKE.get(key)), accepted.get(key)
        if key in keys and (value is not None or default is not None):
            with mistakes.collect():
                _check_value(name, key, value, kind if default is None else default)
    mistakes.throw()
    for key, choices in row.choices.items():
        if params.get(key, choices[0]) not in choices:
            raise ConfigError(
                f"optimizer.params.{key} is {params[key]!r}; write one of "
                f"{', '.join(choices)}, or remove it"
            )
    narrow = not params.get("fp32_optimizer_states", True)
    if narrow and not row.narrow:
        others = ", ".join(each.names[0] for each in OPTIMIZERS if each.narrow)
        raise NotBuiltError(
            f"optimizer.params.fp32_optimizer_states: false is not built for {name}: states are "
            f"kept in fp32. Remove it, or use one of {others}"
        )
    settings = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in params.items()
        if key in accepted
    }
    if narrow:
        settings.setdefault("moments", "bf16")
    resolved: tuple[_Class, _Settings] = (cls, settings)
    if row.dialect:
        resolved = loaded(row.dialect)(cls, params, settings)
    return resolved


def _check_key(name: str, key: str, keys: tuple[str, ...]) -> None:
    if key in keys:
        return
    if key == "max_grad_norm":
        raise ConfigError(
            "optimizer.params.max_grad_norm is not a setting of the optimizer; write "
            "gradient_clipping at the top level"
        )
    other = _OTHER_NAMES.get(key)
    hint = f"; write {other}" if other in keys else did_you_mean(key, keys)
    raise ConfigError(f"unknown optimizer.params key {key!r} for {name}{hint}")


def _check_value(name: str, key: str, value: object, default: object) -> None:
    where = f"optimizer.params.{key} of {name}"
    if value == "auto" and isinstance(value, str):
        raise ConfigError(
            f'{where} is "auto" and nothing has filled it in; write a number, or set it in the '
            "trainer's arguments"
        )
    if isinstance(default, bool):
        ok, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, tuple):
        ok = (
            isinstance(value, (list, tuple))
            and len(value) == len(default)
            and all(_is_number(item) for item in value)
        )
        expected = f"a list of {len(default)} numbers"
    elif isinstance(default, str):
        ok, expected = isinstance(value, str), f"a word such as {default}"
    elif isinstance(default, Real):
        ok, expected = _is_number(value), "a number (YAML reads 1e-5 as text: write 1.0e-5)"
    else:
        ok, expected = value is None or isinstance(value, bool), "true, false or null"
    if not ok:
        raise ConfigError(f"{where} is {value!r}; write {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, (Real, torch.Tensor)) and not isinstance(value, bool)


def adam(
    cls: _Class, params: Mapping[str, object], settings: _Settings
) -> tuple[_Class, _Settings]:
    """Return class and settings of DeepSpeed's Adam, of the checked parameters ``params``."""
    decoupled = cls is torch.optim.AdamW or params.get(
        "adam_w_mode", params.get("adamw_mode", True)
    )
    if not params.get("torch_adam", False):
        settings.setdefault("weight_decay", 0.0)
    if not params.get("bias_correction", True):
        settings.setdefault("weight_decay", 0.01 if decoupled else 0.0)
        modes = {"decoupled_weight_decay": bool(decoupled), "bias_correction": False}
        return Adam, {**settings, **modes}
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), settings


def lion(
    cls: _Class, params: Mapping[str, object], settings: _Settings
) -> tuple[_Class, _Settings]:
    """Return class and settings with DeepSpeed's defaults of Lion; the class has the paper's."""
    return cls, {"lr": 1e-3, "betas": (0.9, 0.999), **settings}


def twin_of(optimizer: torch.optim.Optimizer) -> object:
    """Return a throw-away twin of ``optimizer``, over one parameter a group: a scheduler sets
    values in its groups, some of them in place.
    """
    probe = torch.nn.Parameter(torch.zeros(1))
    groups = map(current_settings, optimizer.param_groups)
    return bare_twin(optimizer, [{**group, "params": [probe]} for group in groups])


def refused(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, why ``initialize`` refuses some of ``values`` (path in the configuration ->
    value), parameters of optimizer and scheduler included. ``"auto"`` is accepted for every
    parameter that exists.
    """
    by_section = refusals(values)
    for section, name_of, check in (
        ("optimizer", canonical_name, _resolve),
        ("scheduler", partial(built_name, "scheduler"), provided("check_schedule", _unchecked)),
    ):
        params = values.get(f"{section}.params") or {}
        later = [key for key, value in params.items() if value == "auto"]
        known_params = {key: value for key, value in params.items() if key not in later}
        try:
            name = name_of(str(values.get(f"{section}.type")))
        except (ConfigError, NotBuiltError):
            continue  # the type is refused
        try:
            check(name, known_params, later)
        except (ConfigError, NotBuiltError) as error:
            by_section[f"{section}.params"] = "; ".join(Mistakes.texts(error))
    return by_section


def _unchecked(name: str, params: Collection[str], later: Collection[str] = ()) -> None:
    """Accept all parameters of a schedule, which a package without schedules cannot build."""
