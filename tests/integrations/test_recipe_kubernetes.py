"""The manifests for Kubeflow: against the schemas of its custom resources, and the environment that
its operators make of them, replayed: torchrun and ranks find their places.

``kubeflow_schemas.json.gz`` has the schemas and their source (Apache License 2.0).
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from hf_zero.distributed.rendezvous import Place, discover
from hf_zero.errors import LaunchError
from hf_zero.launch.hosts import free_port
from hf_zero.launch.plan import Request, plan
from hf_zero.measures.metrics_file import read_metrics
from hf_zero.report.run import read_run

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


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each mapping in ``value`` that is neither names nor resources."""
    if isinstance(value, list):
        return [found for at, each in enumerate(value) for found in paths_of(each, (*path, at))]
    if not isinstance(value, dict):
        return []
    free = {"metadata", "limits", "labels"}
    below = [paths_of(each, (*path, key)) for key, each in value.items() if key not in free]
    return [path, *(found for each in below for found in each)]


@pytest.mark.parametrize("kind", ["PyTorchJob", "TrainJob", "TrainingRuntime"])
def test_a_manifest_fits_its_schema(kind: str) -> None:
    check = jsonschema.Draft7Validator(schema_of(kind))
    assert not list(check.iter_errors(DOCUMENTS[kind]))
    for path in paths_of(DOCUMENTS[kind]):  # a misspelt field is an error everywhere
        wrong = json.loads(json.dumps(DOCUMENTS[kind]))
        at = wrong
        for step in path:
            at = at[step]
        at["imagge"] = "x"
        assert path[-1:] == ("pytorchReplicaSpecs",) or list(check.iter_errors(wrong)), path


