"""Two policies in one graph: each ends where it ends alone, and both resume."""

from collections.abc import Sequence

import pytest

from distflow.cli import main
from distflow.config import load_config
from distflow.errors import UserError
from distflow.graph import PipelineError
from distflow.launch.make_spec import make_spec
from tests.e2e.cli_runs import Left, same_run
from tests.e2e.runs import Playground

PIPELINE = """
from distflow import node
from distflow.graph import Pipeline
from distflow.pipelines import nodes


@node(writes={"of_length": "sample"}, scope="group")
def weigh(response_mask):
    return 1 + response_mask.sum(-1).float() / 10


@node(writes="token_level_rewards", role="REWARD")
def weighted(token_level_scores, of_length, *, sign: float = 1.0):
    return sign * token_level_scores * of_length[:, None]


def path(pipeline, name, sign=1.0, **own):
    pipeline.add_node(f"{name}_rollout", nodes.generate, **own)
    pipeline.add_node(f"{name}_rewards", weighted, sign=sign, **own)
    pipeline.add_node(f"{name}_old", nodes.compute_old_log_prob, plane="training", only_forward_compute=True, **own)
    pipeline.add_node(f"{name}_advantages", nodes.compute_advantage, plane="training", **own)
    pipeline.add_node(f"{name}_train", nodes.train_actor, **own)
    return pipeline


def shared(pipeline):
    return pipeline.add_node("score", nodes.compute_reward).add_node("weigh", weigh)


def both():
    pipeline = path(shared(Pipeline("both")), "actor", policy="actor")
    return path(pipeline, "policy_b", -1.0, policy="policy_b").build()


def first():
    return path(shared(Pipeline("first")), "actor").build()


def second():
    return path(shared(Pipeline("second")), "policy_b", -1.0).build()


def untrained():
    pipeline = shared(Pipeline("untrained")).add_node("rollout", nodes.generate)
    pipeline.add_node("old", nodes.compute_old_log_prob, plane="training", only_forward_compute=True)
    pipeline.add_node("advantages", nodes.compute_advantage, plane="training")
    return pipeline.add_node("learn", nodes.train_actor, policy="actor").build()


def unanswered():
    return path(shared(Pipeline("unanswered")), "actor", policy="actor").build()


def meeting():
    pipeline = path(shared(Pipeline("meeting")), "actor", policy="actor")
    pipeline.add_node("other_rollout", nodes.generate, ["actor_train"], policy="policy_b")
    return pipeline.build()
"""  # noqa: E501


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    ground = Playground(tmp_path_factory.mktemp("policies"))
    Playground(ground.folder / "b", hidden_size=96)
    (ground.folder / "graphs.py").write_text(PIPELINE)
    return ground


def overrides(ground: Playground, name: str, pipeline: str, *more: str) -> list[str]:
    return ground.overrides(
        name,
        f"dag.pipeline={ground.folder}/graphs.py:{pipeline}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.optim.scheduler=constant",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        *more,
    )


def both(ground: Playground, name: str, *more: str) -> list[str]:
    policy_b = (
        f"dag.policies={{policy_b: {{model: {{path: {ground.folder}/b/model}}, actor.optim.lr: "
        f"1e-2}}}}"
    )
    return overrides(ground, name, "both", policy_b, *more)


def left(ground: Playground, name: str) -> Left:
    return Left(ground.folder / name)


def other_than_names(run: Left) -> tuple[object, ...]:
    metrics = {key: dict(row.items()) for key, row in run.metrics().items()}
    return metrics, run.trained_rows(), run.group_counts()


@pytest.mark.slow
def test_each_policy_ends_where_it_ends_alone_and_both_resume(ground, capsys):
    model_b = f"actor_rollout_ref.model.path={ground.folder}/b/model"
    assert main(["train", "grpo", *overrides(ground, "alone-actor", "first")]) == 0
    lr = "actor_rollout_ref.actor.optim.lr=1e-2"
    assert main(["train", "grpo", *overrides(ground, "alone-policy_b", "second", model_b, lr)]) == 0
    assert main(["train", "grpo", *both(ground, "whole")]) == 0
    assert main(["train", "grpo", *both(ground, "resumed", "trainer.total_training_steps=1")]) == 0
    assert left(ground, "resumed-policy_b").checkpoint.step == 1
    assert main(["train", "grpo", *both(ground, "resumed")]) == 0

    for policy in ("actor", "policy_b"):
        alone = left(ground, f"alone-{policy}")
        whole = left(ground, f"whole-{policy}")
        ours = alone.tensors()
        theirs = whole.tensors()
        assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
        assert other_than_names(alone) == other_than_names(whole)
        same_run(whole, left(ground, f"resumed-{policy}"))

    trained = [left(ground, f"whole-{policy}").trained_rows() for policy in ("actor", "policy_b")]
    assert trained[0] == trained[1], "the rows are shared"
    capsys.readouterr()
    assert main(["train", "grpo", *both(ground, "whole")]) == 0
    said = capsys.readouterr().out
    assert (
        "training policy actor" in said
        and "training policy policy_b" in said
        and "step 2/2" not in said
    )


def test_nothing_starts_where_a_later_policy_cannot(ground, capsys):
    nowhere = "dag.policies={policy_b: {model: {path: /nowhere/at/all}}}"
    assert main(["train", "grpo", *overrides(ground, "never", "both", nowhere)]) == 2
    said = capsys.readouterr().err
    assert "dag.policies.policy_b" in said and "there is no folder" in said
    assert (
        main(
            [
                "train",
                "grpo",
                *both(ground, "never", "+dag.policies.policy_b.rollout.kv_on_update=recompute"),
            ]
        )
        == 2
    )
    assert (
        "actor_rollout_ref.rollout.kv_on_update (dag.policies.policy_b" in capsys.readouterr().err
    )
    assert not list(ground.folder.glob("never*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("pipeline", "policy", "said"),
    [
        (
            "untrained",
            "policy_b",
            "'untrained' trains .*'policy_b'",
        ),
        ("unanswered", "policy_b", "'response.*path .*'policy_b'"),
        (
            "meeting",
            "actor",
            "'other_rollout' .*'policy_b' .*'actor_train' .*'actor'",
        ),
    ],
)
def test_a_graph_that_cannot_be_split_is_refused(ground, pipeline, policy, said):
    with pytest.raises(PipelineError, match=said):
        spec_of(
            both(
                ground,
                "never",
                f"dag.pipeline={ground.folder}/graphs.py:{pipeline}",
                f"dag.policy={policy}",
            )
        )


def test_a_policy_that_the_config_lacks_is_refused(ground):
    with pytest.raises(PipelineError, match=r"'policy_b', .*dag\.policies=\{policy_b"):
        spec_of(overrides(ground, "never", "both"))


def test_one_run_trains_one_policy(ground):
    with pytest.raises(UserError, match=r"dag\.policy .* actor, policy_b"):
        spec_of(both(ground, "never"))
    spec = spec_of(both(ground, "never", "dag.policy=policy_b"))
    assert spec.config.actor_rollout_ref.model.path == str(ground.folder / "b" / "model")
    assert spec.config.actor_rollout_ref.actor.optim.lr == 1e-2
    names = {node.node_id for node in spec.pipeline().nodes}
    assert {"score", "weigh", "policy_b_train"} <= names and not any(
        name.startswith("actor_") for name in names
    )


def spec_of(overrides: Sequence[str]):  # noqa: ANN201
    return make_spec(load_config("grpo", overrides), say=lambda line: None)
