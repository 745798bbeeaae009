"""What a whole run calls right: its verifier's verdict, whatever penalties and weights make of the
reward."""

import pytest

from distflow import cli
from distflow.observe.run_reader import read_metrics, read_samples
from tests.e2e.runs import Playground
from tests.sparse_params import one_fast_in
from tests.user_code import forgotten

CHEAP = (
    "trust.check_rewards=false",
    "trainer.total_training_steps=1",
    "actor_rollout_ref.rollout.n=4",
)
PENALISED = ("reward.overlong.buffer_tokens=9", "reward.overlong.factor=2.0")
ASKED = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
PROGRAM = """
from distflow import NodeRole, Pipeline, node
from distflow.pipelines import nodes


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(map(ord, solution_str)) % 2 == 0
    return {"score": -3.0 + right / 4 + len(solution_str) / 100, "acc": right}


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    return compute_score(data_source, solution_str, ground_truth)


def compute_custom_reward(batch, config, **kwargs):
    batch["scores"] = [compute_score("", text, "")["score"] for text in batch["responses"]]
    batch["acc"] = [compute_score("", text, "")["acc"] for text in batch["responses"]]
    return batch


@node(writes=("scores", "acc"), role=NodeRole.REWARD)
def own(responses):
    made = [compute_score("", text, "") for text in responses]
    return [one["score"] for one in made], [float(one["acc"]) for one in made]


def make(reward):
    pipeline = Pipeline("own")
    pipeline.add_node("answer", nodes.generate)
    pipeline.add_node("reward", reward, node_role=NodeRole.REWARD, deps=["answer"])
    pipeline.add_node("filter", nodes.dynamic_sampling)
    pipeline.add_node("compare", nodes.compute_advantage)
    pipeline.add_node("learn", nodes.train_actor)
    return pipeline.build()


def by_sample():
    return make(compute_score)


def by_sample_async():
    return make(compute_score_async)


def by_batch():
    return make(compute_custom_reward)


def by_node():
    return make(own)
"""


@pytest.fixture
def ground(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten("own_rewards"):
        yield Playground(tmp_path, num_rows=8)


def held_out(ground: Playground) -> tuple[str, ...]:
    files = f"data.val_files={ground.folder}/rows.jsonl"
    return (
        files,
        "trainer.test_freq=1",
        "data.val_max_samples=3",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
    )


def validated(ground: Playground) -> dict[str, float]:
    (record,) = [record for record in read_metrics(ground.folder / "run") if record.kind == "val"]
    return {name: value for name, value in record.values.items() if name.startswith("val_correct")}


@pytest.mark.parametrize(
    "said", one_fast_in(3, ["{'score': -1.0, 'acc': 1}", "{'score': 0.7, 'acc': True}", "1.0"])
)
def test_a_right_answer_that_is_too_long_is_right(ground, said):
    ground.write_reward(f"{ASKED}return {said}\n")
    weighed = "reward.functions.default=[{name: custom, weight: 0.5}]"
    keys = ground.overrides("run", *CHEAP, *PENALISED, *held_out(ground), weighed)
    best = ("trainer.keep_best=true", "trainer.save_freq=1", "trainer.val_before_train=false")
    assert cli.main(["train", "grpo", *keys, *best]) == 0
    assert validated(ground) and set(validated(ground).values()) == {1.0}
    rows = read_samples(ground.folder / "run", 1, "val")
    assert {row["acc"] for row in rows} == {1.0} and max(row["score"] for row in rows) < 1.0


def test_a_wrong_answer_stays_wrong_whatever_else_pays(ground):
    ground.write_reward(f"{ASKED}return {{'score': 9.0, 'acc': False}}\n")
    assert (
        cli.main(
            [
                "train",
                "grpo",
                *ground.overrides("run", *CHEAP, *held_out(ground)),
                "trainer.val_before_train=false",
            ]
        )
        == 0
    )
    assert validated(ground) and set(validated(ground).values()) == {0.0}


@pytest.mark.slow
def test_the_filter_of_dapo_does_not_take_a_penalty_for_a_difference(ground, capsys):
    """All are right; their lengths, and so their scores, differ."""
    ground.write_reward(f"{ASKED}return 1.0\n")
    keys = ground.overrides("run", *CHEAP, *PENALISED)
    assert cli.main(["train", "dapo", *keys]) == 2
    assert "all_equal" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "train",
                "dapo",
                *keys,
                "algorithm.filter_groups.metric=score",
                "trainer.resume_mode=never",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    "builder", one_fast_in(2, ["by_sample", "by_sample_async", "by_batch", "by_node"])
)
def test_a_reward_of_the_user_s_own_is_filtered_and_validated_by_its_verdict(ground, builder):
    keys = [
        key
        for key in ground.overrides("run", *CHEAP)
        if not key.startswith(("reward.", "custom_reward_function."))
    ]
    chosen = (f"dag.pipeline=own_rewards:{builder}", "trainer.test_freq=1")
    more = (
        f"data.val_files={ground.folder}/rows.jsonl",
        "data.val_max_samples=3",
        "trainer.val_before_train=false",
    )
    keys = [key for key in keys if not key.startswith(("trainer.test_freq", "trust."))]
    assert (
        cli.main(
            ["train", "grpo", *keys, *chosen, *more, "actor_rollout_ref.actor.use_kl_loss=false"]
        )
        == 0
    )

    rows = read_samples(ground.folder / "run", 1)
    for start in range(0, len(rows), 4):
        rights = [row["acc"] for row in rows[start : start + 4]]
        assert set(rights) == {0.0, 1.0}
        assert rights == [
            float(sum(map(ord, row["response"])) % 2 == 0) for row in rows[start : start + 4]
        ]

    held_out = read_samples(ground.folder / "run", 1, "val")
    right = [sum(map(ord, row["response"])) % 2 == 0 for row in held_out]
    assert len(right) == 3 and validated(ground)["val_correct/all/mean"] == pytest.approx(
        sum(right) / 3
    )
