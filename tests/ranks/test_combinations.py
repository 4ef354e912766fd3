"""Pairs of features that go together, by the table of features: each trains as one of the two does
by its own oracle, beside the other, which changes no number; pairs that do not are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.activations import policy as activations
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES, RefusedValue
from hf_zero.config.features import reason
from hf_zero.errors import ConfigError
from hf_zero.zero.feature import FeatureSet
from tests.helpers.capabilities import ROWS, SMALL
from tests.helpers.capability import Keys, Row, WithoutGradients, no_compilation
from tests.helpers.engines import OnEngine
from tests.helpers.late_transfers import Late
from tests.helpers.models import ARCHITECTURES, llama, seeded
from tests.helpers.training import ArchitectureJob
from tests.ranks.test_capabilities import Case, equals_the_plain_loop, trained

PLAIN = Row(ArchitectureJob(ARCHITECTURES["llama"]), plan={"accumulation": 2}).only("oracle")
# The row of a feature with an oracle of its own, in the table of capabilities.
WITH_ORACLE = {
    "tensor_parallel": "tensor parallel",
    "expert_parallel": "expert parallel",
    "sequence_parallel": "sequence parallel",
    "compressed_communication": "4 bits both ways",
    "one_bit": "1-bit Adam, dense",
    "curriculum_learning": "curriculum",
    "quantize_training": "weights in few bits",
    "progressive_layer_drop": "layer drop",
    "data_efficiency.data_routing.random_ltd": "token drop, GPT-2",
}
FILES = "{folder}"  # in place of the folder of a run
# The keys of a feature that changes no number.
EXACT: dict[str, Keys] = {
    "zero_optimization.offload_optimizer": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}}
    },
    "zero_optimization.offload_param": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    "zero_optimization.update_in_backward": {"zero_optimization": {"update_in_backward": True}},
    "replicate_size": {"replicate_size": 2},
    "activation_checkpointing": {"activation_checkpointing": {"blocks": True}},
    "activation_offload": {"activation_offload": SMALL},
    "compile.blocks": {"compile": {"blocks": True, "backend": "eager"}},
    "checkpoint.async_save": {"checkpoint": {"async_save": True}},
    "comms_logger": {"comms_logger": {"enabled": True}},
    "flops_profiler": {"flops_profiler": {"enabled": True}},
    "metrics": {"metrics": {"enabled": True, "path": FILES}},
}
NEEDS_STAGE = {"zero_optimization.offload_param": (3,)}


def merged(one: Keys, other: Keys, folder: Path) -> Keys:
    keys = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            value = merged(keys.get(name, {}), dict(value), folder)
        keys[name] = str(folder) if value == FILES else value
    return keys


class Pair(Case):
    """``row`` with the keys of features beside it."""

    def __init__(self, row: Row, others: tuple[str, ...], folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "files").mkdir()
        keys = row.keys
        for other in others:

            def joined(stage: int, files: Path, keys: Any = keys, other: str = other) -> Keys:
                return merged(keys(stage, files), EXACT[other], files)

            keys = joined
        stages = [
            s for s in row.stages if all(s in NEEDS_STAGE.get(o, (0, 1, 2, 3)) for o in others)
        ]
        self.row = replace(row, keys=keys, columns=("oracle",), stages=tuple(stages or row.stages))
        if "replicate_size" in others:  # of two shards each
            self.row = replace(self.row, ranks=4)
        if "zero_optimization.update_in_backward" in others and row.session is OnEngine:
            self.row = replace(self.row, session=WithoutGradients)  # they are used by then
        self.folder, self.remains, self.first = folder, {}, 0


def trains(name: str, row: Row, others: tuple[str, ...], folder: Path) -> list[str]:
    """Return what is wrong of ``row`` beside ``others``."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            row.around(patch)
            no_compilation(patch)
            patch.setattr(activations, "transfers_of", lambda device: Late())
            case = Pair(row, others, folder)
            trace, *_ = trained(case)
            equals_the_plain_loop(case, trace)
    except (Exception, pytest.fail.Exception) as error:
        return [f"{name} with {' and '.join(others)}: {type(error).__name__}: {error}"]
    return []


def fits(row: Row, other: str) -> bool:
    """Return whether the ranks of ``row`` can have replicas, if ``other`` asks for them."""
    return other != "replicate_size" or row.ranks > 1


