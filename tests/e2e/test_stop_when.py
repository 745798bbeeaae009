"""`trainer.stop_when`: a run ends at a metric's value, on all ranks, as a finished run."""

from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.observe.run_reader import read_events, read_metrics
from tests.e2e.runs import Playground, notes

CHEAP = ("trust.check_rewards=false", "actor_rollout_ref.rollout.n=2", "trainer.total_epochs=3")
ODD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return 1.0 if sum(map(ord, solution_str)) % 2 else 0.25\n"
)


@pytest.fixture
def ground(tmp_path):
    """Nine steps of four prompts."""
    playground = Playground(tmp_path, num_rows=12)
    playground.write_reward(ODD)
    return playground


def steps(folder: Path, kind: str = "train") -> list[int]:
    return [record.step for record in read_metrics(folder) if record.kind == kind]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [2, pytest.param(0, marks=pytest.mark.by_hand)])
def test_a_run_ends_validated_and_saved_at_the_first_step_with_the_value(ground, staleness):
    keys = (
        *CHEAP,
        f"async.max_staleness={staleness}",
        f"data.val_files={ground.folder}/rows.jsonl",
    )
    keys += ("trainer.save_freq=100", "trainer.test_freq=100")
    whole = metrics(ground.run("grpo", *keys, name="whole").folder)
    falling = [f"{step['actor/lr'] + 1e-9:.7g}" for step in whole]
    run = ground.run("grpo", *keys, f"trainer.stop_when=actor/lr<={falling[2]}")
    assert run.outcome.steps == 3 and not run.outcome.stopped
    assert (
        steps(run.folder) == [1, 2, 3]
        and steps(run.folder, "val") == [3]
        and saved(run.folder) == ["step-000003"]
    )
    why = f"actor/lr is {whole[2]['actor/lr']:g} (trainer.stop_when=actor/lr <= {falling[2]})"
    assert notes(run.folder, "info") == [f"the run ends after step 3: {why}"]
    end = read_events(run.folder)[-1]
    assert end.fields["status"] == "finished" and end.fields["why"] == why
    assert "It ended after 3 of 9 steps: actor/lr is " in run.outcome.report.read_text()

    # It is done, until the condition changes; then it goes on as if it had never been there.
    again = ground.run("grpo", *keys, f"trainer.stop_when=actor/lr <= {falling[2]}")
    assert again.outcome.steps == 3 and steps(run.folder) == [1, 2, 3]
    longer = ground.run("grpo", *keys, f"trainer.stop_when=actor/lr <= {falling[4]}")
    assert longer.outcome.steps == 5 and steps(run.folder) == [1, 2, 3, 4, 5]
    if staleness == 0:
        assert metrics(longer.folder) == whole[:5]


def metrics(folder: Path) -> list[dict[str, float]]:
    """Of the training steps, without times and sizes."""
    own = ("timing_s", "throughput", "memory", "perf")
    return [
        {name: value for name, value in record.values.items() if not name.startswith(own)}
        for record in read_metrics(folder)
        if record.kind == "train"
    ]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["trainer.stop_when=val_correct/all/mean == 1"], "not a condition on a metric"),
        (["trainer.stop_when=reward/mean_score > much"], "not a condition on a metric"),
        (["trainer.stop_when=a > 1 and b > 2"], "not a condition on a metric"),
        (["trainer.stop_when=a >= nan"], "not a condition on a metric"),
        (
            ["trainer.stop_when=val_correct/all/mean>=0.9"],
            "validation .* metric",
        ),
        (
            [
                "trainer.stop_when=val/errors>0",
                "data.val_files={}/rows.jsonl",
                "trainer.test_freq=-1",
            ],
            "test_freq disables",
        ),
    ],
)
def test_a_condition_that_cannot_hold_is_refused_before_the_start(ground, keys, words):
    with pytest.raises(UserError, match=words):
        ground.spec("grpo", *CHEAP, *(key.format(ground.folder) for key in keys))
