"""Online DPO: pairs of the policy's own responses, with every check, ahead of training and on
several ranks."""

from pathlib import Path

import pytest

from distflow import cli
from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground

ACTOR = "actor_rollout_ref.actor"
STEPS = "trainer.total_training_steps=3"
CHECKED = "trust.check_freq=1"


@pytest.fixture
def ground(tmp_path: Path) -> Playground:
    return Playground(tmp_path)


@pytest.mark.parametrize(
    "more",
    [(), ("async.max_staleness=1",), ("algorithm.preference_loss=simpo",)],
    ids=["in-turns", "ahead", "without-reference"],
)
def test_it_trains_on_its_own_pairs(ground: Playground, more: tuple[str, ...]) -> None:
    run = ground.run("online_dpo", STEPS, CHECKED, f"{ACTOR}.ppo_mini_batch_size=2", *more)
    first, *_, last = run.metrics()
    assert 0 <= first["pairs/ties_frac"] < 1
    assert first["preference/grad_norm"] > 0
    if "simpo" not in str(more):
        assert last["rewards/margins"] != 0
    proven = [event.fields["passed"] for event in read_events(run.folder) if event.kind == "checks"]
    wanted = {"responses", "rewards", "mini-batches", "loss", "gradients", "optimizer"}
    assert set(sum(proven, [])) >= wanted
    assert ("reference" in sum(proven, [])) == ("simpo" not in str(more))
    assert run.notes("warning") == []


def test_groups_that_all_tie_change_nothing(ground: Playground) -> None:
    ground.write_reward("def compute_score(solution_str):\n    return 0.5\n")
    run = ground.run("online_dpo", "trainer.total_training_steps=1")
    (only,) = run.metrics()
    assert only["pairs/ties_frac"] == 1.0 and only["preference/empty"] == 1.0


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(ground: Playground) -> None:
    keys = (STEPS, f"{ACTOR}.optim.lr=1e-2")
    alone = ground.run("online_dpo", *keys, name="alone")
    words = ground.overrides("both", *keys, "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    assert cli.main(["train", "online_dpo", *words]) == 0
    both = [
        record.values for record in read_metrics(ground.folder / "both") if record.kind == "train"
    ]
    for own, other in zip(alone.metrics(), both, strict=True):
        for name in ("preference/loss", "preference/grad_norm", "pairs/ties_frac"):
            assert other[name] == pytest.approx(own[name], rel=1e-3, abs=1e-6), name


def test_a_group_of_one_has_no_pair(ground: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    words = ground.overrides("bad", "actor_rollout_ref.rollout.n=1")
    assert cli.main(["train", "online_dpo", *words]) == 2
    assert "actor_rollout_ref.rollout.n" in capsys.readouterr().err
