"""What a rank's plan names is what its worker builds and runs: no more, no less."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distflow.graph import BoundPipeline
from distflow.launch.build_worker import build_worker
from distflow.launch.one_process_launcher import local_ports
from distflow.planning.plan import Plan, RankPlan, rank_plan
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.resources import Resources, build_resources
from distflow.runtime.run_recorder import Recorder
from distflow.runtime.spec import Spec
from distflow.runtime.stop_signals import StopRequest
from distflow.runtime.worker_inputs import WorkerInputs
from distflow.scheduling.coordinator import Coordinator
from distflow.scheduling.ledger import Ledger
from tests.e2e.runs import Playground
from tests.planning.valid_plan import check_plan

STEPS = ("trainer.total_training_steps=3", "trainer.save_freq=3")


def split(
    pipeline: BoundPipeline, *parts: tuple[Sequence[str], Sequence[str]]
) -> tuple[RankPlan, ...]:
    return tuple(rank_plan(pipeline, rank, "cpu", *part) for rank, part in enumerate(parts))


def run_ranks(spec: Spec) -> list[Resources]:
    """All ranks of the plan in this process; the last one trains."""
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    resources = [build_resources(spec.factories, rank) for rank in spec.plan.ranks]
    ledger = Ledger(spec.run_dir / "ledger.jsonl")
    coordinator = Coordinator(spec.data, ledger)
    store = CheckpointStore(spec.run_dir / "checkpoints")

    with (
        Recorder(spec, spec.data.total_steps, 0, -1) as recorder,
        StopRequest(lambda name: None) as stop,
    ):
        ports = local_ports(coordinator, recorder.waits)
        version = coordinator.version
        generating = replace(
            ports, validate=lambda step: [workers[0].validation.validate_part(step, 0, 1)]
        )

        workers = [
            build_worker(WorkerInputs(spec, rank, own, each, recorder, store, stop, {}, version))
            for rank, (own, each) in enumerate(zip(resources, (ports, generating), strict=False))
        ]
        if len(workers) == 1:
            with workers[0] as worker:
                worker.training_loop()
        else:
            rollout, trainer = workers
            with rollout, trainer:
                trainer.training_loop()

    return resources


def weights(resources: Resources) -> dict[str, Tensor]:
    assert resources.actor is not None
    return resources.actor.state().trained_weights()


def test_generation_and_training_on_two_workers_are_the_run_of_one(tmp_path):
    playground = Playground(tmp_path)
    keys = (
        *STEPS,
        "trainer.logger=[]",
        "trainer.test_freq=1",
        f"data.val_files={tmp_path}/rows.jsonl",
    )
    _, spec = playground.spec("grpo", *keys, name="one")
    (one,) = run_ranks(spec)
    _, spec = playground.spec("grpo", *keys, name="two")
    pipeline = spec.pipeline()
    rollout_nodes, training_nodes = (
        [n.node_id for n in nodes] for nodes in (pipeline.rollout_nodes, pipeline.training_nodes)
    )
    spec = replace(
        spec,
        plan=Plan(
            pipeline.graph_id, split(pipeline, (rollout_nodes, []), ([], training_nodes)), ()
        ),
    )
    check_plan(spec.plan, pipeline)
    rollout, trainer = run_ranks(spec)
    assert rollout.actor is None and rollout.rollout is not None and rollout.reward_fn is not None
    assert trainer.rollout is None and trainer.reward_fn is None and trainer.ref is not None
    ours = weights(trainer)
    theirs = weights(one)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_node_that_is_taken_from_the_plan_does_not_run(tmp_path):
    playground = Playground(tmp_path)
    _, spec = playground.spec("ppo", *STEPS, "actor_rollout_ref.rollout.n=1", "trainer.logger=[]")
    pipeline, (whole,) = spec.pipeline(), spec.plan.ranks
    training_nodes = [name for name in whole.training_nodes if name != "actor_train"]
    (rank,) = split(pipeline, (whole.rollout_nodes, training_nodes))
    spec = replace(spec, plan=replace(spec.plan, ranks=(rank,)))
    before = {
        name: tensor.clone()
        for name, tensor in weights(build_resources(spec.factories, rank)).items()
    }
    (resources,) = run_ranks(spec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(resources).items())
    assert resources.critic is not None and resources.critic.state().meta["num_steps"] == 3
