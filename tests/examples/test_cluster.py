"""The files for clusters: the manifests parse and belong together."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from distflow.cli import make_parser
from distflow.config.keys.schema import schema_keys

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


def manifests() -> dict[str, Any]:
    return {
        found["kind"]: found
        for found in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    }


def test_the_command_of_the_ray_job_is_one_of_ours():
    pipeline, *words = shlex.split(manifests()["RayJob"]["spec"]["entrypoint"])
    assert pipeline == "distflow"
    arguments = make_parser().parse_args(words)
    keys = [override.partition("=")[0] for override in arguments.overrides]
    assert set(keys) <= schema_keys().keys() and "trainer.launcher" in keys


def test_ray_job_and_launcher_agree_on_the_nodes():
    spec = manifests()["RayJob"]["spec"]
    keys = dict(word.split("=", 1) for word in shlex.split(spec["entrypoint"]) if "=" in word)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (
        int(keys["trainer.nnodes"])
        == group["replicas"]
        == group["minReplicas"]
        == group["maxReplicas"]
    )
    assert (
        int(keys["trainer.n_gpus_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert spec["rayClusterSpec"]["rayVersion"] in (CLUSTER / "Dockerfile").read_text()


def test_every_pod_has_the_runs_folder_the_label_and_the_image():
    found = manifests()
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    selector = found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]

    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        assert selector.items() <= template["metadata"]["labels"].items()
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        claim = found["PersistentVolumeClaim"]["metadata"]["name"]
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
        (container,) = template["spec"]["containers"]
        assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
        assert f"-t {container['image']} ." in (CLUSTER / "Dockerfile").read_text()
