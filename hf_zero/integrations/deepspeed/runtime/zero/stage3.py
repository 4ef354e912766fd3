"""``deepspeed.runtime.zero.stage3``: estimates are hf_zero.estimate's."""

from hf_zero.integrations.not_built import function

_INSTEAD = (
    "call hf_zero.estimate(model, ranks=N), or `hf-zero estimate`: bytes on each rank at "
    "every stage, without memory for the model"
)
_HOME = "deepspeed.runtime.zero.stage3"

estimate_zero3_model_states_mem_needs = function(
    f"{_HOME}.estimate_zero3_model_states_mem_needs", _INSTEAD
)
estimate_zero3_model_states_mem_needs_all_cold = function(
    f"{_HOME}.estimate_zero3_model_states_mem_needs_all_cold", _INSTEAD
)
estimate_zero3_model_states_mem_needs_all_live = function(
    f"{_HOME}.estimate_zero3_model_states_mem_needs_all_live", _INSTEAD
)

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
