"""Plans that a run calibrates: the rates are found that its folder was made with, and a real run is
predicted as it was."""

import json
from statistics import median

import pytest

from distflow.cli import main
from distflow.errors import UserError
from distflow.launch.plans.run_planner import RunPlanner
from distflow.observe.run_reader import read_metrics
from tests.launch.plans.measured_folder import KNOWN, TINY, write


@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.actor.use_kl_loss=true",)])
def test_the_rates_of_a_run_are_found(tmp_path, more):
    run = write(tmp_path / "run", *more)
    planner = RunPlanner("quickstart_grpo", [*TINY, *more], measured_in=str(tmp_path / "run"))
    found = planner.run.times.rates
    for name in ("generate", "forward", "update", "rest", "score", "libraries"):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name
    again = planner.run
    assert again.step_seconds == pytest.approx(run.step_seconds, rel=0.02)
    assert again.fullest.peak == pytest.approx(run.fullest.peak, rel=0.02)
    assert again.phases == pytest.approx(run.phases, rel=0.03, abs=1e-3)


def test_another_config_scales_what_was_measured(tmp_path):
    run = write(tmp_path / "run")
    twice = ["data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128"]
    more = RunPlanner("quickstart_grpo", [*TINY, *twice], measured_in=str(tmp_path / "run")).run
    assert more.phases["train_step"] == pytest.approx(2 * run.phases["train_step"], rel=0.1)
    assert more.phases["rest"] == pytest.approx(2 * run.phases["rest"], rel=0.05)
    longer = RunPlanner(
        "quickstart_grpo", [*TINY, "data.max_response_length=52"], measured_in=str(tmp_path / "run")
    )
    assert longer.run.lengths.response == 10, "all responses ended by themselves"


@pytest.mark.slow
def test_a_run_is_predicted_as_it_was_and_calibrates_the_next(tmp_path):
    quiet = [
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.device=cpu",
    ]
    small = [
        *TINY,
        *quiet,
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]
    first, second = (f"trainer.default_local_dir={tmp_path / name}" for name in ("first", "second"))
    assert main(["train", "quickstart_grpo", *small, "trainer.total_training_steps=6", first]) == 0
    run = RunPlanner("quickstart_grpo", small, measured_in=str(tmp_path / "first")).run
    steps = [each for each in read_metrics(tmp_path / "first") if each.kind == "train"]
    seconds = median(each.values["timing_s/step"] for each in steps[1:])
    assert run.step_seconds == pytest.approx(seconds, rel=0.3)
    assert f"{run.times.rates.generate:.3g}" != "1" and run.times.rates.libraries
    again = [
        *small,
        "trainer.total_training_steps=2",
        f"trainer.plan_from={tmp_path / 'first'}",
        second,
    ]
    assert main(["train", "quickstart_grpo", *again]) == 0
    predicted = json.loads((tmp_path / "second/plan.json").read_text())["predicted"]
    assert predicted["calibrated_by"] == str(tmp_path / "first")
    assert predicted["phases"]["train_step"] == pytest.approx(run.phases["train_step"], rel=1e-6)


@pytest.mark.parametrize("shape", [None, {"hidden": "x"}, {"vocabulary": 0}])
def test_a_damaged_plan_is_named(tmp_path, shape):
    write(tmp_path / "run")
    file = tmp_path / "run/plan.json"
    plan = json.loads(file.read_text())

    shapes = plan["predicted"]["shapes"]
    if shape is None:
        shapes.clear()
    else:
        shapes["actor"] |= shape

    file.write_text(json.dumps(plan))
    planner = RunPlanner("quickstart_grpo", TINY, measured_in=str(tmp_path / "run"))
    with pytest.raises(UserError, match="plan.json is damaged"):
        _ = planner.run


def test_a_calibrated_plan_does_not_need_the_models_folder(tmp_path, capsys):
    write(tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(
        config.replace("builtin:tiny-arithmetic", "builtin:not-here", 1)
    )
    assert main(["plan", "--from", str(tmp_path / "run"), "reward.num_workers=4"]) == 0
    assert "time line of a step of" in capsys.readouterr().out
