"""The tables in the documentation of the facade say what happens: NAMES.md, which accounts for
DeepSpeed's names, and the retired keys of the README.
"""

from __future__ import annotations

import inspect
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
import yaml

from hf_zero.config import ZeroConfig
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.deepspeed.facade import FOLDER
from hf_zero.deepspeed.modules import API, LEFT_OUT, MISSING, NotBuilt, Provided
from hf_zero.errors import NotBuiltError
from tests.helpers.cells import in_one_item

ENGINE = "Methods and properties of DeepSpeedEngine"
MODULES = "Modules that are missing"
Account = dict[str, dict[str, dict[str, str]]]


def account() -> Account:
    """By section, by verdict: names and what is said of them."""
    found: Account = {}
    for line in (Path(FOLDER) / "NAMES.md").read_text().splitlines():
        if line.startswith("## "):
            section = found.setdefault(line[3:], {"There": {}, "Not built": {}, "Left out": {}})
        elif match := re.fullmatch(
            r"- (There|Not built|Left out): ((?:`[\w.*]+`(?:, )?)+)(?:: (.*))?", line
        ):
            verdict, names, said = match.groups()
            section[verdict].update(dict.fromkeys(re.findall(r"`([\w.*]+)`", names), said or ""))
        else:
            assert not line.startswith("- ") or line.startswith("- Used by: "), line
    return found


# functions and methods, and arguments that scripts pass by name
BY_NAME = """
utils.safe_get_full_fp32_param: param
utils.safe_get_full_grad: param
utils.safe_get_full_optimizer_state: param optim_state_key
utils.safe_set_full_fp32_param: param value
utils.safe_set_full_grad: param value
utils.safe_set_full_optimizer_state: param value optim_state_key
utils.safe_get_local_fp32_param: param
utils.safe_get_local_grad: param
utils.safe_get_local_optimizer_state: param optim_state_key
utils.safe_set_local_fp32_param: param value
utils.safe_set_local_grad: param value
utils.safe_set_local_optimizer_state: param value optim_state_key
utils.safe_update_full_grad_vectorized: param_list update_func
utils.z3_leaf_module: model
moe.utils.is_moe_param: param
moe.utils.split_params_into_shared_and_expert_params: params
moe.utils.split_params_into_different_moe_groups_for_optimizer: param_groups max_group_size
runtime.lr_schedules.LRRangeTest.step: self batch_iteration
runtime.lr_schedules.OneCycle.step: self batch_iteration
runtime.lr_schedules.WarmupLR.step: self last_batch_iteration
DeepSpeedEngine.set_data_post_process_func: self post_process_func
DeepSpeedEngine.set_custom_curriculum_learning_schedule: self schedule_func_dict
"""


def test_arguments_have_the_names_of_deepspeed() -> None:
    for path, names in (row.split(": ") for row in BY_NAME.strip().splitlines()):
        signature = inspect.signature(attrgetter(path)(deepspeed))
        signature.bind(**dict.fromkeys(names.split()))


def test_each_module_is_accounted_for_as_it_is() -> None:
    found = account()
    for path, row in API.items():
        if not row.names and path not in found:
            continue
        said = found[path]
        not_built = {n: i.remedy for n, i in row.names.items() if isinstance(i, NotBuilt)}
        assert said["Not built"] == not_built, path
        there = said["There"].keys()
        assert there >= row.names.keys() - not_built.keys(), path
        for name in there - row.names.keys():
            assert row.others and hasattr(dist, name), f"{path}.{name}"
        assert said["Left out"].keys() >= row.left_out.keys() - {"*"}, path
        for name, why in said["Left out"].items():
            assert row.why_not(name) == why and name not in row.names, f"{path}.{name}"
    assert found.keys() - API.keys() == {ENGINE, MODULES}
    missing = found[MODULES]["Left out"].items()
    assert {path.removesuffix(".*"): why for path, why in missing} == MISSING


def test_each_method_of_the_engine_and_each_module_with_a_user() -> None:
    said = account()[ENGINE]
    assert said["Left out"] == LEFT_OUT["DeepSpeedEngine"] and not said["Not built"]
    assert not [name for name in said["There"] if not hasattr(DeepSpeedEngine, name)]
    assert not [name for name in LEFT_OUT["DeepSpeedEngine"] if hasattr(DeepSpeedEngine, name)]
    assert len(said["There"]) > 50
    used = json.loads((Path(__file__).parent / "names_used.json").read_text())
    rows = {path: row.names.values() for path, row in API.items()}
    provided = {path for path, names in rows.items() if any(isinstance(n, Provided) for n in names)}
    frameworks = used.pop("frameworks")
    assert used.keys() == provided | {"DeepSpeedEngine"} and all((*used.values(), *frameworks))


VALUES: dict[str, Any] = yaml.safe_load("""
amp: {enabled: true, opt_level: O1}
compression_training: {weight_quantization: {shared_parameters: {enabled: true}}}
curriculum_learning: {enabled: true, curriculum_type: seqlen}
eigenvalue: {enabled: true}
elasticity: {enabled: true, max_train_batch_size: 48, micro_batch_sizes: [2, 4]}
graph_harvesting: true
nebula: {enabled: true}
progressive_layer_drop: {enabled: true, theta: 0.5}
quantize_training: {enabled: true}
sparse_attention: {mode: fixed, block: 16}
sparse_gradients: true
zero_optimization.mics_shard_size: 2
zero_optimization.mics_hierarchical_params_gather: true
zero_optimization.zeropp_loco_param: {err_beta: 0.8}
""")
OTHERWISE: dict[str, Any] = yaml.safe_load("""
zero_optimization.zenflow: {topk_ratio: 0.1}
gradient_clipping: 1.0
bf16.check_grad_overflow: true
managed_gradient_accumulation: false
wall_clock_breakdown: true
tensorboard: {enabled: true}
comms_logger: {enabled: true}
steps_per_print: 10
dump_state: true
zero_optimization.zero_quantized_gradients: true
zero_optimization.zero_quantized_weights: true
zero_optimization.zero_quantized_nontrainable_weights: true
""")


def rows(heading: str = "Keys that DeepSpeed has retired") -> dict[str, str]:
    text = (Path(FOLDER) / "README.md").read_text().partition(f"## {heading}")[2]
    text = text.partition("\n## ")[0]
    return dict(re.findall(r"^\| `([\w.]+)`[^|]*\|[^|]*\| (.*) \|$", text, re.MULTILINE))


def written(key: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    section, _, name = key.rpartition(".")
    (config.setdefault(section, {}) if section else config)[name] = value
    if name == "zeropp_loco_param":
        config["zero_optimization"]["zero_quantized_gradients"] = True
    return config


def test_all_of_them_are_in_the_table() -> None:
    assert rows().keys() == {*VALUES, "optimizer.type"}
    assert rows("Keys that mean something else here").keys() == OTHERWISE.keys()


@in_one_item((VALUES | OTHERWISE).items())
def test_each_does_what_the_table_says(row: tuple[str, Any]) -> None:
    key, value = row
    said = (rows() | rows("Keys that mean something else here"))[key]
    config = written(key, value)
    assert said.startswith(("works", "refused: ")) or key in OTHERWISE
    if not said.startswith("refused: "):
        ZeroConfig.from_dict(config).resolve(4)
        return
    name = "offload_optimizer, whose exact update" if key in OTHERWISE else key.rpartition(".")[2]
    with pytest.raises(NotBuiltError, match=re.escape(name)):
        ZeroConfig.from_dict(config)
