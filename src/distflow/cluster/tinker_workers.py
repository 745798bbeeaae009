"""`distflow serve --tinker` over Ray: its workers, each of which trains, samples, or both."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distflow.cluster import remote_calls
from distflow.cluster.process_groups import TorchCollective, backend_of, new_meeting
from distflow.cluster.ray_launcher import ray_for
from distflow.cluster.tinker_driver import DividedAdapter, TinkerWorker, WorkersSamplers
from distflow.config import Config
from distflow.config.keys.schema import with_values
from distflow.errors import UserError, count_of
from distflow.launch.plans.unloaded_run import bind_named
from distflow.launch.run_settings import make_plan, worker_needs
from distflow.launch.without_run.serve import base_model
from distflow.observe.writing.timing import lasting
from distflow.planning.plan import Plan
from distflow.processes.child import keep_exit_statuses
from distflow.runtime.worker_place import own_device
from distflow.tinker.messages import WorkerLost
from distflow.tinker.service import BaseModel
from distflow.training.engine import OneRank


@contextmanager
def tinker_workers(
    config: Config, name: str, folder: Path, say: Callable[[str], None]
) -> Iterator[BaseModel]:
    """Workers as in a run with the same keys. folder: of the checkpoints, an absolute path on all
    machines. Raises UserError."""
    if config.trainer.launcher != "ray" or config.actor_rollout_ref.actor.strategy == "fsdp":
        raise UserError(
            "--tinker has several workers by trainer.launcher=ray, each with a copy of the base: "
            "trainer.launcher=local or slurm, and actor.strategy=fsdp, are for runs"
        )

    # a served model has no reference of its own
    config = with_values(config, {"actor_rollout_ref.actor.use_kl_loss": False})
    plan = make_plan(config, bind_named(config))
    needs = worker_needs(config, plan.ranks)

    with ray_for(plan, needs, folder, say) as bundles:
        import ray

        meeting = new_meeting(folder)
        actors = list[Any]()
        remote: Any = ray.remote(TinkerWorker)  # Ray's handles have no types
        for rank in plan.ranks:
            needed = needs.of(rank)
            made = remote.options(
                num_cpus=needed.cpus,
                num_gpus=int(rank.device.startswith("cuda")),
                scheduling_strategy=bundles[rank.node],
                runtime_env={"env_vars": dict(needed.env)} if needed.env else None,
            )
            actors.append(
                made.remote(partial(_join, config, name, folder, plan, rank.rank, meeting))
            )

        try:
            with lasting(say, f"starting {count_of(len(actors), 'worker')}"):
                # all of them, since those that train wait for each other
                asked = [actor.build.remote() for actor in actors]
                facts: BaseModel = [remote_calls.reply(each) for each in asked][0]

            calls = [partial(_call, actor, rank) for rank, actor in enumerate(actors)]
            trainers = [calls[rank] for rank in _trainers(plan)]
            samplers = [calls[each.rank] for each in plan.ranks if "rollout" in each.engines]
            yield replace(
                facts,
                make_adapter=partial(DividedAdapter, trainers),
                make_samplers=lambda scoring: WorkersSamplers(samplers),
            )
        finally:
            for actor in actors:
                remote_calls.kill(actor)
            meeting.unlink(missing_ok=True)


def _trainers(plan: Plan) -> list[int]:
    return [rank.rank for rank in plan.ranks if "actor" in rank.engines]


def _join(
    config: Config, name: str, folder: Path, plan: Plan, rank: int, meeting: Path
) -> BaseModel:
    """In the worker's process: meet the other workers that train, and load the base."""
    keep_exit_statuses()
    own_device(plan.ranks[rank].device)
    trainers = _trainers(plan)
    group: Any = OneRank()
    if rank in trainers and len(trainers) > 1:
        if len({each.node for each in plan.ranks}) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend_of(plan),
            timeout=timedelta(seconds=config.trainer.peers_timeout_s),
            store=dist.FileStore(str(meeting), len(trainers)),
            rank=trainers.index(rank),
            world_size=len(trainers),
        )
        group = TorchCollective()

    node = plan.ranks[rank].node
    beside = sum(plan.ranks[each].node == node for each in trainers)
    return base_model(config, name, folder / f".worker-{rank}", group, max(beside, 1))


def _call(actor: Any, rank: int, method: str, *arguments: object) -> "Future[Any]":
    """The answer of a worker's method."""
    from ray.exceptions import RayActorError, RayTaskError

    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()

    def take(asked: "Future[Any]") -> None:
        error = asked.exception()
        if isinstance(error, RayTaskError):
            error = error.cause
        if isinstance(error, RayActorError):
            error = WorkerLost(
                f"worker {rank} has died: start the server again with the same --folder, --port "
                "and --api-key, which goes on from what is on disk"
            )
        if error is None:
            answer.set_result(asked.result())
        else:
            answer.set_exception(error)

    getattr(actor, method).remote(*arguments).future().add_done_callback(take)
    return answer