def test_the_claim_the_token_and_the_user_of_pods() -> None:
    """The schema of the claim is that of a claim in a pod; the token is the secret in the card; the
    user of the image, whom the Dockerfile names, may write to the volumes.
    """
    job = schema_of("PyTorchJob")["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]
    pod = job["additionalProperties"]["properties"]["template"]["properties"]["spec"]
    volume = pod["properties"]["volumes"]["items"]["properties"]["ephemeral"]["properties"]
    schema = volume["volumeClaimTemplate"]["properties"]["spec"]
    check, claim = jsonschema.Draft7Validator(schema), DOCUMENTS["PersistentVolumeClaim"]
    assert not list(check.iter_errors(claim["spec"]))
    assert list(check.iter_errors({**claim["spec"], "accessMode": []}))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    card, dockerfile = (FOLDER / "README.md").read_text(), (ROOT / "Dockerfile").read_text()
    for each in pods_of("PyTorchJob") + pods_of("TrainingRuntime"):
        (volume,) = [volume for volume in each["volumes"] if volume["name"] == "runs"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (token,) = [entry for entry in each["containers"][0]["env"] if "valueFrom" in entry]
        secret = token["valueFrom"]["secretKeyRef"]
        command = f'secret generic {secret["name"]} --from-literal={secret["key"]}="$HF_TOKEN"'
        assert token["name"] == "HF_TOKEN" and secret["optional"] and command in card
        assert f"USER {each['securityContext']['fsGroup']}\n" in dockerfile


def pods_of(kind: str) -> list[Any]:
    spec = DOCUMENTS[kind]["spec"]
    if kind == "PyTorchJob":
        return [each["template"]["spec"] for each in spec["pytorchReplicaSpecs"].values()]
    (node,) = spec["template"]["spec"]["replicatedJobs"]
    return [node["template"]["spec"]["template"]["spec"]]


def written(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def torch_job_pods() -> list[dict[str, str]]:
    """Return the variables of the pods of the PyTorchJob, as ``setPodEnv`` of the training operator
    computes them (``pkg/controller.v1/pytorch/envvar.go``).
    """
    job = DOCUMENTS["PyTorchJob"]
    name, spec = job["metadata"]["name"], job["spec"]
    replicas = {kind: each["replicas"] for kind, each in spec["pytorchReplicaSpecs"].items()}
    total, ranks = sum(replicas.values()), int(spec["nprocPerNode"])
    address = {"MASTER_PORT": "23456", "MASTER_ADDR": f"{name}-master-0"}
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    common = {
        **written(container), "PYTHONUNBUFFERED": "1",
        **address, **{f"PET_{key}": each for key, each in address.items()},
        "WORLD_SIZE": str(total * ranks), "PET_NPROC_PER_NODE": str(ranks),
        "PET_NNODES": str(total),
    }  # fmt: skip
    return [
        {**common, "RANK": str(rank), "PET_NODE_RANK": str(rank)}
        for rank in range(replicas["Master"] + replicas["Worker"])
    ]


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


PODS = {
    "PyTorchJob": (torch_job_pods, "gpt2-master-0:23456"),
    "TrainJob": (train_job_pods, "gpt2-node-0-0.gpt2:29500"),
}


def command_of(kind: str) -> list[str]:
    spec = DOCUMENTS[kind]["spec"]
    if kind == "TrainJob":
        return list(spec["trainer"]["command"])
    commands = [
        each["template"]["spec"]["containers"][0]["command"]
        for each in spec["pytorchReplicaSpecs"].values()
    ]
    assert commands[0] == commands[1]
    return list(commands[0])


def inside(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("kind", PODS)
def test_launchers_read_the_pods_variables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf-zero launch does not leave a pod alone."""
    pods, meeting = PODS[kind]
    found = pods()
    assert len(found) == 2
    for index, variables in enumerate(found):
        inside(monkeypatch, variables)
        torchrun, *arguments = command_of(kind)
        assert torchrun == "torchrun"
        config, _, _ = config_from_args(get_args_parser().parse_args(arguments))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
        assert (config.rdzv_endpoint, config.rdzv_configs["rank"]) == (meeting, index)
    with pytest.raises(LaunchError, match=r"PET_NNODES=2 .*torchrun.*--node-rank"):
        plan(Request("train.py"), lambda: 1)
    place = {"num_nodes": 2, "node_rank": 1, "master_addr": "a", "master_port": 1}
    assert plan(Request("train.py", **place), lambda: 1).meeting == "a:1"


def test_a_pod_of_one_rank_needs_no_torchrun() -> None:
    """A PyTorchJob with ``nprocPerNode: "1"``: the variables are those of ranks."""
    for rank, variables in enumerate(torch_job_pods()):
        place = discover({**variables, "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "1"})
        assert place == Place(rank, 2, None, None, "gpt2-master-0", 23456, None)


def test_pods_have_time_to_save_and_memory_for_checkpoints() -> None:
    pods = [(kind, pod) for kind in ("PyTorchJob", "TrainingRuntime") for pod in pods_of(kind)]
    for kind, pod in pods:
        (container,) = pod["containers"]
        patience = int(written(container)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert pod["terminationGracePeriodSeconds"] > patience > 30  # the default of both
        mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert set(mounted) == set(volumes) and mounted["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        folder = command_of("TrainJob" if kind == "TrainingRuntime" else kind)[-1]
        assert folder.startswith(f"{mounted['runs']}/")
        assert "persistentVolumeClaim" in volumes["runs"]


@pytest.mark.long
@pytest.mark.parametrize("kind", PODS)
def test_two_pods_train(kind: str, tmp_path: Path) -> None:
    """Pods are processes of this machine with a rank each; their names are 127.0.0.1."""
    port, started = str(free_port()), []
    script = ROOT / "recipes" / "slurm" / "train_on_slurm.py"
    here = {"ADDR": "127.0.0.1", "PORT": port}
    for index, variables in enumerate(PODS[kind][0]()):
        own = {
            f"{prefix}MASTER_{name}": value
            for prefix in ("", "PET_")
            for name, value in here.items()
            if f"{prefix}MASTER_{name}" in variables
        }
        environment = {
            **{name: value for name, value in os.environ.items() if name[:4] != "PET_"},
            **variables, **own, "PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", str(script), "--num_iterations", "6",
            "--output_dir", str(tmp_path / "run"),
        ]  # fmt: skip
        with open(tmp_path / f"log-{index}", "w") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(200) for process in started]
    finally:
        for process in started:
            process.terminate()
    said = "\n".join((tmp_path / f"log-{index}").read_text() for index in range(2))
    assert codes == [0, 0], f"{shlex.join(command)}\n{said[-8000:]}"
    (start,) = read_run(tmp_path / "run").starts
    assert start.header["ranks"] == 2
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
