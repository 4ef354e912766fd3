"""Refusals that need neither a model nor the number of ranks, found before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.checks import STAGE
from hf_zero.config.resolving import ACCUMULATION, BATCH, ELASTICITY, EQUATION, MICRO, TOTAL
from hf_zero.config.sections import OPTIMIZERS, SCHEDULERS
from hf_zero.config.spelling import did_you_mean

SENDS_MOMENTUM = ("onebitadam", "onebitlamb", "zerooneadam")


def refusals(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, the reasons why ``initialize`` refuses ``values``, the values of a
    configuration by path, on any number of ranks.
    """
    found: dict[str, str] = {}
    for section, names in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        kind = values.get(f"{section}.type")
        if kind is not None and str(kind).lower() not in {name.lower() for name in names}:
            found[f"{section}.type"] = (
                f"hf-zero builds no {section} {kind}: write another name, or remove the section "
                f"and pass an object to initialize{did_you_mean(str(kind), names)}"
            )
    stage, optimizer = values.get(STAGE, 0), str(values.get("optimizer.type"))
    if optimizer.lower() in SENDS_MOMENTUM and stage == 3:
        found["optimizer.type"] = (
            f"{optimizer} needs whole weights on each rank, which stage 3 does not keep; write "
            f"{STAGE}: 1, or another optimizer"
        )
    elastic = values.get(ELASTICITY) or {}
    written = [key for key in BATCH if key in values]
    if elastic.get("enabled"):
        if written and not elastic.get("ignore_non_elastic_batch_info"):
            found[written[0]] = (
                f"{ELASTICITY} computes the batch sizes; remove the key, or write "
                f"{ELASTICITY}.ignore_non_elastic_batch_info: true"
            )
    elif TOTAL in values:
        micro, accumulation = values.get(MICRO, 1), values.get(ACCUMULATION, 1)
        if values[TOTAL] % (micro * accumulation):
            found[TOTAL] = (
                f"{values[TOTAL]} is no multiple of {MICRO} × {ACCUMULATION} = {micro} × "
                f"{accumulation}, so that no number of ranks fits ({EQUATION}); change one of them"
            )
    return found
