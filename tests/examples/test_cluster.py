"""The files for clusters: the manifests parse and belong together; the Slurm job runs on nodes that stand for two."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.cli import make_parser
from distflow.config.keys.schema import schema_keys
from tests.sparse_params import BY_HAND, one_fast_in

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
SBATCH = CLUSTER / "slurm.sbatch"

# What Slurm has, on one machine: a step is its command, started here, and a job of two nodes.
TOOLS = {
    "scontrol": "printf '%s\\n' first second",
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
}
# In place of a run: what Ray and the driver were given, once both nodes are there.
DRIVER = """
import os, signal, stat, sys, ray
ray.init(log_to_driver=False)
token = os.environ["RAY_AUTH_TOKEN_PATH"]
print(sum(node["Alive"] for node in ray.nodes()), "nodes;", oct(stat.S_IMODE(os.stat(token).st_mode)), "token")
print(sys.argv[1:], flush=True)
if "wait_for_signal" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("run saved", flush=True), os._exit(143)))
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
sys.exit(7)
"""


def manifests() -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())}


def test_the_command_of_the_ray_job_is_one_of_ours() -> None:
    pipeline, *words = shlex.split(manifests()["RayJob"]["spec"]["entrypoint"])
    assert pipeline == "distflow"
    arguments = make_parser().parse_args(words)
    keys = [override.partition("=")[0] for override in arguments.overrides]
    assert set(keys) <= schema_keys().keys() and "trainer.launcher" in keys


def test_ray_job_and_launcher_agree_on_the_nodes() -> None:
    spec = manifests()["RayJob"]["spec"]
    keys = dict(word.split("=", 1) for word in shlex.split(spec["entrypoint"]) if "=" in word)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert int(keys["trainer.nnodes"]) == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert int(keys["trainer.n_gpus_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["rayClusterSpec"]["rayVersion"] in (CLUSTER / "Dockerfile").read_text()


def test_every_pod_has_the_runs_folder_the_label_and_the_image() -> None:
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


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="wants shellcheck (Debian: apt-get install shellcheck)")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "-s", "bash", str(SBATCH)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def job(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the file as Slurm would run it on the first node of two, in `folder`."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "driver.py").write_text(DRIVER)
    python = shlex.quote(sys.executable)
    pipelines = {
        **TOOLS,
        "python": f'exec {python} "$@"',
        "ray": f'exec {python} -m ray.scripts.scripts "$@"',
        "distflow": f'exec {python} {shlex.quote(str(tools / "driver.py"))} "$@"',
    }
    for name, code in pipelines.items():
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "ignored",
        "SLURM_GPUS_ON_NODE": "4",
    }
    return subprocess.run(
        ["bash", str(SBATCH), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "status"),
    one_fast_in(2, [(("grpo", "data.seed=3"), 7), (("grpo", "wait_for_signal"), 143)], unpack=True, others=BY_HAND),
)
def test_the_slurm_job_starts_ray_runs_and_leaves_nothing(tmp_path: Path, words: tuple[str, ...], status: int) -> None:
    """On a real Ray of two nodes. Its status is that of the run, also of one that was asked to save and leave."""
    pytest.importorskip("ray")
    done = job(tmp_path, *words)
    assert done.returncode == status, done.stdout + done.stderr
    assert "2 nodes; 0o600 token" in done.stdout
    given = ["train", *words, "trainer.launcher=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    assert str(given) in done.stdout
    assert ("run saved" in done.stdout) == (status == 143)
    assert not list(tmp_path.glob(".ray-token-*"))
    assert f"/tmp/ray-{os.getpid()}".encode() not in _command_lines()
    shutil.rmtree(f"/tmp/ray-{os.getpid()}")


def test_the_slurm_job_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SBATCH)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "usage: sbatch" in done.stderr


def _command_lines() -> bytes:
    """Of all processes."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes())
            except OSError:
                continue  # it ended
    return b"\n".join(lines)
