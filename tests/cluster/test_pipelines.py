"""Pipelines of several parts over a real Ray: who runs what, and that the parts end where one
process does."""

import json
from pathlib import Path

import pytest

from distflow.cluster.ray_launcher import launch_ray
from distflow.observe.run_reader import read_samples
from distflow.planning.plan import Plan
from distflow.runtime.checkpoint.checkpoint_store import CheckpointStore
from distflow.runtime.spec import Spec
from tests.cluster.test_supervisor import check_same, distance
from tests.e2e.runs import Playground, Run

pytestmark = pytest.mark.slow

RAY = ("trainer.launcher=ray", "trainer.n_gpus_per_node=3")
GONE = (
    "reward.functions",
    "reward.num_workers",
    "custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
)
STEPS = (
    *(f"~{key}" for key in GONE),
    "trainer.total_training_steps=4",
    "trainer.save_freq=4",
    "trainer.test_freq=4",
    "actor_rollout_ref.actor.optim.scheduler=constant",
    "critic.optim.scheduler=constant",
    "critic.optim.lr=1e-3",
    "trust.check_freq=0",
)

# Two models learn from the same rows: one the answers, another how many tokens are left, which a
# diamond works out.
TWO_MODELS = """
from distflow import node
from distflow.graph import Pipeline
from distflow.pipelines import nodes


@node(writes={"left": "response"})
def tokens_left(response_mask, ctx):
    ctx.state["steps"] = ctx.state.get("steps", 0) + 1
    return response_mask.flip(-1).cumsum(-1).flip(-1)


@node(writes={"third": "response"})
def one_third(left):
    return left / 3


@node(writes={"rest": "response"})
def two_thirds(left):
    return left * 2 / 3


@node(writes="returns")
def together(third, rest):
    return third + rest


def two_models():
    pipeline = Pipeline("two_models").add_node("load", nodes.load_responses)
    pipeline.add_node("learn_answers", nodes.train_sft)
    for made in (tokens_left, one_third, two_thirds, together):
        pipeline.add_node(made.__name__, made, plane="training")
    pipeline.add_node("guess_lengths", nodes.compute_value, only_forward_compute=True)
    return pipeline.add_node("learn_lengths", nodes.train_critic).build()
"""
ANSWERS = ("learn_answers",)
LENGTHS = ("tokens_left", "one_third", "two_thirds", "together", "guess_lengths", "learn_lengths")


@pytest.fixture(scope="module")
def ground(tmp_path_factory, on_ray):
    ground = Playground(tmp_path_factory.mktemp("pipelines"))
    ground.write_rows(
        [{"prompt": f"{i}+{i}=", "response": f"{2 * i}" * (1 + i % 3)} for i in range(12)]
    )
    ground.write_critic()
    (ground.folder / "two_models.py").write_text(TWO_MODELS)
    return ground


def keys(ground: Playground, *more: str) -> tuple[str, ...]:
    return (
        *STEPS,
        f"dag.pipeline={ground.folder}/two_models.py:two_models",
        f"critic.model.path={ground.folder}/critic",
        f"data.val_files={ground.folder}/rows.jsonl",
        *more,
    )


@pytest.fixture(scope="module")
def alone(ground):
    return ground.run("sft", *keys(ground), name="alone")


def spec_of(ground: Playground, *more: str, name: str) -> Spec:
    return ground.spec("sft", *keys(ground, *RAY, *more), name=name)[1]


def ran(folder: Path, part: int) -> list[str]:
    """Phases of the training loop that one process has spans of, in the order in which they were
    first entered."""
    file = folder / "spans" / (f"training-{part}.jsonl" if part else "training.jsonl")
    names = [json.loads(line)["what"] for line in file.read_text().splitlines()]
    known = ("train_step", *LENGTHS[:4], "compute_value", "train_critic")
    return [name for name in dict.fromkeys(names) if name in known]


OF_ANSWERS = ["train_step"]
OF_LENGTHS = [*LENGTHS[:4], "compute_value", "train_critic"]


def nodes_of(plan: Plan) -> list[tuple[str, ...]]:
    return [rank.training_nodes for rank in plan.ranks]


def test_two_independent_parts_run_on_the_workers_that_the_scheduler_gave_them(ground, alone):
    spec = spec_of(ground, name="placed")
    assert nodes_of(spec.plan) == [LENGTHS, LENGTHS, ANSWERS]
    sized = spec_of(ground, "dag.model_sizes={actor: 600B, critic: 500M}", name="sized").plan
    assert nodes_of(sized) == [ANSWERS, ANSWERS, LENGTHS]
    found = Run(ground.folder / "placed", spec.config, launch_ray(spec))
    assert found.outcome.steps == 4
    assert [ran(found.folder, part) for part in range(3)] == [OF_ANSWERS, OF_LENGTHS, OF_LENGTHS]
    check_as_one_process(found, alone)


def check_as_one_process(found: Run, alone: Run) -> None:
    check_same(found, alone)
    assert distance(found.weights(4, "critic"), alone.weights(4, "critic")) < 1e-6
    ours, theirs = (
        sorted(str(row["uid"]) for row in read_samples(run.folder, 4)) for run in (found, alone)
    )
    assert ours == theirs and len(ours) == 4
    kept = [
        CheckpointStore(run.folder / "checkpoints").load().load("run")["nodes"]
        for run in (found, alone)
    ]
    assert kept[0]["tokens_left"] == kept[1]["tokens_left"] == {"steps": 4}


# The policy learns from rewards, and a second model from the same responses: how many of their
# tokens are left.
TWO_LEARNERS = """
from distflow import node
from distflow.graph import Pipeline
from distflow.pipelines import nodes


@node(writes="advantages")
def by_score(token_level_scores, response_mask):
    return token_level_scores.sum(-1, keepdim=True) * response_mask


@node(writes="returns")
def tokens_left(response_mask):
    return response_mask.flip(-1).cumsum(-1).flip(-1)


def two_learners():
    pipeline = Pipeline("two_learners").add_node("rollout", nodes.generate).add_node("reward", nodes.compute_reward)
    pipeline.add_node("old_log_probs", nodes.compute_old_log_prob, plane="training", only_forward_compute=True)
    pipeline.add_node("by_score", by_score, plane="training").add_node("learn_policy", nodes.train_actor)
    pipeline.add_node("tokens_left", tokens_left, plane="training")
    pipeline.add_node("guess_lengths", nodes.compute_value, only_forward_compute=True)
    return pipeline.add_node("learn_lengths", nodes.train_critic).build()
"""  # noqa: E501


def test_two_models_that_learn_from_one_rollout_have_devices_of_their_own(tmp_path, on_ray):
    ground = Playground(tmp_path)
    ground.write_critic()
    (tmp_path / "two.py").write_text(TWO_LEARNERS)
    own = (f"dag.pipeline={tmp_path}/two.py:two_learners", f"critic.model.path={tmp_path}/critic")
    steps = [key for key in STEPS[len(GONE) :] if "test_freq" not in key]
    keys = (*steps, "actor_rollout_ref.actor.use_kl_loss=false", *own)
    alone = ground.run("grpo", *keys, name="alone")
    config, spec = ground.spec("grpo", *keys, *RAY[:1], "trainer.n_gpus_per_node=2", name="apart")
    assert sorted(sorted(rank.engines) for rank in spec.plan.ranks) == [
        ["actor", "rollout"],
        ["critic"],
    ]
    found = Run(tmp_path / "apart", config, launch_ray(spec))
    check_same(found, alone)
    assert distance(found.weights(4, "critic"), alone.weights(4, "critic")) < 1e-6