def refuses_value(feature: str, keys: Keys) -> bool:
    """Return whether ``feature`` refuses the stage of offloaded parameters."""
    values: list[RefusedValue] = [r for r in FEATURES[feature].refuses if r.key.endswith(".stage")]
    return any(r.applies(3) for r in values) and "offload_param" in str(keys)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_ORACLE)
def test_a_feature_with_an_oracle_beside_each_exact_one(name: str, tmp_path: Path) -> None:
    row, failed = ROWS[WITH_ORACLE[name]], []
    for number, (other, keys) in enumerate(EXACT.items()):
        if not reason(name, other) and not refuses_value(name, keys) and fits(row, other):
            failed += trains(name, row, (other,), tmp_path / str(number))
    gc.collect()
    assert not failed, "\n".join(failed)


@pytest.mark.long
@pytest.mark.parametrize("name", EXACT)
def test_exact_features_beside_each_other(name: str, tmp_path: Path) -> None:
    failed = []
    for number, (one, other) in enumerate(combinations(EXACT, 2)):
        if one == name and not reason(one, other):
            failed += trains(one, PLAIN, (one, other), tmp_path / str(number))
    gc.collect()
    assert not failed, "\n".join(failed)


GROUPS_OF_WEIGHTS: Keys = {
    "shared_parameters": {"enabled": True},
    "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}}},
}
SWITCHED = EXACT | {
    name: ROWS[row].keys(1, Path("files")) for name, row in WITH_ORACLE.items() if name != "one_bit"
} | {
    "compile.capture": {"compile": {"capture": "step"}, "kernels": ["optimizer"]},
    "tiled_mlp": {"tiled_mlp": {"enabled": True}},
    "quantization_aware_training": {"quantization_aware_training": {"config": "int8_weight"}},
    "float8_training": {"float8_training": {"recipe": "tensorwise", "emulate": True}},
    "sparse_attention": {"sparse_attention": {"mode": "bigbird", "block": 16}},
    "zero_optimization.zero_hpz_partition_size": {
        "zero_optimization": {"zero_hpz_partition_size": 2}
    },
    "float8_training.gather_weights": {
        "float8_training": {"recipe": "tensorwise", "emulate": True, "gather_weights": True}
    },
    "fused_modules": {"kernels": ["norms"]},
    "pre_layer_norm": {"pre_layer_norm": True},
    "training_phases": {"training_phases": {"phases": [{"steps": 2}, {"train_batch_size": 8}]}},
    "weight_quantization": {"compression_training": {"weight_quantization": GROUPS_OF_WEIGHTS}},
    "checkpoint.memory": {"checkpoint": {"memory": {"every": 2}}},
}  # fmt: skip

AXES = {"tensor_parallel", "expert_parallel", "sequence_parallel"}


def test_each_feature_with_keys_is_in_a_table() -> None:
    # its object needs an index of data, which tests/ranks/test_data_sampling.py makes
    elsewhere = {"data_efficiency.data_sampling"}
    without = {name for name, row in FEATURES.items() if row.keys} - SWITCHED.keys() - elsewhere
    assert not without, (
        f"{without}: write the keys into EXACT if the feature changes no number; into WITH_ORACLE "
        "if it has a row of capabilities with an oracle; else into SWITCHED alone"
    )


def test_a_pair_that_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    refused = [pair for pair in combinations(SWITCHED, 2) if reason(*pair)]
    assert len(refused) > 10
    model = seeded(llama)
    optimizer = torch.optim.AdamW(model.parameters())
    for one, other in refused:
        keys = merged(SWITCHED[one], SWITCHED[other], tmp_path)
        zero = {"stage": 3 if "offload_param" in str(keys) else 1} | keys.pop(
            "zero_optimization", {}
        )
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **keys}
        settings = ZeroConfig.from_dict(config)
        with pytest.raises(ConfigError) as raised:
            if {one, other} & AXES:  # which need more ranks before that
                FeatureSet.of(settings).check_combination(model, settings, optimizer)
            else:
                hf_zero.initialize(model=model, optimizer=optimizer, config=settings)
        said = str(raised.value)
        assert one in said and other in said and reason(one, other) in said, (one, other, said)
    assert not any(module._forward_hooks for module in model.modules())
