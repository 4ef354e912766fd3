"""The manifests for Kubeflow: against the schemas of its custom resources, and the environment that
its operators make of them, replayed: torchrun and ranks find their places.

``kubeflow_schemas.json.gz`` has the schemas and their source (Apache License 2.0).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from hf_zero.errors import LaunchError
from hf_zero.launch.plan import Request, plan
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "kubernetes"
SCHEMAS = Path(__file__).with_name("kubeflow_schemas.json.gz")
DOCUMENTS = {
    document["kind"]: document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}


def strict(schema: Any) -> Any:
    """Return ``schema`` as JSON Schema that refuses unknown fields, as the API server does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    found = {name: strict(value) for name, value in schema.items()}
    fields = schema.get("properties")
    if isinstance(fields, dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        found["additionalProperties"] = False
    return found


def schema_of(kind: str) -> Any:
    schema = strict(json.loads(gzip.decompress(SCHEMAS.read_bytes()))[kind])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
    return schema


@in_one_item(["PyTorchJob", "TrainJob", "TrainingRuntime"])
def test_a_manifest_fits_its_schema(kind: str) -> None:
    check = jsonschema.Draft7Validator(schema_of(kind))
    assert not list(check.iter_errors(DOCUMENTS[kind]))
    wrong = {**DOCUMENTS[kind], "spec": {**DOCUMENTS[kind]["spec"], "imagge": "x"}}
    assert list(check.iter_errors(wrong))


def written(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def train_job_pods() -> list[dict[str, str]]:
    """Return the variables of the pods of the TrainJob, as ``EnforceMLPolicy`` of Kubeflow Trainer
    computes them (``pkg/runtime/framework/plugins/torch/torch.go``).
    """
    job, runtime = DOCUMENTS["TrainJob"], DOCUMENTS["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = node["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert (node["name"], label, container["name"]) == ("node", "trainer", "node")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    common = {
        **written(container),
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    return [{**common, "PET_NODE_RANK": str(index)} for index in range(trainer["numNodes"])]


def test_launchers_read_the_pods_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf-zero launch does not leave a pod alone."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    torchrun, *arguments = DOCUMENTS["TrainJob"]["spec"]["trainer"]["command"]
    assert torchrun == "torchrun"
    for index, variables in enumerate(train_job_pods()):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config, _, _ = config_from_args(get_args_parser().parse_args(arguments))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
        assert config.rdzv_endpoint == "gpt2-node-0-0.gpt2:29500"
        assert config.rdzv_configs["rank"] == index
    with pytest.raises(LaunchError, match=r"PET_NNODES=2 .*torchrun.*--node-rank"):
        plan(Request("train.py"), lambda: 1)
    place = {"num_nodes": 2, "node_rank": 1, "master_addr": "a", "master_port": 1}
    assert plan(Request("train.py", **place), lambda: 1).meeting == "a:1"
