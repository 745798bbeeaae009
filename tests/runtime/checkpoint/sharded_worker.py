"""What a rank of the tests of sharded checkpoints does: tasks by name, given in `task.json` of its
folder."""

import json
import os
import pickle
import random
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distflow.cluster.process_groups import TorchCollective
from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.checkpoint import saver as saver_module
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.checkpoint.files import own_shards, shard_name
from distflow.runtime.checkpoint.restore import restore, set_generators
from distflow.runtime.checkpoint.saved_parts import part_of_rank, saved_parts
from distflow.runtime.checkpoint.saver import Saver
from distflow.runtime.resources import build_resources
from distflow.runtime.sample_queue.protocol import ResumePoint
from distflow.runtime.spec import Spec
from distflow.scheduling.coordinator import Coordinator
from distflow.training.optimizer import make_schedule
from distflow.training.torch_engine import TorchTrainEngine

SEED = 3


def main(rank: int, folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    job = Job(rank, folder, task, pickle.loads(Path(task["spec"]).read_bytes()))
    {"save": save, "reshard": reshard, "be_killed": be_killed, "fill_the_disk": fill_the_disk}[
        task["do"]
    ](job)


class Job:
    """A rank with an engine whose weights lie over all ranks, and a saver."""

    def __init__(self, rank: int, folder: Path, task: dict[str, Any], spec: Spec) -> None:
        """task: hybrid means two replicas, each over half of the ranks; kill is (rank, point)."""
        self.rank = rank
        self.folder = folder
        self.size = dist.get_world_size()
        plan = replace(
            spec.plan, ranks=tuple(replace(spec.plan.ranks[0], rank=r) for r in range(self.size))
        )
        self.spec = replace(spec, plan=plan)
        shape, names = (
            ((2, self.size // 2), ("replicate", "shard"))
            if task.get("hybrid")
            else ((self.size,), ("shard",))
        )
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        built = build_resources(spec.factories, plan.ranks[0])
        assert isinstance(built.actor, TorchTrainEngine)
        self.engine = sharded(built.actor.model, self.mesh)
        self.resources = replace(built, actor=self.engine)
        self.store = CheckpointStore(Path(task["checkpoints"]), on_point=self.on_point)
        self.at: dict[str, Callable[[], object]] = {}
        doomed, point = task.get("kill", (None, ""))
        if doomed == rank:
            self.at[point] = lambda: os.kill(os.getpid(), signal.SIGKILL)

    def on_point(self, point: str) -> None:
        self.at.get(point, lambda: None)()

    def saver(self) -> Saver:
        return Saver(self.store, TorchCollective(), self.saved)

    def saved(self, step: int, path: Path) -> None:
        (self.folder / f"saved-{step}").write_text(path.name)

    def save(self, saver: Saver, step: int, wait: bool) -> None:
        others = [part_of_rank(rank) for rank in range(1, self.size)]
        parts = [
            *saved_parts(self.spec, self.resources, lambda: resume_point(self.spec), {}, self.rank)
        ]
        odd = (shard_name("odd", self.rank), own_shards(odd_tensors(self.mesh), self.rank == 0))
        saver.save(step, [odd, *parts], others, wait=wait)

    def step(self, seed: int) -> None:
        """An optimizer step on gradients that depend on the seed alone."""
        for parameter in self.engine.model.parameters():
            assert isinstance(parameter, DTensor)
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        self.engine.optimizer.step()
        self.engine.num_steps += 1

    def keep_state(self, name: str) -> None:
        """All of the engine's tensors, gathered by the collectives of DTensor, for the test to
        compare with."""
        whole = {key: full(tensor).clone() for key, tensor in self.engine.state().tensors.items()}
        if self.rank == 0:
            save_file(whole, self.folder / f"{name}.safetensors")

    def tell(self, what: Any) -> None:
        (self.folder / f"{self.rank}.json").write_text(json.dumps(what))


def sharded(model: torch.nn.Module, mesh: DeviceMesh) -> TorchTrainEngine:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TorchTrainEngine(
        model, optimizer=optimizer, schedule=make_schedule("constant", total_steps=10)
    )


def odd_tensors(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Fewer rows than ranks, none at all, columns, the same on every rank, and such as no mesh
    knows."""
    whole = whole_odd_tensors()
    rest = [Replicate()] * (mesh.ndim - 1)
    placed = {
        "few rows": Shard(0),
        "nothing": Shard(0),
        "columns": Shard(1),
        "replicated": Replicate(),
    }

    return {
        **whole,
        **{n: distribute_tensor(whole[n], mesh, [*rest, p]) for n, p in placed.items()},
    }


def whole_odd_tensors() -> dict[str, Tensor]:
    return {
        "few rows": torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
        "nothing": torch.zeros(0, 2),
        "columns": torch.arange(35, dtype=torch.float64).reshape(5, 7),
        "replicated": torch.arange(4),
        "plain": torch.tensor(7.5),
    }


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def resume_point(spec: Spec) -> ResumePoint[Batch]:
    return ResumePoint(Coordinator(spec.data).snapshot(), {})


def draws() -> list[float]:
    return [random.random(), *torch.rand(2).tolist()]


def save(job: Job) -> None:
    """Step 1 in the background: the run continues before anything is written; step 2 at once."""
    set_generators(None, SEED, job.rank)
    went_on = threading.Event()
    job.at["part " + shard_name("odd", job.rank)] = lambda: went_on.wait(60) or os._exit(3)

    with job.saver() as saver:
        job.step(1)
        job.keep_state("step-1")
        job.save(saver, 1, wait=False)
        drawn = draws()
        job.step(2)
        assert not (job.folder / "saved-1").exists()
        job.keep_state("step-2")
        went_on.set()
        job.save(saver, 2, wait=True)
        assert job.rank or (job.folder / "saved-1").exists() and (job.folder / "saved-2").exists()

    job.tell(drawn)


def reshard(job: Job) -> None:
    """Resume from step 1, and save that again."""
    checkpoint = job.store.load(1)
    restore(checkpoint, job.resources)
    job.keep_state("loaded")
    set_generators(checkpoint, SEED, job.rank)
    drawn = draws()
    odd = checkpoint.load("odd", odd_tensors(job.mesh).get)

    for name, like in odd_tensors(job.mesh).items():
        assert type(odd[name]) is type(like) and odd[name].dtype == like.dtype
        here = [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in (odd[name], like)
        ]
        assert torch.equal(*here), name

    job.store = CheckpointStore(job.folder / "checkpoints")
    with job.saver() as saver:
        job.save(saver, 1, wait=False)
    job.tell(drawn)


def be_killed(job: Job) -> None:
    """One rank, within the save of step 4; rank 0 waits a second for the other's parts."""
    saver_module.DEADLINE_S = 1.0  # type: ignore[misc]
    try:
        with job.saver() as saver:
            job.step(1)
            job.save(saver, 4, wait=True)
    except (UserError, RuntimeError) as err:
        job.tell(str(err))
        os._exit(0)  # the group has lost a rank


def fill_the_disk(job: Job) -> None:
    """For rank 1 no file can grow to the size of its shards."""
    _, unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with job.saver() as saver:
            if job.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited))
            job.save(saver, 4, wait=False)
            while True:
                saver.check()
    except UserError as err:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        job.tell(str(err))
